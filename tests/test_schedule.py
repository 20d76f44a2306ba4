"""Queues of notebooks: what is refused before anything starts, sweeps, retries, limits, nothing left running, one scheduler a queue, restarts, alerts, and the scripts that start a queue.

Most runs are executed by a stand-in for `hsmoe run` that writes down what it was asked for and does what its parameters say; one trains for real.
"""
import ast, http.server, json, math, os, re, signal, subprocess, sys, textwrap, threading, time
from pathlib import Path

import nbformat, psutil, pytest, yaml
from nbformat.v4 import new_code_cell, new_notebook
from typer.testing import CliRunner

from hsmoe import schedule as sch
from hsmoe.cli import app
from hsmoe.config import ConfigError
from hsmoe.notebook import parse_parameters
from hsmoe.schedule import HISTORY, MARK, Queue, marked, queue_status, read_history, read_queue, schedule
from hsmoe.train.loop import TrainingError, run_training
from hsmoe.train.telemetry import alert, read_metrics

from conftest import ROOT

TRAIN = ROOT / "nbs/runs/train.ipynb"
PARAMETERS = "text = 'a'\nwhole = 1\nnumber = 2.5\nswitch = False\nnumbers = [1, 2]\ntexts = []\nanything = None\n"
STAND_IN = r'''
import json, os, pathlib, signal, subprocess, sys, time
here = pathlib.Path(__file__).parent
notebook, output, words = sys.argv[1], sys.argv[3], sys.argv[4:]
p = {k: json.loads(v) for k, v in zip(words[1::3], words[2::3])}
with open(here / "asked.jsonl", "a") as f: f.write(json.dumps([os.path.basename(output), words]) + "\n")
aside = output.replace(".ipynb", ".running.ipynb"); open(aside, "w").write("a page")
what, done = p.get("text", "a"), here / "done"
KERNEL = "import os, signal, sys, time\nkeep = open(sys.argv[1] + '.up', 'w')\n"
if what == "fails once" and not done.exists():
    done.write_text(""); os.rename(aside, output.replace(".ipynb", ".failed.ipynb")); print("something else\nhsmoe: the loss is NaN"); sys.exit(2)
if what == "fails": print("Traceback\nValueError: no"); sys.exit(1)
if what == "trains badly":
    run = pathlib.Path(p["run_dir"]); (run / "checkpoints" / "step-40").mkdir(parents=True, exist_ok=True); (run / "config.yaml").write_text("")
    if not p.get("resume"): sys.exit(1)
if what == "saves":
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    child = subprocess.Popen([sys.executable, "-c", "import signal, sys, time\ndef save(*a): open(sys.argv[1], 'w').write('saved'); sys.exit(1)\nsignal.signal(signal.SIGINT, save)\nopen(sys.argv[2], 'w')\ntime.sleep(60)", str(here / "saved"), str(here / "up")], start_new_session=True)
    child.wait(); os.rename(aside, output.replace(".ipynb", ".failed.ipynb")); print("hsmoe: stopped, and saved"); sys.exit(2)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nopen(sys.argv[1], 'w')\ntime.sleep(60)", str(here / "up")], start_new_session=True).wait()
os.rename(aside, output)
'''


def notebook(path, parameters=PARAMETERS, code="1"):
    kernel = dict(kernelspec=dict(name="python3", display_name="python3", language="python"))
    nbformat.write(new_notebook(cells=[new_code_cell(parameters, metadata=dict(tags=["parameters"])), new_code_cell(code)], metadata=kernel), path)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    "A folder with a notebook, in which the stand-in executes."
    monkeypatch.chdir(tmp_path)
    notebook("a.ipynb")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(sch, "COMMAND", [sys.executable, "-S", str(tmp_path / "stand_in.py")])
    return tmp_path


@pytest.fixture
def limited(place, monkeypatch):
    "The same, with limits that count from when the stand-in's own child is up."
    class Started(subprocess.Popen):
        def __init__(self, command, **kw):
            Path("up").unlink(missing_ok=True)
            super().__init__(command, **kw)
            if any(json.dumps(what) in command for what in ("saves", "stubborn")): wait_for(Path("up").exists)
    monkeypatch.setattr(subprocess, "Popen", Started)


