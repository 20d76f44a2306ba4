"""Larger blocks for weights and activations, smaller ones for the optimiser, in the middle of a run (SPEC Q-10): training goes on, weights are on the new grid, and a resume is exact."""
import copy, json, math

import pytest
import torch

from hsmoe.config import load_config
from hsmoe.optim.adamw8bit import AdamW8bit
from hsmoe.optim.recut import blockwise_of, dominated_blocks, halve_blocks
from hsmoe.quant.fake import block_formats, enlarge_blocks, larger_blocks
from hsmoe.quant.formats import BlockFormat, qdq
from hsmoe.train.loop import Run, TrainingError, load_run, run_training, train_step

FEW = ["train.length=8 steps", "train.checkpoint_every=100", "model.n_layers=1", "train.threads=1"]
SIXTEEN = ("routed_out", "shared_out", "dense_gate_pre", "router_logits")       # the sites that start with blocks of 16; qkv_out starts with 32


def blocks_of(model):
    formats = block_formats(model)
    shapes = lambda named, ends: {BlockFormat.parse(f).block for n, f in named.items() if n.endswith(ends)}
    return shapes(formats["weights"], ""), shapes(formats["sites"], SIXTEEN), shapes(formats["sites"], "qkv_out"), shapes(formats["sites"], ("q_rope", "k_rope", "probs", "head_out"))


def on_grid(run):
    "Every tagged weight is its master on its grid; that of a larger block is not the 8×8 one, at least for some weights (a bounded uniform start has one scale in all blocks)."
    pairs = [(p, run.state.optimizer.master_of(p)) for p in run.tagged()]
    for p, master in pairs: assert torch.equal(p, qdq(master, p.block_format).to(p.dtype))
    as_8x8 = [torch.equal(p, qdq(master, "nvfp4:8x8").to(p.dtype)) for p, master in pairs]
    assert all(as_8x8) == (pairs[0][0].block_format.block == (8, 8))


def moments(run):
    inner = blockwise_of(run.state.optimizer)
    return [t.clone() for g in inner.param_groups for p in g["params"] for t in inner.moments(p)]


def masters(run): return {n: m.clone() for n, m in run.state.optimizer.named_masters()}


@pytest.mark.parametrize("overrides", [[], ["optim.matrices=per_head_muon", "train.dtype=bfloat16"]], ids=["adamw", "muon-bf16"])
def test_training_goes_on_and_resumes_exactly(tmp_path, small_overrides, small_corpus, overrides):
    cfg = load_config("tiny", small_overrides + FEW + overrides)
    run = Run(cfg, tmp_path / "run", small_corpus)
    model, optimizer = run.state.model, run.state.optimizer
    losses = [train_step(run.state).loss for _ in range(2)]
    assert blocks_of(model) == ({(8, 8)}, {(1, 16)}, {(1, 32)}, {(1, 32)}) and run.tagged()
    for weights, sites, n in (((16, 8), (1, 32), 5), ((16, 16), (1, 64), 4), ((16, 16), (1, 64), -len(run.tagged()))):
        before, kept = moments(run), masters(run)
        assert len(enlarge_blocks(model, optimizer)) == len(run.tagged()) + n
        assert blocks_of(model) == ({weights}, {sites}, {(1, 64)}, {(1, 32)})
        assert all(torch.equal(a, b) for a, b in zip(before, moments(run))), "the optimiser remembers what it did"
        assert all(torch.equal(m, kept[name]) for name, m in optimizer.named_masters())
        on_grid(run)
        losses.append(train_step(run.state).loss)
        on_grid(run)

    before = moments(run)
    shares = dominated_blocks(optimizer)
    assert shares.blocks > 0 and 0 <= shares.exp_avg <= 1 and 0 <= shares.exp_avg_sq <= 1
    assert (halve_blocks(optimizer), halve_blocks(optimizer)) == (128, None)
    for a, b in zip(before, moments(run)): assert (a - b).abs().max() <= 0.02 * a.abs().max()
    losses.append(train_step(run.state).loss)
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0], losses

    run.save()
    on = [train_step(run.state).loss for _ in range(2)]
    run.close()
    resumed = Run(cfg, tmp_path / "run", small_corpus, resume=True)
    assert blocks_of(resumed.state.model) == blocks_of(model) and blockwise_of(resumed.state.optimizer).block_size == 128
    on_grid(resumed)
    assert [train_step(resumed.state).loss for _ in range(2)] == on
    again = masters(resumed)
    assert all(torch.equal(m, again[name]) for name, m in masters(run).items())
    assert all(torch.equal(a, b) for a, b in zip(moments(run), moments(resumed)))
    resumed.close()
    assert blocks_of(load_run(tmp_path / "run")[0]) == blocks_of(model)


