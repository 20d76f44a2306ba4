"""The loader against its promises (SPEC T-01, T-05): what a run sees does not depend on how many processes, batches or threads read it, nor on where it was stopped; held-out text is never among it; memory does not grow with the corpus."""
import json, time
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from conftest import ROOT
from hsmoe.data.corpus import Shards, Split, prepare_corpus
from hsmoe.data.loader import KINDS, Loader, PackedDataset, Subset, halves, in_order


def split_of(folder, tokens, depth, file_tokens=50, name="train"):
    "A split over files of `file_tokens`."
    def shards(kind, values, dtype):
        parts = np.array_split(values, range(file_tokens, len(values), file_tokens))
        paths = [Path(folder, f"{name}-{i}.{kind}") for i in range(len(parts))]
        for path, part in zip(paths, parts): path.write_bytes(part.astype(dtype).tobytes())
        return Shards(paths, [len(p) for p in parts], dtype)
    return Split(name, shards("tokens", tokens, "<u4"), shards("depth", depth, np.uint8), np.array([0]), len(tokens), 3.0, 1 << 17, (1 << 17) - 1, "some corpus")


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    depth = np.random.default_rng(0).integers(1, 11, 211)
    depth[-1] = 0
    return split_of(tmp_path_factory.mktemp("split"), np.arange(211), depth)


SEGMENTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=4)
STAGES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 70)), max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SEGMENTS, STAGES, st.integers(1, 7), st.integers(0, 2**40))
def test_any_chain_of_worlds_batches_and_threads_is_one_order(split, segments, stages, seq_len, seed):
    "Each segment goes on, with its own (world, batch, threads), from where the one before stopped; batches made ahead and never taken are not lost."
    dataset = PackedDataset(split, seq_len)
    seen, state = [], None
    for world, batch, workers, steps in segments:
        ranks = [Loader(dataset, batch, seed, r, world, stages, workers) for r in range(world)]
        if state is not None:
            for loader in ranks: loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            for loader in ranks:
                b = next(loader)
                assert b.tokens_BL[:, 0].tolist() == (b.window_B * seq_len).tolist()
                seen += b.window_B.tolist()
        states = [loader.state_dict() for loader in ranks]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert state["position"] == len(seen)
    alone = Loader(dataset, 1, seed, stages=stages)
    assert seen == alone.window_at(np.arange(len(seen))).tolist()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2), st.integers(1, 60), st.integers(0, 2**40))
def test_no_window_twice_and_none_lost_across_an_epoch_end(split, world, batch, world2, batch2, workers, stop, seed):
    dataset = PackedDataset(split, 7)                                      # 30 windows
    ranks = [Loader(dataset, batch, seed, r, world, workers=workers) for r in range(world)]
    seen = []
    while len(seen) < stop: seen += [w for loader in ranks for w in next(loader).window_B.tolist()]
    state = ranks[0].state_dict()
    ranks = [Loader(dataset, batch2, seed, r, world2) for r in range(world2)]
    for loader in ranks: loader.load_state_dict(state)
    while len(seen) < 3 * len(dataset): seen += [w for loader in ranks for w in next(loader).window_B.tolist()]
    for epoch in range(3): assert sorted(seen[epoch * 30:(epoch + 1) * 30]) == list(range(30))
    assert seen[:30] != seen[30:60]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 210), st.integers(1, 12), st.integers(1, 210), st.data())
def test_rows_are_slices_of_the_stream(split, seq_len, lookahead, stride, data):
    "Over file borders and the end of the split, whichever way they are copied."
    dataset = PackedDataset(split, seq_len, lookahead, stride=min(stride, seq_len))
    windows = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=6))
    tokens, depth = dataset.rows(windows)
    assert tokens.dtype == depth.dtype == torch.int64
    stream, h = np.arange(211), split.depth.read(0, 211)
    for i, t, d in zip(windows, tokens.numpy(), depth.numpy()):
        begin = i * dataset.stride
        want = stream[begin:begin + seq_len + lookahead]
        assert t[:len(want)].tolist() == want.tolist() and (t[len(want):] == split.pad_id).all()
        reach = seq_len + lookahead - 1 - np.arange(seq_len)
        live = h[begin:begin + seq_len]
        assert d[:len(live)].tolist() == np.minimum(live, reach[:len(live)]).tolist() and not d[len(live):].any()