def queue_file(*runs, **keys):
    Path("q.yaml").write_text(yaml.safe_dump(dict(folder="out", grace_seconds=5, alerts=[dict(file="alerts.jsonl")], runs=[dict(notebook="a.ipynb") | run for run in runs]) | keys, sort_keys=False))
    return "q.yaml"


def asked(): return [json.loads(line) for line in Path("asked.jsonl").read_text().splitlines()] if Path("asked.jsonl").exists() else []
def alerts(): return [json.loads(line) for line in Path("alerts.jsonl").read_text().splitlines()] if Path("alerts.jsonl").exists() else []
def states(folder="out"): return {name: (row["state"], row["attempts"]) for name, row in read_history(folder).items()}
def pages(folder="out"): return sorted(p.name.split("-", 3)[3] for p in Path(folder).glob("*.ipynb"))


# ---- what is refused, before anything starts

@pytest.mark.parametrize("run, says", [
    (dict(parameters=dict(wole=1)), "no parameter 'wole'; the nearest is 'whole'"), (dict(parameters=dict(whole="1")), "parameter 'whole': '1' is not a whole number"),
    (dict(parameters=dict(whole=1.5)), "a whole number"), (dict(parameters=dict(number=True)), "a number or null"), (dict(parameters=dict(switch="yes")), "true or false"), (dict(parameters=dict(text=7)), "a text"),
    (dict(parameters=dict(numbers=["a"])), "a list of numbers"), (dict(parameters=dict(texts="a")), "a list of texts"), (dict(parameters={1: 2}), "a mapping of names"), (dict(parameters=[1]), "a mapping of names"),
    (dict(sweep=dict(whole=3)), "sweep of 'whole' is 3"), (dict(sweep=dict(whole=[1, "x"])), "'x' is not a whole number"), (dict(zip=dict(whole=[1, 2], number=[1])), "same number"), (dict(sweep=dict(whole=[])), "list of values"),
    (dict(notebook="b.ipynb"), "b.ipynb does not exist"), (dict(notebook=3), "notebook is 3"), (dict(notebook="q.yaml"), "is not a notebook"), (dict(retries=-1), "retries is -1"), (dict(limit_minutes="3"), "limit_minutes is '3'"),
    (dict(limit_minutes=0), "a number above 0"), (dict(name="../x"), "part of a file's name"), (dict(nam="x"), "nearest is 'name'"), (dict(parameters={"optim.peak_lr": 1e-3}), "no parameter 'overrides'"),
    (dict(notebook=str(TRAIN), parameters={"optim.peek_lr": 1e-3}), "nearest known key is 'optim.peak_lr'"), (dict(notebook=str(TRAIN), parameters=dict(preset="tinny")), "unknown preset 'tinny'"),
    (dict(notebook=str(TRAIN), parameters=dict(minutes=-3)), "train.length = '-3 minutes' is not a length"),
    (dict(notebook=str(TRAIN), sweep={"model.top_k": [2, 9]}), "model.top_k = 9 must not exceed"), (dict(notebook=str(TRAIN), parameters=dict(run_dir="r"), sweep={"train.seed": [1, 2]}), "cannot share one run_dir")])
def test_mistakes_in_a_run(place, run, says):
    queue_file(dict(name="first"), run)
    with pytest.raises(ConfigError, match=re.escape(says)) as e: schedule("q.yaml")
    assert "\n" not in str(e.value) and not Path("out").exists() and asked() == []


