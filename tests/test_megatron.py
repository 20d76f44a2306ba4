"""The 8-bit AdamW inside Megatron Core's optimizer, in one gloo process on the CPU; and `scripts/megatron_gpt.py` as a command."""
import importlib.util, math, os, re, subprocess, sys, warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conftest import ROOT
from hsmoe.optim.adamw8bit import AdamW8bit
from hsmoe.optim.megatron import megatron_optimizer, on_cpu, why_no_megatron
from hsmoe.quant.fake import QuantPolicy, quantize_model, write_compute_
from hsmoe.quant.formats import BlockFormat, qdq

pytestmark = [pytest.mark.skipif(why_no_megatron() is not None, reason=str(why_no_megatron())), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def core():
    "Megatron Core with process groups of one process, its names of CUDA answered by the CPU."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.optimizer
        from megatron.core import parallel_state
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        with on_cpu(): yield megatron.core
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def settings(core, **kw):
    return core.optimizer.OptimizerConfig(**{"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-3, "bf16": True, "params_dtype": torch.bfloat16, "clip_grad": 0.0, "weight_decay": 0.1} | kw)


def net(weight_format="nvfp4:8x8", dtype=torch.bfloat16, seed=0, expert=False, norm_dtype=None, **ddp):
    "Two matrices (the second one perhaps an expert's), a bank of three small ones, a norm; in Megatron's DDP."
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import MegatronModule, TransformerConfig
    class Net(MegatronModule):
        def __init__(self):
            super().__init__(TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1))
            self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.LayerNorm(64)
            self.bank = nn.Parameter(torch.randn(3, 16, 64))
        def forward(self, x): return self.norm(self.down(self.up(x).relu())) + torch.einsum("bd,end->be", x, self.bank).mean()
    torch.manual_seed(seed)
    model = Net()
    if expert: model.down.weight.allreduce = False
    if weight_format: quantize_model(model, policy=QuantPolicy(weights={"*.weight": None, "up.weight": weight_format, "down.weight": weight_format, "bank": weight_format}))
    model = model.to(dtype)
    if norm_dtype: model.norm.to(norm_dtype)
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp), model)


def feed(model, step):
    "Gradients that depend on the step alone."
    g = torch.Generator().manual_seed(step)
    for p in model.parameters(): p.main_grad.copy_(torch.randn(p.shape, generator=g) * 10 ** (torch.rand(p.shape, generator=g) * -3))


def run(model, opt, first, last):
    for step in range(first, last):
        feed(model, step)
        result = opt.step()
    return result


def masters(model): return [getattr(p, "main_param", p).detach().clone() for p in model.parameters()]


