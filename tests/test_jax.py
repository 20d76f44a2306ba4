"Gradients of router and AdaMTP against JAX's: `scripts/check_gradients_jax.py`. All but the first test need JAX."
import importlib.util, os, re, subprocess, sys

import numpy as np
import pytest

from conftest import ROOT

SCRIPT = ROOT / "scripts" / "check_gradients_jax.py"


def run(*args, path=()):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, env=env, timeout=600)


def test_without_jax_it_says_what_to_install(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('not here')")
    done = run(path=[tmp_path])
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "not here" in done.stderr and "jax[cpu]" in done.stderr


@pytest.mark.slow
def test_gradients_are_those_of_jax():
    pytest.importorskip("jax")
    done = run("--seed", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = [float(e) for e in re.findall(r"^ {4}\S.* (\S+e[+-]\d+)$", done.stdout, re.M)]
    assert len(errors) > 100 and max(errors) <= 1e-10 and "WRONG" not in done.stdout
    assert {"router, ste", "layer, default_moe, a quarter masked", "AdaMTP live rows, nothing asked", "embedding, layer, AdaMTP with entropy"} <= set(done.stdout.splitlines())


@pytest.mark.slow
def test_wrong_gradients_are_found():
    pytest.importorskip("jax")
    spec = importlib.util.spec_from_file_location("check_gradients_jax", SCRIPT)
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    wrong = {name: error for name, _, error in check.router_case(np.random.default_rng(0), "ste", "topk")}
    assert wrong["(value)"] < 1e-14 and wrong["answers"] < 1e-14 and min(wrong["x"], wrong["weight"], wrong["bias"]) > 1e-3
    def forgets_the_trunk(*args, trunk_gradient, **options): return check.adamtp_loss_reference(*args, **options)
    wrong = {name: error for name, _, error in check.loss_case(np.random.default_rng(0), forgets_the_trunk, trunk_gradient=0.25)}
    assert wrong["hidden"] > 1e-3 and max(wrong[name] for name in ("(value)", "unembedding", "heads")) < 1e-14
