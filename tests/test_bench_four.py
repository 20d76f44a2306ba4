"""scripts/bench_four.sh and hsmoe.speed_four: two gloo processes and the cheapest group; the whole job with four, and with a group that runs out of time, under `slow`."""
import json, subprocess, sys

import pytest

from hsmoe import speed_four
from hsmoe.speed_four import EXACT, GROUPS, LOSS_APART, asked_for, read_words, run_job, target_table, why_not
from hsmoe.speed_comm import COLUMNS, STAGES
from hsmoe.train.loop import TrainingError

from conftest import ROOT

SCRIPT = ROOT / "scripts/bench_four.sh"


def job(tmp_path, *words, timeout=60):
    "(finished process, record or None) of the script, without papermill"
    result = subprocess.run(["bash", str(SCRIPT), f"results_dir={tmp_path}", *words], capture_output=True, text=True, timeout=timeout, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "RUNNER": "python", "LIMIT": str(timeout), "OMP_NUM_THREADS": "1"})
    records = [*tmp_path.glob("four-cpu-*.json")]
    return result, json.loads(records[0].read_text()) if records else None


def test_two_processes_have_the_numbers_of_one(tmp_path):
    "Float64 gradients and weights within 1e-10, quantised steps under the same routing within rounding; groups that were not asked for are not in the record"
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    result, record = job(tmp_path, "device=cpu", "ranks=2", "corpus=.", "groups=correctness,half")
    assert result.returncode == 0, result.stdout + result.stderr
    rows, groups = {r["name"]: r for r in record["rows"]}, record["settings"]["groups"]
    assert record["bench"] == "four" and record["card"] == "cpu" and record["settings"]["layout"] == "EP 2, DP 2, TP 1" and "says nothing about speed" in record["settings"]["note"]
    for shared in ("replicated", "sharded"):
        for what in ("gradient", "weight"): assert 0 < rows[f"ep2_float64_{shared}_{what}_difference"]["value"] <= EXACT == 1e-10
        assert groups["correctness"]["exact"][shared]["same_loads"] and len(groups["correctness"]["exact"][shared]["gradient"]) == 3
    assert 0 < rows["ep2_injected_loss_difference"]["value"] <= LOSS_APART and groups["correctness"]["injected"]["same_loads"]
    assert groups["correctness"]["state"] == "measured" and groups["half"]["state"] == "not run: half of 2 ranks is 1, which the group one has" and groups.keys() == {"correctness", "half"}


def test_what_fails_or_runs_out_is_in_the_record(tmp_path, monkeypatch):
    "A group with an error, one without time, one whose checkpoint is missing: each has its sentence, what came before stays, and the job goes on"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    asked = asked_for("cpu", 2, corpus=str(tmp_path / "nowhere"))
    real = speed_four.run_ranks
    def ranks(program, world, told, path, **how):
        parts = json.loads(told)["parts"]
        if "raw" in parts:
            speed_four.Path(path).write_text(json.dumps(dict(rows=[speed_four.row("raw_put_1mb_gb_s", 2.5, "GB/s")], settings={}, done=["raw"])))
            raise RuntimeError(f"{world} ranks were not done after {how['timeout_s']} s; the first said:\nhalf a line")
        if "block" in parts: assert json.loads(told)["put_gb_s"] == 2.5
        raise RuntimeError("rank 1 of 2 ended with exit code 1:\nTraceback (most recent call last):\nCorpusError: there is no corpus")
    monkeypatch.setattr(speed_four, "run_ranks", ranks)
    path, found = run_job(asked, tmp_path, ["exchanges", "block", "one"], 20, note=lambda text: None)
    states = {name: g["state"] for name, g in json.loads(path.read_text())["settings"]["groups"].items()}
    assert states["exchanges"].startswith("not done within its ") and states["exchanges"].endswith("s; measured before that: raw")
    assert states["block"] == "failed: CorpusError: there is no corpus; measured before that: nothing" and states["one"] == "not run: its checkpoint was not written"
    assert [r["name"] for r in json.loads(path.read_text())["rows"]] == ["raw_put_1mb_gb_s"]
    _, found = run_job(asked, tmp_path, ["block"], 5, note=lambda text: None)
    assert found["block"]["state"].startswith("not run: 5 s are left of the job's 5")


