"""A run that survives: killed anywhere, a full or read-only disk, damaged checkpoints, sinks that fail; the weights at the end are those of the run that nothing happened to, to the last bit (CPU)."""
import contextlib, json, multiprocessing, os, random, re, shutil, signal, subprocess, sys, time, types
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hsmoe.cli import app
from hsmoe.comm.mesh import gather_objects
from hsmoe.config import load_config, resolve
from hsmoe.data.corpus import Corpus
from hsmoe.train import checkpoint as ckpt, loop
from hsmoe.train.checkpoint import BackgroundSave, CheckpointError, checkpoint_steps, latest_checkpoint, load_checkpoint, load_state, prune_checkpoints, save_part, save_state, split_state
from hsmoe.train.loop import Run, TrainState, TrainingError, consolidate, datasets, run_training, train_step
from hsmoe.train.telemetry import read_metrics

from conftest import ROOT

STEPS = 12
SHORT = ["model.n_layers=1", f"train.length={STEPS} steps", "train.checkpoint_every=3", "train.validate_every=6", "train.histogram_every=6", "train.val_tokens=256", "train.final_val_tokens=512"]
ASYNC = ["train.async_save=true"]
PROCESSES = multiprocessing.get_context("forkserver")         # a process that has imported everything once is copied for each child
PROCESSES.set_forkserver_preload(["hsmoe.train.loop", "torch.distributed.checkpoint"])


# ---- processes to be killed

def kill_at(touch, word):
    "An audit hook that ends this process, with no chance to tidy up, at the `touch`-th time it opens, renames, makes or removes a path with `word` in it."
    left = [touch]
    def hook(event, args):
        if event.split(".")[0] in ("open", "os", "shutil") and args and word in str(args[0]):
            left[0] -= 1
            if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
    return hook


def child(run, corpus, overrides, says, touch=None, word=".tmp", slow=0.0):
    "Begin the run, or go on with it; what it says goes to a file."
    torch.set_num_threads(1)
    if touch: sys.addaudithook(kill_at(touch, word))
    if slow:
        step = loop.train_step
        loop.train_step = lambda state: (time.sleep(slow), step(state))[1]
    with open(says, "a", buffering=1) as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
        try:
            if (run / "config.yaml").exists(): run_training(run_dir=run, resume=True)
            else: run_training("tiny", overrides, run_dir=run, corpus_dir=corpus)
        except (TrainingError, CheckpointError) as e:
            print(f"hsmoe: {e}")
            sys.exit(2)


def begin(run, *args, **kw):
    process = PROCESSES.Process(target=child, args=(run, *args, run.with_suffix(".says")), kwargs=kw)
    process.start()
    return process


def said(run):
    return run.with_suffix(".says").read_text().splitlines()


def ended(process, code, run, seconds=120):
    process.join(seconds)
    assert process.exitcode == code, said(run)[-5:]


def written(run):
    "Steps on record so far."
    return [r["step"] for r in read_metrics(run) if "loss" in r] if (run / "metrics.jsonl").exists() else []


def reached(process, run, step, seconds=60):
    end = time.monotonic() + seconds
    while process.is_alive() and time.monotonic() < end and (written(run) or [0])[-1] < step: time.sleep(0.01)
    assert process.is_alive(), said(run)[-5:]


def results(run, but=("seconds",)):
    "Everything that a run leaves which must not depend on what happened to it."
    tensors, rest = split_state({k: v for k, v in load_state(latest_checkpoint(run / "checkpoints")).items() if k not in but})
    kept = {"step", "loss", "next_token", "entropy", "lr", "grad_norm", "clip_rate", "tokens", "mean_depth", "loads", "layer_entropy", "code_flip_rate", "sites", "val_loss", "final_val_loss"}
    report = json.loads((run / "report.json").read_text())
    return tensors, rest, [{k: v for k, v in r.items() if k in kept} for r in read_metrics(run)], {k: report[k] for k in ("val_loss", "best_val_loss", "pairs", "clip_rate", "expert_load_max_over_mean")}


