"""The request's training loop (SPEC T-02), with every name real.

Runs as printed on one process: `python scripts/train.py` trains `--preset tiny` on a CPU for `--steps` steps; under torchrun on several, with their experts spread over `parallel.ep` of them:
`torchrun --nproc-per-node 2 scripts/train.py parallel.ep=2 parallel.dp=2`. Names, order, keyword names and values are the
printed ones; `given` puts what the configuration says in the place of a printed value where the two differ. A setting that this loop cannot honour is refused by name.
Where the printed line cannot be right it does the right thing:

1. `dist.init_process_group(backend='nccl')`: gloo on a CPU, and a process group of one where no launcher set one up.
2. Megatron's `initialize_model_parallel` has `expert_model_parallel_size` and `tensor_model_parallel_size`; there is no `data_parallel_size`, it follows.
   It is called where Megatron Core can be imported; a printed line says so where it cannot, since one process needs no groups.
   `get_megatron_optimizer` is imported by the request and never used; the optimiser is `AdamW8bit`.
3. `DistributedDataParallel(model)` would average expert gradients that belong to one rank. In several processes `parallelize` spreads the experts, and the optimiser, shared out among
   the processes, sums the other gradients once a step; each process's loss is divided by their number, so that the sum is the mean.
4. `logits` is a `LogitsHandle`: full logits of 128,256 words are never made. Indexing makes the part asked for.
5. `dataloader` yields `(input_ids, entropy_segments)`; a plain `DataLoader(shuffle=True)` over processes would show the same sequence to several of them, so these get a distributed sampler.
   It is read again, in another order, until `total_steps` are done.
6. `clip_grad_norm_` is ours: it sees the fp32 gradients of bf16 weights and clips at 1.0, the printed "10" being 1.0 with its decimal point lost.
7. `scheduler.get_last_lr()` is a list, which `:.2e` cannot format: its first element is printed.
8. `optimizer.zero_grad()` stands where it is printed, between the loss and the backward pass.
9. `model.end_step` follows `scheduler.step()`: it moves each router's balancing bias, for which the printed loop has no line.
10. `lambda_entropy` and `restart_interval` come from the preset, like every number: the printed +0.1 ends with all tokens at the same experts, and the printed
    5,000,000 steps are longer than a short run. `mtp.entropy_lambda=0.1 schedule.restart_interval=5000000` are the printed ones.
11. `trunk_gradient` comes from the preset too: what the further tokens may ask of the trunk. `mtp.trunk_gradient=1` is the gradient of the printed formula.
"""
import argparse, math, os, sys, warnings
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
with warnings.catch_warnings():
    warnings.simplefilter("ignore")     # Megatron Core warns of every optional package that it does without
    try: from megatron.core import parallel_state
    except ImportError as e: parallel_state, why_no_megatron = None, e

from hsmoe.cli import USER_ERRORS
from hsmoe.comm.mesh import all_reduce_, gather_objects, place, single, start
from hsmoe.comm.settle import ShardedOptimizer
from hsmoe.config import ConfigError, apply_overrides, load_config, resolve
from hsmoe.data.corpus import Corpus
from hsmoe.model.hybrid import HybridSparseMoEModel, check_formats, model_options, set_compute_dtype
from hsmoe.model.parallel import held_names, parallelize, sum_statistics_, whole_state
from hsmoe.mtp.loss import compute_adamtp_loss
from hsmoe.optim.adamw8bit import AdamW8bit, clip_grad_norm_
from hsmoe.optim.schedule import CosineAnnealingWithWarmupAndRestart
from hsmoe.quant.fake import quantize_model
from hsmoe.train.checkpoint import save_checkpoint
from hsmoe.train.loop import corpus_dir_for, datasets, ensure_corpus, pick_device
from hsmoe.train.telemetry import log_routing_histogram, seed_everything

