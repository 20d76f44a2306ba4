"""hsmoe's formats beside torchao's: bit for bit where they coincide, and one named test for every place where they differ."""
import math, os, random
from importlib.metadata import version

import pytest
import torch

pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao with NVFP4Tensor is not installed: nothing to compare with")
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

from hsmoe.quant.formats import BlockFormat, dequantize, element_codes, qdq, quantize, round_to_element

T = 2.0**-8                                                              # the tensor scale of `nvfp4`
FLOOR, CEIL, RCEIL = ScaleCalculationMode.FLOOR, ScaleCalculationMode.CEIL, ScaleCalculationMode.RCEIL
MX = dict(mxfp8_e4m3=torch.float8_e4m3fn, mxfp8_e5m2=torch.float8_e5m2, mxfp4=torch.float4_e2m1fn_x2)
E4M3 = element_codes("e4m3")


@pytest.fixture
def generator():
    "A fresh seed each time, printed when a test fails; HSMOE_TEST_SEED repeats it."
    seed = int(os.environ.get("HSMOE_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HSMOE_TEST_SEED={seed}, torchao {version('torchao')}")
    return torch.Generator().manual_seed(seed)


def randn(*shape, generator, dtype=torch.float32): return torch.randn(*shape, generator=generator).to(dtype)

def torchao_nvfp4(x, tensor_scale=T):
    "Element codes, scale codes and values of torchao's NVFP4 with the same tensor scale."
    y = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=None if tensor_scale is None else torch.tensor(tensor_scale))
    return unpack_uint4(y.qdata), y.scale.view(torch.uint8), y.dequantize(torch.float32)

def torchao_mx(x, family, mode):
    "Element codes, scale codes and values of torchao's MX emulation."
    scales, q = to_mx(x, MX[family], 32, mode)
    codes = unpack_uint4(q) if family == "mxfp4" else q.view(torch.uint8)
    return codes, scales.view(torch.uint8), MXTensor.to_mx(x, MX[family], 32, mode).dequantize(torch.float32)

def row(*values, width=16):
    x = torch.zeros(1, width)
    x[0, :len(values)] = torch.tensor(values)
    return x


# ---- NVFP4 ---------------------------------------------------------------------------------------------------------------------------

def by_reciprocal(x, scale_codes, tensor_scale):
    "Our elements, had they been multiplied by torchao's reciprocal instead of divided by the step."
    reciprocal = (1.0 / torch.tensor(tensor_scale)) / E4M3[scale_codes.long()]
    return round_to_element(x.float() * reciprocal.repeat_interleave(16, -1), "e2m1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensor_scale", [1.0, T, 2.0**-11])
def test_nvfp4_agrees_in_every_scale_and_every_element_that_a_reciprocal_leaves_alone(dtype, tensor_scale, generator):
    sizes = torch.logspace(-1, 1, 512, base=2)[:, None] * 300 * tensor_scale                       # scales with all their mantissa bits
    x = (randn(512, 256, generator=generator) * sizes).to(dtype)
    fmt = BlockFormat.parse("nvfp4:1x16").with_tensor_scale(tensor_scale)
    codes, scales, values = torchao_nvfp4(x, tensor_scale)
    ours, our_scales = quantize(x, fmt)
    assert torch.equal(scales, our_scales)
    theirs = element_codes("e2m1")[codes.long()] + 0.0
    assert torch.equal(theirs, by_reciprocal(x, scales, tensor_scale))                              # nothing but the reciprocal is different
    moved = theirs != element_codes("e2m1")[ours.long()]
    assert moved.float().mean() < 0.01
    nonzero = ~moved & (theirs != 0)                                                                # zero: see the test of its sign
    assert torch.equal(codes[nonzero], ours[nonzero]) and (codes[theirs == 0] % 8 == 0).all()
    assert torch.equal((values + 0.0)[~moved], qdq(x.float(), fmt)[~moved])


def test_nvfp4_agrees_in_every_bit_where_the_steps_are_powers_of_two(generator):
    x = 0.3 + 5.6 * torch.rand(256, 16, generator=generator)                                        # at least 0.5 when rounded: the sign of zero is another test's
    x *= torch.randint(0, 2, (256, 16), generator=generator) * 2 - 1
    x[:, 0] = 6.0                                                                                   # the step of every block is a power of two, its reciprocal exact
    x *= 2.0 ** torch.randint(-4, 1, (256, 1), generator=generator)
    codes, scales, values = torchao_nvfp4(x)
    ours = quantize(x, "nvfp4")
    assert torch.equal(codes, ours[0]) and torch.equal(scales, ours[1]) and torch.equal(values, dequantize(*ours, "nvfp4")) and torch.equal(values, qdq(x, "nvfp4"))


def test_nvfp4_of_stacked_matrices_agrees(generator):
    x = 2.0 ** torch.randint(-2, 3, (3, 8, 64), generator=generator).float()
    codes, scales, values = torchao_nvfp4(x)
    ours = quantize(x, "nvfp4")
    assert torch.equal(scales, ours[1]) and torch.equal(codes, ours[0]) and torch.equal(values, qdq(x, "nvfp4"))


