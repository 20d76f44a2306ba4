"""A small Megatron Core GPT, trained on the bytes of a text file with the 8-bit AdamW inside Megatron's optimizer (SPEC Q-06, E-04).

    python scripts/megatron_gpt.py --text FILE                      8-bit AdamW, bf16, on the CPU
    python scripts/megatron_gpt.py --text FILE --optimizer adamw    Megatron's own AdamW, everything else equal
    python scripts/megatron_gpt.py --text FILE --weight-format nvfp4:8x8 --device cuda --save out --save-every 100
    python scripts/megatron_gpt.py --text FILE --weight-format nvfp4:8x8 --device cuda --load out/step-100

Everything but the optimizer is Megatron's: GPT of local layers (no Transformer Engine), DDP with fp32 gradients, parameter scheduler, distributed checkpoints. One process.
Batches depend on the seed and the step number alone, so a run that was loaded ends with the same weights as one that never stopped: compare the last line.
"""
import hashlib, os, shutil, time, warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Optional

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")     # read by cuBLAS at its start; without it two runs differ in last bits
import torch
import torch.distributed as dist
import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class UserError(ValueError):
    "Something the caller can put right."


def read_text(path, length):
    "The bytes of a file as int64 [n]."
    try: data = path.read_bytes()
    except OSError as e: raise UserError(f"--text {path}: {e.strerror}")
    if len(data) < length + 1: raise UserError(f"--text {path}: has {len(data)} bytes; a window of --seq {length} needs {length + 1} at least")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batch_at(data, step, o):
    "Inputs and labels [batch, seq] of one step."
    start_B = torch.randint(len(data) - o.seq, (o.batch,), generator=torch.Generator().manual_seed(o.seed * 1_000_003 + step))
    ids_BS = data[start_B[:, None] + torch.arange(o.seq + 1)].to(o.device)
    return ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous()


def init_megatron(o):
    "Process groups of one process, and the random states of tensor-parallel regions."
    from megatron.core import parallel_state, tensor_parallel
    dist.init_process_group("nccl" if o.device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if o.device == "cuda": tensor_parallel.model_parallel_cuda_manual_seed(o.seed)
    else: tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)     # the tracker that asks no GPU; there is no dropout
    torch.manual_seed(o.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)