@pytest.mark.parametrize("keys, says", [
    (dict(runs=[]), "has no runs"), (dict(runs="a"), "has no runs"), (dict(retries=None), "retries is None"), (dict(limit_minutes=True), "limit_minutes is True"), (dict(grace_seconds=-1), "a number above 0"), (dict(folder=3), "folder is 3"),
    (dict(alerts=[dict(webhook="$NOT_SET")]), "the webhook '$NOT_SET' is no address"), (dict(alerts=[dict(mail="a")]), "alert {'mail': 'a'}"), (dict(alerts="a"), "alert 'a'"), (dict(alerts=[dict(file=3)]), "to a text"), (dict(minutes=3), "nearest is 'limit_minutes'"), (dict(runs=[3]), "must be a mapping"),
    (dict(runs=[dict(name="x", notebook="a.ipynb")] * 2), "two runs of the name 'x'")])
def test_mistakes_in_a_queue(place, keys, says):
    queue_file({}, **keys)
    with pytest.raises(ConfigError, match=re.escape(says)): schedule("q.yaml")
    assert not Path("out").exists()


def test_a_file_that_is_no_queue(place):
    for text in ("runs: [", "just a text", "- a\n- b", "\xff"):
        Path("q.yaml").write_bytes(text.encode("latin1"))
        with pytest.raises(ConfigError, match="q.yaml"): read_queue("q.yaml")
    with pytest.raises(ConfigError, match="cannot be read"): read_queue("none.yaml")
    Path("file").write_text("")
    queue_file({}, folder="file/x")
    with pytest.raises(TrainingError, match="file is a file"): schedule("q.yaml")


# ---- sweeps, and what arrives at the notebook

def test_sweeps_and_names(place):
    queue = read_queue(queue_file(dict(name="s", sweep=dict(whole=[1, 2], text=["a"]), zip=dict(number=[0.1, 0.2], switch=[True, False]), parameters=dict(whole=9, texts=["t"])), {}))
    assert [i.name for i in queue.items] == ["s-1", "s-2", "s-3", "s-4", "02-a"] and queue.items[4].parameters == {}
    assert [(i.parameters["whole"], i.parameters["number"], i.parameters["switch"]) for i in queue.items[:4]] == [(1, 0.1, True), (1, 0.2, False), (2, 0.1, True), (2, 0.2, False)]
    assert all(i.parameters["texts"] == ["t"] and set(i.choice) == {"whole", "text", "number", "switch"} for i in queue.items[:4])
    rates = read_queue(queue_file(dict(notebook=str(TRAIN), parameters=dict(overrides=["train.seed=2"]), sweep={"optim.peak_lr": [1e-3, 2e-3], "data.sources": [["ü b", "it's"]]})))
    assert [i.parameters["overrides"] for i in rates.items] == [["train.seed=2", f"optim.peak_lr={v}", 'data.sources=["ü b", "it\'s"]'] for v in ("0.001", "0.002")]


def test_values_arrive_as_they_were_given(place):
    given = dict(text="007 #1, 'a' \"b\" 😀", whole=None, number=1e-7, switch=True, numbers=[3, 0.5], texts=["null", "7", "a: b", ""], anything=dict(a=[1, None]))
    assert schedule(queue_file(dict(name="all", parameters=given), dict(name="none", parameters=dict(text=None, texts=None))))
    arrived = [parse_parameters(words, Path("a.ipynb")) for _, words in asked()]
    assert arrived == [given, dict(text="", texts=[])]


# ---- retries, limits, and nothing left running

def test_failures_keep_their_pages_and_the_queue_goes_on(place, capsys):
    hook, heard = serve()
    well = schedule(queue_file(dict(name="once", parameters=dict(text="fails once")), dict(name="never", parameters=dict(text="fails"), retries=2), dict(name="good"),
                               alerts=[dict(webhook=f"http://127.0.0.1:{hook.server_port}"), dict(command="cat >> mails"), dict(command="exit 1"), dict(file="no/such/folder/x"), dict(file="alerts.jsonl")]))
    hook.shutdown()
    assert not well and states() == dict(once=("finished", 2), never=("failed", 3), good=("finished", 1))
    assert pages() == ["good.ipynb", "never.failed-1.ipynb", "never.failed-2.ipynb", "never.failed-3.ipynb", "once.failed-1.ipynb", "once.ipynb"]
    rows = read_history("out")
    assert rows["never"]["message"] == "ValueError: no" and rows["never"]["output"].endswith("failed-3.ipynb") and rows["once"]["message"] == ""
    expected = [("failed, tried again", "the loss is NaN"), ("finished", ""), *[("failed, tried again", "ValueError: no")] * 2, ("failed", "ValueError: no"), ("finished", ""), ("queue failed", "2 of 3 runs have finished")]
    assert [(a["event"], a["message"]) for a in alerts()] == expected
    assert [json.loads(line) for line in Path("mails").read_text().splitlines()] == alerts() == heard
    said = capsys.readouterr()
    assert "once: failed, tried again" in said.out and said.err.count("alert by file 'no/such/folder/x' failed") == len(expected) and said.err.count("its exit code is 1") == len(expected)


