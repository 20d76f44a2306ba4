"""Experts that change places in the middle of a run (gloo, CPU): no bit of the training changes, checkpoints are read by any number of processes, and `parallel.replan_every` works from the command line."""
import json, shutil

import pytest
import torch

from hsmoe.comm.mesh import run_ranks
from hsmoe.config import ConfigError, load_config, resolve
from hsmoe.data.corpus import Corpus
from hsmoe.train import loop
from hsmoe.train.checkpoint import load_state
from hsmoe.train.loop import TrainState, datasets
from hsmoe.train.telemetry import read_metrics

from test_parallel_run import curve, train

PROGRAM = """
import json, sys, torch
from hsmoe.comm.mesh import gather_objects, start, stop
from hsmoe.comm.placement import make_placement, migrate
from hsmoe.config import load_config, resolve
from hsmoe.data.corpus import Corpus
from hsmoe.model.parallel import whole_state
from hsmoe.train.checkpoint import load_state, save_part
from hsmoe.train.loop import Run, TrainState, datasets, train_step
cases, folder, resumed = json.loads(CASES), FOLDER, RESUMED
torch.set_num_threads(1)
mesh = start(2, "cpu", 100)
PLACES = [[2, 5, 7, 0, 4, 1, 6, 3], [4, 5, 6, 7, 0, 1, 2, 3]]

def force(state):
    after = [make_placement(places, mesh.ep, 8) for places in PLACES]
    moved = migrate(state.model, state.optimizer, state.placements, after, mesh)
    state.placements = after
    return moved

def run(new, moving):
    state, curve, moved = new(), [], 0
    for n in range(1, 7):
        result = train_step(state)
        curve.append((result.loss, result.grad_norm, result.next_token, result.entropy, [l.tolist() for l in result.loads]))
        if n == 3 and moving: moved = force(state)
    return state, curve, moved

def step_7(state):
    result = train_step(state)
    return result.loss, result.grad_norm, whole_state(state.model, mesh)

def equal(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def compare(name, overrides):
    cfg = load_config("tiny", overrides)
    data = datasets(cfg, Corpus.open(CORPUS))[0]
    new = lambda: TrainState(cfg, resolve(cfg), data, torch.device("cpu"), mesh)
    stayed, curve, _ = run(new, False)
    state, moved_curve, moved = run(new, True)
    assert moved_curve == curve, (curve, moved_curve)
    assert equal(whole_state(stayed.model, mesh), whole_state(state.model, mesh))
    for what, s in (("stayed", stayed), ("moved", state)): save_part(f"{folder}/{name}/{what}", s.state_dict(), mesh.rank, mesh.world, lambda reason: gather_objects(reason, mesh.dp_group))
    again = new()
    again.load_state_dict(load_state(f"{folder}/{name}/moved"))
    numbers = [layer.moe.routed.numbers for layer in state.model.layers]
    assert [layer.moe.routed.numbers for layer in again.model.layers] == numbers and torch.equal(again.routed.tokens_LE, state.routed.tokens_LE)
    ends = [step_7(s) for s in (stayed, state, again)]
    assert all(end[:2] == ends[0][:2] and equal(end[2], ends[0][2]) for end in ends[1:])
    for ep in {1, mesh.world} - {mesh.ep}: other_grid(ep, overrides, data, f"{folder}/{name}")
    return dict(moved=moved, numbers=numbers)

def other_grid(ep, overrides, data, folder):
    # the same processes, with experts shared out otherwise: both checkpoints give the same step
    grid = mesh._replace(ep=ep, ep_rank=mesh.rank % ep, expert_dp=mesh.world // ep, ep_group=mesh.dp_group if ep > 1 else None, expert_dp_group=mesh.dp_group if ep == 1 else None)
    cfg, ends = load_config("tiny", overrides + [f"parallel.ep={ep}"]), []
    for what in ("stayed", "moved"):
        state = TrainState(cfg, resolve(cfg), data, torch.device("cpu"), grid)
        state.load_state_dict(load_state(f"{folder}/{what}"))
        result = train_step(state)
        ends.append((result.loss, result.grad_norm, whole_state(state.model, grid)))
    assert ends[0][:2] == ends[1][:2] and equal(ends[0][2], ends[1][2]), (ep, ends[0][:2], ends[1][:2])

print(json.dumps([compare(*case) for case in cases.items()]))
if resumed: Run(load_config(f"{resumed}/config.json"), resumed, CORPUS, resume=True, mesh=mesh).train()
stop(mesh)
"""


def in_one_process(overrides, corpus, checkpoint):
    cfg = load_config("tiny", overrides + ["parallel.ep=1", "parallel.dp=1"])
    state = TrainState(cfg, resolve(cfg), datasets(cfg, Corpus.open(corpus))[0], torch.device("cpu"))
    state.load_state_dict(load_state(checkpoint))
    return state


