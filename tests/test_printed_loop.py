"""`scripts/train.py`: the request's own loop, run as printed on a CPU."""
import importlib.util, os, re, subprocess, sys

import pytest
import torch

from hsmoe.config import load_config
from hsmoe.data.corpus import Corpus
from hsmoe.data.loader import PackedDataset
from hsmoe.model.hybrid import HybridSparseMoEModel

from conftest import ROOT

HONOURED = ("model.", "data.seq_len", "train.batch_sequences", "train.micro_batch_sequences", "train.log_every", "train.histogram_every", "train.checkpoint_every")
NO_MEGATRON = "raise ImportError('not here')"
# The keyword names of Megatron Core 0.16.1; every call is printed.
RECORDER = """
def initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, *, context_parallel_size=1, expert_model_parallel_size=1):
    import torch.distributed as dist
    print("initialize", tensor_model_parallel_size, expert_model_parallel_size, dist.is_initialized())
def destroy_model_parallel(): print("destroy")
def get_tensor_model_parallel_world_size(): return 1
get_expert_model_parallel_world_size = get_data_parallel_world_size = get_tensor_model_parallel_world_size
"""


@pytest.fixture
def overrides(small_overrides):
    "The small model's overrides, less those that describe a corpus to prepare and a run to validate."
    return [o for o in small_overrides if o.startswith(HONOURED)]


