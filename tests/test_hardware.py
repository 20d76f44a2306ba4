"""The block-scaled product: scale layout, arguments, reference, capability checks; and the formats as Transformer Engine quantisers.

No Blackwell GPU and no Transformer Engine here: PyTorch's own checks on the meta device, an emulation that reads the bytes handed over, and
torchao's layout stand in for the card."""
import os, random, subprocess, sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hsmoe.backends import BackendError, choose_backends
from hsmoe.quant.fake import QuantPolicy, make_policy, policy_5b, policy_off
from hsmoe.quant.formats import qdq
from hsmoe.quant.hardware import (block_gemm, block_gemm_hardware, block_gemm_reference, block_quantizer, check_block_gemm, emulate_scaled_mm,
                                  gemm_arguments, lacks, operand, swizzle_scales, te_format, te_quantizer_factory, te_quantizers, unswizzle_scales)
from hsmoe.quant.pack import pack

from conftest import ROOT

SIZES = [(128, 4), (1, 1), (127, 5), (129, 4), (384, 12), (200, 53), (256, 1)]


@pytest.fixture(autouse=True)
def seeded():
    "A fresh seed each time, printed when a test fails; HSMOE_TEST_SEED repeats it."
    seed = int(os.environ.get("HSMOE_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HSMOE_TEST_SEED={seed}")
    torch.manual_seed(seed)


# ---- the layout of scales ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows, blocks", SIZES)
def test_scales_lie_where_the_formula_says(rows, blocks):
    scales = torch.randint(1, 256, (rows, blocks), dtype=torch.uint8)
    want = bytearray(-(-rows // 128) * -(-blocks // 4) * 512)
    for i, row in enumerate(scales.tolist()):
        for j, s in enumerate(row):
            tile = (i // 128) * -(-blocks // 4) + j // 4
            want[512 * tile + 16 * (i % 32) + 4 * (i // 32 % 4) + j % 4] = s
    flat = swizzle_scales(scales)
    assert bytes(flat.tolist()) == bytes(want)
    assert torch.equal(unswizzle_scales(flat, rows, blocks), scales)


@pytest.mark.parametrize("rows, blocks", SIZES)
def test_the_layout_is_torchaos(rows, blocks):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    assert torch.equal(swizzle_scales(scales), utils.to_blocked(scales))
    assert torch.equal(unswizzle_scales(utils.to_blocked(scales), rows, blocks), utils.from_blocked(utils.to_blocked(scales), rows, blocks))


def test_torchao_reads_an_operand():
    "codes and swizzled scales of an operand, as torchao's NVFP4Tensor with swizzled scales."
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(130, 96) * torch.logspace(-2, 1, 96)
    op = operand(pack(x, "nvfp4:16x16"))
    scales = op.scales.view(torch.float8_e4m3fn).view(64, 32)                # 2 tile rows of 32, 2 tile columns of 16
    t = nvfp4.NVFP4Tensor(op.codes, scales, 16, torch.float32, torch.tensor(op.fmt.tensor_scale), is_swizzled_scales=True)
    assert torch.equal(t.dequantize(torch.float32), qdq(x, "nvfp4:16x16"))


# ---- the call ------------------------------------------------------------------------------------------------------------------------------

PAIRS = [("nvfp4:1x16", "nvfp4:1x16"), ("nvfp4:1x16", "nvfp4:16x16"), ("nvfp4:1x16+ts-4", "nvfp4:16x32+ts-2"), ("mxfp8_e4m3:1x32", "mxfp8_e4m3:1x32+ceil")]


def meta(value):
    if isinstance(value, torch.Tensor): return value.to("meta")
    return [meta(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("xfmt, wfmt", PAIRS)
@pytest.mark.parametrize("m, n, k", [(1, 16, 32), (7, 40, 848), (130, 128, 256), (300, 17, 80)])
def test_pytorch_accepts_the_arguments(xfmt, wfmt, m, n, k):
    args = gemm_arguments(operand(pack(torch.randn(m, k), xfmt)), operand(pack(torch.randn(n, k), wfmt), 16), torch.float32)
    out = F.scaled_mm(**{name: meta(v) for name, v in args.items()})
    assert (tuple(out.shape), out.dtype) == ((m, -(-n // 16) * 16), torch.float32)
    nvfp4 = xfmt.startswith("nvfp4")
    dtype, columns = (torch.float4_e2m1fn_x2, -(-k // 32) * 16) if nvfp4 else (torch.float8_e4m3fn, -(-k // 32) * 32)
    assert (args["mat_a"].dtype, tuple(args["mat_a"].shape), args["mat_a"].stride()) == (dtype, (m, columns), (columns, 1))
    assert (args["mat_b"].dtype, tuple(args["mat_b"].shape), args["mat_b"].stride()) == (dtype, (columns, -(-n // 16) * 16), (1, columns))
    for side, fmt in (("scale_a", xfmt), ("scale_b", wfmt)):
        blocks, *tensor_scale = args[side]
        assert blocks.dtype == (torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu) and blocks.is_contiguous() and blocks.dim() == 1
        assert [float(t) for t in tensor_scale] == ([pack(torch.ones(1, 16), fmt).fmt.tensor_scale] if nvfp4 else [])
        for short in ([blocks[1:], *tensor_scale], [blocks.view(torch.uint8), *tensor_scale]):
            with pytest.raises((RuntimeError, ValueError)): F.scaled_mm(**{name: meta(v) for name, v in (args | {side: short}).items()})


def emulated(x, w, fmt, dtype=torch.bfloat16): return block_gemm_hardware(x, w, fmt, dtype, emulate_scaled_mm)


@pytest.mark.parametrize("xfmt, wfmt", PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bytes_handed_over_multiply_to_the_reference(xfmt, wfmt, dtype):
    x = torch.randn(2, 65, 128, dtype=torch.bfloat16) * torch.logspace(-2, 1, 128).bfloat16()
    w = pack(torch.randn(64, 128) * 0.02, wfmt)
    y = emulated(x, w, xfmt, dtype)
    assert (y.shape, y.dtype) == ((2, 65, 64), dtype) and torch.equal(y, block_gemm_reference(x, w, xfmt, dtype))


@pytest.mark.parametrize("fmt", ["nvfp4:1x16", "mxfp8_e4m3:1x32"])
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (3, 5, 17), (33, 40, 848), (129, 31, 48)])
def test_padding_adds_nothing(fmt, m, n, k):
    "Integers that are E2M1 codes; their sums are exact in float32, so that the order of summation cannot matter."
    grid = torch.tensor([-6.0, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6])
    x, w = (grid[torch.randint(len(grid), (rows, k))] for rows in (m, n))
    x[:, ::16] = w[:, ::16] = 6.0                                            # scales are powers of two
    y = emulated(x, pack(w, fmt), fmt, torch.float32)
    assert torch.equal(y, block_gemm_reference(x, pack(w, fmt), fmt, torch.float32)) and torch.equal(y, x @ w.T)


def test_nan_stays_in_its_row():
    x = torch.randn(4, 64); x[2, 5] = float("nan")
    w = pack(torch.randn(16, 64), "nvfp4:16x16")
    for run in (block_gemm_reference, emulated):
        y = run(x, w, "nvfp4:1x16")
        assert y[2].isnan().all() and not y[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("x, w, message", [("nvfp4:1x16", "nvfp4:8x8", "two scales"), ("nvfp4:1x16", "mxfp8_e4m3:1x32", "one element and scale"), ("e1m3:1x16", "e1m3:1x16", "take nvfp4"),
                                           ("nvfp4:16x16", "nvfp4:16x16", "one row"), ("mxfp8_e5m2:1x32", "mxfp8_e5m2:1x32", "take nvfp4"), ("mxfp4:1x32", "mxfp4:1x32", "take nvfp4")])
def test_reference_and_hardware_refuse_the_same_formats(x, w, message):
    for run in (block_gemm_reference, emulated):
        with pytest.raises(ValueError, match=message): run(torch.randn(16, 64), pack(torch.randn(16, 64), w), x)


# ---- which backend ---------------------------------------------------------------------------------------------------------------------------

def test_the_reference_is_close_to_the_plain_product():
    x, w = torch.randn(32, 256), torch.randn(64, 256)
    error = lambda fmt: float((block_gemm_reference(x, pack(w, fmt), fmt).float() - x @ w.T).std() / (x @ w.T).std())
    assert error("mxfp8_e4m3:1x32") < 0.05 < error("nvfp4:1x16") < 0.2


def test_capability():
    assert "10.0" in lacks(None, None) and "9.0" in lacks((9, 0), "12.9") and "12.8" in lacks((10, 0), "12.6")
    assert lacks((10, 0), "12.8") is None and lacks((12, 0), "13.0") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_reference_runs():
    assert choose_backends("cpu", dict(block_gemm="auto"))["block_gemm"] == "reference"
    with pytest.raises(BackendError, match="block_gemm = 'hw' cannot be used on cpu: it needs an NVIDIA GPU of compute capability 10.0"): block_gemm.choose("cpu", "hw")
    x, w = torch.randn(4, 64), pack(torch.randn(32, 64), "nvfp4:16x16")
    assert torch.equal(block_gemm(x, w, "nvfp4:1x16"), block_gemm_reference(x, w))


def test_the_check_accepts_rounding_and_finds_mistakes():
    cpu = torch.device("cpu")
    assert check_block_gemm(emulated, cpu) is None
    assert check_block_gemm(lambda x, w, fmt: block_gemm_reference(x, w, fmt, torch.float32).bfloat16(), cpu) is None
    def changed(side, change):
        def multiply(**args): return emulate_scaled_mm(**(args | {side: change(args[side])}))
        return lambda x, w, fmt: block_gemm_hardware(x, w, fmt, multiply=multiply)
    shifted = lambda scales: [scales[0].view(torch.uint8).roll(1).view(scales[0].dtype), *scales[1:]]
    nibbles = lambda mat: ((mat.view(torch.uint8) << 4) | (mat.view(torch.uint8) >> 4)).view(mat.dtype)
    larger = lambda scales: [scales[0], *[s * 1.03 for s in scales[1:]]]
    for side, change in [("scale_a", shifted), ("scale_b", shifted), ("mat_a", nibbles), ("scale_b", larger)]:
        assert "the reference has" in check_block_gemm(changed(side, change), cpu)
    assert "nan" in check_block_gemm(lambda x, w, fmt: block_gemm_reference(x, w, fmt) * float("nan"), cpu)


# ---- Transformer Engine and Megatron Core ------------------------------------------------------------------------------------------------------

def role(module_type="", tensor_type="", name=""): return SimpleNamespace(module_type=module_type, tensor_type=tensor_type, name=name)


@pytest.mark.parametrize("slot, want", [
    (role("grouped_linear", "weight"), "nvfp4:8x8"), (role("grouped_linear", "weight", "mlp.experts.fc2"), "nvfp4:8x8"),
    (role("linear", "weight", "decoder.layers.7.self_attention.proj"), "nvfp4:8x8"), (role("linear", "input", "a.proj"), "mxfp8_e4m3:1x32+ceil"),
    (role("linear", "weight", "mlp.fc1"), "nvfp4:8x8"), (role("linear", "weight", "qkv"), None), (role("linear", "weight"), None),
    (role("linear", "grad_output", "a.proj"), None), (role("linear", "output", "a.proj"), None), (role("dpa", "qkv"), None), (role(), None), (None, None)])
def test_roles_get_the_policys_formats(slot, want):
    assert te_format(slot, policy_5b()) == want
    assert te_format(slot, policy_off()) is None


def test_a_policy_of_ones_own():
    policy = QuantPolicy({"layers.*.moe.routed.w_out": "e1m3:8x8"}, dict(ffn_hidden="nvfp4:1x16", ffn_in="mxfp8_e4m3:1x32"))
    assert [te_format(role("grouped_linear", kind, name), policy) for name in ("fc1", "fc2") for kind in ("weight", "input")] == [None, "mxfp8_e4m3:1x32", "e1m3:8x8", "nvfp4:1x16"]


def test_without_transformer_engine_one_sentence_says_so():
    try: import transformer_engine                                           # noqa: F401
    except ImportError: pass
    else: pytest.skip("Transformer Engine is installed")
    for factory in (te_quantizers, te_quantizer_factory(make_policy("e1m3:8x8"))):
        with pytest.raises(BackendError, match="IdentityQuantizer .*; none is installed$") as e: factory(role("linear", "weight", "proj"))
        assert "\n" not in str(e.value)


def test_the_quantiser_rounds_and_then_does_what_its_base_does():
    class Base:                                                              # the interface of IdentityQuantizer, Transformer Engine 2.20
        def __init__(self, *, dtype=None, rowwise=True, columnwise=True):
            self.dtype, self.rowwise_usage, self.columnwise_usage, self.internal, self.optimize_for_gemm = dtype, rowwise, columnwise, False, False
        def quantize_impl(self, tensor): return ("kept", tensor)
        def update_quantized(self, src, dst, *, noop_flag=None): return dst.copy_(torch.where(noop_flag == 0, src, dst))
    quantizer = block_quantizer(Base)("e1m3:8x8", rowwise=False)
    assert isinstance(quantizer, Base) and block_quantizer(Base) is block_quantizer(Base)
    x = torch.randn(24, 40, dtype=torch.bfloat16, requires_grad=True)
    kind, y = quantizer.quantize_impl(x)
    assert kind == "kept" and torch.equal(y, qdq(x, "e1m3:8x8")) and not y.requires_grad
    old = torch.zeros(24, 40, dtype=torch.bfloat16)
    assert not quantizer.update_quantized(x, old, noop_flag=torch.ones(1)).any()
    assert torch.equal(quantizer.update_quantized(x, old, noop_flag=torch.zeros(1)), y)
    quantizer.internal = True
    twin = quantizer.copy()
    assert (type(twin), twin.fmt, twin.rowwise_usage, twin.internal) == (type(quantizer), quantizer.fmt, False, True)


def test_megatron_finds_the_factory_by_its_path():
    fp8_utils = pytest.importorskip("megatron.core.fp8_utils")
    assert fp8_utils._resolve_callable_from_python_import_path("hsmoe.quant.hardware.te_quantizers") is te_quantizers
    from megatron.core.transformer.transformer_config import TransformerConfig
    sizes = dict(num_layers=1, hidden_size=64, num_attention_heads=2)
    for kind in (dict(fp8="e4m3", fp8_recipe="custom"), dict(fp4="e2m1", fp4_recipe="custom")):
        bits = next(iter(kind))
        with pytest.raises(ValueError, match=f"{bits}_quantizer_factory must be provided"): TransformerConfig(**sizes, **kind)
        path = {f"{bits}_quantizer_factory": "hsmoe.quant.hardware.te_quantizers"}
        assert getattr(TransformerConfig(**sizes, **kind, **path), f"{bits}_quantizer_factory") == "hsmoe.quant.hardware.te_quantizers"


def test_importing_pulls_in_no_optional_package():
    code = "import sys, hsmoe.quant.hardware as h; print(sorted({'torchao', 'transformer_engine', 'compressed_tensors', 'megatron'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
