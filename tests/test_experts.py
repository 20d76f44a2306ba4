"""Expert networks: every backend that runs here against float64, under fixed routing, and the mixture layer around them; Triton's kernels in its interpreter, in a process of its own, where there is no GPU."""
import warnings
from copy import deepcopy
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hsmoe.comm.kernels import DISPATCH, sort_slots
from hsmoe.model.attention import RMSNorm
from hsmoe.model.experts import DenseGated, MoE, RoutedExperts
from hsmoe.model.gemm import REFERENCE as PRODUCTS
from hsmoe.model.network import EXPERTS, Experts, _around, _by_products, _of, _torch_rows, _torch_weights
from hsmoe.model.pointwise import POINTWISE
from hsmoe.model.routing import ROUTER
from hsmoe.optim.adamw8bit import AdamW8bit
from hsmoe.quant.fake import fake_quant, observing
from hsmoe.quant.formats import BlockFormat, qdq, quantize, scale_for
from on_device import BF16, DEVICE as KIND, F16, F32, F64, INTERPRETED, interpret, needs_gpu, new_seed, plain, starts_interpreter

DEVICE = torch.device(KIND)
GPU = DEVICE.type == "cuda"
SIZES = T0, D0, N0 = (9, 24, 40) if INTERPRETED else (44, 72, 136)
E0 = 3 if INTERPRETED else 5
NVFP4 = BlockFormat.parse("nvfp4:1x16")

# By products too on a CPU: those of the reference, and PyTorch's grouped ones, whose product is rounded before the bias is added
EXTRA = {"by products": Experts(_by_products(lambda x, w, aligned: (PRODUCTS, True))),
         "around torch": Experts(_by_products(_of(_around(_torch_rows, _torch_weights))))}
if INTERPRETED: HERE = {"triton": EXPERTS.backends["triton"].run}
else: HERE = {n: b.run for n, b in EXPERTS.backends.items() if not b.why_not(DEVICE)} | ({} if GPU else EXTRA)
BACKENDS, ALIGN = {n: e.run for n, e in HERE.items()}, {n: e.align for n, e in HERE.items()}
LOOPS, TWICE = ("reference", "grouped"), ("grouped_mm", "cute", "around torch")
QUICK = [n for n in BACKENDS if n not in LOOPS]


def with_each(backends):
    def mark(f): return pytest.mark.filterwarnings("ignore:.*[dD]eterministic")(pytest.mark.usefixtures("poisoned")(pytest.mark.parametrize("backend", backends)(f)))
    return mark


every, by_products = with_each(BACKENDS), with_each(QUICK)


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    "New random numbers each time, and no memory of earlier choices"
    for operation in (EXPERTS, DISPATCH, ROUTER, POINTWISE): monkeypatch.setattr(operation, "chosen", {})
    torch.set_float32_matmul_precision("highest")
    new_seed()


class Case(NamedTuple):
    "Arguments of a backend, and the gradient of its answers: NaN where rows are nobody's, zero in padding"
    leaves: list
    rows: tuple
    dy_RD: torch.Tensor
    empty: torch.Tensor      # experts without rows
    aligned: bool


def experts_of(T, E, C, how):
    "int64 [T,C]: expert 1 without rows and a fifth of the tokens masked; or all rows to the last expert; or to nobody"
    if how != "some": return torch.full((T, C), dict(one=E - 1, nobody=E)[how])
    expert = torch.rand(T, E).index_fill(1, torch.tensor([min(1, E - 1)]), -1 if E > C else 2).topk(C).indices
    return expert.masked_fill(torch.rand(T, 1) < 0.2, E)


def case(T, D, N, E=E0, C=2, dtype=BF16, align=1, how="some", expert=None) -> Case:
    expert = experts_of(T, E, C, how) if expert is None else expert
    rows = offsets, order, _ = sort_slots(expert, E, align)
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in (torch.randn(T, D), torch.randn(E, N, D) / D**.5, torch.randn(E, N) / 2, torch.randn(E, D, N) / N**.5, torch.randn(E, D) / 2)]
    dy = torch.randn(len(order), D)
    dy[order == T * C] = 0
    dy[offsets[-1]:] = torch.nan
    return Case(leaves, tuple(t.to(DEVICE) for t in rows), dy.to(DEVICE, dtype), (offsets.diff(prepend=offsets.new_zeros(1)) == 0).to(DEVICE), align > 1)


@pytest.fixture
def poisoned():
    "torch.empty gives NaN, and nothing is added up in an order of chance"
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def answers(run, c: Case, **kw):
    "[y, dx, dw_in, db_in, dw_out, db_out]; rows of nobody become 0"
    y = run(*c.leaves, *c.rows, aligned=c.aligned, **kw)
    grads = torch.autograd.grad(y, c.leaves, c.dy_RD)
    return [y.detach().masked_fill((torch.arange(len(y), device=DEVICE) >= c.rows[0][-1])[:, None], 0), *grads]