def same(run, whole):
    a, b = results(run), results(whole)
    assert a[0].keys() == b[0].keys() and all(torch.equal(x, b[0][k]) and x.dtype == b[0][k].dtype for k, x in a[0].items())
    assert a[1:] == b[1:]
    assert written(run) == list(range(1, written(whole)[-1] + 1)), "a step is told twice, or not at all"


@pytest.fixture(scope="module")
def overrides(small_overrides):
    return small_overrides + SHORT


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small_corpus, overrides):
    "The run that nothing happens to; never to be changed."
    run = tmp_path_factory.mktemp("whole") / "run"
    run_training("tiny", overrides, run_dir=run, corpus_dir=small_corpus)
    return run


@pytest.fixture
def copied(whole, tmp_path):
    "A copy of it that may be spoilt, with the checkpoints of steps 9 and 12, and its report to be made again."
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "report.json").unlink()
    return run


@pytest.fixture
def disk(tmp_path):
    "`disk(options)` mounts a tmpfs with them; skips where that is not allowed."
    mounted = []
    def mount(options, folder=None, source="tmpfs"):
        folder = folder or tmp_path / f"disk-{len(mounted)}"
        folder.mkdir(exist_ok=True)
        how = ["-t", "tmpfs"] if source == "tmpfs" else []
        if shutil.which("mount") is None or subprocess.run(["mount", *how, "-o", options, source, folder], capture_output=True).returncode: pytest.skip("mounting is not allowed here")
        mounted.append(folder)
        return folder
    yield mount
    for folder in reversed(mounted): subprocess.run(["umount", "-l", folder])


# ---- kill -9

def killed(run, kills, corpus, overrides, seed):
    "Begin the run, kill it `kills` times and go on, then let it end; how often it was killed. Places are random: touches of files inside a save or its pruning, or moments."
    draw = random.Random(seed)
    for n in range(kills):
        inside = n % 3 != 2                              # two of three inside a save
        process = begin(run, corpus, overrides, touch=draw.randint(1, 22) if inside else None, slow=0 if inside else 0.02)
        if not inside:
            at = (written(run) or [0])[-1]
            with contextlib.suppress(AssertionError): reached(process, run, min(STEPS - 1, at + draw.randint(0, 3)))
            time.sleep(draw.random() * 0.05)
            process.kill()
        process.join(120)
        if process.exitcode == 0: return n               # it was at its end before the place came
        assert process.exitcode == -signal.SIGKILL, said(run)[-5:]
        for path in (run / "checkpoints").glob("step-*"):
            if re.fullmatch(r"step-\d+", path.name): load_state(path)                # whatever has the name is whole
    ended(begin(run, corpus, overrides), 0, run)
    return kills