def test_long_windows_are_the_same_as_short_ones(tmp_path):
    "From `_LONG` ids on windows are copied one by one."
    depth = np.append(np.random.default_rng(1).integers(1, 11, 20_000), 0)
    s = split_of(tmp_path, np.random.default_rng(2).integers(0, 1 << 17, 20_001), depth, 3000)
    long, short = PackedDataset(s, 2048), PackedDataset(s, 512)
    tokens, h = long.rows(np.arange(len(long) - 1))
    parts, ph = short.rows(np.arange(len(short)))
    assert tokens[:, :2048].flatten().tolist() == parts[:, :512].flatten().tolist()[:tokens[:, :2048].numel()]
    assert h[:, :502].tolist() == ph[:4 * len(h)].view(len(h), 4, 512)[:, 0, :502].tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=400))
def test_a_subset_is_its_numbers(members):
    subset, numbers = Subset(np.array(members)), np.flatnonzero(members)
    assert len(subset) == len(numbers) and subset[np.arange(len(numbers))].tolist() == numbers.tolist()
    assert subset[np.arange(len(numbers))[::-1]].tolist() == numbers[::-1].tolist()


def test_a_curriculum_keeps_a_quarter_of_a_byte_a_window():
    subset = Subset(np.random.default_rng(0).random(1_000_000) < 0.5)
    assert subset._bits.nbytes + subset._before.nbytes < 0.26e6


@pytest.mark.parametrize("val", ["hash", "tail"])
def test_held_out_text_is_never_trained_on(tmp_path, val):
    "Letters of the held-out parts occur nowhere else: none is in a training batch, as token or as label, in two epochs and every stage."
    train, held = "abcdefghij klmnop\n", "ABCDEFGHIJ"
    rng = np.random.default_rng(0)
    texts = []
    for i in range(60):
        body = "".join(rng.choice(list(train), 180))
        texts.append({"text": body + "".join(rng.choice(list(held), 20))} if val == "tail" else {"text": body + chr(0x4E00 + i)})
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, texts)) + "\n", encoding="utf-8")
    corpus = prepare_corpus(tmp_path / "text.jsonl", tmp_path / "corpus", tokenizer="char", val=val, val_fraction=0.1)
    both = {name: PackedDataset(corpus.split(name), 64) for name in ("train", "val")}
    marks = {i for i, piece in enumerate(corpus.tokenizer.pieces) if piece and (piece.decode() in held or piece.decode() >= "\u4e00")}
    seen = {"train": set(), "val": set()}
    loader = Loader(both["train"], 5, seed=3, stages=[("easy", 40), ("hard", 40), ("all", 0)], workers=1)
    while loader.position < 80 + 2 * len(both["train"]): seen["train"] |= set(next(loader).tokens_BL.flatten().tolist())
    for b in in_order(both["val"], 5): seen["val"] |= set(b.tokens_BL.flatten().tolist())
    assert seen["val"] & marks, "the held-out part holds none of its marks: the test tests nothing"
    assert not (seen["train"] & seen["val"] & marks)
    if val == "tail": assert not seen["train"] & marks
    n = sum(len(corpus.split(s).starts) for s in ("train", "val"))
    assert n == (120 if val == "tail" else 60)


