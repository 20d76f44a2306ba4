"""Packed storage: exact for every format, laid out as the page says, readable by torchao and compressed-tensors without a changed value.

The decoders here are written from the layouts' descriptions; torchao and compressed-tensors themselves are asked as well where they are installed."""
import itertools, json, math, random, os

import pytest
import torch

from hsmoe.config import load_config
from hsmoe.model.hybrid import build_model
from hsmoe.quant.formats import ELEMENTS, FORMATS, SCALES, BlockFormat, element_codes, qdq, quantize
from hsmoe.quant.pack import (METADATA_KEY, PackedTensor, as_row_blocks, compressed_config, flatten_packed, pack, pack_bits, restore_packed, row_bytes,
                              row_format, to_compressed, to_torchao, unpack_bits)

from conftest import SMALL

BLOCKS = [(1, 16), (1, 32), (8, 8), (16, 16), (3, 5)]
ALL_PAIRS = [BlockFormat(e, BLOCKS[i % len(BLOCKS)], s, 2.0**-8 if s in ("e4m3", "ue5m3") else 1.0)
             for i, (e, s) in enumerate(itertools.product(ELEMENTS, SCALES))]


@pytest.fixture
def seeded():
    "A fresh seed each time, printed when a test fails; HSMOE_TEST_SEED repeats it."
    seed = int(os.environ.get("HSMOE_TEST_SEED", random.SystemRandom().randrange(2**31)))
    print(f"HSMOE_TEST_SEED={seed}")
    torch.manual_seed(seed)


def same_bits(a, b):
    "Equal dtype, shape and bits, the sign of zero included; NaN is NaN."
    raw = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device) and torch.equal(a.isnan(), b.isnan()) and bool(((a.view(raw) == b.view(raw)) | a.isnan()).all())


def hard(*shape):
    "Values over many orders of magnitude, with an empty corner, both zeros, NaN, infinities, and numbers near the ends of float32."
    x = torch.randn(shape) * torch.logspace(-9, 5, shape[-1])
    x[..., :8, :8], x[..., 9, 20], x[..., 3, 30], x[..., -1, -1] = 0, math.nan, math.inf, -math.inf
    x[..., 0, 0], x[..., 10, 0], x[..., 11, 1] = -0.0, 1e-40, 3e38
    return x


# ---- exactness -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fmt", ALL_PAIRS, ids=lambda f: f.name)
def test_every_element_and_scale_packs_exactly(fmt, seeded):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = hard(2, 19, 37).to(dtype)
        p = pack(x, fmt)
        assert same_bits(p.unpack(dtype), qdq(x, fmt)), dtype
        assert (p.codes.dtype, p.scales.dtype) == (torch.uint8, torch.float32 if fmt.scale == "fp32" else torch.uint8)


@pytest.mark.parametrize("name", ["nvfp4:8x8", "e1m3:1x16", "mxfp8_e4m3:1x32+ceil", "nvfp4:1x16+clip1e-06~10.0", "e5m3:8x8"])
def test_layout_of_the_input_does_not_matter(name, seeded):
    x = torch.randn(3, 17, 40)
    want = pack(x, name)
    for y in (x.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([x, x], -1)[..., :40], x.clone().requires_grad_()):
        got = pack(y, name)
        assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales) and not got.unpack().requires_grad
    row = torch.randn(1, 40)
    assert torch.equal(pack(row.expand(17, 40), name).unpack(), qdq(row.expand(17, 40), name))
    for i in range(3): assert torch.equal(want[i].unpack(), pack(x[i], name).unpack())
    assert want[-1].shape == (17, 40)


@pytest.mark.parametrize("shape", [(), (1,), (37,), (0, 16), (4, 0), (1, 1), (0, 8, 8), (2, 2, 9, 17)])
def test_odd_shapes(shape):
    x = torch.randn(shape)
    for name in ("nvfp4:8x8", "e1m3:1x16", "MXFP8", "int8:1x256"): assert same_bits(pack(x, name).unpack(), qdq(x, name)), name


