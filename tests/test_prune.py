"""Pruned BPE: exposure against a naive encoder, exactness on any bytes, other people's tokenizer files, and a model that goes along."""
import json, sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer as Backend, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

from hsmoe.cli import USER_ERRORS, app
from hsmoe.config import load_config, save_config
from hsmoe.data.corpus import Corpus
from hsmoe.data.prune import (MODES, PrunedTokenizer, PruneError, Remap, corpus_texts, count_words, decode_bytes, encode_bytes, load_tokenizer, measure_exposure, merge_parts, prune,
                              prune_embedding, shortest_split)
from hsmoe.data.tokenizer import SPECIALS, Tokenizer, char_tokenizer, train_bpe
from hsmoe.evaluate import sample_text
from hsmoe.quant.fake import block_formats
from hsmoe.train.checkpoint import save_state
from hsmoe.train.loop import build_model, load_run

TEXT = [p.read_text("utf-8") for p in sorted(Path(sysconfig.get_path("stdlib"), "json").glob("*.py"))]
WORDS = st.lists(st.sampled_from(["ab", "abc", "abab", "bcd", "cd", "abcd", "aaaa", "aaa", "é", "\n", "x"]), min_size=1, max_size=40).map(" ".join)


def naive(merges, word):
    "Ids by BPE's definition, and how often each token is formed on the way: the lowest rank, from the left, one at a time."
    row, formed = list(word), Counter(word)
    while pairs := [(merges[p], i) for i, p in enumerate(zip(row, row[1:])) if p in merges]:
        _, i = min(pairs)
        row[i:i + 2] = [row[i] + row[i + 1]]
        formed[row[i]] += 1
    return row, formed


@settings(max_examples=40, deadline=None, derandomize=True)
@given(WORDS, st.integers(260, 300))
def test_exposure_is_what_a_naive_encoder_counts(text, vocab_size):
    tokenizer = train_bpe([text], vocab_size)
    merges = {tuple(pair): rank for rank, pair in enumerate(json.loads(tokenizer.backend.to_str())["model"]["merges"])}
    alone, uses = Counter(), Counter()
    for word, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text):
        row, formed = naive(merges, word)
        alone.update(row)
        uses.update(formed)
    seen = measure_exposure(tokenizer, [text])
    for i in range(3, tokenizer.vocab_size):
        name = tokenizer.backend.id_to_token(i)
        assert (seen.alone_V[i], seen.uses_V[i]) == (alone[name], uses[name]), name


@settings(max_examples=40, deadline=None, derandomize=True)
@given(WORDS, st.integers(262, 320), st.sampled_from(MODES), st.sampled_from([0.1, 0.4, 1.0]), WORDS, st.binary(max_size=30))
def test_any_pruned_tokenizer_is_exact(text, vocab_size, mode, threshold, other, data):
    old = train_bpe([text], vocab_size)
    new = prune(old, [text], threshold, mode, rounds=50)
    assert sum(map(len, new.encode_batch([text]))) == new.report["tokens"][1]
    for s in (text, other, data.decode("latin-1"), ""):
        ids = new.encode(s)
        assert new.decode(ids) == s and new.token_bytes()[ids].sum() == len(s.encode())
        assert new.decode(new.remap(old.encode(s))) == s
        if mode == "shrink": assert ids == new.remap(old.encode(s)).tolist()
    assert decode_bytes(new, encode_bytes(new, data)) == data == decode_bytes(new, new.remap(encode_bytes(old, data)))
    assert [(i,) for i in (new.bos_id, new.eos_id, new.pad_id)] == list(new.remap.sequences[:3])
    assert {bytes([b]) for b in range(256)} <= set(new.pieces) and len(set(new.pieces[3:])) == len(new.pieces) - 3
    before, after = new.report["tokens"]
    if mode == "shrink": assert after >= before and new.report["rounds"][-1]["candidates"] == 0
    if mode == "exchange": assert after <= before and new.vocab_size == old.vocab_size
    lengths = [r["tokens"] for r in new.report["rounds"]]
    if mode == "exchange": assert all(b < a for a, b in zip(lengths, lengths[1:]))


