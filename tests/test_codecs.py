"""Every element and scale format over all its codes, and qdq against an independent implementation in numpy.

The sources of truth here are ml_dtypes, PyTorch's own types and tables written from the definitions; no value comes from hsmoe."""
import math, os, random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from hsmoe.quant.formats import (ELEMENTS, FORMATS, SCALES, BlockFormat, dequantize, element_codes, qdq, quantize, round_to_element,
                                 round_to_scale, scale_for, scale_stats)


@pytest.fixture
def rng():
    "A fresh seed each time, printed when a test fails; HSMOE_TEST_SEED repeats it."
    seed = int(os.environ.get("HSMOE_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HSMOE_TEST_SEED={seed}")
    return np.random.default_rng(seed)


# ---- the code books, from elsewhere -------------------------------------------------------------------------------------------------

def from_ml_dtypes(dtype, bits): return [float(v) for v in np.arange(2**bits, dtype=np.uint8).view(dtype).astype(np.float32)]

def minus(positive): return positive + [-v for v in positive]

# E1M2 and E1M3 have one exponent bit: code M stands for M/4·2 or M/8·2 (subnormal), then (1 + M/4)·2 or (1 + M/8)·2
E1M2 = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
E1M3 = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75]
# E5M3, bias 15: M·2^-17 below 2^-14, then (8 + M)·2^(E-18); the last code is NaN
UE5M3 = [m * 2.0**-17 for m in range(8)] + [(8 + m) * 2.0 ** (e - 18) for e in range(1, 32) for m in range(8)][:-1] + [math.nan]
TABLES = dict(e2m1=from_ml_dtypes(ml_dtypes.float4_e2m1fn, 4), e1m2=minus(E1M2), e1m3=minus(E1M3), ue1m3=E1M3,
              e4m3=from_ml_dtypes(ml_dtypes.float8_e4m3fn, 8), e5m2=from_ml_dtypes(ml_dtypes.float8_e5m2, 8),
              e5m3=minus(UE5M3), ue5m3=UE5M3, int8=[float(v) for v in range(128)] + [float(v) for v in range(-128, 0)])
E8M0 = from_ml_dtypes(ml_dtypes.float8_e8m0fnu, 8)
TORCH = dict(e4m3=torch.float8_e4m3fn, e5m2=torch.float8_e5m2, int8=torch.int8)

# what a value may be rounded to: finite values in code order, for int8 without -128
def grid(name):
    codes = [v for v in TABLES[name] if math.isfinite(v) and math.copysign(1, v) > 0]
    return np.array(codes, dtype=np.float64)


def test_the_tables_cover_every_element():
    assert set(TABLES) == set(ELEMENTS) and set(SCALES) == {"e4m3", "ue5m3", "e8m0", "fp32"}
    # anchors of the hand-written book, each worked out from the definition
    assert [UE5M3[c] for c in (0x01, 0x07, 0x08, 0x78, 0x79, 0xFE)] == [2**-17, 7 * 2**-17, 2**-14, 1.0, 1.125, 114688.0]
    # dropping E5M3's last mantissa bit leaves E5M2, as far as that one is finite
    assert [v for v in UE5M3[::2]][:124] == TABLES["e5m2"][:124]


@pytest.mark.parametrize("name", [*TABLES, "e8m0"])
def test_every_code_has_the_value_of_an_independent_source(name):
    ours, theirs = element_codes(name).numpy(), np.array(E8M0 if name == "e8m0" else TABLES[name], dtype=np.float32)
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours, theirs)                        # NaN where NaN
    np.testing.assert_array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(theirs)]))
    if name in TORCH:
        codes = torch.arange(256, dtype=torch.uint8).view(TORCH[name]).float()
        np.testing.assert_array_equal(ours, codes.numpy())
    if name == "e8m0" and hasattr(torch, "float8_e8m0fnu"):
        np.testing.assert_array_equal(ours, torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float().numpy())


def test_the_largest_values_and_sizes_are_those_of_the_definitions():
    want = dict(e2m1=(4, 6), e1m2=(4, 3.5), e1m3=(5, 3.75), ue1m3=(4, 3.75), e4m3=(8, 448), e5m2=(8, 57344), e5m3=(9, 114688), ue5m3=(8, 114688), int8=(8, 127))
    assert {k: (b.bits, b.max) for k, b in ELEMENTS.items()} == want
    assert float(ml_dtypes.finfo(ml_dtypes.float4_e2m1fn).max) == 6 and float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max) == 448


