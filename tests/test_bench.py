"""The notebooks under nbs/bench through `hsmoe bench`, with a handful of steps: tables, pictures, sentences and the record."""
import json, math

import pytest

from hsmoe.bench import newest_record, taken_by

from conftest import ROOT
from test_notebooks import outputs

QUESTIONS = {"Quantisation": 5, "Depth": 4, "Gradient of further depths": 5, "Entropy term λ": 3, "Router σ": 2, "Straight-through": 3, "Balancing bias": 3, "Optimiser states": 4}
AS_TINY = ["Quantisation: 5b policy", "Depth: AdaMTP", "Gradient of further depths: 0.3", "Entropy term λ: 0", "Router σ: 1/sqrt(d)", "Straight-through: ste", "Balancing bias: 0.005", "Optimiser states: dynamic"]


@pytest.fixture
def characters(tmp_path):
    path = tmp_path / "a few lines.txt"
    path.write_text("".join(f"{name}:\nI count {i} and {i * i}, and so on.\n\n" for i in range(80) for name in ("FIRST", "SECOND")), encoding="utf-8")
    return path


def test_quality(hsmoe_cli, tmp_path, small_overrides, characters):
    few = ["model.d_model=32", "model.n_heads=1", "model.n_layers=1", "model.max_seq_len=32", "data.seq_len=32", "model.expert_inner=16", "model.dense_inner=16", "train.val_tokens=256", "train.final_val_tokens=256"]
    given = dict(steps=5, seeds=[3], overrides=json.dumps(small_overrides + few), trials="kept/trials.jsonl", results_dir="some results", shakespeare=characters, shakespeare_overrides=json.dumps(few + ["train.length=3 steps"]))
    bench = lambda out: hsmoe_cli("bench", "quality", "--output", out, *(word for k, v in given.items() for word in ("-p", k, v)), timeout=900)
    result = bench("out/quality.ipynb")
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (tmp_path / "some results").iterdir()
    record = json.loads(path.read_text())
    assert path.name == f"quality-cpu-{record['date']}.json" and record["bench"] == "quality" and record["settings"]["steps"] == 5
    assert all(r.keys() == {"name", "value", "unit", "peer", "peer_value", "ratio", "of_ceiling", "must", "aim"} for r in record["rows"])
    values = {r["name"]: r["value"] for r in record["rows"]}
    losses = {n.removesuffix(" val_loss"): v for n, v in values.items() if n.endswith(" val_loss")}
    bnb = "Optimiser states: bnb" in losses
    assert len(losses) == sum(QUESTIONS.values()) - (not bnb) and all(3 < v < 7 for v in losses.values())
    assert len({losses[n] for n in AS_TINY}) == 1, "what the preset says is trained once"
    assert len(set(losses.values())) == len(losses) - len(AS_TINY) + 1, "every other answer is a run of its own"
    assert values["qat_cost_percent"] == pytest.approx(100 * (losses["Quantisation: 5b policy"] / losses["Quantisation: off"] - 1))
    assert {"shakespeare_cpu_val_loss", "shakespeare_cpu_seconds", "adamtp_convergence_by_tokens", "Gradient of further depths: 1.0 whole_loss"} <= values.keys()
    shakespeare = next(r for r in record["rows"] if r["name"] == "shakespeare_cpu_val_loss")
    assert shakespeare["must"] == 1.88 and shakespeare["ratio"] == shakespeare["value"] / shakespeare["peer_value"]

    made = outputs(tmp_path / "out/quality.ipynb")
    pages = [o["data"]["text/markdown"] for o in made if "text/markdown" in o.get("data", {})]
    tables = [p for p in pages if "| presets |" in p]
    assert [p.split(" | ")[0].removeprefix("| ") for p in tables] == list(QUESTIONS) and "None" not in "".join(pages)
    assert all("`tiny`" in p for p in tables)
    assert sum("image/png" in o.get("data", {}) for o in made) == 4
    (defaults,) = [p for p in pages if "the table says" in p]
    assert all(f"| {q} |" in defaults for q in QUESTIONS)

    kept = (tmp_path / "kept/trials.jsonl").read_text()          # a second bench trains nothing again
    assert bench("out/again.ipynb").returncode == 0
    assert (tmp_path / "kept/trials.jsonl").read_text() == kept and len(list((tmp_path / "some results").iterdir())) == 1


