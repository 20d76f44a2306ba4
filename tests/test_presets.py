"""`5b` and `literal` exist in full on the meta device, and one layer of `literal` really runs."""
import psutil, pytest
import torch

from hsmoe.config import load_config
from hsmoe.model.hybrid import HybridSparseMoEModel, build_model, count_parameters
from hsmoe.mtp.loss import compute_adamtp_loss


def test_counts():
    with torch.device("meta"): five, literal = (count_parameters(HybridSparseMoEModel.from_config(load_config(n))) for n in ("5b", "literal"))
    assert five["total"] == 4_991_783_424 and five["active_experts"] == 750_942_720
    expert = 2 * 1536 * 6144 + 6144 + 1536
    assert literal["total"] == 24 * (72 * expert + 4 * 1536**2 + 3 * 1536 * 6144 + 64 * 1536) + 128_256 * 1536 + (24 * 3 + 1) * 1536


@pytest.mark.skipif(psutil.virtual_memory().available < 18e9, reason="one layer of the printed model needs 18 GB of free memory")
def test_one_layer_of_literal_runs():
    cfg = load_config("literal", ["model.n_layers=1", "train.dtype=bfloat16"])
    torch.manual_seed(0)
    model = build_model(cfg)
    for p in model.parameters(): vars(p).pop("master", None)
    model.requires_grad_(False)
    model.layers[0].moe.router.weight.requires_grad_(True)
    tokens = torch.randint(0, cfg.model.vocab_size, (1, 32))
    logits, routing = model(tokens)
    loss = compute_adamtp_loss(logits, tokens, torch.full((1, 32), 2))
    loss.backward()
    assert torch.isfinite(loss) and int(routing[0].load_E.sum()) == 32 * cfg.model.top_k
    assert model.layers[0].moe.router.weight.grad.abs().sum() > 0