def build(o):
    "GPT in DDP, optimizer and scheduler, built as Megatron's own examples build them."
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer import TransformerConfig
    from hsmoe.optim.megatron import megatron_optimizer
    from hsmoe.quant.fake import QuantPolicy, quantize_model
    config = TransformerConfig(num_layers=o.layers, hidden_size=o.hidden, num_attention_heads=o.heads, ffn_hidden_size=4 * o.hidden, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
                               bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=True,
                               gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False, bias_activation_fusion=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=o.seq, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    if o.weight_format: quantize_model(model, policy=QuantPolicy(weights={"decoder.layers.*.linear_*.weight": o.weight_format}))
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=True), model.bfloat16().to(o.device))
    settings = OptimizerConfig(optimizer="adam", lr=o.lr, min_lr=o.lr / 10, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0, bf16=True, params_dtype=torch.bfloat16)
    optimizer = (megatron_optimizer if o.optimizer == "adamw8bit" else lambda chunks, c: get_megatron_optimizer(c, chunks))([model], settings)
    scheduler = OptimizerParamScheduler(optimizer, o.lr / 10, o.lr, o.lr / 10, lr_warmup_steps=max(1, o.steps // 20), lr_decay_steps=max(2, o.steps), lr_decay_style="cosine",
                                        start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant")
    return model, optimizer, scheduler


def save(folder, model, optimizer, scheduler, step, settings):
    "A checkpoint of Megatron's `torch_dist` format, written aside and renamed."
    from megatron.core import dist_checkpointing
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)            # of a run that was killed while it wrote
    aside.mkdir(parents=True)
    sharded = model.module.sharded_state_dict()
    dist_checkpointing.save({"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded), "scheduler": scheduler.state_dict(), "step": step, "settings": settings}, str(aside))
    aside.rename(folder)
    print(f"saved {folder}", flush=True)


def load(folder, model, optimizer, scheduler, settings):
    "Restore a checkpoint; returns its step."
    from megatron.core import dist_checkpointing
    if not (folder / "metadata.json").is_file(): raise UserError(f"--load {folder}: is no checkpoint folder; name one that --save has written, such as out/step-100")
    common = dist_checkpointing.load_common_state_dict(str(folder))
    for key, value in settings.items():
        if common["settings"].get(key) != value: raise UserError(f"--load {folder}: was saved with {key} {common['settings'].get(key)}, and this run has {value}")
    sharded = model.module.sharded_state_dict()
    state = dist_checkpointing.load({"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded, is_loading=True)}, str(folder))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(common["scheduler"])
    return common["step"]


def digest(model, optimizer):
    "Fingerprint of all weights and of all masters."
    h = hashlib.sha256()
    for t in [*model.parameters(), *optimizer.chained_optimizers[0].get_parameters()]: h.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def train(o):
    "Read the text, set Megatron up, train, and take it down again."
    data = read_text(o.text, o.seq)
    init_megatron(o)
    try: fit(o, data)
    finally: dist.destroy_process_group()


def fit(o, data):
    "Train to step `o.steps`; prints losses, and at the end what it cost and the fingerprint."
    from megatron.core.distributed import finalize_model_grads
    model, optimizer, scheduler = build(o)
    settings = {k: getattr(o, k) for k in ("optimizer", "weight_format", "layers", "hidden", "heads")}
    first = load(o.load, model, optimizer, scheduler, settings) if o.load else 0
    if first >= o.steps: raise UserError(f"--load {o.load}: is at step {first}; --steps {o.steps} leaves nothing to do")
    position_BS = torch.arange(o.seq, device=o.device).expand(o.batch, -1)
    seen, marks = [], []
    for step in range(first, o.steps):
        tokens_BS, labels_BS = batch_at(data, step, o)
        model.zero_grad_buffer(); optimizer.zero_grad()
        loss = model(tokens_BS, position_BS, None, labels=labels_BS).float().mean()
        loss.backward()
        finalize_model_grads([model])
        lr = optimizer.param_groups[0]["lr"]
        success, norm, _ = optimizer.step()
        scheduler.step(1)
        seen.append(loss.detach()); marks.append(time.perf_counter())
        if (step + 1) % o.log_every == 0 or step + 1 == o.steps:
            print(f"step {step + 1:5}  loss {torch.stack(seen[-o.log_every:]).mean().item():.4f}  gradient norm {norm:.3f}  lr {lr:.2e}", flush=True)
        if o.save and ((step + 1) % o.save_every == 0 or step + 1 == o.steps): save(o.save / f"step-{step + 1}", model, optimizer, scheduler, step + 1, settings)
    report(o, model, optimizer, marks)


def report(o, model, optimizer, marks):
    "What it cost, whether tagged weights are on their grid, and the fingerprint."
    n, inner = sum(p.numel() for p in model.parameters()), optimizer.chained_optimizers[0].optimizer
    state = sum(t.nbytes for s in inner.state.values() for k, t in s.items() if k != "step")
    gaps = sorted(b - a for a, b in zip(marks, marks[1:])) or [0.0]
    print(f"{o.optimizer}: {n:,} parameters, moments {state / n:.2f} bytes a parameter, {gaps[len(gaps) // 2] * 1e3:.1f} ms a step (median)")
    tagged = [p for p in model.parameters() if getattr(p, "block_format", None)]
    if tagged:
        from hsmoe.quant.formats import qdq
        on_grid = all(torch.equal(p, qdq(p.main_param, p.block_format).to(p.dtype)) for p in tagged)
        print(f"{len(tagged)} weights in {o.weight_format}: {'every one is' if on_grid else 'NOT every one is'} its master on the grid")
        if not on_grid: raise AssertionError("a tagged weight left its grid")
    print(f"weights and masters after step {o.steps}: {digest(model, optimizer)}")


def check_format(o):
    "Refuse a weight format that a bf16 weight cannot hold."
    from hsmoe.quant.formats import BlockFormat
    if o.optimizer == "adamw": raise UserError("--weight-format: only adamw8bit keeps weights on their grid; Megatron's own optimizer rounds them to bf16")
    try: fmt = BlockFormat.parse(o.weight_format)
    except ValueError as e: raise UserError(f"--weight-format {o.weight_format}: {e}")
    if not fmt.is_exact_in(torch.bfloat16): raise UserError(f"--weight-format {o.weight_format}: is not exact in bf16; allowed are formats like nvfp4:8x8, e1m3:8x8 or mxfp8_e4m3:1x32")


def check(o):
    "Refuse before anything is built."
    from hsmoe.optim.megatron import why_no_megatron
    if why_no_megatron(): raise UserError(why_no_megatron())
    if o.optimizer not in ("adamw8bit", "adamw"): raise UserError(f"--optimizer {o.optimizer}: allowed are adamw8bit and adamw")
    if o.device not in ("cpu", "cuda"): raise UserError(f"--device {o.device}: allowed are cpu and cuda")
    if o.device == "cuda" and not torch.cuda.is_available(): raise UserError("--device cuda: PyTorch finds no GPU here")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1: raise UserError("WORLD_SIZE > 1: this script is for one process; start it without torchrun")
    if o.hidden % (2 * o.heads): raise UserError(f"--hidden {o.hidden}: must be a multiple of twice --heads {o.heads}, since rotary positions turn pairs of a head's elements")
    if o.weight_format: check_format(o)
    if o.save_every is None: o.save_every = o.steps
    elif not o.save: raise UserError("--save-every: needs --save")
    if o.save:
        for step in [*range(o.save_every, o.steps, o.save_every), o.steps]:
            if (o.save / f"step-{step}").exists(): raise UserError(f"--save {o.save}: step-{step} is there already; name another folder")
        try: o.save.mkdir(parents=True, exist_ok=True)
        except OSError as e: raise UserError(f"--save {o.save}: {e.strerror}")


@app.command()
def main(
    text: Annotated[Path, typer.Option(help="Text file to learn, byte by byte.")],
    steps: Annotated[int, typer.Option(min=1, help="Train up to this step.")] = 200,
    optimizer: Annotated[str, typer.Option(help="adamw8bit, or adamw: Megatron's own.")] = "adamw8bit",
    weight_format: Annotated[Optional[str], typer.Option(help="Format of all matrices of the layers, such as nvfp4:8x8; default bf16.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=1)] = 256,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    seq: Annotated[int, typer.Option(min=1, help="Bytes in a window.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Windows a step.")] = 16,
    lr: Annotated[float, typer.Option(min=1e-9, help="Peak learning rate; cosine to a tenth at --steps.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    log_every: Annotated[int, typer.Option(min=1)] = 20,
    save: Annotated[Optional[Path], typer.Option(help="Folder for checkpoints, one step-N each.", show_default=False)] = None,
    save_every: Annotated[Optional[int], typer.Option(min=1, help="Steps between checkpoints; default only the last.", show_default=False)] = None,
    load: Annotated[Optional[Path], typer.Option(help="Checkpoint folder to go on from, such as out/step-100.", show_default=False)] = None,
):
    "Train a small Megatron Core GPT with the 8-bit AdamW."
    o = SimpleNamespace(**locals())
    try:
        check(o)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")             # Megatron warns of every optional package that it does without
            from hsmoe.optim.megatron import on_cpu
            with on_cpu() if device == "cpu" else nullcontext(): train(o)
    except UserError as e:
        typer.echo(f"megatron_gpt: {e}", err=True)
        raise typer.Exit(2)


if __name__ == "__main__": app()