@pytest.mark.parametrize("preset", ["tiny", "5b"])
def test_defaults_follow_the_newest_record(preset):
    settings = newest_record(ROOT / "nbs/bench/results", "quality", "cpu")["settings"]
    assert settings["questions"].keys() == QUESTIONS.keys() and len(settings["seeds"]) >= 3 and settings["steps"] >= 1000
    for question, answers in settings["questions"].items():
        takes = taken_by(preset, answers)
        assert takes == settings["chosen"][question][preset] or settings["reasons"].get(question), f"{preset} takes {takes} for {question}, the record says {settings['chosen'][question][preset]}, and no reason is given"


@pytest.mark.parametrize("name, card", [("qat_cost_percent", "cpu"), ("shakespeare_cpu_val_loss", "cpu"), ("shakespeare_gpu_val_loss", "h200")])
def test_records_hold_what_must_hold(name, card):
    (found,) = [r for r in newest_record(ROOT / "nbs/bench/results", "quality", card)["rows"] if r["name"] == name]
    assert found["must"] is not None and found["value"] <= found["must"]


def test_the_kernels_were_as_fast_as_they_must_be():
    "The records of one H200: at least 85 % of a copy and twice torch.compile; the optimiser's step within its milliseconds."
    qdq = {r["name"]: r for r in newest_record(ROOT / "nbs/bench/results", "quant", "h200")["rows"]}
    for name in ("nvfp4_1x16", "nvfp4_8x8", "nvfp4_16x16", "mxfp8_e4m3_1x32", "ue5m3_1x32"):
        assert qdq["qdq_" + name]["value"] >= qdq["qdq_" + name]["must"] and qdq["qdq_" + name]["of_ceiling"] >= 0.85 and qdq["qdq_" + name]["ratio"] >= 2
    adamw = {r["name"]: r for r in newest_record(ROOT / "nbs/bench/results", "optimizer", "h200")["rows"]}
    for name, must in dict(adamw8bit_plain=4.8, adamw8bit_nvfp4_8x8=5.3).items():
        assert adamw[name]["must"] == must >= adamw[name]["value"] and adamw[name + "_extra_memory"]["value"] < 1