@pytest.fixture
def printed(tmp_path, small_corpus, overrides):
    "Run the script; returns the finished process."
    def run(*args, megatron=NO_MEGATRON, corpus=small_corpus, **env):
        if megatron is not None:
            core = tmp_path / "site" / "megatron" / "core"
            core.mkdir(parents=True, exist_ok=True)
            (core.parent / "__init__.py").write_text(""); (core / "__init__.py").write_text(""); (core / "parallel_state.py").write_text(megatron)
        path = os.pathsep.join([str(tmp_path / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, ROOT / "scripts/train.py", *(["--corpus", corpus] if corpus else []), "--out", tmp_path / "out", *overrides, *args]
        return subprocess.run([str(c) for c in command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True, timeout=300)
    return run


def losses(result):
    assert result.returncode == 0, result.stderr
    return [float(x) for x in re.findall(r"Step \d+, Loss: (-?[0-9.]+), LR: [0-9.e+-]+", result.stdout)]


def test_printed_loop_runs_and_learns(printed, tmp_path, overrides):
    result = printed("--steps", 41, "--log-every", 5, "--checkpoint-every", 20, "--histogram-every", 20)
    found = losses(result)
    assert len(found) == 9 and found[-1] < found[0]
    assert result.stdout.rstrip().endswith("Training complete") and "max/mean" in result.stdout
    step = 40
    checkpoint = torch.load(tmp_path / "out" / f"checkpoint_{step}.pt")
    m = load_config("tiny", [*overrides, "train.length=1 steps"]).model
    model = HybridSparseMoEModel(num_layers=m.n_layers, hidden_dim=m.d_model, num_attention_heads=m.n_heads, num_routed_experts=m.n_routed, num_shared_experts=m.n_shared,
                                 expert_router_k=m.top_k, vocab_size=m.vocab_size, max_seq_len=m.max_seq_len, expert_inner=m.expert_inner, dense_inner=m.dense_inner)
    model.load_state_dict(checkpoint['model'])


def test_the_loop_goes_on_over_epochs(printed, small_corpus):
    windows = len(PackedDataset(Corpus.open(small_corpus).split("train"), 64))
    batch = windows // 3 + 1                        # three batches an epoch
    result = printed("--steps", 5, "--log-every", 1, "--checkpoint-every", 100, "--histogram-every", 100, f"train.batch_sequences={batch}", f"train.micro_batch_sequences={batch}",
                     "model.n_layers=1", "model.expert_inner=8", "mtp.max_depth=3")
    assert len(losses(result)) == 5 and "Step 4," in result.stdout and "Training complete" in result.stdout


def test_printed_names_and_values_stand_in_the_file():
    text = (ROOT / "scripts/train.py").read_text(encoding="utf-8")
    calls = ["HybridSparseMoEModel(", "num_layers=24, hidden_dim=1536, num_attention_heads=8, num_routed_experts=64, num_shared_experts=8, expert_router_k=4,",
             "vocab_size=128256, max_seq_len=4096, dropout=0.0", "weight_format='NVFP4_8x8', activation_format='NVFP4', attention_format='MXFP8'", "model.to(",
             "AdamW8bit(", "lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1", "optimizer, warmup_steps=warmup_steps, total_steps=total_steps,", "restart_interval=5_000_000",
             "batch_size=512", "for step, (input_ids, entropy_segments) in enumerate(", "logits, routing_info = model(input_ids)", "decay_alpha=0.85, lambda_entropy=0.1",
             "optimizer.zero_grad()", "loss.backward()", "max_norm=1.0", "optimizer.step()", "scheduler.step()", "log_routing_histogram(routing_info)", 'print("Training complete")']
    code = text[text.index("def build("):]
    at = [code.index(c) for c in calls]
    assert at == sorted(at)


CALLS = ("HybridSparseMoEModel", "quantize_model", "AdamW8bit", "CosineAnnealingWithWarmupAndRestart", "compute_adamtp_loss", "clip_grad_norm_")


@pytest.fixture
def script(monkeypatch, tmp_path, small_corpus, overrides):
    "The script as a module without Megatron Core, called by `script.run(*args)`."
    spec = importlib.util.spec_from_file_location("printed_loop", ROOT / "scripts/train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "parallel_state", None)
    monkeypatch.setattr(module, "why_no_megatron", "switched off", raising=False)
    def run(*args):
        monkeypatch.setattr(sys, "argv", ["train.py", "--corpus", str(small_corpus), "--out", str(tmp_path / "out"), "--steps", "2", *overrides, *args])
        module.main()
    module.run = run
    return module


@pytest.fixture
def recorded(script, monkeypatch):
    "Keyword arguments of the printed calls, by name, and the model, after two steps."
    def run(*args):
        seen = {}
        def recorder(name, call):
            def wrapped(*a, **k):
                seen[name], made = k, call(*a, **k)
                if name == "quantize_model": seen["model"] = made
                return made
            return wrapped
        for name in CALLS: monkeypatch.setattr(script, name, recorder(name, getattr(script, name)))
        script.run(*args)
        return seen
    return run


def test_without_overrides_the_printed_formats_and_values_run(recorded):
    seen = recorded("optim.peak_lr=3e-4", "mtp.entropy_lambda=0.1")
    assert list(seen["HybridSparseMoEModel"])[:9] == ["num_layers", "hidden_dim", "num_attention_heads", "num_routed_experts", "num_shared_experts", "expert_router_k", "vocab_size", "max_seq_len", "dropout"]
    assert seen["quantize_model"] == dict(weight_format="NVFP4_8x8", activation_format="NVFP4", attention_format="MXFP8")
    assert seen["AdamW8bit"] == dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, block_size=256, quant_map="dynamic")
    assert seen["compute_adamtp_loss"] == dict(decay_alpha=0.85, lambda_entropy=0.1, trunk_gradient=0.3) and seen["clip_grad_norm_"] == dict(max_norm=1.0)
    layer = seen["model"].layers[0]
    assert layer.moe.routed.w_in.block_format.name == "nvfp4:8x8" and layer.attn.q_rope.fmt.name == "mxfp8_e4m3:1x32" and layer.moe.router.bias_update_rate == 0.005


def test_every_override_arrives(recorded):
    seen = recorded("model.qk_norm=true", "model.moe_out_norm=false", "model.norm_eps=1e-5", "model.position=none", "model.dropout=0.25", "quant.softmax=normalised", "mtp.max_depth=3",
                    "router.straight_through=topk", "router.temperature=2.0", "router.balance=quantile", "router.bias_update_rate=0.25", "init.router_std=0.5", "init.router_bias=-0.5", "init.embed_std=0.03", "init.expert_std=0.04",
                    "quant.weight_format=nvfp4:8x8", "quant.activation_format=null", "quant.attention_format=mxfp8_e5m2",
                    "optim.peak_lr=0.001", "optim.betas=[0.8, 0.9]", "optim.eps=1e-6", "optim.weight_decay=0.0", "optim.clip_norm=0.5", "optim.block_size=128", "optim.states=linear",
                    "mtp.alpha=0.8", "mtp.entropy_lambda=0.2", "mtp.trunk_gradient=0.7", "schedule.restart_interval=7", "schedule.final_lr=1e-6", "schedule.warmup=1", "schedule.qat_fraction=0.5", "schedule.qat_factor=0.25", "train.dtype=bfloat16")
    want = dict(qk_norm=True, moe_out_norm=False, norm_eps=1e-5, rope=False, dropout=0.25, softmax="normalised", max_depth=3, straight_through="topk", router_temperature=2.0, balance="quantile", bias_update_rate=0.25,
                router_std=0.5, router_bias=-0.5, embed_std=0.03, expert_std=0.04)
    assert {k: seen["HybridSparseMoEModel"][k] for k in want} == want
    assert seen["quantize_model"] == dict(weight_format="nvfp4:8x8", activation_format=None, attention_format="mxfp8_e5m2")
    assert seen["AdamW8bit"] == dict(lr=0.001, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, block_size=128, quant_map="linear")
    assert seen["compute_adamtp_loss"] == dict(decay_alpha=0.8, lambda_entropy=0.2, trunk_gradient=0.7) and seen["clip_grad_norm_"] == dict(max_norm=0.5)
    assert seen["CosineAnnealingWithWarmupAndRestart"] == dict(warmup_steps=1, total_steps=2, restart_interval=7, lr_final=1e-6, qat_fraction=0.5, qat_factor=0.25)
    model = seen["model"]
    assert model.layers[0].moe.routed.w_in.dtype == torch.bfloat16 and model.layers[0].moe.router.balance_bias.abs().max() > 0


def test_model_options_are_those_of_from_config(recorded, monkeypatch, overrides):
    seen = recorded("model.qk_norm=true", "router.temperature=0.5", "init.router_std=0.5")["HybridSparseMoEModel"]
    reference = {}
    def init(self, *args, **kw): reference.update(dict(zip(seen, args)), **kw)      # `from_config` gives the printed arguments by position
    monkeypatch.setattr(HybridSparseMoEModel, "__init__", init)
    HybridSparseMoEModel.from_config(load_config("tiny", [*overrides, "model.qk_norm=true", "router.temperature=0.5", "init.router_std=0.5"]))
    assert seen == reference


@pytest.mark.parametrize("states, options", [("fp32", dict(min_8bit_size=float("inf"))), ("bnb", dict(backend="bnb")), ("dynamic", dict(quant_map="dynamic"))])
def test_optimiser_states(recorded, states, options):
    if states == "bnb": pytest.importorskip("bitsandbytes")
    seen = recorded(f"optim.states={states}")["AdamW8bit"]
    assert {k: v for k, v in seen.items() if k not in ("lr", "betas", "eps", "weight_decay", "block_size")} == options


@pytest.mark.parametrize("args, words", [
    (["--steps", "0"], ["--steps", "'0'"]), (["--steps", "many"], ["--steps", "many"]), (["--log-every", "0"], ["--log-every", "'0'"]), (["--checkpoint-every", "-1"], ["--checkpoint-every"]),
    (["--frob"], ["--frob"]), (["--preset", "huge"], ["huge", "tiny"]), (["--corpus", "no/corpus"], ["no/corpus"]), (["--out", __file__], ["--out", __file__]),
    (["bogus"], ["bogus"]), (["optim.bogus=1"], ["optim.bogus"]), (["mtp.alpha=2"], ["mtp.alpha"]), (["quant.weight_format=nvfp5"], ["nvfp5"]), (["model.vocab_size=100"], ["model.vocab_size"]),
    (["schedule.warmup=300"], ["300"]), (["optim.states=bnb", "optim.block_size=128"], ["128", "256"]), (["model.d_model=96"], ["model.d_model"]),
    (["quant.weights={'layers.*.attn.q.weight': mxfp8}"], ["quant.weights"]), (["quant.sites={ffn_in: nvfp4}"], ["quant.sites"]), (["router.z_loss=0.1"], ["router.z_loss"]),
    (["parallel.dp=2"], ["parallel.dp"]), (["train.wandb=online"], ["train.wandb"]), (["train.length=5 steps"], ["train.length", "--steps"]),
    (["data.tokenizer=char"], ["data.tokenizer", "--corpus"]), (["data.curriculum=[{kind: easy, share: 0.1}]"], ["data.curriculum"]), (["mtp.multiplier=2.0"], ["mtp.multiplier", "--corpus"]),
])
def test_refuses_in_one_sentence(script, capsys, args, words):
    with pytest.raises(SystemExit) as stop: script.run(*args)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and err.startswith("train.py: ") and out == "", err
    assert all(w in err for w in words), err


def test_a_refusal_ends_the_program_with_2(printed):
    result = printed("--steps", "0")
    assert result.returncode == 2 and result.stderr == "train.py: argument --steps: '0' is not a whole number of 1 or more\n" and result.stdout == ""


def test_refuses_several_processes(printed):
    result = printed(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "torchrun" in result.stderr


def test_says_in_one_line_that_megatron_is_not_there(printed):
    result = printed("--steps", 1, megatron=NO_MEGATRON)
    assert len(losses(result)) == 1 and [l for l in result.stdout.splitlines() if "Megatron" in l] == ["Megatron Core cannot be imported (not here); one process needs none of its groups."]


def test_calls_megatron_in_the_process_group_and_destroys_its_groups(printed):
    lines = printed("--steps", 1, megatron=RECORDER).stdout.splitlines()
    assert lines[:2] == ["initialize 1 1 True", "Megatron Core's process groups: expert 1, data 1, tensor 1."] and lines[-2:] == ["Training complete", "destroy"]


def test_builds_the_groups_of_the_installed_megatron(printed):
    if not importlib.util.find_spec("megatron"): pytest.skip("Megatron Core is not installed: scripts/setup_env.sh installs it")
    result = printed("--steps", 2, megatron=None)
    assert len(losses(result)) == 2 and result.stderr == "" and "Megatron Core's process groups: expert 1, data 1, tensor 1." in result.stdout