def test_non_floats_are_refused():
    with pytest.raises(TypeError, match="floating-point"): pack(torch.arange(16), "nvfp4")


@pytest.mark.parametrize("weights", ["nvfp4:8x8", "e1m3:8x8", "mxfp8_e4m3:1x32"])
def test_a_models_masters_pack_to_its_compute_weights(weights):
    torch.manual_seed(0)
    model = build_model(load_config("tiny", SMALL + [f"quant.weight_format={weights}", "train.length=1 steps"]))
    tagged = {n: p for n, p in model.named_parameters() if hasattr(p, "block_format")}
    assert len(tagged) >= 6 and any(p.dim() == 3 for p in tagged.values())
    tensors, metadata = flatten_packed({n: pack(p.master, p.block_format) for n, p in tagged.items()})
    for n, p in restore_packed(tensors, metadata).items(): assert same_bits(p.unpack(tagged[n].dtype), tagged[n].detach()), n


def test_packing_rounded_weights_again_stores_other_weights(seeded):
    master = torch.randn(256, 256)
    for name, moves in [("e1m3:8x8", True), ("nvfp4:8x8", False)]:
        compute, stored = qdq(master, name).bfloat16(), pack(master, name)
        assert same_bits(stored.unpack(torch.bfloat16), compute)
        assert torch.equal(pack(compute, name).unpack(torch.bfloat16), compute) != moves
        assert same_bits(pack(compute, name, scales=stored.scales).unpack(torch.bfloat16), compute)


@pytest.mark.parametrize("fmt", ALL_PAIRS, ids=lambda f: f.name)
def test_stored_scales_give_the_codes_back(fmt, seeded):
    x = hard(19, 37)
    p = pack(x, fmt)
    again = pack(p.unpack(), fmt, scales=p.scales)
    assert same_bits(again.unpack(), p.unpack())
    wrong = pack(4.3 * x.nan_to_num(1.0, 1.0, 1.0), fmt).scales
    with pytest.raises(ValueError, match="not on the .* grid"): pack(p.unpack(), fmt, scales=wrong)