def test_refill_takes_the_pair_that_saves_most():
    old = train_bpe(TEXT, 600)
    one = prune(old, TEXT, 0.4, "exchange", rounds=1)
    pairs = Counter()
    for word, n in count_words(old, TEXT).items():
        for pair in zip(word, word[1:]): pairs[pair] += n
    best = max(n for (l, r), n in pairs.items() if old.pieces[l] + old.pieces[r] not in old.pieces)
    assert pairs[one.added[0]] == best
    price = {i: len(shortest_split(old.pieces[i], {p: j for j, p in enumerate(old.pieces) if p and j not in one.removed})) - 1 for i in one.removed}
    seen = measure_exposure(old, TEXT)
    assert all(seen.share_V()[i] < 0.4 for i in one.removed)
    assert sum(price[i] * seen.alone_V[i] for i in one.removed) < one.report["tokens"][0]
    again = prune(old, TEXT, 0.4, "exchange", rounds=1)
    assert (again.removed, again.added) == (one.removed, one.added)
    rounds = prune(old, TEXT, 0.4, "exchange").report["rounds"]
    assert len(rounds) > 2 and all(b["tokens"] < a["tokens"] for a, b in zip(rounds, rounds[1:])) and rounds[-1]["candidates"] > 0
    assert prune(old, TEXT, 0.4, "refill").report["tokens"][1] > rounds[-1]["tokens"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(min_size=1, max_size=8).map(lambda b: bytes(x % 3 + 97 for x in b)), st.sets(st.binary(min_size=2, max_size=4).map(lambda b: bytes(x % 3 + 97 for x in b)), max_size=12))
def test_split_is_the_shortest(piece, others):
    pieces = sorted(others | {b"a", b"b", b"c"})
    split = shortest_split(piece, {p: i for i, p in enumerate(pieces)})
    assert b"".join(pieces[i] for i in split) == piece
    reached, n = {b""}, 0
    while piece not in reached:
        reached, n = {r + p for r in reached for p in pieces if piece.startswith(r + p)}, n + 1
    assert len(split) == n


def other_tool(tmp_path, **options):
    "A tokenizer.json as others write them: special ids last, a word pattern of its own, and a token that is no merge."
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE(**options))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=letters))
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    (tmp_path / "tokenizer.json").write_text(backend.to_str(pretty=True), encoding="utf-8")
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize("options", [{}, dict(ignore_merges=True)])
@pytest.mark.parametrize("mode", MODES)
def test_tokenizer_files_of_others(tmp_path, mode, options):
    old = other_tool(tmp_path, **options)
    assert (old.bos_id, old.eos_id, old.pad_id) == (500, 501, 502)
    new = prune(old, TEXT, mode=mode)
    assert new.removed and (bool(new.added) == (mode != "shrink"))
    if mode != "shrink": assert (new.bos_id, new.eos_id, new.pad_id, new.vocab_size) == (500, 501, 502, 503)
    else: assert (new.bos_id, new.vocab_size) == (500 - len(new.removed), 503 - len(new.removed))
    assert sum(map(len, new.encode_batch(TEXT))) == new.report["tokens"][1]
    new.save(tmp_path / "pruned")
    again = load_tokenizer(tmp_path / "pruned")
    assert isinstance(again, PrunedTokenizer) and again.report == new.report and again.remap == new.remap == Remap.load(tmp_path / "pruned" / "remap.json")
    for text in (*TEXT, "東京 <|end_of_text|> 12345", "x" * 5000, " " * 5000, "\r\n\0"):
        assert again.encode(text) == new.encode(text) and again.decode(again.encode(text)) == text
    assert again.encode_padded("def", 8)[0].tolist()[0] == again.bos_id


