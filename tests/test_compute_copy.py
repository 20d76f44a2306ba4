"""The compute-copy path (DESIGN decision 1) against a model whose weights pass through `FakeQuant`: same values, same gradients, same ten steps."""
import pytest
import torch

from hsmoe.config import load_config
from hsmoe.model.hybrid import build_model
from hsmoe.mtp.loss import compute_adamtp_loss
from hsmoe.optim.adamw8bit import MasterOptimizer
from hsmoe.quant.fake import use_fake_quant

from conftest import SMALL


def masters_by_name(model):
    "fp32 values behind each parameter name, with or without parametrisations."
    return {n.replace("parametrizations.", "").replace(".original", ""): p for n, p in model.named_parameters()}


@pytest.mark.parametrize("weights", ["nvfp4:8x8", "nvfp4:1x16", "e1m3:8x8", "e1m2:8x8", "mxfp8_e4m3:1x32"])
def test_fake_quant_and_compute_copy_train_alike(weights):
    cfg = load_config("tiny", SMALL + [f"quant.weight_format={weights}", "train.length=1 steps"])
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build_model(cfg))
    copy, fake = models[0], use_fake_quant(models[1])
    kw = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    opt_copy, opt_fake = MasterOptimizer(list(copy.named_parameters()), torch.optim.AdamW, **kw), torch.optim.AdamW(fake.parameters(), **kw)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        tokens = torch.randint(0, cfg.model.vocab_size, (2, 32), generator=generator)
        depth = torch.randint(0, 5, (2, 32), generator=generator)
        losses = []
        for model, opt in ((copy, opt_copy), (fake, opt_fake)):
            opt.zero_grad()
            logits, _ = model(tokens)
            loss = compute_adamtp_loss(logits, tokens, depth)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1], f"step {step}"
        grads = [{n: p.grad for n, p in masters_by_name(m).items()} for m in (copy, fake)]
        assert grads[0].keys() == grads[1].keys()
        for name, g in grads[0].items(): assert torch.equal(g, grads[1][name]), f"step {step}: gradient of {name}"
        opt_copy.step(); opt_fake.step()
    with torch.no_grad(): assert torch.equal(copy(tokens)[0].hidden, fake(tokens)[0].hidden)
    assert any(hasattr(p, "block_format") for p in copy.parameters())
