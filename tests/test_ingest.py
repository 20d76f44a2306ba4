"""From sources of every format to a corpus (SPEC T-01, M-08): formats round trip, mixtures keep their weights, and neither the number of processes nor a kill changes a byte."""
import gzip, json, os, signal, subprocess, sys, time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conftest import ROOT
from hsmoe.config import ConfigError, load_config
from hsmoe.data.corpus import Corpus, prepare_corpus
from hsmoe.data.sources import CorpusError, find_documents, list_files
from hsmoe.data.tokenizer import load_tokenizer, train_bpe
from hsmoe.train.loop import corpus_dir_for, datasets

TEXTS = [f"document {i}: the quick brown fox counts to {i * i}\nand é 東京 {i % 7}\n" for i in range(300)]


def lines(texts, key="text"): return "".join(json.dumps({key: t, "url": "x"}) + "\n" for t in texts).encode()


def same(a, b): assert sorted(p.name for p in a.iterdir()) == sorted(p.name for p in b.iterdir()) and [p.name for p in a.iterdir() if p.read_bytes() != (b / p.name).read_bytes()] == []


def in_child(code, *args, **kw):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kw)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_every_format_gives_the_texts_back(tmp_path, ending):
    path = tmp_path / f"x.{ending}"
    if ending == "jsonl.zst":
        z = pytest.importorskip("zstandard")
        whole = z.ZstdCompressor().compress(lines(TEXTS[:99])) + z.ZstdCompressor().compress(lines(TEXTS[99:]))      # two frames
    elif ending == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": TEXTS, "n": list(range(300))}), path, row_group_size=64)
        whole = path.read_bytes()
    else: whole = gzip.compress(lines(TEXTS)) if ending.endswith("gz") else lines(TEXTS)
    path.write_bytes(whole)
    assert list(find_documents(path)) == [(f"x.{ending}:{i}", t) for i, t in enumerate(TEXTS, 1)]
    from hsmoe.data.sources import read_records
    assert [n for n, *_ in read_records(list_files(path)[0], 150)] == list(range(151, 301))                          # from the middle
    if ending == "jsonl": return
    path.write_bytes(whole[:-7])
    with pytest.raises(CorpusError, match=f"x.{ending} is (damaged or cut off|not a parquet file)"): prepare_corpus(path, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_dataset_on_disk_and_columns_that_are_wrong(tmp_path):
    hub, pa, pq = pytest.importorskip("datasets"), pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    hub.Dataset(hub.table.InMemoryTable(pa.table({"body": TEXTS[:20], "n": list(range(20))})), fingerprint="made").save_to_disk(str(tmp_path / "data"))
    entry = "sources: [{name: d, path: data, format: datasets, text: %s}]"
    (tmp_path / "m.yaml").write_text(entry % "body")
    assert [t for _, t in find_documents(tmp_path / "m.yaml")] == TEXTS[:20]
    (tmp_path / "m.yaml").write_text(entry % "text")
    with pytest.raises(CorpusError, match="source d, row 1: no text under 'text'; its columns are body, n"): list(find_documents(tmp_path / "m.yaml"))
    pq.write_table(pa.table({"n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match="no column 'text'; its columns are n"): list(find_documents(tmp_path / "x.parquet"))


def test_a_mixture_keeps_its_weights_and_drops_duplicates_across_formats(tmp_path):
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.jsonl").write_bytes(lines(TEXTS[:200])); (tmp_path / "web" / "b.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[:50] + [" "])))
    (tmp_path / "book.jsonl").write_bytes(lines(TEXTS[200:260] + TEXTS[:1], "body")); (tmp_path / "page.txt").write_text(TEXTS[210])
    (tmp_path / "mix.yaml").write_text("sources:\n- {name: web, path: web, weight: 0.5}\n- {name: books, path: book.jsonl, text: body, weight: 2.5, limit: 60}\n- {name: page, path: page.txt}\n")
    corpora = [prepare_corpus(tmp_path / "mix.yaml", tmp_path / f"c{i}", vocab_size=300, val="hash", workers=i) for i in (0, 1)]
    same(corpora[0].folder, corpora[1].folder)
    s = corpora[0].manifest["sources"]
    train = corpora[0].split("train")
    ends = [*train.starts[1:], len(train.tokens)]
    times = Counter(corpora[0].tokenizer.decode(train.tokens.read(a, b)) for a, b in zip(train.starts, ends))
    assert all(times[t] == 0 for t in TEXTS[260:]) and max(times[t] for t in TEXTS[:200]) == 1
    assert {times[t] for t in TEXTS[200:260]} <= {0, 2, 3} and {2, 3} <= {times[t] for t in TEXTS[200:260]}          # 0: held out
    assert 80 <= s["web"]["documents"] <= 130 and s["web"]["empty"] == 1 and s["page"] == dict(duplicate=1)
    assert sum(x.get("tokens", 0) for x in s.values()) == sum(len(corpora[0].split(n).tokens) for n in ("train", "val"))
    val = corpora[0].split("val")
    held = [corpora[0].tokenizer.decode(val.tokens.read(a, b)) for a, b in zip(val.starts, [*val.starts[1:], len(val.tokens)])]
    assert len(held) == len(set(held)) and not set(held) & set(times)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    "Four megabytes in three files."
    folder = tmp_path_factory.mktemp("source")
    for k in range(3): (folder / f"{k}.jsonl").write_bytes(lines(f"{k} {i} " + TEXTS[i % 300] * 8 for i in range(2500)))
    train_bpe(TEXTS, 320).save(folder.parent)
    (folder.parent / "tokenizer.json").rename(folder.parent / "own.json")
    return folder


OPTIONS = "tokenizer=sys.argv[3], val='hash', shard_tokens=200_000"


def test_workers_and_kills_change_no_byte(source, tmp_path):
    own = source.parent / "own.json"
    options = dict(tokenizer=str(own), val="hash", shard_tokens=200_000)
    whole = prepare_corpus(source, tmp_path / "whole", workers=0, **options)
    for workers in (1, 2, 3): same(whole.folder, prepare_corpus(source, tmp_path / f"w{workers}", workers=workers, **options).folder)
    code = f"import sys; from hsmoe.data.corpus import prepare_corpus; prepare_corpus(sys.argv[1], sys.argv[2], workers=1, {OPTIONS}, progress=print)"
    child, out = in_child(code, source, tmp_path / "killed", own), tmp_path / "killed"
    until = time.time() + 60
    while not list(tmp_path.glob(".killed.*/state.json")) and time.time() < until and child.poll() is None: time.sleep(0.01)
    child.send_signal(signal.SIGKILL); child.wait(); child.stdout.close()
    (part,) = tmp_path.glob(".killed.*.partial")
    assert not out.exists() and (part / "state.json").exists()
    said = []
    resumed = prepare_corpus(source, out, workers=2, progress=said.append, **options)
    assert any(line.startswith("taking up what was begun") for line in said)
    same(whole.folder, resumed.folder); Corpus.open(out, verify=True)
    assert not list(tmp_path.glob(".*partial")) and resumed.manifest["counts"] == whole.manifest["counts"]


def test_a_partial_folder_is_not_mixed_with_another_request_and_is_checked(source, tmp_path):
    own = source.parent / "own.json"
    options, said = dict(tokenizer=str(own), val="hash", shard_tokens=200_000, workers=0), []

    def interrupt(line):
        if line.startswith("bigram"): raise KeyboardInterrupt
    def begin():
        with pytest.raises(KeyboardInterrupt): prepare_corpus(source, tmp_path / "c", progress=interrupt, **options)
        return next(tmp_path.glob(".c.*.partial"))
    part = begin()
    other = prepare_corpus(source, tmp_path / "c", progress=said.append, **{**options, "heuristics": True})
    assert not any("taking up" in line for line in said) and not part.exists()
    (tmp_path / "c").rename(tmp_path / "other"); assert other.manifest["depth"]["heuristics"]
    part = begin()
    data = bytearray((part / "train-00000.tokens.bin").read_bytes()); data[100] ^= 1
    (part / "train-00000.tokens.bin").write_bytes(data)
    with pytest.raises(CorpusError, match="train-00000.tokens.bin has changed"): prepare_corpus(source, tmp_path / "c", **options)
    assert not part.exists() and not (tmp_path / "c").exists()


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    code = (f"import resource, sys; from hsmoe.data.corpus import prepare_corpus; prepare_corpus(sys.argv[1], sys.argv[2], {OPTIONS}, workers=1); "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    train_bpe(TEXTS, 320).save(tmp_path)
    peak = []
    for k, n in enumerate((3000, 30000)):
        (tmp_path / f"{k}.jsonl").write_bytes(lines(f"{i} " + TEXTS[i % 300] * 6 for i in range(n)))
        child = in_child(code, tmp_path / f"{k}.jsonl", tmp_path / f"c{k}", tmp_path / "tokenizer.json")
        peak.append(int(child.communicate(timeout=90)[0].split()[-1]) / 1024); assert child.returncode == 0
    assert peak[1] - peak[0] < 120, peak                       # MB for ten times the text; the chunks of later phases are full only in the larger


def test_the_configuration_reaches_tokenizer_special_tokens_and_overlap(source, tmp_path):
    own = source.parent / "own.json"
    base = ["data.seq_len=64", f"data.tokenizer={own}", "data.overlap=16", f"data.sources={json.dumps([str(source / '0.jsonl')])}"]
    cfg = load_config("tiny", base)
    folder = corpus_dir_for(cfg, tmp_path)
    assert folder.name.startswith("own768-") and folder != corpus_dir_for(load_config("tiny", [*base, "data.special_tokens={pad: '<|end_of_text|>'}"]), tmp_path)
    corpus = prepare_corpus(source / "0.jsonl", folder, tokenizer=str(own), special_tokens=dict(pad="<|end_of_text|>"))
    assert corpus.manifest["tokenizer"]["pad_id"] == corpus.tokenizer.pad_id == corpus.tokenizer.eos_id == 1
    train, val = datasets(cfg, corpus)
    assert (train.stride, val.stride) == (48, 64) and train[1][0][:16].tolist() == train[0][0][48:64].tolist()
    for bad, says in (("data.overlap=64", "must be below"), ("data.special_tokens={middle: x}", "special_tokens"), ("data.workers=-1", "workers")):
        with pytest.raises(ConfigError, match=says): load_config("tiny", [*base, bad])
    with pytest.raises(CorpusError, match="is unknown: bpe, char, llama3, or the path"): prepare_corpus(source, tmp_path / "x", tokenizer="nowhere.json")
    assert load_tokenizer(own).encode_padded(["ab"], 8)[0][0, 0] == 0


def test_a_slurm_array_makes_the_corpus(source, tmp_path):
    "scripts/prepare.sbatch with Slurm's variables and an `sbatch` that notes what it is given; what it noted is run when all parts are there."
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text('#!/bin/sh\nfor last; do :; done\nprintf %s "$last" > wrapped; printf "%s\\n" "$@" > given\n')
    (tmp_path / "bin/sbatch").chmod(0o755)
    small = tmp_path / "small.jsonl"
    small.write_bytes(lines(f"{i} " + TEXTS[i % 300] for i in [*range(400), 0, 1, 2]))
    asked = ["--preset", "tiny", "data.seq_len=64", f"data.tokenizer={source.parent / 'own.json'}", f"data.sources={json.dumps([str(small)])}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]), "SLURM_SUBMIT_DIR": str(tmp_path),
           "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "2"}
    for task in ("2", "1"):
        subprocess.run(["bash", str(ROOT / "scripts/prepare.sbatch"), *asked], env={**env, "SLURM_ARRAY_TASK_ID": task}, check=True, capture_output=True, cwd=tmp_path)
        assert (tmp_path / "wrapped").exists() == (task == "1"), "the first of the array submits the job that joins"
    assert "--dependency=afterok:7" in (tmp_path / "given").read_text().splitlines()
    part = next((tmp_path / "corpora").glob("*-part-1-of-2"))
    with pytest.raises(CorpusError, match=r"part 1 of 2 of a corpus .* join the parts first"): Corpus.open(part).split("train")
    done = subprocess.run(["bash", "-c", (tmp_path / "wrapped").read_text()], env=env, check=True, capture_output=True, text=True, cwd=tmp_path)
    folder = tmp_path / done.stdout.splitlines()[-1]
    assert folder == corpus_dir_for(load_config("tiny", asked[2:]), tmp_path / "corpora")
    whole = prepare_corpus(small, tmp_path / "whole", tokenizer=asked[3].split("=")[1], vocab_size=768).manifest
    joined = Corpus.open(folder, verify=True).manifest
    assert joined["counts"] == whole["counts"] == {"documents": 400, "duplicate": 3} and joined["splits"]["val"]["bytes"] == whole["splits"]["val"]["bytes"]
