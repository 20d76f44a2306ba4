"""What the tests share: a small corpus of real text (the standard library's own sources) and a small model on it."""
import json, os, subprocess, sys, sysconfig
from pathlib import Path

import pytest
import torch

from hsmoe.config import load_config
from hsmoe.data.corpus import prepare_corpus
from hsmoe.train.loop import corpus_options

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["model.vocab_size=300", "model.d_model=64", "model.n_heads=2", "model.n_layers=2", "model.max_seq_len=64", "model.expert_inner=32", "model.dense_inner=32",
         "data.seq_len=64", "data.val_fraction=0.2", "train.batch_sequences=4", "train.micro_batch_sequences=2", "train.val_tokens=1024", "train.final_val_tokens=2048",
         "train.wandb='off'", "train.tensorboard=false", "train.log_every=1", "train.histogram_every=5", "train.checkpoint_every=5", "train.validate_every=10"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def denormals():
    "A run flushes them in its process; every test begins without that."
    torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    "Forty modules of the standard library, in a folder with a space and an umlaut in its name."
    folder = tmp_path_factory.mktemp("some text ü")
    sources = sorted((Path(sysconfig.get_path("stdlib")) / "email").glob("*.py")) + sorted((Path(sysconfig.get_path("stdlib")) / "json").glob("*.py"))
    for path in sources: (folder / path.name.replace("__init__", path.parent.name)).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def small_overrides(text_folder):
    return SMALL + [f"data.sources={json.dumps([str(text_folder)])}"]


@pytest.fixture(scope="session")
def small_corpus(small_overrides, tmp_path_factory):
    cfg = load_config("tiny", small_overrides + ["train.length=1 steps"])
    folder = tmp_path_factory.mktemp("corpus") / "small"
    prepare_corpus(list(cfg.data.sources), folder, **corpus_options(cfg))
    return folder


@pytest.fixture
def hsmoe_cli(tmp_path):
    "Run the command line in a fresh folder; returns the finished process."
    def run(*args, timeout=300):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        return subprocess.run([sys.executable, "-m", "hsmoe.cli", *map(str, args)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=timeout)
    return run
