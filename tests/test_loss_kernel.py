"""Linear cross-entropy: its backends against the reference and against float64, on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
import pytest
import torch
import torch.nn.functional as F

from hsmoe.mtp import kernels
from hsmoe.mtp.kernels import LOSS, _by_exponentials, _launch, _scale_in_place, chunks_linear_ce, differing, hopper_linear_ce, linear_ce, reference_linear_ce, triton_linear_ce, why_not_hopper
from hsmoe.mtp.loss import adamtp_loss, next_token_nll
from on_device import BF16, DEVICE, F32, F64, INTERPRETED, interpret, new_seed, plain, runs_kernels, starts_interpreter

HOPPER = DEVICE == "cuda" and why_not_hopper(torch.device("cuda")) is None
BOTH = (True, True)


def emulated(x, u, shift, e, parts):
    "What the Gluon product computes"
    v = torch.exp2((x.double() @ u.double().T).float() * 1.4426950408889634 - shift[:, None])
    e.copy_(v)
    for i, p in enumerate(v.split(128, 1)): parts[i * len(x):][:len(x)] = p.sum(1)


BACKENDS = {"triton": triton_linear_ce, "exponentials": _by_exponentials(emulated, 128)}
if DEVICE == "cuda": BACKENDS |= {"chunks": chunks_linear_ce}
if HOPPER: BACKENDS |= {"hopper": hopper_linear_ce}
each = pytest.mark.parametrize("name", BACKENDS)


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    "New random numbers each time, and no memory of earlier choices"
    monkeypatch.setattr(LOSS, "chosen", {})
    monkeypatch.setattr(kernels, "_ROW", dict(BLOCK=128, GROUP=8, num_warps=1) if INTERPRETED else kernels._ROW)     # several pieces a row
    new_seed()


def problem(M, D, V, dtype=BF16, spread=2.0):
    x, U = (torch.randn(*s, device=DEVICE).mul(spread**0.5 / D**0.25).to(dtype) for s in ((M, D), (V, D)))
    y, w = torch.randint(V, (M,), device=DEVICE), torch.randn(M, device=DEVICE)
    if M > 2: y[0], y[1], w[2] = 0, V - 1, 0.0
    return x, U, y, w


def exactly(x, U, y, w):
    x, U = (t.detach().double().requires_grad_() for t in (x, U))
    nll = F.cross_entropy(x @ U.T, y, reduction="none")
    return [nll.detach(), *torch.autograd.grad(nll @ w.double(), (x, U))]


def taken(name, *args):
    "A backend's results, with buffers that held NaN before"
    torch.use_deterministic_algorithms(True, warn_only=True)     # torch.empty gives NaN
    try:
        with torch.no_grad(): return BACKENDS[name](*args)
    finally: torch.use_deterministic_algorithms(False)


def off(a, b): return float((a.double() - b).norm() / b.norm().clamp(min=1e-30))


@runs_kernels
@each
@pytest.mark.parametrize("M, D, V, chunk", [(1, 8, 7, 5), (16, 16, 1, 7), (20, 32, 300, 8), (5, 24, 1030, 2048)] + [(300, 64, 40_001, 128)] * (DEVICE == "cuda"))
def test_against_float64(name, M, D, V, chunk):
    for dtype in (BF16, F32) if M != 5 else (BF16,):
        args = problem(M, D, V, dtype)
        (nll, dx, du), want = taken(name, *args, chunk, BOTH), exactly(*args)
        assert nll.dtype == F32 and dx.dtype == dtype and du.dtype == F32
        logits = (args[0].double() @ args[1].double().T).abs().amax(1)
        narrow = dtype == BF16 and not name.startswith(("exp", "hopper"))        # these keep logits in fp32
        assert ((nll - want[0]).abs() <= (2**-8 if narrow else 4e-6) * (1 + logits)).all() and (nll >= 0).all()
        for a, b, other in zip((dx, du), want[1:], args[1::-1]):          # a label that is almost certain leaves the difference of almost equal numbers
            close = 0.05 if narrow and M == 1 else 0.012 if dtype == BF16 else 2e-5
            assert (a.double() - b).norm() <= close * b.norm() + (1e-3 if narrow else 1e-6) * args[3].norm() * other.double().norm()
        if M > 2: assert not dx[2].any()         # weight 0


@runs_kernels
@each
def test_no_rows_and_no_gradients(name):
    x, U, y, w = problem(9, 16, 50)
    nll, dx, du = taken(name, x[:0], U, y[:0], w[:0], 4, BOTH)
    assert (nll.shape, dx.shape, du.shape) == ((0,), (0, 16), (50, 16)) and not du.any()
    alone, none, too = taken(name, x, U, y, None, 4, (False, False))
    assert none is None and too is None and torch.allclose(alone, taken(name, x, U, y, w, 4, BOTH)[0])
    for need in ((True, False), (False, True)):
        for a, b, on in zip(taken(name, x, U, y, w, 4, need)[1:], taken(name, x, U, y, w, 4, BOTH)[1:], need): assert torch.equal(a, b) if on else a is None


@runs_kernels
@each
def test_chunks_do_not_matter_and_runs_repeat(name):
    args = problem(14, 16, 200)
    first = taken(name, *args, 2048, BOTH)
    for a, b in zip(first, taken(name, *args, 2048, BOTH)): assert torch.equal(a, b)
    for a, b in zip(taken(name, *args, 5, BOTH), first): assert off(a, b) < 3e-3


@runs_kernels
def test_a_loss_is_never_negative():
    def low(x, u, shift, e, parts): emulated(x, u, shift + 1e-3, e, parts)
    x, U, y, w = problem(8, 16, 2)
    U[0], U[1], x[:4], y[:4] = 1, -1, 100, 0            # certain: the other label is 3,200 behind
    nll, dx, _ = _by_exponentials(low, 128)(x, U, y, w.abs(), 8, BOTH)
    assert (nll >= 0).all() and not nll[:4].any() and not dx[:4].any()


@runs_kernels
@each
def test_nan_and_infinity_stay_in_their_rows(name):
    x, U, y, w = problem(9, 16, 200)
    clean = taken(name, x, U, y, w, 4, BOTH)
    bad = x.clone(); bad[3, 5] = torch.nan; bad[6, 0] = torch.inf
    nll, dx, du = taken(name, bad, U, y, w, 4, BOTH)
    fine = torch.ones(9, dtype=torch.bool, device=DEVICE); fine[[3, 6]] = False
    assert not nll[~fine].isfinite().any() and dx[~fine].isnan().any(1).all() and du.isnan().any()
    for a, b in ((nll[fine], clean[0][fine]), (dx[fine], clean[1][fine])): assert off(a, b) < 5e-3


@runs_kernels
@each
def test_huge_logits_and_hopeless_labels(name):
    x, U, y, w = problem(70, 32, 260)
    for r, factor in ((4, 300.0), (9, -3000.0), (65, 1e4)): x[r] *= factor; w[r] = 0.5
    best = (x.double() @ U.double().T).argsort(1)
    y[4], y[9], y[65] = best[4, 0], best[9, -1], best[65, 100]       # the worst answer, the best one, one in between
    (nll, dx, du), want = taken(name, x, U, y, w, 33, BOTH), exactly(x, U, y, w)
    size = (x.double() @ U.double().T).abs().amax(1)
    assert ((nll - want[0]).abs() <= 2**-7 * (1 + size)).all() and want[0][4] > 200
    if name.startswith(("exp", "hopper")):
        assert ((nll - want[0]).abs() <= 4e-6 * (1 + size)).all()
        assert off(dx, want[1]) < 0.01 and off(du, want[2]) < 0.01


@runs_kernels
def test_near_the_reference():
    for name, run in BACKENDS.items():
        for dtype in (BF16, F32): assert differing(run, DEVICE, dtype, *((12, 32, 300, 8) if INTERPRETED else ())) is None, (name, dtype)


@runs_kernels
@pytest.mark.parametrize("dtype", (F32, BF16))
def test_scaling_in_place(dtype):
    g = torch.randn(10_001, device=DEVICE).to(dtype)
    for up in (1.0, -2.5, 0.0):
        got = g.clone()
        _launch(_scale_in_place, 2, got, got, torch.tensor(up, device=DEVICE), got.numel(), BLOCK=4096, num_warps=8)
        assert torch.equal(got, (g.float() * up).to(dtype))


@runs_kernels
@pytest.mark.parametrize("name", [n for n in BACKENDS if n in ("triton", "exponentials", "hopper")])
def test_behind_autograd(name, monkeypatch):
    LOSS.add("tried", BACKENDS[name])
    try:
        LOSS.chosen[DEVICE] = "tried"
        x, U, y, w = problem(10, 16, 130)
        x, U = x.requires_grad_(), torch.nn.Parameter(U.float())
        want = exactly(x, U.to(BF16), y, w)
        loss, nll = linear_ce(x, U, y, w, chunk=6)
        assert off(loss.detach(), want[0] @ w.double()) < 0.02 and not nll.requires_grad
        for _ in range(2):
            dx, dU = torch.autograd.grad(-2.5 * loss, (x, U), retain_graph=True)
            assert dU.dtype == F32 and dx.dtype == BF16 and off(dx, -2.5 * want[1]) < 0.012 and off(dU, -2.5 * want[2]) < 0.012
        for times in (1, 2): linear_ce(x, U, y, w)[0].backward(); assert off(U.grad, times * want[2]) < 0.012      # the last backward pass may scale in place
        U.fp32_sum, U.grad, x.grad = True, None, None
        for up in (1.0, 2.0): (up * linear_ce(x, U, y, w)[0]).backward()
        assert U.grad is None and off(U.main_grad, 3 * want[2]) < 0.012 and off(x.grad, 3 * want[1]) < 0.012
    finally: del LOSS.backends["tried"]


@runs_kernels
@pytest.mark.parametrize("name", [n for n in BACKENDS if n in ("triton", "exponentials", "hopper")])
def test_multi_token_loss(name):
    B, S, D, V, K = 2, 6, 16, 96, 4
    args = [(c * torch.randn(*s, device=DEVICE)).to(BF16).requires_grad_() for c, s in ((1.0, (B, S, D)), (0.5, (V, D)), (0.1, (K - 1, D, D)))]
    tokens, depth = torch.randint(V, (B, S + 2)), torch.randint(0, K + 1, (B, S))
    depth[0, 3:] = 0                                                     # a document's end
    LOSS.add("tried", BACKENDS[name])
    try:
        found = []
        for leaves, chosen in ((args, "tried"), ([a.detach().double().requires_grad_() for a in args], "reference")):
            LOSS.chosen[DEVICE] = chosen
            loss, parts = adamtp_loss(*leaves, tokens, depth, trunk_gradient=0.3, chunk=7, parts=True)      # tokens on the CPU
            again = adamtp_loss(*leaves, tokens.to(DEVICE), depth.to(DEVICE), trunk_gradient=0.3, chunk=7)
            assert torch.equal(loss, again)
            found.append([loss.detach(), parts.nll_K, *torch.autograd.grad(loss, leaves), next_token_nll(leaves[0], leaves[1], tokens, depth)[0]])
        for got, want in zip(*found): assert off(got, want) < 0.02
        LOSS.chosen[DEVICE] = "tried"
        assert adamtp_loss(*args, tokens, depth * 0) == 0
    finally: del LOSS.backends["tried"]


@plain
def test_errors():
    x, U, y, w = problem(4, 8, 10)
    for label in (-100, -1, 10):
        y[2] = label
        with pytest.raises(ValueError, match=f"label {label} is outside the vocabulary"): linear_ce(x, U, y, w)
