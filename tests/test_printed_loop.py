"""`scripts/train.py`: the request's own loop, run as printed on a CPU."""
import os, re, subprocess, sys

import torch

from hsmoe.config import load_config
from hsmoe.model.hybrid import HybridSparseMoEModel

from conftest import ROOT


def test_printed_loop_runs_and_learns(tmp_path, small_corpus, small_overrides):
    command = [sys.executable, ROOT / "scripts/train.py", "--corpus", small_corpus, "--out", tmp_path / "out", "--steps", 41, "--log-every", 5, "--checkpoint-every", 20, "--histogram-every", 20, *small_overrides]
    result = subprocess.run([str(c) for c in command], env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"Step \d+, Loss: ([0-9.]+), LR: [0-9.e+-]+", result.stdout)]
    assert len(losses) == 9 and losses[-1] < losses[0]
    assert result.stdout.rstrip().endswith("Training complete") and "max/mean" in result.stdout
    step = 40
    checkpoint = torch.load(tmp_path / "out" / f"checkpoint_{step}.pt")
    m = load_config("tiny", [*small_overrides, "train.length=1 steps"]).model
    model = HybridSparseMoEModel(num_layers=m.n_layers, hidden_dim=m.d_model, num_attention_heads=m.n_heads, num_routed_experts=m.n_routed, num_shared_experts=m.n_shared,
                                 expert_router_k=m.top_k, vocab_size=m.vocab_size, max_seq_len=m.max_seq_len, expert_inner=m.expert_inner, dense_inner=m.dense_inner)
    model.load_state_dict(checkpoint['model'])