def test_an_earlier_checkpoint_brings_the_small_blocks_back(tmp_path, small_overrides, small_corpus):
    "What a guard does that gives up larger blocks: the live state takes all of the checkpoint, block sizes included, and goes on as before."
    state = Run(load_config("tiny", small_overrides + FEW), tmp_path / "run", small_corpus).state
    train_step(state)
    saved, formats = copy.deepcopy(state.state_dict()), block_formats(state.model)
    on = [train_step(state).loss for _ in range(2)]
    coming = larger_blocks(state.model)
    assert block_formats(state.model) == formats and not coming["weights"].keys() - formats["weights"].keys()
    changed = enlarge_blocks(state.model, state.optimizer)
    assert {n: new for n, (_, new) in changed.items()} == coming["weights"] | coming["sites"] and halve_blocks(state.optimizer) == 128
    train_step(state)
    state.load_state_dict(saved)
    assert block_formats(state.model) == formats and blockwise_of(state.optimizer).block_size == 256
    assert [train_step(state).loss for _ in range(2)] == on
    with pytest.raises(ValueError, match="has no master in this optimiser: give the one that trains this model"):
        enlarge_blocks(state.model, AdamW8bit([torch.nn.Parameter(torch.zeros(2))]))
    assert block_formats(state.model) == formats


def test_a_checkpoint_with_blocks_that_the_configuration_does_not_know(tmp_path, small_overrides, small_corpus):
    run = Run(load_config("tiny", small_overrides + FEW), tmp_path / "run", small_corpus)
    train_step(run.state)
    run.save(); run.close()
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["quant"]["weight_format"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(TrainingError, match="does not fit the configuration in .*is not quantised in this model$"): load_run(tmp_path / "run")


@pytest.mark.parametrize("length", ["3 steps", "0.05 minutes"])
def test_a_backend_that_cannot_be_had_is_refused_before_anything_is_made(tmp_path, monkeypatch, small_overrides, length):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainingError, match="^backends.adamw8bit = 'triton' cannot be used on cpu: .*; set it to reference$"):
        run_training("tiny", [*small_overrides, f"train.length={length}", "train.device=cpu", "backends.adamw8bit=triton"], run_dir=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_run_with_muon_resumes_exactly_and_refuses_another_optimiser(hsmoe_cli, tmp_path, small_overrides, small_corpus):
    cfg = load_config("tiny", small_overrides + FEW + ["optim.matrices=muon", "optim.states=linear"])
    run = Run(cfg, tmp_path / "run", small_corpus)
    for _ in range(2): train_step(run.state)
    run.save()
    on = [train_step(run.state).loss for _ in range(2)]
    run.close()
    resumed = Run(cfg, tmp_path / "run", small_corpus, resume=True)
    assert [train_step(resumed.state).loss for _ in range(2)] == on
    again = masters(resumed)
    assert all(torch.equal(m, again[name]) for name, m in masters(run).items())
    resumed.close()
    result = hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", tmp_path / "other", *small_overrides, "optim.matrices=moun")
    assert result.returncode == 2 and "optim.matrices" in result.stderr and "'per_head_muon'" in result.stderr, result.stderr
    assert not (tmp_path / "other").exists()


def test_muon_needs_a_torch_that_has_it(tmp_path, monkeypatch, small_overrides, small_corpus):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(TrainingError, match="optim.matrices = 'muon' needs torch.optim.Muon, which PyTorch .* install 2.9 or newer, or choose adamw"):
        run_training("tiny", [*small_overrides, *FEW, "optim.matrices=muon"], run_dir=tmp_path / "run", corpus_dir=small_corpus)
    assert not (tmp_path / "run").exists()
