"""Norm and gated GELU: the Triton kernels against the reference and against float64, on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from hsmoe.backends import BackendError
from hsmoe.model import pointwise
from hsmoe.model.attention import RMSNorm
from hsmoe.model.pointwise import POINTWISE, REFERENCE, Pointwise, differing, triton_gated, triton_norm
from hsmoe.quant.formats import BlockFormat, qdq, scale_for
from on_device import BF16, DEVICE, F16, F32, interpret, needs_gpu, new_seed, plain, poisoned, runs_kernels, starts_interpreter

TRITON = Pointwise(triton_gated, triton_norm)
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


@runs_kernels
@pytest.mark.parametrize("rows, width, programs", [(13, 1100, 3), (100, 88, 2)])
def test_norm_by_few_programs(rows, width, programs, monkeypatch):
    tile = pointwise._tile
    monkeypatch.setattr(pointwise, "_tile", lambda T, D, most: tile(T, D, programs))      # each goes through several groups of rows, the last of which is not full
    test_norm_against_float64(rows, width, F32)
    assert differing(TRITON, DEVICE, BF16, rows, width) is None


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
    total = torch.autograd.grad(triton_norm(x.requires_grad_(), w, 1e-6).sum(), x)[0]             # an expanded gradient
    assert torch.equal(total, torch.autograd.grad(triton_norm(x, w, 1e-6), x, torch.ones_like(dy))[0])


@runs_kernels
def test_what_the_kernels_leave_to_the_reference():
    for a, b in ((torch.randn(2, 8193), torch.randn(8193)), (torch.randn(2, 5).double(), torch.randn(5).double()), (torch.randn(0, 5), torch.randn(5))):
        a, b = a.to(DEVICE), b.to(DEVICE)
        assert torch.equal(triton_norm(a, b, 1e-6), REFERENCE.norm(a, b, 1e-6))
    g = torch.randn(2, 48, device=DEVICE)
    for site in (("nvfp4:1x24", None), ("nvfp4:1x16+4/6", None), ("nvfp4:8x8", None)): assert torch.equal(triton_gated(g, g, site), REFERENCE.gated(g, g, site))
    with pytest.raises(ValueError, match="block_scale"): triton_gated(g, g, ("nvfp4:1x16", 0.3))
    with pytest.raises(ValueError, match="must have one shape, dtype and device"): triton_gated(g, g.half())
    with pytest.raises(ValueError, match="needs a weight of shape"): triton_norm(g, g, 1e-6)


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


@needs_gpu
def test_a_recorded_graph_gives_the_same():
    x, u, w = (torch.randn(*s, device="cuda", dtype=d).requires_grad_() for s, d in (((1000, 544), BF16), ((1000, 544), BF16), ((544,), F32)))
    dy = torch.randn(1000, 544, device="cuda", dtype=BF16)
    def step():
        y = triton_gated(triton_norm(x, w, 1e-6), u, SITES[1])
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
