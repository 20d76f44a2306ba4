"""Row operations of a mixture layer: the Triton kernels against the reference and against float64, on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
from functools import partial
from itertools import product

import pytest
import torch

from hsmoe.backends import BackendError
from hsmoe.comm import kernels
from hsmoe.comm.dispatch import LocalDispatch, Rows, gather_rows
from hsmoe.comm.kernels import DISPATCH, REFERENCE, RowOps, _case, differing, padded_rows
from on_device import BF16, DEVICE, F16, F32, F64, INTERPRETED, interpret, needs_gpu, new_seed, plain, poisoned, runs_kernels, starts_interpreter, triton

#         T, C, D, E
SHAPES = [(1, 1, 8, 1), (1, 8, 88, 16), (9, 2, 1536, 5), (33, 8, 8, 64), (33, 4, 88, 512), (7, 3, 33, 4), (5, 16, 600, 40)]
TRITON = RowOps(kernels.triton_sort, kernels.triton_gather, kernels.triton_sum, kernels.triton_spread)


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    "New random numbers each time, and no memory of earlier choices"
    monkeypatch.setattr(DISPATCH, "chosen", {})
    new_seed()


def poisoning(rows):
    def guarded(f):
        def call(*args):
            with poisoned(): return f(*args)
        return call
    return RowOps(*map(guarded, rows))


def coarse(case):
    "Small integers and gates that are powers of two: nothing is rounded, as the interpreter's cast to bfloat16 cuts digits off"
    expert, *ts, gate = case
    return expert, *(t.clamp(-4, 4).round() for t in ts), 2.0 ** torch.randint(-1, 2, gate.shape)


def case(shape, dtype, masked=0.2):
    T, C, D, E = shape
    made = _case(T, C, D, E, dtype, masked) if E > C else (torch.randint(0, E + 1, (T, C)), torch.randn(T, D).to(dtype), torch.randn(T * C, D).to(dtype), torch.rand(T, C))
    return coarse(made) if INTERPRETED and dtype == BF16 else made


def experts(kind, T, C, E):
    "Expert numbers of a kind"
    if kind == "random": return torch.randint(0, E + 1, (T, C))
    if kind == "skewed": return (torch.rand(T, C) ** 6 * (E + 1)).long()
    if kind == "wrong": return torch.randint(-3, E + 4, (T, C))
    return torch.full((T, C), dict(one=E // 2, nobody=E)[kind])


def expert_by_expert(expert, E, align):
    "What a sort should give: the slots of one expert after the other, each behind the padding of those before; then nobody's"
    n, row, ends = expert.numel(), 0, []
    expert = torch.where((expert < 0) | (expert > E), E, expert)
    order = torch.full((-(-(n + min(E, n) * (align - 1)) // align) * align,), n)
    for e in range(E + 1):
        slots = (expert.flatten() == e).nonzero()[:, 0]
        order[row:row + len(slots)] = slots
        row += -(-len(slots) // align) * align
        ends.append(row)
    inverse = torch.empty(n + 1, dtype=torch.int64).scatter_(0, order, torch.arange(len(order)))
    return torch.tensor(ends[:E]), order, inverse[:n].view_as(expert)


SORTS = [(1, 1, 1), (33, 4, 5), (33, 4, 3), (33, 1, 64), (260, 8, 64), (129, 4, 200), (64, 2, 512)]         # T, C, E


@runs_kernels
@pytest.mark.parametrize("kind, align", [*product(["random", "skewed", "wrong", "one", "nobody"], [1, 128]), ("random", 4)])
def test_sort(kind, align):
    for T, C, E in [*SORTS, *([(1000, 8, 64), (24576, 4, 64), (65537, 4, 512), (3, 2, 1023), (2_000_003, 4, 64)] if DEVICE == "cuda" else [])]:
        expert = experts(kind, T, C, E)
        there = expert.to(DEVICE)
        with poisoned(): got = [t.cpu() for t in TRITON.sort(there, E, align)]
        assert all(t.dtype == torch.int64 for t in got) and len(got[1]) == padded_rows(T * C, E, align)
        for a, b in zip(got, expert_by_expert(expert, E, align), strict=True): assert torch.equal(a, b), (T, C, E)


@plain
@pytest.mark.parametrize("align", [1, 4, 128])
def test_the_reference_sorts(align):
    for kind in ("random", "skewed", "wrong", "one", "nobody"):
        for T, C, E in SORTS:
            expert = experts(kind, T, C, E)
            for a, b in zip(REFERENCE.sort(expert, E, align), expert_by_expert(expert, E, align), strict=True): assert torch.equal(a, b), (kind, T, C, E)


@plain
def test_the_rows_always_suffice_and_none_is_to_spare_in_the_worst_case():
    for slots, E, align in [(1, 1, 128), (7, 3, 4), (300, 64, 128), (5, 64, 128), (98304, 64, 128)]:
        R, loaded = padded_rows(slots, E, align), min(E, slots)
        counts = torch.tensor([1] * (loaded - 1) + [slots - loaded + 1])              # as many experts as can be lack as many rows as can be
        used = int((-(-counts // align) * align).sum())
        assert used <= R < slots + E * (align - 1) + align and R % align == 0
        if (slots - loaded) % align == 0: assert R == used
    assert padded_rows(98304, 64, 128) == 106496 and padded_rows(12, 5, 1) == 12 and padded_rows(0, 5, 8) == 0


@runs_kernels
def test_sort_with_tiles_of_many_chunks():
    expert = torch.randint(0, 1024, (4200, 8))       # 33,600 slots in at most 64 tiles of 1,024 bins
    for a, b in zip(TRITON.sort(expert.to(DEVICE), 1023, 2), REFERENCE.sort(expert, 1023, 2)): assert torch.equal(a.cpu(), b)


@runs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_four_agree_with_the_reference(dtype):
    for shape in [*(SHAPES if dtype == F32 or DEVICE == "cuda" else SHAPES[::2]), *([(33, 2, 1536, 5), (1000, 4, 1536, 64), (1000, 8, 88, 16), (1000, 1, 1536, 8), (333, 2, 848, 64)] if DEVICE == "cuda" else [])]:
        for masked, align in product((0.2, 1.0) if shape[0] == 7 or DEVICE == "cuda" else (0.2,), (1, 4, 128) if DEVICE == "cuda" else (1, 4) if dtype == F32 else (4,)):
            assert differing(poisoning(TRITON), DEVICE, *case(shape, dtype, masked), shape[3], align) is None, (shape, masked, align)


@runs_kernels
@pytest.mark.parametrize("E, masked", [(3, 0.0), (3, 0.3), (64, 0.3), (64, 1.0)])
def test_rows_in_tiles_of_128(E, masked):
    for T, C, D in [(1, 1, 8), (7, 1, 40) if E > 3 else (70, 2, 24), *([(1000, 2, 1536), (3000, 2, 88)] if DEVICE == "cuda" else [])]:
        assert differing(poisoning(TRITON), DEVICE, *case((T, C, D, E), F32, masked), E, 128) is None, (T, C, D)


@runs_kernels
@pytest.mark.parametrize("align", [1, 4, 128])
def test_one_expert_has_all_rows(align):
    _, *rest = case((50, 2, 24, 4), F32)
    assert differing(poisoning(TRITON), DEVICE, torch.full((50, 2), 3), *rest, 4, align) is None


@pytest.mark.parametrize("rows, device", [pytest.param(REFERENCE, "cpu", marks=plain), pytest.param(TRITON, DEVICE, marks=runs_kernels)])
@pytest.mark.parametrize("align", [1, 4, 128])
def test_padding_is_written_with_zeros_and_never_read(rows, device, align):
    "Without the reference: padding and nobody's rows of y are NaN, outputs held NaN before"
    T, C, D, E = 45, 2, 24, 5
    expert, x, y_SD, gate = case((T, C, D, E), F32, 0.3)
    dy = torch.randn(T, D)
    offsets, order, inverse = expert_by_expert(expert, E, align)
    mine = (expert < E)[..., None]
    per_slot = torch.where(mine, y_SD.view(T, C, D), 0)
    y = torch.full((len(order), D), torch.nan)
    y[inverse[mine[..., 0]]] = y_SD.view(T, C, D)[mine[..., 0]]
    there = lambda *ts: [t.to(device) for t in ts]
    rows = poisoning(rows)
    held = torch.zeros(len(order), dtype=torch.bool).index_fill(0, inverse[mine[..., 0]], True)      # rows that an expert writes for a slot
    x_RD = rows.gather(*there(x, order, inverse, offsets)).cpu()
    assert x_RD.shape == y.shape and not x_RD[~held].any() and torch.equal(x_RD[held], x[order[held] // C])
    torch.testing.assert_close(rows.sum(*there(y, inverse, gate, offsets)).cpu(), (per_slot * gate[..., None]).sum(1))
    dy_RD, dgate = (t.cpu() for t in rows.spread(*there(dy, y, gate, order, inverse, offsets)))
    assert dy_RD.shape == y.shape and not dy_RD[~held].any()
    torch.testing.assert_close(dy_RD[inverse], dy[:, None] * gate[..., None] * mine)
    torch.testing.assert_close(dgate, (per_slot * dy[:, None]).sum(-1))


@runs_kernels
def test_a_difference_is_found():
    one_late = lambda sort: lambda *args: (lambda o, a, i: (o, a.roll(1), i))(*sort(*args))
    for name, wrong in dict(sort=one_late(TRITON.sort), gather=lambda *a: TRITON.gather(*a) * 2, sum=lambda y, i, g, o: TRITON.sum(y, i, g, o.clamp_min(10**6)),
                            spread=lambda *a: (TRITON.spread(*a)[0], TRITON.spread(*a)[1].flip(1))).items():
        assert differing(TRITON._replace(**{name: wrong}), DEVICE, *case((9, 2, 24, 5), F32, 0.3), 5) == name
        if not INTERPRETED: assert DISPATCH.check(TRITON._replace(**{name: wrong}), DEVICE).startswith(f"its {name} differs")
    unaligned = TRITON._replace(sort=lambda expert, E, align: TRITON.sort(expert, E))
    assert differing(unaligned, DEVICE, *case((9, 2, 24, 5), F32, 0.3), 5, 4) == "sort"
    if not INTERPRETED: assert DISPATCH.trouble("triton", DEVICE) is None


@runs_kernels
def test_values_that_are_not_finite():
    "They pass where a row is somebody's, and nowhere else"
    expert = torch.tensor([[0, 1], [2, 2], [1, 0], [2, 2]])
    offsets, order, inverse = REFERENCE.sort(expert, 2)
    y = torch.randn(8, 20)
    y[inverse[0, 1], 3], y[inverse[2, 0], 4] = torch.inf, torch.nan
    dy, gate = torch.randn(4, 20), torch.rand(4, 2)
    y[offsets[-1]:], dy[1], dy[3], gate[3] = torch.nan, torch.nan, torch.inf, torch.inf
    args = [t.to(DEVICE) for t in (y, inverse, gate, offsets)]
    out, want = TRITON.sum(*args).cpu(), REFERENCE.sum(y, inverse, gate, offsets)
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(0, 9e9, -9e9), want.nan_to_num(0, 9e9, -9e9))
    assert out[0, 3] == torch.inf and out[2, 4].isnan() and not out[[1, 3]].any() and out.isfinite().sum() == 78
    for rows, device in ((TRITON, DEVICE), (REFERENCE, "cpu")):
        got, dgate = (t.cpu() for t in rows.spread(*(t.to(device) for t in (dy, y, gate, order, inverse, offsets))))
        assert not got[offsets[-1]:].any() and not dgate[[1, 3]].any() and got[:offsets[-1]].isfinite().all()
        assert dgate[2, 0].isnan() and dgate[0, 1].isinf() and dgate[[0, 2], [0, 1]].isfinite().all()
        x = rows.gather(*(t.to(device) for t in (dy, order, inverse, offsets))).cpu()
        assert torch.equal(x[:offsets[-1]], dy[order[:offsets[-1]] // 2]) and not x[offsets[-1]:].any()


@runs_kernels
def test_views_and_other_types():
    expert, x, y, gate = case((12, 2, 48, 6), F32, 0.3)
    offsets, order, inverse = REFERENCE.sort(expert, 6)
    wide = torch.stack([y, y], 2).to(DEVICE)
    there = [t.to(DEVICE) for t in (inverse, gate, offsets)]
    want = REFERENCE.sum(y, inverse, gate, offsets)
    assert torch.equal(TRITON.sum(wide[..., 1], *there).cpu(), want)                                                  # strides of two
    apart = torch.cat([gate, gate], 1).to(DEVICE)[:, 2:]
    assert torch.equal(TRITON.sum(y.to(DEVICE), there[0], apart, there[2]).cpu(), want)
    assert torch.equal(TRITON.sum(y.to(DEVICE), there[0], apart.double(), there[2]).cpu(), want)
    for f, args in ((TRITON.sum, (y.double(), inverse, gate, offsets)), (TRITON.gather, (x.double(), order, inverse, offsets))):
        assert f(*(t.to(DEVICE) for t in args)).dtype == F64
    dy, dgate = TRITON.spread(*(t.to(DEVICE) for t in (x, y.bfloat16(), gate, order, inverse, offsets)))
    assert (dy.dtype, dgate.dtype) == (BF16, F32)
    if not INTERPRETED: assert torch.equal(dy.cpu(), REFERENCE.spread(x, y.bfloat16(), gate, order, inverse, offsets)[0])


def factor(expert): return -2.0 ** (expert % 3)


def through(x, expert, gate, n_experts, align=1):
    "dispatch, gather, expert e multiplies by -2^(e mod 3), which rounds nothing, and leaves padding and nobody's rows unwritten, combine"
    d = LocalDispatch(n_experts, align)
    rows = d.dispatch(x, expert)
    assert isinstance(rows, Rows) and rows.x_TD is x
    expert_R = torch.cat([expert.flatten(), expert.new_full((1,), n_experts)])[rows.order_R]
    y_RD = gather_rows(rows) * factor(expert_R)[:, None].to(x.dtype)
    return d.combine(torch.where((expert_R < n_experts)[:, None], y_RD, torch.nan), gate, rows)


def by_token(x, expert, gate, n_experts):
    "The same, slot by slot"
    return (x[:, None] * (factor(expert) * gate * (expert < n_experts))[..., None]).sum(1)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=runs_kernels)])
@pytest.mark.parametrize("dtype, eps, align", [(F32, 4e-6, 1), (BF16, 1e-2, 1), (F32, 4e-6, 16)])
def test_gradients_against_float64(backend, dtype, eps, align):
    if INTERPRETED and backend == "reference": pytest.skip("tested outside the interpreter")
    DISPATCH.chosen[DEVICE] = backend
    for T, C, D, E in [(1, 2, 8, 3), (33, 4, 88, 7), (6, 3, 1536, 4)]:
        expert = torch.rand(T, E).topk(C).indices
        expert[torch.rand(T) < .2] = E
        leaves = [torch.randn(T, D).to(dtype), torch.rand(T, C)]
        dy = torch.randn(T, D).to(dtype)
        results = []
        for f, kind, device in ((partial(through, align=align), None, DEVICE), (by_token, F64, "cpu")):
            x, gate = (t.to(device, kind or t.dtype).detach().requires_grad_() for t in leaves)
            y = f(x, expert.to(device), gate, E)
            results.append([t.cpu() for t in (y.detach(), *torch.autograd.grad(y, (x, gate), dy.to(device, y.dtype)))])
        assert [t.dtype for t in results[0]] == [dtype, dtype, F32]
        for a, b in zip(*results): assert (a.double() - b).abs().max() <= eps * (1 + b.abs().max()), (T, C, D, E)


@plain
def test_the_reference_by_hand_and_in_float64():
    for T, C, D, E in SHAPES:
        expert, x, y, gate = case((T, C, D, E), F64)
        gate = gate.double()
        offsets, order, inverse = REFERENCE.sort(expert, E)
        y[offsets[-1]:] = torch.nan
        mine = (expert < E)[..., None]
        per_slot = torch.where(mine, y[inverse], 0)
        assert torch.equal(REFERENCE.gather(x, order, inverse, offsets)[inverse], torch.where(mine, x[:, None].expand(T, C, D), 0))
        torch.testing.assert_close(REFERENCE.sum(y, inverse, gate, offsets), (per_slot * gate[..., None]).sum(1))
        dy, dgate = REFERENCE.spread(x, y, gate, order, inverse, offsets)
        torch.testing.assert_close(dy[inverse], x[:, None] * gate[..., None] * mine)
        torch.testing.assert_close(dgate, (per_slot * x[:, None]).sum(-1))


@plain
def test_the_order_and_the_rounding_of_a_sum():
    "One product and one sum at a time, as in NumPy: fp32 with no fused operation, slots in order, rounded once"
    for dtype in (F32, BF16):
        expert, _, y, gate = case((40, 4, 24, 9), dtype, 0.0)
        offsets, order, inverse = REFERENCE.sort(expert, 9)
        total = torch.zeros(40, 24)
        for c in range(4): total = total + y[inverse[:, c]].float() * gate[:, c, None]
        assert torch.equal(REFERENCE.sum(y, inverse, gate, offsets), total.to(dtype))


@plain
def test_a_cpu_has_the_reference_and_complains():
    assert DISPATCH.of("cpu") is REFERENCE and DISPATCH.chosen == {"cpu": "reference"}
    with pytest.raises(BackendError, match="backends.dispatch = 'triton' cannot be used on cpu"): DISPATCH.choose("cpu", "triton")
    if triton:
        with pytest.raises(BackendError, match="row kernels cannot run on cpu"): TRITON.sort(torch.zeros(1, 1, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="from -1 to 3 were routed, allowed are 0 to 1, or 2 for nobody"): LocalDispatch(2).dispatch(torch.zeros(2, 1), torch.tensor([[-1], [3]]))


@needs_gpu
def test_wrong_numbers_on_a_gpu_are_nobody():
    rows = LocalDispatch(2).dispatch(torch.ones(3, 8, device="cuda"), torch.tensor([[-1], [1], [7]], device="cuda"))
    assert rows.offsets_E.tolist() == [0, 1] and rows.order_R.tolist() == [1, 0, 2]


@needs_gpu
@pytest.mark.parametrize("dtype, align", [(BF16, 1), (F32, 1), (BF16, 128)])
def test_sizes_of_the_model(dtype, align):
    T, C, D, E = 24576, 4, 1536, 64
    assert DISPATCH.choose("cuda", strict=True) == "triton"
    expert, x, y_SD, gate = (t.cuda() for t in _case(T, C, D, E, dtype, 0.1))
    sorts = [r.sort(expert, E, align) for r in (TRITON, REFERENCE)]
    for a, b in zip(*sorts): assert torch.equal(a, b)
    offsets, order, inverse = sorts[0]
    y = y_SD.new_full((len(order), D), torch.nan).index_copy_(0, inverse.flatten(), y_SD)
    y[offsets[-1]:] = torch.nan
    for g in (gate, None): assert torch.equal(TRITON.sum(y, inverse, g, offsets), REFERENCE.sum(y, inverse, g, offsets))
    assert torch.equal(TRITON.gather(x, order, inverse, offsets), REFERENCE.gather(x, order, inverse, offsets))
    first, again, want = (r.spread(x, y, gate, order, inverse, offsets) for r in (poisoning(TRITON), TRITON, REFERENCE))
    assert torch.equal(first[0], want[0])
    torch.testing.assert_close(first[1], want[1], rtol=1e-5, atol=1e-3)
    for a, b in zip(first, again): assert torch.equal(a, b)


@needs_gpu
def test_more_than_2_to_the_31_numbers():
    T, C, D, E = 360_000, 4, 1536, 8
    expert = torch.rand(T, E, device="cuda").topk(C).indices
    offsets, order, inverse = TRITON.sort(expert, E, 128)
    x = torch.randn(T, D, device="cuda", dtype=BF16)
    rows = TRITON.gather(x, order, inverse, offsets)
    assert rows.numel() > 2**31 and not rows[-128:].any() and order[-1] == T * C
    assert torch.equal(TRITON.sum(rows, inverse, torch.full((T, C), .25, device="cuda"), offsets), x)
    dy, dgate = TRITON.spread(x, rows, torch.ones(T, C, device="cuda"), order, inverse, offsets)
    assert torch.equal(dy, rows)
    torch.testing.assert_close(dgate, x.float().square().sum(1, keepdim=True).expand(T, C), rtol=1e-5, atol=0)


@needs_gpu
@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_graph_of_forward_and_backward(backend, align):
    "Recorded once, replayed with other tokens, experts and masks; nothing waits for the device"
    T, C, D, E = 300, 4, 88, 16
    DISPATCH.choose("cuda", backend)
    def fresh():
        expert = torch.rand(T, E, device="cuda").topk(C).indices
        return expert.masked_fill(torch.rand(T, 1, device="cuda") < torch.rand(1, device="cuda"), E), torch.randn(T, D, device="cuda"), torch.rand(T, C, device="cuda")
    expert, x, gate = fresh()
    x.requires_grad_(); gate.requires_grad_()
    def step():
        y = through(x, expert, gate, E, align)
        return y, *torch.autograd.grad(y.square().sum(), (x, gate))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try: step()
        finally: torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): outs = step()
    for _ in range(3):
        with torch.no_grad():
            for old, new in zip((expert, x, gate), fresh()): old.copy_(new)
        graph.replay()
        kept = [t.clone() for t in outs]
        for a, b in zip(kept, step()): assert torch.equal(a, b)
