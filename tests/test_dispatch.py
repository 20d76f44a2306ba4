"""Experts on several processes against one process: dispatches with awkward loads, whole models with every kind of shared experts, quantised models with packed answers."""
import copy
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from hsmoe.comm import mesh as comm
from hsmoe.comm.dispatch import AllToAllDispatch, LocalDispatch, gather_rows
from hsmoe.comm.mesh import Meter, all_reduce_, run_ranks, start, stop
from hsmoe.comm.wire import WIRE, Wire, differing
from hsmoe.config import load_config
from hsmoe.model.hybrid import HybridSparseMoEModel, build_model
from hsmoe.model.parallel import held_names, parallelize, shares, sum_statistics_, whole_state, whole_tensor
from hsmoe.quant.fake import QuantSite
from hsmoe.quant.formats import BlockFormat
from on_device import needs_gpu

HERE = Path(__file__).parent
ON_RANKS = "import sys, test_dispatch; getattr(test_dispatch, sys.argv[1])()"
AT = dict(PYTHONPATH=f"{HERE.parent}{os.pathsep}{HERE}")
KINDS = ["combine", "combine gradient", "counts", "dispatch", "dispatch gradient"]


def meshes(world, device="cpu"):
    "The same processes as grids of every EP size above 1"
    first = start(2, device, 60, megatron=False)
    for ep in (2, 4)[:world // 2]:
        groups = comm._groups(world, ep, first.rank, timedelta(seconds=60), False)
        yield first._replace(ep=ep, ep_rank=first.rank % ep, expert_dp=world // ep, ep_group=groups[0], expert_dp_group=groups[1])


def through(d, mine, x, expert, gate, dy):
    "Dispatch, experts (`mine`, in their order) that weigh their rows, combine; the output and the gradients of tokens, gates and weights"
    x, gate, w = x.clone().requires_grad_(), gate.clone().requires_grad_(), (mine + 1.0).to(x).requires_grad_()
    rows = d.dispatch(x, expert)
    x_RD = gather_rows(rows)
    row_R = torch.arange(len(x_RD), device=x.device)
    w_R = torch.cat([w, w.new_zeros(1)])[torch.searchsorted(rows.offsets_E, row_R, right=True)]
    y = x_RD * x_RD.abs() * w_R[:, None]
    y = d.combine(y.masked_fill((row_R >= rows.offsets_E[-1])[:, None], torch.nan), gate, rows)       # what nobody's rows hold is not read
    return (y.detach(), *torch.autograd.grad(y, (x, gate, w), dy))


def loads(T, E, C):
    "Choices that are awkward in one way or another, by name"
    some = torch.rand(T, E).topk(C).indices
    yield "even", some
    yield "all tokens to one rank", torch.full((T, C), E // 4 + 1)
    yield "experts without tokens", torch.rand(T, E).index_fill(1, torch.arange(0, E, 2), -1).topk(C).indices
    yield "some masked", some.masked_fill((torch.rand(T) < 0.4)[:, None], E)
    yield "all masked", torch.full_like(some, E)
    yield "single slots of nobody", some.masked_fill(torch.rand(T, C) < 0.3, E)


def on_ranks_rows(mesh, cuts):
    E, D = 8, 24
    torch.manual_seed(mesh.ep)
    for C, place in ((2, None), (3, torch.randperm(E))):
        T = sum(cuts)
        x, gate, dy = torch.randn(T, D), torch.rand(T, C), torch.randn(T, D)
        for name, expert in loads(T, E, C):
            expert = expert.clone()
            if name == "some masked": expert[sum(cuts[:1]):sum(cuts[:2])] = E                     # and one rank wholly
            for dtype, align in ((torch.float64, 1), (torch.float32, 16)):
                args = [t.to(mesh.device) for t in (x.to(dtype), expert, gate.to(dtype), dy.to(dtype))]
                want = through(LocalDispatch(E, align), torch.arange(E), *args)
                at, n = mesh.rank, E // mesh.ep
                here = torch.arange(E) if place is None else place.argsort()                       # the experts by place
                mine = here[n * mesh.ep_rank:][:n]
                d = AllToAllDispatch(E, mesh.ep_group, align=align, place_E=place)
                with Meter() as meter: got = through(d, mine, *(t.split(cuts)[at] for t in args))
                assert [t.kind for t in meter.take()] == KINDS, name
                same = torch.equal(got[2], want[2].split(cuts)[at]) or mesh.device.type == "cuda"       # a GPU's sums depend on where they lie
                assert torch.equal(got[0], want[0].split(cuts)[at]) and same, (name, mesh.ep, dtype)
                dw = all_reduce_(got[3].clone(), mesh.expert_dp_group, kind="test")
                limit = 1e-12 if dtype == torch.float64 else 1e-4
                for a, b in ((got[1], want[1].split(cuts)[at]), (got[2], want[2].split(cuts)[at]), (dw, want[3][mine])): assert not len(a) or (a - b).abs().max() <= limit * b.abs().max().clamp(min=1), (name, mesh.ep, dtype)


def forward_backward(m, tokens, mask, dh, loads=None):
    "One micro-batch: gradients are added to those there are"
    handle, routing = m(tokens, mask_BS=mask)
    extra = sum(r.entropy_sum + 0.1 * r.z_sum for r in routing)
    ((handle.hidden * dh).sum() + extra).backward()
    return handle.hidden.detach(), [r.load_E for r in routing] if loads is None else [a + r.load_E for a, r in zip(loads, routing)]


def gradients(m, mesh):
    "The whole gradient of every parameter that has one"
    parts, held = shares(m), held_names(m)
    for name, p in m.named_parameters():
        if p.grad is None: continue
        grad = all_reduce_(p.grad.clone(), mesh.expert_dp_group if name in held else mesh.dp_group, kind="settle")
        yield name, whole_tensor(grad, parts[name], mesh.ep_group) if name in held else grad


def on_ranks_models(mesh):
    torch.manual_seed(7)
    E = 8
    model = HybridSparseMoEModel(2, 16, 2, E, 4, 3, vocab_size=31, max_seq_len=8, expert_inner=12, dense_inner=8, max_depth=2, router_std=0.5, expert_std=2.0, straight_through="default_moe").double()
    model.compute_dtype = torch.float64
    batches = [(torch.randint(0, 31, (mesh.world, 8)), torch.rand(mesh.world, 8) < 0.8, torch.randn(mesh.world, 8, 16, dtype=torch.float64)) for _ in range(3)]
    batches[1][1][1] = False                                               # in one micro-batch rank 1 has no token that counts
    alone, counted = copy.deepcopy(model), None
    for layer in alone.layers: layer.moe.output_mean.mean_ED.normal_(generator=torch.Generator().manual_seed(1))
    start_state = copy.deepcopy(alone.state_dict())
    hidden = []
    for batch in batches:
        h, counted = forward_backward(alone, *batch, counted)
        hidden.append(h)
    for shared in ("replicated", "sharded"):
        m = copy.deepcopy(model)
        m.load_state_dict(start_state)
        parallelize(m, mesh, shared)
        my_loads = None
        for batch, h in zip(batches, hidden):
            mine, my_loads = forward_backward(m, *(t[mesh.rank:mesh.rank + 1] for t in batch), my_loads)
            assert (mine - h[mesh.rank:mesh.rank + 1]).abs().max() < 1e-12
        sum_statistics_(m, my_loads, mesh)
        for (name, grad), q in zip(gradients(m, mesh), (p for p in alone.parameters() if p.grad is not None)):
            assert (grad - q.grad).abs().max() <= 1e-12 * q.grad.abs().max().clamp(min=1), name
        for a, b, load, want in zip(m.layers, alone.layers, my_loads, counted):
            assert torch.equal(load, want) and torch.equal(a.moe.router.margins_EQ, b.moe.router.margins_EQ) and torch.equal(a.moe.output_mean.count_E, b.moe.output_mean.count_E)
            assert (a.moe.output_mean.sum_ED - b.moe.output_mean.sum_ED).abs().max() < 1e-12
        state = whole_state(m, mesh)
        assert state.keys() == start_state.keys() and all(torch.equal(state[k], v) for k, v in start_state.items())
        m.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in start_state.items()})              # a checkpoint of one process
        assert all(torch.equal(v, start_state[k] + 1 if v.is_floating_point() else v) for k, v in whole_state(m, mesh).items())


def on_ranks_packed(mesh):
    "A quantised bf16 model: packed answers give the same bits as native ones"
    cfg = load_config("tiny", ["model.n_layers=2", "model.vocab_size=300", "model.d_model=64", "model.n_heads=2", "model.max_seq_len=16", "model.expert_inner=32", "model.dense_inner=32", "data.seq_len=16",
                               "train.dtype='bfloat16'"])
    torch.manual_seed(3)
    model = build_model(cfg)
    tags = {n: (p.block_format, p.master.clone()) for n, p in model.named_parameters() if hasattr(p, "block_format")}
    assert any("routed" in n for n in tags)
    tokens, dh = torch.randint(0, 300, (1, 16), generator=torch.Generator().manual_seed(mesh.rank)), torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    results, sent = [], []
    for wire in (Wire(), Wire(combine="packed")):
        torch.manual_seed(3)
        m = parallelize(build_model(cfg), mesh, wire=wire)
        for name, share in shares(m).items():
            p = m.get_parameter(name)
            if name in tags: assert p.block_format == tags[name][0] and torch.equal(whole_tensor(p.master, share, mesh.ep_group), tags[name][1])
        with Meter() as meter: h, _ = forward_backward(m, tokens, None, dh)
        results.append([h, *(p.grad for p in m.parameters() if p.grad is not None)])
        sent.append({t.kind: t.bytes for t in meter.take()})
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert sent[1]["combine"] * 16 == sent[0]["combine"] * 4.5 and {k: v for k, v in sent[0].items() if k != "combine"} == {k: v for k, v in sent[1].items() if k != "combine"}


def on_four():
    for mesh in meshes(4):
        on_ranks_rows(mesh, [17, 1, 40, 6])
        on_ranks_models(mesh)
        if mesh.ep == 2: on_ranks_packed(mesh)
    stop(mesh)
    print("done")


def on_two_gpus():
    for mesh in meshes(2, "cuda"): on_ranks_rows(mesh, [300, 23])
    stop(mesh)
    print("done")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_one():
    assert all(o.endswith("done\n") for o in run_ranks(ON_RANKS, 2, "on_two_gpus", timeout_s=180, fork=False, **AT))


@needs_gpu
def test_wire_kernels():
    for fmt, width in (("nvfp4:1x16", 1536), ("nvfp4:1x64", 192), ("mxfp8_e4m3:1x32+ceil", 1536), ("mxfp4:1x32", 96)):
        for dtype in (torch.bfloat16, torch.float32):
            if BlockFormat.parse(fmt).is_exact_in(dtype): assert differing(WIRE.backends["triton"].run, "cuda", dtype, 1000, width, fmt) is None, (fmt, dtype)


def test_four_ranks_are_one_process():
    outputs = run_ranks(ON_RANKS, 4, "on_four", timeout_s=120, **AT)
    assert all(o.endswith("done\n") for o in outputs)


def test_answers_off_the_grid_are_an_error():
    site = QuantSite(16)
    site.set_format("nvfp4")
    d = AllToAllDispatch(2, None, wire=Wire(combine="packed"), out_site=site)
    x, gate = torch.randn(5, 32), torch.ones(5, 1)
    rows = d.dispatch(x, torch.tensor([[0], [1], [2], [1], [0]]))
    assert torch.equal(d.combine(site(gather_rows(rows)), gate, rows), site(x) * torch.tensor([1, 1, 0, 1, 1])[:, None])
    with pytest.raises(ValueError, match="8 blocks of expert outputs are not on the nvfp4:1x16 grid"): d.combine(gather_rows(rows), gate, d.dispatch(x, torch.tensor([[0], [1], [2], [1], [0]])))


if __name__ == "__main__": globals()[sys.argv[1]]()
