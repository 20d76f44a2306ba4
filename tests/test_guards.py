"""Guards (SPEC V-03, V-04, V-05, Q-10): each is brought about by a real run driven into its trouble; the run ends well, says what was done, resumes exactly, and takes an action back on request."""
import json, os, shutil, subprocess, sys

import numpy as np, pytest, torch

from hsmoe.config import ConfigError, load_config, resolve
from hsmoe.model.hybrid import build_model
from hsmoe.optim.recut import blockwise_of
from hsmoe.quant.fake import block_formats
from hsmoe.train import loop
from hsmoe.train.checkpoint import checkpoint_steps, latest_checkpoint, load_state, split_state
from hsmoe.train.guards import decide, recall, settings_after, smaller_configs, unstable_guard
from hsmoe.train.loop import Run, TrainingError, load_run, run_training
from hsmoe.train.telemetry import read_metrics

from conftest import ROOT

FEW = ["model.n_layers=1", "train.threads=1", "train.keep_checkpoints=9", "train.histogram_every=100", "train.val_tokens=256", "train.final_val_tokens=256"]
TIMES = ("seconds", "seconds_per_step", "tokens_per_s", "peak_memory_bytes", "resumes", "save_seconds")


@pytest.fixture
def tiny(tmp_path, small_overrides, small_corpus):
    "`tiny(name, *overrides)`: a run of a few steps that has not begun."
    def make(name, *overrides, steps=12, **kw):
        return Run(load_config("tiny", [*small_overrides, *FEW, f"train.length={steps} steps", *overrides]), tmp_path / name, small_corpus, **kw)
    return make


