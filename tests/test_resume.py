"""A run killed with SIGKILL at a random step and resumed is the undisturbed run, to the last bit (CPU)."""
import json, os, random, signal, subprocess, sys, time

import pytest
import torch

from hsmoe.config import load_config, resolve
from hsmoe.data.corpus import Corpus
from hsmoe.train.checkpoint import latest_checkpoint, load_state, save_state, split_state
from hsmoe.train.loop import TrainState, datasets, train_step
from hsmoe.train.telemetry import read_metrics

from conftest import ROOT

STEPS = 40


def start(run_dir, corpus, overrides, *extra):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "hsmoe.cli", "train", "--corpus", str(corpus), *extra, *overrides], env=env, cwd=run_dir.parent,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out


def losses(run_dir):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(run_dir) if "loss" in r]


@pytest.mark.parametrize("extra", [["optim.states=dynamic", "router.straight_through=default_moe"], ["optim.states=fp32", "quant.activation_format=nvfp4+ts-14", "train.deterministic=true"]])
def test_kill_and_resume_is_bitwise(tmp_path, small_corpus, small_overrides, extra):
    overrides = small_overrides + [f"train.length={STEPS} steps", *extra]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, small_corpus, overrides, "--run-dir", str(whole)))
    at = random.randint(7, STEPS - 15)
    process = start(killed, small_corpus, overrides, "--run-dir", str(killed))
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (killed / "metrics.jsonl").exists() and read_metrics(killed)[-1:] and read_metrics(killed)[-1]["step"] >= at: break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL); process.wait()
    assert not (killed / "report.json").exists(), "the run ended before it was killed"
    finish(start(killed, small_corpus, [], "--resume", str(killed)))
    assert losses(killed) == losses(whole)
    assert [r["step"] for r in read_metrics(killed)] == [r["step"] for r in read_metrics(whole)]
    assert any(r.get("sites_revised") for r in read_metrics(whole)) or "ts-14" not in extra[1], "no site moved: the test does not test what it should"
    assert len(losses(whole)) == STEPS
    a, b = (split_state({k: v for k, v in load_state(latest_checkpoint(d / "checkpoints")).items() if k != "seconds"}) for d in (whole, killed))
    assert a[1] == b[1]
    assert a[0].keys() == b[0].keys() and all(torch.equal(v, b[0][k]) for k, v in a[0].items())
    ra, rb = (json.loads((d / "report.json").read_text()) for d in (whole, killed))
    assert ra["val_loss"] == rb["val_loss"] and ra["config_hash"] == rb["config_hash"]


def test_terminate_writes_a_checkpoint_and_says_how_to_go_on(tmp_path, small_corpus, small_overrides):
    run_dir = tmp_path / "run"
    process = start(run_dir, small_corpus, small_overrides + ["train.length=100000 steps", "train.checkpoint_every=99999"], "--run-dir", str(run_dir))
    while not ((run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) > 3) and process.poll() is None: time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "a checkpoint is written" in out and "resume" in out, out
    assert latest_checkpoint(run_dir / "checkpoints") is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_resumed_gpu_run_is_the_same_to_the_last_bit(tmp_path, small_corpus, small_overrides, deterministic):
    "With dropout, bf16 and every kernel; without `train.deterministic` this holds for all but PyTorch's own operations, of which this model has none that differ"
    cfg = load_config("tiny", small_overrides + ["train.device=cuda", "train.dtype=bfloat16", "model.dropout=0.1", "train.length=12 steps", f"train.deterministic={str(deterministic).lower()}"])
    corpus = Corpus.open(small_corpus)
    new = lambda: TrainState(cfg, resolve(cfg), datasets(cfg, corpus)[0], torch.device("cuda"))
    def end(state, steps): return [(r.loss, r.grad_norm) for r in (train_step(state) for _ in range(steps))], {n: p.detach().clone() for n, p in state.model.named_parameters()}
    whole = new()
    first, _ = end(whole, 5)
    save_state(tmp_path / "step-5", whole.state_dict())
    rest, weights = end(whole, 7)
    resumed = new()
    resumed.load_state_dict(load_state(tmp_path / "step-5"))
    again, weights_again = end(resumed, 7)
    assert again == rest and all(torch.equal(w, weights_again[n]) for n, w in weights.items())
    assert end(new(), 5)[0] == first
