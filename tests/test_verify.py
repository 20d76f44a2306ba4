"""The verifier (SPEC V-01, V-02, V-10 to V-17): every run gets a verdict on every target, with a reason, whatever it ran on."""
import json, math

import pytest

from hsmoe.config import load_config, resolve
from hsmoe.train.loop import run_training
from hsmoe.train.telemetry import read_metrics
from hsmoe.train.verify import Row, counts, milestones, published, table, verify, verify_run

FIVE = load_config("5b")
TOKENS = resolve(FIVE).steps * resolve(FIVE).tokens_per_step
GOOD = dict(processes=4, tokens=TOKENS, steps=1788, seconds=7320.0, tokens_per_s=TOKENS / 7320, mean_depth=3.0, clip_rate=0.01, peak_memory_bytes=270e9, val_loss=math.log(30),
            comm={"dispatch": {"a, bf16": {"exposed_ms": 20.0}, "b, bf16": {"exposed_ms": 10.0}}})
B300 = "NVIDIA B300 SXM6 AC"
IDS = ["V-01"] * 5 + ["V-02"] * 3 + ["V-10", "V-11", "V-12", "V-13", "V-14", "V-15", "V-16", "V-17"]


def rows_of(cfg=FIVE, device=B300, records=(), scores=None, **changed):
    rows = verify(GOOD | changed, cfg, list(records), device, scores)
    assert [r.id for r in rows] == IDS and all(r.verdict in ("pass", "outside", "not measurable") and r.reason for r in rows)
    return rows


def one(id, **kw):
    [row] = [r for r in rows_of(**kw) if r.id == id]
    return row


@pytest.mark.parametrize("id,changed,verdict", [
    ("V-10", dict(tokens_per_s=1.8e6), "pass"), ("V-10", dict(tokens_per_s=1.79e6), "outside"), ("V-11", dict(tokens_per_s=1.8e6), "pass"), ("V-11", dict(tokens_per_s=1.7e6), "outside"), ("V-11", dict(tokens_per_s=9e6), "pass"),
    ("V-12", dict(seconds=1788 * 4.5), "pass"), ("V-12", dict(seconds=1788 * 4.6), "outside"), ("V-12", dict(seconds=1788 * 1.0), "pass"),
    ("V-13", dict(comm={"x": {"y": {"exposed_ms": 40.0}}}), "pass"), ("V-13", dict(comm={"x": {"y": {"exposed_ms": 41.0}}}), "outside"),
    ("V-14", dict(tokens_per_s=4 * 0.6 * 7000e12 / 10.716e9 * 1.001), "pass"), ("V-14", dict(tokens_per_s=4 * 0.6 * 7000e12 / 10.716e9 * 0.999), "outside"),
    ("V-15", dict(peak_memory_bytes=288e9), "pass"), ("V-15", dict(peak_memory_bytes=289e9), "outside"), ("V-16", dict(clip_rate=0.0499), "pass"), ("V-16", dict(clip_rate=0.05), "outside"),
    ("V-17", dict(seconds=36000.0), "pass"), ("V-17", dict(seconds=36001.0), "outside"), ("V-10", dict(tokens_per_s=math.nan), "not measurable")])
def test_bounds(id, changed, verdict):
    assert one(id, **changed).verdict == verdict