@pytest.fixture
def spoil(monkeypatch):
    "`spoil(f)`: `f(state, number of the batch from 1)` after every backward pass; what it returns is added to the loss. `spoil(None)` ends that."
    real = loop._micro_batches
    def set_(f):
        def spoilt(state, *args):
            sums, loads = real(state, *args)
            sums[0] += f(state, state.loader.position // state.cfg.train.batch_sequences) or 0.0
            return sums, loads
        monkeypatch.setattr(loop, "_micro_batches", spoilt if f else real)
    return set_


def nan_gradient(*batches):
    "The gradient of the embedding is NaN in these batches."
    def f(state, batch):
        if batch in batches: state.model.embed.weight.grad.fill_(float("nan"))
    return f


def actions(run_dir):
    "Guard records, which are those of the report and of the last checkpoint"
    found = [r["guard"] for r in read_metrics(run_dir) if "guard" in r]
    last = max(checkpoint_steps(run_dir / "checkpoints"))
    assert found == json.loads((run_dir / "report.json").read_text())["guards"] == load_state(run_dir / f"checkpoints/step-{last}")["guards"]
    return found


def told(run_dir):
    "What the records say, without times"
    return [{k: v for k, v in r.items() if k not in TIMES} for r in read_metrics(run_dir)]


def state_of(run_dir, step):
    return split_state({k: v for k, v in load_state(run_dir / f"checkpoints/step-{step}").items() if k != "seconds"})


def resumes_alike(tiny, run_dir, overrides, at, steps=12):
    "Resumed from the checkpoint of step `at`, a run is what it was: every number of its records, every bit of its state."
    again = run_dir.with_name(run_dir.name + "-again")
    shutil.copytree(run_dir, again)
    (again / "report.json").unlink()
    for n in checkpoint_steps(again / "checkpoints"):
        if n > at: shutil.rmtree(again / f"checkpoints/step-{n}")
    tiny(again.name, *overrides, steps=steps, resume=True).train()
    assert told(again) == told(run_dir)
    (a, rest), (b, also) = state_of(run_dir, steps), state_of(again, steps)
    assert rest == also and a.keys() == b.keys() and all(torch.equal(t, b[k]) for k, t in a.items())


# ---- unstable steps

def test_a_gradient_that_is_no_number(tmp_path, tiny, spoil):
    spoil(nan_gradient(8))
    run = tiny("run")
    report = run.train()
    [a] = actions(tmp_path / "run")
    assert (a["guard"], a["step"], a["before"], a["after"], a["notes"], a["passed"]) == ("unstable", 5, {"lr_scale": 1.0}, {"lr_scale": 0.5}, ["went back to step-5"], 7 * 4)
    assert "gradient norm nan at step 8" in a["reason"] and np.isfinite(report["val_loss"])
    losses = [r for r in read_metrics(tmp_path / "run") if "loss" in r]
    assert [r["step"] for r in losses] == list(range(1, 13)), "each step is told once"
    lr = {r["step"]: r["lr"] for r in losses}
    assert run.state.scheduler.scale == 0.5 and run.state.loader.position == 13 * 4 and lr[6] < 0.6 * lr[5]
    seen, shares = np.load(tmp_path / "run/unstable/1-step-8.npz"), json.loads((tmp_path / "run/unstable/1-step-8.json").read_text())
    assert (seen["tokens"] == run.train_data.rows(run.state.loader.window_at(range(28, 32)))[0].numpy()).all()
    assert shares["sites"] and shares["weights"] and all(s["amax"] > 0 for s in shares["sites"].values()) and all(0 <= w["saturated"] <= 1 for w in shares["weights"].values())
    spoil(None)                                               # what follows comes from the records: nothing goes wrong any more
    resumes_alike(tiny, tmp_path / "run", [], at=5)
    resumes_alike(tiny, shutil.copytree(tmp_path / "run", tmp_path / "late"), [], at=10)


def test_again_and_again(tmp_path, tiny, spoil):
    "The second restore enlarges blocks; a failure right after one leaves the batch out and no more; and there is an end."
    spoil(nan_gradient(3, 4, 5, 9))
    run = tiny("run", "guards.unstable.cooldown=3")
    run.train()
    # batch 3 fails: back to the beginning; 4 fails within three steps of that and is left out after step 2; 5 fails there, too, so the run is stuck; 9 fails after step 5
    assert [(a["step"], a["passed"] // 4 + 1, a["after"], list(a["notes"])) for a in actions(tmp_path / "run")] == [
        (0, 3, {"lr_scale": 0.5}, ["went back to the beginning"]), (2, 4, {}, []),
        (0, 5, {"lr_scale": 0.25, "enlarged": 1}, ["went back to the beginning"]), (5, 9, {"lr_scale": 0.125, "enlarged": 2}, ["went back to step-5"])]
    assert run.state.scheduler.scale == 0.125 and run.state.loader.position == (12 + 4) * 4
    assert {f.split(":")[1] for f in block_formats(run.state.model)["weights"].values()} == {"16x16"}
    losses = [r["step"] for r in read_metrics(tmp_path / "run") if "loss" in r]
    assert losses == list(range(1, 13))
    spoil(None)
    resumes_alike(tiny, tmp_path / "run", ["guards.unstable.cooldown=3"], at=5)

    spoil(nan_gradient(3, 4))
    with pytest.raises(TrainingError, match="step 3: loss .* and gradient norm nan are not both finite; the update was not applied"): tiny("ended", "guards.unstable.times=1").train()
    for off in ("guards.enabled=false", "guards.unstable.times=0"):
        with pytest.raises(TrainingError, match="not both finite"): tiny(off, off).train()


def test_a_learning_rate_far_too_large(tmp_path, tiny):
    large = ["optim.peak_lr=3.0", "schedule.qat_fraction=0", "guards.unstable.norm=20", "guards.unstable.times=30", "guards.unstable.cooldown=1", "train.checkpoint_every=3", "guards.skew.times=0"]
    run = tiny("run", *large)
    report = run.train()
    found = actions(tmp_path / "run")
    assert len(found) > 2 and all("above 20" in a["reason"] for a in found)
    assert any("since none of the batches works" in a["reason"] for a in found) and list((tmp_path / "run/checkpoints").glob("step-*.damaged")), "a checkpoint whose weights were on their way out is not gone on from"
    assert run.state.scheduler.scale < 0.1 and report["val_loss"] < 7
    losses = [r for r in read_metrics(tmp_path / "run") if "loss" in r]
    assert [r["step"] for r in losses] == list(range(1, 13)) and all(r["grad_norm"] <= 20 for r in losses), "no step beyond the limit was applied"
    resumes_alike(tiny, tmp_path / "run", large, at=6)


# ---- what records show

def test_a_collapsed_router_and_a_perplexity_too_high(tmp_path, tiny):
    over = ["router.balance=none", "guards.skew.times=1", "guards.perplexity.times=1", "guards.perplexity.limit=2", "train.validate_every=8", "mtp.alpha=0.85", "train.histogram_every=1"]
    run = tiny("run", *over)
    router = run.state.model.layers[0].moe.router
    router.balance_bias[:2] = 1e3                             # all tokens choose the same two experts
    run.train()
    skew, perplexity = actions(tmp_path / "run")
    assert (skew["guard"], skew["step"], skew["before"], skew["after"]) == ("skew", 3, {"temperature": 1.0}, {"temperature": 1.5})
    assert (perplexity["guard"], perplexity["step"], perplexity["before"]["alpha"], perplexity["after"]["alpha"]) == ("perplexity", 8, 0.85, 0.8)
    assert perplexity["after"]["lr_scale"] == 0.5 and perplexity["after"]["entropy_lambda"] == -0.01 and perplexity["after"]["router_sigma"] == dict(sigma=0.25, layers=[0])
    assert router.temperature == 1.5 and run.state.settings["alpha"] == 0.8 and run.state.scheduler.scale == 0.5
    fallen = [r["collapsed_layers"] for r in read_metrics(tmp_path / "run") if "loss" in r]
    assert fallen[:8] == [1] * 8
    assert router.balance_bias.abs().max() == 0 and 0.2 < router.weight.std() < 0.3, "the router began anew"
    last = [r["loads"][0] for r in read_metrics(tmp_path / "run") if "loads" in r][-1]
    assert sum(last[2:]) > 0, "and no longer sends all tokens to the first two experts"
    proposed = load_config(str(tmp_path / "run/proposals/1-experts.yaml"))
    assert proposed.model.n_routed == 6 and resolve(proposed).steps == 12
    assert load_run(tmp_path / "run")[0].layers[0].moe.router.temperature == 1.5, "whoever reads the model reads it as it was trained"
    resumes_alike(tiny, tmp_path / "run", over, at=3)


def test_a_step_that_does_not_fit_into_memory(tmp_path, tiny, spoil):
    "Is tried again with half as many sequences at a time, and no batch is lost; with one sequence, or without the guard, it is the end, in a sentence"
    def full(state, batch):
        if state.settings["micro_batch"] > 1 and batch >= 3: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    spoil(full)
    run = tiny("run", "train.micro_batch_sequences=4", steps=6)
    run.train()
    assert [(a["guard"], a["step"], a["before"], a["after"]) for a in actions(tmp_path / "run")] == [("memory", 2, {"micro_batch": 4}, {"micro_batch": 2}), ("memory", 2, {"micro_batch": 2}, {"micro_batch": 1})]
    assert run.state.loader.position == 6 * 4 and [r["step"] for r in read_metrics(tmp_path / "run") if "loss" in r] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(TrainingError, match="step 3: 4 sequences at a time do not fit into the memory of cpu; set train.micro_batch_sequences lower"): tiny("off", "train.micro_batch_sequences=4", "guards.memory.times=0", steps=6).train()
    def always(state, batch): raise torch.OutOfMemoryError
    spoil(always)
    with pytest.raises(TrainingError, match="step 1: 1 sequences at a time do not fit"): tiny("one", "train.micro_batch_sequences=1", steps=6).train()


def test_slow_steps_little_memory_and_a_loud_element(tmp_path, tiny, spoil):
    "Three guards at once, none of which changes what is learnt by more than rounding"
    def loud(state, batch): state.model.embed.weight.grad.view(-1)[::97] *= 1e5
    spoil(loud)
    over = ["guards.slow.times=1", "guards.slow.seconds=0.000001", "guards.memory.gb=0.01", "guards.dominated.share=0.01", "train.validate_every=4", "guards.unstable.norm=null"]
    run = tiny("run", *over)
    run.train()
    found = {a["guard"]: a for a in actions(tmp_path / "run")}
    assert sorted(found) == ["dominated", "memory", "slow"] and len(actions(tmp_path / "run")) == 3
    slow, memory, dominated = found["slow"], found["memory"], found["dominated"]
    assert (slow["step"], slow["before"], slow["after"]) == (3, {"micro_batch": 2}, {"micro_batch": 1}) and any("NVLink" in n for n in slow["notes"]) and any("nsys" in n for n in slow["notes"])
    assert (memory["step"], memory["after"]) == (1, {}) and "above 0.01 GB" in memory["reason"]
    assert sorted(p.name for p in (tmp_path / "run/proposals").iterdir()) == ["1-batch.yaml", "1-experts.yaml", "1-width.yaml"]
    for p in (tmp_path / "run/proposals").iterdir():
        with torch.device("meta"): build_model(load_config(str(p)))
    assert (dominated["step"], dominated["before"], dominated["after"]) == (4, {"state_block": 256}, {"state_block": 128}) and blockwise_of(run.state.optimizer).block_size == 128
    assert [n for n in checkpoint_steps(tmp_path / "run/checkpoints") if n < 5] == [1, 3, 4], "an action is safe at once"
    resumes_alike(tiny, tmp_path / "run", over, at=4)


def test_taken_back(tmp_path, tiny, spoil):
    spoil(nan_gradient(8))
    tiny("run").train()
    spoil(None)
    def again(name, *overrides):
        folder = shutil.copytree(tmp_path / "run", tmp_path / name)
        (folder / "report.json").unlink()
        for n in checkpoint_steps(folder / "checkpoints"):
            if n > 5: shutil.rmtree(folder / f"checkpoints/step-{n}")
        run = tiny(name, *overrides, resume=True)
        run.train()
        return run
    run = again("undone", "guards.undo=[1]")
    first, undo = actions(tmp_path / "undone")
    assert (undo["guard"], undo["before"], undo["after"], undo["undone"]) == ("undo", {"lr_scale": 0.5}, {"lr_scale": 1.0}, [1]) and first["guard"] == "unstable"
    assert run.state.scheduler.scale == 1.0 and run.state.loader.position == 13 * 4, "the batch stays left out"
    resumes_alike(tiny, tmp_path / "undone", [], at=10)       # without the override: what was taken back stays so
    spoil(nan_gradient(11))
    with pytest.raises(TrainingError, match="not both finite"): again("off", "guards.enabled=false")
    with pytest.raises(TrainingError, match="guards.undo names action 7, and the run has 1, numbered from 1"): again("wrong", "guards.undo=[7]")
    with pytest.raises(ConfigError, match="mtp.alpha is 0.8 here"): again("other", "mtp.alpha=0.8")


def test_two_processes_agree(tmp_path, small_corpus, small_overrides):
    over = [*FEW, "train.length=6 steps", "train.checkpoint_every=2", "train.micro_batch_sequences=2", "guards.unstable.norm=0.5", "guards.unstable.times=2", "guards.unstable.cooldown=0", "guards.slow.times=1", "guards.slow.seconds=0.000001",
            "guards.memory.gb=0.01", "guards.window=2", "parallel.ep=2", "parallel.dp=2"]
    result = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hsmoe.cli", "train", "--corpus", str(small_corpus), "--run-dir", str(tmp_path / "run"), *small_overrides, *over],
                            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    found = actions(tmp_path / "run")
    assert [a["guard"] for a in found] == ["unstable", "unstable", "memory", "slow"] and all("above 0.5" in a["reason"] for a in found[:2])
    assert [r["step"] for r in read_metrics(tmp_path / "run") if "loss" in r] == list(range(1, 7))
    assert found[1]["after"]["enlarged"] == 1 and set(load_state(latest_checkpoint(tmp_path / "run/checkpoints"))["formats"]["weights"].values()) == {"nvfp4:16x8"}
    for rank in (0, 1): assert np.load(tmp_path / f"run/unstable/1-step-1-rank-{rank}.npz")["tokens"].shape[0] == 2


# ---- the functions

def test_histories_by_hand():
    cfg = load_config("5b")
    def one(**kw): return decide([dict(step=60, **kw)], [], cfg, 100)
    assert one() == [] and one(val_loss=3.46) == [] and one(val_loss=3.47)[0].guard == "perplexity", "32 is e to the 3.466"
    assert one(val_loss=float("inf"))[0].reason.startswith("validation perplexity 1.014e+304") or one(val_loss=float("inf"))[0].guard == "perplexity"
    assert one(peak_memory_bytes=288e9) == [] and one(peak_memory_bytes=288.1e9)[0].guard == "memory" and one(dominated_blocks=0.1) == []
    assert [a.guard for a in one(val_loss=9.0, peak_memory_bytes=3e11, dominated_blocks=0.5)] == ["perplexity", "memory", "dominated"]
    off = load_config("5b", ["guards.enabled=false"])
    assert decide([dict(step=60, val_loss=9.0)], [], off, 100) == [] and unstable_guard(3, float("nan"), 1.0, 0, [], settings_after(off, []), off, 100) is None
    small = load_config("5b", ["optim.block_size=128"])
    assert decide([dict(step=60, dominated_blocks=0.5)], [], small, 100) == []
    assert recall([dict(step=2, val_loss=1.0), dict(step=2, seconds_per_step=3), dict(step=1, val_loss=2)], 9) == [dict(step=1, val_loss=2.0), dict(step=2, val_loss=1.0, seconds_per_step=3.0)]
    one_expert = smaller_configs(load_config("tiny", ["model.n_routed=2", "train.micro_batch_sequences=1"]), ("experts", "batch"))
    assert one_expert == {}
    history = [dict(step=n, seconds_per_step=9.0) for n in range(1, 4)]
    acts = []
    for n in range(4, 100):
        found = decide(history[-12:], acts, cfg, 1000)
        acts += [a._asdict() for a in found]
        history.append(dict(step=n, seconds_per_step=9.0))
    assert [(a["step"], a["after"]["micro_batch"]) for a in acts] == [(3, 12), (53, 9)], "50 steps apart, and twice at most"
