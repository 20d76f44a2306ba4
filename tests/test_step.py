"""Whole steps timed: the page nbs/bench/step, the profile against PyTorch's own sums, and, on a GPU, that every kernel finds its group."""
import json, math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hsmoe.config import load_config
from hsmoe.data.corpus import Corpus
from hsmoe.speed_step import VARIANTS, bench_state, check_fits, expected_bytes, is_full, read_trace, time_plain, time_steps, token_flops, trace_steps, with_overrides
from hsmoe.train.loop import TrainingError, make_optimizer
from hsmoe.model.hybrid import build_model

from conftest import ROOT
from test_notebooks import outputs


def test_page(hsmoe_cli, tmp_path, small_overrides, small_corpus):
    given = dict(device="cpu", overrides=json.dumps(small_overrides), corpus=small_corpus, steps=4, warmup=1, variant_steps=2, results_dir="some results")
    result = hsmoe_cli("bench", "step", "--output", "out/step.ipynb", *(word for k, v in given.items() for word in ("-p", k, v)), timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    (path,) = (tmp_path / "some results").iterdir()
    record = json.loads(path.read_text())
    rows, s = {r["name"]: r for r in record["rows"]}, record["settings"]
    assert path.name == f"step-cpu-{record['date']}.json" and record["ceilings"].keys() == {"matmul_tflops", "copy_gb_s"} and not s["notes"]["variants not timed"]
    ends = ["", *(f"_{v}" for v in VARIANTS)]
    assert {f"step_tiny_{what}{end}" for what in ("mfu_percent", "tokens_per_s", "ms") for end in ends} | {"step_tiny_tokens_per_s_plain", "step_tiny_quantisation_percent", "step_tiny_attention_quantisation_percent"} <= rows.keys()
    assert all(math.isfinite(r["value"]) and r["must"] is None for r in record["rows"]), "a small model on a CPU has nothing to reach"
    assert len(s["seconds"]) == 4 and s["tokens"] == 4 * 64 and all(t > 0 for t in s["seconds"])
    tokens_per_s = rows["step_tiny_tokens_per_s"]["value"]
    assert tokens_per_s == pytest.approx(256 / sorted(s["seconds"])[1], rel=1) and rows["step_tiny_tokens_per_s"]["ratio"] == tokens_per_s / rows["step_tiny_tokens_per_s_plain"]["value"]
    assert rows["step_tiny_mfu_percent"]["value"] == pytest.approx(100 * 3 * sum(s["flops"].values()) * tokens_per_s / 1e12 / record["ceilings"]["matmul_tflops"])
    assert s["flops"]["routed"] == 4 * 2 * 2 * 64 * 32 and s["flops"]["head"] == 2 * s["depth"][0] * 64 * 300 and 2 < s["depth"][0] < 4
    assert {"attention", "experts", "shared", "loss", "optimiser", "quantise"} <= s["profile"]["groups"].keys() and sum(s["profile"]["groups"].values()) == pytest.approx(s["profile"]["busy"])
    assert s["plain"]["layers"] == 2 and s["backends"].keys() >= {"qdq", "experts", "loss", "attention"}
    made = outputs(tmp_path / "out/step.ipynb")
    assert sum("image/png" in o.get("data", {}) for o in made) == 2 and sum("text/markdown" in o.get("data", {}) for o in made) == 6


def test_what_cannot_fit_is_refused_before_it_is_made():
    with pytest.raises(TrainingError, match=r"^preset '5b' with 2 layers and micro-batches of 9999 × 4,096 tokens needs about \d{3,} GiB, and cpu has \d+ GiB; lower model.n_layers or train.micro_batch_sequences$"):
        check_fits(load_config("5b", ["parallel.ep=1", "parallel.dp=1", "model.n_layers=2", "train.batch_sequences=9999", "train.micro_batch_sequences=9999"]), "cpu")


@pytest.mark.parametrize("states", ["dynamic", "fp32"])
def test_expected_bytes(small_overrides, states):
    "Counted from shapes, and from the tensors themselves in bfloat16."
    cfg = load_config("tiny", [*small_overrides, "train.dtype=bfloat16", f"optim.states={states}"])
    model, parts = build_model(cfg), expected_bytes(cfg)
    optimizer = make_optimizer(model, cfg)
    for p in model.parameters(): p.grad = torch.zeros_like(p)
    optimizer.step()
    assert parts["weights on a grid"] + parts["other weights"] == sum(p.nbytes for p in model.parameters())
    assert parts["masters"] == sum(m.nbytes for p in model.parameters() if (m := optimizer.master_of(p)) is not p)
    assert parts["moments"] == pytest.approx(optimizer.state_bytes(), rel=0.05)
    assert parts["gradients"] == 4 * sum(p.numel() for p in model.parameters())


def test_bounds_are_for_the_product_alone():
    whole = load_config("5b", ["parallel.ep=1", "parallel.dp=1", "train.micro_batch_sequences=4"])
    assert is_full(whole, "cuda") and not is_full(whole, "cpu") and not is_full(load_config("bench"), "cuda")
    for change in (["model.n_layers=12"], ["train.micro_batch_sequences=2"], *VARIANTS.values()):
        assert is_full(with_overrides(whole, change), "cuda") == all("backends" in c or "deterministic" in c for c in change)


def test_operations_against_the_parameters():
    "A product of a token has two operations for each weight it passes; only scores, and rows of the head beside the first, are beyond that."
    cfg = load_config("5b")
    with torch.device("meta"): model = build_model(with_overrides(cfg, ["model.n_layers=1"]))
    size = lambda part: sum(p.numel() for n, p in model.named_parameters() if part in n and n.rpartition(".")[2] not in ("b_in", "b_out", "bias"))
    flops = token_flops(with_overrides(cfg, ["model.n_layers=1"]), 1.0)
    assert flops["routed"] == 2 * size("moe.routed") * 4 // 64 and flops["shared"] == 2 * size("moe.shared") and flops["dense"] == 2 * size(".dense.") and flops["router"] == 2 * size("moe.router.weight")
    assert flops["projections"] == 2 * size("attn.") and flops["head"] == 2 * size("embed.") and flops["depth heads"] == 0


def test_own_time_is_what_the_profiler_says(tmp_path):
    x = torch.randn(64, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as p: (x @ x).softmax(-1).sum().backward()
    p.export_chrome_trace(str(tmp_path / "trace.json"))
    found = read_trace(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], 1)
    want = {e.key: e.self_cpu_time_total / 1000 for e in p.key_averages() if e.key.startswith("aten::")}
    got = {key: sum(ms for _, name, ms, _ in found.kernels if name == key) for _, key, _, _ in found.kernels if key.startswith("aten::")}
    assert len(found.kernels) < 40, "the list is cut there"
    assert got.keys() == want.keys() and all(abs(got[k] - want[k]) < 0.02 + 0.02 * want[k] for k in want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(small_overrides, small_corpus):
    "Kernels of forward and backward find their group, the plain model learns, and the peak is counted."
    cfg = load_config("tiny", [*small_overrides, "train.dtype=bfloat16", "train.device=cuda"])
    state = bench_state(cfg, Corpus.open(small_corpus), "cuda")
    timed = time_steps(state, 3, 2)
    assert timed.peak > 0 and len(timed.seconds) == 3
    found = read_trace(trace_steps(state, 2), 2)
    assert {"attention", "experts", "shared", "dense", "router", "rows", "norms", "loss", "optimiser"} <= found.groups.keys()
    assert found.groups.get("other", 0) < 0.15 * sum(found.groups.values()) and 0 < found.busy <= sum(found.groups.values()) * 1.001
    plain = time_plain(cfg, Corpus.open(small_corpus), "cuda", 6, 1)
    assert plain.layers == 2 and plain.losses[1] < plain.losses[0] and plain.peak > 0
