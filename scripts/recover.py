"""The request's recovery loader (SPEC R-06) on a run: model, optimiser and scheduler from `checkpoint_{step}.pt`, then training goes on.

`python scripts/recover.py runs/<date>-<name>` takes the run's newest checkpoint, `--step N` another; where `checkpoint_{step}.pt` is not in `--folder` yet, it is written from the run's
checkpoint as by `hsmoe consolidate`, whatever number of processes wrote that. The four printed lines stand in `recover`. Two things are done around them:

1. The file is a zip archive with a checksum for each member, which `torch.load` does not look at; they are compared first.
2. Three state dicts do not say where in the data a run is, nor what its guards have changed. That is read from the run's folder; where its checkpoint is gone, reading goes on behind the
   sequences of `step` steps.

The steps that follow are those of the run: the same batches, learning rates and losses. `--steps` says how many; the state behind them is written as another `checkpoint_{step}.pt`. This is one process;
a run of several, and anything longer, goes on with `hsmoe train --resume`.
"""
import argparse, json, sys, zipfile
from pathlib import Path

import torch

from hsmoe.cli import USER_ERRORS
from hsmoe.config import ConfigError, load_config, resolve
from hsmoe.optim.recut import blockwise_of
from hsmoe.quant.fake import set_block_formats
from hsmoe.train.checkpoint import DamagedCheckpoint, checkpoint_steps, save_checkpoint
from hsmoe.train.guards import adjust, settings_after
from hsmoe.train.loop import TrainingError, TrainState, check_writable, consolidate, datasets, pick_device, run_corpus, train_step


def recover(model, optimizer, scheduler, step, folder="."):
    "The printed loader."
    checkpoint = torch.load(f"{folder}/checkpoint_{step}.pt", map_location="cpu")
    model.load_state_dict(checkpoint['model'])
    optimizer.load_state_dict(checkpoint['optimizer'])
    scheduler.load_state_dict(checkpoint['scheduler'])


def check_file(path):
    "`DamagedCheckpoint` unless the archive can be read and each member has its checksum."
    try:
        with zipfile.ZipFile(path) as archive: bad = archive.testzip()
    except (OSError, zipfile.BadZipFile) as e: raise DamagedCheckpoint(f"{path} is damaged: it cannot be read ({e})") from None
    if bad: raise DamagedCheckpoint(f"{path} is damaged: the checksum of its member {bad} differs")


def beside_the_tensors(folder):
    "The numbers of a run's checkpoint, of its first process where there were several; nothing where it is gone."
    if not (folder / "meta.json").is_file(): return {}
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if "parts" in meta: meta = json.loads((folder / "rank-0" / "meta.json").read_text(encoding="utf-8"))
    return meta["rest"]


def begin(run, cfg):
    "A fresh model, optimiser, scheduler and data loader of one process, as the run's configuration has them."
    one = dict(parallel=cfg.parallel.model_copy(update=dict(ep=1, dp=1)), train=cfg.train.model_copy(update=dict(device="auto")))
    if not torch.cuda.is_available(): one["backends"] = type(cfg.backends)()       # kernels of a GPU are not there
    cfg = cfg.model_copy(update=one)
    if cfg.train.threads: torch.set_num_threads(cfg.train.threads)
    return TrainState(cfg, resolve(cfg), datasets(cfg, run_corpus(run))[0], pick_device(cfg))


def take_up(state, step, rest, folder):
    "Load `checkpoint_{step}.pt` into a fresh state and put it where the run was."
    if rest.get("depths"): raise TrainingError("this run has depths of its own model since one of its steps; go on with hsmoe train --resume")
    if "formats" in rest: set_block_formats(state.model, rest["formats"], state.optimizer)
    blockwise = blockwise_of(state.optimizer)
    if blockwise and rest.get("state_block", blockwise.block_size) != blockwise.block_size: state.optimizer.set_block_size(rest["state_block"])
    recover(state.model, state.optimizer, state.scheduler, step, folder)
    state.step = step
    state.loader.load_state_dict(rest.get("loader") or {**state.loader.state_dict(), "position": step * state.cfg.train.batch_sequences})
    state.actions = list(rest.get("guards", []))
    now = settings_after(state.cfg, state.actions)
    state.settings = now | dict(temperature=None)
    adjust(state, now)


class Parser(argparse.ArgumentParser):
    def error(self, message): raise ConfigError(message)


def arguments():
    parser = Parser(description="Recover a run from checkpoint_STEP.pt and train on.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--step", type=int, default=None, help="checkpoint; default the newest")
    parser.add_argument("--steps", type=int, default=1, help="steps to train on")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where checkpoint_STEP.pt is, or goes to")
    return parser.parse_args()


def main():
    try:
        args = arguments()
        if args.steps < 1: raise ConfigError(f"--steps {args.steps} must be 1 or more")
        if not (args.run / "config.json").is_file(): raise TrainingError(f"{args.run} is not a run folder: it has no config.json")
        steps = checkpoint_steps(args.run / "checkpoints")
        if args.step is None and not steps: raise TrainingError(f"{args.run} has no checkpoint yet")
        step = steps[-1] if args.step is None else args.step
        cfg, path = load_config(str(args.run / "config.json")), args.folder / f"checkpoint_{step}.pt"
        if step + args.steps > resolve(cfg).steps: raise TrainingError(f"the run ends at step {resolve(cfg).steps:,}, so nothing follows step {step + args.steps - 1:,}; give an earlier --step or fewer --steps")
        check_writable(args.folder)
        if not path.exists(): print(f"{consolidate(args.run, args.step, args.folder)} written", flush=True)
        check_file(path)
        state = begin(args.run, cfg)
        try: take_up(state, step, beside_the_tensors(args.run / "checkpoints" / f"step-{step}"), args.folder)
        except (RuntimeError, KeyError, ValueError) as e:
            if isinstance(e, USER_ERRORS): raise
            raise TrainingError(f"{path} does not fit the configuration in {args.run}/config.json: {' '.join(str(e).split())[:200]}") from None
        torch.set_flush_denormal(True)           # as a run does
        for _ in range(args.steps):
            result = train_step(state)
            print(f"Step {state.step}, Loss: {result.loss:.4f}, LR: {result.lr:.2e}", flush=True)
        print(save_checkpoint(state.model, state.optimizer, state.scheduler, state.step, args.folder))
    except USER_ERRORS as e:
        print(f"recover.py: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__": main()