def slope(p): return 0.5 * (1 + torch.erf(p / 2**.5)) + p * torch.exp(-p * p / 2) / (2 * torch.pi)**.5


def exact(c: Case, scale=1.0, twice=False):
    """What `answers` must be, in float64, and how far each number of it may be off.

    Errors are carried along: a rounding to the dtype, u of the value, and of each sum `acc` of the magnitudes added up. `twice`: products are rounded before anything is added to them."""
    dtype = c.leaves[0].dtype
    u, acc, least = torch.finfo(dtype).eps / 2, 2.0**-42 if dtype == F64 else 2.0**-18, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x, w_in, b_in, w_out, b_out = (t.detach().double() for t in c.leaves)
    (offsets, order, inverse), dy, (T, C) = c.rows, c.dy_RD.double(), c.rows[2].shape
    more = acc + (2 * u if twice else 0)
    values = [x.new_zeros(len(order), x.shape[1]), x.new_zeros(len(order), x.shape[1]), *(torch.zeros_like(w) for w in (w_in, b_in, w_out, b_out))]
    errors = [torch.zeros_like(v) for v in values]
    start = 0
    for e, end in enumerate(offsets.tolist()):
        rows, start = slice(start, end), end
        there = order[rows] < T * C
        xe, we, wo, g = x[(order[rows] // C).clamp_max(T - 1)] * there[:, None], w_in[e], w_out[e], dy[rows]
        p = xe @ we.T + b_in[e]
        e_p = more * (xe.abs() @ we.abs().T + b_in[e].abs())
        h, s = F.gelu(p), slope(p)
        h_abs, e_h, e_q = h.abs(), u * h.abs() + 1.13 * e_p + acc * p.abs() + least, e_p + u * p.abs() + least
        y, y_abs = scale * (h @ wo.T + b_out[e]), scale * (h_abs @ wo.abs().T + b_out[e].abs())
        a, a_abs = scale * g @ wo, scale * g.abs() @ wo.abs()
        e_a, e_s = more * a_abs + u * a.abs() + least, 0.8 * e_q + acc
        d = a * s
        e_d = a.abs() * e_s + e_a * (s.abs() + e_s) + u * d.abs() + least
        e_h2 = u * h_abs + 1.13 * e_q + acc * p.abs() + least
        parts = [y, d @ we, d.T @ xe, d.sum(0), scale * g.T @ h, scale * g.sum(0)]
        offs = [u * y.abs() + scale * e_h @ wo.abs().T + more * y_abs, u * parts[1].abs() + e_d @ we.abs() + acc * d.abs() @ we.abs(),
                u * parts[2].abs() + e_d.T @ xe.abs() + acc * d.abs().T @ xe.abs(), u * parts[3].abs() + e_d.sum(0) + acc * d.abs().sum(0),
                (3 * u if twice else u) * parts[4].abs() + scale * g.abs().T @ e_h2 + acc * scale * g.abs().T @ h_abs, u * parts[5].abs() + acc * scale * g.abs().sum(0)]
        for i, (v, o) in enumerate(zip(parts, offs)):
            at = rows if i < 2 else e
            values[i][at], errors[i][at] = v, o + least * (end > rows.start)                 # where there was nothing to sum, zero is zero
    for i, t in enumerate((values, errors)): t[1] = torch.where((inverse < offsets[-1])[..., None], t[1][inverse], 0).sum(1)
    errors[1] = errors[1] + u * values[1].abs() + least * (errors[1] > 0)
    return values, errors


NAMES = ("y", "dx", "dw_in", "db_in", "dw_out", "db_out")


def wrong(c: Case, got, scale=1.0, twice=False):
    "A sentence where an answer is further off than rounding explains, or None"
    for name, g, v, off in zip(NAMES, got, *exact(c, scale, twice)):
        assert g.dtype == c.leaves[0].dtype and g.shape == v.shape, name
        far = ((g.double() - v).abs() <= off).logical_not()
        if far.any(): return f"{name}: {int(far.sum())} of {far.numel()} are off, the first at {far.nonzero()[0].tolist()}: {g[far][0]} is not {v[far][0]}"
        if name.startswith(("dw", "db")) and g[c.empty].any(): return f"{name} of an expert without rows is not zero"


SHAPES = [(1, 72, 40), (31, 72, 136), (33, 88, 44), (44, 88, 40), (130, 72, 44)]
if INTERPRETED: SHAPES = [(33, 24, 44), (1, 88, 40)]
if GPU: SHAPES = [(1, 72, 136), (31, 72, 136), (130, 72, 136), (33, 88, 44)]                  # few, as each width is compiled anew


def dtypes_of(backend):
    if backend in TWICE or backend == "hopper": return [BF16]
    return [BF16, F32] if GPU or INTERPRETED else [BF16, F32, F16, F64]


@every
def test_against_float64(backend):
    "Widths that end within a tile or a block, an expert without rows, tokens that are masked, rows of nobody full of NaN, rows aligned and not"
    for dtype in dtypes_of(backend):
        for T, D, N in SHAPES if dtype in (BF16, F64) else SHAPES[-2:-1]:
            for align in (128,) if backend == "hopper" else (1, 128) if (T, D, N) == SHAPES[-2] and dtype == BF16 else (1,):
                c = case(T, D, N, dtype=dtype, align=align)
                assert wrong(c, answers(BACKENDS[backend], c, scale=0.5), 0.5, backend in TWICE) is None, (dtype, T, D, N, align)


@every
def test_uneven_routing(backend):
    "All rows to one expert, to nobody, or to the only expert there is, where some tokens are masked"
    for how, E in (("one", 3), ("nobody", 3), ("some", 1)):
        for align in (1, 128) if backend in ("triton", "hopper", "by products") and how != "nobody" else (1,):
            c = case(T0 - 1, D0, N0, E, 1 if E == 1 else 2, how=how, align=align)
            got = answers(BACKENDS[backend], c)
            assert wrong(c, got, 1.0, backend in TWICE) is None, (how, E, align)
            if how == "nobody": assert not any(g.any() for g in got)


@every
def test_rows_that_are_sorted_already(backend):
    "Without an order x are the rows, of five experts or of one; the gradient of nobody's rows is zero"
    for E in (E0, 1):
        c = case(T0, D0, N0, E, 1)
        order, n = torch.arange(T0, device=DEVICE), c.rows[0][-1]
        c = c._replace(rows=(c.rows[0], order, order[:, None]), dy_RD=torch.randn_like(c.dy_RD).masked_fill((order >= n)[:, None], torch.nan))
        y = BACKENDS[backend](*c.leaves, c.rows[0])
        got = torch.autograd.grad(y, c.leaves, c.dy_RD)
        assert wrong(c, [y.detach().masked_fill((order >= n)[:, None], 0), *got], 1.0, backend in TWICE) is None, E


@every
def test_a_dense_network(backend):
    "One network without a dimension for experts, as the shared experts are: every row is its own, and biases may be fp32"
    for T in (1, 44, 130)[:2 if INTERPRETED else 3]:
        c = case(T, D0, N0, 1, 1, expert=torch.zeros(T, 1, dtype=torch.int64))
        x, *weights = c.leaves
        flat = [w.detach()[0].requires_grad_() for w in weights]
        with torch.no_grad(): flat[3] = flat[3].float().requires_grad_()
        y = BACKENDS[backend](x, *flat, c.rows[0], scale=0.25, aligned=True)
        got = torch.autograd.grad(y, [x, *flat], c.dy_RD[c.rows[2][:, 0]])
        assert got[4].dtype == F32
        back = [y.detach(), got[0], *(g[None] for g in got[1:4]), got[4][None].to(BF16)]
        ordered = c._replace(rows=(c.rows[0], torch.arange(T, device=DEVICE), torch.arange(T, device=DEVICE)[:, None]), dy_RD=c.dy_RD[c.rows[2][:, 0]])
        assert wrong(ordered, back, 0.25, backend in TWICE) is None, T
    if backend in LOOPS: return
    for p in flat[:3]: p.fp32_sum = True
    sums = []
    for _ in range(2):
        BACKENDS[backend](x, *flat, c.rows[0], scale=0.25, aligned=True).backward(ordered.dy_RD)
        sums.append([p.main_grad.clone() for p in flat[:3]])
    for one, two, g in zip(*sums, got[1:4]):
        assert one.dtype == F32 and (one - g.float()).norm() <= 0.01 * one.norm() and (two - 2 * one).norm() <= (1e-2 if backend in TWICE else 1e-6) * one.norm()


@plain
@pytest.mark.skipif(GPU, reason="no kernel is tested")
def test_one_wrong_number_shows():
    "The bounds are narrow enough: small mistakes in one row, column, expert or bias are all found"
    c = case(130, 88, 40)
    good = answers(BACKENDS["grouped"], c)
    assert wrong(c, good) is None
    slot = int(c.rows[2][(c.rows[2] < c.rows[0][-1]).all(1)][0, 0])
    def spoilt(i, at, f):
        got = [g.clone() for g in good]
        got[i][at] = f(got[i][at])
        return got
    for i, name in enumerate(NAMES):
        at = slot if i == 0 else int((good[1].any(1)).nonzero()[0]) if i == 1 else int((~c.empty).nonzero()[0])
        for f in (lambda v: v * 1.05, lambda v: v.roll(1, -1), lambda v: -v, lambda v: v * torch.nan):
            assert wrong(c, spoilt(i, at, f)).startswith(f"{name}:"), name
        if i > 1: assert wrong(c, spoilt(i, 1, lambda v: v + 1e-30)).startswith(name)
    other = c.leaves[0].detach().clone()
    other[:, 3] += 0.05
    assert wrong(c, answers(BACKENDS["grouped"], c._replace(leaves=[other.requires_grad_(), *c.leaves[1:]]))) is not None


def same(a, b): return all(x is None and y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@every
def test_however_tensors_lie_in_memory(backend):
    "Inputs, weights and gradients as views, and one weight used twice"
    c = case(*SIZES, align=ALIGN[backend])
    c = c._replace(dy_RD=c.dy_RD[:1].nan_to_num(1.0).expand_as(c.dy_RD).masked_fill((c.dy_RD == 0) | c.dy_RD.isnan(), 0))
    want = answers(BACKENDS[backend], c)
    apart = [t.detach().new_zeros(*t.shape[:-1], 2, t.shape[-1])[..., 1, :].copy_(t.detach()).requires_grad_() for t in c.leaves]
    turned = [t.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() if t.ndim > 1 else t for t in c.leaves]
    for leaves in (apart, turned)[:1 if INTERPRETED else 2]:
        got = answers(BACKENDS[backend], c._replace(leaves=leaves))
        assert got[0].isfinite().all() and wrong(c, got, 1.0, backend in TWICE) is None
    strided = c.dy_RD.repeat_interleave(2, 1)[:, ::2]
    assert not strided.is_contiguous() and same(answers(BACKENDS[backend], c._replace(dy_RD=strided)), want)
    y1, y2 = (BACKENDS[backend](*c.leaves, *c.rows, aligned=c.aligned) for _ in range(2))
    both = torch.autograd.grad([y1, y2], c.leaves, [c.dy_RD, c.dy_RD], retain_graph=True)
    assert same(both, [2 * g for g in want[1:]]) and same(torch.autograd.grad([y1, y2], c.leaves, [c.dy_RD, c.dy_RD]), both)


@plain
@every
def test_some_need_no_gradient(backend):
    c = case(*SIZES, align=ALIGN[backend])
    want = answers(BACKENDS[backend], c)
    for frozen in ((0,), (1, 2), (3, 4), (0, 1, 3), (1, 2, 3, 4)):
        leaves = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(c.leaves)]
        y = BACKENDS[backend](*leaves, *c.rows, aligned=c.aligned)
        got = torch.autograd.grad(y, [t for t in leaves if t.requires_grad], c.dy_RD)
        assert same(got, [g for i, g in enumerate(want[1:]) if i not in frozen]), frozen
    n = c.rows[0][-1]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(): y = BACKENDS[backend](*c.leaves, *c.rows, aligned=c.aligned)
        assert not y.requires_grad and torch.equal(y[:n], want[0][:n])


@every
def test_dtypes_that_differ(backend):
    "Activations in bf16, weights in fp32: as exact as with weights in bf16"
    c = case(*SIZES, align=ALIGN[backend])
    if backend in EXTRA: pytest.skip("takes one dtype; the operation's own backends choose")
    mixed = c._replace(leaves=[c.leaves[0], *(t.detach().float().requires_grad_() for t in c.leaves[1:])])
    got = answers(BACKENDS[backend], mixed)
    assert [g.dtype for g in got] == [BF16, BF16, F32, F32, F32, F32]
    assert wrong(c, [g.to(BF16) for g in got], 1.0, backend in TWICE) is None


def rounded_alike(c: Case, **kw):
    "The answers of the loop with sums in float64 and the same roundings in between: h to the dtype, then y"
    dtype, wide = c.leaves[0].dtype, [t.detach().double() for t in c.leaves]
    y = EXPERTS.backends["reference"].run.run(*wide, *c.rows, hidden=lambda h: h.to(dtype).double(), **kw)
    return y.to(dtype)


# Shares of codes and of scales that may flip against float64 sums. Seen on a CPU with fp32 sums: below 2e-5; where the product is rounded before the bias is added 0.012 and 0.023
FLIPS = {False: (1e-3, 1e-3), True: (0.03, 0.06)}


@every
def test_quantised_outputs(backend):
    """A block of answers is the reference's bit for bit wherever the reference rounds its 16 numbers to the same bf16 numbers; codes and scales that flip elsewhere are counted. Blocks past the width hold zeros"""
    T, D, N, E, C = (44, 40, 24, 3, 2) if INTERPRETED else (700, 72, 136, 5, 2)
    c = case(T, D, N, E, C, align=ALIGN[backend])
    n, run = c.rows[0][-1], BACKENDS[backend]
    y, *grads = answers(run, c)
    want = rounded_alike(c)[:n]
    for name in ("nvfp4:1x16", "nvfp4:1x32")[:1 if INTERPRETED or GPU else 2]:
        fmt = BlockFormat.parse(name)
        for fixed in (None, scale_for(1.0, fmt))[:1 if INTERPRETED else 2]:
            q, *straight = answers(run, c, out=(fmt, fixed))
            assert torch.equal(q[:n], qdq(y[:n], fmt, fixed)) and same(straight, grads), (name, fixed)
            def blocks(t): return F.pad(t.float(), (0, -D % fmt.block[1])).unflatten(1, (-1, fmt.block[1]))
            alike = (blocks(y[:n]) == blocks(want)).all(-1)
            assert backend in TWICE or alike.float().mean() > 0.9
            assert torch.equal(blocks(q[:n])[alike], blocks(qdq(want, fmt, fixed))[alike])
        stored = zip(quantize(y[:n], fmt), quantize(want, fmt), FLIPS[backend in TWICE])
        for part, (a, b, share) in zip(("codes", "scales"), stored):
            print(backend, name, part, f"{(a != b).float().mean():.1e}")
            assert (a != b).sum() <= 2 + share * a.numel(), (name, part)


@every
def test_quantised_hidden_values(backend):
    "With an identity for W_out the answers are the hidden values: quantised after one rounding; and again in the backward, for W_out's gradient"
    T, D, E, C = (44, 40, 3, 2) if INTERPRETED else (130, 72, 5, 2)
    c = case(T, D, D, E, C, align=ALIGN[backend])
    with torch.no_grad():
        c.leaves[3].copy_(torch.eye(D))
        c.leaves[4].zero_()
    for fixed in (None, scale_for(2.0, NVFP4))[:1 if INTERPRETED else 2]:
        h, *_ = answers(BACKENDS[backend], c)
        q, *grads = answers(BACKENDS[backend], c, hidden=(NVFP4, fixed))
        n = c.rows[0][-1]
        assert torch.equal(q[:n], qdq(h[:n], NVFP4, fixed)) and not torch.equal(q, h)
        want, start = torch.zeros_like(grads[3], dtype=F64), 0
        for e, end in enumerate(c.rows[0].tolist()):
            want[e], start = c.dy_RD[start:end].double().T @ q[start:end].double(), end
        unquantised, start = torch.zeros_like(want), 0
        for e, end in enumerate(c.rows[0].tolist()):
            unquantised[e], start = c.dy_RD[start:end].double().T @ h[start:end].double(), end
        assert (grads[3].double() - want).norm() < 0.5 * (unquantised - want).norm()   # h is made again from a rounded pre, so that a few codes differ


@plain
@pytest.mark.skipif(GPU, reason="the same on any device")
def test_what_no_epilogue_can_quantise():
    "Formats and sites that kernels do not serve are quantised around them"
    c = case(44, 72, 40)
    for name in ("nvfp4:1x24", "nvfp4:1x16+4/6"):
        fmt = BlockFormat.parse(name)
        for hidden in (None, (fmt, None), lambda h: fake_quant(h, fmt)):
            got, want = (answers(BACKENDS[n], c, hidden=hidden, out=(fmt, None)) for n in ("by products", "reference"))
            assert (got[0] == want[0]).float().mean() > 0.98 and (got[0] != answers(BACKENDS["reference"], c)[0]).any()
            for a, b in zip(got[1:], want[1:]): assert (a.float() - b.float()).norm() < 0.01 * b.float().norm()


# ---- fp32 sums


def tagged(c: Case):
    leaves = [c.leaves[0].detach().requires_grad_(), *(nn.Parameter(t.detach().clone()) for t in c.leaves[1:])]
    for p in leaves[1:]: p.fp32_sum = True
    return c._replace(leaves=leaves)


def backward(run, c):
    run(*c.leaves, *c.rows, aligned=c.aligned).backward(c.dy_RD)
    return [p.main_grad.clone() for p in c.leaves[1:]]


@by_products
def test_micro_batches_add_up_in_fp32(backend):
    "The kernel's sum, unrounded; the next one is added to it; `grad` stays None; an expert without rows is left alone, and a sum that was set to zero is used again"
    align = ALIGN[backend]
    T, expert = T0, experts_of(2 * T0, E0, 2, "some")
    c = case(2 * T, D0, N0, align=align, expert=expert)
    whole, rounded = tagged(c), answers(BACKENDS[backend], c)[2:]
    first = backward(BACKENDS[backend], whole)
    pointers = [p.main_grad.data_ptr() for p in whole.leaves[1:]]
    for p, m, r in zip(whole.leaves[1:], first, rounded):
        assert p.grad is None and m.dtype == F32 and m.shape == p.shape
        assert torch.equal(m.to(r.dtype), r)                                          # the gradient in bf16 is the sum, rounded once
        assert backend in TWICE or not torch.equal(m, r.float())
        assert not m[c.empty].any() and (m[~c.empty] != 0).any()
    halves = [case(T, D0, N0, align=align, expert=e) for e in expert.split(T)]
    slots = c.dy_RD.new_zeros(2 * T, 2, D0)
    there = (c.rows[1] < 4 * T) & (torch.arange(len(c.rows[1]), device=DEVICE) < c.rows[0][-1])
    slots.view(4 * T, D0)[c.rows[1][there]] = c.dy_RD[there]
    parts = tagged(c)
    for half, x, dy in zip(halves, c.leaves[0].detach().split(T), slots.split(T)):
        order, n = half.rows[1], half.rows[0][-1]
        dy_RD = torch.where((order < 2 * T)[:, None], dy.reshape(2 * T, D0)[order.clamp_max(2 * T - 1)], 0)
        dy_RD[n:] = torch.nan
        got = backward(BACKENDS[backend], parts._replace(leaves=[x.clone().requires_grad_(), *parts.leaves[1:]], rows=half.rows, dy_RD=dy_RD, aligned=half.aligned))
    for a, b in zip(got, first): assert (a - b).norm() <= (1e-2 if backend in TWICE else 1e-5) * b.norm()
    for p in whole.leaves[1:]: p.main_grad.zero_()
    again = backward(BACKENDS[backend], whole)
    assert same(again, first) and [p.main_grad.data_ptr() for p in whole.leaves[1:]] == pointers


@plain
@by_products
def test_sums_wait_for_a_backward_pass(backend):
    "Gradients that are asked for by `torch.autograd.grad` are returned, and those that are not leave no trace"
    c = case(*SIZES, align=ALIGN[backend])
    want, t = answers(BACKENDS[backend], c)[1:], tagged(c)
    def y(): return BACKENDS[backend](*t.leaves, *t.rows, aligned=t.aligned)
    assert same(torch.autograd.grad(y(), t.leaves[:1], t.dy_RD), want[:1]) and same(torch.autograd.grad(y(), t.leaves, t.dy_RD), want)
    y().backward(t.dy_RD, inputs=t.leaves[:1])
    assert same([t.leaves[0].grad], want[:1]) and not any(hasattr(p, "main_grad") for p in t.leaves[1:])
    y().backward(t.dy_RD, inputs=t.leaves[1:2])
    assert hasattr(t.leaves[1], "main_grad") and not hasattr(t.leaves[2], "main_grad")


def moe_of(dtype=F32, D=24, E=5, J=2, C=2, N=24, std=0.3, **kw):
    moe = MoE(D, E, J, C, N, bias_init=0.0, **kw).to(DEVICE)
    for p in moe.parameters(): nn.init.normal_(p, std=std)
    return moe.to(dtype)


@plain
@by_products
def test_an_optimiser_adopts_a_mixture(backend):
    "bf16 parameters with fp32 sums: from hooks, which add rounded gradients, and from the kernels, which do not round; for one micro-batch the former is the latter rounded, and the steps agree"
    EXPERTS.chosen[DEVICE.type] = backend
    EXPERTS.backends.setdefault(backend, EXPERTS.backends["reference"]._replace(run=HERE[backend]))
    moe, x = moe_of(BF16), torch.randn(T0, 24, device=DEVICE, dtype=BF16)
    results = []
    try:
        for kernels in (True, False):
            model = deepcopy(moe)
            optimiser = AdamW8bit(model.named_parameters(), lr=1e-2, min_8bit_size=float("inf"))
            assert all(p.fp32_sum for n, p in model.named_parameters() if p.dtype == BF16)
            if not kernels:
                for p in model.parameters(): p.fp32_sum = False
            y, routing = model(x)
            y.square().mean().backward()
            sums = {n: p.main_grad.clone() for n, p in model.named_parameters() if p.dtype == BF16}
            assert len(sums) == 8 and all(p.grad is None for p in model.parameters() if p.dtype == BF16)
            optimiser.step()
            results.append((sums, {n: m.detach().clone() for n, m in optimiser.named_masters()}, {n: p.detach().clone() for n, p in model.named_parameters()}))
            optimiser.zero_grad()
            model(x)[0].square().mean().backward()
            assert all(p.main_grad is not None for p in model.parameters() if p.dtype == BF16)
    finally:
        if backend in EXTRA: del EXPERTS.backends[backend]
    (sums, masters, weights), (hooked, masters2, weights2) = results
    for n in sums:
        if GPU and "shared" in n: torch.testing.assert_close(sums[n], hooked[n], rtol=2.0**-7, atol=1e-3 * hooked[n].abs().max().item())   # cuBLAS adds up differently for another dtype
        else: assert torch.equal(sums[n].to(BF16).float(), hooked[n]), n
        assert (masters[n] - masters2[n]).abs().max() <= 1e-2 * 2.0**-7, n            # a first step of Adam is ±lr but for the smallest gradients
    assert backend in TWICE or any(not torch.equal(sums[n], hooked[n]) for n in sums)
    assert sum((weights[n] != weights2[n]).sum().item() for n in sums) <= 0.02 * sum(w.numel() for w in weights.values())


# ---- the mixture


@plain
@pytest.mark.skipif(GPU, reason="the same on any device")
def test_names_in_a_state_dict():
    keys = list(moe_of(E=3, J=2, straight_through="default_moe").state_dict())
    for kind, n in (("routed", 3), ("shared", 2)):
        assert [k for k in keys if f"{kind}.experts" in k] == [f"{kind}.experts.{e}.{name}" for e in range(n) for name in ("w_in", "b_in", "w_out", "b_out")]
    sites = [f"{kind}.{site}.{buffer}" for kind, out in (("routed", "routed_out"), ("shared", "shared_out")) for site in ("ffn_in", "ffn_hidden", out) for buffer in ("log2_tensor_scale", "mode_code", "block_scale_bits")]
    router = ["router.weight", "router.bias", "router.balance_bias", *(f"router.router_logits.{b}" for b in ("log2_tensor_scale", "mode_code", "block_scale_bits"))]
    assert sorted(k for k in keys if ".experts." not in k) == sorted([*sites, *router, "output_mean.mean_ED", "output_mean.steps_E"])


@plain
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_chosen_where_no_gradient_is_taken(context):
    "A first use in an evaluation chooses the same backend as one in training"
    moe, x = moe_of(), torch.randn(9, 24, device=DEVICE)
    with warnings.catch_warnings(), context():
        warnings.simplefilter("error")
        moe(x)
    inside = EXPERTS.chosen[DEVICE.type], ROUTER.chosen[DEVICE.type]
    EXPERTS.chosen.clear(), ROUTER.chosen.clear()
    assert inside == (EXPERTS.choose(DEVICE), ROUTER.choose(DEVICE)) and inside[0] != "reference"


@plain
def test_statistics_do_not_see_padding(monkeypatch):
    "Means of `default_moe` and what sites observe, with experts' rows at multiples of 128 and at any row"
    x, mask, seen = torch.randn(40, 24, device=DEVICE, dtype=BF16), torch.rand(40, device=DEVICE) < 0.8, []
    moe = moe_of(BF16, straight_through="default_moe")
    for site in (moe.routed.ffn_hidden, moe.routed.routed_out): site.set_format("nvfp4")
    with torch.no_grad(): moe.routed.b_in.add_(1), moe.routed.b_out.add_(5)               # rows of padding answer something
    run = EXPERTS.backends["grouped"].run.run
    for align in (1, 128):
        monkeypatch.setattr(RoutedExperts, "network", lambda self, x: Experts(run, align))
        m = deepcopy(moe)
        with torch.no_grad(), observing(m): y, routing = m(x, mask)
        m.zero_grad()
        y, routing = m(x, mask)
        y.float().square().sum().backward()
        assert m.dispatch.align == align
        count = m.output_mean.count_E.clone()
        m.end_step(routing.load_E)
        seen.append((y.detach(), count, m.output_mean.mean_ED, [s.stats() for s in (m.routed.ffn_hidden, m.routed.routed_out)], [p.grad for p in m.parameters()]))
    (y, count, mean, stats, grads), (y2, count2, mean2, stats2, grads2) = seen
    assert torch.equal(count, count2) and count.sum() == 4 * mask.sum() and mean.any()
    torch.testing.assert_close(mean, mean2, rtol=0, atol=2.0**-7 * mean.abs().max().item())
    torch.testing.assert_close(y, y2, rtol=0, atol=2.0**-6 * y.abs().max().item())
    for a, b in zip(grads, grads2): assert (a.float() - b.float()).norm() <= 0.02 * a.float().norm()
    for a, b in zip(stats, stats2):
        assert a["blocks"] == b["blocks"] and abs(a["amax"] / b["amax"] - 1) < 0.01 and abs(a["zero"] - b["zero"]) <= 2, (a, b)


class FeedForward(nn.Module):
    "A layer's second half"
    def __init__(self, D, E, J, C, N, **kw):
        super().__init__()
        self.norm, self.out_norm, self.moe, self.dense = RMSNorm(D), RMSNorm(D), MoE(D, E, J, C, N, bias_init=0.0, **kw), DenseGated(D, N)

    def forward(self, x, mask=None):
        u = self.norm(x)
        y, routing = self.moe(u, mask)
        return x + self.out_norm(y + self.dense(u)), routing


def feed_forward(dtype, D=72, E=6, J=2, C=2, N=136, quantised=True, **kw):
    layer = FeedForward(D, E, J, C, N, **kw).to(DEVICE)
    for p in layer.parameters(): nn.init.normal_(p, std=0.2)
    layer.moe.to(dtype), layer.dense.to(dtype)
    if quantised:
        for site in (layer.moe.routed.routed_out, layer.moe.shared.shared_out, layer.dense.dense_gate_pre): site.set_format("nvfp4")
    return layer


@plain
def test_a_compiled_layer_gives_the_same_numbers():
    "`torch.compile` leaves the experts out of its graphs, and takes what is around them"
    torch.compiler.reset()
    layer = feed_forward(F32, 24, 4, 2, 2, 20, quantised=False)
    x, mask = torch.randn(2, 9, 24, device=DEVICE, requires_grad=True), torch.rand(2, 9, device=DEVICE) < 0.8
    def run(f):
        y, routing = f(x, mask)
        return y, routing.load_E, *torch.autograd.grad(y.square().sum() + routing.entropy_sum, [x, *layer.parameters()])
    want = run(layer)
    for a, b in zip(run(torch.compile(layer, backend="aot_eager")), want): torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# ---- on a GPU


def waiting_is_an_error():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")


GRAPHS = [n for n in QUICK if GPU and n != "cute"]


@needs_gpu
@pytest.mark.parametrize("backend", GRAPHS)
@pytest.mark.parametrize("how", ["ste", "default_moe"])
def test_nothing_waits_for_the_device(backend, how):
    EXPERTS.choose(DEVICE, backend, strict=True)
    layer = feed_forward(BF16, straight_through=how, balance="quantile" if how == "ste" else "bias")
    x, mask = torch.randn(3, 50, 72, device=DEVICE, dtype=BF16, requires_grad=True), torch.rand(3, 50, device=DEVICE) < 0.8
    def step():
        y, routing = layer(x, mask)
        (y.float().square().sum() + routing.z_sum).backward()
    step()
    waiting_is_an_error()
    try: step()
    finally: torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("backend", [n for n in GRAPHS if n != "grouped_mm"])
def test_a_graph_of_a_layer(backend):
    "Forward, backward and fp32 sums recorded once and replayed with other tokens and masks: bit for bit what happens without a graph"
    EXPERTS.choose(DEVICE, backend, strict=True)
    layer = feed_forward(BF16)
    optimiser = AdamW8bit(layer.named_parameters())
    x, mask, dy = torch.randn(150, 72, device=DEVICE, dtype=BF16, requires_grad=True), torch.rand(150, device=DEVICE) < 0.8, torch.randn(150, 72, device=DEVICE)
    def step():
        y, routing = layer(x, mask)
        torch.autograd.backward([y.float(), routing.entropy_sum], [dy, torch.ones_like(routing.entropy_sum)])
        return y, routing.load_E
    def clear():
        for t in (x, *layer.parameters()):
            for name in ("grad", "main_grad"):
                if getattr(t, name, None) is not None: getattr(t, name).zero_()
    def sums(): return [(p.grad if getattr(p, "main_grad", None) is None else p.main_grad).clone() for p in (x, *layer.parameters())]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2): step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): y, load = step()
    for _ in range(3):
        with torch.no_grad(): x.normal_(), mask.copy_(torch.rand(150, device=DEVICE) < torch.rand((), device=DEVICE)), dy.normal_()
        clear()
        for _ in range(2): graph.replay()
        recorded = [y.clone(), load.clone(), *sums()]
        clear()
        for _ in range(2): y2, load2 = step()
        assert recorded[1].sum() == 2 * mask.sum() and same(recorded, [y2, load2, *sums()])


@needs_gpu
@pytest.mark.skipif("hopper" not in BACKENDS, reason="needs a Hopper GPU")
@pytest.mark.parametrize("quantised", [False, True])
def test_both_consumers_work_many_tiles(quantised):
    "More tiles than three rounds of all multiprocessors, experts from none to most of the rows; the same bits each time"
    T, D, N, E, C = 9000, 1000, 424, 9, 4
    share = 1 / torch.arange(1.0, E + 1)
    expert = torch.multinomial(share.index_fill(0, torch.tensor([4]), 0).expand(T, E), C)
    c = case(T, D, N, E, C, align=128, expert=expert.masked_fill(torch.rand(T, 1) < 0.1, E))
    site = dict(out=(NVFP4, None)) if quantised else {}
    got = answers(BACKENDS["hopper"], c, **site)
    if quantised:
        n = c.rows[0][-1]
        assert torch.equal(got[0][:n], qdq(answers(BACKENDS["hopper"], c)[0][:n], NVFP4))
    else: assert wrong(c, got) is None
    for _ in range(3): assert same(answers(BACKENDS["hopper"], c, **site), got)
