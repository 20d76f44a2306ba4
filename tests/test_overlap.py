"""Dispatch by puts: against the all-to-all and against one process, with slow, silent and dead ranks; the kernels in Triton's interpreter, and on a GPU with two ranks on two streams."""
import copy
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
import torch

from hsmoe.comm import mesh as comm
from hsmoe.comm.dispatch import AllToAllDispatch, LocalDispatch, gather_rows
from hsmoe.comm.mesh import Meter, MeshError, run_ranks, start, stop
from hsmoe.comm.overlap import ChunkedAllToAll, OverlapDispatch
from hsmoe.comm.puts import PUTS, Layout, Port, Tile, _words, differing
from hsmoe.comm.wire import Wire
from hsmoe.quant.fake import QuantSite
from on_device import DEVICE, INTERPRETED, interpret, plain, runs_kernels, starts_interpreter

HERE = Path(__file__).parent
ON_RANKS = "import sys, test_overlap; getattr(test_overlap, sys.argv[1])()"
AT = dict(PYTHONPATH=f"{HERE.parent}{os.pathsep}{HERE}")
KINDS = ["combine", "combine gradient", "dispatch", "dispatch gradient"]


def through(d, mine, x, expert, gate, dy, site=None, pause=0.0):
    "Dispatch, experts (`mine`, in their order) that weigh their rows, combine; the output and the gradients of tokens, gates and weights"
    x, gate, w = x.clone().requires_grad_(), gate.clone().requires_grad_(), (mine + 1.0).to(x).requires_grad_()
    def experts(rows):
        time.sleep(pause)
        x_RD = gather_rows(rows)
        row_R = torch.arange(len(x_RD), device=x.device)
        w_R = torch.cat([w, w.new_zeros(1)])[torch.searchsorted(rows.offsets_E, row_R, right=True)]
        y = x_RD * x_RD.abs() * w_R[:, None]
        if site is not None: y = site(y)
        return y.masked_fill((row_R >= rows.offsets_E[-1])[:, None], torch.nan)                    # what nobody's rows hold is not read
    if getattr(d, "chunks", 1) > 1: y = d.join([d.return_part(experts(rows), rows) for rows in d.begin_parts(x, expert).parts()], gate).wait()
    else:
        rows = d.dispatch(x, expert)
        y = d.combine(experts(rows), gate, rows)
    return (y.detach(), *torch.autograd.grad(y, (x, gate, w), dy))


def near(a, b, limit): return not len(a) or (a - b).abs().max() <= limit * b.abs().max().clamp(min=1)


def on_ranks(mesh, choices):
    "Every awkward load, whole and in parts, on ranks with different numbers of tokens"
    from test_dispatch import loads
    P, D, at = mesh.ep, 20, mesh.rank
    E, n, cuts = 4 * P, 4, [19, 1, 7][:P]
    dispatches = {}
    for C in choices:
        torch.manual_seed(C)
        T, place = sum(cuts), torch.randperm(E) if C == 3 else torch.arange(E)
        mine = place.argsort()[n * at:][:n]
        for name, expert in loads(T, E, C):
            if name == "some masked": expert[cuts[0]:cuts[0] + cuts[1]] = E                         # and one rank wholly
            for dtype, align, chunks in ((torch.float64, 1, 1), (torch.float64, 1, P), (torch.float32, 16, 1)):
                args = [t.to(dtype) if t.is_floating_point() else t for t in (torch.randn(T, D), expert, torch.rand(T, C), torch.randn(T, D))]
                own = [t.split(cuts)[at] for t in args]
                want = through(LocalDispatch(E, align), torch.arange(E), *args)
                same = through(AllToAllDispatch(E, mesh.ep_group, align=align, place_E=place), mine, *own)
                if (C, dtype, chunks) not in dispatches:
                    dispatches[C, dtype, chunks] = OverlapDispatch(E, mesh.ep_group, align=align, place_E=place, chunks=chunks, tile=Tile(8, 8))
                with Meter() as meter: got = through(dispatches[C, dtype, chunks], mine, *own)
                traffic = meter.take()
                assert [t.kind for t in traffic] == KINDS and all(t.calls == 1 and t.op == "put" and t.total_ms >= t.exposed_ms >= 0 for t in traffic), name
                if chunks == 1: assert all(torch.equal(a, b) for a, b in zip(got, same)), (name, dtype)
                assert torch.equal(got[0], want[0].split(cuts)[at]) and torch.equal(got[2], want[2].split(cuts)[at]), (name, dtype, chunks)
                limit = 1e-12 if dtype == torch.float64 else 1e-4
                assert near(got[1], want[1].split(cuts)[at], limit) and near(got[3], want[3][mine], limit), (name, dtype, chunks)
    assert len({id(d.port) for d in dispatches.values()}) == 2 * len(choices)                       # windows are shared where sizes agree


