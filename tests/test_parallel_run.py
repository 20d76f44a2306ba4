"""`hsmoe train` in several processes (gloo): the numbers of one process, checkpoints that any number of processes can read, and what is refused."""
import json, os, subprocess, sys

import pytest
import torch

from hsmoe.train.checkpoint import latest_checkpoint, load_state
from hsmoe.train.telemetry import read_metrics

from conftest import ROOT

STEPS = 6
EXACT = ["quant.weight_format=null", "quant.activation_format=null", "quant.attention_format=null", "optim.states=fp32", "train.dtype=float32", "router.balance=bias"]


def launch(world, tmp_path, *args, timeout=240):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    how = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return subprocess.run([sys.executable, *how, "-m", "hsmoe.cli", *map(str, args)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout)


def train(world, tmp_path, name, corpus, overrides, ep=None, **kw):
    result = launch(world, tmp_path, "train", "--corpus", corpus, "--run-dir", tmp_path / name, *overrides, f"parallel.ep={ep or world}", f"parallel.dp={world}", **kw)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return tmp_path / name


def curve(run):
    return [(r["loss"], r["grad_norm"], r["next_token"], r["entropy"]) for r in read_metrics(run) if "loss" in r]


@pytest.fixture(scope="module")
def overrides(small_overrides):
    return small_overrides + [f"train.length={STEPS} steps", "train.checkpoint_every=3", "train.keep_checkpoints=5", "train.validate_every=6", "train.micro_batch_sequences=1"]


def test_two_processes_are_one(tmp_path, small_corpus, overrides):
    one = train(1, tmp_path, "one", small_corpus, overrides + EXACT)
    two = train(2, tmp_path, "two", small_corpus, overrides + EXACT + ["parallel.weights_wire=packed", "parallel.combine_wire=packed"])
    for a, b in zip(curve(one), curve(two), strict=True): assert b == pytest.approx(a, rel=2e-4, abs=1e-6)
    ra, rb = (json.loads((run / "report.json").read_text()) for run in (one, two))
    assert rb["val_loss"] == pytest.approx(ra["val_loss"], rel=2e-4) and ra["parameters"] == rb["parameters"] and ra["tokens"] == rb["tokens"] and ra["pairs"] == rb["pairs"]
    a, b = (load_state(latest_checkpoint(run / "checkpoints"))["model"] for run in (one, two))
    assert a.keys() == b.keys()
    for name, t in a.items():
        if t.is_floating_point(): assert (t - b[name]).norm() <= 2e-3 * t.norm() + 1e-6, name
    comm = [r["comm"] for r in read_metrics(two) if "comm" in r]
    assert len(comm) == STEPS and {"dispatch", "combine", "counts", "statistics", "norm"} <= comm[0].keys() and rb["processes"] == 2 and not ra["comm"]
    sums = [how for kind in comm[1].values() for how in kind if how.startswith("all_reduce")]
    assert sum(line["calls"] for kind in comm[1].values() for how, line in kind.items() if how.startswith("all_reduce")) <= 6, f"a step reduces a few numbers, not layers: {sums}"
    la, lb = ([r["loads"] for r in read_metrics(run) if "loads" in r][0] for run in (one, two))
    assert la == lb, "the first step routes alike, and loads are of all processes"


def test_quantised_checkpoints_go_to_any_number_of_processes(tmp_path, small_corpus, overrides):
    "Written by two, read by one and by two: the same weights, and the same next steps as those that were not interrupted"
    two = train(2, tmp_path, "two", small_corpus, overrides)
    middle = two / "checkpoints/step-3"
    assert sorted(p.name for p in middle.iterdir()) == ["meta.json", "rank-0", "rank-1"]
    whole = curve(two)
    for world in (2, 1):
        run = tmp_path / f"resumed-{world}"
        subprocess.run(["cp", "-r", two, run], check=True)
        for path in [run / "report.json", *(run / "checkpoints").glob("step-6")]: subprocess.run(["rm", "-r", path], check=True)
        config = json.loads((run / "config.json").read_text())
        if world == 1:
            config["parallel"] |= dict(ep=1, dp=1)
            for name in ("config.json", "config.yaml"): (run / name).write_text(json.dumps(config))
        result = launch(world, tmp_path, "train", "--resume", run)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
        again = curve(run)
        assert len(again) == STEPS and again[:3] == whole[:3]
        if world == 2: assert again == whole
        else:
            for a, b in zip(again[3:], whole[3:]): assert a == pytest.approx(b, rel=2e-2)
    score = launch(1, tmp_path, "eval", two)
    assert score.returncode == 0 and json.loads(score.stdout[score.stdout.index("{"):])["val_loss"] == json.loads((two / "report.json").read_text())["val_loss"], score.stderr[-2000:]


@pytest.mark.slow
def test_blocks_are_enlarged_by_all_processes(tmp_path, small_corpus, overrides):
    "A gradient norm above the limit sends both runs back twice, each time with larger blocks; a resumed run has them, too"
    over = overrides + ["guards.unstable.norm=2.5", "guards.unstable.enlarge_from=1", "guards.unstable.times=30", "guards.unstable.cooldown=1", "train.checkpoint_every=1", "train.length=4 steps",
                        "parallel.weights_wire=packed"]
    one, two = (train(world, tmp_path, str(world), small_corpus, over) for world in (1, 2))
    acted = [[(a["step"], a["guard"]["after"]) for a in read_metrics(run) if "guard" in a] for run in (one, two)]
    assert acted[0] == acted[1] and [after["enlarged"] for _, after in acted[0] if "enlarged" in after] == [1, 2]
    for a, b in zip(curve(one), curve(two), strict=True): assert b == pytest.approx(a, rel=1e-4)
    for run in (one, two): assert set(load_state(latest_checkpoint(run / "checkpoints"))["formats"]["weights"].values()) == {"nvfp4:16x16"}
    again = tmp_path / "again"
    subprocess.run(["cp", "-r", two, again], check=True)
    for path in (again / "report.json", again / "checkpoints/step-4"): subprocess.run(["rm", "-r", path], check=True)
    result = launch(2, tmp_path, "train", "--resume", again)
    assert result.returncode == 0 and curve(again) == curve(two), result.stderr[-2000:]


def test_what_is_refused(tmp_path, small_corpus, small_overrides):
    def said(world, *more):
        result = launch(world, tmp_path, "train", "--corpus", small_corpus, *small_overrides, "train.length=2 steps", *more)
        lines = [line for line in result.stderr.splitlines() if line.startswith("hsmoe: ")]
        assert result.returncode != 0 and lines, result.stderr[-3000:]
        return lines[0]
    assert "parallel.dp = 2 needs 2 processes and this run has one; set parallel.ep=1 parallel.dp=1, or start it with torchrun --nproc-per-node 2" in said(1, "parallel.dp=2")
    assert "parallel.dp = 4 needs 4 processes and this run has 2" in said(2, "parallel.dp=4")
    assert "optim.matrices = 'muon' is for one process" in said(2, "parallel.dp=2", "parallel.ep=2", "optim.matrices=muon")


def test_the_printed_loop(tmp_path, small_corpus, small_overrides):
    "scripts/train.py under torchrun: every process one half of the experts, one voice, and a checkpoint of the whole"
    keep = [o for o in small_overrides if o.split("=")[0] in ("model.vocab_size", "model.d_model", "model.n_heads", "model.n_layers", "model.max_seq_len", "model.expert_inner", "model.dense_inner", "data.seq_len")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ROOT / "scripts/train.py"), "--corpus", str(small_corpus), "--steps", "7", "--log-every", "3",
                             "--checkpoint-every", "6", "--histogram-every", "6", "--out", "out", *keep, "model.head_dim=32", "train.batch_sequences=4", "parallel.ep=2", "parallel.dp=2"],
                            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(line.split()[3].rstrip(",")) for line in result.stdout.splitlines() if line.startswith("Step ")]
    assert len(losses) == 3 and losses[-1] < losses[0] and result.stdout.count("Training complete") == 1
    saved = torch.load(tmp_path / "out/checkpoint_6.pt", weights_only=False)
    assert saved["step"] == 6 and len(saved["optimizer"]) == 2 and {f"layers.0.moe.routed.experts.{e}.w_in" for e in range(8)} <= saved["model"].keys()
