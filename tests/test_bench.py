"""The notebooks under nbs/bench through papermill, with a handful of steps: tables, pictures, sentences and the record."""
import json

from conftest import ROOT
from test_notebooks import outputs


def test_tiny_choices(hsmoe_cli, tmp_path, small_corpus, small_overrides):
    result = hsmoe_cli("run", ROOT / "nbs/bench/tiny_choices.ipynb", "--output", "out/choices.ipynb", "-p", "steps", "5", "-p", "overrides", json.dumps(small_overrides),
                       "-p", "corpus_dir", small_corpus, "-p", "results_dir", "some results")
    assert result.returncode == 0, result.stderr[-3000:]
    notebook = tmp_path / "out/choices.ipynb"
    pages = [o["data"]["text/markdown"] for o in outputs(notebook) if "text/markdown" in o.get("data", {})]
    assert sum(p.count("|---|---:|") for p in pages) == 5                     # a table a question
    verdicts = [p for p in pages if p.startswith("**")]
    assert len(verdicts) == 5 and all("`tiny` takes" in v and "`5b` takes" in v for v in verdicts)
    assert "None" not in "".join(pages)
    assert sum("image/png" in o.get("data", {}) for o in outputs(notebook)) == 3
    (path,) = (tmp_path / "some results").iterdir()
    record = json.loads(path.read_text())
    assert path.name == f"tiny_choices-cpu-{record['date']}.json"
    assert {"bench", "card", "date", "commit", "torch", "ceilings", "rows"} <= record.keys() and record["settings"]["steps"] == 5
    assert all(r.keys() == {"name", "value", "unit", "peer", "peer_value", "ratio", "of_ceiling", "must", "aim"} for r in record["rows"])
    values = {r["name"]: r["value"] for r in record["rows"]}
    losses = {n: v for n, v in values.items() if n.endswith("val_loss")}
    states = 4 if "states=bnb val_loss" in losses else 3
    assert len(losses) == states + 3 + 2 + 2 + 2 and all(3 < v < 7 for v in losses.values())
    base = {losses[f"{n} val_loss"] for n in ("states=dynamic", "entropy_lambda=0", "router_std=1/sqrt(d)", "quantisation=on", "depth=3")}
    assert len(base) == 1, "what the preset says is trained once"
    assert len(set(losses.values())) == len(losses) - 4, "every other answer is a run of its own"
    assert 1 <= values["entropy_lambda=0 expert_load_max_over_mean"] <= 4
    assert {"qat_cost_percent", "depth_3_convergence", "states=linear gap_to_fp32"} <= values.keys()


def test_a_run_that_fails_is_named(hsmoe_cli, tmp_path):
    result = hsmoe_cli("run", ROOT / "nbs/bench/tiny_choices.ipynb", "--output", "out/choices.ipynb", "-p", "steps", "1", "-p", "corpus_dir", "no/such/corpus")
    assert result.returncode == 2 and "no/such/corpus" in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr.splitlines()[-1]
    assert not (tmp_path / "nbs").exists()