def same(a, b): return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("weight_format", [None, "nvfp4:8x8", "e1m3:8x8"])
@pytest.mark.parametrize("kw", [{}, {"quant_map": "linear", "block_size": 512}, {"min_8bit_size": 0}])
def test_the_updates_are_those_of_adamw8bit(core, weight_format, kw):
    model = net(weight_format)
    twin = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    for n, p in model.named_parameters():
        for k in ("block_format", "master"):
            if hasattr(p, k): setattr(twin[n], k, getattr(p, k))
    ours = AdamW8bit(twin.items(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1, **kw)
    opt = megatron_optimizer([model], settings(core), **kw)
    for step in range(6):
        feed(model, step)
        for n, p in model.named_parameters(): twin[n].main_grad = p.main_grad.clone()
        assert opt.step()[0] is True
        ours.step()
    assert all(torch.equal(p, twin[n]) and torch.equal(p.main_param, ours.master_of(twin[n])) for n, p in model.named_parameters())


def test_fp32_model_without_masters(core):
    model = net(None, torch.float32)
    twin = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    ours = AdamW8bit(twin.items(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    opt = megatron_optimizer([model], settings(core, bf16=False, params_dtype=torch.float32))
    assert type(opt.chained_optimizers[0]).__name__ == "BlockwiseFP32Optimizer"
    for step in range(4):
        feed(model, step)
        for n, p in model.named_parameters(): twin[n].grad = p.main_grad.clone()
        opt.step(); ours.step()
    assert all(torch.equal(p, twin[n]) for n, p in model.named_parameters())
    assert isinstance(opt.chained_optimizers[0].state_dict()["codec"], str)


@pytest.mark.parametrize("kind", [{}, {"norm_dtype": torch.float32}])
def test_a_kernel_that_writes_the_weights_in_its_pass_gets_them(core, monkeypatch, kind):
    "What a kernel on a GPU is handed: each master with its own compute weight, None for an fp32 parameter, and the same plan in every step."
    import hsmoe.optim.adamw8bit as own
    sets = []
    def kernel(code, members, grads, group, t, factor=None):
        assert all(p is None or p.main_param is m for p, m in zip(members.computes, members.masters, strict=True))
        sets.append(members)
        own._reference_step(code, members, grads, group, t, factor)
        for p, m in zip(members.computes, members.masters):
            if p is not None: write_compute_(p, m)
        return []
    (model, opt), (twin, reference) = ((m, megatron_optimizer([m], settings(core), min_8bit_size=0)) for m in (net(**kind), net(**kind)))
    run(twin, reference, 0, 2)
    monkeypatch.setattr(own, "ADAMW", kernel)
    run(model, opt, 0, 2)
    assert len(sets) == 4 and sets[:2] == sets[2:] and sum(p is None for m in sets[:2] for p in m.computes) == (2 if kind else 0)
    assert same(masters(model), masters(twin)) and same(model.parameters(), twin.parameters())


@pytest.mark.parametrize("weight_format", ["nvfp4:8x8", "nvfp4:1x16", "e1m3:8x8", "mxfp8_e4m3:1x32"])
def test_tagged_weights_start_from_their_master_and_stay_on_their_grid(core, weight_format):
    model = net(weight_format)
    tagged = {n: p.master.clone() for n, p in model.named_parameters() if hasattr(p, "block_format")}
    opt = megatron_optimizer([model], settings(core))
    assert len(tagged) == 3
    for n, p in model.named_parameters():
        if n in tagged: assert torch.equal(p.main_param, tagged[n]) and not hasattr(p, "master")
    for step in range(5):
        run(model, opt, step, step + 1)
        for n, p in model.named_parameters():
            wanted = qdq(p.main_param, BlockFormat.parse(weight_format)) if n in tagged else p.main_param
            assert torch.equal(p, wanted.bfloat16()) and not torch.equal(p.float(), p.main_param)


def test_fp16_skips_a_step_that_overflows(core):
    "Megatron's loss scaler looks at the gradients first, so that the blocks of the moments are not spoiled."
    model = net("nvfp4:8x8", torch.float16)
    opt = megatron_optimizer([model], settings(core, bf16=False, fp16=True, params_dtype=torch.float16, initial_loss_scale=4.0, hysteresis=1))
    run(model, opt, 0, 2)
    before, weights = masters(model), [p.detach().clone() for p in model.parameters()]
    feed(model, 2)
    model.module.up.weight.main_grad[3, 5] = math.inf
    assert opt.step() == (False, None, None) and opt.get_loss_scale().item() == 2.0
    assert same(masters(model), before) and same(model.parameters(), weights)
    assert run(model, opt, 3, 4)[0] and not same(masters(model), before) and all(m.isfinite().all() for m in masters(model))


def test_clipping_and_its_norm(core):
    grads = {}
    for clip in (0.0, 0.5):
        model = net()
        opt = megatron_optimizer([model], settings(core, clip_grad=clip, log_num_zeros_in_grad=True))
        feed(model, 0)
        model.module.norm.bias.main_grad[:7] = 0
        norm = math.sqrt(sum(p.main_grad.double().square().sum().item() for p in model.parameters()))
        success, seen, zeros = opt.step()
        assert success and seen == pytest.approx(norm, rel=1e-5) and zeros == 7
        inner = opt.chained_optimizers[0].optimizer
        grads[clip] = [inner.moments(p)[0] for g in inner.param_groups for p in g["params"]]
    for free, clipped in zip(grads[0.0], grads[0.5]): torch.testing.assert_close(clipped, free * (0.5 / (norm + 1e-6)), rtol=2e-2, atol=1e-6)


def test_the_scheduler_reaches_the_inner_optimizer(core):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    model = net()
    opt = megatron_optimizer([model], settings(core))
    sched = OptimizerParamScheduler(opt, 0.0, 1e-2, 1e-3, lr_warmup_steps=4, lr_decay_steps=10, lr_decay_style="linear", start_wd=0.1, end_wd=0.1, wd_incr_steps=0, wd_incr_style="constant")
    before = masters(model)
    run(model, opt, 0, 1)
    assert same(masters(model), before)                         # learning rate 0
    sched.step(2)
    inner = opt.chained_optimizers[0].optimizer
    assert [(g["lr"], g["weight_decay"]) for g in inner.param_groups] == [(5e-3, 0.1), (5e-3, 0.0)]
    assert {p.ndim for p in inner.param_groups[0]["params"]} == {2, 3} and {p.ndim for p in inner.param_groups[1]["params"]} == {1}
    run(model, opt, 1, 2)
    assert not same(masters(model), before)


@pytest.mark.parametrize("kind", [{}, {"expert": True}, {"norm_dtype": torch.float32}])
def test_going_on_after_loading_is_as_if_never_stopped(core, tmp_path, kind):
    "Through a file; with the experts' part a chain of two, with an fp32 norm a group without masters."
    model, other = net(**kind), net(seed=1, **kind)
    opt, resumed = megatron_optimizer([model], settings(core)), megatron_optimizer([other], settings(core, lr=1e-3))
    assert len(opt.chained_optimizers) == (2 if kind.get("expert") else 1)
    run(model, opt, 0, 3)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "state.pt")
    run(model, opt, 3, 6)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["lr"] == 1e-2
    run(other, resumed, 3, 6)
    assert same(masters(model), masters(other)) and same(model.parameters(), other.parameters())


def test_loading_writes_the_weights_onto_their_grid(core):
    "A bf16 run that goes on in 4 bits: the tag is new, the masters are old."
    plain, tagged = net(None), net("nvfp4:8x8", seed=1)
    opt, after = (megatron_optimizer([m], settings(core), min_8bit_size=10**9) for m in (plain, tagged))
    run(plain, opt, 0, 2)
    tagged.load_state_dict(plain.state_dict())
    after.load_state_dict(opt.state_dict())
    for p in tagged.parameters():
        if hasattr(p, "block_format"): assert torch.equal(p, qdq(p.main_param, p.block_format).bfloat16())


def test_states_that_do_not_fit_are_refused(core):
    state = megatron_optimizer([net()], settings(core)).state_dict()
    with pytest.raises(ValueError, match="DynamicMap"): megatron_optimizer([net()], settings(core), quant_map="linear").load_state_dict(state)


@pytest.mark.parametrize("of_config, of_ddp, words", [
    ({"use_distributed_optimizer": True}, {}, "cuts flattened parameters"),
    ({}, {"use_distributed_optimizer": True}, "cuts flattened parameters"),
    ({"optimizer_cpu_offload": True}, {}, "stay where the parameters are"),
    ({"optimizer": "sgd"}, {}, "set it to 'adam'"),
    ({"decoupled_weight_decay": False}, {}, "decays weights directly"),
])
def test_what_cannot_be_honoured_is_refused_in_one_sentence(core, of_config, of_ddp, words):
    model = net()
    for key, value in of_ddp.items(): setattr(model.ddp_config, key, value)
    with pytest.raises(ValueError, match=words) as e: megatron_optimizer([model], settings(core, **of_config))
    assert "\n" not in str(e.value) and all(hasattr(p, "master") for p in model.parameters() if hasattr(p, "block_format"))     # nothing was taken over


def test_tagged_float32_weights_and_offloading_are_refused(core):
    with pytest.raises(ValueError, match="parameter module.bank has format nvfp4:8x8 and is float32"):
        megatron_optimizer([net(dtype=torch.float32)], settings(core, bf16=False, params_dtype=torch.float32))
    with pytest.raises(ValueError, match="tensor by tensor"): megatron_optimizer([net()], settings(core)).offload_to_cpu()


@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
def test_sharded_checkpoint(core, tmp_path, norm_dtype):
    "Megatron's own checkpoint format, with the two layers of a GPT stacked into one global tensor."
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    def gpt(seed):
        torch.manual_seed(seed)
        config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=2, use_cpu_initialization=True, add_bias_linear=False, bf16=True, params_dtype=torch.bfloat16, gradient_accumulation_fusion=False)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, position_embedding_type="rope")
        quantize_model(model, policy=QuantPolicy(weights={"decoder.layers.*.linear_*.weight": "nvfp4:8x8"}))
        for n, p in model.named_parameters():
            if "norm" in n: p.data = p.data.to(norm_dtype)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        return model, megatron_optimizer([model], settings(core))
    (model, opt), (other, resumed) = gpt(0), gpt(1)
    run(model, opt, 0, 3)
    sharded = model.module.sharded_state_dict()
    dist_checkpointing.save({"model": sharded, "optimizer": opt.sharded_state_dict(sharded)}, str(tmp_path))
    run(model, opt, 3, 5)
    sharded = other.module.sharded_state_dict()
    state = dist_checkpointing.load({"model": sharded, "optimizer": resumed.sharded_state_dict(sharded, is_loading=True)}, str(tmp_path))
    other.module.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    run(other, resumed, 3, 5)
    assert same(masters(model), masters(other)) and same(model.parameters(), other.parameters())

    cut = model.module.sharded_state_dict()
    key = next(k for k, v in cut.items() if k.endswith("linear_fc1.weight"))
    shape = list(cut[key].global_shape); shape[1] *= 2          # as if another rank held the other half of its rows
    cut[key].global_shape = tuple(shape)
    with pytest.raises(ValueError, match="linear_fc1.weight cannot go into a sharded checkpoint"): opt.sharded_state_dict(cut)


