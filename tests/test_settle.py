"""One settle a step: gradients summed at their owners, masters and states shared out, weights gathered. Two and four gloo processes against one."""
import itertools
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hsmoe.comm import settle
from hsmoe.comm.mesh import Mesh, Meter, gather_objects, run_ranks, single, start, stop
from hsmoe.comm.settle import ShardedOptimizer
from hsmoe.comm.shards import matrix_of
from hsmoe.optim.adamw8bit import AdamW8bit, MasterOptimizer, grads_of
from hsmoe.optim.recut import blockwise_of, halve_blocks
from hsmoe.quant.fake import write_compute_
from hsmoe.quant.formats import BlockFormat, qdq

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ALONE = single("cpu")
#         name, shape, format, dtype
WEIGHTS = [("embed.weight", (300, 40), None, F32), ("a.norm", (70,), None, F32), ("a.o.weight", (128, 128), "nvfp4:8x8", BF16), ("a.row.weight", (112, 96), "nvfp4:1x16", F32),
           ("a.big.weight", (160, 64), "nvfp4:16x16", BF16), ("a.odd.weight", (205, 64), "nvfp4:8x8", BF16), ("a.wide.weight", (8, 640), None, F32), ("a.tail.weight", (200, 65), None, BF16),
           ("a.stack", (9, 24, 64), "e1m3:8x8", BF16), ("a.absent", (16, 16), None, BF16), ("a.moe.routed.w_in", (4, 48, 64), "nvfp4:8x8", BF16), ("a.moe.routed.b_in", (4, 1100), None, F32), ("a.moe.routed.b_out", (4, 48), None, F32),
           ("a.moe.shared.w_out", (80, 256), "nvfp4:8x8", BF16)]
RECUT = ("a.moe.routed.b_in",)      # 4,400 elements have moments in 8 bits, the 2,200 of an expert rank have them in fp32
ADAMW = partial(AdamW8bit, lr=1e-2)


def parameters(mesh=ALONE, weights=WEIGHTS):
    "The whole model in one process; on a mesh each rank holds its own experts"
    generator, named = torch.Generator().manual_seed(0), []
    for name, shape, fmt, dtype in weights:
        w = torch.randn(shape, generator=generator)
        w = own_part(w, name, mesh)
        p = nn.Parameter(w.to(dtype))
        if fmt:
            p.block_format, p.master = BlockFormat.parse(fmt), w.clone()
            write_compute_(p.data, w); p.data.copy_(qdq(w, fmt))
        named.append((name, p))
    return named


def groups_of(named): return [dict(params=[x for x in named if x[1].ndim > 1], weight_decay=0.1), dict(params=[x for x in named if x[1].ndim < 2], weight_decay=0.0)]


def gradients(step, rank, weights=WEIGHTS):
    "What this rank's tokens give, for all experts; rank 1 has none for the odd matrix, nobody for the absent one"
    generator, out = torch.Generator().manual_seed(1000 * step + rank), {}
    for name, shape, *_ in weights:
        g = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * -4)
        out[name] = None if name == "a.absent" or name == "a.odd.weight" and rank == 1 else g
    return out


def added(parts):
    parts = [g for g in parts if g is not None]
    return sum(parts[1:], parts[0].clone()) if parts else None


def feed(named, grads):
    for name, p in named:
        g = grads[name]
        if g is None: continue
        if p.dtype == BF16: p.main_grad = g.clone()
        else: p.grad = g.to(p.dtype)