def test_a_run_at_its_limit_saves_and_nothing_stays(limited):
    queue_file(dict(name="long", parameters=dict(text="saves"), limit_minutes=0.005), dict(name="next"))
    assert not schedule("q.yaml")
    row = read_history("out")["long"]
    assert Path("saved").read_text() == "saved" and marked(row["mark"]) == [] and row["state"] == "timed out" and row["seconds"] >= 0.3
    assert row["message"] == "its limit of 0.005 minutes was over; stopped, and saved" and states()["next"] == ("finished", 1) and pages() == ["long.failed-1.ipynb", "next.ipynb"]
    assert not schedule("q.yaml") and len(asked()) == 2                       # what ran out of time stays so
    assert len(alerts()) == 3                                                 # and nobody is told again
    Path("saved").unlink()
    assert not schedule("q.yaml", again=True) and len(asked()) == 3           # unless it is asked for: then it has all of its time
    assert Path("saved").exists() and states()["long"] == ("timed out", 1)


def test_a_stubborn_run_is_killed(limited):
    queue_file(dict(name="x", parameters=dict(text="stubborn"), limit_minutes=0.005), grace_seconds=0.3)
    assert not schedule("q.yaml")
    row = read_history("out")["x"]
    assert Path("up").exists() and marked(row["mark"]) == [] and row["state"] == "timed out" and pages() == ["x.failed-1.ipynb"]       # the page that was being written


def test_the_limit_of_the_queue(limited):
    queue_file(dict(name="first", parameters=dict(text="saves")), dict(name="second"), limit_minutes=0.005)
    assert not schedule("q.yaml")
    assert states() == dict(first=("waiting", 0)) and read_history("out")["first"]["message"] == "the limit of the queue was over; stopped, and saved"
    assert [a["event"] for a in alerts()] == ["interrupted", "queue timed out"] and len(asked()) == 1
    assert {n: r["state"] for n, r in queue_status(read_queue("q.yaml")).items()} == dict(first="waiting", second="waiting")
    queue_file(dict(name="first", parameters=dict(text="saves"), retries=0), dict(name="second"))
    threading.Thread(target=lambda: (wait_for(lambda: len(asked()) == 2 and Path("up").exists()), interrupt("first", "def save"))).start()
    assert not schedule("q.yaml") and states() == dict(first=("failed", 1), second=("finished", 1)) and len(asked()) == 3


def interrupt(name, word):
    "Ctrl-C for those processes of a run whose command has a word in it."
    for p in marked(read_history("out")[name]["mark"]):
        if word in " ".join(p.cmdline()): p.send_signal(signal.SIGINT)


def wait_for(what, seconds=20):
    end = time.monotonic() + seconds
    while not what(): assert time.monotonic() < end, "it never happened"; time.sleep(0.02)


def test_a_signal_to_the_scheduler(place):
    queue_file(dict(name="first", parameters=dict(text="saves")), dict(name="second"))
    threading.Thread(target=lambda: (wait_for(Path("up").exists), signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))).start()
    with pytest.raises(TrainingError, match="stopped by a signal; the same command goes on"): schedule("q.yaml")
    row = read_history("out")["first"]
    assert (row["state"], row["attempts"]) == ("waiting", 0) and Path("saved").exists() and marked(row["mark"]) == [] and [a["event"] for a in alerts()] == ["interrupted", "queue stopped"]


