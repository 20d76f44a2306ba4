"""Several tokens a pass: the text is what plain decoding writes, to the last bit or in distribution, whatever drafts; and what a run's drafts need."""
import itertools, json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from hsmoe.cli import USER_ERRORS, app
from hsmoe.config import ConfigError, load_config
from hsmoe.evaluate import sample_text
from hsmoe.model.attention import KVCache
from hsmoe.model.hybrid import build_model, generate
from hsmoe.mtp import decode
from hsmoe.mtp.decode import accept, chi_square, first_difference, passes_differ, speculative_generate, verify
from hsmoe.mtp.draft import Draft, DraftHeads, HeadDraft, NGramDraft, Sampling, load_draft_heads, save_draft_heads, write_medusa
from hsmoe.train.loop import Run


def small(*overrides, seed=0, **sizes):
    "An untrained model whose depth heads say something."
    torch.manual_seed(seed)
    sizes = dict(vocab_size=96, max_seq_len=32, n_layers=2, d_model=64, n_heads=2) | sizes
    model = build_model(load_config("tiny", ["data.seq_len=32", *(f"model.{k}={v}" for k, v in sizes.items()), *overrides])).eval()
    nn.init.normal_(model.depth_heads.weight, std=0.05)
    return model


@pytest.fixture(scope="module")
def exact():
    "In fp64, where no rounding of another matrix shape reaches a quantiser's threshold."
    model = small(n_layers=1).double()
    model.compute_dtype = torch.float64
    return model


@pytest.fixture(scope="module")
def few():
    "Four tokens, so that all texts can be counted; logits that differ."
    model = small(vocab_size=4, n_layers=1, d_model=32, n_heads=1)
    model.embed.weight.data.mul_(12)
    return model


def heads_for(model, seed=0):
    "Draft heads with every part at random."
    torch.manual_seed(seed)
    heads = DraftHeads(model, rank=4, places=3)
    for p in heads.parameters(): nn.init.normal_(p, std=0.3)
    return heads


PROMPTS = torch.randint(0, 96, (3, 5), generator=torch.Generator().manual_seed(1))


class Noise:
    "Drafts tokens and probabilities at random."
    longest, ranks = 9, False
    def __init__(self): self.g = torch.Generator().manual_seed(0)
    def __call__(self, texts, hidden_BD, n, how):
        q = torch.rand(len(texts), n, 96, generator=self.g).double().softmax(-1)
        return Draft(torch.multinomial(q.flatten(0, 1), 1, generator=self.g).view(len(texts), n), q)


@pytest.mark.parametrize("depth", [2, 10])
def test_greedy_text_is_that_of_plain_decoding(exact, depth):
    "For rows that go their own ways, past the end of the context, and with an end-of-text id."
    plain = generate(exact, PROMPTS, 36, temperature=0, vocab_size=95)
    for drafter in (None, NGramDraft(2, HeadDraft(exact, heads_for(exact).double())), Noise()):
        assert torch.equal(speculative_generate(exact, PROMPTS, 36, depth=depth, drafter=drafter, temperature=0, vocab_size=95)[0], plain)
    eos = plain[1, 12].item()
    got, stats = speculative_generate(exact, PROMPTS, 36, depth=depth, temperature=0, vocab_size=95, eos_id=eos)
    assert torch.equal(got, generate(exact, PROMPTS, 36, temperature=0, vocab_size=95, eos_id=eos))
    assert stats.tokens == sum(min(36, (row[5:] == eos).nonzero()[0].item() + 1 if eos in row[5:] else 36) for row in got)


def test_candidates_do_not_change_greedy_text(exact):
    plain = generate(exact, PROMPTS[:2], 32, temperature=0)
    for drafter in (HeadDraft(exact), NGramDraft(2, HeadDraft(exact, heads_for(exact).double()))):
        assert torch.equal(speculative_generate(exact, PROMPTS[:2], 32, depth=4, candidates=5, drafter=drafter, temperature=0)[0], plain)