def test_nvfp4_saturates_alike_beyond_the_top_scale():
    x = row(50.0, 1.0, -30.0)
    assert torchao_nvfp4(x)[2][0, :3].tolist() == qdq(x, "nvfp4")[0, :3].tolist() == [10.5, 0.875, -10.5]


def test_nvfp4_with_a_nan_agrees_on_the_scale_and_the_values():
    x = row(math.nan, 1.0)
    codes, scales, values = torchao_nvfp4(x)
    assert scales.tolist() == quantize(x, "nvfp4")[1].tolist() == [[0x7F]]
    assert values.isnan().all() and qdq(x, "nvfp4").isnan().all()


def test_difference_torchao_multiplies_by_a_reciprocal():
    "Step 15/256, value 2.5 steps: a tie. We divide and round it to 2, the even code; times the rounded reciprocal it lands above the tie, at 3."
    step = 15 * T
    x = row(6 * step, 2.5 * step)
    assert qdq(x, "nvfp4")[0, 1].item() == 2 * step
    assert torchao_nvfp4(x)[2][0, 1].item() == 3 * step
    without = row(6 * 15.0, 2.5 * 15.0)                                                            # and without a tensor scale alike
    assert qdq(without, "nvfp4:1x16+ts0")[0, 1].item() == 30.0 and torchao_nvfp4(without, None)[2][0, 1].item() == 45.0


def test_difference_torchao_never_goes_below_a_scale_of_two_to_the_minus_six(generator):
    "Ours follows the block into the subnormal scales, so small blocks keep more of their values."
    x = randn(64, 16, generator=generator) * 2e-5
    codes, scales, values = torchao_nvfp4(x)
    ours = quantize(x, "nvfp4")[1]
    assert (E4M3[scales.long()] == 2.0**-6).all() and (E4M3[ours.long()] < 2.0**-6).all()
    error = lambda y: float((x - y).square().sum())
    assert error(qdq(x, "nvfp4")) < 0.5 * error(values)


def test_difference_an_empty_block_has_scale_zero_here_and_two_to_the_minus_six_there():
    codes, scales, values = torchao_nvfp4(row())
    assert E4M3[scales.long()].tolist() == [[2.0**-6]] and E4M3[quantize(row(), "nvfp4")[1].long()].tolist() == [[0.0]]
    assert not values.any() and not qdq(row(), "nvfp4").any()


def test_difference_zero_keeps_its_sign_there_and_is_plus_zero_here():
    x = row(1.0, -0.0, -1e-3)
    codes, ours = torchao_nvfp4(x)[0], quantize(x, "nvfp4")[0]
    assert codes[0, 1:3].tolist() == [8, 8] and ours[0, 1:3].tolist() == [0, 0]
    assert torch.equal(torchao_nvfp4(x)[2], qdq(x, "nvfp4"))                                        # -0 == 0
    assert torch.signbit(torchao_nvfp4(x)[2][0, 1:3]).all() and not torch.signbit(qdq(x, "nvfp4")).any()


def test_difference_an_infinity_is_clipped_there_and_breaks_its_block_here():
    x = row(math.inf, 1.0)
    assert torchao_nvfp4(x)[2][0, :2].tolist() == [10.5, 0.875]
    assert qdq(x, "nvfp4").isnan().all()


def test_difference_torchao_takes_no_ragged_rows_no_views_and_no_float16():
    for x in (torch.ones(2, 20), torch.ones(32, 16).T, torch.ones(2, 16, dtype=torch.float16)):
        with pytest.raises(AssertionError): torchao_nvfp4(x)
        assert qdq(x, "nvfp4").shape == x.shape


# ---- MX ------------------------------------------------------------------------------------------------------------------------------

def wide(generator, dtype, mode):
    "Values of all sizes. For RCEIL with 12 significant bits, so that its float32 logarithm can see every one of them: what happens closer to a power of two is another test's."
    x = randn(256, 256, generator=generator) * 2.0 ** torch.linspace(-80, 80, 256)[:, None]
    if mode == RCEIL: x = (x.view(torch.int32) & ~0xFFF).view(torch.float32)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode, suffix", [(FLOOR, ""), (RCEIL, "+ceil")])
@pytest.mark.parametrize("family", MX)
def test_mx_agrees_in_every_bit(family, mode, suffix, dtype, generator):
    "FLOOR is our default rule, RCEIL our `ceil`: scales, codes (but for the sign of zero) and values."
    name, x = f"{family}:1x32{suffix}", wide(generator, dtype, mode)
    codes, scales, values = torchao_mx(x, family, mode)
    ours, our_scales = quantize(x, name)
    zero = round_to_element((x.float() / element_codes("e8m0")[scales.long()].repeat_interleave(32, -1)), BlockFormat.parse(name).element) == 0
    assert torch.equal(scales, our_scales)
    assert torch.equal(codes[~zero], ours[~zero]) and not ours[zero].any()
    assert torch.equal(values, qdq(x.float(), name)) and torch.equal(values, dequantize(ours, our_scales, name))


