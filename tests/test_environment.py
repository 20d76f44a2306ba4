"How an environment is built and looked at: the conda file, the optional groups, and the sentences about drivers and cards."
import importlib.util, os, re, subprocess, sys

import pytest
import yaml

from conftest import ROOT


def setup_env(*args):
    return subprocess.run(["bash", str(ROOT / "scripts" / "setup_env.sh"), *args, "--dry-run"], capture_output=True, text=True, cwd="/", timeout=60,
                          env={**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "HSMOE_TORCH_SOURCE": ""})


def test_the_conda_file_is_what_setup_env_builds_with_conda(tmp_path):
    done = setup_env("--manager", "conda", "--venv", str(tmp_path / "env"))
    assert done.returncode == 0, done.stderr
    file = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = file["dependencies"]
    first, made, *_, last = done.stdout.splitlines()
    assert file["name"] == "hsmoe" and made.endswith(" " + " ".join(conda)) and "python=3.11" in conda
    assert pip["pip"] == ["--constraint pins.txt", "--editable .[" + re.search(r"with ([\w,]+):$", first)[1] + "]"]
    assert "--constraint pins.txt" in last and last.replace("\\", "").endswith(pip["pip"][1])


def test_every_group_of_setup_py_is_known_to_setup_env(tmp_path):
    groups = re.findall(r'^    "(\w+)": \[', (ROOT / "setup.py").read_text(encoding="utf-8"), re.M)
    assert {"llama", "data", "export", "eval", "serve", "jax", "bench", "nemo", "dev"} <= set(groups)
    done = setup_env("--manager", "pip", "--extras", ",".join(g for g in groups if g != "nemo"), "--venv", str(tmp_path / "env"))
    assert done.returncode == 0, done.stderr
    assert set(re.search(r"with ([\w,]+):$", done.stdout.splitlines()[0])[1].split(",")) == set(groups) - {"nemo"}


def test_nemo_is_refused_with_what_to_do(tmp_path):
    done = setup_env("--extras", "jax,nemo", "--venv", str(tmp_path / "env"))
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "pins.txt" in done.stderr and "'.[nemo]'" in done.stderr and not (tmp_path / "env").exists()
    pins = (ROOT / "pins.txt").read_text(encoding="utf-8")
    assert not re.search(r"^(nemo-run|leptonai)==", pins, re.M)


@pytest.fixture(scope="module")
def verify():
    spec = importlib.util.spec_from_file_location("verify_env", ROOT / "scripts" / "verify_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMI = "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8 |"

@pytest.mark.parametrize("built, smi, hidden, error, words", [
    ("12.8", None, None, "", ["no NVIDIA driver", "--gpus all"]),
    ("12.8", "No devices were found", None, "", ["no NVIDIA driver"]),
    ("13.0", SMI, None, "", ["570.86.15", "12.8", "13.0", "--device"]),
    ("12.6", SMI, "", "", ["CUDA_VISIBLE_DEVICES=''", "unset"]),
    ("12.9", SMI, "-1", "", ["CUDA_VISIBLE_DEVICES='-1'"]),              # a newer minor number is no reason
    ("12.9", SMI, "0,1", "out of memory", ["570.86.15", "out of memory"]),
    ("12.8", SMI, "GPU-4f2a", "", ["without a reason"]),
])
def test_why_there_is_no_gpu(verify, built, smi, hidden, error, words):
    said = verify.no_gpu(built, smi, hidden, error)
    assert all(word in said for word in words) and "\n" not in said


@pytest.mark.parametrize("capability, archs, fits", [
    ((9, 0), ["sm_80", "sm_90"], True), ((8, 9), ["sm_80", "sm_90"], True), ((8, 0), ["sm_86", "sm_90"], False),
    ((10, 3), ["sm_80", "sm_90"], False), ((10, 3), ["sm_90", "sm_100"], True), ((10, 3), ["sm_90", "sm_100a"], False), ((10, 3), ["sm_100f"], True),
    ((12, 0), ["sm_90", "compute_90"], True), ((9, 0), ["compute_100"], False), ((9, 0), ["sm_90a"], True), ((9, 0), [], False),
])
def test_which_cards_a_build_has_code_for(verify, capability, archs, fits):
    assert verify.has_code(capability, archs) == fits
    said = verify.no_code([("H200", (9, 0)), ("card", capability)], ["sm_90", *archs])
    assert said is None if fits or capability == (9, 0) else f"GPU 1, an card, has compute capability {capability[0]}.{capability[1]}" in said


def test_another_build_than_wanted(verify):
    assert verify.other_build("cpu", "2.13.0", "13.0") is None and verify.other_build("cu128", "2.13.0+cu128", "12.8") is None
    for built in (None, "12.6"): assert "is not the cu128 build" in verify.other_build("cu128", "2.13.0", built)


def test_verify_refuses_an_unknown_device(verify, capsys):
    assert verify.main(["cu100"]) == verify.main([]) == 2
    assert capsys.readouterr().err.count("cpu|cu126|cu128|cu130") == 2


def test_verify_prints_what_is_there_and_fails_for_another_build(verify, capsys, monkeypatch):
    import torch
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "megatron.core", type(sys)("megatron.core"))
    sys.modules["megatron.core"].parallel_state = None
    monkeypatch.setattr(verify, "installed", lambda: dict(python="3.12.3", torch="2.14.0", cuda=None, nccl=None, torchao=None, triton=None, **{"megatron-core": "0.16.1"}))
    assert verify.main(["cpu"]) == 0
    said = capsys.readouterr().out
    assert "CUDA none, available False" in said and "note: Python: 3.12.3" in said and "(E-05)" in said and "2.14.0 is newer than 2.13.0" in said
    assert verify.main(["cu128"]) == 1
    assert "is not the cu128 build" in capsys.readouterr().err
