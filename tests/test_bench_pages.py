"""nbs/bench/formats and nbs/bench/muon from a file of finished trials whose losses are known: what the tables, sentences and records make of them. (Trials themselves are trained in test_bench.)"""
import ast, json

import matplotlib, pytest

from conftest import ROOT

ENV = dict(python="3", platform="a machine", packages=dict(torch="2"), commit=None, source_sha256="0" * 64, cpus=1, gpus=[])


def run_page(tmp_path, monkeypatch, name, losses, **given):
    "Rows, record and markdown of a page whose trials ended with `losses[question, answer]` plus a hundredth for each further seed. Its cells are run here, which is quicker than a kernel."
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    space, shown = {}, []
    for cell in json.loads((ROOT / f"nbs/bench/{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code": continue
        *body, last = ast.parse("".join(cell["source"])).body
        if "asked" in space and not (tmp_path / "trials.jsonl").exists(): write_trials(space["asked"], losses)
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), name, "exec"), space)
            shown.append(eval(compile(ast.Expression(last.value), name, "eval"), space))
        else: exec(compile(ast.Module([*body, last], []), name, "exec"), space)
        if "parameters" in cell["metadata"].get("tags", []): space |= dict(given, trials="trials.jsonl", results_dir="results")
    (path,) = (tmp_path / "results").iterdir()
    record = json.loads(path.read_text())
    return {r["name"]: r for r in record["rows"]}, record, "\n".join(x.data for x in shown if hasattr(x, "data"))


def write_trials(asked, losses):
    with open("trials.jsonl", "w") as file:
        for key, hashes in asked.runs.items():
            for i, h in enumerate(hashes):
                loss = losses[key] + 0.01 * i
                file.write(json.dumps(dict(hash=h, report=dict(val_loss=loss), step=[1, 2, 3], curve=[loss + 1, loss + 0.5, loss], loss=[3, 2, 1], seconds_per_step=0.1, env=ENV)) + "\n")


def test_formats(tmp_path, monkeypatch):
    losses = {"off": 2.0, "weights off": 2.01, "nvfp4:8x8": 2.02, "nvfp4:1x16": 2.018, "nvfp4:16x16": 2.04, "e1m2:8x8": 2.05, "e1m3:8x8": 2.01, "mxfp8 only": 2.001}
    rows, record, page = run_page(tmp_path, monkeypatch, "formats", {("format", a): v for a, v in losses.items()}, seeds=[5, 6])
    assert rows["loss_cost_nvfp4_8x8_percent"]["value"] == pytest.approx(100 * (0.02 / 2.0 + 0.02 / 2.01) / 2)
    assert rows["weight_cost_nvfp4_8x8_percent"]["value"] == pytest.approx(100 * (0.01 / 2.01 + 0.01 / 2.02) / 2)
    assert rows["loss_cost_nvfp4_16x16_percent"]["peer_value"] == 1.43 and rows["loss_cost_nvfp4_1x16_percent"]["peer_value"] == 1.19
    assert {f"val_loss_{n}" for n in ("off", "weights_off", "nvfp4_8x8", "nvfp4_1x16", "nvfp4_16x16", "e1m2_8x8", "e1m3_8x8", "mxfp8_only")} <= rows.keys()
    assert record["settings"]["counts"] == {a: a != "mxfp8 only" for a in losses if a != "off"} and record["settings"]["seeds"] == [5, 6]
    assert "`nvfp4:1x16` has the lowest loss and `e1m2:8x8` the highest" in page
    assert "`nvfp4:8x8` and `nvfp4:1x16` are a tie" in page and "`nvfp4:16x16` is worse than `nvfp4:8x8` by 0.0200 nats" in page
    assert "| nvfp4:8x8 | 4.125 | 2.0250 | +1.00 | +1.00 | **+1.00 ± 0.00** | **+0.50 ± 0.00** |" in page


def test_muon(tmp_path, monkeypatch):
    losses = {("AdamW", 0.003): 2.5, ("AdamW", 0.006): 2.4, ("Muon", 0.003): 2.3, ("Muon", 0.006): 2.35, ("Muon by head", 0.003): 2.45, ("Muon by head", 0.006): 2.402}
    rows, record, page = run_page(tmp_path, monkeypatch, "muon", losses, seeds=[5, 6], rates=[0.003, 0.006])
    assert rows["muon_val_loss"]["value"] == pytest.approx(2.305) and rows["muon_val_loss"]["peer_value"] == pytest.approx(2.405)
    assert (rows["adamw_best_rate"]["value"], rows["muon_best_rate"]["value"]) == (0.006, 0.003)
    assert record["settings"]["counts"] == {"Muon": True, "Muon by head": False}
    assert "**Muon is better than AdamW (-0.1000 nats" in page and "**Muon by head is a tie with AdamW" in page and "it does not reach AdamW's last loss" in page
    assert rows["muon_steps_to_adamw_loss"]["value"] == 3 and "per_head_muon_steps_to_adamw_loss" not in rows