def test_moe(hsmoe_cli, tmp_path):
    given = dict(device="cpu", tokens=60, d_model=32, n_experts=5, top_k=3, inner=24, dense_inner=16, n_shared=2, results_dir="some results")
    result = hsmoe_cli("bench", "moe", "--output", "out/moe.ipynb", *(word for k, v in given.items() for word in ("-p", k, v)), timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (tmp_path / "some results").iterdir()
    record = json.loads(path.read_text())
    rows, settings = {r["name"]: r for r in record["rows"]}, record["settings"]
    assert path.name == f"moe-cpu-{record['date']}.json" and record["ceilings"].keys() == {"matmul_tflops", "dense_tflops", "copy_gb_s"}
    assert settings["flops"] == dict(routed=4 * 60 * 3 * 32 * 24, block=4 * 60 * 32 * 24 * 5 + 6 * 60 * 32 * 16 + 2 * 60 * 32 * 5)
    assert {f"{what}_{way}" for what in ("routed", "block", "grouped_mm_eager", "python_loop") for way in ("fwd", "fwdbwd")} <= rows.keys()
    assert {f"routed_{way}_{kind}" for way in ("fwd", "fwdbwd") for kind in ("zipf", "onehot", "n32", "n48", "reference")} | {"routed_fwdbwd_adding"} <= rows.keys()
    assert all(0 < r["value"] < math.inf and r["must"] is None for r in record["rows"] if r["unit"] == "TFLOP/s"), "a small shape on a CPU has nothing to reach"
    assert all(rows[f"error_{what}_{backend}"]["value"] < 1e-6 for what in ("forward", "dx", "dw_in", "db_in", "dw_out", "db_out") for backend in ("reference", "grouped"))
    best = max(("grouped_mm_eager", "python_loop"), key=lambda n: rows[f"{n}_fwd"]["value"])
    if settings["notes"]["peers not timed"].keys() >= {"transformers"}: assert rows["routed_fwd"]["peer"] == best and rows["routed_fwd"]["ratio"] == rows["routed_fwd"]["value"] / rows[f"{best}_fwd"]["value"]
    assert settings["notes"]["backends not usable"]["hopper"] == "Hopper kernels need a GPU"
    assert sum(p["flops"] for p in settings["pieces"]) == 3 * settings["flops"]["block"]
    made = outputs(tmp_path / "out/moe.ipynb")
    assert sum("image/png" in o.get("data", {}) for o in made) == 2 and sum("text/markdown" in o.get("data", {}) for o in made) == 4


def test_layer(hsmoe_cli, tmp_path):
    given = dict(device="cpu", rows=48, vocab_size=200, d_model=16, sequences=1, seq_len=24, n_heads=2, head_dim=16, piece_sequences=1, results_dir="some results")
    result = hsmoe_cli("bench", "layer", "--output", "out/layer.ipynb", *(word for k, v in given.items() for word in ("-p", k, v)), timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (tmp_path / "some results").iterdir()
    record = json.loads(path.read_text())
    rows, settings = {r["name"]: r for r in record["rows"]}, record["settings"]
    assert {"linear_ce", "linear_ce_adding", "eager_linear_ce", "attention_online", "attention_normalised", "attention_online_core_ms", "sdpa_math_ms"} <= rows.keys() and all(r["must"] is None for r in record["rows"])
    assert settings["head"] == dict(M=48, D=16, V=200) and "liger" in settings["notes"]["peers not timed"] and rows["linear_ce"]["ratio"] == rows["linear_ce"]["value"] / rows["linear_ce"]["peer_value"]
    gathered = next(p for p in settings["pieces"] if p["name"] == "gather")
    assert gathered["bytes"] == (1 + 2) * 24 * 64 * 4 and all(p["ms"] > 0 for p in settings["pieces"])      # a token is read once and written twice
    made = outputs(tmp_path / "out/layer.ipynb")
    assert sum("image/png" in o.get("data", {}) for o in made) == 1 and sum("text/markdown" in o.get("data", {}) for o in made) == 2


def test_training(hsmoe_cli, tmp_path, small_overrides, small_corpus):
    given = dict(device="cpu", steps=6, overrides=json.dumps(small_overrides + ["train.length=6 steps"]), corpus=small_corpus, val_tokens=512, results_dir="some results")
    result = hsmoe_cli("bench", "training", "--output", "out/training.ipynb", *(word for k, v in given.items() for word in ("-p", k, v)), timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (tmp_path / "some results").iterdir()
    record = json.loads(path.read_text())
    rows, series = {r["name"]: r["value"] for r in record["rows"]}, record["settings"]["series"]
    assert rows["steps"] == len(series) == 6 and rows["val_loss"] < rows["val_loss_before"] and rows["clipped_percent"] == 100 * sum(s["grad_norm"] > 1 for s in series) / 6
    assert all(math.isfinite(s["loss"]) and s["worst_load"] >= s["load"] >= 1 for s in series) and rows["next_token_last_fifth"] == series[-1]["next_token"]


def test_a_bench_that_cannot_run(hsmoe_cli, tmp_path, small_overrides):
    result = hsmoe_cli("bench", "qualitty")
    assert result.returncode == 2 and result.stderr.strip() == "hsmoe: there is no bench 'qualitty'; known are comm, data, documents, formats, four, layer, moe, muon, optimizer, quality, quant, router, speculative, step, training"
    result = hsmoe_cli("bench", "quality", "--output", "out/quality.ipynb", "-p", "steps", "1", "-p", "overrides", json.dumps(small_overrides + ["data.sources=[no/such/corpus]"]))
    assert result.returncode == 2 and "no/such/corpus" in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr.splitlines()[-1]
    assert not (tmp_path / "nbs").exists()
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "runs" / "quality-trials.jsonl").write_text("something else\n")
    result = hsmoe_cli("bench", "quality", "--output", "out/quality.ipynb", "-p", "steps", "1", "-p", "overrides", json.dumps(small_overrides))
    assert result.returncode == 2 and "is not a file of trials" in result.stderr.splitlines()[-1]
