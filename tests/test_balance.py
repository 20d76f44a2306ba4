"""Balancing of the routers and its loss of it: quantiles from counts, the sign rule, what a step counts, collapse, and what nbs/bench/router makes of trials (SPEC S-01, S-02, V-05)."""
import copy, itertools, json
from fractions import Fraction

import pytest
import torch

import test_bench_pages
from hsmoe.config import load_config, resolve
from hsmoe.data.corpus import Corpus
from hsmoe.model.router import Router, quantile_bias
from hsmoe.model.routing import N_BINS, ROUTER, bin_edges, count_margins, margin_bins
from hsmoe.train import loop
from hsmoe.train.checkpoint import load_state, save_state
from hsmoe.train.loop import Run, TrainState, datasets, train_step
from hsmoe.train.telemetry import busiest_experts, collapsed, read_metrics, series


def exact_prices(logits, bias, top_k):
    "-β by sorting, in float64 and without bins: the margins, and the (⌊T·k/E⌋+1)-th largest of each expert."
    T, E = logits.shape
    cut = torch.sort(logits + bias, dim=1, descending=True).values[:, top_k]
    margins = (logits - cut[:, None]).double()
    return margins, torch.sort(margins, dim=0, descending=True).values[T * top_k // E]


def histogram(margins):
    return torch.stack([torch.bincount(margin_bins(m.float()), minlength=N_BINS) for m in margins.T])


def widths(prices): return (1 + prices.abs()) / 256


@pytest.mark.parametrize("T, E, top_k, spread, skew", [(1000, 8, 2, 1.0, 0.0), (4096, 64, 4, 1.0, 2.0), (333, 5, 1, 0.1, 0.05), (2000, 16, 15, 30.0, 20.0), (3, 4, 2, 1.0, 1.0), (1, 2, 1, 1.0, 0.0)])
def test_quantiles_from_counts_are_the_sorted_ones_to_a_bin(T, E, top_k, spread, skew):
    generator = torch.Generator().manual_seed(T)
    logits = spread * torch.randn(T, E, generator=generator) + skew * torch.randn(E, generator=generator)
    bias = torch.randn(E, generator=generator)
    margins, prices = exact_prices(logits, bias, top_k)
    found = -quantile_bias(histogram(margins), top_k).double()
    assert found.mean().abs() < 1e-5 * (1 + prices.abs().max())
    error = (found - found[0]) - (prices - prices[0])                    # a constant added to all is free
    assert (error.abs() <= widths(prices) + widths(prices[0])).all()


def test_bins_cover_the_line_in_order():
    edges = bin_edges()
    assert len(edges) == N_BINS + 1 and (edges.diff() > 0).all() and (edges.diff() <= widths(torch.minimum(edges[1:].abs(), edges[:-1].abs())) + 1e-12).all()
    inside = (edges[1:] + edges[:-1]) / 2
    assert torch.equal(margin_bins(inside.float()), torch.arange(N_BINS))
    assert margin_bins(torch.tensor([-1e30, -255.5, 255.5, float("inf"), -float("inf")])).tolist() == [0, 0, N_BINS - 1, N_BINS - 1, 0]
    assert margin_bins(torch.tensor([float("nan"), -float("nan"), float("inf") - float("inf")])).tolist() == [N_BINS - 1] * 3


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_every_token_counts_once_for_each_expert_whatever_its_logits(top_k):
    nan, inf, n = float("nan"), float("inf"), N_BINS // 2
    def counted(*row, balance=None, mask=None):
        margins = torch.zeros(4, N_BINS, dtype=torch.int64)
        count_margins(torch.tensor([row]), balance, mask, top_k, margins)
        assert margins.sum(1).tolist() == [1 if mask is None else int(mask)] * 4
        return margins.argmax(1).tolist()
    assert counted(1.0, 1, 1, 1) == [n] * 4
    assert counted(nan, nan, nan, nan) == [N_BINS - 1] * 4                                # NaN comes first, as in the choice
    assert counted(nan, 1.0, 1, 1) == [N_BINS - 1, n, n, n]
    assert counted(-inf, -inf, -inf, -inf) == [N_BINS - 1] * 4                            # -inf - -inf is NaN
    assert counted(inf, 0.0, 0, 0) == [N_BINS - 1, n, n, n]
    assert counted(inf, inf, inf, inf) == [N_BINS - 1] * 4
    assert counted(0.0, 0, 0, 0, balance=torch.tensor([inf, inf, inf, inf])) == [0] * 4
    assert counted(0.0, 0, 0, 0, balance=torch.tensor([inf, 0, 0, 0])) == [n] * 4
    counted(3.0, 2, 1, 0, mask=torch.tensor([False]))
    with pytest.raises(ValueError, match="margins are counted below 4, the number of experts, not for top_k 4"):
        count_margins(torch.zeros(2, 4), None, None, 4, torch.zeros(4, N_BINS, dtype=torch.int64))


def test_margins_beyond_the_bins_keep_the_order_of_the_experts():
    margins = torch.tensor([[300., 0, -300], [400, 0, -400]]).double()
    bias = quantile_bias(histogram(margins), 1)
    assert bias[0] < bias[1] < bias[2] and bias.isfinite().all()


def skewed(n, steps, E=8, D=16):
    generator = torch.Generator().manual_seed(n)
    mean = torch.randn(D, generator=generator)
    return [torch.randn(512, D, generator=generator) + mean for _ in range(steps)]


def busiest(balance, rate, stream, E=8):
    "Load of the busiest expert over the mean at each step of a stream."
    torch.manual_seed(0)
    router, loads = Router(16, E, 2, balance=balance, bias_update_rate=rate, sigma=0.25), []
    for x in stream:
        with torch.no_grad(): load = router(x).load_E
        router.end_step(load); loads.append((load.max() / load.double().mean()).item())
    return loads


@pytest.mark.parametrize("n", range(3))
def test_one_alternation_does_more_than_the_sign_rule(n):
    stream = skewed(n, 40)
    quantile, signs = busiest("quantile", 0.01, stream), {rate: busiest("bias", rate, stream) for rate in (0.001, 0.02, 0.1)}
    assert min(quantile[0], *(s[0] for s in signs.values())) == max(quantile[0], *(s[0] for s in signs.values())) > 1.5       # all begin alike
    assert quantile[1] < min(s[1] for s in signs.values())
    assert sum(quantile) < min(map(sum, signs.values())) and max(quantile[5:]) < 1.4


@pytest.mark.parametrize("masked", [False, True])
def test_counts_do_not_depend_on_the_cut_or_on_the_dtype(masked):
    torch.manual_seed(0)
    x, mask = torch.randint(-8, 9, (101, 16)) / 4, torch.rand(101) < 0.6 if masked else None
    start = Router(16, 8, 3, balance="quantile", bias_init=0.5)
    with torch.no_grad(): start.weight.copy_(torch.randint(-8, 9, (8, 16)) / 4); start.balance_bias.copy_(torch.arange(8) / 8)   # every product and sum is exact
    results = []
    for dtype, cuts in itertools.product((torch.float32, torch.bfloat16, torch.float64), ([101], [50, 51], [25, 25, 25, 26])):
        router, load = copy.deepcopy(start).to(dtype), 0
        for part, seen in zip(x.to(dtype).split(cuts), [None] * 9 if mask is None else mask.split(cuts)): load = load + router(part, seen).load_E
        counted = router.margins_EQ.clone()
        router.end_step(load)
        assert router.margins_EQ.dtype == torch.int64 and router.margins_EQ.sum() == 0
        results.append((counted, load, router.balance_bias.float()))
    tokens = 101 if mask is None else int(mask.sum())
    assert results[0][0].sum(1).tolist() == [tokens] * 8 and results[0][1].sum() == 3 * tokens
    margins, _ = exact_prices((x @ start.weight.T + start.bias).detach()[slice(None) if mask is None else mask], start.balance_bias, 3)
    assert torch.equal(results[0][0], histogram(margins))
    for other in results[1:]: assert all(torch.equal(a, b) for a, b in zip(results[0], other))


def test_only_training_counts_and_every_choice_of_all_experts_is_even():
    router = Router(16, 8, 2, balance="quantile").eval()
    router(torch.randn(9, 16)); assert router.margins_EQ.sum() == 0
    for r in (Router(16, 4, 4, balance="quantile"), Router(16, 4, 2, balance="none")):
        load = r(torch.randn(9, 16)).load_E; r.end_step(load)
        assert r.margins_EQ is None and r.balance_bias.tolist() == [0] * 4
    with pytest.raises(ValueError, match="router of layer 0: balance is 'off', allowed are 'none', 'bias' and 'quantile'"): Router(16, 4, 2, balance="off")
    with pytest.raises(ValueError, match="must not be negative"): Router(16, 4, 2, bias_update_rate=-1.0)


def test_the_sign_rule_counts_in_integers():
    router = Router(4, 2, 1, bias_update_rate=0.5)
    router.end_step(torch.tensor([2**24 + 1, 2**24 - 1])); assert router.balance_bias.tolist() == [-0.5, 0.5]     # fp32 knows no 2**24 + 1
    router.end_step(torch.tensor([2**30, 2**30])); assert router.balance_bias.tolist() == [-0.5, 0.5]


def make_state(small_overrides, small_corpus, *extra):
    cfg = load_config("tiny", small_overrides + ["train.length=6 steps", "router.balance=quantile", *extra])
    return TrainState(cfg, resolve(cfg), datasets(cfg, Corpus.open(small_corpus))[0], torch.device("cpu"))


def biases(state): return torch.stack([layer.moe.router.balance_bias for layer in state.model.layers])


def counted(state): return sum(int(layer.moe.router.margins_EQ.sum()) for layer in state.model.layers)


def test_state_goes_through_a_checkpoint(small_overrides, small_corpus, tmp_path):
    state = make_state(small_overrides, small_corpus)
    for _ in range(2): train_step(state)
    assert biases(state).abs().max() > 0 and counted(state) == 0
    save_state(tmp_path / "step-2", state.state_dict())
    assert not any("margins" in name for name in state.state_dict()["model"])
    again = make_state(small_overrides, small_corpus); again.load_state_dict(load_state(tmp_path / "step-2"))
    assert torch.equal(biases(again), biases(state))
    assert train_step(again).loss == train_step(state).loss and torch.equal(biases(again), biases(state))


def test_a_step_that_failed_half_way_leaves_nothing(small_overrides, small_corpus, monkeypatch):
    failed, clean = make_state(small_overrides, small_corpus), make_state(small_overrides, small_corpus)
    position, calls, real = failed.loader.state_dict(), itertools.count(), loop.adamtp_loss
    def breaks(*a, **kw):
        if next(calls) == 1: raise KeyboardInterrupt
        return real(*a, **kw)
    monkeypatch.setattr(loop, "adamtp_loss", breaks)
    with pytest.raises(KeyboardInterrupt): train_step(failed)
    monkeypatch.undo()
    assert counted(failed) > 0
    failed.loader.load_state_dict(position); failed.optimizer.zero_grad(set_to_none=True)
    assert train_step(failed).loss == train_step(clean).loss and torch.equal(biases(failed), biases(clean))


def brute(load, top_k):
    "90 % on 10 %, by the words of the definition."
    n = max(top_k, -(-len(load) // 10))
    return sum(load) > 0 and n < Fraction(9, 10) * len(load) and max(map(sum, itertools.combinations(load, n))) * 10 >= sum(load) * 9


def test_collapse_on_constructed_loads():
    for top_k, E in ((1, 2), (1, 4), (2, 3), (2, 4), (1, 11)):
        values = (0, 1, 9, 10) if E < 11 else (0, 1)
        for load in itertools.product(values, repeat=E): assert collapsed(load, top_k=top_k) == brute(load, top_k), (load, top_k)
    for E, top_k in ((8, 2), (64, 4), (896, 16), (2, 1), (3, 2)):
        n = busiest_experts(E, top_k=top_k)
        assert collapsed([100] * top_k + [0] * (E - top_k), top_k=top_k), "all tokens on the same experts"
        assert not collapsed([100] * E, top_k=top_k), "an even load"
        rest = E - n
        assert collapsed([9 * rest] * n + [n] * rest, top_k=top_k) and not collapsed([9 * rest] * n + [n + 1] * rest, top_k=top_k), "the border"
    assert not collapsed([1] * 10, top_k=9) and not collapsed([7], top_k=1) and not collapsed([0] * 64, top_k=4)
    assert collapsed(torch.tensor([50, 0, 0, 50]), tokens_share=0.5, experts_share=0.25) and not collapsed([30, 25, 25, 20], tokens_share=0.5, experts_share=0.25)


def test_a_run_warns_once(small_overrides, small_corpus, tmp_path, capsys):
    cfg = load_config("tiny", small_overrides + ["train.length=3 steps", "router.balance=none", "train.checkpoint_every=3", "train.validate_every=3"])
    run = Run(cfg, tmp_path / "run", small_corpus)
    run.state.model.layers[1].moe.router.balance_bias[:2] = 1e3
    run.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert len(lines) == 1 and "at step 1 the router of layer 1 sends 90 % of its choices or more to 2 of 8 experts" in lines[0]
    records = read_metrics(tmp_path / "run")
    assert series(records, "collapsed_layers")[1] == [1, 1, 1]
    entropy = series(records, "layer_entropy")[1][0]
    assert len(entropy) == 2 and sum(entropy) / 2 == pytest.approx(series(records, "entropy")[1][0], rel=1e-5)


def test_the_bench_page_says_what_its_trials_say(tmp_path, monkeypatch):
    "Losses and loads that are known: `topk` is better in loss, `quantile` ties and has the lowest load, `bias 0.02` has a low load and is worse."
    pytest.importorskip("IPython", reason="the page shows tables")
    losses, loads = {"topk": 1.9, "none": 1.999, "bias 0.02": 2.1, "z-loss 0.01": 2.2}, {"quantile": 1.1, "bias 0.02": 1.05, "none": 4.0}
    def write(asked, _):
        with open("trials.jsonl", "w") as file:
            for (_, a), hashes in asked.runs.items():
                for i, h in enumerate(hashes):
                    loss, load = losses.get(a, 2.0) + 0.01 * i, loads.get(a, 1.5)
                    file.write(json.dumps(dict(hash=h, config=dict(model=dict(n_layers=4, n_routed=8, top_k=2)), report=dict(val_loss=loss, expert_load_max_over_mean=load - 0.04), step=[1, 2], curve=[loss + 1, loss],
                                               entropy=[2.0, 1.0], max_over_mean=[load + 1, load], collapsed=[2.0 if a == "none" else 0.0, 0.0], env=test_bench_pages.ENV)) + "\n")
    monkeypatch.setattr(test_bench_pages, "write_trials", write)
    rows, record, page = test_bench_pages.run_page(tmp_path, monkeypatch, "router", None, seeds=[5, 6])
    chosen = record["settings"]["chosen"]
    assert {group for group, a in chosen.items() if a != "base"} == {"gradient", "balance"} < chosen.keys() and (chosen["gradient"], chosen["balance"]) == ("topk", "quantile")
    assert record["settings"]["defaults"]["router.balance"] == "quantile" and record["settings"]["defaults"]["router.straight_through"] == "topk"
    assert "| gradient | topk | 1.9050 ± 0.0071 | **-0.1000 ± 0.0000** | 1.50 ± 0.00 | 1.46 ± 0.00 | 1.00 ± 0.00 | 0 |" in page and "|  | none |" not in page
    assert "| balance | none | 2.0040 ± 0.0071 | -0.0010 ± 0.0000 | 4.00 ± 0.00 | 3.96 ± 0.00 | 1.00 ± 0.00 | 25 |" in page
    assert "`bias 0.02` is worse than base by 0.1000 nats and has a load of 1.05" in page
    for preset in ("tiny", "5b"):                                        # what the page says of a preset follows what the preset has
        follows = load_config(preset).router.straight_through == "topk"
        assert ("`router.straight_through` is ste, the table says topk" in next(line for line in page.splitlines() if line.startswith(f"Preset `{preset}`"))) != follows
    assert rows["load_in_a_step_quantile"]["value"] == pytest.approx(1.1) and rows["val_loss_z_loss_0.01"]["peer_value"] == pytest.approx(2.005)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_gpu_counts_the_same_without_waiting(backend, monkeypatch):
    monkeypatch.setattr(ROUTER, "chosen", {})
    if ROUTER.backends[backend].why_not(torch.device("cuda")): pytest.skip("needs Triton")
    ROUTER.choose("cuda", backend)
    torch.manual_seed(0)
    x, mask = torch.randn(4099, 16), torch.rand(4099) < 0.9
    host = Router(16, 64, 4, balance="quantile"); host.balance_bias.normal_()
    device = copy.deepcopy(host).cuda()
    x_gpu, mask_gpu, load = x.cuda(), mask.cuda(), torch.zeros(64, dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try: logits = device(x_gpu, mask_gpu).logits_TE
    finally: torch.cuda.set_sync_debug_mode("default")
    count_margins(logits.cpu(), host.balance_bias, mask, 4, host.margins_EQ)
    assert torch.equal(device.margins_EQ.cpu(), host.margins_EQ) and host.margins_EQ.sum() == 64 * mask.sum()
    host.end_step(load.cpu()); device.end_step(load)
    assert torch.allclose(device.balance_bias.cpu(), host.balance_bias, rtol=0, atol=1e-6)