@pytest.mark.parametrize("extra", [ASYNC, []], ids=["beside the steps", "between the steps"])
def test_killed_three_times(tmp_path, small_corpus, overrides, whole, extra):
    run, seed = tmp_path / "run", random.randrange(1000)
    print("seed", seed)
    assert killed(run, 3, small_corpus, overrides + extra, seed) == 3
    same(run, whole)
    assert not list(run.rglob("*.tmp")) and checkpoint_steps(run / "checkpoints") == [9, 12]
    resumes = len(list(run.glob("env-resumed-*.json")))
    report, metrics = json.loads((run / "report.json").read_text()), [r["resumes"] for r in read_metrics(run) if "loss" in r]
    assert resumes >= 1 and report["resumes"] == resumes == json.loads((run / f"env-resumed-{resumes}.json").read_text())["resumes"]
    assert metrics == sorted(metrics) and metrics[-1] <= resumes and json.loads((run / "env.json").read_text())["resumes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("extra", [ASYNC, []], ids=["beside the steps", "between the steps"])
def test_killed_twenty_times(tmp_path, small_corpus, overrides, whole, extra):
    seed, kills, run, n = random.randrange(1000), 0, tmp_path / "run-0", 0
    print("seed", seed)
    while kills < 20:
        kills += killed(run, 20, small_corpus, overrides + extra, seed + n)
        same(run, whole)
        n += 1
        run = tmp_path / f"run-{n}"


@pytest.mark.parametrize("place", ["first file", "meta.json", "rename", "pruning"])
def test_a_kill_at_each_place_of_a_save(tmp_path, place):
    "The table of the notebook, line by line."
    folder = tmp_path / "checkpoints"
    for step in (5, 10): save_state(folder / f"step-{step}", dict(step=step, w=torch.arange(4.)))
    def rename(self, target):
        if self.name == "step-20.tmp": os.kill(os.getpid(), signal.SIGKILL)
        return os.rename(self, target)
    def write():
        if place == "rename": Path.rename = rename
        else: sys.addaudithook(kill_at(*{"first file": (1, ".distcp"), "meta.json": (1, "step-20.tmp/meta.json"), "pruning": (2, "step-5.old.tmp")}[place]))
        save_state(folder / "step-20", dict(step=20, w=torch.arange(4.) + 1))
        prune_checkpoints(folder, 2, good=20)
    pid = os.fork()
    if not pid:
        try: write()
        finally: os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    path, state, damaged = ckpt.load_newest(folder)
    assert state["step"] == (20 if place == "pruning" else 10) and not damaged
    assert any(p.name.endswith(".tmp") for p in folder.iterdir())
    prune_checkpoints(folder, 2, good=state["step"])
    assert sorted(p.name for p in folder.iterdir()) == (["step-10", "step-20"] if place == "pruning" else ["step-10", "step-5"])


# ---- signals

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, small_corpus, overrides, whole, number):
    run = tmp_path / "run"
    process = begin(run, small_corpus, overrides + ASYNC, slow=0.04)
    reached(process, run, 4)
    os.kill(process.pid, number)
    ended(process, 2, run)
    step = written(run)[-1]
    assert said(run)[-1] == f"hsmoe: stopped by signal {int(number)} after step {step} of {STEPS}; a checkpoint is written, resume {run} to go on"
    assert load_state(latest_checkpoint(run / "checkpoints"))["step"] == step < STEPS and not list(run.rglob("*.tmp"))
    if number == signal.SIGTERM:
        ended(begin(run, small_corpus, overrides), 0, run)
        same(run, whole)


# ---- disks

def test_a_full_disk_beside_the_steps(disk, small_corpus, overrides, whole):
    size = sum(p.stat().st_size for p in (whole / "checkpoints/step-12").iterdir())
    place = disk(f"size={size * 16 // 10}")              # room for one checkpoint
    run = place / "run"
    with pytest.raises(TrainingError) as e: run_training("tiny", overrides + ASYNC, run_dir=run, corpus_dir=small_corpus)
    newest = latest_checkpoint(run / "checkpoints")
    assert re.fullmatch(rf"checkpoint {run}/checkpoints/step-\d+ could not be written \({os.strerror(28)}\); earlier checkpoints are untouched; resume {run} to go on from {newest.name}", str(e.value)), str(e.value)
    assert not list(run.rglob("*.tmp")) and f"step-{load_state(newest)['step']}" == newest.name
    subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)
    run_training(run_dir=run, resume=True)
    same(run, whole)


def test_checkpoints_that_become_read_only(tmp_path, disk, small_corpus, overrides, whole, monkeypatch):
    run = tmp_path / "run"
    real, place = loop.train_step, run / "checkpoints"
    def step(state):
        if state.step == 4:
            while checkpoint_steps(place) != [3]: time.sleep(0.01)
            disk("bind", place, place)
            subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        return real(state)
    with monkeypatch.context() as m:
        m.setattr(loop, "train_step", step)
        with pytest.raises(TrainingError, match=f"step-6 could not be written .Read-only file system.; earlier checkpoints are untouched; resume {run} to go on from step-3"):
            run_training("tiny", overrides + ASYNC, run_dir=run, corpus_dir=small_corpus)
    assert [p.name for p in place.iterdir()] == ["step-3"] and load_state(place / "step-3")["step"] == 3
    subprocess.run(["umount", place], check=True)
    run_training(run_dir=run, resume=True)
    same(run, whole)