# ---- the bytes, by the description -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bits", [4, 5, 8, 9])
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 16, 31])
def test_bits_lie_where_the_page_says(bits, columns, seeded):
    codes = torch.randint(0, 2**bits, (3, columns), dtype=torch.int16)
    data = pack_bits(codes if bits > 8 else codes.to(torch.uint8), bits)
    for row, line in zip(codes.tolist(), data.tolist()):
        want = 0
        base = 8 * (-(-columns // 2) if bits < 8 else columns)              # bit where the sign bitmap begins, where there is one
        for j, code in enumerate(row):
            if bits in (4, 5): want |= (code & 15) << 4 * j                  # nibbles, the even column in the low half
            else: want |= (code & 255) << 8 * j
            if bits in (5, 9): want |= (code >> bits - 1) << base + j
        assert int.from_bytes(bytes(line), "little") == want
    assert data.shape[1] == row_bytes(columns, bits)
    assert torch.equal(unpack_bits(data, bits, columns).long(), codes.long())


@pytest.mark.parametrize("name, bits", [("nvfp4:8x8", 4.125), ("nvfp4:8x16", 4.0625), ("nvfp4:16x16", 4.03125), ("nvfp4:1x16", 4.5), ("e1m3:8x8", 5.125),
                                        ("ue1m3:8x8", 4.125), ("MXFP8", 8.25), ("e5m3:1x32", 9.25), ("int8:1x256", 8.125)])
def test_true_bits_a_weight(name, bits, tmp_path):
    p = pack(torch.randn(512, 512), name)
    assert p.bits_per_value == bits and p.nbytes * 8 == bits * 512 * 512
    torch.save(flatten_packed({"w": p})[0], tmp_path / "w.pt")
    assert p.nbytes <= (tmp_path / "w.pt").stat().st_size < p.nbytes + 4096


def test_incomplete_blocks_are_counted():
    p = pack(torch.randn(1536, 848), "mxfp8_e4m3:1x32")
    assert p.bits_per_value == 8.25 * 864 / 848 == p.fmt.bits_per_element((1536, 848))


# ---- files -----------------------------------------------------------------------------------------------------------------------------

def packed_state():
    torch.manual_seed(3)
    return {"experts.w_in": pack(hard(2, 24, 40), "e1m3:8x8"), "attn.o": pack(hard(16, 32), "nvfp4:1x16"), "q": pack(hard(12, 37), "e5m3:8x8"),
            "m": pack(hard(16, 32), "int8:1x16"), "norm": torch.ones(8), "ts": pack(hard(16, 32), "nvfp4:1x16+ts-3")}


def test_safetensors_and_torch_save(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file
    state = packed_state()
    tensors, metadata = flatten_packed(state)
    save_file(tensors, tmp_path / "a.safetensors", metadata)
    with safe_open(tmp_path / "a.safetensors", "pt") as f: first = restore_packed({k: f.get_tensor(k) for k in f.keys()}, f.metadata())
    torch.save((tensors, metadata), tmp_path / "b.pt")
    for back in (first, restore_packed(*torch.load(tmp_path / "b.pt", weights_only=True))):
        assert back.keys() == state.keys() and torch.equal(back["norm"], state["norm"])
        for k in state.keys() - {"norm"}:
            assert same_bits(back[k].unpack(), state[k].unpack()) and (back[k].fmt, back[k].shape) == (state[k].fmt, state[k].shape)


@pytest.mark.parametrize("damage, message", [
    (lambda t, m: t.pop("attn.o.codes"), "'attn.o' lacks 'attn.o.codes'"),
    (lambda t, m: t.update({"attn.o.scales": t["attn.o.scales"][:-1]}), r"'attn.o': scales of a nvfp4:1x16 tensor of shape \(16, 32\) must be torch.uint8 \(16, 2\), not torch.uint8 \(15, 2\)"),
    (lambda t, m: t.update({"m.scales": t["m.scales"].half()}), "'m': scales of a int8:1x16 tensor .* must be torch.float32"),
    (lambda t, m: m.update({METADATA_KEY: m[METADATA_KEY].replace("e1m3:8x8", "e1m9:8x8")}), "'experts.w_in': unknown format 'e1m9:8x8'"),
    (lambda t, m: m.update({METADATA_KEY: m[METADATA_KEY].replace("[16, 32]", "[16, 48]")}), "codes of a nvfp4:1x16 tensor"),
])
def test_damage_is_found(damage, message):
    tensors, metadata = flatten_packed(packed_state())
    damage(tensors, metadata)
    with pytest.raises(ValueError, match=message): restore_packed(tensors, metadata)


# ---- torchao ---------------------------------------------------------------------------------------------------------------------------

ROWS = ["nvfp4:1x16", "nvfp4:16x16", "nvfp4:1x16+ts0", "nvfp4:4x48", "mxfp8_e4m3:1x32", "mxfp8_e4m3:1x32+ceil", "mxfp8_e5m2:1x32", "mxfp4:1x32", "mxfp4:32x32"]


def moderate(*shape):
    "Finite values, blocks of zeros, and blocks of tiny values; scales stay above 2^-126, where torchao flushes none."
    x = torch.randn(shape) * torch.logspace(-4, 1, shape[-1])
    x[..., :16, :32] = 0
    x[..., 2, 32:64] = 1e-7
    return x


@pytest.mark.parametrize("name", ROWS)
def test_torchao_sees_the_same_values(name, seeded):
    pytest.importorskip("torchao")
    x = moderate(40, 96)
    p = pack(x, name)
    for dtype in (torch.float32, torch.bfloat16):
        t = to_torchao(p, dtype)
        assert (t.dtype, tuple(t.shape)) == (dtype, (40, 96))
        assert same_bits(t.dequantize(dtype), qdq(x, name).to(dtype))
    if p.fmt.scale == "e4m3": assert torch.equal(torch.nn.functional.linear(torch.eye(96), to_torchao(p, torch.float32)), qdq(x, name).T)


def test_torchao_stacks_and_nan_blocks(seeded):
    pytest.importorskip("torchao")
    x = moderate(3, 40, 96)
    x[1, 7, 40] = math.nan
    for name in ("nvfp4:1x16", "nvfp4:16x16"): assert same_bits(to_torchao(pack(x, name), torch.float32).dequantize(), qdq(x, name))


def test_torchao_packs_nibbles_in_this_order(seeded):
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    assert torch.equal(kernels.pack_uint4(codes), pack_bits(codes, 4))
    assert torch.equal(kernels.unpack_uint4(pack_bits(codes, 4)), codes)
    assert torch.equal(kernels.f4_unpacked_to_f32(codes), element_codes("e2m1")[codes.long()])


# ---- compressed-tensors ------------------------------------------------------------------------------------------------------------------

SERVED = ["nvfp4:1x16", "nvfp4:16x16", "nvfp4:1x16+ts0", "nvfp4:8x32", "mxfp4:1x32", "mxfp8_e4m3:1x32", "mxfp8_e4m3:1x32+ceil", "mxfp8_e4m3:16x32"]


def decode_compressed(layer):
    "A layer's weight from the description of the layout: (q · s) / g, or q · 2^(c - 127); low nibble first."
    get = lambda key: layer.get(f"l.{key}")
    if get("weight_packed") is not None:
        data = get("weight_packed")
        nibbles = torch.stack([data & 15, data >> 4], -1).flatten(1).long()
        q = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])[nibbles]
    else: q = get("weight").float()
    s = get("weight_scale")
    s = s.float() / get("weight_global_scale") if get("weight_global_scale") is not None else torch.where(s == 255, math.nan, 2.0 ** (s.float() - 127))
    return q * s.repeat_interleave(q.shape[1] // s.shape[1], 1)


@pytest.mark.parametrize("name", SERVED)
def test_the_served_layout_holds_the_same_values(name, seeded):
    x = moderate(40, 96)
    layer = to_compressed(pack(x, name), "l")
    assert all(t.is_contiguous() for t in layer.values())
    assert same_bits(decode_compressed(layer), qdq(x, name))
    kinds = {k.removeprefix("l."): (t.dtype, tuple(t.shape)) for k, t in layer.items()}
    assert kinds == {"nvfp4": {"weight_packed": (torch.uint8, (40, 48)), "weight_scale": (torch.float8_e4m3fn, (40, 6)), "weight_global_scale": (torch.float32, (1,))},
                     "mxfp4": {"weight_packed": (torch.uint8, (40, 48)), "weight_scale": (torch.uint8, (40, 3))},
                     "mxfp8_e4m3": {"weight": (torch.float8_e4m3fn, (40, 96)), "weight_scale": (torch.uint8, (40, 3))}}[name.split(":")[0]]


def test_global_scales_are_reciprocals():
    layer = to_compressed(pack(torch.randn(16, 32), "nvfp4:1x16+ts-5"), "l", input_tensor_scale=2.0**-7)
    assert layer["l.weight_global_scale"].tolist() == [32.0] and layer["l.input_global_scale"].tolist() == [128.0]


@pytest.mark.parametrize("name", SERVED)
def test_the_compressed_tensors_package_reads_it(name, seeded):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors, loguru and transformers are needed")
    from compressed_tensors.quantization import QuantizationConfig
    x = moderate(40, 96)
    config = QuantizationConfig.model_validate(compressed_config(name))
    scheme = config.config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    layer = {k.removeprefix("l."): t for k, t in to_compressed(pack(x, name), "l").items()}
    weight = compressor.decompress(layer, scheme)["weight"]
    assert torch.equal(weight.float(), qdq(x, name))
    if name.startswith("nvfp4"):                                             # and writes the same bytes, given the weight and the scales
        scale = layer["weight_scale"].float()
        mine = compressor.compress(dict(weight=qdq(x, name), weight_scale=scale, weight_global_scale=layer["weight_global_scale"]), scheme)
        full = scale.repeat_interleave(16, 1) > 0                            # by a scale of zero the package divides
        both = full[:, 0::2] & full[:, 1::2]
        assert torch.equal(mine["weight_packed"][both], layer["weight_packed"][both])
        assert torch.equal(mine["weight_scale"].view(torch.uint8), layer["weight_scale"].view(torch.uint8))


@pytest.mark.parametrize("name, preset, activations", [("nvfp4:1x16", "NVFP4A16", False), ("nvfp4:16x16", "NVFP4", True), ("mxfp4:1x32", "MXFP4A16", False),
                                                       ("mxfp8_e4m3:1x32", "MXFP8A16", False), ("mxfp8_e4m3:1x32", "MXFP8", True)])
def test_the_config_says_what_the_packages_presets_say(name, preset, activations):
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme", reason="compressed-tensors, loguru and transformers are needed")
    from compressed_tensors.quantization import QuantizationConfig
    mine = QuantizationConfig.model_validate(json.loads(json.dumps(compressed_config(name, activations)))).config_groups["group_0"]
    theirs = schemes.preset_name_to_scheme(preset, ["Linear"])
    fields = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "scale_dtype")
    for part in ("weights", "input_activations"):
        a, b = getattr(mine, part), getattr(theirs, part)
        assert (a is None) == (b is None) == (part == "input_activations" and not activations)
        if a is not None: assert [getattr(a, f) for f in fields] == [getattr(b, f) for f in fields]


# ---- what cannot be rewritten is refused ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, message", [
    ("nvfp4:8x8", "blocks of 8 columns do not fill row blocks of 16, which would need two scales"), ("nvfp4:16x24", "blocks of 24 columns do not fill"),
    ("mxfp8_e4m3:1x16", "do not fill row blocks of 32"), ("e1m2:16x16", "no hardware layout for element e1m2 with scale e4m3"),
    ("ue5m3:1x32", "no hardware layout for element ue5m3"), ("mxfp4:1x32+ts-2", r"no place for the tensor scale 2\^-2")])