# ---- rounding ------------------------------------------------------------------------------------------------------------------------

def nearest(x, book):
    "x (float32 or float64) to the nearest of `book` (magnitudes in code order), ties to the even code, saturating."
    v, sign = np.abs(x.astype(np.float64)), np.where(x < 0, -1.0, 1.0)
    high = np.clip(np.searchsorted(book, v), 1, len(book) - 1)
    low = high - 1
    below, above = v - book[low], book[high] - v
    up = (above < below) | ((above == below) & (high % 2 == 0))
    return np.where(np.isnan(x), np.nan, sign * np.where(up, book[high], book[low]) + 0.0).astype(np.float32)

def rounded(x, name):
    "round_to_element as numpy, from numpy."
    return round_to_element(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)), name).numpy()

def oracle(x, name):
    y = nearest(x, grid(name))
    return np.where(np.isnan(x), np.nan, np.maximum(y, 0.0)) if name.startswith("u") else y


@pytest.mark.parametrize("name", TABLES)
def test_every_midpoint_and_its_two_float32_neighbours(name):
    book = grid(name)
    middle = ((book[:-1] + book[1:]) / 2).astype(np.float32)
    assert (middle.astype(np.float64) == (book[:-1] + book[1:]) / 2).all()                         # float32 holds every midpoint
    even = np.where(np.arange(len(middle)) % 2 == 0, book[:-1], book[1:])
    for sign in (1, -1) if ELEMENTS[name].signed else (1,):
        np.testing.assert_array_equal(rounded(sign * middle, name), sign * even)
        np.testing.assert_array_equal(rounded(sign * np.nextafter(middle, np.float32(0)), name), sign * book[:-1])
        np.testing.assert_array_equal(rounded(sign * np.nextafter(middle, np.float32(np.inf)), name), sign * book[1:])
        np.testing.assert_array_equal(rounded(sign * book, name), sign * book)                     # a code stays


@pytest.mark.parametrize("name", TABLES)
def test_random_float32_patterns_round_to_nearest_even(name, rng):
    patterns = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    book = ELEMENTS[name]
    around = (rng.standard_normal(200_000) * book.max / 3).astype(np.float32)
    subnormal = (rng.uniform(-4, 4, 50_000) * 2.0 ** (book.emin - book.mantissa_bits)).astype(np.float32)
    x = np.concatenate([patterns[~np.isnan(patterns)], around, subnormal, np.float32([0, -0.0, np.inf, -np.inf, np.nan, 2**-149, -(2**-149), 3.4028235e38])])
    y = rounded(x, name)
    np.testing.assert_array_equal(y, oracle(x, name))
    assert not np.signbit(y[y == 0]).any()                                                         # zero is always +0


