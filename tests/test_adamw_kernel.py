"""The step of the 8-bit AdamW: clipping that is left to it, and the Triton kernel against the reference: on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
import os
import re
import subprocess
import sys

import pytest
import torch

from hsmoe.optim import kernels
from hsmoe.optim.adamw8bit import ADAMW, AdamW8bit, MasterOptimizer, clip_grad_norm_
from hsmoe.optim.blockwise import BlockLayout
from hsmoe.optim.muon import MuonWithAdamW
from hsmoe.quant.formats import BlockFormat, qdq

tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
runs_kernels = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU, or TRITON_INTERPRET=1")
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
#         shape, format of the weight, its dtype
WEIGHTS = [((16, 96), None, F32), ((21, 65), None, F32), ((1030,), None, BF16), ((2, 16, 64), "nvfp4:8x8", BF16), ((16, 32), "nvfp4:1x16", BF16),
           ((32, 64), "nvfp4:16x16", BF16), ((48, 16), "nvfp4:16x16", BF16), ((8, 848), "nvfp4:8x8", F32), ((24, 64), "nvfp4:16x16", BF16), ((16, 96), "mxfp8_e4m3:1x32", BF16)]


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests below run right here")
def test_in_the_interpreter():
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__], capture_output=True, text=True,
                         env={**os.environ, "TRITON_INTERPRET": "1"})
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.fixture(autouse=True)
def few_long_programs(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(kernels, "TILES", 16)
        monkeypatch.setattr(kernels, "_walk", lambda cols: (2, 2))
    monkeypatch.setattr(ADAMW, "chosen", {})


def parameters(weights, seed=0):
    generator, named = torch.Generator().manual_seed(seed), []
    for i, (shape, fmt, dtype) in enumerate(weights):
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
        if fmt: p.block_format = BlockFormat.parse(fmt)
        named.append((f"p{i}", p))
    return named


def feed(named, seed, spoil=None, dtype=F32):
    generator = torch.Generator().manual_seed(seed)
    for _, p in named:
        g = torch.randn(p.shape, generator=generator) * 10 ** (torch.rand(p.shape, generator=generator) * -4)
        if spoil is not None: g.view(-1)[300] = spoil
        g = g.to(DEVICE, dtype)
        if dtype == p.dtype: p.grad = g
        else: p.main_grad = g


def step(optimizer, backend):
    ADAMW.chosen[DEVICE] = backend
    optimizer.step()


def compute_copy(p, master):
    "What a step has to write; the interpreter's own cast to bfloat16 cuts digits off instead of rounding."
    if hasattr(p, "block_format"): return qdq(master.float(), p.block_format).to(p.dtype)
    if INTERPRETED and p.dtype == BF16: return (master.float().view(torch.int32) & -65536).view(F32).to(BF16)
    return master.to(p.dtype)


def ulps(a, b): return (a.detach().contiguous().view(torch.int32).long() - b.detach().contiguous().view(torch.int32).long()).abs().max().item()


def compare(one, two, named, unequal=1e-3, tolerance=3e-7):
    "The states of the reference (`one`) and of the kernel, and the kernel's compute weights."
    for (name, p), (_, q) in zip(*named):
        a, b = one.inner.state[one.master_of(p)], two.inner.state[two.master_of(q)]
        assert a.keys() == b.keys()
        for k in a:
            if k.endswith("code"): assert (a[k] != b[k]).float().mean() <= unequal, (name, k)
            if k.endswith("scale"): torch.testing.assert_close(a[k], b[k], rtol=1e-6, atol=0, equal_nan=True, msg=f"{name} {k}")
        torch.testing.assert_close(one.master_of(p).data, two.master_of(q).data, rtol=2e-7, atol=tolerance, equal_nan=True, msg=name)
        if two.master_of(q) is not q: torch.testing.assert_close(q.data, compute_copy(q, two.master_of(q)), rtol=0, atol=0, equal_nan=True, msg=name)


@runs_kernels
@pytest.mark.parametrize("kw", [dict(), dict(quant_map="linear"), dict(block_size=128), dict(block_size=512), dict(block_size=512, quant_map="linear")], ids=str)
def test_shapes_formats_maps_and_blocks(kw):
    named = parameters(WEIGHTS), parameters(WEIGHTS)
    one, two = (AdamW8bit(n, lr=1e-2, min_8bit_size=128, **kw) for n in named)
    for i in range(2):
        for n in named: feed(n, i)
        if i == 1: named[0][3][1].main_grad = named[1][3][1].main_grad = None          # a weight that rests
        step(one, "reference"); step(two, "triton")
        compare(one, two, named)


@runs_kernels
@pytest.mark.parametrize("quant_map", ["dynamic", "linear"])
@pytest.mark.parametrize("spoil", [float("nan"), float("inf"), float("-inf")])
def test_a_spoilt_gradient_spoils_its_block(quant_map, spoil):
    weights = [((1030,), None, F32), ((16, 64), "nvfp4:8x8", BF16)]
    named = parameters(weights), parameters(weights)
    one, two = (AdamW8bit(n, lr=1e-2, min_8bit_size=128, quant_map=quant_map) for n in named)
    for i in range(2):
        for n in named: feed(n, i, spoil if i == 0 else None)
        step(one, "reference"); step(two, "triton")
        for (_, p), (_, q) in zip(*named): assert torch.equal(one.master_of(p).isfinite(), two.master_of(q).isfinite()) and not two.master_of(q).isfinite().all()
    for _, p in named[1]:
        m, v = two.inner.moments(two.master_of(p))
        assert (~m.isfinite()).sum() == (~v.isfinite()).sum() == 256


@runs_kernels
@pytest.mark.parametrize("quant_map", ["dynamic", "linear"])
def test_zero_gradients_move_nothing(quant_map):
    named = parameters(WEIGHTS[:4])
    before = [p.detach().float().clone() for _, p in named]
    optimizer = AdamW8bit(named, lr=1e-2, weight_decay=0.0, min_8bit_size=128, quant_map=quant_map)
    for _, p in named: p.grad, p.main_grad = None, torch.zeros_like(p, dtype=F32)
    step(optimizer, "triton")
    for (_, p), old in zip(named, before): assert torch.equal(optimizer.master_of(p), old)


@runs_kernels
def test_the_first_step_is_that_of_adamw():
    named = parameters(WEIGHTS[:2])
    twins = [torch.nn.Parameter(p.detach().clone()) for _, p in named]
    optimizer, adamw = AdamW8bit(named, lr=1e-2, min_8bit_size=128), torch.optim.AdamW(twins, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    feed(named, 0)
    for (_, p), q in zip(named, twins): q.grad = p.grad.clone()
    step(optimizer, "triton"); adamw.step()
    for (_, p), q in zip(named, twins): torch.testing.assert_close(p.data, q.data, rtol=2e-7, atol=3e-7)


@runs_kernels
def test_gradients_in_bfloat16():
    named = parameters(WEIGHTS[2:5]), parameters(WEIGHTS[2:5])
    one, two = (AdamW8bit(n, lr=1e-2, min_8bit_size=128, fp32_gradients=False) for n in named)
    for i in range(2):
        for n in named: feed(n, i, dtype=BF16)
        step(one, "reference"); step(two, "triton")
        compare(one, two, named)
    assert named[1][0][1].grad.dtype == BF16


@runs_kernels
def test_float16_masters():
    named = parameters(WEIGHTS[2:5]), parameters(WEIGHTS[2:5])
    one, two = (AdamW8bit(n, lr=1e-2, min_8bit_size=128, master_dtype=F16, seed=3) for n in named)
    for i in range(2):
        for n in named: feed(n, i)
        step(one, "reference"); step(two, "triton")
    for (_, p), (_, q) in zip(*named):
        a, b = one.master_of(p), two.master_of(q)
        assert a.dtype == b.dtype == F16 and (a != b).float().mean() <= 2e-3             # a draw may fall between two float32 that differ in the last place
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-7)
        assert torch.equal(q.data, compute_copy(q, b))


if INTERPRETED or torch.cuda.is_available():
    @triton.jit
    def halves(x, y, stream, step, N: tl.constexpr):
        at = tl.arange(0, N)
        key = kernels._mix_kernel(kernels._mix_kernel(tl.load(stream).to(tl.uint32)) + tl.cast(step, tl.uint32))
        tl.store(y + at, kernels._stochastic_half(tl.load(x + at), at.to(tl.uint32), key))


@runs_kernels
def test_stochastic_rounding_has_the_bits_of_the_reference():
    x = torch.randn(4096) * torch.logspace(-12, 7, 4096)
    x[:4] = torch.tensor([float("nan"), float("inf"), 0.0, -0.0])
    x, y = x.to(DEVICE), torch.empty(4096, device=DEVICE)
    for stream, t in ((0, 1), (7, 70000), (2**31 + 11, 3)):
        halves[(1,)](x, y, torch.tensor([stream], device=DEVICE), float(t), N=4096)
        want = kernels.stochastic_half(x, torch.arange(4096, device=DEVICE), stream, t).float()
        assert torch.equal(y.nan_to_num(7.0), want.nan_to_num(7.0))


@runs_kernels
def test_what_changes_between_steps_is_noticed():
    "Formats, gradients and compute weights that lie elsewhere or otherwise, other dtypes, a learning rate that is a tensor: never the numbers of the step before."
    weights = [((32, 64), "nvfp4:8x8", BF16), ((1030,), None, BF16), ((48, 32), None, F32), ((9,), None, F32)]
    named = parameters(weights), parameters(weights)
    one, two = (AdamW8bit(n, lr=1e-2, min_8bit_size=128) for n in named)

    def change(i, n, optimizer):
        (_, tagged), (_, flat), (_, own), _ = n
        if i == 1: tagged.block_format = BlockFormat.parse("nvfp4:16x16")
        if i == 2:
            tagged.data, own.data = tagged.data.t().contiguous().t(), own.data.clone()
            flat.main_grad, own.grad = flat.main_grad.to(BF16), own.grad.t().contiguous().t()
        if i == 3:
            tagged.data, flat.main_grad = tagged.data.contiguous(), torch.cat([flat.main_grad[:1], flat.main_grad])[1:]      # not aligned
            optimizer.param_groups[0]["lr"] = torch.tensor(0.02)
    for i in range(4):
        for n, optimizer, backend in zip(named, (one, two), ("reference", "triton")):
            feed(n, i)
            change(i, n, optimizer)
            step(optimizer, backend)
        for (name, p), (_, q) in zip(*named): torch.testing.assert_close(one.master_of(p).data, two.master_of(q).data, rtol=2e-7, atol=3e-6, msg=f"{name} in step {i}")
        assert torch.equal(named[1][0][1], compute_copy(named[1][0][1], two.master_of(named[1][0][1])))


@runs_kernels
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("spoil, says", [
    (lambda n: setattr(n[1][1], "main_grad", torch.zeros(4, device=DEVICE)), "the gradient of a weight of torch.float32 (1030,)"),
    (lambda n: setattr(n[1][1], "main_grad", n[1][1].main_grad.double()), "takes dense float32, bfloat16 and float16"),
    (lambda n: setattr(n[2][1], "grad", n[2][1].grad.to_sparse()), "takes dense"),
    (lambda n: setattr(n[0][1], "data", torch.zeros(3, device=DEVICE, dtype=BF16)), "the compute weight of a weight"),
    (lambda n: (setattr(n[2][1], "grad", None), setattr(n[2][1], "data", n[2][1].data.to(BF16)), setattr(n[2][1], "grad", torch.zeros_like(n[2][1]))), "convert or move a model first"),
    (lambda n: setattr(n[2][1], "data", torch.zeros(32, 48, device=DEVICE).t()), "strides (1, 48)")])
def test_what_does_not_fit_is_refused(backend, spoil, says):
    named = parameters([((16, 64), "nvfp4:8x8", BF16), ((1030,), None, BF16), ((48, 32), None, F32)])
    optimizer = AdamW8bit(named, min_8bit_size=128)
    feed(named, 0)
    step(optimizer, backend)
    feed(named, 1)
    spoil(named)
    with pytest.raises(ValueError, match=re.escape(says)): step(optimizer, backend)


@pytest.mark.parametrize("dtypes", [(F16, F32), (F32, F16)])
def test_a_refused_state_changes_nothing(dtypes):
    (one, _), (two, named) = ((AdamW8bit(n, min_8bit_size=128, master_dtype=dtype), n) for dtype, n in zip(dtypes, (cpu_parameters(), cpu_parameters())))
    for _, p in named: p.main_grad = torch.ones_like(p, dtype=F32)
    two.step()
    before = [m.clone() for _, m in two.named_masters()]
    with pytest.raises(ValueError, match="master of parameter 'a' is torch"): two.load_state_dict(one.state_dict())
    assert all(torch.equal(m, old) for (_, m), old in zip(two.named_masters(), before)) and two.state_dict()["state"]["a"]["step"] == 1


def test_float16_masters_resume_exactly():
    def trained(steps, resume_at=None):
        named = parameters([((16, 64), "nvfp4:8x8", BF16), ((1000,), None, BF16)]) if not INTERPRETED and torch.cuda.is_available() else cpu_parameters()
        optimizer = AdamW8bit(named, lr=1e-2, min_8bit_size=128, master_dtype=F16)
        for i in range(steps):
            if i == resume_at:
                saved, order = optimizer.state_dict(), list(named)[::-1]
                optimizer = AdamW8bit(order, lr=1e-2, min_8bit_size=128, master_dtype=F16)
                optimizer.load_state_dict(saved)
            generator = torch.Generator().manual_seed(i)
            for _, p in named: p.main_grad = torch.randn(p.shape, generator=generator).to(p.device)
            optimizer.step()
        return [optimizer.master_of(p) for _, p in named]
    for a, b in zip(trained(4), trained(4, resume_at=2)): assert torch.equal(a, b)


def cpu_parameters():
    generator = torch.Generator().manual_seed(5)
    named = [("a", torch.nn.Parameter(torch.randn(16, 64, generator=generator).to(BF16))), ("b", torch.nn.Parameter(torch.randn(1000, generator=generator).to(BF16)))]
    named[0][1].block_format = BlockFormat.parse("nvfp4:8x8")
    return named


def test_few_launches_for_many_tensors():
    weights = [((64, 64), "nvfp4:8x8" if i % 3 else None, BF16 if i % 2 else F32) for i in range(500)]
    named = [(f"p{i}", torch.nn.Parameter(torch.zeros(s, dtype=d))) for i, (s, _, d) in enumerate(weights)]
    for (_, p), (_, fmt, _) in zip(named, weights):
        if fmt: p.block_format = BlockFormat.parse(fmt)
    optimizer = AdamW8bit(named, min_8bit_size=128)
    arena = optimizer.inner.arenas[0]
    members = arena.members(range(len(named)), optimizer._computes[0])
    plan = kernels._plan(members, [torch.zeros(64, 64) for _ in named])
    taken = sorted((row[0], tile) for _, apart, rows in plan.launches for row in rows.tolist() for tile in tiles_of(row, arena.layout[members.masters[row[0]]].unit, apart))
    assert len(plan.launches) == 4 and taken == [(i, tile) for i in range(500) for tile in range(16)]


def clip(named, optimizer, backend, max_norm):
    "What clips the gradients: at once, or in the step."
    return clip_grad_norm_([p for _, p in named], max_norm) if backend == "at once" else optimizer.clip_grad_norm_(max_norm)


@runs_kernels
@pytest.mark.parametrize("kw", [dict(), dict(master_dtype=F16, quant_map="linear")], ids=str)
def test_the_kernel_clips_as_it_reads(kw):
    "The same bits as from gradients that were multiplied before, and the gradients stay as they are; a norm below the limit changes nothing."
    weights = [((16, 48), "nvfp4:8x8", BF16), ((16, 32), "nvfp4:1x16", BF16), ((300,), None, F32), ((40,), None, BF16)]
    named = parameters(weights), parameters(weights)
    one, two = (AdamW8bit(n, lr=1e-2, min_8bit_size=128, **kw) for n in named)
    for i, max_norm in enumerate((0.5, 1e6)):
        for n in named: feed(n, i)
        raw = [g.clone() for g in gradients(named[1])]
        norms = clip(named[0], one, "at once", max_norm), clip(named[1], two, "in the step", max_norm)
        assert torch.equal(*norms) and norms[0] > 1
        for n, optimizer in zip(named, (one, two)): step(optimizer, "triton")
        assert all(map(torch.equal, gradients(named[1]), raw))
        for (name, p), (_, q) in zip(*named):
            a, b = one.inner.state[one.master_of(p)], two.inner.state[two.master_of(q)]
            assert torch.equal(p, q) and torch.equal(one.master_of(p), two.master_of(q)), name
            assert all(torch.equal(x, b[k]) for k, x in a.items() if isinstance(x, torch.Tensor)), name


def gradients(named): return [p.grad if p.grad is not None else p.main_grad for _, p in named]


MAKE = {"8 bits": lambda n: AdamW8bit(n, lr=1e-2, min_8bit_size=128), "linear": lambda n: AdamW8bit(n, lr=1e-2, min_8bit_size=128, quant_map="linear"),
        "fp32 moments": lambda n: AdamW8bit(n, lr=1e-2, min_8bit_size=float("inf")), "fp16 masters": lambda n: AdamW8bit(n, lr=1e-2, min_8bit_size=128, master_dtype=F16),
        "bf16 gradients": lambda n: AdamW8bit(n, lr=1e-2, min_8bit_size=128, fp32_gradients=False), "torch": lambda n: MasterOptimizer(n, torch.optim.AdamW, lr=1e-2),
        "muon": lambda n: MuonWithAdamW([dict(params=n)], {"a": (16, 64)}, lambda g: AdamW8bit(g, lr=1e-2, min_8bit_size=128))}


def give(named, seed, only=None, add=False):
    "New gradients for all parameters, or for one; with `add`, into those that are there."
    generator = torch.Generator().manual_seed(seed)
    for name, p in named:
        g = torch.randn(p.shape, generator=generator) * 10 ** (torch.rand(p.shape, generator=generator) * -3)
        if only in (None, name):
            where = "main_grad" if getattr(p, "fp32_sum", False) else "grad"
            if add: getattr(p, where).add_(g)
            else: setattr(p, where, g.to(F32 if where == "main_grad" else p.dtype))


def drop(named):
    for _, p in named: p.grad = p.main_grad = None


def reload(optimizer): optimizer.load_state_dict({**optimizer.state_dict()})


STORIES = {                                                    # what happens between the first clipping and the last step: n are the parameters, o is the optimiser, c clips, all or those named
    "one clipping": lambda n, o, c: (c(0.5),),
    "a norm below the limit": lambda n, o, c: (c(1e6),),
    "two clippings": lambda n, o, c: (c(2.0), c(0.25)),
    "a step with the same gradients": lambda n, o, c: (c(0.5), o.step()),
    "a skipped step": lambda n, o, c: (c(0.5), o.zero_grad(), give(n, 1)),
    "a skipped step and sums that are kept": lambda n, o, c: (c(0.5), o.zero_grad(set_to_none=False), give(n, 1, add=True)),
    "gradients dropped by hand": lambda n, o, c: (c(0.5), drop(n), give(n, 1), c(0.7)),
    "clippings of two parts": lambda n, o, c: (c(0.5, "a"), c(0.3, "bcd")),
    "one new gradient": lambda n, o, c: (c(0.5), give(n, 1, only="b")),
    "one new gradient, and a clipping": lambda n, o, c: (c(0.5), give(n, 1, only="c"), c(0.4)),
    "a checkpoint": lambda n, o, c: (c(0.5), reload(o))}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("story", STORIES)
def test_clipping_in_the_step_is_clipping_at_once(kind, story):
    ends = []
    for in_step in (False, True):
        named = [*cpu_parameters(), ("c", torch.nn.Parameter(torch.linspace(-1, 1, 300))), ("d", torch.nn.Parameter(torch.ones(5)))]
        optimizer = MAKE[kind](named)
        give(named, 0)
        norms = [x for x in STORIES[story](named, optimizer, lambda c, which="abcd": clip_grad_norm_([p for name, p in named if name in which], c, in_step=in_step)) if x is not None]
        optimizer.step()
        ends.append([*norms, *(p.detach() for _, p in named), *(m for _, m in optimizer.named_masters())])
    assert len(ends[0]) == len(ends[1]) and all(map(torch.equal, *ends))


def test_the_optimizer_leaves_its_gradients_alone():
    named = cpu_parameters()
    optimizer = MAKE["8 bits"](named)
    give(named, 0)
    raw = [p.main_grad.clone() for _, p in named]
    norm = optimizer.clip_grad_norm_(0.5)
    assert all(torch.equal(p.main_grad, g) for (_, p), g in zip(named, raw))
    assert norm > 1 and abs(optimizer.clip_grad_norm_(float("inf")).item() - 0.5) < 1e-5           # a second clipping counts what the first left


@pytest.mark.parametrize("kind", [k for k in MAKE if k != "bf16 gradients"])
def test_gradients_that_grow_after_clipping_are_refused(kind):
    named = [*cpu_parameters(), ("c", torch.nn.Parameter(torch.ones(300)))]
    optimizer = MAKE[kind](named)
    give(named, 0)
    clip_grad_norm_([p for _, p in named], 0.5, in_step=True)
    before = [p.detach().clone() for _, p in named]
    named[0][1].main_grad.add_(1)
    for what in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match="was changed after clip_grad_norm_ and before step"): what()
    assert all(torch.equal(p, old) for (_, p), old in zip(named, before))
    optimizer.zero_grad()
    give(named, 1)
    optimizer.step()
    assert not torch.equal(named[2][1], before[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_spoilt_norm_spoils_alike(bad):
    ends = []
    for in_step in (False, True):
        named = cpu_parameters()
        optimizer = MAKE["8 bits"](named)
        give(named, 0)
        named[1][1].main_grad[300] = bad
        norm = clip_grad_norm_([p for _, p in named], 0.5, in_step=in_step)
        optimizer.step()
        assert not norm.isfinite()
        ends.append([p.detach().float().nan_to_num(7.0) for _, p in named])
    assert all(map(torch.equal, *ends))


def tiles_of(row, unit, apart):
    "The tiles that the program with this row of the plan works on, in its order."
    _, tile_row, column, count = row
    step = kernels.TILES * apart
    return [tile_row * unit + column + first + i for first in range(0, count, step) for i in range(kernels.TILES) if first + i < count]


@pytest.mark.parametrize("tiles, rounds, apart", [(1, 4, 8), (1, 4, 1), (2, 3, 5), (4, 4, 1), (8, 1, 3)])
@pytest.mark.parametrize("shape, pairs", [((1536, 848), 1), ((2, 848, 96), 1), ((16, 16), 1), ((64, 96), 2), ((24, 1536), 1)])
def test_every_tile_has_one_program(monkeypatch, shape, pairs, tiles, rounds, apart):
    monkeypatch.setattr(kernels, "TILES", tiles)
    layout = BlockLayout(shape, 256, tiled=True)
    rows, rest = kernels._programs(layout, pairs, 3, rounds, apart)
    walks = [tiles_of(row, layout.unit, apart) for row in rows.tolist()]
    assert not rest and sorted(sum(walks, [])) == list(range(layout.n_blocks // pairs))
    assert all(row[0] == 3 and row[2] < layout.unit for row in rows.tolist()) and max(map(len, walks)) <= tiles * rounds
    assert all(b[0] - a[0] == tiles for a, b in zip(walks, walks[1:]) if a[0] // (tiles * rounds * apart) == b[0] // (tiles * rounds * apart))      # neighbours begin side by side


@needs_gpu
def test_five_thousand_small_tensors():
    weights = [((63 + 7 * (i % 50), 64), "nvfp4:8x8" if i % 5 == 0 else None, F32 if i % 2 else BF16) for i in range(5000)]
    named = parameters(weights), parameters(weights)
    one, two = (AdamW8bit(n, lr=1e-2) for n in named)
    for i in range(2):
        for n in named: feed(n, i)
        step(one, "reference"); step(two, "triton")
    compare(one, two, named)