def test_a_write_that_fails_beside_the_steps_is_told_after_the_next_step(tmp_path, small_corpus, overrides, monkeypatch):
    real = ckpt._write
    def write(folder, *rest):
        if folder.name == "step-6": raise OSError(28, "No space left on device")
        return real(folder, *rest)
    monkeypatch.setattr(ckpt, "_write", write)
    run = Run(load_config("tiny", overrides + ASYNC), tmp_path / "run", small_corpus)
    with pytest.raises(TrainingError, match="step-6 could not be written .No space left on device.*go on from step-3"): run.train()
    assert 6 <= run.state.step <= 9 and run.lock is None and checkpoint_steps(tmp_path / "run/checkpoints") == [3]


# ---- damage

def spoil(path, how="flipped"):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flipped" else data[:len(data) // 2])


@pytest.mark.parametrize("name", ["meta.json", ".metadata", "__0_0.distcp"])
def test_a_flipped_byte_is_named_and_the_newest_good_checkpoint_taken(copied, whole, capsys, name):
    spoil(copied / "checkpoints/step-12" / name)
    run_training(run_dir=copied, resume=True)
    warning, = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert re.fullmatch(rf"warning: checkpoint {copied}/checkpoints/step-12 is damaged: .*{re.escape(name)}.*; it is now called step-12.damaged, and the run goes on from step 9", warning), warning
    same(copied, whole)
    assert sorted(p.name for p in (copied / "checkpoints").iterdir()) == ["step-12", "step-12.damaged", "step-9"]


def test_the_last_good_checkpoint_stays(copied, tmp_path, whole, capsys):
    "Three of four are damaged, one is to be kept; the run dies before its next checkpoint, and again; the good one is still there."
    config = json.loads((copied / "config.json").read_text())
    config["train"]["keep_checkpoints"] = 1
    (copied / "config.json").write_text(json.dumps(config))
    for step in (25, 30): shutil.copytree(copied / "checkpoints/step-12", copied / f"checkpoints/step-{step}")
    for step in (12, 25): spoil(copied / f"checkpoints/step-{step}/__0_0.distcp", "cut")
    (copied / "checkpoints/step-30/.metadata").unlink()
    for _ in range(2):
        run = Run(load_config(str(copied / "config.json")), copied, json.loads((copied / "corpus.json").read_text())["path"], resume=True)
        assert run.state.step == 9 and checkpoint_steps(copied / "checkpoints") == [9]
        train_step(run.state); run.close()
    assert capsys.readouterr().err.count("warning: ") == 3
    run_training(run_dir=copied, resume=True)
    same(copied, whole)
    assert sorted(p.name for p in (copied / "checkpoints").iterdir()) == ["step-12", "step-12.damaged", "step-25.damaged", "step-30.damaged"]     # none older than what is kept


def test_no_good_checkpoint_is_a_sentence(copied):
    for path in (copied / "checkpoints").glob("step-*"): spoil(path / "__0_0.distcp")
    before = sorted(copied.rglob("*"))
    with pytest.raises(CheckpointError, match="step-12 is damaged: the checksum of __0_0.distcp differs; no checkpoint in .* is whole, move them away to begin anew"): run_training(run_dir=copied, resume=True)
    assert sorted(copied.rglob("*")) == before


def test_a_checkpoint_that_cannot_be_read(copied, monkeypatch, capsys):
    "A bad sector: the system says EIO, and an older checkpoint is taken."
    real = ckpt.sha256_file
    def read(path):
        if path.parent.name == "step-12": raise OSError(5, "Input/output error")
        return real(path)
    monkeypatch.setattr(ckpt, "sha256_file", read)
    path, state, damaged = ckpt.load_newest(copied / "checkpoints")
    assert state["step"] == 9 and "cannot be read (Input/output error)" in damaged[copied / "checkpoints/step-12"]


# ---- what a load keeps