@pytest.mark.parametrize("name, dtype", [("e2m1", ml_dtypes.float4_e2m1fn), ("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_rounding_agrees_with_ml_dtypes_casts(name, dtype, rng):
    x = (rng.standard_normal(300_000) * ELEMENTS[name].max / 4).astype(np.float32)
    x = np.concatenate([x, x * 2.0**-12, x * 2.0**-20])
    x = x[np.abs(x) <= ELEMENTS[name].max]                                                         # past the end theirs is NaN or infinity, ours saturates
    np.testing.assert_array_equal(rounded(x, name), x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", TABLES)
def test_saturation_and_the_policy_for_nan_and_infinity(name):
    book = ELEMENTS[name]
    low = -book.max if book.signed else 0.0
    above = [np.nextafter(np.float32(book.max), np.float32(np.inf)), book.max * 1.01, 1e30, np.inf]
    assert (rounded(np.float32(above), name) == book.max).all() and (rounded(-np.float32(above), name) == low).all()
    assert np.isnan(rounded(np.float32([np.nan, -np.nan]), name)).all()


# ---- scales --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scale, dtype", [("e4m3", ml_dtypes.float8_e4m3fn), ("ue5m3", None)])
def test_float_scales_round_to_nearest_even_and_saturate(scale, dtype, rng):
    x = np.abs(rng.standard_normal(100_000) * np.exp(rng.uniform(-20, 12, 100_000))).astype(np.float32)
    book = grid(scale)
    middle = ((book[:-1] + book[1:]) / 2).astype(np.float32)
    x = np.concatenate([x, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)), np.float32([0, 1e30, np.inf])])
    y = round_to_scale(torch.from_numpy(x), scale).numpy()
    np.testing.assert_array_equal(y, nearest(x, book))
    if dtype: np.testing.assert_array_equal(y[x <= book[-1]], x[x <= book[-1]].astype(dtype).astype(np.float32))


def power_of_two(amax, element_max, rounding):
    "The E8M0 scale by exact arithmetic: 2^(⌊log2 a⌋ - ⌊log2 m⌋), or the smallest power of two that is at least a/m; within [2^-126, 2^127]."
    amax, element_max = Fraction(amax), Fraction(element_max)
    if rounding == "floor":
        exponent = lambda v: math.frexp(float(v))[1] - 1
        k = exponent(amax) - exponent(element_max) if amax else -126
    else:
        k = -126
        while k < 127 and Fraction(2) ** k * element_max < amax: k += 1
    return 2.0 ** min(max(k, -126), 127)


@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2", "ue5m3", "e1m3", "int8"])
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_e8m0_follows_its_rule_at_every_power_of_two(element, rounding):
    fmt = BlockFormat(element, (1, 1), "e8m0", 1.0, rounding)
    top = np.float32(ELEMENTS[element].max)
    exponents = range(-149, 128, 3)
    edges = np.float32([v for k in exponents for v in (2.0**k, float(top) * 2.0 ** (k - 8)) if v < 3.4e38])
    x = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf)), np.float32([0, 3.4028235e38])])
    codes = quantize(torch.from_numpy(x)[:, None], fmt)[1].flatten()
    scales = np.array(E8M0)[codes.numpy()]
    np.testing.assert_array_equal(scales, [power_of_two(float(v), float(top), rounding) for v in x])
    if rounding == "ceil": assert (x.astype(np.float64) <= scales * float(top)).all()              # never cuts, at either side of every edge


# ---- blocks, by another implementation -----------------------------------------------------------------------------------------------

SPECIAL_FORMATS = ["nvfp4:8x8", "nvfp4:16x16", "e1m2:8x8", "e1m3:8x8", "ue1m3:8x8", "mxfp8_e4m3:1x32+ceil", "mxfp8_e5m2:1x32+ceil", "ue5m3-e4m3:1x32",
                   "e2m1-ue5m3:1x16", "nvfp4:1x16+ts0", "nvfp4:3x5", "int8-e8m0:8x8", "e4m3-fp32:1x128", "nvfp4:8x8+clip1e-06~10.0",
                   "nvfp4:1x16+4/6", "nvfp4:8x8+4/6", "e2m1-ue5m3:1x32+4/6", "nvfp4:16x16+4/6+clip1e-06~10.0"]
ALL_FORMATS = [*FORMATS, *SPECIAL_FORMATS]

def numpy_qdq(x, name):
    "qdq of a float32 array [rows, columns] from the definition: tables and numpy only."
    fmt = BlockFormat.parse(name)
    (r, c), t, top = fmt.block, np.float32(fmt.tensor_scale), np.float32(ELEMENTS[fmt.element].max)
    y = np.empty_like(x)
    for i in range(0, x.shape[0], r):
        for j in range(0, x.shape[1], c):
            b = x[i:i+r, j:j+c]
            a = np.abs(b).max()
            if not np.isfinite(b).all(): y[i:i+r, j:j+c] = np.nan; continue
            tries = []
            for reach in (top, np.float32(4))[: 1 + (fmt.scale_choice == "four_over_six")]:
                if fmt.scale == "e8m0": s = np.float32(power_of_two(float(a) / float(t), float(top), fmt.rounding))
                else:
                    s = a / (reach * t)
                    if fmt.scale_clip: s = np.clip(s, *(np.float32(v / fmt.tensor_scale) for v in fmt.scale_clip))
                    s = np.float32(s) if fmt.scale == "fp32" else nearest(np.float32([s]), grid(fmt.scale))[0]
                step = np.float32(s * t)
                z = oracle(b / step, fmt.element) * step if step > 0 else np.zeros_like(b)
                tries.append((np.square(b.astype(np.float64) - z).sum(), z))
            y[i:i+r, j:j+c] = min(tries, key=lambda tried: tried[0])[1]                            # the first of equals: 6
    return y

