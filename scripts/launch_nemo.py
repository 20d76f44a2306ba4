"""A training job through nemo-run, on this host or under Slurm: nemo-run starts torchrun, and torchrun one process a GPU.

    python scripts/launch_nemo.py --processes 2 train --preset tiny parallel.ep=2 parallel.dp=2 "train.length=200 steps"
    python scripts/launch_nemo.py --processes 2 loop --steps 20 parallel.ep=2 parallel.dp=2
    python scripts/launch_nemo.py --executor slurm --account me --partition gpu --nodes 2 --processes 4 --time 04:00:00 train --preset 5b

WHAT is a command of hsmoe (`train`, `run`, ...), or `loop`, the printed loop of scripts/train.py; what follows it is handed on. Paths are those of the repository, from which all processes start.
nemo-run is an option: `pip install nemo-run "leptonai<0.28"` (0.11.1 imports a module that later leptonai no longer has). It keeps logs and the generated job under runs/nemo, or where NEMORUN_HOME says. Under Slurm run this on a host that can call sbatch and shares its files with the nodes; with --dry-run the job is
written and shown, and not submitted. `scripts/launch.sbatch` does the same without nemo-run.
"""
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

ROOT = Path(__file__).resolve().parents[1]
EXECUTORS = ("local", "slurm")
app = typer.Typer(add_completion=False)


class LaunchError(RuntimeError):
    "A job that cannot be started, or that failed: one sentence."


def nemo():
    "The module nemo_run, with its folder in runs/nemo unless NEMORUN_HOME names another. `LaunchError` where it is not installed."
    os.environ.setdefault("NEMORUN_HOME", str(ROOT / "runs" / "nemo"))
    try: import nemo_run
    except ImportError as e: raise LaunchError(f"the package nemo-run cannot be imported ({e}); install it with pip install nemo-run 'leptonai<0.28', or start the job with torchrun or scripts/launch.sbatch") from None
    return nemo_run


