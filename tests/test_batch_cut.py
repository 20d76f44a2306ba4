"""Loss, gradients and routing loads of a step do not depend on how its batch is cut into micro-batches (SPEC A-02)."""
import pytest
import torch

from hsmoe.config import load_config, resolve
from hsmoe.data.corpus import Corpus
from hsmoe.train.loop import TrainState, datasets, train_step


def one_step(small_overrides, small_corpus, micro, extra):
    cfg = load_config("tiny", small_overrides + [f"train.micro_batch_sequences={micro}", "train.length=4 steps", "router.z_loss=0.001", *extra])
    state = TrainState(cfg, resolve(cfg), datasets(cfg, Corpus.open(small_corpus))[0], torch.device("cpu"))
    seen = {}
    state.optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.clone() for n, p in state.model.named_parameters()}))
    return train_step(state), seen, state.model


@pytest.mark.parametrize("extra", [[], ["router.straight_through=default_moe"], ["quant.weight_format=null", "quant.activation_format=null", "quant.attention_format=null"]])
def test_cut_does_not_matter(small_overrides, small_corpus, extra):
    whole, grads, model = one_step(small_overrides, small_corpus, 4, extra)
    assert grads and all(g.abs().max() > 0 for n, g in grads.items() if 'embed' in n)
    for micro in (2, 1):
        cut, cut_grads, cut_model = one_step(small_overrides, small_corpus, micro, extra)
        assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
        assert cut.entropy == pytest.approx(whole.entropy, rel=1e-6)
        assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(whole.loads, cut.loads))
        for name, g in grads.items():
            assert torch.allclose(g, cut_grads[name], rtol=1e-3, atol=1e-5 * max(1e-3, g.abs().max().item())), name
        for name, b in model.named_buffers(): assert torch.allclose(b.float(), dict(cut_model.named_buffers())[name].float(), atol=1e-6), name
