"""nbs/bench/comm with tiny sizes in two gloo processes, its arithmetic against numbers worked by hand, and the nemo-run launcher's sentences."""
import ast, json, os, subprocess, sys

import matplotlib, pytest

from hsmoe.comm.mesh import Traffic
from hsmoe.speed_comm import COLUMNS, PRINTED, STAGES, BlockTimes, Cell, Steps, block_rows, by_stage, c04_columns, c04_table, choose_ranks, hidden_percent, measure, saved_percent, slowdown_percent, slowest, step_rows
from hsmoe.train.loop import TrainingError

from conftest import ROOT


def run_page(folder, monkeypatch, **given):
    "(rows by name, record, text that the page shows); its cells are run here, which is quicker than a kernel, and the ranks are processes of their own"
    matplotlib.use("Agg")
    monkeypatch.chdir(folder)
    space, shown = {}, []
    for cell in json.loads((ROOT / "nbs/bench/comm.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code": continue
        *body, last = ast.parse("".join(cell["source"])).body
        if not isinstance(last, ast.Expr): body, last = [*body, last], None
        exec(compile(ast.Module(body, []), "comm", "exec"), space)
        if last is not None: shown.append(eval(compile(ast.Expression(last.value), "comm", "eval"), space))
        if "parameters" in cell["metadata"].get("tags", []):
            assert given.keys() <= space.keys(), "a parameter that the page does not have"
            space |= dict(given, results_dir="results")
    (path,) = (folder / "results").iterdir()
    record = json.loads(path.read_text())
    return {r["name"]: r for r in record["rows"]}, record, "\n".join(x.data for x in shown if hasattr(x, "data"))


def test_page(tmp_path, monkeypatch, small_corpus, small_overrides):
    rows, record, page = run_page(tmp_path, monkeypatch, device="cpu", parts=["raw", "dispatch", "block", "settle", "step"], sizes=[128], tokens=64, d_model=32, n_experts=4, inner=16, calls=1, preset="tiny", overrides=small_overrides,
                                  corpus=str(small_corpus), steps=1, warmup=1)
    assert record["card"] == "cpu" and record["settings"]["ranks"] == 2 and "says nothing about speed" in record["settings"]["notes"]["where"]
    assert {"raw_all_to_all_0.016mb_ms", "raw_put_0.016mb_gb_s", "dispatch_0.016mb_ms", "dispatch_0.016mb_mxfp8_sent", "combine_0.016mb_packed_saved_percent", "ep1_block_ms", "ep2_block_slowdown_percent", "ep2_block_hidden_percent",
            "settle_ms", "settle_put_ms", "weights_packed_ms", "ep1_step_tiny_tokens_per_s_rank", "ep2_step_tiny_tokens_per_s_rank", "ep2_step_tiny_packed_exposed_percent"} <= rows.keys()
    assert all(r["must"] is None for r in rows.values()), "no bound holds on a CPU"
    assert rows["ep2_block_error"]["value"] < 1e-5 and rows["ep2_block_hidden_percent"]["value"] <= 100
    native, packed = rows["combine_0.016mb_sent"]["value"], rows["combine_0.016mb_packed_sent"]["value"]
    assert packed / native == pytest.approx((16 + 2) / 128), "32 numbers: 16 bytes of codes and 2 scales for 128 bytes"
    assert rows["settle_ms"]["peer"] == "reduce_scatter of the same bytes" and rows["ep2_step_tiny_tokens_per_s_rank"]["peer_value"] == rows["ep1_step_tiny_tokens_per_s_rank"]["value"]
    step = record["settings"]["step"]
    assert list(step["c04"]) == list(COLUMNS) and step["tokens"] == 4 * 64
    sent = {run: {t["kind"]: t["bytes"] for t in lines} for run, lines in step["traffic"].items()}
    assert sent["blocked"].keys() == sent["as it is"].keys() == sent["packed"].keys() >= {"dispatch", "combine", "dispatch gradient", "combine gradient", "settle", "weights"}
    assert sent["packed"]["combine"] < 0.2 * sent["as it is"]["combine"] and sent["packed"]["weights"] < sent["as it is"]["weights"] and sent["packed"]["settle"] == sent["as it is"]["settle"]
    cells = step["c04"]
    assert all(cells["+TAOT"][s]["ms"] is None and cells["+TAOT"][s]["why"] for s in STAGES) and all(cells[c]["total"]["ms"] == pytest.approx(sum(cells[c][s]["ms"] for s in STAGES)) for c in ("baseline", "+overlap", "+ODC", "final"))
    assert cells["baseline"]["gradients"] == cells["+overlap"]["gradients"] != cells["+ODC"]["gradients"]
    assert "| expert all-to-all, forward | 40 / " in page and "Nothing here has been measured on several GPUs yet" in page and "+TAOT: not measured" in page


def test_percentages():
    assert slowdown_percent(11.2, 10) == pytest.approx(12) and slowdown_percent(10, 10) == 0
    assert hidden_percent(11.2, 10.9, 2) == pytest.approx(85) and hidden_percent(10, 10.1, 2) == 100 and hidden_percent(12, 10, 1) == -100
    assert slowest([[3, 5, 4], [4, 3, 6]]) == 5 and saved_percent(864, 3072) == pytest.approx(71.875)
    rows = {r["name"]: r for r in block_rows(2, dict(native=BlockTimes(10.0, 11.2, 10.9, 2.0, 0.0), puts_packed=BlockTimes(20.0, 20.8, 20.75, 1.0, 1e-4)), True)}
    assert rows["ep2_block_slowdown_percent"]["value"] == pytest.approx(4) and (rows["ep2_block_slowdown_percent"]["must"], rows["ep2_block_slowdown_percent"]["aim"]) == (12, 5)
    assert rows["ep2_block_hidden_percent"]["value"] == pytest.approx(95) and (rows["ep2_block_hidden_percent"]["must"], rows["ep2_block_hidden_percent"]["aim"]) == (85, 95)
    assert rows["ep2_block_native_slowdown_percent"]["value"] == pytest.approx(12) and rows["ep2_block_native_hidden_percent"]["value"] == pytest.approx(85)
    assert rows["ep2_block_native_hidden_percent"]["must"] is None and rows["ep2_block_error"]["value"] == 1e-4


def test_budget():
    "C-04: which lines of the meter are which stage, and which run fills which column"
    def run(dispatch, counts=0.5):
        made = [("dispatch", "all_to_all", dispatch), ("counts", "all_to_all", counts), ("combine gradient", "all_to_all", 2), ("settle", "all_to_all", 4), ("weights", "all_gather", 1), ("counts", "all_reduce", 0.25), ("norm", "all_reduce", 0.25)]
        return [Traffic(kind, op, "bfloat16" if kind != "counts" else "int64", 1, 100, 5.0, ms) for kind, op, ms in made]
    stages = by_stage(run(3))
    assert [stages[s].ms for s in STAGES] == [3.5, 2, 4, 1.5] and [stages[s].total_ms for s in STAGES] == [10, 5, 5, 15] and stages[STAGES[0]].wires == "bfloat16, int64"
    columns = c04_columns(run(3), run(1), run(0.5), Cell(9, 9, 700, "float32"))
    assert [columns[c]["total"].ms for c in COLUMNS] == [3.5 + 2 + 9 + 1.5, 1.5 + 2 + 9 + 1.5, 1.5 + 2 + 4 + 1.5, None, 1 + 2 + 4 + 1.5]
    lines = c04_table({c: {s: cell._asdict() for s, cell in found.items()} for c, found in columns.items()})
    assert lines[2] == "| expert all-to-all, forward | 40 / 3.5 | 2 / 1.5 | 2 / 1.5 | 1.5 / – | 1.5 / 1 |" and lines[6] == "| total | 340 / 16 | 264 / 14 | 44 / 9 | 38 / – | 32 / 8.5 |"
    assert PRINTED["total"] == (340, 264, 44, 38, 32) and [sum(PRINTED[s][i] for s in STAGES) for i in range(5)] == [340, 264, 44, 38, 38], "only the last printed column does not add up"
    runs = {name: Steps(ms, 1000, [], None) for name, ms in {"alone": 100, "blocked": 150, "as it is": 125, "packed": 100}.items()}
    rows = {r["name"]: r for r in step_rows("5b", 2, runs, columns)}
    assert rows["ep2_step_5b_tokens_per_s_rank"]["value"] == 8000 and rows["ep2_step_5b_tokens_per_s_rank"]["ratio"] == pytest.approx(0.8)
    assert rows["ep2_step_5b_exposed_percent"]["value"] == pytest.approx(7.2) and rows["ep2_step_5b_packed_exposed_percent"]["value"] == pytest.approx(8.5)


def test_what_is_refused(monkeypatch):
    import torch
    for args, says in ((("gpu",), "device is 'gpu', allowed are"), (("cpu", 1), "allowed are 0 for all, and 2 or more")):
        with pytest.raises(TrainingError, match=says): choose_ranks(*args)
    with pytest.raises(TrainingError, match="there is no part 'blocks'; known are raw, dispatch"): measure(["blocks"], {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_ranks()[:2] == ("cpu", 2) and "one GPU, which has no other to talk to" in choose_ranks("cuda").note
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert choose_ranks()[:2] == ("cuda", 2) and choose_ranks("cuda", 3).ranks == 3
    with pytest.raises(TrainingError, match="ranks is 4, and this machine has 3 GPUs"): choose_ranks("auto", 4)


def nemo(*args, **env):
    return subprocess.run([sys.executable, str(ROOT / "scripts/launch_nemo.py"), *args], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)} | env, timeout=60)


def test_nemo_launcher_without_nemo_run(tmp_path):
    (tmp_path / "nemo_run.py").write_text("raise ImportError('not here')\n")          # whether it is installed or not
    result = nemo("--processes", "2", "train", "--preset", "tiny", PYTHONPATH=str(tmp_path))
    assert result.returncode == 2 and result.stderr == "launch_nemo: the package nemo-run cannot be imported (not here); install it with pip install nemo-run 'leptonai<0.28', or start the job with torchrun or scripts/launch.sbatch\n"
    for args, says in ((["--executor", "kubernetes"], "--executor is 'kubernetes', allowed are local and slurm"), (["--nodes", "2"], "the local executor has this host only"), (["--executor", "slurm"], "needs --account")):
        result = nemo(*args, "train")
        assert result.returncode == 2 and says in result.stderr and result.stderr.count("\n") == 1, result.stderr


def test_nemo_task_quotes_what_it_hands_on(tmp_path):
    "The script of a node, run by bash with an interpreter that only prints its arguments"
    sys.path.insert(0, str(ROOT / "scripts"))
    try: import launch_nemo
    finally: sys.path.pop(0)
    fake = type("run", (), {"Script": staticmethod(lambda inline: inline)})
    (tmp_path / "python").write_text("#!/bin/sh\nfor a in \"$@\"; do echo \"$a\"; done\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(launch_nemo.task(fake, "train", ["train.length=4 steps", "it's"], 2, True, python=str(tmp_path / "python")))
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True, env={k: v for k, v in os.environ.items() if not k.startswith("SLURM")})
    assert result.stdout.splitlines() == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0", "-m", "hsmoe.cli", "train", "train.length=4 steps", "it's"]
    assert result.returncode == 3 and (tmp_path / "exit_code").read_text() == "3\n"
    assert launch_nemo.environment(True, "ib0", {"NCCL_IB_HCA": "mlx4"})["NCCL_IB_HCA"] == "mlx4" and launch_nemo.environment(False, None, {})["NCCL_IB_DISABLE"] == "1"
