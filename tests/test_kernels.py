"""Triton QDQ against the reference, bit for bit: in Triton's interpreter everywhere, and on a GPU where there is one."""
import json, os, subprocess, sys
from pathlib import Path

import pytest
import torch

from hsmoe.backends import BackendError
from hsmoe.quant.formats import ELEMENTS, BlockFormat, qdq as reference, scale_for
from hsmoe.quant.kernels import QDQ, kernel_format, qdq, triton, triton_qdq

FORMATS = ["nvfp4:1x16", "nvfp4:8x8", "nvfp4:16x16", "nvfp4:1x32", "nvfp4:16x8", "e1m2:8x8", "e1m3:8x8", "ue1m3:1x16", "mxfp4:1x32", "mxfp8_e4m3:1x32", "mxfp8_e4m3:1x32+ceil",
           "mxfp8_e5m2:1x32", "mxfp8_e5m2:1x32+ceil", "ue5m3:1x32", "e5m3:1x32", "e5m3-ue5m3:8x8", "int8:1x32", "nvfp4:1x16+ts-90", "nvfp4:8x8+ts-12", "nvfp4:1x16+clip0.01~0.5",
           "mxfp8_e4m3:1x32+ceil+ts-20"]                                         # steps whose reciprocal is no float32
SHAPES = [(2, 24, 64), (17, 48), (2, 9, 20), (37,), (1, 5), (1, 1)]      # even, and ending within a block in either direction

def values(shape, dtype, subnormal: bool):
    "Random numbers over many octaves, with whole blocks of zeros, single NaN and infinities, ties, and huge and tiny values."
    x = torch.randn(shape) * torch.randn(shape).mul(3).exp()
    flat = x.view(-1)
    flat[::7] = flat[::7].sign() * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[torch.randint(7, flat[::7].shape)] * 1.875     # ties of a block whose scale is 1.875
    kind = torch.randint(0, 40, (max(1, x.numel() // 16),))
    for i, k in enumerate(kind.tolist()):
        at = flat[16 * i:16 * i + 16]
        if k == 0: at[len(at) // 2] = torch.nan
        elif k == 1: at[0] = -torch.inf
        elif k in (2, 3): at.zero_()
        elif k == 4: at.mul_(1e-42 if subnormal else 1e-30)
        elif k == 5: at.mul_(1e36)
    return x.to(dtype)

def differing(name, dtype, device, subnormal) -> list:
    "Shapes and modes for which the kernel and the reference on the CPU differ."
    fmt, bad = BlockFormat.parse(name), []
    for shape in SHAPES:
        for fixed in (None, scale_for(1.0, fmt)) if device == "cuda" or shape in SHAPES[:2] else (None,):     # two shapes reach both kernels; the interpreter is slow
            x = values(shape, dtype, subnormal)
            want = reference(x, fmt, fixed)
            poisoned = torch.full(shape, -77.0, dtype=dtype, device=device)
            got = triton_qdq(x.to(device), fmt, fixed, out=poisoned)
            assert got is poisoned
            got = got.cpu()
            if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.nan_to_num(0.5, 1e30, -1e30), want.nan_to_num(0.5, 1e30, -1e30)): bad.append([list(shape), fixed])
    return bad

def interpreted(seed):
    "Run by a process of its own, with TRITON_INTERPRET=1: `{case: differing}`. bfloat16 without subnormals, which the interpreter flushes, and for formats that are exact in it, as the interpreter truncates."
    torch.manual_seed(seed)
    cases = [(f, torch.bfloat16, False) for f in FORMATS if BlockFormat.parse(f).is_exact_in(torch.bfloat16)] + [(f, torch.float32, True) for f in FORMATS[::2]] + [(f, torch.float16, True) for f in FORMATS[1::4]]
    return {f"{name} {dtype}": differing(name, dtype, "cpu", sub) for name, dtype, sub in cases}

@pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs Triton; where there is a GPU the tests below run there")
def test_the_interpreter_agrees_with_the_reference():
    seed = torch.seed() % 2**31
    root = str(Path(__file__).resolve().parents[1])
    run = subprocess.run([sys.executable, "-W", "ignore", __file__, str(seed)], capture_output=True, text=True,
                         env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])})
    assert run.returncode == 0, run.stderr[-3000:]
    assert {case: bad for case, bad in json.loads(run.stdout).items() if bad} == {}, f"seed {seed}"

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", FORMATS)
def test_the_gpu_agrees_with_the_reference(name):
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert differing(name, dtype, "cuda", True) == [], f"seed {seed}"

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_at_sizes_of_the_model():
    for name in FORMATS[:8]:
        x = torch.randn(64, 848, 1536, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(triton_qdq(x, name), reference(x, name))
    assert QDQ.choose("cuda") == "triton"

def test_a_cpu_has_the_reference_and_says_why():
    assert QDQ.choose("cpu") == "reference"
    with pytest.raises(BackendError, match="backends.qdq = 'triton' cannot be used on cpu: Triton kernels need a GPU|the package triton"): QDQ.choose("cpu", "triton")
    with pytest.raises(BackendError, match="allowed are auto, reference, triton"): QDQ.choose("cpu", "cuda")
    with pytest.raises(TypeError, match="floating-point"): qdq(torch.arange(16), "nvfp4")

def test_views_and_out():
    x, fmt = torch.randn(24, 40), "nvfp4:8x8"
    for view in (x.t(), x[::2, 3:27], x[:1].expand(16, 40)): assert torch.equal(qdq(view, fmt), reference(view.contiguous(), fmt))
    out = torch.zeros(40, 24, dtype=torch.bfloat16).t()
    assert qdq(x, fmt, out=out) is out and torch.equal(out, reference(x, fmt).bfloat16())

def test_every_element_has_constants():
    for element in ELEMENTS:
        for scale in ("e4m3", "ue5m3", "e8m0", "fp32"): assert kernel_format(BlockFormat(element, (1, 16), scale)).max == ELEMENTS[element].max
    assert all(kernel_format(f) is None for f in ("nvfp4:1x24", "nvfp4:128x128", "nvfp4:1x16+4/6"))       # those the reference keeps

if __name__ == "__main__": print(json.dumps(interpreted(int(sys.argv[1]))))