def test_what_cannot_be_pruned_is_a_sentence(tmp_path):
    def refuses(says, f, *args, **kw):
        with pytest.raises(PruneError) as e: f(*args, **kw)
        assert says in str(e.value) and "\n" not in str(e.value), e.value
    refuses("its model is WordLevel", prune, char_tokenizer(["ab"]), ["ab"])
    bpe = train_bpe(TEXT, 400)
    for change, says in ((dict(byte_fallback=True), "byte_fallback"), (dict(end_of_word_suffix="</w>"), "end_of_word_suffix"), (dict(dropout=0.1), "dropout")):
        d = json.loads(bpe.backend.to_str())
        d["model"].update(change)
        refuses(says, prune, Tokenizer(Backend.from_str(json.dumps(d))), TEXT)
    d = json.loads(bpe.backend.to_str())
    lost = bpe.backend.id_to_token(bpe.pieces.index(b"\xff"))
    d["model"]["vocab"] = {("~~" if k == lost else k): v for k, v in d["model"]["vocab"].items()}
    refuses("1 of the 256 bytes", prune, Tokenizer(Backend.from_str(json.dumps(d))), TEXT)
    new = prune(bpe, TEXT)
    refuses("another tokenizer", new.remap.require, train_bpe(TEXT[:1], 400), "corpus x")
    new.remap.require(bpe, "its own corpus")
    refuses("outside the vocabulary", new.remap, [400])
    refuses("no row for each of the 400 ids", prune_embedding, torch.zeros(399, 2), new.remap)
    (tmp_path / "remap.json").write_text('{"sequences": [[0]]}')
    refuses("not a remap", Remap.load, tmp_path / "remap.json")
    new.save(tmp_path)
    with pytest.raises(ValueError, match="is not a tokenizer file"): Tokenizer.load(tmp_path)      # no other reader mistakes it for what it is not
    with pytest.raises(Exception): Backend.from_file(str(tmp_path / "tokenizer.json"))


@pytest.fixture(scope="module")
def untrained_run(tmp_path_factory):
    "A run folder with a checkpoint of a model that has the ids of its tokenizer."
    folder = tmp_path_factory.mktemp("runs") / "run"
    cfg = load_config("tiny", ["model.vocab_size=320", "model.d_model=64", "model.n_heads=2", "model.n_layers=1", "model.max_seq_len=64", "data.seq_len=64"])
    torch.manual_seed(0)
    model = build_model(cfg)
    save_state(folder / "checkpoints" / "step-5", dict(model=dict(model.state_dict()), formats=block_formats(model), optimizer=dict(big=torch.zeros(9)), step=5))
    train_bpe(TEXT, 320).save(folder)
    for name in ("config.json", "config.yaml"): save_config(cfg, folder / name)
    return folder


@pytest.mark.parametrize("mode", ["shrink", "exchange"])
def test_command_prunes_a_run(untrained_run, tmp_path, mode):
    source, out = tmp_path / "text.txt", tmp_path / "out"
    source.write_text("\n".join(TEXT))
    result = CliRunner().invoke(app, ["prune-tokenizer", str(untrained_run), "--source", str(source), "--mode", mode, "--run", str(untrained_run), "--out", str(out)])
    assert result.exit_code == 0, result.exception
    assert "M-09" in result.output and str(out) in result.output
    new, (model, cfg), (old, _) = load_tokenizer(out), load_run(out), load_run(untrained_run)
    assert len(model.embed.weight) == cfg.model.vocab_size == new.vocab_size and new.removed
    for i, origin in enumerate(new.remap.origins): torch.testing.assert_close(model.embed.weight[i], old.embed.weight[list(origin)].mean(0))
    kept = torch.tensor([i for i, s in enumerate(new.remap.sequences) if len(s) == 1])
    row = kept[torch.randint(0, len(kept), (1, 30), generator=torch.Generator().manual_seed(1))]
    with torch.no_grad(): a, b = old(row)[0][0, :][:, kept], model(torch.tensor(new.remap(row[0]))[None])[0][0, :]
    assert torch.equal(a, b[:, new.remap(kept)])
    assert isinstance(sample_text(out, "def f", 20, seed=1)[0], str)
    assert json.loads((out / "pruned.json").read_text())["mode"] == mode