def test_what_is_refused(tmp_path, capsys):
    for words, says in ((["device=cpu", "ranks=1"], "ranks is 1, allowed are 0 for all, and 2 or more"), (["step=3"], "cannot read 'step=3'"), (["device=cpu", "corpus=.", "groups=x", f"results_dir={tmp_path}"], "there is no group 'x'")):
        assert speed_four.main(words) == 2 and not [*tmp_path.iterdir()]
        assert f"speed_four: {says}" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="there is no group 'blocks'; known are correctness"): run_job({}, tmp_path, ["blocks"])
    assert read_words(["groups=steps", "results_dir=x", "train.lr=3"]) == (dict(overrides=["train.lr=3"]), dict(groups=["steps"], results_dir="x"))
    assert sum(g.seconds for g in GROUPS.values()) <= speed_four.ALL_SECONDS < 540
    four = dict(ranks=4, one=dict(model=dict(n_shared=2, n_routed=8)))
    assert why_not("sharded", four) == "2 shared experts cannot be spread evenly over 4 ranks" and not any(why_not(g, four) for g in GROUPS if g != "sharded")


@pytest.mark.slow
def test_four_processes(tmp_path, small_corpus, small_overrides):
    "All groups with four gloo processes"
    words = [o for o in small_overrides if "wandb" not in o] + ["model.n_shared=4"]
    result, record = job(tmp_path, "device=cpu", "ranks=4", f"corpus={small_corpus}", "preset=tiny", "steps=2", "warmup=1", "calls=1", "seconds=900", *words, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    rows, groups = {r["name"]: r for r in record["rows"]}, record["settings"]["groups"]
    assert {name: g["state"] for name, g in groups.items()} == dict.fromkeys(GROUPS, "measured"), result.stdout
    wanted = {"ep4_float64_sharded_weight_difference", "ep4_injected_loss_difference", "ep4_block_slowdown_percent", "ep4_block_hidden_percent", "ep4_block_puts_packed_hidden_percent", "step_tiny_ep1_tokens_per_s", "step_tiny_ep4_tokens_per_s",
              "step_tiny_ep4_total_tokens_per_s", "step_tiny_ep4_sharded_tokens_per_s", "step_tiny_ep4_packed_tokens_per_s", "step_tiny_ep4_exposed_ms", "placement_machine_identity_cost", "placement_ring_taot_cost", "migrate_ms",
              "checkpoint_bytes", "checkpoint_at_ep2_first_loss_difference", "checkpoint_at_ep1_loss_difference"}
    assert wanted <= rows.keys(), wanted - rows.keys()
    assert rows["migrate_next_step_same_bits"]["value"] == rows["checkpoint_moved_same_bits"]["value"] == 1 and rows["migrate_experts"]["value"] > 0
    assert rows["placement_ring_taot_cost"]["value"] <= rows["placement_ring_identity_cost"]["value"]
    assert rows["step_tiny_ep4_total_tokens_per_s"]["value"] == pytest.approx(4 * rows["step_tiny_ep4_tokens_per_s"]["value"])
    assert all(r["must"] is None for name, r in rows.items() if "_block_" in name), "no bound on speed holds on a CPU"
    assert "step_tiny_ep4_placed_tokens_per_s" in rows
    c04 = groups["steps"]["packed"]["c04"]
    assert list(c04) == list(COLUMNS) and all(c04[c][s]["ms"] is not None for c in COLUMNS for s in STAGES)
    assert "not measured" not in target_table(record)[2] and groups["checkpoint"]["saved"]["ep"] == 4