# Where the configuration holds what a printed keyword argument says.
KEYS = dict(
    num_layers="model.n_layers", hidden_dim="model.d_model", num_attention_heads="model.n_heads", num_routed_experts="model.n_routed", num_shared_experts="model.n_shared",
    expert_router_k="model.top_k", vocab_size="model.vocab_size", max_seq_len="model.max_seq_len", dropout="model.dropout",
    weight_format="quant.weight_format", activation_format="quant.activation_format", attention_format="quant.attention_format",
    lr="optim.peak_lr", betas="optim.betas", eps="optim.eps", weight_decay="optim.weight_decay", max_norm="optim.clip_norm",
    restart_interval="schedule.restart_interval", decay_alpha="mtp.alpha", lambda_entropy="mtp.entropy_lambda", batch_size="train.batch_sequences",
)
SECTIONS = ("model", "init", "optim", "schedule")       # honoured as a whole
HONOURED = {*KEYS.values(), "quant.softmax", "mtp.max_depth", "mtp.trunk_gradient", "router.straight_through", "router.temperature", "router.balance", "router.bias_update_rate", "router.z_loss",
            "quant.weights", "quant.sites", "data.seq_len", "parallel.ep", "parallel.dp", "parallel.tp",
            *(f"train.{k}" for k in ("dtype", "device", "threads", "seed", "log_every", "histogram_every", "checkpoint_every")),
            "train.micro_batch_sequences"}              # must divide the batch; changes no gradient, and this loop runs a batch at once
PREPARING = {*(f"data.{k}" for k in ("sources", "tokenizer", "split", "val_fraction")), *(f"mtp.{k}" for k in ("multiplier", "calibrate", "low_bits", "high_bits", "heuristics"))}


def check_overrides(overrides, corpus):
    "`ConfigError` for an override that would change nothing."
    for section, keys in apply_overrides({}, overrides).items():
        for key in [f"{section}.{k}" for k in keys] if isinstance(keys, dict) else [section]:
            if section in SECTIONS or key in HONOURED: continue
            if key in PREPARING and corpus is None: continue
            if key in PREPARING:
                raise ConfigError(f"{key} says how to prepare a corpus, and --corpus {corpus} is prepared already; leave one of the two out")
            if key == "train.length": raise ConfigError("train.length is not read by this loop; its length is --steps")
            raise ConfigError(f"{key} cannot be honoured by the printed loop; leave it out, or train with hsmoe train")


def check_config(cfg):
    "`ConfigError` for a configuration that asks for what no printed call can carry."
    check_formats(cfg)
    p = cfg.parallel
    world = place()[1]
    if p.dp != world: raise ConfigError(f"parallel.dp = {p.dp} needs {p.dp} processes and this loop has {world}; set parallel.dp={world}, and parallel.ep to a divisor of it, or start it with torchrun --nproc-per-node {p.dp}")
    for key, value in (("quant.weights", cfg.quant.weights), ("quant.sites", cfg.quant.sites), ("router.z_loss", cfg.router.z_loss), ("data.curriculum", cfg.data.curriculum)):
        if value: raise ConfigError(f"{key} cannot be honoured by the printed loop, whose calls have no argument for it; leave it out, or train with hsmoe train")


def given(cfg, **printed):
    "The printed keyword arguments with the configuration's values; a format keeps its printed name unless preset or overrides set that key."
    def value(keyword):
        section, key = KEYS[keyword].split(".")
        values = getattr(cfg, section)
        return printed[keyword] if section == "quant" and key not in values.model_fields_set else getattr(values, key)
    return {keyword: value(keyword) for keyword in printed}


def optimizer_options(cfg):
    "Keyword arguments of `AdamW8bit` beside the printed ones: how the moments are kept."
    o = cfg.optim
    kinds = dict(bnb=dict(backend="bnb"), fp32=dict(min_8bit_size=math.inf))
    return dict(block_size=o.block_size, **kinds.get(o.states, dict(quant_map=o.states)))


class Parser(argparse.ArgumentParser):
    def error(self, message): raise ConfigError(message)