def double(ts): return [t.double() if t.is_floating_point() else t for t in ts]


def on_ranks_apart(mesh):
    "One rank slow in every exchange, then the other; packed answers; pieces of an all-to-all; more tokens than agreed"
    E, C, D, T = 8, 3, 48, 40
    torch.manual_seed(mesh.rank)
    x, expert, gate, dy = args = torch.randn(T, D).bfloat16(), torch.rand(T, E).topk(C).indices, torch.rand(T, C), torch.randn(T, D).bfloat16()
    mine = torch.arange(4) + 4 * mesh.rank
    want, d = through(AllToAllDispatch(E, mesh.ep_group), mine, *args), OverlapDispatch(E, mesh.ep_group, chunks=1, tile=Tile(16, 16))
    for i in range(9):
        got = through(d, mine, *args, pause=0.03 * (i // 3 == mesh.rank))                           # then both are quick again
        assert all(torch.equal(a, b) for a, b in zip(got, want)), i
    assert d.port.epoch == 36 and not d.port.unread

    site = QuantSite(16)
    site.set_format("nvfp4")
    results = []
    for make in (AllToAllDispatch, partial(OverlapDispatch, chunks=1)):
        for wire in (Wire(), Wire(combine="packed"), Wire(dispatch="mxfp8", gradient="mxfp8")):
            with Meter() as meter: results.append((*through(make(E, mesh.ep_group, wire=wire, out_site=site), mine, *args, site=site), {t.kind: t.bytes for t in meter.take()}))
    for a, b in zip(results[:3], results[3:]): assert all(torch.equal(p, q) for p, q in zip(a[:-1], b[:-1])) and a[-1]["combine"] <= b[-1]["combine"] <= a[-1]["combine"] * 1.2
    assert all(torch.equal(p, q) for p, q in zip(results[3][:-1], results[4][:-1])) and results[4][-1]["combine"] < 0.34 * results[3][-1]["combine"]
    packed = OverlapDispatch(E, mesh.ep_group, chunks=1, wire=Wire(combine="packed"), out_site=site)
    with pytest.raises(ValueError, match="blocks of expert outputs are not on the nvfp4:1x16 grid"): through(packed, mine, *args)

    pieces, whole = (through(d, mine, *double(args)) for d in (ChunkedAllToAll(E, mesh.ep_group, chunks=3), AllToAllDispatch(E, mesh.ep_group)))
    assert all(torch.equal(a, b) for a, b in zip(pieces[:3], whole)) and near(pieces[3], whole[3], 1e-12)
    with pytest.raises(ValueError, match="1 tokens cannot be sent in 3 pieces"): ChunkedAllToAll(E, mesh.ep_group, chunks=3).begin_parts(x[:1], expert[:1])
    more = [torch.cat([t, t[:1]]) for t in (x, expert)]
    with pytest.raises(ValueError, match="41 tokens with 3 choices are dispatched, the windows hold 40 with 3"): d.begin(*more)
    d.reserve(41, 3, x)
    going = d.begin(*more)
    assert going.lengths == [41, 41] and going.wait().x_TD.shape == (82, D)


def on_ranks_models(mesh):
    "A model on two ranks, by puts and by pieces, is the model of one process; ranks with different numbers of tokens"
    from hsmoe.model.hybrid import HybridSparseMoEModel
    from hsmoe.model.parallel import parallelize, sum_statistics_
    from test_dispatch import forward_backward, gradients
    torch.manual_seed(7)
    model = HybridSparseMoEModel(2, 16, 2, 8, 4, 3, vocab_size=31, max_seq_len=8, expert_inner=12, dense_inner=8, max_depth=2, router_std=0.5, expert_std=2.0, straight_through="default_moe").double()
    model.compute_dtype = torch.float64
    batch = torch.randint(0, 31, (3, 8)), torch.rand(3, 8) < 0.8, torch.randn(3, 8, 16, dtype=torch.float64)
    alone = copy.deepcopy(model)
    hidden, loads_E = forward_backward(alone, *batch)
    for shared, dispatch, chunks in (("sharded", "overlap", 1), ("replicated", "overlap", 0), ("sharded", "alltoall", 3)):
        m = parallelize(copy.deepcopy(model), mesh, shared, dispatch, chunks=chunks)
        mine, my_loads = forward_backward(m, *(t.split([2, 1])[mesh.rank] for t in batch))
        sum_statistics_(m, my_loads, mesh)
        assert (mine - hidden.split([2, 1])[mesh.rank]).abs().max() < 1e-12 and all(map(torch.equal, my_loads, loads_E))
        for (name, grad), q in zip(gradients(m, mesh), (p for p in alone.parameters() if p.grad is not None)): assert near(grad, q.grad, 1e-12), name
        for a, b in zip(m.layers, alone.layers): assert (a.moe.output_mean.sum_ED - b.moe.output_mean.sum_ED).abs().max() < 1e-12 and torch.equal(a.moe.output_mean.count_E, b.moe.output_mean.count_E)
    with Meter() as meter: m.layers[0].moe.eval()(torch.randn(2, 4, 16, dtype=torch.float64))
    assert {t.kind: t.calls for t in meter.take()} == dict(combine=3, counts=3, dispatch=3, shared=1)


def left_alone(mesh, leave):
    "Rank 1 leaves, or sleeps, after it has been dispatched to; the others end in bounded time and name it"
    comm._GRACE_S = 1.5
    d, x, expert = OverlapDispatch(2 * mesh.ep, mesh.ep_group, chunks=1, timeout_s=1), torch.randn(5, 8, requires_grad=True), torch.rand(5, 4).topk(2).indices
    rows = d.dispatch(x, expert)
    if mesh.rank == 1: return leave()
    begun = time.monotonic()
    with pytest.raises(MeshError) as e: d.combine(gather_rows(rows), torch.rand(5, 2), rows)
    time.sleep(1.5 if mesh.rank == 0 else 0)                                                        # rank 0 keeps the store in which the others sign
    print(f"after {time.monotonic() - begun:.1f} s: {e.value}")


def on_two():
    mesh = start(2, "cpu", 60, megatron=False)
    on_ranks(mesh, (2,))
    on_ranks_apart(mesh)
    on_ranks_models(mesh)
    left_alone(mesh, partial(time.sleep, 5))


def on_three():
    mesh = start(3, "cpu", 60, megatron=False)
    on_ranks(mesh, (3,))
    left_alone(mesh, partial(os._exit, 0))


@plain
def test_ranks_are_one_process_and_name_who_is_silent():
    programs = {"on_two": 2, "on_three": 3}
    with ThreadPoolExecutor(2) as pool: started = {pool.submit(run_ranks, ON_RANKS, world, program, timeout_s=90, **AT): world for program, world in programs.items()}
    for outputs, world in ((f.result(), world) for f, world in started.items()):
        for r in {*range(world)} - {1}:
            line = outputs[r].splitlines()[-1]
            assert "put (combine) failed after" in line and "no sign of rank 1: what rank 1 was to put" in line and float(line.split()[1]) < 9, line


@starts_interpreter
def test_in_the_interpreter():
    interpret(__file__)


@runs_kernels
def test_kernels():
    ops = PUTS.backends["triton"].run
    torch.manual_seed(int(time.time()))
    for shape in [(2, 5, 8, (4, 4))] if DEVICE == "cpu" else [(2, 37, 76, (16, 32)), (3, 300, 768, (128, 64)), (4, 1000, 216, (128, 64)), (1, 3, 4, (2, 4)), (2, 8192, 768, (128, 64))]:
        assert differing(ops, DEVICE, *shape, epochs=3 if DEVICE == "cpu" else 9) is None, shape


@runs_kernels
def test_kernels_give_up_and_say_on_whom():
    layout = Layout(3, 5, 2, 8, 4, (8, 8))
    windows = [torch.zeros(layout.words, dtype=torch.int32, device=DEVICE) for _ in range(3)]
    ops, ports = PUTS.backends["triton"].run, [Port(r, windows, layout, timeout_s=0.3) for r in range(3)]
    out, index, data = (torch.zeros(shape, dtype=dtype, device=DEVICE) for shape, dtype in (((15, 8), torch.int32), ((3, 5), torch.int64), ((5, 8), torch.int32)))
    for r in (0, 1): ops.put(ports[r], layout.box(ports[r].begin(), 8, 5), data, index, [0, 1, 2], 1, "test")
    ops.take(ports[0], layout.box(1, 8, 5), out, [0, 1, 2], None, 1, "test")                         # rank 2 has put nothing
    ports[0].noted.copy_(ports[0].trouble)
    with pytest.raises(MeshError, match="rank 0 of 3: put .* what rank 2 was to put"): ports[0].look("test")
    ops.put(ports[1], layout.box(3, 8, 5), data, index, [1, 2, 0], 3, "test")                       # nobody has read exchange 1
    ports[1].noted.copy_(ports[1].trouble)
    with pytest.raises(MeshError, match="what rank . was to put or to read"): ports[1].look("test")


def simulated(ranks, device, run, layout):
    "`run(rank, port)` for ranks that are threads of this process, on a GPU each with its own stream"
    windows = [torch.zeros(layout.words, dtype=torch.int32, device=device) for _ in range(ranks)]
    if device == "cuda": torch.cuda.synchronize()
    def one(rank):
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            port = Port(rank, windows, layout, timeout_s=120 if device == "cuda" else 20)     # kernels are compiled meanwhile
            result = run(rank, port)
            if device == "cuda": torch.cuda.current_stream().synchronize()
            port.look("test")
            return result
    with ThreadPoolExecutor(ranks) as pool: return [f.result() for f in [pool.submit(one, r) for r in range(ranks)]]


@pytest.mark.skipif(INTERPRETED, reason="threads that wait for each other are no place for the interpreter")
def test_two_ranks_in_one_process():
    "Two threads, on a GPU two streams of one GPU, whose kernels really wait for each other"
    E, C, big = 8, 3, DEVICE == "cuda"
    D, T = (1536, 700) if big else (20, 30)
    torch.manual_seed(0)
    for dtype, chunks in ((torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 1)):
        args = [t.to(DEVICE, dtype) if t.dtype == torch.float32 else t.to(DEVICE) for t in (torch.randn(2 * T, D), torch.rand(2 * T, E).topk(C).indices, torch.rand(2 * T, C), torch.randn(2 * T, D))]
        args[2] = args[2].float()
        want = through(LocalDispatch(E), torch.arange(E, device=DEVICE), *args)
        layout = Layout(2, T, C, _words(D * 4), _words(8 * C), (128, 64))
        both = Barrier(2)
        def rank(r, port):
            d, mine = OverlapDispatch(E, None, port=port, chunks=chunks), torch.arange(4, device=DEVICE) + 4 * r
            own = [t.split(T)[r] for t in args]
            got = through(d, mine, *own)
            both.wait()
            if big: torch.cuda.set_sync_debug_mode("error")                                         # from here on no CPU waits for its GPU
            for _ in range(4): got = through(d, mine, *own)
            both.wait()
            if big: torch.cuda.set_sync_debug_mode("default")
            return got
        if big: through(OverlapDispatch(E, None, chunks=1), torch.arange(E, device=DEVICE), *args)   # kernels are loaded while nobody waits
        for r, got in enumerate(simulated(2, DEVICE, rank, layout)):
            limit = 2e-2 if dtype == torch.bfloat16 else 1e-4
            assert torch.equal(got[0], want[0].split(T)[r])
            assert all(near(a.float(), b.float(), limit) for a, b in ((got[1], want[1].split(T)[r]), (got[2], want[2].split(T)[r]))), (dtype, chunks)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    "All of it between two GPUs; sums of a GPU depend on where rows lie, so only answers are compared bit by bit"
    assert all(o.endswith("done\n") for o in run_ranks(ON_RANKS, 2, "on_two_gpus", timeout_s=180, fork=False, **AT))


def on_two_gpus():
    mesh = start(2, "cuda", 60, megatron=False)
    E, C, D, T = 8, 3, 1536, 700
    torch.manual_seed(mesh.rank)
    args = [t.cuda() for t in (torch.randn(T, D).bfloat16(), torch.rand(T, E).topk(C).indices, torch.rand(T, C), torch.randn(T, D).bfloat16())]
    mine = torch.arange(4, device="cuda") + 4 * mesh.rank
    want = through(AllToAllDispatch(E, mesh.ep_group), mine, *args)
    for chunks in (1, 2):
        d = OverlapDispatch(E, mesh.ep_group, chunks=chunks)
        for _ in range(20):
            with Meter() as meter: got = through(d, mine, *args)
            assert [t.kind for t in meter.take()] == KINDS and torch.equal(got[0], want[0]) and all(near(a.float(), b.float(), 2e-2) for a, b in zip(got[1:], want[1:]))
    stop(mesh)
    print("done")