@pytest.mark.parametrize("mode, suffix", [(FLOOR, ""), (RCEIL, "+ceil")])
def test_mx_agrees_on_ties_and_on_both_sides_of_every_binade(mode, suffix, generator):
    "Maxima at 448·2^k and 2^k and beside them (for RCEIL at a distance that its logarithm can see), elements on the midpoints of E4M3."
    edges = torch.tensor([v for k in range(-20, 20) for v in (448.0 * 2.0**k, 2.0**k)])
    gap = 2.0**-23 if mode == FLOOR else 2.0**-16
    edges = torch.cat([edges, edges * (1 - gap), edges * (1 + gap)])
    book = E4M3[:127].double()
    middle = ((book[:-1] + book[1:]) / 2 / 448)[torch.randperm(126, generator=generator)[:31]]
    x = torch.cat([edges[:, None], (2.0 ** edges.log2().floor())[:, None] * middle.float()], 1)
    codes, scales, values = torchao_mx(x, "mxfp8_e4m3", mode)
    ours = quantize(x, "mxfp8_e4m3:1x32" + suffix)
    assert torch.equal(scales, ours[1]) and torch.equal(codes, ours[0]) and torch.equal(values, qdq(x, "mxfp8_e4m3:1x32" + suffix))


def test_difference_ceil_there_rounds_the_maximum_up_before_it_subtracts_the_element_exponent():
    "A maximum of 300 fits under 448·1: our ceil takes 1, as RCEIL does. CEIL takes 2^(⌈log2 300⌉ - 8) = 2. At 500 all take 2, at 256 all take 1."
    for amax, ours, ceil in ((300.0, 1.0, 2.0), (500.0, 2.0, 2.0), (256.0, 1.0, 1.0)):
        x = row(amax, width=32)
        value = lambda codes: element_codes("e8m0")[codes.long()].item()
        assert value(quantize(x, "mxfp8_e4m3:1x32+ceil")[1]) == value(torchao_mx(x, "mxfp8_e4m3", RCEIL)[1]) == ours
        assert value(torchao_mx(x, "mxfp8_e4m3", CEIL)[1]) == ceil


def test_difference_rceil_there_takes_a_logarithm_and_can_cut_the_maximum():
    "Just above 448·2^60 the scale must be 2^61. A float32 logarithm says 60 exactly, and the maximum saturates."
    amax = torch.nextafter(torch.tensor(448.0 * 2.0**60), torch.tensor(math.inf)).item()
    x = row(amax, width=32)
    ours, theirs = quantize(x, "mxfp8_e4m3:1x32+ceil")[1].item(), torchao_mx(x, "mxfp8_e4m3", RCEIL)[1].item()
    assert (ours, theirs) == (127 + 61, 127 + 60)
    assert amax > 448 * element_codes("e8m0")[theirs] and amax <= 448 * element_codes("e8m0")[ours]


def test_difference_e8m0_code_zero_is_never_written_here():
    "An empty block has 2^-126 here and 2^-127 there; a tiny one keeps its values here, and comes back halved or as zero there."
    for mode, suffix in ((FLOOR, ""), (RCEIL, "+ceil")):
        name = "mxfp8_e4m3:1x32" + suffix
        assert torchao_mx(row(width=32), "mxfp8_e4m3", mode)[1].item() == 0 and quantize(row(width=32), name)[1].item() == 1
        tiny = row(2.0**-120, width=32)
        assert qdq(tiny, name)[0, 0].item() == 2.0**-120
        assert torchao_mx(tiny, "mxfp8_e4m3", mode)[2][0, 0].item() == (2.0**-121 if mode == FLOOR else 0.0)


@pytest.mark.parametrize("mode, suffix", [(FLOOR, ""), (RCEIL, "+ceil")])
def test_difference_an_infinity_stays_one_infinity_there_and_breaks_its_block_here(mode, suffix):
    x = row(math.inf, 1.0, width=32)
    values = torchao_mx(x, "mxfp8_e4m3", mode)[2]
    assert values[0, 0].item() == math.inf and values[0, 1].item() == 0.0
    assert qdq(x, "mxfp8_e4m3:1x32" + suffix).isnan().all() and quantize(x, "mxfp8_e4m3:1x32" + suffix)[1].item() == 255


@pytest.mark.parametrize("mode, suffix", [(FLOOR, ""), (RCEIL, "+ceil")])
def test_mx_with_a_nan_agrees_on_the_scale_and_the_values(mode, suffix):
    x = row(math.nan, 1.0, width=32)
    codes, scales, values = torchao_mx(x, "mxfp8_e4m3", mode)
    ours = quantize(x, "mxfp8_e4m3:1x32" + suffix)
    assert scales.item() == ours[1].item() == 255 and values.isnan().all() and dequantize(*ours, "mxfp8_e4m3:1x32" + suffix).isnan().all()
