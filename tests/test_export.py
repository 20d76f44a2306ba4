"""An exported run is the trained model: the same logits in plain transformers, the same weights on the way back, and nothing half-written.

One small run is written by hand: weights moved off their first values, sites with revised and frozen ranges, a guard that changed the temperature."""
import json, os, shutil, subprocess, sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hsmoe.config import load_config, save_config
from hsmoe.data.tokenizer import SPECIALS, char_tokenizer, from_ranks, train_bpe
from hsmoe.export import StoredRun, compare_export, compute_weight, export_run, import_hf, joined, master_of, pieces_of, shards_of, size_table
from hsmoe.model.attention import KVCache
from hsmoe.model.hybrid import build_model, generate, set_compute_dtype
from hsmoe.quant.fake import ATTENTION_BLOCKS, block_formats, named_sites, observing, revise_sites, write_compute_
from hsmoe.quant.formats import qdq
from hsmoe.train.checkpoint import CheckpointError, _together, save_state
from hsmoe.train.loop import TrainingError, load_run, make_optimizer

TEXT = "def main():\n    return 'to be or not to be, that is the question'\n"
SMALL = ["model.d_model=64", "model.n_heads=2", "model.n_routed=4", "model.expert_inner=32", "model.dense_inner=64", "model.vocab_size=300", "mtp.max_depth=3", "train.threads=1"]


def trained(cfg, seed=0):
    "A model of cfg and its optimiser, with other weights than at the start and ranges that moved"
    torch.manual_seed(seed)
    model = build_model(cfg)
    optimizer = make_optimizer(model, cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            master = optimizer.master_of(p)
            master.add_(torch.randn_like(master) * (0.5 if "router" in name or "depth" not in name and "norm" not in name and "embed" not in name else 0.05) * max(float(master.std().nan_to_num()), 0.02))
            if ".moe." in name and "w_" in name: master.mul_(8)
            write_compute_(p, master)
        for layer in model.layers: layer.moe.router.balance_bias.normal_(0, 0.3)
        ids = torch.randint(0, cfg.model.vocab_size, (2, 40))
        with observing(model): model(ids)
        revise_sites(model)
        with observing(model): model(ids)
    model.layers[0].moe.routed.routed_out.freeze("static_full")
    model.layers[0].attn.qkv_out.freeze("static_tensor")
    return model, optimizer


def write_run(folder, cfg, tokenizer, seed=0, step=7):
    model, optimizer = trained(cfg, seed)
    folder.mkdir()
    save_config(cfg, folder / "config.yaml"), save_config(cfg, folder / "config.json")
    tokenizer.save(folder)
    guards = [dict(guard="skew", step=3, reason="", before=dict(temperature=1.0), after=dict(temperature=1.5), undone=())]
    state = dict(model=model.state_dict(), formats=block_formats(model), optimizer=optimizer.state_dict(), guards=guards, placement=None, step=step)
    save_state(folder / "checkpoints" / f"step-{step}", state)
    (folder / "report.json").write_text(json.dumps(dict(tokens=1000, pairs=3000, steps=step, val_loss=5.0, val_bits_per_byte=3.0, val_tokens=100, bigram_loss=5.5)))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory): return write_run(tmp_path_factory.mktemp("export") / "run", load_config("tiny", SMALL), train_bpe([TEXT * 20], 290))


@pytest.fixture(scope="module")
def folder(run): return export_run(run, "hf", max_shard=100_000).folder


@pytest.fixture(scope="module")
def native(run): return load_run(run)[0]


def load(folder, **kw):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **kw)


@pytest.fixture(scope="module")
def lm(folder): return load(folder)


@pytest.fixture
def switched(lm, native):
    "A function that sets the two switches on both models"
    formats = {n: s.fmt for n, s in named_sites(native)}
    def switch(activations, attention):
        lm.config.activation_quantization, lm.config.attention_quantization = activations, attention
        for n, s in named_sites(native): s.fmt = formats[n] if activations and (attention or n.rpartition(".")[2] not in ATTENTION_BLOCKS) else None
    yield switch
    switch(True, True)


