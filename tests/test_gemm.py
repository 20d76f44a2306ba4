"""The products of expert networks: Triton kernels against the reference in float64, on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
import pytest
import torch

from hsmoe.backends import BackendError
from hsmoe.model.elementwise import _as_bf16, _cast, _gelu, _gelu_both
from hsmoe.model.gemm import REFERENCE, TRITON, Products, differing, fuses, run_all, sample
from hsmoe.quant.formats import BlockFormat, qdq, scale_for
from hsmoe.quant.kernels import constexpr, kernel, tl, triton
from on_device import BF16, DEVICE, F16, F32, interpret, needs_gpu, new_seed, plain, poisoned, runs_kernels, starts_interpreter



@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@pytest.fixture(autouse=True)
def fresh():
    "New random numbers each time"
    new_seed()


def guarded(f):
    def call(*args):
        with poisoned(): return f(*args)
    return call


KERNELS = Products(*map(guarded, TRITON))
#         T, D, N, E, C
SHAPES = {F32: [(44, 72, 136, 3, 3), (1, 1, 1, 1, 1)], BF16: [(33, 88, 44, 5, 2), (1, 8, 16, 2, 1)], F16: [(31, 40, 56, 6, 1)]}
LARGE = [(700, 88, 44, 5, 2), (1000, 72, 136, 3, 3), (513, 256, 160, 7, 4), (31, 1536, 848, 64, 4), (44, 848, 1536, 300, 2), (4000, 130, 260, 512, 1), (2000, 129, 257, 2, 2)]


@runs_kernels
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_six_products(dtype):
    "Empty experts, rows of nobody, padding rows, widths that end within a tile"
    for shape in SHAPES[dtype] + (LARGE if DEVICE == "cuda" else []):
        s = sample(*shape, dtype, DEVICE, padding=5)
        assert differing(KERNELS, s) is None, shape


@runs_kernels
@pytest.mark.parametrize("whose", ["one", "nobody"])
def test_all_rows_to_one(whose):
    T, D, N, E, C = (40, 24, 40, 4, 2) if DEVICE == "cpu" else (5000, 136, 248, 64, 4)
    s = sample(T, D, N, E, C, BF16, DEVICE, expert=torch.full((T * C,), dict(one=2, nobody=E)[whose]))
    assert differing(KERNELS, s) is None


@runs_kernels
def test_few_rows():
    for R in (1, 31, 33, 44): assert differing(KERNELS, sample(R, 9, 17, 2, 1, BF16, DEVICE, expert=torch.ones(R, dtype=torch.int64))) is None, R


@runs_kernels
def test_no_rows_at_all():
    s = sample(0, 24, 40, 3, 2, BF16, DEVICE)
    got = run_all(KERNELS, s)
    assert [len(got[name]) for name in ("h", "pre", "y", "dpre", "again", "dx")] == [0] * 6
    for name in ("db", "dw_in", "dw_out", "db_out"): assert len(got[name]) == 3 and not got[name].any(), name


@runs_kernels
def test_gradients_are_added():
    T, D, N, E, C = (20, 40, 24, 6, 2) if DEVICE == "cpu" else (3000, 200, 328, 64, 4)
    s = sample(T, D, N, E, C, BF16, DEVICE, expert=torch.randint(E // 2, (T * C,)) * 2)
    into = torch.randn(E, N, D, device=DEVICE)
    empty = s.offsets_E.diff(prepend=s.offsets_E.new_zeros(1)) == 0
    into[empty] = -0.0
    assert differing(KERNELS, s, into=into) is None
    total, args = into.clone(), (s.dpre_RN, s.x_TD, s.order_R, s.slots, s.offsets_E)
    assert KERNELS.dw(*args, total, True, BF16, 1.0) is total
    assert torch.equal(total[empty].view(torch.int32), into[empty].view(torch.int32)) and not torch.equal(total, into)
    apart = torch.randn(E, D, N, device=DEVICE).transpose(1, 2)                              # not contiguous, and written to, not added
    assert KERNELS.dw(*args, apart, False, BF16, 1.0) is apart and torch.equal(apart, KERNELS.dw(*args, None, False, F32, 1.0)) and not apart[empty].any()


def same(a, b): return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


FORMATS = ["nvfp4:1x16", "mxfp8_e4m3:1x32", "nvfp4:1x32"]


@runs_kernels
@pytest.mark.parametrize("name", FORMATS + (["nvfp4:1x8", "nvfp4:1x64", "nvfp4:1x128", "e1m2:1x16", "ue5m3:1x32", "mxfp8_e5m2:1x32+ceil", "nvfp4:1x16+ts-90"] if DEVICE == "cuda" else ["ue5m3:1x64", "nvfp4:1x128"]))
def test_quantised_results_bit_for_bit(name):
    "Products of coarse numbers are exact in any order, so results with a quantiser must be what qdq makes of those without; blocks that end past the width are padded with zeros"
    fmt = BlockFormat.parse(name)
    for dtype in (F32, BF16, F16) if DEVICE == "cuda" and name == FORMATS[0] else (BF16,) if name != "nvfp4:1x32" else (F32,):
        s = sample(*(17, 24, 40, 3, 2) if DEVICE == "cpu" else (800, 88, 200, 5, 2), dtype, DEVICE, coarse=True, padding=2)
        n = s.offsets_E[-1]
        s.b_in_EN[0, 3], s.b_out_ED[0, 5] = torch.nan, 3e4                                   # a block that is spoilt, and one that is large
        plainly = run_all(KERNELS, s)
        for fixed in (None, scale_for(1.0, fmt)):
            got = run_all(KERNELS, s, hidden=(name, fixed), out=(fmt, fixed))
            for key, value in plainly.items():
                end = n if len(value) == len(s.order_R) else len(value)
                want = qdq(value[:end].cpu(), fmt, fixed).to(DEVICE) if key in ("h", "y", "again") else value[:end]
                if key == "db": assert torch.allclose(got[key], want, rtol=1e-5, atol=1e-5)     # tiles of other heights add up in another order
                else: assert same(got[key][:end], want), (key, dtype, fixed)


@kernel
def table(x, y, half, n, B: constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + at, at < n, 0.0)
    h, d = _gelu_both(v)
    tl.store(y + at, _gelu(v), at < n)
    tl.store(y + n + at, h, at < n)
    tl.store(y + 2 * n + at, d, at < n)
    tl.store(y + 3 * n + at, _as_bf16(v), at < n)
    tl.store(half + at, _cast(v, tl.bfloat16), at < n)


@runs_kernels
def test_elementwise():
    bits = torch.randint(-2**31, 2**31, (50_000,)).int().view(F32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    x = torch.cat([torch.linspace(-13.1, 13.1, 50_001), torch.randn(50_000), bits[bits.abs() > 2.0**-126], special]).to(DEVICE)
    y, half = torch.empty(4, len(x), device=DEVICE), torch.empty(len(x), dtype=BF16, device=DEVICE)
    table[(triton.cdiv(len(x), 16384),)](x, y, half, len(x), B=16384)
    value, again, slope, near = y.cpu()
    x, half = x.cpu(), half.cpu()
    assert same(value, again) and same(near, x.bfloat16().float()) and same(half, x.bfloat16())
    assert same(value[-5:], torch.tensor([torch.inf, torch.nan, torch.nan, 0, 0])) and slope[-5:-2].isnan().all()
    wide = x.double()
    tail = torch.special.erfcx(wide.abs() / 2**.5) * torch.exp(-wide**2 / 2) / 2
    phi = torch.where(wide > 0, 1 - tail, tail)
    true, there = wide * phi, wide.isfinite() & (wide > -13.1) & (wide.abs() < 1e18)
    off = (value - true).abs() / (true.abs() * (7e-7 + wide**2 * 2.0**-23) + 2.0**-126)
    assert off[there].max() < 1
    assert (slope - (phi + wide * torch.exp(-wide**2 / 2) / (2 * torch.pi)**.5))[there].abs().max() < 1e-6
    assert (value[(wide < -13.1) & wide.isfinite()].abs() < 2.0**-125).all()                           # vanishes where it is not normal any more


@plain
def test_differences_are_found():
    s = sample(20, 24, 40, 4, 2, F32, empty=0.0)
    assert differing(REFERENCE, s) is None and differing(REFERENCE, s, into=torch.randn(4, 40, 24)) is None
    def spoilt(name, spoil):
        def run(*args):
            out = getattr(REFERENCE, name)(*args)
            return spoil(*out) if isinstance(out, tuple) else spoil(out)
        return REFERENCE._replace(**{name: run})
    for name, spoil, word in [("up", lambda h, pre: (h * 1.0001, pre), "h"), ("up", lambda h, pre: (h, pre.roll(1, 0)), "pre"), ("down", lambda y: y + 1e-3, "y"), ("back", lambda d, h, b: (d * 0.9999, h, b), "dpre"),
                              ("back", lambda d, h, b: (d, h * 1.0001, b), "again"), ("back", lambda d, h, b: (d, h, b * 1.001), "db"), ("dx", lambda d: d.flip(1), "dx"), ("dw", lambda d: d * 1.001, "dw_in"),
                              ("sums", lambda d: d * torch.nan, "db_out"), ("dx", lambda d: d.bfloat16(), "dx")]:
        assert differing(spoilt(name, spoil), s).startswith(f"its {word} "), word
    empty = sample(4, 8, 8, 3, 1, F32, expert=torch.tensor([0, 0, 2, 2]))
    assert differing(spoilt("sums", lambda d: d + 2.0**-140), empty).startswith("its db_out differs from the reference: 7.17")


@plain
def test_what_is_refused():
    assert all(map(fuses, (None, "nvfp4:1x16", "mxfp8_e4m3:1x32", "nvfp4:1x128")))
    assert not any(map(fuses, ("nvfp4:8x8", "nvfp4:1x256", "nvfp4:1x24", "nvfp4:1x16+4/6")))
    s = sample(4, 8, 8, 2, 1, F32, DEVICE)
    if triton:
        with pytest.raises(ValueError, match="format nvfp4:8x8 cannot be quantised to in an epilogue; allowed are blocks 1xn"): TRITON.down(s.h_RN, s.offsets_E, s.w_out_EDN, s.b_out_ED, 1.0, ("nvfp4:8x8", None))
    if DEVICE == "cpu" and triton:
        with pytest.raises(BackendError, match="expert kernels cannot run on cpu: Triton kernels need a GPU"): TRITON.dx(s.dpre_RN, s.offsets_E, s.w_in_END)


@needs_gpu
def test_float64_is_refused():
    s = sample(4, 8, 8, 2, 1, torch.float64, DEVICE)
    with pytest.raises(TypeError, match="expert kernels take fp32, bf16 and fp16, not torch.float64"): TRITON.dx(s.dpre_RN, s.offsets_E, s.w_in_END)


@needs_gpu
def test_at_the_sizes_of_the_model():
    torch.backends.cuda.matmul.allow_tf32 = False
    for share in (torch.ones(65), 1 / torch.arange(1.0, 66)):
        expert = torch.multinomial(share, 24576 * 4, replacement=True)
        assert differing(KERNELS, sample(24576, 1536, 848, 64, 4, BF16, DEVICE, expert=expert)) is None


@needs_gpu
def test_in_a_graph_and_again():
    "Recorded as a CUDA graph, so without a synchronisation; replayed with other loads; the same bits each time"
    s, other = (sample(1000, 256, 160, 16, 4, BF16, DEVICE) for _ in range(2))
    run = lambda: run_all(TRITON, s, hidden=("nvfp4:1x16", None), out=("nvfp4:1x16", None))
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): out = run()
    for mine, theirs in zip(s, other):
        if isinstance(mine, torch.Tensor): mine.copy_(theirs)
    n = s.offsets_E[-1]
    graph.replay()
    for key, value in run().items():
        end = n if len(value) == len(s.order_R) else len(value)
        assert torch.equal(out[key][:end], value[:end]), key
