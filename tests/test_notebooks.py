"""The run notebooks through papermill, as the quickstart and a scheduler start them."""
import json

import nbformat, pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hsmoe.train.telemetry import read_metrics

from conftest import ROOT


def outputs(notebook):
    cells = [c for c in nbformat.read(notebook, 4).cells if c.cell_type == "code"]
    return [o for c in cells for o in c.outputs]


def test_train_then_evaluate(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    overrides = json.dumps(small_overrides + ["train.length=12 steps"])
    result = hsmoe_cli("run", ROOT / "nbs/runs/train.ipynb", "-p", "preset", "tiny", "-p", "minutes", "null", "-p", "overrides", overrides,
                       "-p", "corpus_dir", small_corpus, "-p", "run_dir", "runs/my run ü")
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "runs/my run ü"
    assert {"train.ipynb", "config.yaml", "config.json", "env.json", "metrics.jsonl", "report.json", "checkpoints"} <= {p.name for p in run.iterdir()}
    report = json.loads((run / "report.json").read_text())
    assert {"val_loss", "val_bits_per_byte", "bigram_loss", "steps", "tokens", "tokens_per_s", "mean_depth", "clip_rate", "expert_load_max_over_mean",
            "peak_memory_bytes", "config_hash"} <= report.keys()
    assert report["steps"] == 12 and report["tokens"] == 12 * 4 * 64 and 2.5 < report["mean_depth"] < 3.5
    pictures = [o for o in outputs(run / "train.ipynb") if "image/png" in o.get("data", {})]
    assert len(pictures) == 4
    text = "".join(o.get("text", "") for o in outputs(run / "train.ipynb"))
    assert "bits a byte" in text and "--- 'def '" in text

    result = hsmoe_cli("run", ROOT / "nbs/runs/evaluate.ipynb", "-p", "run_dir", "runs/my run ü")
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((run / "eval.json").read_text())["val_loss"] == pytest.approx(report["val_loss"], rel=1e-6)
    assert (run / "evaluate.ipynb").exists()


def test_misspelt_parameter_and_failing_notebook(hsmoe_cli, tmp_path):
    result = hsmoe_cli("run", ROOT / "nbs/runs/train.ipynb", "-p", "minuets", "3")
    assert result.returncode == 2 and "'minutes'" in result.stderr and not (tmp_path / "runs").exists()
    result = hsmoe_cli("run", ROOT / "nbs/runs/train.ipynb", "-p", "source", "[no/such/place]", "-p", "run_dir", "runs/x")
    assert result.returncode == 2 and "no/such/place" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "runs/x").exists()


def test_minutes_become_steps(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    result = hsmoe_cli("train", "--corpus", small_corpus, "--run-dir", "run", "--minutes", "0.1", *small_overrides, "train.validate_every=0.5", "train.tensorboard=true", "train.wandb=offline")
    assert result.returncode == 0, result.stderr
    scalars = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("val_loss")
    assert [s.value for s in scalars] == pytest.approx([r["val_loss"] for r in read_metrics(tmp_path / "run") if "val_loss" in r])
    assert any(p.stat().st_size > 1000 for p in (tmp_path / "run" / "wandb").rglob("*.wandb"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] > 1 and report["seconds"] < 30
    assert f"length: {report['steps']} steps" in (tmp_path / "run" / "config.yaml").read_text()