def environment(infiniband: bool, interface: Optional[str], inherited) -> dict:
    "What every process gets: the same as from scripts/launch.sbatch. What is set already stays."
    wanted = dict(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")])), OMP_NUM_THREADS="4", NCCL_NVLS_ENABLE="0", NCCL_IB_DISABLE="0" if infiniband else "1")
    if infiniband: wanted |= dict(NCCL_IB_HCA="mlx5", NCCL_NET_GDR_LEVEL="PHB")
    if interface: wanted |= dict(NCCL_SOCKET_IFNAME=interface, GLOO_SOCKET_IFNAME=interface)
    return wanted | {name: inherited[name] for name in wanted if name in inherited and name != "PYTHONPATH"}


TORCHRUN = """\
set -euo pipefail
cd {root}
if [ -n "${{SLURM_NNODES:-}}" ] && [ "${{SLURM_NNODES:-1}}" -gt 1 ]; then
    rendezvous="--nnodes $SLURM_NNODES --node-rank $SLURM_NODEID --master-addr $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) --master-port $((20000 + SLURM_JOB_ID % 20000))"
else rendezvous=--standalone; fi
{how} {python} -m torch.distributed.run $rendezvous --nproc-per-node {processes} --max-restarts 0 {command}
"""


EXIT_CODE = 'trap \'echo $? > "$(dirname "$0")/exit_code"\' EXIT\n'      # nemo-run does not say how a local job ended


def task(run, what: str, args: list, processes: int, local: bool, python: str = sys.executable):
    "nemo-run's script of a node: one torchrun, which starts the command line of hsmoe or the printed loop. (nemo-run's own torchrun launcher quotes arguments once too often on one host.)"
    command = ["scripts/train.py", *args] if what == "loop" else ["-m", "hsmoe.cli", what, *args]
    return run.Script(inline=TORCHRUN.format(how=EXIT_CODE if local else "exec", root=shlex.quote(str(ROOT)), python=shlex.quote(python), processes=processes, command=shlex.join(command)))


def local_executor(run, env: dict):
    "This host."
    return run.LocalExecutor(env_vars=env)


def slurm_executor(run, nodes: int, processes: int, env: dict, account: str, partition: Optional[str], time: str, image: Optional[str], gpus: bool):
    "Nodes that share files with this host, so nothing is packed; a GPU for each process. Two minutes before the time limit all get SIGTERM."
    return run.SlurmExecutor(account=account, partition=partition, nodes=nodes, ntasks_per_node=1, gpus_per_node=processes if gpus else None, time=time, exclusive=True, signal="TERM@120",
                             container_image=image, container_mounts=[f"{ROOT}:{ROOT}"] if image else [], env_vars=env, packager=run.Packager(), tunnel=run.LocalTunnel(job_dir=""))


def check(executor: str, nodes: int, processes: int, account: Optional[str], dry_run: bool) -> None:
    "`LaunchError` for what no executor can do."
    if executor not in EXECUTORS: raise LaunchError(f"--executor is {executor!r}, allowed are {' and '.join(EXECUTORS)}")
    if processes < 1 or nodes < 1: raise LaunchError(f"--nodes {nodes} and --processes {processes}: both must be 1 or more")
    if executor == "local" and nodes > 1: raise LaunchError(f"--nodes is {nodes}, and the local executor has this host only; use --executor slurm, or scripts/two_nodes.sh")
    if executor == "slurm" and not account: raise LaunchError("--executor slurm needs --account, the Slurm account that pays")
    if executor == "slurm" and not dry_run and shutil.which("sbatch") is None: raise LaunchError("--executor slurm needs sbatch, which this host does not have; run it on a login node, or look at the job with --dry-run")


@app.command(context_settings=dict(allow_extra_args=True, allow_interspersed_args=False, ignore_unknown_options=True))
def launch(ctx: typer.Context, what: Annotated[str, typer.Argument(help="A command of hsmoe, as train, or loop for scripts/train.py; what follows is handed on.")],
           executor: Annotated[str, typer.Option(help="local or slurm.")] = "local", processes: Annotated[int, typer.Option(help="Processes a node, one a GPU.")] = 1,
           nodes: Annotated[int, typer.Option(help="Nodes, under Slurm.")] = 1, account: Annotated[Optional[str], typer.Option(help="Slurm account.")] = None,
           partition: Annotated[Optional[str], typer.Option(help="Slurm partition.")] = None, time: Annotated[str, typer.Option(help="Slurm time limit.")] = "04:00:00",
           image: Annotated[Optional[str], typer.Option(help="Container image for Slurm with Pyxis; default: the nodes' own software.")] = None,
           gpus: Annotated[bool, typer.Option(help="Ask Slurm for a GPU a process.")] = True, infiniband: Annotated[bool, typer.Option(help="Let NCCL use InfiniBand.")] = False,
           interface: Annotated[Optional[str], typer.Option(help="Network interface of the nodes' addresses.")] = None, name: Annotated[str, typer.Option(help="Name of the job.")] = "hsmoe",
           dry_run: Annotated[bool, typer.Option(help="Show the job, start nothing.")] = False):
    "Start a job of hsmoe on one or more hosts through nemo-run."
    check(executor, nodes, processes, account, dry_run)
    run = nemo()
    env = environment(infiniband, interface, os.environ)
    where = local_executor(run, env) if executor == "local" else slurm_executor(run, nodes, processes, env, account, partition, time, image, gpus)
    with run.Experiment(name, executor=where, log_level="WARN") as experiment:
        experiment.add(task(run, what, list(ctx.args), processes, executor == "local"), name=what, tail_logs=executor == "local")
        if dry_run: return experiment.dryrun()
        experiment.run(detach=executor == "slurm")
        folder = Path(experiment.jobs[0].executor.job_dir)
    if executor == "slurm": return
    code = (folder / "scripts" / "exit_code").read_text().strip() if (folder / "scripts" / "exit_code").exists() else "unknown"
    if code != "0": raise LaunchError(f"job {what} ended with exit code {code}; its output is above, and under {folder}")


if __name__ == "__main__":
    try: app()
    except LaunchError as e:
        print(f"launch_nemo: {e}", file=sys.stderr)
        sys.exit(2)