def new_state(overrides, corpus):
    cfg = load_config("tiny", overrides)
    return TrainState(cfg, resolve(cfg), datasets(cfg, Corpus.open(corpus))[0], torch.device("cpu"))


@pytest.mark.parametrize("dtype, kind", [("bfloat16", k) for k in ("states=dynamic", "states=linear", "states=fp32", "states=bnb", "matrices=muon")] + [("float32", "states=dynamic")])
def test_types_survive_a_load(tmp_path, small_corpus, overrides, dtype, kind):
    new = lambda: new_state(overrides + [f"optim.{kind}", f"train.dtype={dtype}"], small_corpus)
    state = new()
    for _ in range(2): train_step(state)
    before, _ = split_state(state.state_dict())
    before = {k: t.clone() for k, t in before.items()}
    other = new()
    train_step(other)                                    # which has states of its own
    other.load_state_dict(load_state(save_state(tmp_path / "step-2", state.state_dict())))
    after, _ = split_state(other.state_dict())
    assert before.keys() == after.keys()
    for k, t in before.items(): assert after[k].dtype == t.dtype and torch.equal(after[k], t), k
    kinds = {t.dtype for k, t in before.items()}
    assert (torch.bfloat16 in kinds) == (dtype == "bfloat16") and (torch.uint8 in {t.dtype for k, t in before.items() if k.startswith("optimizer/")}) == (kind not in ("states=fp32", "states=linear"))
    a, b = train_step(state), train_step(other)
    assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)