@pytest.fixture(scope="module")
def command_line_run(tmp_path_factory, small_corpus, small_overrides):
    return train(2, tmp_path_factory.mktemp("runs"), "run", small_corpus, small_overrides + ["train.length=7 steps", "train.checkpoint_every=3", "train.keep_checkpoints=5", "train.micro_batch_sequences=1",
                                                                                            "parallel.replan_every=3", "parallel.topology={kind: ring, bandwidth_GB_s: 900, latency_us: 1}"])


def replans(run):
    "(step, what replanning found) without times"
    return [(r["step"], {k: v for k, v in r["replan"].items() if not k.endswith("_ms")}) for r in read_metrics(run) if "replan" in r]


CASES = {2: {"8 bits": ["model.expert_inner=1024"], "fp32": ["optim.states=fp32", "quant.weight_format=null"]}, 4: {"two of each": ["train.dtype=bfloat16", "parallel.weights_wire=packed"]}}


def together(world, cases, tmp_path, corpus, resumed=""):
    "What the processes of `PROGRAM` say"
    program = PROGRAM
    for word, value in dict(CASES=json.dumps(cases), CORPUS=str(corpus), FOLDER=str(tmp_path), RESUMED=str(resumed)).items(): program = program.replace(word, repr(value))
    return [json.loads(next(line for line in text.splitlines() if line.startswith("[{"))) for text in run_ranks(program, world, timeout_s=200)]


@pytest.mark.parametrize("world", CASES)
def test_no_bit_changes(world, tmp_path, small_corpus, small_overrides, command_line_run):
    """Six steps with a migration after the third, and without: losses, norms, loads and weights; then step 7 of both and of the checkpoint; then the checkpoints of both in one process.
    And two processes go on from the checkpoint that the command line wrote at step 3, right after experts moved"""
    cases = {name: small_overrides + ["train.length=8 steps", "train.micro_batch_sequences=1", "parallel.ep=2", f"parallel.dp={world}", "parallel.replan_every=100", *more] for name, more in CASES[world].items()}
    cut = None
    if world == 2:
        cut = shutil.copytree(command_line_run, tmp_path / "cut")
        (cut / "report.json").unlink()
        for step in (6, 7): shutil.rmtree(cut / f"checkpoints/step-{step}")
    ranks = together(world, cases, tmp_path, small_corpus, cut or "")
    if cut: assert curve(cut) == curve(command_line_run) and replans(cut) == replans(command_line_run) and (cut / "report.json").exists()
    for rank, seen in enumerate(ranks):
        for case in seen: assert case == dict(moved=6 + 8, numbers=([[2, 5, 7, 0], [4, 5, 6, 7]], [[4, 1, 6, 3], [0, 1, 2, 3]])[rank % 2])
    for name, overrides in cases.items():
        stayed, moved = (in_one_process(overrides, small_corpus, tmp_path / name / what) for what in ("stayed", "moved"))
        a, b = (s.optimizer.state_dict() for s in (stayed, moved))
        assert a["masters"].keys() == b["masters"].keys() and all(torch.equal(x, b["masters"][n]) for n, x in a["masters"].items())
        for n, state in a["state"].items():
            for key, x in state.items(): assert torch.equal(torch.as_tensor(x), torch.as_tensor(b["state"][n][key])), (name, n, key)
        for (n, x), y in zip(stayed.model.state_dict().items(), moved.model.state_dict().values(), strict=True): assert torch.equal(x, y), (name, n)


def test_the_command_line(command_line_run):
    "Experts are placed anew every three steps of seven"
    run, records = command_line_run, [(r["step"], r["replan"]) for r in read_metrics(command_line_run) if "replan" in r]
    assert [n for n, _ in records] == [3, 6] and records[0][1]["moved"] > 0 and len(curve(run)) == 7
    for _, r in records:
        assert r["cost_before"] > 0 and r["plan_ms"] > 0 and r["migrate_ms"] >= 0 and 1 <= r["max_over_mean_after"] <= r["max_over_mean_before"] and (r["bytes"] > 0) == (r["moved"] > 0)
    total = json.loads((run / "report.json").read_text())["replan"]
    assert total["times"] == 2 and total["moved"] == sum(r["moved"] for _, r in records) and total["cost_after"] == sum(r["cost_after"] for _, r in records)
    placement = load_state(run / "checkpoints/step-3")["placement"]
    assert placement != [[*range(8)]] * 2 and all(sorted(expert_J) == [*range(8)] for expert_J in placement)


def test_what_is_refused(monkeypatch, tmp_path):
    "A topology that cannot be, before a corpus is prepared"
    monkeypatch.setattr(loop, "place", lambda: (0, 2, 0))
    with pytest.raises(ConfigError, match="topology.kind is 'torus', allowed are mesh, ring, nodes"):
        loop.run_training("tiny", ["train.length=7 steps", "parallel.ep=2", "parallel.dp=2", "parallel.topology={kind: torus}"], run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
