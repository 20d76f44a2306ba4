"""What goes wrong on real machines: full and read-only disks, damaged files, odd text, odd parameters, signals, two processes at once, no network."""
import json, os, resource, shutil, signal, subprocess, sys, time
from collections import Counter
from pathlib import Path

import nbformat, numpy as np, pytest, torch

from hsmoe.cli import parse_parameters, with_sources
from hsmoe.config import ConfigError, load_config, resolve
from hsmoe.data.corpus import Corpus, CorpusError, find_documents, prepare_corpus
from hsmoe.data.loader import Batch
from hsmoe.evaluate import evaluate_run, sample_text
from hsmoe.train import loop
from hsmoe.train.checkpoint import CheckpointError, latest_checkpoint, load_state
from hsmoe.train.loop import Run, TrainState, TrainingError, datasets, ensure_corpus, new_run_dir, run_training, train_step
from hsmoe.train.telemetry import MetricsError, read_metrics
from hsmoe.train.validation import bigram_baseline, validate

from conftest import ROOT, SMALL
from test_bad_input import complaint, leftovers

TRAIN = ROOT / "nbs/runs/train.ipynb"


def start(folder, *args, env=()):
    "The command line as a process of its own, its output a pipe."
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONUNBUFFERED": "1", **dict(env)}
    return subprocess.Popen([sys.executable, "-m", "hsmoe.cli", *map(str, args)], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))        # a test run in the background may have it ignored


def read_until(process, word):
    "Lines of a process up to the one with `word`."
    lines = []
    for line in process.stdout:
        lines.append(line)
        if word in line: return lines
    raise AssertionError(f"{word!r} never came: {lines}")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def names(folder):
    return sorted(p.name for p in Path(folder).iterdir())


def refused(kind, call, *parts):
    "`call` raises `kind` with one sentence that has all `parts`."
    with pytest.raises(kind) as e: call()
    assert "\n" not in str(e.value) and all(str(part) in str(e.value) for part in parts), str(e.value)


@pytest.fixture
def disk(tmp_path):
    "`disk(options)` mounts a tmpfs with them, or says None where that is not allowed; all are gone after the test."
    mounted = []
    def mount(options):
        folder = tmp_path / f"disk {len(mounted)}"
        folder.mkdir()
        if shutil.which("mount") is None or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode: return None
        mounted.append(folder)
        return folder
    yield mount
    for folder in mounted: subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_corpus, small_overrides):
    "A folder with a run of six steps and the corpus it ran on, never to be changed."
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(small_corpus, folder / "corpus")
    run_training("tiny", small_overrides + ["train.length=6 steps"], run_dir=folder / "run", corpus_dir=folder / "corpus")
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    "A copy of `finished` that may be spoilt; `(run, corpus)`."
    shutil.copytree(finished, tmp_path / "copy")
    run, corpus = tmp_path / "copy/run", tmp_path / "copy/corpus"
    record = json.loads((run / "corpus.json").read_text())
    (run / "corpus.json").write_text(json.dumps({**record, "path": str(corpus)}))
    return run, corpus


@pytest.fixture
def batch(small_corpus, small_overrides):
    "`(configuration, training windows, validation windows, corpus)` of a few steps."
    cfg, corpus = load_config("tiny", small_overrides + ["train.length=4 steps"]), Corpus.open(small_corpus)
    return cfg, *datasets(cfg, corpus), corpus


# ---- disks

@pytest.mark.parametrize("real", [True, False], ids=["full disk", "file size limit"])
def test_disk_full_at_a_checkpoint(tmp_path, disk, small_corpus, small_overrides, real):
    place = disk("size=3400k") if real else None              # room for one checkpoint of 2.2 MB
    run = (place or tmp_path) / "run"
    process = start(tmp_path, "train", "--corpus", small_corpus, "--run-dir", run, *small_overrides, "train.length=60 steps")
    if not place:                                             # the same error, wherever mounting is not allowed
        wait_for(lambda: (run / "checkpoints/step-5").exists())
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    last = process.communicate(timeout=120)[0].strip().splitlines()[-1]
    newest = latest_checkpoint(run / "checkpoints")
    assert process.returncode == 2 and last.startswith(f"hsmoe: checkpoint {run}/checkpoints/step-"), last
    assert "could not be written (" + os.strerror(28 if place else 27) in last and last.endswith(f"resume {run} to go on from {newest.name}"), last
    assert not list(run.rglob("*.tmp")) and load_state(newest)["step"] == int(newest.name[5:]) < 60
    if place: subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)
    run_training(run_dir=run, resume=True)
    assert [r["step"] for r in read_metrics(run) if "loss" in r] == list(range(1, 61)) and json.loads((run / "report.json").read_text())["steps"] == 60


