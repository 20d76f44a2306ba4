"""`scripts/recover.py`: the request's recovery loader on a run's checkpoints."""
import importlib.util, json, os, re, shutil, subprocess, sys

import pytest
import torch

from hsmoe.config import load_config
from hsmoe.quant.fake import block_formats
from hsmoe.train.checkpoint import load_state
from hsmoe.train.loop import Run, consolidate
from hsmoe.train.telemetry import read_metrics

from conftest import ROOT

PRINTED = """    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    scheduler.load_state_dict(checkpoint['scheduler'])
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("recover", ROOT / "scripts/recover.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_corpus, small_overrides):
    "Ten steps with a checkpoint every five."
    folder = tmp_path_factory.mktemp("run") / "a run"
    Run(load_config("tiny", small_overrides + ["train.length=10 steps", "train.keep_checkpoints=9"]), folder, small_corpus).train()
    return folder


@pytest.fixture
def recover(script, run, tmp_path, monkeypatch, capsys):
    "Run the script on a run; returns exit code, output and complaint."
    def go(*args, of=run):
        monkeypatch.setattr(sys, "argv", ["recover.py", str(of), "--folder", str(tmp_path / "out"), *map(str, args)])
        code = 0
        try: script.main()
        except SystemExit as e: code = e.code
        said = capsys.readouterr()
        return code, said.out, said.err
    return go


def test_the_printed_lines_stand_in_the_file():
    text = (ROOT / "scripts/recover.py").read_text(encoding="utf-8")
    assert PRINTED in text and 'checkpoint = torch.load(f"{folder}/checkpoint_{step}.pt"' in text


def test_the_steps_behind_are_those_of_the_run(recover, run, tmp_path):
    code, out, err = recover("--step", 5, "--steps", 3)
    assert code == 0, err
    losses = {r["step"]: (r["loss"], r["lr"]) for r in read_metrics(run) if "loss" in r}
    found = {int(step): (loss, lr) for step, loss, lr in re.findall(r"Step (\d+), Loss: ([0-9.]+), LR: ([0-9.e+-]+)", out)}
    assert found == {step: (f"{losses[step][0]:.4f}", f"{losses[step][1]:.2e}") for step in (6, 7, 8)}
    assert f"{tmp_path / 'out' / 'checkpoint_5.pt'} written" in out and out.rstrip().endswith(str(tmp_path / "out" / "checkpoint_8.pt"))
    code, out, err = recover("--step", 8, "--steps", 2)              # the run has no checkpoint of step 8, only the file that was just written
    assert code == 0 and "written" not in out, err
    last, whole = (torch.load(p)["model"] for p in (tmp_path / "out" / "checkpoint_10.pt", consolidate(run, 10, tmp_path)))
    assert all(torch.equal(last[name], t) for name, t in whole.items() if name in last) and last.keys() == whole.keys()


@pytest.mark.slow
def test_a_run_of_two_processes(recover, tmp_path, small_corpus, small_overrides):
    "Its checkpoint has two parts, and experts and optimiser states of both go on in one process: the losses of the run to the last printed digit but one."
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "hsmoe.cli", "train", "--corpus", small_corpus, "--run-dir", tmp_path / "two",
               *small_overrides, "train.length=7 steps", "train.checkpoint_every=4", "train.keep_checkpoints=9", "parallel.ep=2", "parallel.dp=2"]
    done = subprocess.run([sys.executable, *map(str, command)], env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (tmp_path / "two/checkpoints/step-4/rank-1").is_dir(), done.stderr
    code, out, err = recover("--step", 4, "--steps", 3, of=tmp_path / "two")
    assert code == 0, err
    losses = {r["step"]: r["loss"] for r in read_metrics(tmp_path / "two") if "loss" in r}
    assert [float(x) for x in re.findall("Loss: ([0-9.]+)", out)] == pytest.approx([losses[i] for i in (5, 6, 7)], abs=1e-3)


def test_what_guards_changed_is_kept(script, run, tmp_path):
    "Larger blocks of weights and another learning rate, as a run in trouble chose them."
    rest = script.beside_the_tensors(run / "checkpoints/step-5")
    cfg = load_config(str(run / "config.json"))
    consolidate(run, 5, tmp_path)
    state = script.begin(run, cfg)
    larger = {k: {n: f.replace("8x8", "16x8") for n, f in formats.items()} for k, formats in rest["formats"].items()}
    action = dict(guard="unstable", step=4, reason="", before=dict(lr_scale=1.0), after=dict(lr_scale=0.5), notes=[], undone=[], passed=-1)
    script.take_up(state, 5, {**rest, "formats": larger, "guards": [action]}, tmp_path)
    assert block_formats(state.model) == larger != rest["formats"] and state.scheduler.scale == 0.5
    stored = load_state(run / "checkpoints/step-5")
    assert state.loader.position == stored["loader"]["position"] == 5 * 4 and state.step == 5


def test_what_cannot_be_recovered_is_one_sentence(recover, run, tmp_path):
    def refused(*args, says, of=run):
        code, _, err = recover(*args, of=of)
        assert code == 2 and err.startswith("recover.py: ") and says in err and err.count("\n") == 1, err
    refused("--step", 7, says="has no checkpoint of step 7, only of 5, 10")
    refused("--step", 10, says="the run ends at step 10")
    refused("--steps", 0, "--step", 5, says="must be 1 or more")
    refused("--stepp", 5, says="unrecognized arguments")
    refused(says="is not a run folder", of=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()
    path = consolidate(run, 5, tmp_path / "out")
    data = bytearray(path.read_bytes())
    weights = torch.load(path)["model"]["embed.weight"].numpy().tobytes()
    data[data.index(weights)] ^= 1
    path.write_bytes(data)
    refused("--step", 5, says="the checksum of its member")
    path.write_bytes(data[:1000])
    refused("--step", 5, says="it cannot be read")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = json.loads((other / "config.json").read_text())
    config["model"]["expert_inner"] = 64
    (other / "config.json").write_text(json.dumps(config))
    path.unlink(); consolidate(run, 5, tmp_path / "out")
    refused("--step", 5, says="does not fit the configuration", of=other)
    assert not (tmp_path / "out" / "checkpoint_6.pt").exists()
