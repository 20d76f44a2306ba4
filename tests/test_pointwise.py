"""Norm, norm of a sum and gated GELU: the Triton kernels against the reference and against float64, on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from hsmoe.backends import BackendError
from hsmoe.model import pointwise
from hsmoe.model.attention import RMSNorm
from hsmoe.model.hybrid import HybridSparseMoEModel
from hsmoe.model.pointwise import POINTWISE, REFERENCE, Pointwise, differing, triton_add_norm, triton_gated, triton_norm
from hsmoe.quant.formats import BlockFormat, qdq, scale_for
from on_device import BF16, DEVICE, F16, F32, F64, interpret, needs_gpu, new_seed, plain, poisoned, runs_kernels, starts_interpreter

TRITON = Pointwise(triton_gated, triton_norm, triton_add_norm)
WIDTHS, LAST = (1, 7, 88, 544, 1536, 3000), {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}      # half a last place
NVFP4 = BlockFormat.parse("nvfp4:1x16")
SITES = [None, (NVFP4, None), ("nvfp4:1x16", scale_for(2.0, NVFP4)), ("mxfp8_e4m3:1x32", None), ("int8:1x64", None)]   # the last is not exact in bf16


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    "New random numbers each time, and no memory of earlier choices"
    monkeypatch.setattr(POINTWISE, "chosen", {})
    new_seed()


def taken(f, leaves, dy):
    "Value and gradients on DEVICE, of buffers that held NaN before; back on the CPU"
    leaves = [t.detach().to(DEVICE).requires_grad_() for t in leaves]
    with poisoned():
        y = f(*leaves)
        return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, leaves, dy.to(DEVICE)))]


def same(a, b): return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


@runs_kernels
@pytest.mark.parametrize("width", WIDTHS)
def test_near_the_reference(width):
    cases = [(1, F32, None), (33 if width <= 88 else 2, BF16, SITES[1])] if DEVICE == "cpu" else product((1, 33, 1000), (BF16, F16, F32), SITES[:2])     # the interpreter is slow
    for rows, dtype, site in cases: assert differing(TRITON, DEVICE, dtype, rows, width, site) is None, (rows, dtype, site)


@runs_kernels
@pytest.mark.parametrize("rows, width, dtype", [(33, 7, F32), (1000, 24, BF16), (9, 544, F16), (3, 1536, BF16), (2, 8192, BF16)])
def test_norm_against_float64(rows, width, dtype):
    x, dy, w = (10 * torch.randn(rows, width)).to(dtype), torch.randn(rows, width).to(dtype), 1 + torch.randn(width) / 4
    got = taken(lambda x, w: triton_norm(x, w, 1e-5), (x, w), dy)
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    y = F.rms_norm(x, (width,), w, 1e-5)
    want = y, *torch.autograd.grad(y, (x, w), dy.double())
    assert [t.dtype for t in got] == [dtype, dtype, F32]
    for a, b in zip(got[:2], want): assert ((a - b).abs() <= LAST[dtype] * b.abs() + 3e-6 * b.abs().max() + (6e-8 if dtype == F16 else 0)).all()
    assert ((got[2] - want[2]).abs() <= 3e-7 * (dy.double() * want[0] / w).abs().sum(0)).all()


def added(dtype, rows, width, used, f, leaves=None):
    "Sum, its norm and the gradients of x, a and weight by f, where a gradient comes from `used` of the two"
    x, a, w, ds, dy = leaves or ((4 * torch.randn(rows, width)).to(dtype), (4 * torch.randn(rows, width)).to(dtype), 1 + torch.randn(width) / 4, *(torch.randn(rows, width).to(dtype) for _ in range(2)))
    place = "cpu" if x.dtype == F64 else DEVICE
    leaves = [t.detach().to(place).requires_grad_() for t in (x, a, w)]
    with poisoned():
        s, y = f(*leaves, 1e-5)
        outs = [(t, d) for t, d, name in ((s, ds, "sum"), (y, dy, "norm")) if name in used]
        grads = torch.autograd.grad([t for t, _ in outs], leaves, [d.to(place, t.dtype) for t, d in outs], allow_unused=True)
    return [None if t is None else t.detach().cpu() for t in (s, y, *grads)], (x, a, w, ds, dy)


@runs_kernels
@pytest.mark.parametrize("rows, width, dtype", [(33, 7, F32), (150, 24, BF16), (5, 544, F16), (3, 1536, BF16), (2, 5000, F32)])
def test_add_norm_against_float64_and_two_steps(rows, width, dtype):
    for used in ("sum norm", "norm", "sum"):
        got, given = added(dtype, rows, width, used, triton_add_norm)
        x, a, w, ds, dy = given
        s = x + a                                                         # rounded; everything below starts from it
        want, _ = added(F64, rows, width, used, lambda x, a, w, eps: (x + a, F.rms_norm(x + a, (width,), w, eps)), leaves=(s.double(), torch.zeros_like(s).double(), w.double(), ds, dy))
        assert same(got[0], s) and same(got[1], triton_norm(s.to(DEVICE), w.to(DEVICE), 1e-5).cpu()) and torch.equal(got[2], got[3])
        assert got[1].dtype == got[2].dtype == dtype
        if used == "sum":
            assert torch.equal(got[2], ds) and got[4] is None
            continue
        for g, v in zip(got[1:3], want[1:3]): assert ((g - v).abs() <= LAST[dtype] * v.abs() + 3e-6 * v.abs().max() + (6e-8 if dtype == F16 else 0)).all()      # one rounding, not two
        assert got[4].dtype == F32 and ((got[4] - want[4]).abs() <= 3e-7 * (dy.double() * want[1] / w).abs().sum(0)).all()
        if used == "norm":
            alone = taken(lambda s, w: triton_norm(s, w, 1e-5), (s, w), dy)
            assert torch.equal(got[2], alone[1]) and torch.equal(got[4], alone[2])


@runs_kernels
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gradients_of_several_uses_are_added(dtype):
    "Any of one to five uses, with and without a gradient of the sum; their sum is not rounded on the way"
    rows, width = 9, 88
    x, a, w = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype), 1 + torch.randn(width) / 4
    for uses, used in ((2, [0, 1]), (2, [1]), (3, ["sum", 0, 1, 2]), (5, ["sum", 3]), (5, [0, 2, 3, 4]), (5, ["sum", 0, 1, 2, 3, 4])):
        douts = {k: torch.randn(rows, width).to(dtype) for k in used}
        leaves = [t.to(DEVICE).requires_grad_() for t in (x, a, w)]
        s, *ys = triton_add_norm(*leaves, 1e-5, uses)
        assert len(ys) == uses and all(torch.equal(y, ys[0]) and y.data_ptr() == ys[0].data_ptr() for y in ys)
        with poisoned(): got = torch.autograd.grad([s if k == "sum" else ys[k] for k in used], leaves, [d.to(DEVICE) for d in douts.values()])
        t, v = s.detach().cpu().double().requires_grad_(), w.double().requires_grad_()
        y = F.rms_norm(t, (width,), v, 1e-5)
        dt, dv = torch.autograd.grad(y, (t, v), sum(d.double() for k, d in douts.items() if k != "sum"))
        dt = dt + douts["sum"].double() if "sum" in douts else dt
        for g in got[:2]: assert g.dtype == dtype and ((g.cpu() - dt).abs() <= LAST[dtype] * dt.abs() + 3e-6 * dt.abs().max()).all()
        assert ((got[2].cpu() - dv).abs() <= 1e-6 * dv.abs().max()).all()
    with pytest.raises(ValueError, match="a norm has 1 to 5 uses, not 0"): triton_add_norm(*leaves, 1e-5, 0)


@runs_kernels
def test_inputs_of_a_sum_share_a_gradient_that_nobody_spoils():
    "x and a get one tensor; gradients that are added up later, leaves' and others', stay apart"
    def by(add_norm, place):
        torch.manual_seed(3)
        x, a, w = (torch.randn(*s).to(place).requires_grad_() for s in ((6, 40), (6, 40), (40,)))
        for _ in range(3):                                                # three micro-batches; x is a leaf, is used elsewhere, and joins itself
            s, y = add_norm(x, a, w, 1e-6)
            s, z = add_norm(s, y * a, w, 1e-6)
            s, z = add_norm(s, s, w, 1e-6)
            (z.sin().sum() + (s * x).cos().sum() + a.square().sum()).backward()
        assert len({t.grad.data_ptr() for t in (x, a)}) == 2
        return [t.grad.cpu() for t in (x, a, w)]
    for got, want in zip(by(triton_add_norm, DEVICE), by(REFERENCE.add_norm, "cpu")): assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    x, a = (torch.randn(4, 40, device=DEVICE, requires_grad=True) for _ in range(2))
    triton_add_norm(x, a, torch.ones(40, device=DEVICE), 1e-6)[1].sum().backward()
    first = a.grad.clone()
    x.grad.fill_(torch.nan)                                               # what an owner does to its own
    assert torch.equal(a.grad, first)


@runs_kernels
@pytest.mark.parametrize("rows, width, programs", [(7, 1100, 3), (70, 88, 2)])
def test_norm_by_few_programs(rows, width, programs, monkeypatch):
    tile = pointwise._tile
    monkeypatch.setattr(pointwise, "_tile", lambda T, D, most: tile(T, D, programs))      # each goes through several groups of rows, the last of which is not full
    test_norm_against_float64(rows, width, F32)
    test_add_norm_against_float64_and_two_steps(rows, width, BF16)
    assert differing(TRITON, DEVICE, BF16, rows, width) is None


@runs_kernels
@pytest.mark.parametrize("parts, width", [(1, 7), (130, 80), (512, 33), (600, 16)])
def test_parts_of_a_weights_gradient(parts, width):
    p, dw = torch.randn(parts, width, device=DEVICE), torch.full((width + 1,), 7.0, device=DEVICE)
    pointwise._add_up(p, dw[:-1])
    assert ((dw[:-1].double() - p.double().sum(0)).abs() <= 3e-7 * p.double().abs().sum(0)).all() and dw[-1] == 7


@runs_kernels
@pytest.mark.parametrize("rows, width, dtype, sites", [(1000, 7, F32, SITES[:1]), (9, 88, BF16, SITES), (33, 40, F16, SITES[1:3]), (3, 3000, F32, SITES[1:2]), (5, 544, BF16, SITES[1:])])
def test_gated_against_float64(rows, width, dtype, sites):
    for site in sites: one_gated_against_float64(rows, width, dtype, site)


def one_gated_against_float64(rows, width, dtype, site):
    g, u, da = ((s * torch.randn(rows, width)).to(dtype) for s in (2, 1, 1))
    got = taken(lambda g, u: triton_gated(g, u, site), (g, u), da)
    q = (qdq(g, *site) if site else g).double().requires_grad_()                  # straight through: the derivative at what g was rounded to
    v = u.double().requires_grad_()
    a = F.gelu(q) * v
    want = a, *torch.autograd.grad(a, (q, v), da.double())
    for x, y in zip(got, want):
        assert x.dtype == dtype and ((x - y).abs() <= LAST[dtype] * y.abs() + 3e-6 * y.abs().max() + (6e-8 if dtype == F16 else 0)).all()


@runs_kernels
@pytest.mark.parametrize("site", SITES[:3])
def test_nan_and_infinity_stay_where_they_are(site):
    rows, width, bad = 40, 88, [3, 17, 39]
    clean, u, dy, w = torch.randn(rows, width).to(BF16), torch.randn(rows, width).to(BF16), torch.randn(rows, width).to(BF16), torch.rand(width) + 1
    x = clean.clone()
    x[3, 5], x[17, 87], x[39, 0] = torch.nan, torch.inf, -torch.inf
    rest = [r for r in range(rows) if r not in bad]
    for f, other in ((lambda x, u: triton_gated(x, u, site), u), (lambda x, w: triton_norm(x, w, 1e-6), w)):
        got, want = taken(f, (x, other), dy), taken(f, (clean, other), dy)
        for a, b in zip(got, want):
            if len(a) == rows: assert torch.equal(a[rest], b[rest])
        assert not got[1][bad].isfinite().all(1).any() and got[0].isnan().any(1)[[3, 39]].all()      # and are not lost
    x[3, 5] = 0                                                           # an infinity makes r zero, and spoils its own column of dw alone
    assert taken(f, (x, w), dy)[2].isnan().nonzero().flatten().tolist() == [0, 87]
    (s, y, dx, da, dw), _ = added(BF16, rows, width, "sum norm", triton_add_norm, leaves=(x, torch.ones_like(x), w, u, dy))
    (s2, y2, dx2, _, _), _ = added(BF16, rows, width, "sum norm", triton_add_norm, leaves=(clean, torch.ones_like(x), w, u, dy))
    for t, t2 in ((s, s2), (y, y2), (dx, dx2)): assert torch.equal(t[rest], t2[rest]) and not t[[17, 39]].isfinite().all(1).any()
    assert same(dx, da) and dw.isnan().nonzero().flatten().tolist() == [0, 87]


@runs_kernels
def test_rows_of_zeros_and_huge_and_tiny_ones():
    x = torch.randn(6, 96)
    x[0], x[1], x[2] = 0, x[1] * 1e15, x[2] * 1e-25
    y, dx, dw = taken(lambda x, w: triton_norm(x, w, 1e-6), (x, torch.ones(96)), torch.randn(6, 96))
    assert not y[0].any() and all(t.isfinite().all() for t in (y, dx, dw)) and abs(y[1].square().mean() - 1) < 1e-5
    for site in SITES:
        a, dg, du = taken(lambda g, u: triton_gated(g, u, site), (torch.zeros(3, 88), torch.ones(3, 88)), torch.ones(3, 88))
        assert not a.any() and not du.any() and ((dg - 0.5).abs() < 1e-6).all()


@runs_kernels
def test_the_same_bits_again_and_views_and_no_grad():
    x, u, dy, w = (t.to(DEVICE) for t in (torch.randn(10, 300), torch.randn(10, 300), torch.randn(10, 300), torch.randn(300)))
    for f, other in ((lambda a, b: triton_norm(a, b, 1e-6), w), (lambda a, b: triton_gated(a, b, SITES[1]), u)):
        once, again = taken(f, (x, other), dy), taken(f, (x, other), dy)
        assert all(torch.equal(a, b) for a, b in zip(once, again))
        wide, tall = torch.empty(10, 700, device=DEVICE), torch.empty(300, 10, device=DEVICE)
        for view in (wide[:, 300:600].copy_(x), tall.t().copy_(x), x.view(2, 5, 300)):
            leaf = view.detach().requires_grad_()
            y = f(leaf, other.view_as(view) if other is u else other)
            gradient = torch.empty(10, 601, device=DEVICE)[:, 1:301].copy_(dy)                    # strided, and its rows are no multiples of 16 bytes
            dx, = torch.autograd.grad(y.view(10, 300), leaf, gradient)
            assert torch.equal(y.detach().cpu().view(10, 300), once[0]) and torch.equal(dx.cpu().reshape(10, 300), once[1])
        with torch.no_grad(): assert torch.equal(f(x, other).cpu(), once[0])
    once, given = added(F32, 10, 300, "sum norm", triton_add_norm)
    again, _ = added(F32, 10, 300, "sum norm", lambda x, a, w, eps: triton_add_norm(wide[:, 300:600].copy_(a), tall.t().copy_(x), w, eps), leaves=[given[1], given[0], *given[2:]])     # views, and the other way round
    with torch.no_grad(): assert all(torch.equal(a.cpu(), b) for a, b in zip(triton_add_norm(*(t.to(DEVICE) for t in given[:3]), 1e-5), once))
    assert all(torch.equal(a, b) for a, b in zip(once, again))
    total = torch.autograd.grad(triton_norm(x.requires_grad_(), w, 1e-6).sum(), x)[0]             # an expanded gradient
    assert torch.equal(total, torch.autograd.grad(triton_norm(x, w, 1e-6), x, torch.ones_like(dy))[0])


@runs_kernels
def test_what_the_kernels_leave_to_the_reference():
    for a, b in ((torch.randn(2, 8193), torch.randn(8193)), (torch.randn(2, 5).double(), torch.randn(5).double()), (torch.randn(0, 5), torch.randn(5))):
        a, b = a.to(DEVICE), b.to(DEVICE)
        assert torch.equal(triton_norm(a, b, 1e-6), REFERENCE.norm(a, b, 1e-6))
        assert all(torch.equal(p, q) for p, q in zip(triton_add_norm(a, a, b, 1e-6), REFERENCE.add_norm(a, a, b, 1e-6)))
    g = torch.randn(2, 48, device=DEVICE)
    for site in (("nvfp4:1x24", None), ("nvfp4:1x16+4/6", None), ("nvfp4:8x8", None)): assert torch.equal(triton_gated(g, g, site), REFERENCE.gated(g, g, site))
    with pytest.raises(ValueError, match="block_scale"): triton_gated(g, g, ("nvfp4:1x16", 0.3))
    with pytest.raises(ValueError, match="must have one shape, dtype and device"): triton_gated(g, g.half())
    with pytest.raises(ValueError, match="needs a weight of shape"): triton_norm(g, g, 1e-6)
    for add_norm in (triton_add_norm, REFERENCE.add_norm):
        with pytest.raises(ValueError, match="needs a weight of shape"): add_norm(g, g, g, 1e-6)
        with pytest.raises(ValueError, match="residual and branch must have one shape, dtype and device"): add_norm(g, g.half(), torch.ones(48, device=DEVICE), 1e-6)


@runs_kernels
@pytest.mark.parametrize("out_norm", [True, False])
def test_a_model_by_kernels_and_by_the_reference(out_norm):
    "Two layers, whose sums and normed tokens go through the kernels: value and every gradient; nothing else is different between the two"
    torch.manual_seed(0)
    model = HybridSparseMoEModel(2, 24, 2, 4, 2, 4, vocab_size=11, max_seq_len=6, expert_inner=8, dense_inner=12, max_depth=1, moe_out_norm=out_norm).to(DEVICE)      # every token to all experts: no choice flips
    tokens, found = torch.randint(0, 11, (2, 6), device=DEVICE), []
    for name in ("triton", "reference"):
        POINTWISE.chosen[DEVICE] = name
        model.zero_grad()
        handle, routing = model(tokens)
        (handle.hidden.square() * torch.arange(24, device=DEVICE)).sum().backward()
        found.append([handle.hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 30
    for a, b in zip(*found): assert (a - b).norm() <= 1e-4 * b.norm() + 1e-7


@plain
def test_chosen_and_used_by_the_layer():
    assert POINTWISE.choose("cpu") == "reference" and POINTWISE.of("cpu") is REFERENCE
    with pytest.raises(BackendError, match="backends.ffn = 'triton' cannot be used on cpu"): POINTWISE.choose("cpu", "triton")
    norm, x = RMSNorm(12, 1e-5), torch.randn(3, 12, requires_grad=True)
    norm.weight.data.uniform_(1, 2)
    assert same(norm(x), REFERENCE.norm(x, norm.weight, 1e-5))
    if DEVICE == "cuda": assert POINTWISE.choose("cuda") == "triton" and POINTWISE.of("cuda") == TRITON


@needs_gpu
def test_at_sizes_of_the_model():
    x, w = torch.randn(24576, 1536, device="cuda", dtype=BF16), torch.rand(1536, device="cuda") + 0.5
    g, u = torch.randn(24576, 544, device="cuda", dtype=BF16), torch.randn(24576, 544, device="cuda", dtype=BF16)
    for f, r, args in ((TRITON.norm, REFERENCE.norm, (x, w, 1e-6)), (TRITON.gated, REFERENCE.gated, (g, u, SITES[1]))):
        for a, b in zip(taken(lambda p, q: f(p, q, args[2]), args[:2], args[0]), taken(lambda p, q: r(p, q, args[2]), args[:2], args[0])):
            assert ((a.double() - b.double()).abs() <= 2.0**-7 * b.double().abs() + 1e-5 * b.double().abs().max()).all()
    test_add_norm_against_float64_and_two_steps(16400, 1536, BF16)


@needs_gpu
def test_five_uses_at_the_size_of_the_model():
    x, a, w = (torch.randn(*s, device="cuda", dtype=d).requires_grad_() for s, d in (((16400, 1536), BF16), ((16400, 1536), BF16), ((1536,), F32)))
    douts = [torch.randn(16400, 1536, device="cuda", dtype=BF16) for _ in range(6)]
    got, want = (torch.autograd.grad(f(x, a, w, 1e-6, 5), (x, a, w), douts) for f in (TRITON.add_norm, REFERENCE.add_norm))
    for p, q in zip(got, want): assert (p.double() - q.double()).norm() <= 2.0**-7 * q.double().norm()


@needs_gpu
def test_a_recorded_graph_gives_the_same():
    x, u, w = (torch.randn(*s, device="cuda", dtype=d).requires_grad_() for s, d in (((1000, 544), BF16), ((1000, 544), BF16), ((544,), F32)))
    dy = torch.randn(1000, 544, device="cuda", dtype=BF16)
    def step():
        s, y = triton_add_norm(x, u, w, 1e-6)
        y = triton_gated(triton_norm(y, w, 1e-6), s, SITES[1])
        return y, *torch.autograd.grad(y, (x, u, w), dy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream): step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): kept = step()
    with torch.no_grad():
        for t in (x, u, w, dy): t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(kept, step()))


@needs_gpu
def test_more_numbers_than_31_bits_count():
    x = torch.randn(1, 1024, device="cuda", dtype=BF16).expand(2**21 + 8, 1024)
    with torch.no_grad():
        for y in (triton_norm(x, torch.ones(1024, device="cuda"), 1e-6), triton_gated(x, x)): assert torch.equal(y[-1], y[0]) and y[0].any()