@pytest.mark.parametrize("overrides", [[], ["quant.attention_format=null"], ["quant.softmax=normalised", "model.qk_norm=true"]])
def test_one_pass_has_the_bits_of_single_passes(overrides):
    "And would not have them without the mode; what was rejected leaves nothing in the caches."
    model = small(*overrides)
    text = torch.randint(0, 96, (1, 30), generator=torch.Generator().manual_seed(2))
    assert [passes_differ(model, text, n) for n in (2, 7)] == [None, None]
    assert "differ in" in passes_differ(model, text, 7, invariant=False)
    caches = [[KVCache(32) for _ in model.layers] for _ in range(2)]
    with torch.no_grad():
        for some in caches: model(text[:, :20], some)
        verify(model, torch.cat([text[:, 20:23], text[:, :4]], 1), caches[0], invariant=True)
        for cache in caches[0]: cache.crop(23)
        verify(model, text[:, 23:26], caches[0], invariant=True)
        for token in text[:, 20:26].split(1, 1): model(token, caches[1])
    for a, b in zip(*caches): assert a.length == b.length == 26 and torch.equal(a.k[:, :, :26], b.k[:, :, :26]) and torch.equal(a.v[:, :, :26], b.v[:, :, :26])
    assert F.linear is torch._C._nn.linear, "the products are the usual ones again"


def test_invariant_text_is_that_of_generate():
    model = small()
    alone = torch.cat([generate(model, p[None], 32, temperature=0) for p in PROMPTS[:2]])
    assert torch.equal(speculative_generate(model, PROMPTS[:2], 32, depth=6, temperature=0, invariant=True)[0], alone)
    with pytest.raises(ValueError, match="candidates = 3"): speculative_generate(model, PROMPTS, 4, candidates=3, invariant=True)


def test_first_differences_are_near_ties():
    "Every token has a twin with nearly its logit, so roundings decide."
    model = small()
    model.embed.weight.data[1::2] = model.embed.weight.data[0::2] + 1e-7 * torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    pairs = [(generate(model, p[None], 24, temperature=0)[0], speculative_generate(model, p[None], 24, depth=6, temperature=0)[0][0]) for p in PROMPTS]
    ties = [t for t in (first_difference(model, *pair) for pair in pairs) if t]
    assert ties and all(t.share < 1e-3 for t in ties)
    wrong = pairs[0][0].clone()
    wrong[15] = (wrong[15] + 6) % 96
    assert first_difference(model, pairs[0][0], wrong)[0] == 15 and first_difference(model, pairs[0][0], wrong).share > 0.01


def spoken(few, n, length=4, begin=(1, 3), **kw):
    "χ² and limit of n drawn texts of some tokens against the probabilities that the model gives them."
    begin, texts = torch.tensor([begin]), torch.tensor(list(itertools.product(range(4), repeat=length)))
    how = {k: kw[k] for k in ("temperature", "top_k") if k in kw}
    with torch.no_grad(): p = Sampling(**how).probs(few(torch.cat([begin.expand(len(texts), -1), texts], 1))[0][:, begin.shape[1] - 1:-1])
    got, stats = speculative_generate(few, begin.expand(n, -1), length, depth=4, generator=torch.Generator().manual_seed(7), **kw)
    return chi_square(torch.bincount(got[:, begin.shape[1]:] @ 4 ** torch.arange(length - 1, -1, -1), minlength=4**length), p.gather(2, texts[..., None]).prod(1))


@pytest.mark.parametrize("options", [dict(), dict(sampled=True), dict(sampled=True, threshold=0.45)])
def test_drawn_text_has_the_trunks_distribution(few, options):
    "Certain and drawn drafts, Markov heads, and drafts that end early by what the confidence head says of the tokens before."
    heads = heads_for(few) if options else None
    for how in (dict(temperature=1.0), dict(temperature=0.6, top_k=3)):
        value, limit = spoken(few, 1500, drafter=HeadDraft(few, heads, **options), **how)
        assert value < limit, how


def test_drawn_text_of_candidates_has_it_too(few, monkeypatch):
    drafter = HeadDraft(few, heads_for(few))
    value, limit = spoken(few, 200, 3, candidates=3, drafter=drafter)
    assert value < limit
    monkeypatch.setattr(decode, "follow", lambda paths, chosen: (0, len(paths[0])))     # wrong: goes on behind a draft that the trunk did not choose
    value, limit = spoken(few, 200, 3, candidates=3, drafter=drafter)
    assert value > 1.2 * limit


def test_a_wrong_rule_is_noticed(few, monkeypatch):
    "The same test, with the replacement drawn from p, and with every draft kept."
    drafter = HeadDraft(few, heads_for(few), sampled=True)
    def from_p(logits, draft, how):
        kept, nxt = accept(logits, draft, how)
        p = how.probs(logits)[torch.arange(len(kept)), kept]
        return kept, torch.where(kept < draft.tokens_BN.shape[1], how.draw(p), nxt)
    def keep_all(logits, draft, how):
        kept = torch.full((len(logits),), draft.tokens_BN.shape[1])
        return kept, how.pick(logits[:, -1])
    for rule in (from_p, keep_all):
        monkeypatch.setattr(decode, "accept", rule)
        value, limit = spoken(few, 1500, drafter=drafter)
        assert value > 2 * limit