def positive(text):
    "A whole number of 1 or more."
    if not text.isdecimal() or int(text) < 1: raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def arguments():
    parser = Parser(description="The printed training loop.")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=positive, default=200, help="total steps; the printed run has 22,000,000")
    parser.add_argument("--out", type=Path, default=Path("runs/printed-loop"), help="where checkpoint_{step}.pt goes")
    parser.add_argument("--corpus", type=Path, default=None, help="prepared corpus; default: prepared on demand")
    for name in ("log", "histogram", "checkpoint"):
        parser.add_argument(f"--{name}-every", type=positive, default=None, help=f"steps; default: train.{name}_every of the preset")
    parser.add_argument("override", nargs="*", help="key.path=value")
    return parser.parse_intermixed_args()       # overrides and options in any order


def init_distributed(cfg, device):
    "Process group first, before model and optimiser (SPEC T-07); then Megatron's groups, where it is installed. `comm.mesh.start` makes both where there are several processes."
    if place()[1] > 1: return start(cfg.parallel.ep, device.type)
    alone = single(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ: dist.init_process_group(backend=backend)
    else: dist.init_process_group(backend=backend, store=dist.HashStore(), rank=0, world_size=1)
    if parallel_state is None:
        print(f"Megatron Core cannot be imported ({why_no_megatron}); one process needs none of its groups.", flush=True)
        return alone
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=cfg.parallel.ep,
        tensor_model_parallel_size=cfg.parallel.tp,
    )
    sizes = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_data_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    print("Megatron Core's process groups: expert %d, data %d, tensor %d." % sizes, flush=True)
    return alone


def collate(windows, max_depth):
    "`(input_ids, entropy_segments)`: the labels of the printed loss are the input ids themselves, so the look-ahead of a window is dropped."
    tokens, depth = (torch.stack(parts) for parts in zip(*windows))
    return tokens[:, :depth.shape[1]], depth.clamp(max=max_depth)


