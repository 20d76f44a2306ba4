"""The request's training loop (SPEC T-02), with every name real.

Runs as printed on one process: `python scripts/train.py` trains `--preset tiny` on a CPU for `--steps` steps. Names, order and keyword names are the
printed ones. Where the printed line cannot be right it does the right thing:

1. `dist.init_process_group(backend='nccl')`: gloo on a CPU, and a process group of one where no launcher set one up.
2. Megatron's `initialize_model_parallel` has `expert_model_parallel_size` and `tensor_model_parallel_size`; there is no `data_parallel_size`, it follows.
   Megatron Core is used where it is installed; one process needs no groups.
3. `DistributedDataParallel(model)` would average expert gradients that belong to one rank; with one process nothing is to be reduced.
4. `logits` is a `LogitsHandle`: full logits of 128,256 words are never made. Indexing makes the part asked for.
5. `dataloader` yields `(input_ids, entropy_segments)`; a plain `DataLoader(shuffle=True)` over processes would show the same sequence to several of them.
6. `clip_grad_norm_` is ours: it sees the fp32 gradients of bf16 weights and clips at 1.0, the printed "10" being 1.0 with its decimal point lost.
7. `scheduler.get_last_lr()` is a list, which `:.2e` cannot format: its first element is printed.
8. `optimizer.zero_grad()` stands where it is printed, between the loss and the backward pass.
"""
import argparse, os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from hsmoe.config import load_config
from hsmoe.data.corpus import Corpus
from hsmoe.data.loader import PackedDataset
from hsmoe.model.hybrid import HybridSparseMoEModel
from hsmoe.mtp.loss import compute_adamtp_loss
from hsmoe.optim.adamw8bit import AdamW8bit, clip_grad_norm_
from hsmoe.optim.schedule import CosineAnnealingWithWarmupAndRestart
from hsmoe.quant.fake import quantize_model
from hsmoe.train.checkpoint import save_checkpoint
from hsmoe.train.loop import ensure_corpus
from hsmoe.train.telemetry import log_routing_histogram, seed_everything


def arguments():
    parser = argparse.ArgumentParser(description="The printed training loop.")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=200, help="total steps; the printed run has 22,000,000")
    parser.add_argument("--out", type=Path, default=Path("runs/printed-loop"), help="where checkpoint_{step}.pt goes")
    parser.add_argument("--corpus", type=Path, default=None, help="prepared corpus; default: prepared on demand")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--histogram-every", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=100)
    parser.add_argument("override", nargs="*", help="key.path=value")
    return parser.parse_args()


def init_distributed(device):
    "Process group first, before model and optimiser (SPEC T-07)."
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ: dist.init_process_group(backend=backend)
    else: dist.init_process_group(backend=backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() > 1: raise SystemExit("scripts/train.py runs on one process; start it without torchrun")


def collate(windows):
    "`(input_ids, entropy_segments)`: the labels of the printed loss are the input ids themselves, so the look-ahead of a window is dropped."
    tokens, depth = (torch.stack(parts) for parts in zip(*windows))
    return tokens[:, :depth.shape[1]], depth


def main():
    args = arguments()
    cfg = load_config(args.preset, args.override)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    init_distributed(device)
    seed_everything(cfg.train.seed)
    torch.set_flush_denormal(True)
    args.out.mkdir(parents=True, exist_ok=True)
    m = cfg.model

    model = HybridSparseMoEModel(
        num_layers=m.n_layers, hidden_dim=m.d_model, num_attention_heads=m.n_heads, num_routed_experts=m.n_routed,
        num_shared_experts=m.n_shared, expert_router_k=m.top_k, vocab_size=m.vocab_size, max_seq_len=m.max_seq_len, dropout=m.dropout,
        expert_inner=m.expert_inner, dense_inner=m.dense_inner, rope_theta=m.rope_theta,
    )
    model = quantize_model(model, weight_format='NVFP4_8x8', activation_format='NVFP4', attention_format='MXFP8')
    model.to(device)
    optimizer = AdamW8bit(model.parameters(), lr=cfg.optim.peak_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    warmup_steps = max(1, round(0.02 * args.steps))
    total_steps = args.steps
    scheduler = CosineAnnealingWithWarmupAndRestart(optimizer, warmup_steps=warmup_steps, total_steps=total_steps, restart_interval=5_000_000)
    corpus_dataset = PackedDataset(Corpus.open(args.corpus or ensure_corpus(cfg)).split("train"), cfg.data.seq_len)
    train_dataloader = DataLoader(corpus_dataset, batch_size=cfg.train.batch_sequences, shuffle=True, num_workers=0, collate_fn=collate, pin_memory=device.type == "cuda")

    for step, (input_ids, entropy_segments) in enumerate(train_dataloader):
        input_ids = input_ids.to(device)
        entropy_segments = entropy_segments.to(device)
        logits, routing_info = model(input_ids)
        loss = compute_adamtp_loss(logits, input_ids, entropy_segments, decay_alpha=0.85, lambda_entropy=0.1)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        if step % args.log_every == 0: print(f"Step {step}, Loss: {loss.item():.4f}, LR: {scheduler.get_last_lr()[0]:.2e}", flush=True)
        if step % args.checkpoint_every == 0: save_checkpoint(model, optimizer, scheduler, step, args.out)
        if step % args.histogram_every == 0: log_routing_histogram(routing_info)
        if step + 1 == total_steps: break
    print("Training complete")
    dist.destroy_process_group()


if __name__ == "__main__": main()