def test_draft_heads_of_another_trunk_are_refused(tmp_path):
    model = small()
    heads = heads_for(model)
    path = save_draft_heads(heads, model, tmp_path / "heads.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), load_draft_heads(model, path).parameters()))
    with pytest.raises(ConfigError, match="another checkpoint"): load_draft_heads(small(seed=1), path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigError, match="cannot be read as draft heads"): load_draft_heads(model, path)
    untrained, own = HeadDraft(model, DraftHeads(model, 4)), HeadDraft(model)
    hidden = torch.randn(3, 64)
    texts = PROMPTS.tolist()
    assert torch.equal(untrained(texts, hidden, 9, Sampling(0)).tokens_BN, own(texts, hidden, 9, Sampling(0)).tokens_BN)


def test_medusa_heads_say_what_depth_heads_say(tmp_path):
    from safetensors.torch import load_file
    model = small()
    folder = write_medusa(model, tmp_path / "medusa", 4, torch.float32)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert (config["num_heads"], config["hidden_size"], config["vocab_size"], config["model_type"]) == (3, 64, 96, "medusa")
    h = torch.randn(7, 64)
    for k in range(3):
        got = (h + F.silu(h @ weights[f"blocks.{k}.layers.0.weight"].T)) @ weights[f"lm_heads.{k}.weight"].T
        torch.testing.assert_close(got, model.depth_heads(h, k + 2) @ model.embed.weight.T, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_corpus, small_overrides):
    folder = tmp_path_factory.mktemp("drafting") / "run"
    Run(load_config("tiny", small_overrides + ["train.length=6 steps", "train.checkpoint_every=6"]), folder, small_corpus).train()
    return folder


def test_the_command_line_drafts(run):
    def hsmoe(*args): return CliRunner().invoke(app, list(map(str, args)))
    plain = hsmoe("generate", run, "--prompt", "import", "--max-new-tokens", 30, "--temperature", 0)
    for more in ((), ("--draft-depth", 5, "--candidates", 3)):
        result = hsmoe("generate", run, "--prompt", "import", "--max-new-tokens", 30, "--temperature", 0, "--speculative", *more)
        assert result.exit_code == 0 and result.stdout == plain.stdout and "tokens a pass" in result.stderr
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    result = hsmoe("draft", run, "--steps", 10, "--places", 3, "--rank", 8)
    path = run / "drafts" / "step-6.safetensors"
    assert result.exit_code == 0 and result.stdout.strip() == str(path) and path.exists()
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p != path} == before, "the run is as it was"
    result = hsmoe("generate", run, "--prompt", "import", "--max-new-tokens", 30, "--temperature", 0, "--speculative")
    assert result.stdout == plain.stdout and sample_text(run, "import", 30, temperature=0)[0] in result.stdout
    for args, said in ((("generate", run, "--speculative", "--draft-depth", 11), "1 to 10 are allowed"), (("draft", run, "--places", 10), "1 to 9 are allowed"), (("draft", run / "checkpoints"), "no checkpoint"),
                       (("generate", run, "--speculative", "--step", 5), "no checkpoint of step 5")):
        result = hsmoe(*args)
        assert isinstance(result.exception, USER_ERRORS) and said in str(result.exception)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype):
    "Invariant text is that of generate, bits included; drafts in bf16 too."
    model = small(f"train.dtype={dtype}").cuda()
    prompts = PROMPTS.cuda()
    text = torch.randint(0, 96, (1, 30)).cuda()
    assert [passes_differ(model, text, n) for n in (2, 7)] == [None, None]
    alone = torch.cat([generate(model, p[None], 40, temperature=0) for p in prompts])
    assert torch.equal(speculative_generate(model, prompts, 40, depth=6, temperature=0, invariant=True)[0], alone)
    for n in (1, 3):
        got, stats = speculative_generate(model, prompts, 40, depth=4, candidates=n, drafter=HeadDraft(model, DraftHeads(model, 4), sampled=n == 1), generator=torch.Generator("cuda").manual_seed(0))
        assert got.shape == (3, 45) and stats.tokens == 120