def test_command_refuses_and_leaves_nothing(untrained_run, tmp_path):
    def refuses(says, *args):
        result = CliRunner().invoke(app, ["prune-tokenizer", *map(str, args)])
        assert isinstance(result.exception, USER_ERRORS) and says in str(result.exception), result.exception
        assert not list(tmp_path.glob("out*"))
    (tmp_path / "other").mkdir()
    train_bpe(TEXT[:1], 320).save(tmp_path / "other")
    source = tmp_path / "text.txt"
    source.write_text(TEXT[0])
    refuses("no text to measure exposure on", tmp_path / "other", "--out", tmp_path / "out")
    refuses("another tokenizer", tmp_path / "other", "--source", source, "--run", untrained_run, "--out", tmp_path / "out")
    refuses("shrink, refill, exchange", untrained_run, "--source", source, "--mode", "cut", "--out", tmp_path / "out")
    refuses("no tokenizer at", tmp_path, "--source", source, "--out", tmp_path / "out")
    refuses("exists already", untrained_run, "--source", source, "--out", untrained_run)
    refuses("is a file", untrained_run, "--source", source, "--out", source / "out")


def test_command_prunes_the_tokenizer_of_a_corpus(small_corpus, tmp_path):
    result = CliRunner().invoke(app, ["prune-tokenizer", str(small_corpus), "--mode", "refill", "--threshold", "0.2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.exception
    corpus, new = Corpus.open(small_corpus), load_tokenizer(tmp_path / "out")
    assert new.report["threshold"] == 0.2 and new.removed and len(new.added) == len(new.removed)
    new.remap.require(corpus.tokenizer, "the corpus")
    ids = corpus.split("val").tokens.read(0, 10_000)
    assert new.decode(new.remap(ids)) == corpus.tokenizer.decode(ids)
    texts = list(corpus_texts(corpus))
    assert len(texts) == len(corpus.split("train").starts) and sum(map(len, new.encode_batch(texts))) == new.report["tokens"][1]
    assert 0 < len(list(corpus_texts(corpus, 5000))) < len(texts)


def test_parts_of_tokens_that_no_merge_reaches():
    text = ["abc"] * 4 + ["ab"] + ["xyq"] * 5
    d = json.loads(train_bpe(["abc"] * 4 + ["ab"], 261).backend.to_str())
    d["model"]["vocab"]["xy"] = 261
    tokenizer = Tokenizer(Backend.from_str(json.dumps(d | {"model": d["model"] | {"ignore_merges": True}})))
    x, y, q = (tokenizer.pieces.index(c) for c in (b"x", b"y", b"q"))
    assert merge_parts(tokenizer)[261] is None
    assert measure_exposure(tokenizer, ["xy"]).uses_V[[261, x]].tolist() == [1, 0]
    new = prune(tokenizer, text, mode="refill")
    assert (new.removed, new.added) == ([259], [(y, q)])              # not x y, which is a token already
    assert new.decode(new.encode("xy abxyq")) == "xy abxyq"


def test_added_tokens_stay(tmp_path):
    old = other_tool(tmp_path)
    old.backend.add_tokens(["<tab>"])
    old.save(tmp_path)
    old = Tokenizer.load(tmp_path)
    new = prune(old, ["<tab><tab> def <tab>"] * 50 + TEXT, threshold=1.0, mode="refill")
    assert old.vocab_size == 504 and not {503, 500, 501, 502} & {*new.removed, *(i for pair in new.added for i in pair)}
    assert new.remap.sequences[503] == (503,)