def anonymous():
    "MB of memory of this process's own."
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_flat_and_a_core_reads_ten_million_tokens_a_second(tmp_path):
    "From a corpus ten times as large a loader with a curriculum takes no more memory of its own (pages of the file belong to the system). Processor seconds, so that other programs do not count."
    grown = {}
    for i, n in enumerate((10_000_000, 10_000_000, 100_000_000)):                         # the first is not counted: what Python loads once
        for kind, size in (("t", 4), ("d", 1)):
            with open(tmp_path / f"{kind}{i}", "wb") as f: f.truncate(n * size)           # zeros that take no disk
        s = Split("train", Shards([tmp_path / f"t{i}"], [n], "<u4"), Shards([tmp_path / f"d{i}"], [n], np.uint8), np.array([0]), n, 3.0, 300, 2, "zeros")
        before = anonymous()
        loader = Loader(PackedDataset(s, 4096), 8, stages=[("easy", 100), ("all", 0)], workers=1)
        for _ in range(20): next(loader)
        begin = time.process_time()
        for _ in range(300): next(loader)
        rate, grown[n] = 300 * 8 * 4096 / (time.process_time() - begin), anonymous() - before
        assert rate > 10e6, f"{rate / 1e6:.1f} M tokens a second"
        del loader
    assert grown[100_000_000] < grown[10_000_000] + 4 and grown[100_000_000] < 16, grown


def test_a_missing_file_is_found_before_training(tmp_path, split):
    gone = split_of(tmp_path, np.arange(100), np.ones(100), name="gone")
    Path(gone.depth.paths[1]).unlink()
    with pytest.raises(FileNotFoundError): PackedDataset(gone, 7)


def test_files_that_are_deleted_meanwhile_can_still_be_read(tmp_path):
    s = split_of(tmp_path, np.arange(200), np.append(np.full(199, 3), 0), name="going")
    dataset = PackedDataset(s, 7)
    for path in s.depth.paths: Path(path).unlink()
    assert sum(int((b.depth_BS > 0).sum()) for b in in_order(dataset, 4)) == 199


def test_other_depths_change_depths_only(tmp_path, split):
    "The order of a curriculum is that of the depths it began with."
    new = np.append(np.full(210, 2, np.uint8), np.uint8(0))
    (tmp_path / "new").write_bytes(new.tobytes())
    stages = [("easy", 30), ("hard", 30), ("all", 0)]
    a, b = (Loader(PackedDataset(split, 7), 4, 1, stages=stages, workers=w) for w in (0, 2))
    for step in range(20):
        x, y = next(a), next(b)
        assert torch.equal(x.tokens_BL, y.tokens_BL) and (x.window_B == y.window_B).all()
        assert torch.equal(x.depth_BS, y.depth_BS) == (step <= 5)
        if step == 5: b.use_depths(Shards([tmp_path / "new"], [211], np.uint8))
        if step > 5: assert set(y.depth_BS.flatten().tolist()) <= {0, 1, 2}
    assert a.state_dict() == b.state_dict()


def test_half_of_the_windows_is_easy(split):
    dataset = PackedDataset(split, 7)
    two = {k: v[np.arange(len(v))] for k, v in halves(dataset).items()}
    means = dataset.mean_depths()
    assert sorted([*two["easy"], *two["hard"]]) == list(range(len(dataset))) and means[two["easy"]].min() >= means[two["hard"]].max()


def test_the_bench_page(tmp_path, monkeypatch):
    "nbs/bench/data on a small file: its rows, and the must that its table holds them against. Its cells are run here, which is quicker than a kernel."
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    space, shown = {}, []
    for cell in json.loads((ROOT / "nbs/bench/data.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code": continue
        source = "".join(cell["source"])
        exec(source, space)
        if "parameters" in cell["metadata"].get("tags", []): space |= dict(tokens=600_000, seq_len=1024, steps=5, rounds=1, results_dir="results")
        if source.rstrip().endswith('Markdown("\\n".join(lines))'): shown.append(space["lines"])
    (path,) = (tmp_path / "results").iterdir()
    record = json.loads(path.read_text())
    rows = {r["name"]: r for r in record["rows"]}
    assert {"loader_tokens_per_s", "loader_tokens_per_s_2_workers", "loader_tokens_per_s_cold"} <= rows.keys()
    assert rows["loader_tokens_per_s"]["must"] == 10e6 and "np.memmap, 0 workers" in rows["loader_tokens_per_s"]["peer"] and rows["loader_tokens_per_s_2_workers"]["ratio"] > 0
    assert record["settings"]["tokens"] == 600_000 and record["settings"]["load_before"] >= 0
    assert len(shown[0]) == 2 + len(rows) and "| 10 M | " in shown[0][2]