def test_a_checkpoint_as_one_file(whole, small_corpus, overrides, tmp_path):
    "The printed recovery code, word for word, on what `hsmoe consolidate` wrote."
    result = CliRunner().invoke(app, ["consolidate", str(whole), "--step", "9", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0 and result.stdout.strip() == str(tmp_path / "out/checkpoint_9.pt"), result
    resumed, printed, own = (new_state(overrides, small_corpus) for _ in range(3))
    resumed.load_state_dict(load_state(whole / "checkpoints/step-9"))
    model, optimizer, scheduler, step = printed.model, printed.optimizer, printed.scheduler, 9
    with contextlib.chdir(tmp_path / "out"):
        checkpoint = torch.load(f"checkpoint_{step}.pt")
        model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        scheduler.load_state_dict(checkpoint['scheduler'])
        assert load_checkpoint(own.model, own.optimizer, own.scheduler, 9) == 9
    for state in (printed, own):
        state.loader.load_state_dict(resumed.loader.state_dict())
        state.step = 9
    results = [[(r.loss, r.grad_norm, r.lr) for r in (train_step(s), train_step(s))] for s in (resumed, printed, own)]
    assert results[0] == results[1] == results[2]
    with pytest.raises(TrainingError, match="no checkpoint of step 3, only of 9, 12"): consolidate(whole, 3, tmp_path)
    spoil(tmp_path / "out/checkpoint_9.pt")
    with pytest.raises(CheckpointError, match="checkpoint_9.pt is damaged: the checksum of its member"): load_checkpoint(own.model, own.optimizer, own.scheduler, 9, tmp_path / "out")


# ---- two runs, and sinks that fail

def test_two_processes_in_one_folder(tmp_path, small_corpus, overrides, whole):
    run = tmp_path / "run"
    process = begin(run, small_corpus, overrides + ASYNC, slow=0.04)
    reached(process, run, 4)
    with pytest.raises(TrainingError, match=f"another process is training in {run}; wait for it or choose another folder"): run_training(run_dir=run, resume=True)
    with pytest.raises(TrainingError, match="already holds a run"): run_training("tiny", overrides, run_dir=run, corpus_dir=small_corpus)
    ended(process, 0, run)
    same(run, whole)


class Odd(Exception):
    "An error of nobody's family."


def failing_wandb(where):
    "A module wandb that fails at one of its calls."
    def call(name, result=None):
        def f(*args, **kw):
            if name == where: raise Odd("the service is gone")
            return result
        return f
    return types.SimpleNamespace(Settings=call("Settings"), setup=call("setup"), Error=Odd, init=call("init", types.SimpleNamespace(log=call("log"), finish=call("finish"))))


@pytest.mark.parametrize("where", ["Settings", "setup", "init", "log", "finish", "tensorboard opens", "tensorboard writes"])
def test_a_failing_sink_is_one_warning(tmp_path, small_corpus, overrides, monkeypatch, capsys, where):
    extra = ["train.length=2 steps"]
    if where.startswith("tensorboard"):
        from torch.utils import tensorboard
        extra.append("train.tensorboard=true")
        def fail(*args, **kw): raise Odd("the service is gone")
        if where.endswith("opens"): monkeypatch.setattr(tensorboard, "SummaryWriter", fail)
        else: monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", fail)
    else:
        monkeypatch.setitem(sys.modules, "wandb", failing_wandb(where))
        extra.append("train.wandb=offline")
    run_training("tiny", overrides + extra, run_dir=tmp_path / "run", corpus_dir=small_corpus)
    warning, = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert "the service is gone" in warning and written(tmp_path / "run") == [1, 2] and (tmp_path / "run/report.json").exists()


@pytest.mark.slow
def test_the_service_of_wandb_is_killed(tmp_path, small_corpus, overrides, monkeypatch, capsys):
    "The real one: the process that wandb runs beside the training dies in the middle of it."
    pytest.importorskip("wandb")
    step, gone = loop.train_step, []
    def at(state):
        if state.step == 3:
            for p in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if b"wandb-core" in p.read_bytes() and f"--pid\0{os.getpid()}\0".encode() in p.read_bytes(): os.kill(int(p.parent.name), signal.SIGKILL); gone.append(p)
            time.sleep(0.5)
        return step(state)
    monkeypatch.setattr(loop, "train_step", at)
    run_training("tiny", overrides + ["train.wandb=offline"], run_dir=tmp_path / "run", corpus_dir=small_corpus)
    warning, = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert gone and "wandb failed" in warning and written(tmp_path / "run") == list(range(1, STEPS + 1)) and (tmp_path / "run/report.json").exists()


# ---- beside the steps

def test_a_save_delays_a_step_by_no_more_than_its_copy(tmp_path, small_corpus, overrides, whole, monkeypatch):
    "On a disk that needs half a second more for each checkpoint: the next step begins long before the write ends, the run is held up for the copy, and the weights are those of the run that wrote between its steps."
    starts, copies, writes, write, step, copy = [], [], {}, ckpt._write, loop.train_step, ckpt.Staging.copy
    def timed_copy(self, tensors):
        began = time.perf_counter()
        result = copy(self, tensors)
        copies.append(time.perf_counter() - began)
        return result
    def slow_write(folder, *rest):
        time.sleep(0.5)
        result, writes[folder.name] = write(folder, *rest), time.perf_counter()
        return result
    monkeypatch.setattr(ckpt, "_write", slow_write)
    monkeypatch.setattr(ckpt.Staging, "copy", timed_copy)
    monkeypatch.setattr(loop, "train_step", lambda state: (starts.append(time.perf_counter()), step(state))[1])
    run = Run(load_config("tiny", overrides + ASYNC + ["train.checkpoint_every=6"]), tmp_path / "run", small_corpus)
    run.train()
    held = {r["step"]: r["save_seconds"] for r in read_metrics(tmp_path / "run") if "save_seconds" in r}
    assert list(held) == [7] and len(copies) == 2 and held[7] < copies[0] + 0.1, (held, copies)
    assert writes["step-6"] - starts[6] > 0.4, "step 7 began when step 6 was written"
    assert checkpoint_steps(tmp_path / "run/checkpoints") == [6, 12] and load_state(tmp_path / "run/checkpoints/step-6")["step"] == 6
    a, b = (split_state(load_state(r / "checkpoints/step-12")["model"])[0] for r in (tmp_path / "run", whole))
    assert a.keys() == b.keys() and all(torch.equal(t, b[k]) for k, t in a.items())
    buffers = run.saver.staging.buffers
    assert all(buffers[k].data_ptr() != t.data_ptr() for k, t in split_state(run.state.state_dict())[0].items() if t.numel())


# ---- several processes

def part(folder, beside, rank):
    "One of two processes, which save step 5; then the second dies in the middle of its part of step 10, when the first has written its own."
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    agree = lambda reason: gather_objects(reason, torch.distributed.group.WORLD)
    def save(step):
        path, state = folder / f"step-{step}", dict(model={f"e{rank}": torch.full((1000,), float(step))}, optimizer=dict(n=rank), step=step)
        if not beside: return save_part(path, state, rank, 2, agree)
        saver = BackgroundSave(rank, 2, agree)
        saver.save(path, state)
        saver.wait()
    save(5)
    def die(path):
        while not (folder / "step-10.tmp/rank-0/meta.json").exists(): time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1: ckpt.sha256_file = die
    with open(os.devnull, "w") as f, contextlib.redirect_stderr(f): save(10)


@pytest.mark.parametrize("beside", [True, False], ids=["beside the steps", "between the steps"])
def test_a_part_that_is_missing_is_no_checkpoint(tmp_path, beside):
    "Two processes, one of which is killed while it writes its part."
    processes = [PROCESSES.Process(target=part, args=(tmp_path, beside, rank)) for rank in range(2)]
    for p in processes: p.start()
    for p in processes: p.join(60)
    assert processes[0].exitcode == 1 and processes[1].exitcode == -signal.SIGKILL
    assert (tmp_path / "step-10.tmp/rank-0/meta.json").is_file() and not (tmp_path / "step-10.tmp/rank-1").exists()
    path, state, damaged = ckpt.load_newest(tmp_path)
    assert (path.name, state["step"], sorted(state["model"]), [o["n"] for o in state["optimizer"]], damaged) == ("step-5", 5, ["e0", "e1"], [0, 1], {})
    spoil(tmp_path / "step-5/rank-1/__0_0.distcp")
    with pytest.raises(CheckpointError, match="rank-1 is damaged: the checksum of __0_0.distcp differs"): ckpt.load_newest(tmp_path)


@pytest.mark.slow
def test_two_processes_killed_in_a_save_go_on(tmp_path, small_corpus, small_overrides):
    "`hsmoe train` under torchrun, one process killed inside its part of step 6's checkpoint; resumed, its losses and weights are those of the run that nothing happened to, and go into one file."
    extra = [*small_overrides, "train.length=9 steps", "train.checkpoint_every=3", "train.micro_batch_sequences=1", "parallel.ep=2", "parallel.dp=2", *ASYNC]
    (tmp_path / "killed.py").write_text("import os, signal, sys\nfrom test_survival import kill_at\nif os.environ['RANK'] == '1': sys.addaudithook(kill_at(2, 'step-6.tmp/rank-1'))\nfrom hsmoe.cli import main\nmain()\n")
    def launch(*args, script=("-m", "hsmoe.cli")):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script, *map(str, args)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    done = launch("train", "--corpus", small_corpus, "--run-dir", "whole", *extra)
    assert done.returncode == 0, done.stderr[-3000:]
    done = launch("train", "--corpus", small_corpus, "--run-dir", "killed", *extra, script=["killed.py"])
    assert done.returncode != 0 and checkpoint_steps(tmp_path / "killed/checkpoints") == [3], done.stderr[-3000:]
    done = launch("train", "--resume", "killed")
    assert done.returncode == 0, done.stderr[-3000:]
    a, b = (split_state(load_state(tmp_path / run / "checkpoints/step-9")["model"])[0] for run in ("whole", "killed"))
    assert a.keys() == b.keys() and all(torch.equal(t, b[k]) for k, t in a.items())
    assert written(tmp_path / "killed") == list(range(1, 10)) and json.loads((tmp_path / "killed/report.json").read_text())["resumes"] == 1
    whole = torch.load(consolidate(tmp_path / "killed", None, tmp_path))
    assert whole["step"] == 9 and all(torch.equal(whole["model"][k].to(t.dtype), t) for k, t in a.items())
