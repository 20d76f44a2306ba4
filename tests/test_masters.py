"""Weights that are loaded are the weights that are trained: no fresh initialisation comes back through a master."""
import pytest
import torch

from hsmoe.config import load_config
from hsmoe.model.hybrid import build_model
from hsmoe.optim.adamw8bit import AdamW8bit, MasterOptimizer

from conftest import SMALL


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [lambda p: AdamW8bit(p, lr=0.0, weight_decay=0.0), lambda p: MasterOptimizer(p, torch.optim.SGD, lr=0.0)])
def test_a_warm_start_keeps_what_was_loaded(dtype, make):
    cfg = load_config("tiny", SMALL + [f"train.dtype={dtype}"])
    torch.manual_seed(1)
    trained = build_model(cfg).state_dict()
    torch.manual_seed(2)
    model = build_model(cfg)
    model.load_state_dict(trained)
    optimizer = make(list(model.named_parameters()))
    for p in model.parameters(): p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, value in model.state_dict().items(): assert torch.equal(value, trained[name]), name
