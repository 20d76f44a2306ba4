"""The router's Triton kernels against the reference and against float64: on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
import math

import pytest
import torch

from hsmoe.backends import BackendError
from hsmoe.model import routing
from hsmoe.model.router import Router, check_routing
from hsmoe.model.routing import N_BINS, ROUTER, count_margins, margin_bins, reference_route, triton_route
from hsmoe.quant.formats import scale_for
from on_device import BF16, F32, INTERPRETED, interpret, needs_gpu, runs_kernels, starts_interpreter

triton = pytest.importorskip("triton")
DEVICE = "cpu" if INTERPRETED else "cuda"


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def no_choice_stays(monkeypatch): monkeypatch.setattr(ROUTER, "chosen", {})


def tokens(T, D, E, dtype, bias, balance, mask, seed=0):
    "x, weight, bias, balancing bias, mask: logits of deviation about 2"
    generator = torch.Generator().manual_seed(seed)
    def draw(*shape): return torch.randn(shape, generator=generator)
    x, w = draw(T, D).to(DEVICE, dtype), (2 * draw(E, D) / D**0.5).to(DEVICE)
    return (x.requires_grad_(), w.requires_grad_(), draw(E).to(DEVICE).requires_grad_() if bias else None,
            draw(E).to(DEVICE) / 4 if balance else None, (draw(T) > -1).to(DEVICE) if mask else None)


def upstream(out, seed=1, everything=True):
    "A loss of all that has a gradient, or of the gates alone"
    generator = torch.Generator().manual_seed(seed)
    dgate, dprobs = (torch.randn(t.shape, generator=generator).to(DEVICE) for t in (out.gate_TC, out.probs_TE))
    loss = (out.gate_TC * dgate.to(out.gate_TC.dtype)).sum()
    return loss + (out.probs_TE * dprobs.to(out.probs_TE.dtype)).sum() + 0.3 * out.entropy_sum - 0.01 * out.z_sum if everything else loss


def close(got, want, scale, what):
    "Within `scale` of the largest value"
    error, size = (got.double() - want.double()).abs().max().item(), want.abs().max().item()
    assert error <= scale * size, f"{what}: error {error:.2e}, {error / size:.1e} of the largest value"


def empty_margins(E): return torch.zeros(E, N_BINS, dtype=torch.int64, device=DEVICE)


def same_margins(margins, logits, balance, mask, top_k):
    "What was counted is what the reference counts, bit for bit: the logits are those that were looked at"
    want = empty_margins(len(margins))
    count_margins(logits, balance, mask, top_k, want)
    assert torch.equal(margins, want) and (margins.sum(1) == (len(logits) if mask is None else mask.sum())).all()


def compare(args, everything=True, **kw):
    "One call of the kernels, each of its steps measured by float64"
    x, w, bias, balance, mask = args
    margins = empty_margins(len(w)) if kw["top_k"] < len(w) else None
    out = triton_route(*args, margins_EQ=margins, **kw)
    if margins is not None: same_margins(margins, out.logits_TE, balance, mask, kw["top_k"])
    x64, w64 = x.detach().double(), w.detach().double()
    logits = x64 @ w64.T + (0 if bias is None else bias.detach().double())
    error, fp32 = (out.logits_TE - logits).abs().max().item(), (torch.nn.functional.linear(x.detach().float(), w, bias) - logits).abs().max().item()
    assert error <= max(2 * fp32, 2e-6), f"logits: error {error:.2e}, that of fp32 is {fp32:.2e}"

    eye = torch.eye(len(w), device=DEVICE)                              # the product with it is exact: all that follows from the kernels' own logits
    want = reference_route(out.logits_TE, eye, None, balance, mask, **kw)
    for name in ("expert_TC", "load_E", "n_tokens", "n_bad"): assert torch.equal(getattr(out, name), getattr(want, name)), name
    for name in ("gate_TC", "probs_TE"): torch.testing.assert_close(getattr(out, name), getattr(want, name), rtol=1e-5, atol=1e-7, msg=name)
    for name in ("entropy_sum", "z_sum"): torch.testing.assert_close(getattr(out, name), getattr(want, name), rtol=2e-6, atol=1e-5, msg=name)

    score, top_k = logits if balance is None else logits + balance, kw["top_k"]
    ordered = score.sort(1, descending=True).values[:, :top_k + 1]
    clear = (ordered[:, :-1] - ordered[:, 1:]).amin(1) > 8 * error if ordered.shape[1] > 1 else torch.ones(len(x), dtype=torch.bool, device=DEVICE)
    assert clear.any() and torch.equal(out.expert_TC[clear], routing.select(score, top_k)[clear])

    leaves = [t for t in (x, w, bias) if t is not None]
    got = torch.autograd.grad(upstream(out, everything=everything), leaves)
    z = out.logits_TE.double().requires_grad_()
    dl, = torch.autograd.grad(upstream(reference_route(z, eye.double(), None, balance, mask, **kw), everything=everything), z)
    assert [g.dtype for g in got] == [t.dtype for t in leaves]
    if x.dtype == BF16:                                                  # the rounding at the end (which the interpreter cuts), what two parts of each factor leave out, and fp32 differences of nearly equal numbers in dl
        bound = (dl @ w64).abs() * (2**-7 if INTERPRETED else 2**-8) + (dl.abs() @ w64.abs()) * 2**-15 + w64.abs().sum(0) * 2e-6
        assert ((got[0].double() - dl @ w64).abs() <= bound).all(), "dx"
    else: close(got[0], dl @ w64, 3e-6, "dx")
    close(got[1], dl.T @ x64, 3e-6, "dweight")
    if bias is not None: close(got[2], dl.sum(0), 3e-6, "dbias")


NVFP4 = "nvfp4:1x16"
CASES = [  # T, D, E, C, dtype, bias, balance, mask, keywords
    (130, 88, 64, 4, BF16, False, True, True, dict(fmt=NVFP4)),
    (257, 96, 8, 2, F32, True, True, False, dict(fmt=NVFP4, temperature=1.5, straight_through="topk")),
    (70, 87, 60, 8, F32, True, False, True, dict(fmt=NVFP4, block_scale=scale_for(3.0, NVFP4))),
    (70, 88, 60, 4, BF16, True, True, True, dict(fmt=NVFP4, temperature=0.7, straight_through="default_moe")),
    (65, 130, 128, 8, BF16, True, True, False, dict(fmt="nvfp4:1x64")),
    (33, 40, 8, 1, BF16, False, False, True, dict(straight_through="topk")),
    (33, 40, 8, 1, F32, True, True, False, dict(fmt="mxfp8_e4m3:1x32")),
    (5, 16, 3, 3, F32, False, True, False, dict(fmt=NVFP4)),
    (20, 24, 300, 7, BF16, False, True, True, dict(fmt=NVFP4, straight_through="topk")),
    (1, 7, 1, 1, BF16, True, False, False, dict()),
]


@runs_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:4])) + ("-bf16" if c[4] == BF16 else "-fp32"))
def test_against_float64(case):
    *shape, top_k, dtype, bias, balance, mask, kw = case
    compare(tokens(*shape, dtype, bias, balance, mask), top_k=top_k, **kw)


@runs_kernels
def test_the_gates_alone_and_half_precision():
    compare(tokens(40, 32, 12, F32, False, True, True), everything=False, top_k=2, fmt=NVFP4)
    x, w, *rest = tokens(40, 32, 12, F32, False, True, True)
    half = x.detach().half().requires_grad_()
    got, want = triton_route(half, w, *rest, top_k=2), triton_route(half.detach().float(), w, *rest, top_k=2)
    assert torch.equal(got.gate_TC, want.gate_TC)
    upstream(got).backward()
    assert half.grad.dtype == torch.float16 and half.grad.isfinite().all()


@runs_kernels
def test_ties_go_to_the_lowest_index():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (150, 24), generator=generator).float().to(DEVICE)
    w = torch.randint(-1, 2, (20, 24), generator=generator).float().to(DEVICE)
    x[:9], w[7] = 0.0, -0.0                                             # rows of zeros of both signs
    for dtype in (F32, BF16):
        for top_k in (1, 5, 20):
            got, want = (f(x.to(dtype), w, None, None, top_k=top_k) for f in (triton_route, reference_route))
            assert torch.equal(got.logits_TE, want.logits_TE) and torch.equal(got.expert_TC, want.expert_TC)
            assert torch.equal(got.load_E, want.load_E)
    assert got.expert_TC[0].tolist() == list(range(20))


@runs_kernels
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_tokens_that_are_not_finite_are_counted_and_stay_alone(value):
    x, w, _, balance, mask = tokens(140, 40, 12, F32, False, True, True)
    x = x.detach()
    clean = triton_route(x, w, None, balance, mask, top_k=3, fmt=NVFP4)
    spoilt = x.clone()
    spoilt[[3, 77, 139], [0, 39, 5]] = value
    mask[77] = False                                                    # a masked one, too
    out = triton_route(spoilt, w, None, balance, mask, top_k=3, fmt=NVFP4)
    assert out.n_bad.item() == reference_route(spoilt, w, None, balance, mask, top_k=3, fmt=NVFP4).n_bad.item() == 3
    good = torch.ones(140, dtype=torch.bool, device=DEVICE); good[[3, 77, 139]] = False
    for name in ("expert_TC", "probs_TE", "logits_TE"): assert torch.equal(getattr(out, name)[good], getattr(clean, name)[good]), name
    assert all(sorted(set(row)) == sorted(row) and 0 <= min(row) and max(row) < 12 for row in out.expert_TC.tolist())
    with pytest.raises(ValueError, match="router of layer 7: the logits of 3 of 140 tokens are NaN or infinite"): check_routing([clean, out], ["layer 6", "layer 7"])


@runs_kernels
@pytest.mark.parametrize("E, top_k, masked", [(12, 1, True), (5, 4, False), (20, 3, True)])
def test_margins_with_ties_and_numbers_that_are_not_finite(E, top_k, masked):
    "Few different logits; biases that make all logits of an expert, or its scores alone, infinite or NaN"
    generator = torch.Generator().manual_seed(E)
    def draw(low, high, *shape): return torch.randint(low, high, shape, generator=generator).float().to(DEVICE)
    x, w, mask = draw(-2, 3, 70, 24), draw(-1, 2, E, 24) / 8, (draw(0, 3, 70) > 0) if masked else None
    nan, inf = math.nan, math.inf
    def some(*values): return torch.tensor(values + (0.0,) * (E - len(values)), device=DEVICE)
    finite = draw(-2, 3, E) / 8
    margins, total = empty_margins(E), empty_margins(E)
    for bias, balance in ((None, None), (None, finite), (finite, some(inf, -inf)), (some(nan), finite), (some(inf, inf), None), (some(-inf, -inf, inf), finite), (None, some(nan, -inf)),
                          (some(nan, nan, inf), some(inf)), (torch.full((E,), nan, device=DEVICE), None), (torch.full((E,), -inf, device=DEVICE), finite)):
        for f, m in ((triton_route, margins), (reference_route, total)): f(x, w, bias, balance, mask, top_k=top_k, margins_EQ=m)
        assert torch.equal(margins, total)                              # all logits are exact; the counts add up, call after call
    assert margins[:, [N_BINS // 2, N_BINS - 1]].sum(0).amin() > 0
    everyone = margins.sum(1).unique()
    assert len(everyone) == 1 and everyone == 10 * (70 if mask is None else mask.sum())


@runs_kernels
def test_margins_by_hand_and_beyond_32_bits():
    eye, x = torch.eye(4, device=DEVICE), torch.tensor([[2.0, 1, 0, 0], [0, 0, 0, 0], [9, 0, 0, 0]], device=DEVICE)
    balance, mask = torch.tensor([0.0, 0, 0, 1], device=DEVICE), torch.tensor([True, True, False], device=DEVICE)
    margins = torch.full((4, N_BINS), 2**31 - 1, dtype=torch.int64, device=DEVICE)
    for _ in range(2): triton_route(x, eye, None, balance, mask, top_k=2, margins_EQ=margins)
    margins -= 2**31 - 1
    assert margins.nonzero().tolist() == [[0, 2048], [0, 2304], [1, 2048], [2, 1791], [2, 2048], [3, 1791], [3, 2048]]
    assert margins[1, 2048] == 4 and margins.sum().item() == 16
    edges = torch.tensor([0.0, 2**-9, 255, 254.999, 1e38, 1, 0.99999994, 2**-149, 3], device=DEVICE)       # as margins of both signs: the last expert, 0, is the second largest or the cut
    for sign in (1, -1):
        margins = empty_margins(2)
        logits = triton_route(torch.stack([sign * edges, torch.zeros_like(edges)], 1), eye[:2, :2], None, None, top_k=1, margins_EQ=margins).logits_TE
        wide = logits[:, 0] - logits.amin(1)
        assert torch.equal(margins[0], torch.bincount(margin_bins(wide), minlength=N_BINS))
    whole = torch.zeros(4, N_BINS, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="router: margins are counted below 4, the number of experts, not for top_k 4"): triton_route(x, eye, None, None, top_k=4, margins_EQ=whole)
    for bad in (whole.int(), whole[:3], torch.zeros(N_BINS, 4, dtype=torch.int64, device=DEVICE).T):
        with pytest.raises(ValueError, match="the margins must be a contiguous int64 tensor"): triton_route(x, eye, None, None, top_k=2, margins_EQ=bad)
    assert not whole.any()


@runs_kernels
@pytest.mark.parametrize("tiles", [1, 128, 300])
def test_sums_of_tiles(tiles):
    sums = torch.rand(tiles + 2, 2, device=DEVICE)
    rows, after = sums[:tiles].double().sum(0), sums[-1].tolist()
    routing._add_sums[(1,)](sums, tiles, N=128)
    torch.testing.assert_close(sums[tiles].double(), rows, rtol=1e-6, atol=0)
    assert sums[-1].tolist() == after


@runs_kernels
def test_weights_of_all_magnitudes():
    "The split of the weight, through the product: the largest, subnormal and spoilt ones; each expert is one weight times one."
    w = torch.tensor([3.4028234663852886e38, -3.39e38, 1 + 2**-23, 2**-100 * (1 + 2**-23), 2**-126, 2**-133, 0.0, -math.pi]).to(DEVICE)
    x = torch.zeros(2, 8, dtype=BF16, device=DEVICE); x[:, 0] = 1
    weight = torch.zeros(8, 8, device=DEVICE); weight[:, 0] = w
    got = triton_route(x, weight, None, None, top_k=2).logits_TE[0]
    torch.testing.assert_close(got, w, rtol=0 if INTERPRETED else 2**-23, atol=0 if INTERPRETED else 2**-126)      # tensor cores may cut the last bit, and subnormals
    assert triton_route(x, weight, None, None, top_k=2, temperature=0.5).n_bad.item() == 2          # the logit is finite, twice as much is not
    for bad in (math.nan, math.inf):
        weight[4, 0] = bad
        out = triton_route(x, weight, None, None, top_k=2)
        assert out.n_bad.item() == 2 and out.expert_TC[0, 0] == 4 and not out.logits_TE[0, 4].isfinite() and torch.equal(out.logits_TE[0, :4], got[:4])


@runs_kernels
def test_masked_tokens_leave_no_trace():
    x, w, _, balance, mask = tokens(100, 24, 12, F32, False, True, True)
    out = triton_route(x, w, None, balance, mask, top_k=3, fmt=NVFP4)
    assert out.load_E.sum() == 3 * mask.sum() and out.n_tokens == mask.sum() and not out.gate_TC[~mask].any()
    dx, = torch.autograd.grad(out.gate_TC.square().sum() + out.entropy_sum + out.z_sum, x)
    assert not dx[~mask].any() and dx[mask].any(1).all()


@runs_kernels
def test_modes_of_autograd():
    args = tokens(50, 24, 12, BF16, True, True, True)
    want = triton_route(*args, top_k=3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(): got = triton_route(*args, top_k=3)
        assert all(torch.equal(a, b) for a, b in zip(got, want)) and not got.gate_TC.requires_grad
    assert [t.requires_grad for t in want] == [False, True, True, False, True, True, False, False, False]
    x, w, bias, *rest = args
    full = torch.autograd.grad(upstream(want), (x, w, bias))
    only = torch.autograd.grad(upstream(triton_route(x.detach(), w, bias.detach(), *rest, top_k=3)), w)
    frozen = torch.autograd.grad(upstream(triton_route(x, w.detach(), bias.detach(), *rest, top_k=3)), x)
    assert torch.equal(only[0], full[1]) and torch.equal(frozen[0], full[0])
    strided = torch.stack([x.detach()] * 2, 1)[:, 0]
    assert torch.equal(triton_route(strided, w.detach().t().contiguous().t(), bias, *rest, top_k=3).gate_TC, want.gate_TC)


@runs_kernels
def test_what_the_kernels_do_not_serve_is_the_references():
    x, w, _, balance, mask = (t if t is None else t.detach() for t in tokens(20, 24, 12, F32, False, True, True))
    for a, kw in ((x.double(), {}), (x, dict(fmt="nvfp4:1x24")), (x[:0], {})):
        m, margins = mask[:len(a)], [empty_margins(12) for _ in range(2)]
        got, want = (f(a, w if a.dtype == F32 else w.double(), None, balance, m, top_k=3, margins_EQ=margins[i], **kw) for i, f in enumerate((triton_route, reference_route)))
        assert all(torch.equal(p, q) for p, q in zip((*got, margins[0]), (*want, margins[1]))) and margins[0].sum() == 12 * m.sum()
    assert triton_route(x, torch.randn(600, 24, device=DEVICE), None, None, top_k=2).load_E.sum() == 40


@runs_kernels
def test_the_check_of_the_operation_finds_a_fault():
    assert routing._check(triton_route, DEVICE) is None
    def wrong(x, w, b, balance, mask, **kw): return triton_route(x, w, b, None, mask, **kw)         # forgets the balancing bias
    def biased(*args, **kw): return triton_route(*args, **dict(kw, straight_through="ste"))
    def lazy(*args, **kw): return triton_route(*args, **dict(kw, margins_EQ=None))
    def unmasked(*args, margins_EQ, **kw):
        out = triton_route(*args, **kw)
        count_margins(out.logits_TE, args[3], None, kw["top_k"], margins_EQ)
        return out
    assert all("margins" in routing._check(f, DEVICE) for f in (lazy, unmasked))
    assert "expert_TC" in routing._check(wrong, DEVICE) and "dx" in routing._check(biased, DEVICE)


@needs_gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_size_of_the_model(dtype):
    compare(tokens(24_576, 1536, 64, dtype, True, True, True), top_k=4, fmt=NVFP4)
    compare(tokens(24_576, 1536, 128, dtype, False, True, False), top_k=8)


@needs_gpu
def test_margins_that_all_meet_in_one_bin():
    w = torch.randn(64, 1536, device=DEVICE)
    for x in (torch.zeros(24_576, 1536, dtype=BF16, device=DEVICE), torch.randn(1, 1536, device=DEVICE).to(BF16).expand(24_576, -1)):
        margins = empty_margins(64)
        out = triton_route(x, w, None, None, top_k=4, margins_EQ=margins)
        same_margins(margins, out.logits_TE, None, None, 4)
        assert margins.amax(1).tolist() == [24_576] * 64


@needs_gpu
def test_a_million_tokens_and_two_runs():
    args = tokens(1_000_003, 64, 8, BF16, False, True, True)
    compare(args, top_k=2, fmt=NVFP4)
    first, second = ([out := triton_route(*args, top_k=2, fmt=NVFP4), torch.autograd.grad(upstream(out), args[:2])] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip((*first[0], *first[1]), (*second[0], *second[1])))


@needs_gpu
def test_a_cuda_graph_replays_the_layer():
    router = Router(96, 12, 3, bias_init=0.0, balance="quantile").cuda()
    router.router_logits.set_format(NVFP4)
    x, mask = torch.randn(200, 96, device="cuda", dtype=BF16, requires_grad=True), torch.ones(200, dtype=torch.bool, device="cuda")
    ROUTER.choose("cuda", "triton")
    def step():
        out = router(x, mask)
        return (*out, *torch.autograd.grad(upstream_graph(out), (x, router.weight, router.bias)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): recorded = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x)); mask.copy_(torch.rand(200, device="cuda") < 0.7); router.balance_bias.normal_()
    router.begin_step()
    graph.replay()
    counted = router.margins_EQ.clone()
    router.begin_step()
    assert all(torch.equal(a, b) for a, b in zip(recorded, step())) and torch.equal(counted, router.margins_EQ) and counted.sum() == 12 * mask.sum()


def upstream_graph(out): return out.gate_TC.square().sum() + out.probs_TE.square().sum() + out.entropy_sum + 0.1 * out.z_sum


@needs_gpu
def test_the_forward_waits_for_nothing():
    router = Router(96, 12, 3, balance="quantile").cuda()
    x, mask = torch.randn(200, 96, device="cuda", dtype=BF16, requires_grad=True), torch.ones(200, dtype=torch.bool, device="cuda")
    for backend in ("reference", "triton"):
        ROUTER.choose("cuda", backend)
        upstream_graph(router(x, mask)).backward()
        torch.cuda.set_sync_debug_mode("error")
        try: upstream_graph(router(x, mask)).backward()
        finally: torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter can")
def test_a_cpu_has_the_reference_and_says_why():
    assert ROUTER.choose("cpu") == "reference"
    with pytest.raises(BackendError, match="backends.router = 'triton' cannot be used on cpu: Triton kernels need a GPU"): ROUTER.choose("cpu", "triton")
    with pytest.raises(ValueError, match="the mask has shape"): triton_route(torch.zeros(3, 8), torch.eye(8), None, None, torch.ones(4), top_k=2)
    with pytest.raises(ValueError, match="router of layer 3: the logits of 1 of 2 tokens"): Router(8, 4, 2, name="layer 3")(torch.tensor([[math.nan] * 8, [0.0] * 8]))
    check_routing([], [])