def build(cfg, args, device):
    "Model, optimiser, scheduler and data loader, in the printed order."
    warmup_steps = resolve(cfg, args.steps).warmup
    total_steps = args.steps
    first = place()[0] == 0
    corpus = args.corpus or (ensure_corpus(cfg) if first else corpus_dir_for(cfg))     # the first process prepares it, and the others wait for the first
    if first: corpus_dataset, _ = datasets(cfg, Corpus.open(corpus))
    try: args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e: raise ConfigError(f"folder {args.out} of --out cannot be made: {e.strerror}") from None
    mesh = init_distributed(cfg, device)
    device = mesh.device
    if not first: corpus_dataset, _ = datasets(cfg, Corpus.open(corpus))
    seed_everything(cfg.train.seed)
    model = HybridSparseMoEModel(
        **given(cfg, num_layers=24, hidden_dim=1536, num_attention_heads=8, num_routed_experts=64, num_shared_experts=8, expert_router_k=4,
                vocab_size=128256, max_seq_len=4096, dropout=0.0),
        **model_options(cfg),
    )
    model = set_compute_dtype(model, getattr(torch, cfg.train.dtype))
    model = quantize_model(model, **given(cfg, weight_format='NVFP4_8x8', activation_format='NVFP4', attention_format='MXFP8'))
    model.to(device)
    if mesh.world > 1: parallelize(model, mesh, cfg.parallel.shared)
    held = held_names(model)
    def shared_out(params, **settings): return ShardedOptimizer(list(model.named_parameters()), lambda groups: AdamW8bit(groups, **settings), mesh, is_expert=lambda name: name in held)
    optimizer = (AdamW8bit if mesh.world == 1 else shared_out)(
        model.parameters(),
        **given(cfg, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        **optimizer_options(cfg),
    )
    scheduler = CosineAnnealingWithWarmupAndRestart(
        optimizer, warmup_steps=warmup_steps, total_steps=total_steps, **given(cfg, restart_interval=5_000_000),
        lr_final=cfg.schedule.final_lr, qat_fraction=cfg.schedule.qat_fraction, qat_factor=cfg.schedule.qat_factor,
    )
    if cfg.train.batch_sequences % mesh.world: raise ConfigError(f"train.batch_sequences = {cfg.train.batch_sequences} must be divisible by the number of processes, {mesh.world}")
    sampler = DistributedSampler(corpus_dataset, mesh.world, mesh.rank, seed=cfg.train.seed) if mesh.world > 1 else None
    train_dataloader = DataLoader(
        corpus_dataset, batch_size=given(cfg, batch_size=512)["batch_size"] // mesh.world, shuffle=sampler is None, sampler=sampler, num_workers=0, pin_memory=device.type == "cuda",
        collate_fn=lambda windows: collate(windows, cfg.mtp.max_depth),
    )
    return mesh, model, optimizer, scheduler, train_dataloader


def epochs(dataloader):
    "The data again and again, in another order each time."
    for n in count():
        if dataloader.sampler is not None and hasattr(dataloader.sampler, "set_epoch"): dataloader.sampler.set_epoch(n)
        yield from dataloader


class Whole:
    "What a checkpoint of several processes has to say, brought together for the first of them."
    def __init__(self, state): self.state = state
    def state_dict(self): return self.state


def save(mesh, model, optimizer, scheduler, step, folder):
    "`checkpoint_{step}.pt`, by the first process; of several the optimiser's states are a list."
    if mesh.world == 1: return save_checkpoint(model, optimizer, scheduler, step, folder)
    whole, states = whole_state(model, mesh), gather_objects(optimizer.state_dict(), mesh.dp_group)
    if mesh.rank == 0: save_checkpoint(Whole(whole), Whole(states), scheduler, step, folder)


def train(cfg, args, device, mesh, model, optimizer, scheduler, train_dataloader):
    "The printed loop."
    device = mesh.device
    every, total_steps = resolve(cfg, args.steps), args.steps
    log_every, histogram_every, checkpoint_every = args.log_every or every.log, args.histogram_every or every.histogram, args.checkpoint_every or every.checkpoint
    for step, (input_ids, entropy_segments) in enumerate(epochs(train_dataloader)):
        input_ids = input_ids.to(device)
        entropy_segments = entropy_segments.to(device)
        logits, routing_info = model(input_ids)
        loss = compute_adamtp_loss(logits, input_ids, entropy_segments, **given(cfg, decay_alpha=0.85, lambda_entropy=0.1), trunk_gradient=cfg.mtp.trunk_gradient)
        optimizer.zero_grad()
        if mesh.world > 1: loss = loss / mesh.world                          # the sum of all is their mean
        loss.backward()
        if mesh.world == 1: clip_grad_norm_(model.parameters(), **given(cfg, max_norm=1.0))
        else: optimizer.clip_grad_norm_(**given(cfg, max_norm=1.0))          # the norm of all processes together
        optimizer.step()
        scheduler.step()
        model.end_step(sum_statistics_(model, [routing.load_E for routing in routing_info], mesh))
        if step % log_every == 0:
            loss = all_reduce_(loss.detach().clone(), mesh.dp_group, kind="report")
            if mesh.rank == 0: print(f"Step {step}, Loss: {loss.item():.4f}, LR: {scheduler.get_last_lr()[0]:.2e}", flush=True)
        if step % checkpoint_every == 0: save(mesh, model, optimizer, scheduler, step, args.out)
        if step % histogram_every == 0 and mesh.rank == 0: log_routing_histogram(routing_info)
        if step + 1 == total_steps: break
    if mesh.rank == 0: print("Training complete")


def main():
    try:
        args = arguments()
        cfg = load_config(args.preset, args.override)
        check_overrides(args.override, args.corpus)
        check_config(cfg)
        device = pick_device(cfg)
        torch.set_flush_denormal(True)
        if cfg.train.threads: torch.set_num_threads(cfg.train.threads)
        try: parts = build(cfg, args, device)
        except (ValueError, ImportError) as e: raise ConfigError(str(e)) from None      # settings that exclude each other, a missing bitsandbytes
        train(cfg, args, device, *parts)
    except USER_ERRORS as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(2)
    finally:
        if parallel_state is not None: parallel_state.destroy_model_parallel()
        if dist.is_initialized(): dist.destroy_process_group()


if __name__ == "__main__": main()