def same(a, b): np.testing.assert_array_equal(np.asarray(a, dtype=np.float32), np.asarray(b, dtype=np.float32))


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_qdq_equals_the_numpy_implementation(name, rng):
    x = (rng.standard_normal((40, 75)) * 10.0 ** rng.uniform(-9, 5, (40, 1))).astype(np.float32)     # ragged for every block but 1 and 5
    x[:16, :16] = 0
    x[20, 40], x[25, 3], x[39, 74] = np.nan, np.inf, -np.inf
    x[30, :] = rng.uniform(-(2.0**-140), 2.0**-140, 75)                                             # float32 subnormals
    with np.errstate(all="ignore"): want = numpy_qdq(x, name)
    same(qdq(torch.from_numpy(x), name), want)
    codes, scales = quantize(torch.from_numpy(x), name)
    same(dequantize(codes, scales, name, x.shape), want)


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_codes_decode_through_the_independent_tables(name, rng):
    fmt = BlockFormat.parse(name)
    (r, c), x = fmt.block, torch.from_numpy((rng.standard_normal((33, 70)) * 0.02).astype(np.float32))
    codes, scales = quantize(x, name)
    s = scales.numpy() if fmt.scale == "fp32" else np.float32(E8M0 if fmt.scale == "e8m0" else TABLES[fmt.scale])[scales.numpy()]
    values = np.float32(TABLES[fmt.element])[codes.numpy()] * (np.kron(s, np.ones((r, c), np.float32)) * np.float32(fmt.tensor_scale))
    same(values[:33, :70], qdq(x, name))


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_one_bad_value_breaks_its_block_and_no_other(name, rng):
    r, c = BlockFormat.parse(name).block
    x = torch.from_numpy(rng.standard_normal((2 * r + 1, 2 * c + 3)).astype(np.float32))
    clean = qdq(x, name)
    for bad in (math.nan, math.inf, -math.inf):
        i, j = int(rng.integers(x.shape[0])), int(rng.integers(x.shape[1]))
        y = x.clone(); y[i, j] = bad
        hit = torch.zeros_like(x, dtype=torch.bool)
        hit[i // r * r : i // r * r + r, j // c * c : j // c * c + c] = True
        assert torch.equal(qdq(y, name).isnan(), hit) and torch.equal(qdq(y, name)[~hit], clean[~hit]), (bad, i, j)
        assert scale_stats(y, name)["nonfinite"] == 1
        assert torch.equal(dequantize(*quantize(y, name), name, y.shape).isnan(), hit)
        fixed = qdq(y, name, 1.0)                                                                  # a fixed scale: only the value itself
        assert fixed.isnan().nonzero().tolist() == [[i, j]]


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_zero_and_tiny_blocks(name):
    r, c = BlockFormat.parse(name).block
    zeros = torch.zeros(r, 2 * c)
    assert torch.equal(qdq(zeros, name), zeros) and not quantize(zeros, name)[0].any()
    zeros[0, c] = -0.0
    assert not torch.signbit(qdq(zeros, name)).any()
    for tiny in (2.0**-149, 2.0**-126, 1e-30):
        y = qdq(torch.full((r, c), tiny), name)
        assert y.isfinite().all() and (y >= 0).all() and float(y.max()) <= 1.5 * tiny


def layouts(rng):
    base = torch.from_numpy(rng.standard_normal((6, 5, 24, 40)).astype(np.float32))
    return dict(transposed=base.transpose(-1, -2), permuted=base.permute(2, 0, 3, 1), swapped=base.permute(1, 0, 2, 3),
                channels_last=base.contiguous(memory_format=torch.channels_last), strided=base[:, :, ::3, 1::2], cut=base[..., 3:21],
                expanded=base[:1, :1, :, :1].expand(6, 5, 24, 40), stacked=base[0, 0].expand(3, 24, 40), one_row=base[0, 0, 0], scalar=base[0, 0, 0, 0],
                three=base[0], column=base[0, 0, :, :1], narrow=base[0, :, :, 0])


@pytest.mark.parametrize("name", ["nvfp4:1x16", "nvfp4:8x8", "nvfp4:8x8+4/6", "mxfp8_e4m3:1x32", "int8", "e1m3:3x5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_layout_and_dtype_change_nothing(name, dtype, rng):
    for what, x in layouts(rng).items():
        x = x.to(dtype)
        plain = x.contiguous().clone()
        before = x.clone()
        y = qdq(x, name)
        assert y.shape == x.shape and y.dtype == dtype and torch.equal(y, qdq(plain, name)), what
        assert torch.equal(y, qdq(plain.float(), name).to(dtype)), what                            # float32 inside, cast once
        assert torch.equal(x, before), what
        codes, scales = quantize(x, name)
        assert all(torch.equal(a, b) for a, b in zip((codes, scales), quantize(plain, name))), what
        assert torch.equal(dequantize(codes, scales, name, x.shape, dtype), y), what
        assert scale_stats(x, name) == scale_stats(plain, name), what
        if x.dim() >= 2: same(y.reshape(-1, *x.shape[-2:]).float(), torch.stack([qdq(m, name) for m in plain.reshape(-1, *x.shape[-2:])]).float())


@pytest.mark.parametrize("shape", [(0,), (0, 16), (4, 0), (0, 0), (2, 0, 5), (2, 5, 0), (0, 3, 5)])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4:8x8", "nvfp4:8x8+4/6", "int8"])
def test_empty_tensors(shape, name):
    x = torch.zeros(shape)
    assert qdq(x, name).shape == shape
    assert dequantize(*quantize(x, name), name, shape).shape == shape
    assert scale_stats(x, name) == dict(saturated=0, subnormal=0, zero=0, nonfinite=0, blocks=0)


# ---- the order of roundings ----------------------------------------------------------------------------------------------------------

def positive_normal_scales(): return np.float32([v for v in TABLES["e4m3"] if math.isfinite(v) and v >= 2**-6])


def with_neighbours(x):
    "float32 values and their two neighbours: where rounding twice, or multiplying by a rounded reciprocal, shows."
    return np.concatenate([np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))], -1)


def test_elements_are_divided_by_the_step_not_multiplied_by_a_reciprocal():
    book, t = grid("e2m1"), np.float32(2**-8)
    middle = ((book[:-1] + book[1:]) / 2).astype(np.float32)
    scales = positive_normal_scales()
    step = (scales * t)[:, None]
    x = np.concatenate([with_neighbours(step * middle), 6 * step], 1)                               # the last column is the largest value: it fixes the scale
    x = np.concatenate([x, np.zeros((len(x), 32 - x.shape[1]), np.float32)], 1).astype(np.float32)
    codes, got = quantize(torch.from_numpy(x), "nvfp4:1x32")
    np.testing.assert_array_equal(np.float32(TABLES["e4m3"])[got.numpy()[:, 0]], scales)
    divided, multiplied = nearest(x / step, book), nearest(x * (1 / step), book)
    assert (divided != multiplied).sum() > 50                                                      # inputs that a reciprocal would round otherwise
    np.testing.assert_array_equal(np.float32(TABLES["e2m1"])[codes.numpy()], divided)
    for s, row, want in zip(scales, x, divided): same(qdq(torch.from_numpy(row), "nvfp4", float(s)), want * (s * t))


@pytest.mark.parametrize("element, scale", [("e2m1", "e4m3"), ("e1m2", "e4m3"), ("e1m3", "e4m3"), ("e2m1", "ue5m3"), ("ue5m3", "e4m3")])
def test_the_block_maximum_is_divided_by_the_reach_not_multiplied_by_a_reciprocal(element, scale):
    book, top = grid(scale), np.float32(ELEMENTS[element].max)
    amax = with_neighbours((((book[:-1] + book[1:]) / 2)[8:] * top).astype(np.float32))
    got = np.float32(TABLES[scale])[quantize(torch.from_numpy(amax)[:, None], BlockFormat(element, (1, 1), scale))[1].numpy()[:, 0]]
    divided, multiplied = nearest(amax / top, book), nearest(amax * (np.float32(1) / top), book)
    assert (divided != multiplied).any()
    np.testing.assert_array_equal(got, divided)


def test_the_ceil_rule_divides_too():
    "Just above 127·2^k the scale must be 2^(k+1); times the reciprocal of 127 the quotient is 2^k exactly, and the maximum would be cut."
    power = np.float32([2.0**k for k in range(-60, 60)])
    amax = np.nextafter(127 * power, np.float32(np.inf))
    assert (amax / np.float32(127) > power).all() and (amax * (np.float32(1) / np.float32(127)) == power).all()
    got = np.array(E8M0)[quantize(torch.from_numpy(amax)[:, None], "int8-e8m0:1x1+ceil")[1].numpy()[:, 0]]
    np.testing.assert_array_equal(got, 2 * power)


def test_the_scale_is_rounded_before_the_elements():
    "3.1 asks for the scale 132.3 and gets 128, a step of 0.5: 1.27 is 2.54 steps, so 3. With the unrounded step it would be 2.46, so 2."
    assert qdq(torch.tensor([3.1, 1.27]), "nvfp4").tolist() == [3.0, 1.5]
    assert nearest(np.float32([1.27 / (3.1 / 6)]), grid("e2m1"))[0] == 2


def test_quotients_in_float32_round_as_the_exact_quotient_does(rng):
    "Dividing in float32 and then rounding to the grid never differs from rounding the exact quotient, so the two roundings in a row are harmless."
    scales = positive_normal_scales()
    book = grid("e2m1")
    middle = (book[:-1] + book[1:]) / 2
    s = rng.choice(scales, 20_000)
    m = rng.choice(middle, 20_000)
    x = (s * m).astype(np.float32)
    for _ in range(int(rng.integers(1, 3))): x = np.nextafter(x, np.where(rng.random(20_000) < 0.5, np.float32(0), np.float32(np.inf)))
    exact = [Fraction(float(a)) / Fraction(float(b)) for a, b in zip(x, s)]
    low = np.searchsorted(book, [float(Fraction(float(v))) for v in m]) - 1
    want = [book[i] if e < Fraction(float(v)) else book[i + 1] if e > Fraction(float(v)) else book[i + i % 2] for e, v, i in zip(exact, m, low)]
    fmt = BlockFormat("e2m1", (1, 16), "e4m3", 1.0)
    got = [qdq(torch.from_numpy(x[s == v]), fmt, float(v)).numpy() / v for v in np.unique(s)]
    np.testing.assert_array_equal(np.concatenate(got), np.concatenate([np.float32(want)[s == v] for v in np.unique(s)]))


def test_a_result_is_cast_once_and_may_leave_a_narrow_dtype():
    x = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    assert qdq(x, "mxfp8_e4m3:1x32+ceil").tolist() == [math.inf, 1.0]                               # 256·256 = 65,536, past float16
    assert qdq(x, "mxfp8_e4m3:1x32").tolist() == [57344.0, 1.0]                                     # floor: 448·128
    assert qdq(torch.tensor([3.4e38]), "mxfp8_e4m3:1x32+ceil").item() == math.inf                   # 2^128, past float32


def test_scale_for_is_the_scale_of_a_block(rng):
    for name in ("nvfp4", "mxfp8_e4m3:1x32+ceil", "ue5m3", "int8", "e1m3:8x8"):
        for amax in np.float32(10.0 ** rng.uniform(-6, 1, 20)):
            fmt = BlockFormat.parse(name)
            code = quantize(torch.tensor([float(amax)]), name)[1].flatten()[0]
            assert scale_for(float(amax), name) == (float(code) if fmt.scale == "fp32" else float(element_codes(fmt.scale)[int(code)]))


def test_four_over_six_keeps_six_where_both_scales_are_exact():
    "6 alone is 6·1 or 4·1.5, without error either way; and an empty block has scale zero either way."
    for values, scale in (([6.0, 0.0, -3.0], 256.0), ([6.0], 256.0), ([4.0, 3.0], 256.0), ([0.0], 0.0)):
        x = torch.tensor([values])
        codes, scales = quantize(x, "nvfp4:1x16+4/6")
        assert element_codes("e4m3")[int(scales)] == scale and torch.equal(qdq(x, "nvfp4:1x16+4/6"), x)
    assert not torch.equal(qdq(torch.tensor([4.0, 3.0]), "nvfp4:1x16"), torch.tensor([4.0, 3.0]))


def test_nvfp4_products_are_bfloat16_numbers():
    for name in ("nvfp4:8x8", "e1m2:8x8", "e1m3:8x8", "ue5m3", "mxfp8_e4m3", "nvfp4:8x8+4/6"):
        assert BlockFormat.parse(name).is_exact_in(torch.bfloat16)
        x = torch.randn(64, 64) * torch.logspace(-5, 1, 64)
        assert torch.equal(qdq(x, name).bfloat16().float(), qdq(x, name))