IDS = torch.randint(3, 290, (3, 64), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("activations, attention", [(True, True), (True, False), (False, False)])
@torch.no_grad()
def test_logits_are_those_of_the_native_model(lm, native, switched, activations, attention):
    with_all = lm(IDS).logits
    switched(activations, attention)
    for ids in (IDS, IDS[:1, :37], IDS[:, :1]):
        want = native(ids)[0][:]
        assert (lm(ids).logits - want).abs().max() <= 1e-5 and want.std() > 0.05
    assert activations and attention or (lm(IDS).logits - with_all).abs().max() > 1e-3      # the switches do something
    cache, theirs = [KVCache(64) for _ in native.layers], None
    for ids in IDS[:1].split([20, 1, 43], 1):
        out = lm(ids, past_key_values=theirs) if theirs is not None else lm(ids, use_cache=True)
        theirs = out[next(k for k in ("cache", "past_key_values") if k in out)]
        assert (out.logits - native(ids, cache)[0][:]).abs().max() <= 1e-5


@pytest.mark.parametrize("activations, attention", [(True, True), (False, False)])
@torch.no_grad()
def test_padding_caches_and_generate(lm, native, switched, activations, attention):
    switched(activations, attention)
    rows, n = [IDS[0, :33], IDS[1, :50], IDS[2, :7]], 50
    ids, mask = torch.zeros(3, n, dtype=torch.long), torch.zeros(3, n, dtype=torch.long)
    for i, row in enumerate(rows): ids[i, n - len(row):], mask[i, n - len(row):] = row, 1
    logits = lm(ids, attention_mask=mask).logits
    for i, row in enumerate(rows):
        off = (logits[i, n - len(row):] - lm(row[None]).logits[0]).abs().amax(-1)
        assert off.median() < 1e-4 and (off > 1e-3).float().mean() < 0.1          # a sum in another order may push a value over the middle of two grid points
    many = lm.generate(ids, attention_mask=mask, max_new_tokens=8, eos_token_id=None)
    for i, row in enumerate(rows):
        want = generate(native, row[None], 8, temperature=0.0, vocab_size=290)
        assert torch.equal(lm.generate(row[None], max_new_tokens=8, eos_token_id=None), want)
        assert torch.equal(lm.generate(row[None], max_new_tokens=8, eos_token_id=None, cache_implementation="static"), want)
        assert torch.equal(many[i, n - len(row):], want[0])


@pytest.mark.parametrize("softmax, name", [("online", "ue5m3:1x32+ceil"), ("normalised", "nvfp4:1x32"), ("normalised", "ue5m3:1x32")])
def test_blocks_of_keys_begin_at_the_first_token(softmax, name):
    "Attention with rounded weights is the native one, with offsets and behind padding; in NVFP4 a moved border of blocks changes values"
    from hsmoe.export import format_numbers
    from hsmoe.hf.modeling_hsmoe import rounded_attention
    from hsmoe.model.attention import quantized_attention_reference
    from hsmoe.quant.formats import BlockFormat
    torch.manual_seed(0)
    q, k, v, form, n = *torch.randn(3, 2, 3, 90, 16), format_numbers(BlockFormat.parse(name)), 90
    want = quantized_attention_reference(q, k, v, name, softmax)
    assert (rounded_attention(q, k, v, form, softmax) - want).abs().max() < 1e-5
    assert (rounded_attention(q[:, :, 70:], k, v, form, softmax, first=70) - want[:, :, 70:]).abs().max() < 1e-5
    pad_B = torch.tensor([0, 7])
    shifted = [torch.stack([t[0], torch.cat([torch.randn(3, 7, 16), t[1, :, :-7]], 1)]) for t in (q, k, v)]
    visible = torch.ones(2, n, n, dtype=torch.bool).tril()
    visible[1, :, :7] = False
    got = rounded_attention(*shifted, form, softmax, visible=visible, pad_B=pad_B)
    assert (got[0] - want[0]).abs().max() < 1e-5 and (got[1, :, 7:] - want[1, :, :-7]).abs().max() < 1e-5
    moved = rounded_attention(*shifted, form, softmax, visible=visible)[1, :, 7:]
    assert name[0] == "u" or (moved - want[1, :, :-7]).abs().max() > 1e-3


def test_files_and_tokenizer(folder, run):
    from transformers import AutoTokenizer
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and set(index["weight_map"]) == {p.name for p in pieces_of(load_config(str(run / "config.json")))}
    tokenizer, mine = AutoTokenizer.from_pretrained(folder, trust_remote_code=True), StoredRun(run)
    from hsmoe.train.loop import run_tokenizer
    own = run_tokenizer(run)
    for text in (TEXT, "<|end_of_text|> is text"):
        ids = tokenizer(text).input_ids
        assert ids == [own.bos_id, *own.encode(text)] and tokenizer.decode(ids, skip_special_tokens=True) == text
    card = (folder / "README.md").read_text()
    assert "5.0000 nats a token" in card and "1,000 tokens read" in card and "bit for bit" in card
    assert json.loads((folder / "generation_config.json").read_text())["suppress_tokens"] == list(range(290, 300))
    assert not any(p.name.endswith(".tmp") for p in folder.parent.iterdir()) and mine.step == 7
    for p in folder.glob("*.py"): assert "ipynb" not in p.read_text() and "hsmoe." not in p.read_text().split('"""')[0]


@pytest.mark.parametrize("kind", ["char", "ranks"])
def test_other_tokenizers_load(tmp_path, kind):
    from transformers import PreTrainedTokenizerFast
    from hsmoe.export import write_tokenizer
    import base64
    if kind == "char": own = char_tokenizer([TEXT])
    else:
        ranks = [bytes([b]) for b in range(256)] + [b"to", b" b", b" be"]
        (tmp_path / "ranks").write_bytes(b"\n".join(base64.b64encode(r) + f" {i}".encode() for i, r in enumerate(ranks)))
        own = from_ranks(tmp_path / "ranks", SPECIALS)
    write_tokenizer(own, tmp_path, 64)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = theirs(TEXT).input_ids
    assert ids == [own.bos_id, *own.encode(TEXT)] and theirs.decode(ids, skip_special_tokens=True) == TEXT and theirs.pad_token_id == own.pad_id


@pytest.mark.parametrize("mode", ["shrink", "exchange"])
def test_pruned_tokenizer_loads(tmp_path, mode):
    from transformers import AutoTokenizer
    from hsmoe.data.prune import prune
    from hsmoe.export import write_tokenizer
    texts = [p.read_text("utf-8") for p in sorted(Path(json.__file__).parent.glob("*.py"))]
    own = prune(train_bpe(texts, 400), texts, 0.6, mode)
    assert own.removed
    write_tokenizer(own, tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert len(theirs) == own.vocab_size and (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (own.bos_id, own.eos_id, own.pad_id)
    for text in (texts[0][:3000], "naïve 東 <|end_of_text|>  x"):
        ids = theirs(text).input_ids
        assert ids == [own.bos_id, *own.encode(text)] and theirs.decode(ids, skip_special_tokens=True) == text
    both = theirs(["a", texts[0][:50]], padding=True, return_tensors="pt")
    assert both["attention_mask"][0, :-2].sum() == 0 and (both["input_ids"][0, :-2] == own.pad_id).all()
    theirs.save_pretrained(tmp_path / "again")
    assert AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True)(texts[0]).input_ids == theirs(texts[0]).input_ids


def test_no_hsmoe_is_needed(folder, lm, tmp_path):
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hsmoe": raise ImportError(name)
sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForCausalLM
lm = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
ids = torch.arange(3, 43)[None]
torch.save([lm(ids).logits, lm.generate(ids, max_new_tokens=4)], {str(tmp_path / "out.pt")!r})
"""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids = torch.arange(3, 43)[None]
    logits, text = torch.load(tmp_path / "out.pt")
    with torch.no_grad(): assert torch.equal(logits, lm(ids).logits)
    assert torch.equal(text, lm.generate(ids, max_new_tokens=4))


def test_the_way_back(folder, native, lm, tmp_path):
    back, cfg = import_hf(folder)
    a, b = back.state_dict(), native.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)      # depth heads and frozen ranges too
    assert {n: (s.fmt, s.mode, s.block_scale) for n, s in named_sites(back)} == {n: (s.fmt, s.mode, s.block_scale) for n, s in named_sites(native)}
    assert {layer.moe.router.temperature for layer in back.layers} == {1.5} and cfg.model.d_model == 64
    with torch.no_grad(): assert torch.equal(back(IDS)[0][:], native(IDS)[0][:])
    lm.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    with torch.no_grad(): assert torch.equal(again(IDS).logits, lm(IDS).logits)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["native_config"] == json.loads((folder / "config.json").read_text())["native_config"]
    (folder.parent / "cut").mkdir(exist_ok=True)
    for p in folder.iterdir(): shutil.copy(p, folder.parent / "cut")
    next((folder.parent / "cut").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match="model-00002.* is missing or damaged"): import_hf(folder.parent / "cut")
    with pytest.raises(CheckpointError, match="is no exported model"): import_hf(tmp_path)
    shutil.rmtree(folder.parent / "cut")


@torch.no_grad()
def test_bf16_and_lora(folder, run, lm):
    low, native = load(folder, dtype=torch.bfloat16), set_compute_dtype(load_run(run)[0], torch.bfloat16)
    assert {p.dtype for n, p in low.named_parameters() if "norm" in n or "router" in n} == {torch.float32}
    got, want, fp32 = low(IDS).logits, native(IDS)[0][:], lm(IDS).logits
    assert got.dtype == torch.float32
    assert (got - want).norm() < 1.5 * (want - fp32).norm() < 0.5 * fp32.norm()     # no further from native bf16 than that is from fp32
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load(folder), peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"))
    with torch.enable_grad():
        for p in (q for n, q in model.named_parameters() if "lora_B" in n): torch.nn.init.normal_(p, std=0.05)
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if "lora" in n) and all(p.grad is None for n, p in model.named_parameters() if "lora" not in n)
    adapted = model(input_ids=IDS).logits
    off = (model.merge_and_unload()(IDS).logits - adapted).abs().amax(-1)
    assert off.median() < 1e-4 and (adapted - fp32).abs().max() > 1e-2


def test_gradient_checkpointing_changes_nothing(folder):
    model = load(folder).train()
    def gradients():
        model.zero_grad(); loss = model(IDS, labels=IDS).loss; loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    (loss, grads) = gradients()
    model.gradient_checkpointing_enable()
    again, same = gradients()
    assert loss == again and grads.keys() == same.keys() and all(torch.equal(grads[n], same[n]) for n in grads)
    assert {n for n, _ in model.named_parameters()} - grads.keys() == {"model.depth_heads.weight", *(f"model.layers.{i}.moe.router.balance_bias" for i in range(2))}


@pytest.mark.parametrize("weights, group, dtype", [("nvfp4:8x8", 8, "bfloat16"), ("nvfp4:16x16", 16, "float32")])
def test_nvfp4_is_the_trained_model(tmp_path, weights, group, dtype):
    cfg = load_config("tiny", [*SMALL, "model.n_layers=1", f"quant.weight_format={weights}", f"train.dtype={dtype}"])
    run = write_run(tmp_path / "run", cfg, train_bpe([TEXT], 290))
    done, native = export_run(run, "nvfp4"), load_run(run)[0]
    back, want = import_hf(done.folder)[0].state_dict(), native.state_dict()
    assert all(back[k].dtype == want[k].dtype and torch.equal(back[k], want[k]) for k in want)
    config = json.loads((done.folder / "config.json").read_text())["quantization_config"]
    assert {g["weights"]["group_size"] for g in config["config_groups"].values()} == {group}
    assert compare_export(run, done.folder)[1:3] == (0, 0.0)
    assert done.sizes["in all"] < done.sizes["as --to hf"] and f"{weights}, equal to the trained weights" in size_table(done.sizes)


def test_plain_transformers_unpack_it(run, native, tmp_path):
    for name in ("loguru", "compressed_tensors"): pytest.importorskip(name)
    from transformers import CompressedTensorsConfig
    lm = load(export_run(run, "nvfp4", tmp_path / "out").folder, quantization_config=CompressedTensorsConfig(dequantize=True))
    with torch.no_grad(): assert (lm(IDS).logits - native(IDS)[0][:]).abs().max() <= 1e-5


def test_mxfp8_comes_from_the_masters(run):
    done, stored, matrices = export_run(run, "mxfp8"), StoredRun(run), 0
    back = import_hf(done.folder)[0].state_dict()
    for piece in pieces_of(stored.cfg):
        packed = any(part in piece.name for part in ("_proj.", "routed.w_"))
        want = qdq(master_of(stored, piece), "mxfp8_e4m3:1x32+ceil") if packed else compute_weight(stored, piece)
        assert all(torch.equal(back[k], v) for k, v in piece.split(want).items()), piece.name
        matrices += packed and not torch.equal(want, compute_weight(stored, piece))
    assert matrices == 2 * 11 and "not the trained ones" in (done.folder / "README.md").read_text()


def test_parts_strips_and_slots(run, tmp_path):
    "A checkpoint as two ranks write it, with masters in strips and experts in the slots of a placement, gives what one rank's gives"
    from hsmoe.train.checkpoint import load_state
    state, one = load_state(run / "checkpoints" / "step-7"), StoredRun(run)
    slots = [[2, 0, 3, 1], [0, 1, 2, 3]]
    parts = [dict(state, placement=slots, optimizer=dict(state["optimizer"], masters={}, state={}, rows={}), model={}) for _ in range(2)]
    for k, t in state["model"].items():
        odd = "experts." in k and int(k.split("experts.")[1].split(".")[0]) % 2
        parts[odd]["model"][k] = t
    for name, t in state["optimizer"]["masters"].items():
        if ".moe.routed." in name: t = t[slots[int(name.split(".")[1])]]
        flat, by_columns = t.reshape(-1, t.shape[-1]), name.endswith("moe.shared.w_out")
        n, k = flat.shape
        for r in range(2):
            x = flat[:, r * k // 2:(r + 1) * k // 2] if by_columns else flat[r * n // 2:(r + 1) * n // 2]
            parts[r]["optimizer"]["masters"][name] = x.contiguous()
            parts[r]["optimizer"]["rows"][name] = [0, n, n, r * k // 2, k // 2, k] if by_columns else [r * n // 2, n // 2, n]
    split = tmp_path / "run"
    shutil.copytree(run, split, ignore=shutil.ignore_patterns("checkpoints", "export"))
    for r, part in enumerate(parts): save_state(split / "checkpoints" / "step-7.tmp" / f"rank-{r}", part)
    _together(split / "checkpoints" / "step-7", split / "checkpoints" / "step-7.tmp", 2)
    two = StoredRun(split)
    for piece in pieces_of(one.cfg):
        assert torch.equal(compute_weight(two, piece), compute_weight(one, piece)) and torch.equal(master_of(two, piece), master_of(one, piece)), piece.name
    assert export_run(split, "nvfp4").sizes == export_run(run, "nvfp4", tmp_path / "one").sizes


def test_reads_one_shard_at_a_time(run, monkeypatch):
    stored, seen = StoredRun(run), []
    shards = shards_of(stored, pieces_of(stored.cfg), 60_000)
    read = StoredRun.read
    monkeypatch.setattr(StoredRun, "read", lambda self, paths: (seen.extend(paths), read(self, paths))[1])
    made = joined(stored, shards)
    next(made)
    assert seen == [f"model/{s}" for p in shards[0].pieces for s in p.sources]
    assert all(s.nbytes <= 60_000 or len(s.pieces) == 1 for s in shards) and len(shards) > 5


def test_command(run, tmp_path):
    from typer.testing import CliRunner
    from hsmoe.cli import USER_ERRORS, app
    done = CliRunner().invoke(app, ["export", str(run), "--to", "nvfp4-1x16", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and "nvfp4:1x16, rounded anew from the masters" in done.output and done.output.strip().endswith(str(tmp_path / "out"))
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {g["weights"]["group_size"] for g in groups.values()} == {16}
    assert {TrainingError, CheckpointError} <= set(USER_ERRORS)
    assert isinstance(CliRunner().invoke(app, ["export", str(run), "--to", "gguf"]).exception, TrainingError)


def test_documents(tmp_path):
    "Packed documents do not see each other, without a cache as in training"
    run = write_run(tmp_path / "run", load_config("tiny", [*SMALL, "model.n_layers=1", "data.document_mask=true"]), train_bpe([TEXT], 290))
    lm, native = load(export_run(run, "hf").folder), load_run(run)[0]
    ids = IDS[:, :40].clone(); ids[:, [0, 13, 30]] = lm.config.bos_token_id
    with torch.no_grad():
        assert (lm(ids).logits - native(ids)[0][:]).abs().max() <= 1e-5
        assert torch.equal(lm(ids).logits[:, 13:20], lm(torch.cat([IDS[:, 40:53], ids[:, 13:]], 1)).logits[:, 13:20])
        lm.config.attention_quantization = False
        for n, s in named_sites(native): s.fmt = None if n.rpartition(".")[2] in ATTENTION_BLOCKS else s.fmt
        assert (lm(ids).logits - native(ids)[0][:]).abs().max() <= 1e-5


def test_errors_are_sentences_and_leave_nothing(run, tmp_path, monkeypatch):
    broken = tmp_path / "run"
    shutil.copytree(run, broken, ignore=shutil.ignore_patterns("export"))
    def refused(kind, match, *args, **kw):
        before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
        with pytest.raises(kind, match=match): export_run(*args, **kw)
        assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before
    refused(TrainingError, "no export target 'hff'; the nearest is 'hf'", broken, "hff")
    refused(TrainingError, "no GGUF file is written, since", broken, "gguf")
    refused(TrainingError, "exists already", broken, "hf", tmp_path)
    refused(TrainingError, "has no checkpoint of step 8, only of 7", broken, "hf", step=8)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), dict(available=1000)))
    if all(map(__import__("importlib.util").util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        refused(TrainingError, "--to onnx holds the whole model in memory, about .* --to hf needs one shard at a time", broken, "onnx")
    data = next((broken / "checkpoints" / "step-7").glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    refused(CheckpointError, "is damaged: the checksum of", broken, "hf")
    data.write_bytes(whole[:-9])
    refused(CheckpointError, "is damaged: .* bytes instead of", broken, "hf")
    data.write_bytes(whole)
    def full(*args, **kw): raise OSError(28, "No space left on device")
    with monkeypatch.context() as m:
        m.setattr("hsmoe.export.save_file", full)
        refused(TrainingError, "could not be written .No space left on device.; nothing of it is left", broken, "hf", tmp_path / "full")
    (broken / "tokenizer.json").unlink()
    refused(TrainingError, "the tokenizer of .* cannot be read", broken, "hf")
    (broken / "checkpoints" / "step-7").rename(broken / "checkpoints" / "step-7.tmp")
    refused(TrainingError, "has no checkpoint yet", broken, "hf")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_grouped_product_on_a_gpu():
    from hsmoe.hf.modeling_hsmoe import grouped_product
    torch.manual_seed(0)
    count = torch.tensor([5, 0, 40, 1])
    x, w = torch.randn(46, 64), torch.randn(4, 48, 64) / 8
    got = grouped_product(x.cuda().bfloat16(), w.cuda().bfloat16(), count.cuda()).float().cpu()
    want = grouped_product(x.bfloat16().float(), w.bfloat16().float(), count)
    assert (got - want).norm() < 0.01 * want.norm()


def test_onnx(tmp_path):
    for name in ("onnxruntime", "onnxscript"): pytest.importorskip(name)
    cfg = load_config("tiny", [*SMALL, "model.n_layers=1", "model.n_routed=3"])
    run = write_run(tmp_path / "run", cfg, train_bpe([TEXT], 290))
    done = export_run(run, "onnx")                                       # checks lengths, padding and the cache itself
    import onnx
    graph = onnx.load(done.folder / "model.onnx").graph
    assert [i.name for i in graph.input] == ["input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value"]
    assert sum(isinstance(d.dim_param, str) and bool(d.dim_param) for d in graph.input[2].type.tensor_type.shape.dim) == 2      # batch and past are free
    import numpy as np, onnxruntime
    session, native = onnxruntime.InferenceSession(str(done.folder / "model.onnx")), load_run(run)[0]
    for n in (1, 5, 33, 64):
        past = np.zeros((2, 2, 0, 32), np.float32)
        got = session.run(["logits"], dict(input_ids=IDS[:2, :n].numpy(), attention_mask=np.ones((2, n), np.int64), **{"past_key_values.0.key": past, "past_key_values.0.value": past}))[0]
        with torch.no_grad(): off = (torch.from_numpy(got) - native(IDS[:2, :n])[0][:]).abs().amax(-1)
        assert off.median() < 1e-4 and (off > 1e-3).float().mean() < 0.1