# ---- one scheduler, restarts, a history that is never lost

def test_one_queue_takes_one_scheduler(place):
    queue = read_queue(queue_file({}))
    first = Queue(queue)
    with pytest.raises(TrainingError, match=f"process {os.getpid()} on .*; one queue takes one"): Queue(queue)
    first.close()
    holder = subprocess.Popen([sys.executable, "-S", "-c", "import fcntl, os, time; fcntl.flock(os.open('out', os.O_RDONLY), fcntl.LOCK_EX); print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    holder.stdout.readline()
    with pytest.raises(TrainingError, match="another scheduler"): Queue(queue)
    holder.kill(); holder.wait()
    assert schedule("q.yaml")                                                 # a dead process holds nothing


def left_running(**row):
    "A history as a scheduler leaves it that is killed while a run is under way."
    item = read_queue("q.yaml").items[0]
    Path("out").mkdir(exist_ok=True)
    record = dict(time="2026-12-01T00:00:00", event="started", run=item.name, **sch.new_row(item)) | dict(state="running", attempts=1, stem="2026-12-01-" + item.name, since=time.time() - 3, mark="m") | row
    Path("out", HISTORY).write_text(json.dumps(record) + "\n")


def test_a_run_that_a_killed_scheduler_left(place):
    queue_file(dict(name="x"))
    left_running(mark="left")
    orphan = subprocess.Popen([sys.executable, "-S", "-c", "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(0)); print(flush=True); time.sleep(60)"], env={**os.environ, MARK: "left"}, stdout=subprocess.PIPE)
    orphan.stdout.readline()
    assert queue_status(read_queue("q.yaml"))["x"]["state"] == "interrupted"   # nobody holds the queue
    assert schedule("q.yaml") and marked("left") == [] and states() == dict(x=("finished", 1)) and read_history("out")["x"]["seconds"] >= 3
    orphan.wait()
    left_running(mark="dead")
    assert schedule("q.yaml") and states() == dict(x=("finished", 1))


def test_finished_runs_are_not_repeated_and_changed_ones_begin_anew(place):
    assert schedule(queue_file(dict(name="x", parameters=dict(whole=1)))) and schedule("q.yaml") and len(asked()) == 1
    with pytest.raises(ConfigError, match="'x' has finished with other parameters"): schedule(queue_file(dict(name="x", parameters=dict(whole=2))))
    assert schedule(queue_file(dict(name="x", parameters=dict(whole=1)), dict(name="y"))) and len(asked()) == 2
    assert not schedule(queue_file(dict(name="z", parameters=dict(text="fails"), retries=0)))
    assert not schedule("q.yaml") and len(asked()) == 3
    assert schedule(queue_file(dict(name="z"))) and asked()[-1][0].endswith("-z-2.ipynb")       # other files: the failed page and its log stay
    assert schedule("q.yaml", folder="elsewhere") and Path("elsewhere", HISTORY).exists()


def test_a_damaged_history_is_told_and_kept(place):
    assert schedule(queue_file(dict(name="x"), dict(name="y")))
    path, whole = Path("out", HISTORY), Path("out", HISTORY).read_bytes()
    lines = whole.splitlines(keepends=True)
    for broken in (b"{}\n", b"\x00\x00\n", b"[]\n", b'"x"\n', b"\xff\xfe\n"):
        path.write_bytes(lines[0] + broken + lines[2])
        with pytest.raises(TrainingError, match=r"history.jsonl, line 2 is damaged") as e: schedule("q.yaml")
        assert "\n" not in str(e.value) and path.read_bytes() == lines[0] + broken + lines[2]
        with pytest.raises(TrainingError, match="line 2 is damaged"): queue_status(read_queue("q.yaml"))
    path.write_bytes(whole[:-10])                                             # a crash cut the last line: y is unknown to have finished
    assert queue_status(read_queue("q.yaml"))["y"]["state"] == "interrupted"
    assert schedule("q.yaml") and states() == dict(x=("finished", 1), y=("finished", 1)) and path.read_bytes().startswith(b"".join(lines[:3]))


# ---- runs that train

def test_an_attempt_goes_on_where_the_last_one_was(place):
    notebook("t.ipynb", PARAMETERS + "preset = 'tiny'\noverrides = []\nminutes = 3.0\nrun_dir = ''\nresume = False\n")
    assert schedule(queue_file(dict(name="t", notebook="t.ipynb", parameters={"text": "trains badly", "minutes": 2, "optim.peak_lr": 1e-3})))
    first, second = (parse_parameters(words, Path("t.ipynb")) for _, words in asked())
    run = first["run_dir"]
    assert re.fullmatch(r"out/\d{4}-\d\d-\d\d-t", run) and first == dict(text="trains badly", minutes=2, overrides=["optim.peak_lr=0.001"], run_dir=run)
    assert second == dict(text="trains badly", run_dir=run, resume=True)      # the rest is in the config.yaml of the run
    assert "from step 40" in Path("out", HISTORY).read_text()


def test_a_run_that_was_there_before_is_left_alone(place):
    notebook("t.ipynb", "run_dir = ''\nresume = False\ntext = ''\n")
    Path("mine").mkdir(); Path("mine/config.yaml").write_text("")
    assert not schedule(queue_file(dict(name="t", notebook="t.ipynb", parameters=dict(run_dir="mine", text="fails"))))
    assert len(asked()) == 2 and not any("resume" in words for _, words in asked())
    assert schedule(queue_file(dict(name="u", notebook="t.ipynb", parameters=dict(run_dir="mine", resume=True)))) and "resume" in asked()[-1][1]


def for_real(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_by_hsmoe_run(tmp_path, monkeypatch):
    "The program itself, with a kernel: a run that an earlier attempt began is resumed, and the next one fails with its page."
    for_real(monkeypatch, tmp_path)
    notebook("t.ipynb", "run_dir = ''\nresume = False\nwhat = ''\n", "assert resume and what == 'ü 7', (resume, what)\nopen(run_dir + '/resumed', 'w')")
    queue_file(dict(name="t", notebook="t.ipynb", parameters=dict(what="ü 7")))
    Path("mine").mkdir(); Path("mine/config.yaml").write_text("")
    left_running(run_dir="mine", own=True)
    assert schedule("q.yaml"), Path("out/2026-12-01-t.log").read_text()
    assert Path("mine/resumed").exists() and pages() == ["t.ipynb"] and "from step 0" in Path("out", HISTORY).read_text()


@pytest.mark.slow
def test_training_is_stopped_and_goes_on(tmp_path, monkeypatch, small_corpus, small_overrides):
    "By `hsmoe run`, in a kernel: the run is ended while it trains, saves, and its second attempt ends with the losses of a run that nothing happened to."
    for_real(monkeypatch, tmp_path)
    overrides = small_overrides + ["model.n_layers=1", "train.length=300 steps", "train.checkpoint_every=100"]
    queue_file(dict(name="t", notebook=str(TRAIN), parameters=dict(minutes=None, overrides=overrides, corpus_dir=str(small_corpus))))
    losses = lambda run: [(r["step"], r["loss"]) for r in read_metrics(run) if "loss" in r]
    metrics = lambda: next(iter(Path("out").glob("*-t/metrics.jsonl")), None)
    def stop():
        wait_for(lambda: metrics() and len(losses(metrics().parent)) > 20, 120)
        interrupt("t", "ipykernel_launcher")
    threading.Thread(target=stop).start()
    assert schedule("q.yaml") and states() == dict(t=("finished", 2))
    run = metrics().parent
    message = next(json.loads(line)["message"] for line in Path("out", HISTORY).read_text().splitlines() if "tried again" in line)
    step = int(re.search(r"stopped by signal 2 after step (\d+) of 300; a checkpoint is written", message)[1])
    assert 20 < step < 300 and f"from step {step}" in Path("out", HISTORY).read_text() and pages() == ["t.failed-1.ipynb", "t.ipynb"]
    assert losses(run) == losses(run_training("tiny", overrides, run_dir="whole", corpus_dir=small_corpus))


@pytest.mark.slow
def test_a_scheduler_that_is_killed_and_started_again(tmp_path, monkeypatch, small_corpus, small_overrides):
    "`kill -9` for `hsmoe schedule` while its run trains: the next one ends the orphan, which saves, and the losses are those of a run that nothing happened to."
    for_real(monkeypatch, tmp_path)
    overrides = small_overrides + ["model.n_layers=1", "train.length=400 steps", "train.checkpoint_every=100"]
    queue_file(dict(name="t", notebook=str(TRAIN), parameters=dict(minutes=None, overrides=overrides, corpus_dir=str(small_corpus))))
    losses = lambda run: [(r["step"], r["loss"]) for r in read_metrics(run) if "loss" in r]
    run = lambda: next(iter(Path("out").glob("*-t/metrics.jsonl")), Path("none/none")).parent
    scheduler = subprocess.Popen([sys.executable, "-m", "hsmoe.cli", "schedule", "q.yaml"])
    wait_for(lambda: run().is_dir() and len(losses(run())) > 20, 120)
    scheduler.kill(); scheduler.wait()
    mark = read_history("out")["t"]["mark"]
    assert len(marked(mark)) >= 2 and queue_status(read_queue("q.yaml"))["t"]["state"] == "interrupted"
    assert schedule("q.yaml") and states() == dict(t=("finished", 1)) and marked(mark) == []
    step = int(re.search(r"from step (\d+)", Path("out", HISTORY).read_text())[1])
    assert 20 < step < 400 and losses(run()) == losses(run_training("tiny", overrides, run_dir="whole", corpus_dir=small_corpus))


# ---- the command line, alerts of a run, scripts

def test_the_command(place, capsys):
    def call(*args):
        result = CliRunner().invoke(app, ["schedule", *args])
        assert result.exception is None or isinstance(result.exception, SystemExit) or isinstance(result.exception, (ConfigError, TrainingError)), result.exception
        return result
    queue_file(dict(name="good", sweep=dict(whole=[4, 5])), dict(name="bad", parameters=dict(text="fails"), retries=0))
    shown = call("q.yaml", "--check")
    assert shown.exit_code == 0 and "3 runs, and nothing wrong" in shown.output and "good-2" in shown.output and "whole=5" in shown.output and not Path("out").exists()
    assert call("q.yaml").exit_code == 1 and "failed" in call("q.yaml", "--status").output and len(asked()) == 3
    assert call("q.yaml", "--again").exit_code == 1 and len(asked()) == 4
    assert isinstance(call("none.yaml").exception, ConfigError)
    queue_file(dict(name="good", sweep=dict(whole=[4, 5])))
    table = sch.status_table({"x": sch.new_row(read_queue("q.yaml").items[0]) | dict(choice=dict(numbers=[1, 2], text="[/b]"), message="[red] is no colour here[/]")})
    sch.show(table)
    said = capsys.readouterr().out
    assert "numbers=[1, 2] text=[/b]" in said and "[red] is no colour here[/]" in said
    assert call("q.yaml").exit_code == 0 and call("q.yaml", "--folder", "other").exit_code == 0 and len(asked()) == 6


def serve():
    "A server on the loopback, and what it hears."
    heard = []
    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/" else 500); self.end_headers()
        def log_message(self, *args): pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, heard


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch): monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_alerts_that_fail(tmp_path, monkeypatch, capsys):
    hook, heard = serve()
    address = f"http://127.0.0.1:{hook.server_port}"
    monkeypatch.setenv("MY_HOOK", address); monkeypatch.setenv("WHERE", str(tmp_path))
    begin = time.monotonic()
    failed = alert([dict(webhook="$MY_HOOK", file="$WHERE/a.jsonl"), dict(webhook=address + "/wrong"), dict(webhook="$NOT_SET"), dict(webhook="http://127.0.0.1:9"), dict(webhook="file:///etc/passwd"),
                    dict(command=f"sleep 60 & echo $! > {tmp_path}/pid; sleep 60")], "failed", "ü", "why", seconds=0.5)
    hook.shutdown()
    assert [h["run"] for h in heard] == ["ü", "ü"] and json.loads((tmp_path / "a.jsonl").read_text()) == heard[0] and len(failed) == 5 and time.monotonic() - begin < 5
    assert "500" in failed[0] and "http://" in failed[1] and "refused" in failed[2] and "timed out" in failed[4]
    assert capsys.readouterr().err.count("warning: alert by") == 5
    pid = int((tmp_path / "pid").read_text())                                 # nothing of the command that took too long is left
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_run_tells_how_it_ended(tmp_path, small_corpus, small_overrides):
    targets = json.dumps([dict(file=str(tmp_path / "alerts.jsonl")), dict(command="exit 1")])
    short = small_overrides + ["model.n_layers=1", "train.length=3 steps", f"guards.alerts={targets}"]
    told = lambda: [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    run_training("tiny", short, run_dir=tmp_path / "good", corpus_dir=small_corpus)
    assert [(a["event"], a["run"]) for a in told()] == [("finished", "good")] and "validation loss" in told()[0]["message"]
    run_training("tiny", short + ["guards.unstable.norm=1e-9", "guards.unstable.times=1"], run_dir=tmp_path / "bad", corpus_dir=small_corpus)
    assert [(a["event"], a["run"]) for a in told()[1:]] == [("guard unstable", "bad"), ("finished", "bad")] and "gradient norm" in told()[1]["message"]
    started = tmp_path / "long/metrics.jsonl"
    threading.Thread(target=lambda: (wait_for(lambda: started.exists() and "loss" in started.read_text()), signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM))).start()
    with pytest.raises(TrainingError, match="stopped by signal 15"): run_training("tiny", short + ["train.length=100000 steps"], run_dir=tmp_path / "long", corpus_dir=small_corpus)
    assert told()[-1]["event"] == "stopped" and "a checkpoint is written" in told()[-1]["message"]
    with pytest.raises(ConfigError, match="guards.alerts"): run_training("tiny", small_overrides + ["guards.alerts=[{mail: a}]"], run_dir=tmp_path / "x", corpus_dir=small_corpus)


def test_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    queue = read_queue("scripts/schedule.yaml")
    assert len(queue.items) == 7 and queue.alerts and math.isfinite(queue.limit_s)
    lines = [line for line in Path("scripts/schedule.cron").read_text().splitlines() if line and not line.startswith(("#", "SHELL"))]
    assert len(lines) == 2
    for line in lines:
        *when, command = line.split(None, 5)
        assert len(when) == 5 and "hsmoe schedule " in command and re.search(r"(?<!\\)%", command) is None
        assert subprocess.run(["bash", "-n", "-c", command.replace("\\%", "%")]).returncode == 0
    tree = ast.parse(Path("scripts/schedule_airflow.py").read_text())
    assert "has not been run" in ast.get_docstring(tree) and "-m hsmoe.cli schedule" in ast.unparse(tree)


def test_the_slurm_script_asks_for_another_turn(tmp_path):
    "With stand-ins for the environment and for Slurm: SIGTERM goes to the scheduler, and the job is queued again after it has ended."
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/env.sh").write_text('hsmoe() { exec python3 -S -c "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: (print(\'saved\', flush=True), sys.exit(2)))\nprint(*sys.argv[1:], flush=True)\ntime.sleep(60)" "$@"; }\n')
    scontrol = tmp_path / "scontrol"; scontrol.write_text("#!/bin/sh\necho scontrol $*\n"); scontrol.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17"}
    job = subprocess.Popen(["bash", ROOT / "scripts/schedule.sbatch", "runs.yaml"], env=env, stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "schedule runs.yaml\n"
    job.terminate()
    assert job.communicate(timeout=20)[0] == "saved\nscontrol requeue 17\n" and job.returncode == 0
    assert subprocess.run(["bash", ROOT / "scripts/schedule.sbatch"], env=env, capture_output=True).returncode == 2