def feed_rank(named, mesh, step):
    "The gradients of one rank: experts hold the tokens of all ranks of its row"
    grads, row = gradients(step, mesh.rank), [gradients(step, mesh.rank // mesh.ep * mesh.ep + c) for c in range(mesh.ep)]
    for name in grads:
        if is_expert(name): grads[name] = own_part(added([g[name] for g in row]), name, mesh)
    feed(named, grads)


def summed(mesh, step):
    "What the ranks' sums are, in their order of additions"
    out = {}
    for name, *_ in WEIGHTS:
        ranks = [gradients(step, r)[name] for r in range(mesh.world)]
        rows = [added(ranks[r:r + mesh.ep]) for r in range(0, mesh.world, mesh.ep)] if is_expert(name) else ranks
        out[name] = added(rows)
    return out


def own_sums(mesh, step): return {name: g if g is None else own_part(g, name, mesh) for name, g in summed(mesh, step).items()}


def is_expert(name): return ".routed." in name or ".shared." in name


def along(name): return 1 if ".shared." in name else 0                       # shared experts lie side by side


def own_part(x, name, mesh): return x.chunk(mesh.ep, along(name))[mesh.ep_rank].contiguous() if is_expert(name) else x


def same(named, reference):
    for (name, p), (_, q) in zip(named, reference): assert torch.equal(p, q), name


def same_states(opt, plain, mesh):
    "Masters and states of the owned rows, as they lie in those of an optimiser that has all"
    mine, whole = opt.state_dict(), plain.state_dict()
    assert mine["rows"].keys() == mine["state"].keys()
    for name, (first, rows, of, *columns) in mine["rows"].items():
        shape = next(s for n, s, *_ in WEIGHTS if n == name)
        assert of == matrix_of(shape)[0]
        if ".routed." in name: of //= mesh.ep; first -= mesh.ep_rank * of
        if ".shared." in name: shape = shape[0], shape[1] // mesh.ep; assert columns == [mesh.ep_rank * shape[1], shape[1], mesh.ep * shape[1]]
        if name in whole["masters"]: assert torch.equal(mine["masters"][name].reshape(rows, -1), whole["masters"][name].reshape(of, -1)[first:first + rows]), name
        for key, x in mine["state"][name].items():
            y = whole["state"][name][key]
            if not isinstance(x, torch.Tensor): assert x == y, (name, key)
            elif key.endswith(("_code", "_scale")):
                start = first * matrix_of(shape)[1] // 256
                assert torch.equal(x, y[start:start + len(x)]), (name, key)
            else: assert torch.equal(x.reshape(rows, -1), y.reshape(of, -1)[first:first + rows]), (name, key)


def run_beside(mesh, steps, named, opt, reference, plain, clip=None, first=0):
    "Steps of the sharded and of the plain optimiser; the plain one is given the sums, and the factor of the sharded one's clipping"
    for step in range(first, first + steps):
        feed_rank(named, mesh, step); feed(reference, own_sums(mesh, step))
        if clip:
            norm = opt.clip_grad_norm_(clip)
            want = torch.cat([g.flatten().double() for g in summed(mesh, step).values() if g is not None]).norm()
            assert abs(norm / want - 1) < 1e-6 and norm.dtype == F32 and norm > clip
            for g in grads_of([p for _, p in reference]):
                if g is not None: g.clip_note = (clip / (norm + 1e-6)).clamp(max=1), g._version
        for o in (opt, plain):
            for g in o.param_groups: g["lr"] = 1e-2 / (1 + step)
            o.step(); o.zero_grad()
        assert all(getattr(p, "main_grad", None) is None and p.grad is None for _, p in named)


# ---------------------------------------------------------------- what the ranks do

def raw_gradients(mesh):
    "SGD with learning rate 1 in float64: weights move by minus the whole gradient"
    torch.manual_seed(0)
    N, E, D = 24, 4, 160
    x, dense, routed = torch.randn(N, D, dtype=F64), torch.randn(D, D, dtype=F64), torch.randn(E, D, D, dtype=F64)
    def loss(dense, routed, tokens):
        "Token t goes to expert t % E; the sum is divided by the tokens of all ranks"
        return sum(((x[t] @ dense) @ routed[t % E]).square().sum() for t in tokens) / N
    whole = [dense.clone().requires_grad_(), routed.clone().requires_grad_()]
    loss(*whole, range(N)).backward()
    named = [("dense.weight", nn.Parameter(dense.clone())), ("layers.0.moe.routed.w_in", nn.Parameter(routed.chunk(mesh.ep)[mesh.ep_rank].clone()))]
    opt = ShardedOptimizer(named, lambda groups: MasterOptimizer(groups, torch.optim.SGD, lr=1.0), mesh)
    tokens = torch.arange(N).chunk(mesh.world)
    mine, row = tokens[mesh.rank].tolist(), torch.cat(tokens[mesh.rank // mesh.ep * mesh.ep:][:mesh.ep]).tolist()
    for half in (mine[::2], mine[1::2]):                                     # two micro-batches
        loss(named[0][1], routed, half).backward()
    everyone = torch.cat([named[1][1] if r == mesh.ep_rank else c for r, c in enumerate(routed.chunk(mesh.ep))])
    loss(dense, everyone, row).backward()
    norm = opt.clip_grad_norm_(math.inf)
    want = torch.cat([p.grad.flatten() for p in whole]).norm()
    assert norm.dtype == F64 and abs(norm - want) < 1e-12 * want
    opt.step()
    for (name, p), start_w, w in zip(named, (dense, routed), whole):
        got, want = own_part(start_w, name, mesh) - p, own_part(w.grad, name, mesh)
        assert (got - want).abs().max() < 1e-12 * want.abs().max(), name
    assert len(opt.lines) == (2 if mesh.expert_dp > 1 else 1)


def adamw(mesh, **kw):
    named, reference = parameters(mesh), parameters(mesh)
    opt, plain = ShardedOptimizer(groups_of(named), ADAMW, mesh, is_expert=is_expert, **kw), ADAMW(groups_of(reference))
    if mesh.world == 2: assert 0 < opt.state_bytes() < 0.75 * plain.state_bytes()
    run_beside(mesh, 2, named, opt, reference, plain, clip=0.5)
    run_beside(mesh, 1, named, opt, reference, plain, first=2)
    same(named, reference); same_states(opt, plain, mesh)
    return named, opt, reference, plain


def formats_change(mesh):
    "Larger blocks in the middle of a run: of a weight, whose master is put together for it, and smaller ones of the states"
    named, opt, reference, plain = adamw(mesh, wire="packed")
    fmt = BlockFormat.parse("nvfp4:16x16")
    for ps, o in ((named, opt), (reference, plain)):
        p = dict(ps)["a.o.weight"]
        master = o.master_of(p)
        p.block_format = master.block_format = fmt
        with torch.no_grad(): write_compute_(p, master)
        assert blockwise_of(o).block_size == 256 and halve_blocks(o) == 128
    same(named, reference)
    opt.load_state_dict(gather_objects(opt.state_dict(), mesh.dp_group))     # writes what is owned here onto the new grid
    same(named, reference)
    run_beside(mesh, 2, named, opt, reference, plain, first=3)
    same(named, reference)


def collectives(mesh):
    "One exchange, one sum of one number, one gather; twice the first and the last where experts have copies; in pieces where that is asked for"
    for bucket, wire in itertools.product((None, 0.1), ("native", "packed")):
        named = parameters(mesh)
        opt = ShardedOptimizer(groups_of(named), ADAMW, mesh, is_expert=is_expert, bucket_mib=bucket, wire=wire)
        feed_rank(named, mesh, 0)
        with Meter() as meter:
            opt.clip_grad_norm_(1.0); opt.step()
            lines = meter.take()
        pieces = sum(len(line.buckets) for line in opt.lines)
        assert {(t.kind, t.op, t.calls) for t in lines} == {("settle", "all_to_all", pieces), ("norm", "all_reduce", 1), ("weights", "all_gather", pieces)}
        assert pieces == (2 if mesh.expert_dp > 1 else 1) if bucket is None else pieces > 2
        sent = {t.kind: t.bytes for t in lines}
        shared = [p for line in opt.lines for p in line.params]
        owned = sum(v.numel() for line in opt.lines for v in line.views.values())
        gradients_sent = 4 * (sum(p.numel() for p in shared) - owned)              # to others: all that is not owned here
        assert gradients_sent <= sent["settle"] <= 1.05 * gradients_sent
        if wire == "packed": assert sent["weights"] < 0.85 * native
        else: native = sent["weights"]
        assert sent["norm"] < 20


def puts(mesh):
    "One-sided puts are counted, and add up to the same bits; a window that arrives spoiled is refused by all"
    adamw(mesh, exchange="put")
    adamw(mesh, exchange="put", bucket_mib=0.05)
    sent = {}
    for exchange in ("collective", "put"):
        named = parameters(mesh)
        opt = ShardedOptimizer(groups_of(named), ADAMW, mesh, is_expert=is_expert, exchange=exchange)
        feed_rank(named, mesh, 0)
        with Meter() as meter:
            opt.step()
            sent[exchange] = {t.op: t.bytes for t in meter.take() if t.kind == "settle"}
    assert sent["put"] == {"put": sent["collective"]["all_to_all"]}
    place = settle._Puts._place
    settle._Puts._place = lambda self, k, to, source: place(self, k, to, source)[:-1] if to == 1 else place(self, k, to, source)
    try: says(lambda: ShardedOptimizer(groups_of(parameters(mesh)), ADAMW, mesh, exchange="put"), "do not arrive whole at rank 1")
    finally: settle._Puts._place = place


def stale(mesh, **kw):
    "Gradients are applied one step late, and a state of the middle goes on"
    named, reference = parameters(mesh), parameters(mesh)
    make = lambda ps: ShardedOptimizer(groups_of(ps), ADAMW, mesh, is_expert=is_expert, settle="stale", **kw)
    opt, plain = make(named), ADAMW(groups_of(reference))
    for step in range(4):
        feed_rank(named, mesh, step)
        norm = opt.clip_grad_norm_(1e9)
        assert (norm == 0) == (step == 0)
        opt.step(); opt.zero_grad()
        if step: feed(reference, own_sums(mesh, step - 1)); plain.step(); plain.zero_grad()
        same(named, reference)
        if step == 2:                                                        # another process takes over
            state, weights = opt.state_dict(), [p.detach().clone() for _, p in named]
            assert state["pending"].keys() == state["rows"].keys() - {"a.absent"}
            says(lambda: ShardedOptimizer(groups_of(parameters(mesh)), ADAMW, mesh, is_expert=is_expert).load_state_dict(state), "stale run")
            named = parameters(mesh); opt = make(named)
            with torch.no_grad():
                for (_, p), w in zip(named, weights): p.copy_(w)
            opt.load_state_dict(state)
    feed(reference, own_sums(mesh, 3)); plain.step()
    opt.flush(); opt.flush()
    same(named, reference)


def says(f, text):
    try: f()
    except ValueError as e: assert text in str(e), e
    else: raise AssertionError(text)


def refusals(mesh):
    from hsmoe.optim.muon import MuonWithAdamW                                # imports the model; one launch is enough
    named = parameters(mesh)
    says(lambda: ShardedOptimizer(parameters(mesh), lambda g: MuonWithAdamW(g, {"a.moe.routed.w_in": (48, 64)}), mesh), "cannot be shared out")
    says(lambda: ShardedOptimizer([("w", nn.Parameter(torch.zeros(64, 32).t()))], ADAMW, mesh), "strides")
    opt = ShardedOptimizer(groups_of(named), ADAMW, mesh, is_expert=is_expert)
    says(lambda: opt.add_param_group(dict(params=[nn.Parameter(torch.zeros(3))])), "make another for a further group")
    feed_rank(named, mesh, 0); opt.clip_grad_norm_(1.0); feed_rank(named, mesh, 0)
    says(opt.step, "gradients came after clip_grad_norm_")
    opt.zero_grad(); opt.step()                                              # nothing has a gradient, nothing moves
    same(named, parameters(mesh))
    says(lambda: opt.load_state_dict(opt.state_dict() | {"rows": {n: [a + 1, *more] for n, (a, *more) in opt.state_dict()["rows"].items()}}), "are not all in the optimiser states given")
    says(lambda: opt.load_state_dict([]), "empty list")
    p = next(line.params[i] for line in opt.lines for i in line.views)
    p.data = p.data.clone()
    says(opt.step, "no longer where it was")


def save(mesh, folder, steps=3):
    named, opt, reference, plain = adamw(mesh)
    torch.save(dict(model={n: p.detach() for n, p in named}, opt=opt.state_dict()), Path(folder) / f"{mesh.ep}-{mesh.rank}.pt")


def restored(folder, ep, mesh):
    "Parameters and optimiser of this mesh from what two ranks have written"
    saved = [torch.load(Path(folder) / f"{ep}-{r}.pt", weights_only=True) for r in range(2)]
    named = parameters(mesh)
    with torch.no_grad():
        for n, p in named: p.copy_(own_part(torch.cat([s["model"][n] for s in saved[:ep]], along(n)), n, mesh) if is_expert(n) else saved[0]["model"][n])
    opt = ShardedOptimizer(groups_of(named), ADAMW, mesh, is_expert=is_expert)
    opt.load_state_dict([s["opt"] for s in saved])
    return named, opt


def go_on(named, opt, mesh, steps=2):
    "Steps with given sums: rank 0, and each expert's first copy, has them all, the others have none"
    for step in range(10, 10 + steps):
        grads = gradients(step, 0)
        feed(named, {n: own_part(g, n, mesh) if g is not None and (mesh.rank == 0 or is_expert(n) and mesh.expert_dp_rank == 0) else None for n, g in grads.items()})
        opt.step(); opt.zero_grad()


def other_grid(mesh, ep):
    "The same processes with another number of expert ranks"
    from hsmoe.comm.mesh import grid
    mine = []
    for kind in grid(mesh.world, ep):
        for ranks in kind:
            group = dist.new_group(ranks)
            if mesh.rank in ranks: mine.append(group)
    return mesh._replace(ep=ep, ep_rank=mesh.rank % ep, expert_dp=mesh.world // ep, ep_group=mine[0], expert_dp_group=mine[1])


def two_ranks(folder):
    torch.set_num_threads(1)
    mesh = start(1, "cpu", 60, megatron=False)
    for m in (mesh, other_grid(mesh, 2)):
        raw_gradients(m)
        collectives(m)
        save(m, folder)
        adamw(m, bucket_mib=0.05)
        stale(m)
        if m is mesh: puts(m); stale(m, exchange="put")
    formats_change(m)
    refusals(m)
    stop(mesh)


def four_ranks(folder):
    torch.set_num_threads(1)
    mesh = start(2, "cpu", 60, megatron=False)
    raw_gradients(mesh)
    adamw(mesh, wire="packed", exchange="put")
    for ep in (1, 2):
        named, opt = restored(folder, ep, mesh)
        go_on(named, opt, mesh)
        torch.save(dict(model={n: p.detach() for n, p in named}, opt=opt.state_dict()), Path(folder) / f"four-{ep}-{mesh.rank}.pt")
    stop(mesh)


# ---------------------------------------------------------------- and what pytest sees

PROGRAM = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_settle; getattr(test_settle, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("settle")
    run_ranks(PROGRAM, 2, "two_ranks", str(path), timeout_s=100)
    return path


def test_two_processes(folder):
    assert (folder / "2-1.pt").is_file()


def test_what_two_wrote_one_and_four_read(folder):
    run_ranks(PROGRAM, 4, "four_ranks", str(folder), timeout_s=100)
    for ep in (1, 2):
        named, opt = restored(folder, ep, ALONE)
        go_on(named, opt, ALONE)
        state = opt.state_dict()
        for rank in range(4):
            four = torch.load(folder / f"four-{ep}-{rank}.pt", weights_only=True)
            mesh = Mesh(rank, 4, 0, torch.device("cpu"), 2, rank % 2, 2)
            for name, p in named:
                if name in RECUT: assert (four["model"][name] - own_part(p, name, mesh)).abs().mean() < 2e-4, (ep, name)
                else: assert torch.equal(four["model"][name], own_part(p, name, mesh)), (ep, name)
            for name, (first, rows, of, *columns) in four["opt"]["rows"].items():
                if name not in state["masters"]: continue
                first_column, n, _ = columns or (0, None, None)
                want = state["masters"][name].reshape(of, -1)[first:first + rows].narrow(1, first_column, n or state["masters"][name].shape[-1])
                assert torch.equal(four["opt"]["masters"][name].reshape(rows, -1), want), (ep, name)


def with_muon(groups):
    from hsmoe.optim.muon import MuonWithAdamW
    return MuonWithAdamW(groups, {"a.o.weight": (64, 128), "a.stack": (24, 64)}, ADAMW)


@pytest.mark.parametrize("make", [ADAMW, with_muon])
def test_one_process_is_the_plain_optimiser(make):
    named, reference = parameters(), parameters()
    opt, plain = ShardedOptimizer(groups_of(named), make, ALONE), make(groups_of(reference))
    scheduler = torch.optim.lr_scheduler.ConstantLR(opt, factor=0.5, total_iters=2)
    for g in plain.param_groups: g["lr"] *= 0.5
    for step in range(3):
        for ps, o in ((named, opt), (reference, plain)):
            if step < 2: feed(ps, gradients(step, 0))
            norm = o.clip_grad_norm_(0.5); o.step(); o.zero_grad()
            if o is opt: mine = norm
        assert torch.equal(mine, norm)
    scheduler.step(); scheduler.step()
    assert {g["lr"] for g in opt.param_groups} == {2 * g["lr"] for g in plain.param_groups}
    same(named, reference)
    a, b = opt.state_dict(), plain.state_dict()
    assert a.keys() == b.keys() and opt.state_bytes() == plain.state_bytes() and blockwise_of(opt) is not None
    other, again = ShardedOptimizer(groups_of(parameters()), make, ALONE), make(groups_of(parameters()))
    for o in (other, again): o.load_state_dict(b)
    for (n, x), (m, y) in zip(other.named_masters(), again.named_masters()): assert n == m and torch.equal(x, y)