@pytest.mark.parametrize("id,kw,reason", [
    ("V-10", dict(device="NVIDIA H200", processes=1), "4 × NVIDIA B300, and this was 1 × NVIDIA H200"), ("V-11", dict(device=None, processes=2), "2 processes on a CPU"), ("V-10", dict(cfg=load_config("bench")), "the model of preset 5b"),
    ("V-12", dict(cfg=load_config("5b", ["train.batch_sequences=1024"])), "steps of 2,048 sequences, and these had 1,024"), ("V-13", dict(comm={}), "no traffic was recorded"), ("V-13", dict(comm={}, processes=1), "one process does not communicate"),
    ("V-14", dict(device=None), "a CPU has no published rate"), ("V-14", dict(device="NVIDIA A10"), "no rate of NVIDIA A10"), ("V-15", dict(device=None), "this was a CPU"), ("V-15", dict(cfg=load_config("tiny")), "preset 5b"),
    ("V-17", dict(tokens=TOKENS // 2), "this run read 7,499,415,552")])
def test_what_cannot_be_measured_says_why(id, kw, reason):
    row = one(id, **kw)
    assert row.verdict == "not measurable" and reason in row.reason, row


def test_utilisation_of_any_published_card():
    row = one("V-14", device="NVIDIA H200", cfg=load_config("bench"), processes=1, tokens_per_s=30_000.0)
    assert row.verdict == "outside" and row.unit == "%" and "of BF16" in row.reason and "FP8" in row.metric
    assert "of FP4" in one("V-14").reason and published("NVIDIA GB200")["fp4"] == 9000.0


def test_perplexity_at_milestones():
    per_step, most = resolve(FIVE).tokens_per_step, [p for _, p in milestones(FIVE.printed)]
    assert most == [85, 45, 35, 31, 32] and milestones(FIVE.printed)[1][0] == 3_750_000_000
    steps = [math.ceil(n / per_step) for n, _ in milestones(FIVE.printed)]
    def verdicts(records, **kw): return [r.verdict for r in rows_of(records=records, **kw) if r.id == "V-01"]
    good = [dict(step=n, val_loss=math.log(p - 1)) for n, p in zip(steps[:4], most)]
    assert verdicts(good) == ["pass"] * 5
    assert verdicts(good[:2] + [dict(step=steps[2], val_loss=math.log(36))] + good[3:]) == ["pass", "pass", "outside", "pass", "pass"]
    assert verdicts(good[1:]) == ["not measurable"] + ["pass"] * 4 and verdicts(good, val_loss=math.log(33)) == ["pass"] * 4 + ["outside"]
    assert verdicts([dict(step=steps[0], val_loss="nan")])[0] == "not measurable"
    assert verdicts(good, tokens=steps[2] * per_step)[3:] == ["pass", "not measurable"], "what was validated counts, and the end was not reached"
    assert set(verdicts(good, cfg=load_config("5b", ["data.tokenizer=bpe"]))) == {"not measurable"}


def test_benchmarks():
    def found(**scores): return [r.verdict for r in rows_of(scores=scores) if r.id == "V-02"]
    assert found(mmlu=0.45, humaneval=0.3, gsm8k=0.2) == ["pass"] * 3 and found(mmlu=0.44, gsm8k=0.5) == ["outside", "not measurable", "pass"] and found() == ["not measurable"] * 3


def test_a_run_on_a_cpu(tmp_path, small_corpus, small_overrides, hsmoe_cli):
    run = tmp_path / "run"
    done = hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", run, *small_overrides, "train.length=3 steps", "model.n_layers=1", "train.val_tokens=128", "train.final_val_tokens=128")
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((run / "report.json").read_text())
    rows = [Row(**r) for r in report["verifier"]]
    assert [r.id for r in rows] == IDS and report["device"] is None and len(report["manifest_sha256"]) == 64 and report["guards"] == [] and report["resumes"] == 0
    assert [r.id for r in rows if r.verdict != "not measurable"] == ["V-16"] and rows == verify_run(run)
    assert counts(rows) in done.stdout and len(table(rows).splitlines()) == 17
    assert [r["outside"] for r in read_metrics(run) if "outside" in r] == [["V-16"] if report["clip_rate"] >= 0.05 else []]
    (run / "eval.json").write_text(json.dumps(dict(val_loss=3.0, mmlu=0.5)))
    assert [r.verdict for r in verify_run(run) if r.id == "V-02"] == ["pass", "not measurable", "not measurable"]
