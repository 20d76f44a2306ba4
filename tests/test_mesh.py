"""Processes that talk: groups on four ranks, as Megatron Core makes them; uneven pieces; a rank that hangs, and one that dies under torchrun."""
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hsmoe.comm import mesh as comm
from hsmoe.comm.mesh import Meter, MeshError, all_gather_rows, all_reduce_, all_to_all_rows, barrier, broadcast_, gather_objects, grid, has_megatron, reduce_scatter_rows, run_ranks, start, stop

HERE = Path(__file__).parent
ON_RANKS = "import sys, test_mesh{}; getattr(test_mesh, sys.argv[1])()"
AT = dict(PYTHONPATH=f"{HERE.parent}{os.pathsep}{HERE}")


def torchrun(function, world, timeout, *options):
    "A function of this file on ranks that torchrun starts; the finished process and the seconds it took"
    begun = time.monotonic()
    run = subprocess.run([sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *options, __file__, function], capture_output=True, text=True,
                         timeout=timeout, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}", "PYTHONWARNINGS": "ignore"})
    return run, time.monotonic() - begun


def on_four_ranks():
    "Groups, collectives with uneven and empty pieces, then a rank that does not come"
    mesh = start(ep=2, device="cpu", timeout_s=60)
    ep, expert_dp = grid(4, 2)
    ranks = torch.distributed.get_process_group_ranks
    assert ranks(mesh.ep_group) == ep[mesh.rank // 2] and ranks(mesh.expert_dp_group) == expert_dp[mesh.rank % 2] and ranks(mesh.dp_group) == [0, 1, 2, 3]
    assert (mesh.ep_rank, mesh.expert_dp_rank, mesh.expert_dp) == (mesh.rank % 2, mesh.rank // 2, 2)
    if has_megatron():
        from megatron.core import parallel_state as state
        assert state.get_expert_model_parallel_rank() == mesh.ep_rank and state.get_expert_data_parallel_rank() == mesh.expert_dp_rank
        own = comm._groups(4, 2, mesh.rank, torch.distributed.distributed_c10d.default_pg_timeout, False)
        assert [ranks(g) for g in own] == [ranks(g) for g in (mesh.ep_group, mesh.expert_dp_group, mesh.dp_group)]

    counts = torch.tensor([[0, 2, 1, 0], [0, 0, 0, 0], [3, 0, 2, 1], [1, 1, 0, 4]])           # from, to; rank 1 sends nothing
    r, world = mesh.rank, mesh.dp_group
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn):
        def rows(source, to): return torch.full((int(counts[source, to]), 3), 1.0 + source + 4 * to).to(dtype)
        with Meter() as meter: got = all_to_all_rows(torch.cat([rows(r, q) for q in range(4)]), counts[r].tolist(), counts[:, r].tolist(), world, kind="test", spare=2)
        want = torch.cat([rows(q, r) for q in range(4)])
        assert got.dtype == dtype and len(got) == len(want) + 2 and torch.equal(got[:-2].float(), want.float())
        (line,) = meter.take()
        assert line.bytes == (counts[r].sum() - counts[r, r]).item() * 3 * want.element_size() and line.calls == 1 and line.total_ms > 0

    pieces = [2, 0, 5, 1]
    x = torch.arange(8.0)[:, None] * 10 + torch.arange(3)
    mine = x.split(pieces)[r]
    assert torch.equal(all_gather_rows(mine, world, pieces, kind="test"), x)
    assert torch.equal(reduce_scatter_rows(x * (r + 1), world, pieces, kind="test"), mine * 10)
    assert torch.equal(reduce_scatter_rows(x[:4] * (r + 1), world, kind="test"), x[r:r + 1] * 10)
    under_way = [all_gather_rows(mine, world, pieces, kind="test", wait=False), reduce_scatter_rows(x, world, pieces, kind="test", wait=False), all_reduce_(x[:2].clone(), mesh.ep_group, kind="test", wait=False)]
    assert [torch.equal(u.wait(), w) for u, w in zip(under_way, (x, mine * 4, x[:2] * 2))] == [True] * 3
    assert broadcast_(torch.tensor([r]), 1, mesh.expert_dp_group, kind="test").item() == 2 + r % 2       # the group's rank 1, not the job's
    assert all_reduce_(torch.tensor([r]), world, op="max", kind="test").item() == 3
    assert gather_objects(r, mesh.ep_group) == ep[r // 2]

    short = torch.distributed.new_group([0, 1, 2, 3], timeout=torch.distributed.distributed_c10d.timedelta(seconds=1))
    barrier(world)
    if r == 3:
        time.sleep(6)                                                     # hangs
        os._exit(0)
    with pytest.raises(MeshError, match="all_reduce \\(test\\) failed after [0-9.]+ s, no sign of rank 3: "): all_reduce_(torch.ones(1), short, kind="test")
    print("done", flush=True)
    os._exit(0)


def dies():
    "Rank 1 is killed from outside in the middle of a run; the others are waiting for it"
    mesh = start(ep=2, device="cpu", timeout_s=60, megatron=False)
    for i in range(100):
        all_reduce_(torch.ones(1), mesh.dp_group, kind="test")
        if mesh.rank == 1 and i == 5: os.kill(os.getpid(), 9)


def test_four_ranks():
    outputs = run_ranks(ON_RANKS.format(", megatron.core.parallel_state" if has_megatron() else ""), 4, "on_four_ranks", timeout_s=90, **AT)
    assert all(o.endswith("done\n") for o in outputs[:3])
    assert all(re.search(f"rank {r} of 4: host .*, expert rank {r % 2} of 2, replica {r // 2} of 2", o) for r, o in enumerate(outputs))


def test_a_dead_rank_ends_the_job_and_is_named():
    run, seconds = torchrun("dies", 2, 60)
    assert run.returncode != 0 and seconds < 40
    assert re.search(r"rank\s*: 1 \(local_rank: 1\)", run.stderr) and "Signal 9 (SIGKILL)" in run.stderr, run.stderr[-3000:]


def test_torchrun_with_one_process(monkeypatch):
    for name, value in dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=29500).items(): monkeypatch.setenv(name, str(value))
    mesh = start(device="cpu")
    assert mesh.world == 1 and mesh.dp_group is None and not torch.distributed.is_initialized()
    stop(mesh)


def test_ranks_that_fail_are_reported():
    with pytest.raises(RuntimeError, match="rank 1 of 2 ended with exit code 3"): run_ranks("import os, time; os._exit(3) if os.environ['RANK'] == '1' else time.sleep(30)", 2)
    with pytest.raises(RuntimeError, match="(?s)rank [01] of 2 ended with exit code 1.*No module named 'nothing_of_the_kind'"): run_ranks("import nothing_of_the_kind", 2)
    with pytest.raises(RuntimeError, match="were not done after 0.5 s"): run_ranks("import time; time.sleep(30)", 1, timeout_s=0.5)
    with pytest.raises(RuntimeError, match="did not find the others at 127.0.0.1:[0-9]+ within"):      # the other never comes
        run_ranks("import os\nfrom hsmoe.comm.mesh import *\nos.environ['WORLD_SIZE'] = '2'\nstart(2, 'cpu', 1)", 1)


@pytest.mark.parametrize("name", ["launch.sbatch", "two_nodes.sh"])
def test_scripts_are_shell(name):
    script = HERE.parent / "scripts" / name
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0


if __name__ == "__main__": globals()[sys.argv[1]]()