@pytest.fixture
def gpt(tmp_path):
    "Run the script; returns the finished process."
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "setup.py").read_text(encoding="utf-8") * 3, encoding="utf-8")
    def start(*args, rc=0):
        command = [sys.executable, ROOT / "scripts/megatron_gpt.py", "--text", text, "--layers", 1, "--hidden", 64, "--heads", 2, "--seq", 32, "--batch", 4, *args]
        done = subprocess.run([str(c) for c in command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
        assert done.returncode == rc, done.stderr
        return done
    return start


def test_script_learns_saves_and_goes_on(gpt):
    straight = gpt("--steps", 24, "--log-every", 12, "--weight-format", "nvfp4:8x8", "--save", "out", "--save-every", 12)
    losses = [float(x) for x in re.findall(r"loss (\S+)", straight.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] and "every one is its master on the grid" in straight.stdout
    resumed = gpt("--steps", 24, "--log-every", 12, "--weight-format", "nvfp4:8x8", "--load", "out/step-12")
    assert resumed.stdout.splitlines()[-1] == straight.stdout.splitlines()[-1] and f"loss {losses[1]:.4f}" in resumed.stdout


@pytest.mark.parametrize("args, words", [
    (["--optimizer", "sgd"], "allowed are adamw8bit and adamw"),
    (["--text", "nowhere.txt"], "nowhere.txt: No such file"),
    (["--weight-format", "int8:1x32"], "is not exact in bf16"),
    (["--hidden", "66", "--heads", "4"], "multiple of twice --heads 4"),
])
def test_script_refuses_in_one_sentence(args, words, tmp_path):
    "In this process: nothing of Megatron is reached."
    from typer.testing import CliRunner
    spec = importlib.util.spec_from_file_location("megatron_gpt", ROOT / "scripts/megatron_gpt.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "text.txt").write_text("x" * 999)
    result = CliRunner().invoke(script.app, [*(["--text", str(tmp_path / "text.txt")] if "--text" not in args else []), *args])
    assert result.exit_code == 2 and words in result.output and len(result.output.strip().splitlines()) == 1