def test_disk_full_at_a_record(tmp_path, small_corpus, small_overrides):
    run, going = tmp_path / "run", Run(load_config("tiny", small_overrides + ["train.length=6 steps"]), tmp_path / "run", small_corpus)
    going.log.file.close()
    going.log.file = open("/dev/full", "w")
    refused(TrainingError, going.train, "No space left on device", f"resume {run} to go on from the beginning")
    run_training(run_dir=run, resume=True)
    assert latest_checkpoint(run / "checkpoints").name == "step-6" and [r["step"] for r in read_metrics(run) if "loss" in r] == [1, 2, 3, 4, 5, 6]
    (run / "report.json").unlink()
    (run / "eval.json.tmp").symlink_to("/dev/full")           # writing aside meets the full disk
    refused(TrainingError, lambda: evaluate_run(run), "eval.json", "No space left on device", "val_loss")
    assert not (run / "eval.json").exists() and not (run / "eval.json.tmp").exists()


@pytest.mark.parametrize("limit", [1_000, 100_000], ids=["at the tokenizer", "at the tokens"])
def test_disk_full_while_preparing(tmp_path, text_folder, limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try: refused(CorpusError, lambda: prepare_corpus(text_folder, tmp_path / "new/corpus", vocab_size=300), tmp_path / "new/corpus", "File too large")
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []


def test_read_only_folder(tmp_path, disk, finished, text_folder, small_overrides, monkeypatch):
    place = disk("size=64m")
    if place:                                                 # root heeds no mode bits, but a read-only disk
        shutil.copytree(finished / "run", place / "run")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    else:
        place = tmp_path / "place"
        shutil.copytree(finished / "run", place / "run")
        for p in [place / "run", place]: p.chmod(0o555)
        if os.geteuid() == 0: place = tmp_path / "file"; place.write_text("in the way")
    reason = "is read-only" if place.is_dir() else "is a file"
    began = time.monotonic()
    for minutes in (None, 5):                                 # before a corpus is prepared and before the speed is measured
        refused(TrainingError, lambda: run_training("tiny", small_overrides + ["train.length=6 steps"], run_dir=place / "new", minutes=minutes), place / "new", "cannot be written", reason)
    assert time.monotonic() - began < 20
    refused(CorpusError, lambda: prepare_corpus(text_folder, place / "corpus"), "cannot prepare", place / "corpus")
    if place.is_dir():
        refused(TrainingError, lambda: run_training(run_dir=place / "run", resume=True), "cannot be written", reason)
        refused(TrainingError, lambda: evaluate_run(place / "run", tokens=64), "eval.json", "val_loss")
        assert sample_text(place / "run", "def ", 3)[0].startswith("def ")
        monkeypatch.chdir(place)
        refused(TrainingError, lambda: run_training("tiny", small_overrides), "runs", reason)
        assert names(place) == ["run"]


# ---- damage

def spoil(path, how):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flipped" else data[:len(data) // 2])


@pytest.mark.parametrize("how", ["flipped", "cut"])
@pytest.mark.parametrize("name", ["val-00000.tokens.bin", "val-00000.depth.bin", "val.docs.npy", "bigram.npz", "tokenizer.json", "manifest.json", "train-00000.tokens.bin", "train.docs.npy"])
def test_damaged_corpus(copied, name, how):
    run, corpus = copied
    spoil(corpus / name, how)
    (run / "report.json").unlink()
    before = names(run)
    refused(CorpusError, lambda: run_training(run_dir=run, resume=True), name, "prepare the corpus again")
    if how == "cut" or not name.startswith("train"): refused(CorpusError, lambda: evaluate_run(run), name, "prepare the corpus again")
    else: evaluate_run(run, tokens=64); before.insert(before.index("metrics.jsonl"), "eval.json")    # what a validation does not read is not read for it
    assert names(run) == before


def test_damaged_run(copied, capsys):
    run, corpus = copied
    assert evaluate_run(run, tokens=64, step=5)["step"] == 5
    refused(TrainingError, lambda: evaluate_run(run, step=4), "no checkpoint of step 4, only of 5, 6")
    refused(TrainingError, lambda: sample_text(run, step=4), "no checkpoint of step 4, only of 5, 6")
    spoil(run / "tokenizer.json", "cut")
    refused(TrainingError, lambda: sample_text(run), "tokenizer.json")
    (run / "tokenizer.json").write_text((corpus / "tokenizer.json").read_text().replace('"e"', '"é"'))
    refused(TrainingError, lambda: sample_text(run), "tokenizer.json")
    shutil.copy(corpus / "tokenizer.json", run)
    for text in ("", "{"):                                    # a report that cannot be read is made again
        (run / "report.json").write_text(text)
        run_training(run_dir=run, resume=True)
        assert json.loads((run / "report.json").read_text())["steps"] == 6
    (run / "report.json").unlink()
    config = (run / "config.json").read_text()
    (run / "config.json").write_text(config.replace('"n_layers": 2', '"n_layers": 3'))
    refused(TrainingError, lambda: evaluate_run(run), "step-6", "does not fit the configuration", "layers.2")
    refused(TrainingError, lambda: run_training(run_dir=run, resume=True), "step-6", "cannot be continued", "layers.2")
    (run / "config.json").write_text(config.replace('"n_layers"', '"layers"'))
    refused(ConfigError, lambda: evaluate_run(run), "config.json", "'model.layers'", "'model.n_layers'")
    (run / "config.json").write_text(config)
    meta = run / "checkpoints/step-6/meta.json"
    meta.write_text(meta.read_text().replace('"step": 6', '"step": 5'))
    run_training(run_dir=run, resume=True)
    assert "warning: checkpoint" in (err := capsys.readouterr().err) and "step-6 is damaged: the checksum of meta.json differs; it is now called step-6.damaged, and the run goes on from step 5" in err
    shutil.rmtree(run / "checkpoints/step-6.damaged"); (run / "report.json").unlink()
    (run / "checkpoints/step-6").rename(run / "checkpoints/step-6.tmp")        # what a killed process leaves
    run_training(run_dir=run, resume=True)
    assert names(run / "checkpoints") == ["step-5", "step-6"] and [r["step"] for r in read_metrics(run) if "loss" in r] == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(run / "checkpoints"); (run / "checkpoints/step-6.tmp").mkdir(parents=True)
    refused(TrainingError, lambda: evaluate_run(run), "no checkpoint yet")


def test_damaged_metrics(copied):
    run, _ = copied
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for broken in ("{half\n", "7\n", '{"loss": 1}\n', "\0\0\n"):
        (run / "metrics.jsonl").write_text("".join([*lines[:3], broken, *lines[3:]]))
        (run / "report.json").unlink(missing_ok=True)
        refused(MetricsError, lambda: run_training(run_dir=run, resume=True), run / "metrics.jsonl", "line 4")
    (run / "metrics.jsonl").write_text("".join(lines) + '{"step": 6, "lo')      # only the last line can be a crash's
    run_training(run_dir=run, resume=True)
    assert len(read_metrics(run)) >= len(lines) and "lo" not in read_metrics(run)[-1]


def test_a_damaged_run_on_the_command_line(hsmoe_cli, copied):
    run, corpus = copied
    (run / "metrics.jsonl").write_text("{half\n" + (run / "metrics.jsonl").read_text())
    (run / "report.json").unlink()
    complaint(hsmoe_cli("train", "--resume", run), "metrics.jsonl", "line 1")
    spoil(corpus / "val-00000.depth.bin", "flipped")
    complaint(hsmoe_cli("eval", run), "val-00000.depth.bin")
    quick = subprocess.run(["bash", ROOT / "scripts/quickstart.sh", "--minutes", "abc"], capture_output=True, text=True, timeout=20)
    assert quick.returncode == 2 and quick.stdout == "" and quick.stderr == "quickstart: --minutes abc is not a number of minutes above 0.\n"


# ---- steps and batches at the edge

@pytest.mark.parametrize("overrides, rates", [
    (["schedule.warmup=0", "train.length=1 steps"], [3e-3]),
    (["train.length=1 steps", "train.val_tokens=1", "train.final_val_tokens=1"], [0.0]),
    (["schedule.warmup=0", "schedule.qat_fraction=0", "train.length=3 steps", "train.histogram_every=100", "train.log_every=100", "train.checkpoint_every=100", "train.validate_every=100"], [6e-3, 1.575e-3]),
    (["schedule.warmup=0.999", "train.length=2 steps", "train.log_every=1"], [0.0, 3e-3]),
], ids=["no warm-up", "one step", "longer intervals than the run", "all warm-up"])
def test_short_runs(tmp_path, small_corpus, small_overrides, overrides, rates):
    run_training("tiny", small_overrides + overrides, run_dir=tmp_path / "run", corpus_dir=small_corpus)
    records, report = read_metrics(tmp_path / "run"), json.loads((tmp_path / "run/report.json").read_text())
    assert [r["lr"] for r in records if "lr" in r] == pytest.approx(rates)
    assert all(np.isfinite(v) for v in report.values() if isinstance(v, float)) and report["expert_load_max_over_mean"] >= 1
    assert latest_checkpoint(tmp_path / "run/checkpoints").name == f"step-{report['steps']}"
    assert any("loads" in r for r in records) and sum("val_loss" in r for r in records) >= 2


@pytest.mark.parametrize("extra", [[], ["router.straight_through=default_moe", "router.z_loss=0.01"], ["optim.states=fp32", "quant.softmax=normalised", "train.dtype=bfloat16"]], ids=["default", "default_moe", "fp32 states"])
def test_batches_without_a_live_row(batch, small_overrides, extra):
    _, train, _, _ = batch
    cfg = load_config("tiny", small_overrides + ["train.length=4 steps", *extra])
    state = TrainState(cfg, resolve(cfg), train, torch.device("cpu"))
    tokens, depth = train.rows([0, 1, 2, 3])
    def step(tokens, depth):
        class Given:
            dataset, position = train, 0
            def __next__(self): return Batch(tokens, depth, np.arange(4))
        state.loader = Given()
        return train_step(state)
    nothing, padding = torch.zeros_like(depth), torch.full_like(tokens, train.split.pad_id)
    dead, padded = step(tokens, nothing), step(padding, nothing)
    assert (dead.loss, dead.next_token, dead.positions, dead.pairs) == (padded.loss, padded.next_token, padded.positions, padded.pairs) == (0, 0, 0, 0)
    assert padded.entropy == padded.grad_norm == 0 and not any(l.sum() for l in padded.loads)
    half = step(torch.cat([tokens[:2], padding[:2]]), torch.cat([depth[:2], nothing[:2]]))
    assert half.positions == int((depth[:2] > 0).sum()) and np.isfinite(half.loss) and half.loss > 0
    assert all(torch.isfinite(v).all() for v in state.model.state_dict().values() if v.is_floating_point())


def test_validation_of_padding(batch):
    cfg, train, val, corpus = batch
    model, token_bytes, rows = build(cfg, train), corpus.tokenizer.token_bytes(), val.rows
    def nearly_all_padding(windows, live=1):
        tokens, depth = rows(windows)
        tokens[:, live + 1:], depth[:, live:] = val.split.pad_id, 0
        if not live: tokens[:] = val.split.pad_id
        return tokens, depth
    val.rows = nearly_all_padding
    mine, table = validate(model, val, 640, 4, token_bytes), bigram_baseline(corpus.bigram, val, 640, token_bytes)
    assert mine[2:] == table[2:] and 0 < mine.tokens <= 10 and np.isfinite([mine.loss, mine.bits_per_byte, table.loss]).all()
    val.rows = lambda windows: nearly_all_padding(windows, live=0)
    nothing = validate(model, val, 640, 4, token_bytes)
    assert nothing.tokens == nothing.bytes == 0 and np.isnan([nothing.loss, nothing.bits_per_byte]).all()
    documents = Corpus.open(corpus.folder).split("val")
    assert len(documents.starts)                              # the corpus on disk is as it was


def build(cfg, train): return TrainState(cfg, resolve(cfg), train, torch.device("cpu")).model


# ---- text

def test_line_ends_marks_and_zero_bytes(tmp_path):
    source, lines = tmp_path / "source", "".join(f"line {i}: the quick brown fox, {i * i}\n" for i in range(200))
    files = {"unix.txt": lines, "windows.txt": lines.replace("\n", "\r\n"), "mac.txt": lines.replace("\n", "\r"), "mark.txt": "\ufeff" + lines.replace("fox", "cat"),
             "same.txt": "\ufeff" + lines, "zero.txt": lines + "\0", "blank.txt": " \r\n\t\n\u00a0", "none.txt": "", "only mark.txt": "\ufeff"}
    source.mkdir()
    for name, text in files.items(): (source / name).write_bytes(text.encode())
    (source / "wide.txt").write_bytes(lines.encode("utf-16"))
    (source / "lines.jsonl").write_bytes(("\ufeff" + json.dumps(dict(text=lines[:99])) + "\r\n \r\n" + json.dumps(dict(text="\ufeffa\0b")) + "\n" + json.dumps(dict(text=" ")) + "\n").encode())
    said = []
    for tokenizer in ("bpe", "char"):
        corpus = prepare_corpus(source, tmp_path / tokenizer, tokenizer=tokenizer, vocab_size=300, seq_len=64, progress=said.append)
        texts = dict(find_documents(source))
        assert texts["source/windows.txt"] == files["windows.txt"] and texts["source/mac.txt"] == files["mac.txt"] and texts["source/mark.txt"] == files["mark.txt"][1:]
        assert texts["source/lines.jsonl:3"] == "\ufeffa\0b" and "source/unix.txt" not in texts and len(texts) == 6        # same.txt comes first
        assert corpus.manifest["counts"] == dict(documents=6, duplicate=1, empty=4, not_text=2, byte_order_mark=4)
        parts = {s: corpus.tokenizer.decode(corpus.split(s).tokens.read(0, 10**9)) for s in ("train", "val")}
        assert sorted(parts["train"] + parts["val"]) == sorted("".join(texts.values()))                                     # nothing lost, nothing changed
        assert all(corpus.split(s).n_bytes == len(parts[s].encode()) for s in parts)
    assert "found: 4 byte order mark, 6 documents, 1 duplicate, 4 empty, 2 not text" in said
    refused(CorpusError, lambda: prepare_corpus(source / "zero.txt", tmp_path / "x"), "zero.txt", "zero byte")
    refused(CorpusError, lambda: prepare_corpus(source / "wide.txt", tmp_path / "x"), "wide.txt", "UTF-8")


@pytest.mark.parametrize("line", ['{"url": "x"}', '{"text": 3}', '{"text": null}', '{"text": ["a"]}', "[]", "7"])
def test_jsonl_line_without_text(tmp_path, line):
    (tmp_path / "x.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    refused(CorpusError, lambda: prepare_corpus(tmp_path / "x.jsonl", tmp_path / "c"), "x.jsonl:3", 'no string under the key "text"')
    assert names(tmp_path) == ["x.jsonl"]


def test_very_long_lines(tmp_path):
    "A line of 3 MB without a space took hours to count, since joining is quadratic in the length of a word."
    (tmp_path / "genome.txt").write_text("".join("acgt"[i * i % 7 % 4] for i in range(3_000_000)))
    (tmp_path / "words.txt").write_text("the quick brown fox " * 150_000)
    code = ("import resource, sys; from hsmoe.data.corpus import prepare_corpus\n"
            "c = prepare_corpus(sys.argv[1:3], sys.argv[3], vocab_size=512, seq_len=64)\n"
            "text = ''.join(c.tokenizer.decode(c.split(s).tokens.read(0, 10**9)) for s in ('train', 'val'))\n"
            "wanted = sorted(''.join(open(f).read() for f in sys.argv[1:3])); assert sorted(text) == wanted\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    done = subprocess.run([sys.executable, "-c", code, "genome.txt", "words.txt", "corpus"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2_000_000                       # kB


def test_one_short_document_and_a_vocabulary_it_cannot_fill(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("".join(f"the quick brown fox counts to {i}\n" for i in range(150)))
    said, cfg = [], load_config("tiny", SMALL + ["model.vocab_size=768", "train.length=2 steps", "data.sources=[one.txt]"])
    folder = ensure_corpus(cfg, progress=said.append)
    corpus = Corpus.open(folder)
    assert corpus.vocab_size < 768 == cfg.model.vocab_size and corpus.manifest["splits"]["train"]["documents"] == 1
    assert any(f"vocabulary: {corpus.vocab_size} of 768 ids" in line for line in said)
    run = run_training("tiny", SMALL + ["model.vocab_size=768", "train.length=2 steps", "data.sources=[one.txt]"])
    texts = sample_text(run, "", 120, temperature=5.0, top_k=None, samples=2)         # every id about equally likely, only known ones drawn
    assert all(texts)
    assert sample_text(run, "the quick " * 60, 5)[0].startswith("the quick " * 60)    # longer than the context
    refused(CorpusError, lambda: prepare_corpus("one.txt", "c", vocab_size=300, seq_len=4096), "fewer than one sequence of 4096")


def test_prompts_outside_an_alphabet(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"the quick brown fox counts to {i}\n" for i in range(150)))
    run = run_training("tiny", SMALL + ["train.length=1 steps", "data.tokenizer=char", f"data.sources=[{json.dumps(str(tmp_path / 'one.txt'))}]"], run_dir=tmp_path / "run",
                       corpus_dir=ensure_corpus(load_config("tiny", SMALL + ["data.tokenizer=char", f"data.sources=[{json.dumps(str(tmp_path / 'one.txt'))}]"]), tmp_path / "corpora", progress=None))
    refused(TrainingError, lambda: sample_text(run, "the é"), "'é' (U+00E9)", "characters")
    refused(TrainingError, lambda: sample_text(run, "\udcff"), "prompt", run)
    assert len(sample_text(run, "", 5)[0]) <= 5


# ---- parameters, paths

def test_parameters_are_read_by_their_defaults():
    given = lambda *words: parse_parameters([w for pair in zip(["-p"] * 9, words[::2], words[1::2]) for w in pair], TRAIN)
    assert given("resume", "true", "minutes", "0.5", "preset", "tiny") == dict(resume=True, minutes=0.5, preset="tiny")
    assert given("source", "[a, b c]", "overrides", "optim.betas=[0.9, 0.95]") == dict(source=["a", "b c"], overrides=["optim.betas=[0.9, 0.95]"])
    assert given("overrides", '["a.b=true", \'quant.sites={qkv_out: null}\']') == dict(overrides=["a.b=true", "quant.sites={qkv_out: null}"])
    assert given("run_dir", "1e3", "corpus_dir", "no", "source", "a: b # c") == dict(run_dir="1e3", corpus_dir="no", source=["a: b # c"])
    assert given("run_dir", "null", "minutes", "null", "source", "null", "corpus_dir", "'a b'") == dict(run_dir="", minutes=None, source=[], corpus_dir="a b")
    for name, word, allowed in (("resume", "no", "true or false"), ("resume", "off", "true or false"), ("resume", "1", "true or false"), ("resume", "null", "true or false"), ("minutes", "true", "a number"),
                                ("minutes", "abc", "a number"), ("minutes", "[3]", "a number"), ("source", "[1, a]", "a list of texts"), ("overrides", "[{a: b}]", "a list of texts"), ("source", "[a", "a list of texts")):
        refused(ConfigError, lambda: given(name, word), repr(name), repr(word), allowed)
    assert with_sources("a=1", "some folder") == ["a=1", 'data.sources=["some folder"]'] and with_sources(None, []) == []


@pytest.mark.parametrize("override, said", [
    ("optim.betas=[0.9]", "optim.betas"), ("optim.betas=0.9", "written [a, b]"), ("data.sources=a", "written [a, b]"), ("train.tensorboard=yes", "true or false"), ("model.moe_out_norm=off", "true or false"),
    ("quant.sites=null", "{a: b}"), ("quant.sites={qkv_out: 3}", "quant.sites.qkv_out"), ("model.vocab_size=1e3", "integer"), ("router.z_loss='0.1'", "number"), ("model=3", "section"), ("optim.betas=[0.9", "not valid YAML"), (3, "key.path=value")])
def test_overrides_of_another_type(override, said):
    refused(ConfigError, lambda: load_config("tiny", [override]), override, said)


def test_overrides_of_every_type():
    cfg = load_config("tiny", ["optim.betas=[0.8,0.9]", "data.sources=[a, 'b c', ü]", "quant.sites={qkv_out: null, routed_out: 'nvfp4'}", "router.straight_through=topk", "train.tensorboard=false", "train.wandb=off", "optim.peak_lr=1e-3"])
    assert (cfg.optim.betas, cfg.data.sources, cfg.quant.sites, cfg.router.straight_through) == ((0.8, 0.9), ("a", "b c", "ü"), dict(qkv_out=None, routed_out="nvfp4"), "topk")
    assert (cfg.train.tensorboard, cfg.train.wandb, cfg.optim.peak_lr) == (False, "off", 1e-3)


def test_a_folder_for_a_file_and_a_file_for_a_folder(tmp_path, monkeypatch, small_corpus, small_overrides):
    from hsmoe.notebook import check_parameters, run_notebook
    monkeypatch.chdir(tmp_path)
    for folder in ("a.yaml", "a.jsonl", "a.ipynb", "run/config.yaml"): Path(folder).mkdir(parents=True)
    Path("file").write_text("text")
    before = leftovers(tmp_path)
    train = lambda **kw: run_training("tiny", small_overrides + ["train.length=1 steps"], **kw)
    refused(ConfigError, lambda: load_config("a.yaml"), "a.yaml", "Is a directory")
    refused(CorpusError, lambda: prepare_corpus("a.jsonl", "c"), "no text in a.jsonl")
    refused(ConfigError, lambda: check_parameters(Path("a.ipynb"), {}), "a.ipynb is a folder")
    refused(ConfigError, lambda: run_notebook(TRAIN, dict(run_dir="new"), "run"), "run is a folder")
    refused(TrainingError, lambda: run_notebook(TRAIN, dict(run_dir="file")), "file is a file")
    refused(TrainingError, lambda: run_notebook(TRAIN, dict(run_dir="n" * 300)), "too long")
    refused(ConfigError, lambda: run_notebook(TRAIN, dict(resume=True)), "run_dir")
    refused(CorpusError, lambda: train(corpus_dir="file"), "no corpus at file")
    for place in ("file", "file/run", "n" * 300): refused(TrainingError, lambda: train(corpus_dir=small_corpus, run_dir=place), place, "cannot be written")
    refused(TrainingError, lambda: evaluate_run("run"), "run is not a run folder")
    refused(TrainingError, lambda: run_training(run_dir="file", resume=True), "file holds no run")
    Path("runs").write_text("in the way"); Path("corpora").write_text("in the way")
    refused(TrainingError, lambda: train(corpus_dir=small_corpus), "runs")
    refused(CorpusError, lambda: ensure_corpus(load_config("tiny", small_overrides), progress=None), "corpora")
    assert leftovers(tmp_path) == sorted([*before, "runs", "corpora"])


def test_paths_with_spaces_and_resume_from_elsewhere(tmp_path, monkeypatch, text_folder):
    here, elsewhere = tmp_path / "hier ist's", tmp_path / "anderswo ü"
    here.mkdir(); elsewhere.mkdir()
    shutil.copytree(text_folder, here / "the text é")
    monkeypatch.chdir(here)
    overrides = with_sources(SMALL + ["train.length=8 steps"], "the text é")
    run = run_training("tiny", overrides, run_dir="my run ü")
    whole = [(r["step"], r["loss"]) for r in read_metrics(run) if "loss" in r]
    shutil.rmtree("my run ü/checkpoints/step-8"); Path("my run ü/report.json").unlink()
    monkeypatch.chdir(elsewhere)                              # the corpus is found by its absolute path, the sources are not read again
    run_training(run_dir=here / "my run ü", resume=True)
    assert [(r["step"], r["loss"]) for r in read_metrics(here / run) if "loss" in r] == whole and names(elsewhere) == []
    assert evaluate_run(Path("../hier ist's/my run ü"))["step"] == 8


# ---- signals, and several processes

def test_stopped_or_killed_while_preparing(tmp_path):
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = start(tmp_path, "prepare", "--source", "stdlib")
        read_until(process, "tokenizer")
        process.send_signal(number)
        rest = process.communicate(timeout=60)[0]
        assert process.returncode == code and rest.strip().splitlines()[-1].startswith("hsmoe: stopped by a signal") and names(tmp_path) == []
    process = start(tmp_path, "prepare", "--source", "stdlib")
    read_until(process, "tokenizer")
    process.kill(); process.communicate()
    left = names(tmp_path / "corpora")
    assert len(left) == 1 and left[0].endswith(".partial")
    corpus = tmp_path / "corpora" / left[0].removeprefix(".").rsplit(".", 2)[0]
    (tmp_path / "one.txt").write_text("some text " * 300)
    prepare_corpus(tmp_path / "one.txt", corpus, vocab_size=300)                      # the next attempt clears what the dead one left
    assert names(tmp_path / "corpora") == [corpus.name]


def test_two_prepare_the_same_corpus(tmp_path, small_overrides):
    both = [start(tmp_path, "prepare", *small_overrides) for _ in range(2)]
    outs = [p.communicate(timeout=120)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outs
    folders = {out.split()[-1] for out in outs}
    assert len(folders) == 1 and names(tmp_path / "corpora") == [Path(*folders).name]
    Corpus.open(tmp_path / folders.pop(), verify=True)


def test_two_runs_in_one_folder(tmp_path, monkeypatch, small_corpus, small_overrides):
    monkeypatch.chdir(tmp_path)
    cfg = load_config("tiny", small_overrides + ["train.length=4 steps"])
    first = Run(cfg, "run", small_corpus)
    before = {p: Path(p).read_bytes() for p in leftovers(tmp_path)}
    refused(TrainingError, lambda: Run(cfg, "run", small_corpus), "run already holds a run")
    refused(TrainingError, lambda: Run(cfg, "run", small_corpus, resume=True), "another process is training in run")
    monkeypatch.setattr(loop, "_no_run_in", lambda folder: None)                      # both looked before either began
    refused(TrainingError, lambda: Run(cfg, "run", small_corpus), "another process is training in run")
    assert {p: Path(p).read_bytes() for p in leftovers(tmp_path)} == before
    first.train()
    assert [r["step"] for r in read_metrics("run") if "loss" in r] == [1, 2, 3, 4]
    assert new_run_dir(cfg) != new_run_dir(cfg) and len(names("runs")) == 2


def test_stopped_in_the_time_trial(tmp_path, small_corpus, small_overrides):
    process = start(tmp_path, "train", "--corpus", small_corpus, "--minutes", "5", *small_overrides)
    wait_for(lambda: (tmp_path / "runs").exists())
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].startswith("hsmoe: stopped by a signal") and process.returncode == 143
    assert names(tmp_path) == []


def test_signals_in_a_step_and_in_the_final_validation(tmp_path, monkeypatch, small_corpus, small_overrides):
    before = signal.getsignal(signal.SIGINT)
    train = lambda: run_training("tiny", small_overrides + ["train.length=7 steps"], run_dir=tmp_path / "run", corpus_dir=small_corpus)
    resume = lambda: run_training(run_dir=tmp_path / "run", resume=True)
    def signalled(f, times, at=lambda: True):
        def call(*args):
            for _ in range(times if at() else 0): signal.raise_signal(signal.SIGINT)
            return f(*args)
        return call
    with monkeypatch.context() as m:
        m.setattr(loop, "train_step", signalled(loop.train_step, 2, lambda: len(read_metrics(tmp_path / "run")) > 6))
        refused(TrainingError, train, "stopped at once by a signal after step 5 of 7", f"resume {tmp_path / 'run'} to go on from step-5")
    with monkeypatch.context() as m:
        m.setattr(Run, "finish", signalled(Run.finish, 1))
        refused(TrainingError, resume, "stopped at once by a signal after step 7 of 7", "from step-7")
    assert not (tmp_path / "run/report.json").exists() and names(tmp_path / "run/checkpoints") == ["step-5", "step-7"]
    with monkeypatch.context() as m:                          # in the last step: all is saved, the final validation is left
        m.setattr(Run, "save", signalled(Run.save, 1))
        shutil.rmtree(tmp_path / "run/checkpoints/step-7")
        refused(TrainingError, resume, "after step 7 of 7", "from step-7")
    resume()
    assert json.loads((tmp_path / "run/report.json").read_text())["steps"] == 7 and [r["step"] for r in read_metrics(tmp_path / "run") if "loss" in r] == list(range(1, 8))
    assert signal.getsignal(signal.SIGINT) is before


# ---- no network

def test_without_a_network(tmp_path, text_folder):
    "All of it, by the notebook, with a source given as one word; Python may not even look for a machine elsewhere, and where it is allowed the process has no network at all."
    tried = tmp_path / "tried"
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(f"""
import socket
def refuse(name):
    real = getattr(socket if name == "getaddrinfo" else socket.socket, name)
    def call(*args, **kw):
        host = args[0] if name == "getaddrinfo" else args[1]
        host = host[0] if isinstance(host, tuple) else host
        if isinstance(host, str) and (host in ("localhost", "") or host.startswith(("127.", "/", "::1", chr(0)))) or isinstance(host, bytes): return real(*args, **kw)
        with open({str(tried)!r}, "a") as f: f.write(f"{{name}} {{host}}\\n")
        raise OSError(101, "Network is unreachable")
    return call
socket.getaddrinfo, socket.socket.connect = refuse("getaddrinfo"), refuse("connect")
""")
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    cut_off = alone if shutil.which("unshare") and shutil.which("ip") and subprocess.run([*alone, "true"], capture_output=True).returncode == 0 else []
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "HF_"))} | {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path / "home")}
    def run(*args):
        done = subprocess.run([*cut_off, sys.executable, "-m", "hsmoe.cli", *map(str, args)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout
    overrides = json.dumps(SMALL + ["train.length=3 steps", "train.wandb=offline", "train.tensorboard=true"])
    assert run("run", TRAIN, "-p", "source", text_folder, "-p", "minutes", "null", "-p", "overrides", overrides, "-p", "run_dir", "007").strip().endswith("007/train.ipynb")
    assert {"train.ipynb", "report.json", "tensorboard", "wandb"} <= set(names(tmp_path / "007")) and len(nbformat.read(tmp_path / "007/train.ipynb", 4).cells) > 10
    assert "bigram_loss" in run("eval", "007") and run("generate", "007", "--max-new-tokens", "3", "--prompt", "def ").startswith("def ")
    assert not tried.exists(), tried.read_text()