def test_what_row_blocks_cannot_hold_is_refused(name, message):
    p = pack(torch.randn(32, 96), name)
    for convert in (as_row_blocks, to_torchao, lambda p: to_compressed(p, "l"), lambda p: row_format(p.fmt), lambda p: compressed_config(p.fmt)):
        if convert is to_torchao: pytest.importorskip("torchao")
        with pytest.raises(ValueError, match=message) as e: convert(p)
        assert "\n" not in str(e.value)


def test_shapes_the_layouts_lack_are_refused():
    with pytest.raises(ValueError, match="one by one"): to_compressed(pack(torch.randn(2, 16, 32), "nvfp4:1x16"), "experts")
    with pytest.raises(ValueError, match="41 columns are no multiple of 16"): to_compressed(pack(torch.randn(16, 41), "nvfp4:1x16"), "l")
    with pytest.raises(ValueError, match="no mxfp8_e5m2"): to_compressed(pack(torch.randn(16, 32), "mxfp8_e5m2"), "l")


@pytest.mark.parametrize("name", ["nvfp4:16x16", "nvfp4:5x32", "mxfp8_e4m3:3x64"])
def test_repeated_scales_change_no_value(name, seeded):
    x = hard(2, 23, 41)
    rows = as_row_blocks(pack(x, name))
    assert rows.fmt.block == row_format(name).block and same_bits(rows.unpack(), qdq(x, name))
    assert isinstance(rows, PackedTensor) and rows.padded[0] == 23
