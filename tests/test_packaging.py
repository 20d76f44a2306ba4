"What a user installs: the wheel, the pins, the environment script, the README, the link check."
import ast
import importlib.metadata as metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHONS = ("3.10", "3.11", "3.12")


@pytest.fixture(scope="session")
def root():
    return Path(__file__).resolve().parent.parent


def environment(python, extra=""):
    "A marker environment for Linux and one version of Python."
    return {"python_version": python, "python_full_version": python + ".9", "sys_platform": "linux", "os_name": "posix",
            "platform_machine": "x86_64", "implementation_name": "cpython", "extra": extra}


def script(root, name, *args, **env):
    return subprocess.run(["bash", str(root / "scripts" / name), *args], capture_output=True, text=True, cwd="/", timeout=120,
                          env={**os.environ, **env})


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="session")
def wheel(root, tmp_path_factory):
    "A wheel built from a copy of what packaging reads, in a path with a space."
    source = tmp_path_factory.mktemp("a copy")
    for name in ("setup.py", "settings.ini", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    shutil.copytree(root / "hsmoe", source / "hsmoe", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation"], cwd=source, check=True, capture_output=True, text=True)
    return next((source / "dist").glob("*.whl"))


@pytest.fixture(scope="session")
def meta(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return metadata.PathDistribution(zipfile.Path(archive, next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
                                                      .split("/")[0] + "/")).metadata


@pytest.fixture(scope="session")
def requirements(meta):
    return [Requirement(r) for r in meta.get_all("Requires-Dist")]


@pytest.fixture(scope="session")
def pins(root):
    lines = (root / "pins.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(pins, name, python):
    "The versions that hold for a package under one Python: one, or none."
    return [next(iter(p.specifier)).version for p in pins
            if canonicalize_name(p.name) == canonicalize_name(name) and (p.marker is None or p.marker.evaluate(environment(python)))]


def test_wheel_holds_all_modules_and_presets(root, wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        entry = archive.read(next(n for n in inside if n.endswith("entry_points.txt"))).decode()
    wanted = {str(p.relative_to(root)) for pattern in ("*.py", "*.yaml") for p in (root / "hsmoe").rglob(pattern)}
    assert {n for n in inside if n.startswith("hsmoe/")} == wanted
    assert any(n.startswith("hsmoe/presets/") for n in wanted) and "hsmoe/quant/formats.py" in wanted
    assert {n.split("/")[0] for n in inside} == {"hsmoe", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    assert any(n.endswith("/LICENSE") for n in inside)
    assert "hsmoe = hsmoe.cli:main" in entry


def test_unpacked_wheel_finds_its_presets(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:         # which is all that installing a pure Python wheel does
        archive.extractall(tmp_path / "site")
    code = ("import hsmoe; from importlib import resources; print(hsmoe.__file__);"
            "print(*sorted(p.name for p in (resources.files('hsmoe') / 'presets').iterdir()))")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
                          capture_output=True, text=True, check=True).stdout.splitlines()
    assert Path(done[0]).is_relative_to(tmp_path)
    assert {"tiny.yaml", "shakespeare.yaml", "bench.yaml", "5b.yaml", "literal.yaml"} <= set(done[1].split())


def test_metadata(root, meta):
    settings = dict(re.findall(r"^(\w+) *= *(.*)$", (root / "settings.ini").read_text(), re.M))
    version = re.search(r'__version__ = "(.*)"', (root / "hsmoe" / "__init__.py").read_text())[1]
    assert meta["Version"] == settings["version"] == version
    assert meta["Requires-Python"] == f">={settings['min_python']}"
    assert {"dev", "llama", "bnb", "wandb", "megatron"} <= set(meta.get_all("Provides-Extra"))


def test_every_requirement_has_one_pin_within_its_range(meta, requirements, pins):
    extras = ["", *set(meta.get_all("Provides-Extra")) - {"nemo"}]       # which pins.txt says that it leaves out
    for python in PYTHONS:
        for need in requirements:
            if need.marker and not any(need.marker.evaluate(environment(python, e)) for e in extras):
                continue
            versions = pinned(pins, need.name, python)
            assert len(versions) == 1, f"{need.name} has {len(versions)} pins under Python {python}"
            assert need.specifier.contains(versions[0]), f"{need.name}=={versions[0]} is outside {need.specifier}"


def test_megatron_core_is_the_version_that_the_adapter_was_written_for(requirements, pins):
    need = next(r for r in requirements if r.name == "megatron-core")
    assert not need.marker.evaluate(environment("3.11")) and need.marker.evaluate(environment("3.11", "dev" if '"dev"' in str(need.marker) else "megatron"))
    assert [pinned(pins, "megatron-core", p) for p in PYTHONS] == [["0.16.1"]] * 3 and str(need.specifier) == "==0.16.1"
    try: installed = metadata.requires("megatron-core")
    except metadata.PackageNotFoundError: return
    for needed in map(Requirement, installed):      # what it needs is pinned too, so that no other torch comes with it
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            assert all(needed.specifier.contains(v) for v in pinned(pins, needed.name, "%d.%d" % sys.version_info[:2])), str(needed)


def test_pins_are_exact_and_unambiguous(pins):
    for pin in pins:
        (only,) = pin.specifier
        assert only.operator == "==" and "+" not in only.version and "*" not in only.version and not pin.url, str(pin)
        for python in PYTHONS:
            assert len(pinned(pins, pin.name, python)) <= 1, f"{pin.name} has two pins under Python {python}"


def test_the_environment_is_the_pinned_one(requirements, pins):
    if not (Path(sys.prefix) / "hsmoe-environment.txt").exists():
        pytest.skip("this environment was not built by setup_env.sh")
    python, seen, queue = "%d.%d" % sys.version_info[:2], set(), [r.name for r in requirements]
    while queue:
        name = canonicalize_name(queue.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:       # an extra that was not asked for
            continue
        queue += [r.name for r in map(Requirement, found.requires or []) if r.marker is None or r.marker.evaluate({"extra": ""})]
        if not re.match("triton|nvidia-|cuda-", name):
            assert [found.version.split("+")[0]] == pinned(pins, name, python), f"{name} {found.version} is not the pinned version"


def imports(tree):
    "(top-level name, whether importing the module needs it) of every absolute import."
    def walk(node, needed):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((a.name.split(".")[0], needed) for a in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield child.module.split(".")[0], needed
            lazy = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try, ast.If))
            yield from walk(child, needed and not lazy)
    yield from walk(tree, True)


def test_modules_import_only_what_is_declared(root, requirements):
    core = {canonicalize_name(r.name) for r in requirements if r.marker is None or "extra" not in str(r.marker)}
    export = {canonicalize_name(r.name) for r in requirements if 'extra == "export"' in str(r.marker)}       # hsmoe/hf holds files that are copied beside exported weights; nothing else imports them
    owners = metadata.packages_distributions()
    for path in sorted((root / "hsmoe").rglob("*.py")):
        for name, needed in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if needed and name != "hsmoe" and name not in sys.stdlib_module_names:
                assert {canonicalize_name(o) for o in owners.get(name, [])} & (core | export if path.parent.name == "hf" else core), f"{path.name} imports {name}, which setup.py does not require"


NO_PIP_SETTINGS = dict(HSMOE_TORCH_SOURCE="", PIP_CONFIG_FILE=os.devnull, PIP_FIND_LINKS="", PIP_INDEX_URL="", PIP_EXTRA_INDEX_URL="")


def torch_pin(pins):
    return next(iter(next(p for p in pins if p.name == "torch").specifier)).version


@pytest.fixture
def path_without_uv():
    return os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "uv").exists() or (Path(p) / "bash").exists())


@pytest.fixture
def path_with_uv(tmp_path, path_without_uv):
    "PATH with an executable called uv, which a dry run never starts."
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "uv").chmod(0o755)
    return f"{tmp_path / 'bin'}{os.pathsep}{path_without_uv}"


@pytest.fixture
def wheels(tmp_path, pins):
    "A folder with wheels that pip takes for the pinned torch: builds for a CPU and for CUDA 12.8."
    folder, version = tmp_path / "wheels", torch_pin(pins)
    folder.mkdir()
    for build in ("cpu", "cu128"):
        info = f"torch-{version}+{build}.dist-info"
        with zipfile.ZipFile(folder / f"torch-{version}+{build}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}+{build}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.mark.parametrize("manager, device", [("pip", "cpu"), ("conda", "cpu"), *(("uv", d) for d in ("cpu", "cu126", "cu128", "cu130"))])
def test_setup_env_dry_run(root, pins, tmp_path, manager, device):
    venv = tmp_path / "an env"
    done = script(root, "setup_env.sh", "--manager", manager, "--device", device, "--extras", "llama", "--venv", str(venv), "--dry-run", **NO_PIP_SETTINGS)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first == f"# Environment {venv} by {manager} (as --manager says), for {device}, with dev,bnb,wandb,llama:"
    if device == "cpu" and (sys.platform, platform.machine()) == ("linux", "x86_64"): assert re.search(r"--no-deps triton==\d+\.\d+\.\d+$", lines.pop(3))
    assert len(lines) == 4 and not venv.exists()
    assert ("conda create" if manager == "conda" else "venv") in lines[0] and "an\\ env" in lines[0]
    assert lines[2].endswith(f"torch=={torch_pin(pins)}") and lines[3].endswith(r"--editable .\[dev\,bnb\,wandb\,llama\]")
    assert all("--constraint pins.txt" in lines[i] for i in (1, 3))
    assert (f"--torch-backend {device}" in lines[2]) == (manager == "uv")
    assert "://" not in done.stdout


@pytest.mark.parametrize("python, wanted", [("3.10", False), ("3.12", (sys.platform, platform.machine()) == ("linux", "x86_64"))])
def test_setup_env_leaves_triton_out_where_the_pinned_one_has_no_build(root, tmp_path, python, wanted):
    done = script(root, "setup_env.sh", "--manager", "conda", "--python", python, "--venv", str(tmp_path / "env"), "--dry-run", **NO_PIP_SETTINGS)
    assert done.returncode == 0, done.stderr
    assert ("triton==" in done.stdout) == wanted


@pytest.mark.parametrize("manager", ["pip", "uv", "conda"])
@pytest.mark.parametrize("device", ["cpu", "cu128"])
def test_setup_env_takes_torch_from_a_folder(root, tmp_path, manager, device):
    done = script(root, "setup_env.sh", "--manager", manager, "--device", device, "--torch-source", str(tmp_path), "--venv", str(tmp_path / "env"), "--dry-run")
    assert f"--find-links {tmp_path}" in done.stdout and "--torch-backend" not in done.stdout


@pytest.mark.parametrize("options, settings, uv, manager, why", [
    ([], {}, True, "uv", "it is on PATH"),                                                      # SPEC E-11
    (["--device", "cu128"], dict(PIP_FIND_LINKS="WHEELS"), True, "uv", "it is on PATH"),
    ([], {}, False, "pip", "uv is not on PATH"),
    ([], dict(PIP_FIND_LINKS="WHEELS"), True, "pip", "it finds the CPU build of torch in WHEELS"),
    ([], dict(PIP_FIND_LINKS="file://WHEELS"), True, "pip", "it finds the CPU build of torch in WHEELS"),
    ([], dict(PIP_CONFIG_FILE="CONFIG"), True, "pip", "it finds the CPU build of torch in WHEELS"),
    ([], dict(PIP_FIND_LINKS="/no/folder"), True, "uv", "it is on PATH"),
    (["--torch-source", "WHEELS"], {}, True, "pip", "--torch-source says where the CPU build of torch is"),
    (["--manager", "uv"], dict(PIP_FIND_LINKS="WHEELS"), True, "uv", "as --manager says"),
])
def test_setup_env_says_which_manager_and_why(root, tmp_path, wheels, path_with_uv, path_without_uv, options, settings, uv, manager, why):
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nfind-links = {wheels}\n")
    fill = lambda text: text.replace("WHEELS", str(wheels)).replace("CONFIG", str(config))
    done = script(root, "setup_env.sh", *map(fill, options), "--venv", str(tmp_path / "env"), "--dry-run",
                  **{**NO_PIP_SETTINGS, **{k: fill(v) for k, v in settings.items()}, "PATH": path_with_uv if uv else path_without_uv})
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith(f"# Environment {tmp_path / 'env'} by {manager} ({fill(why)}), for ")
    assert second.startswith("uv venv") == (manager == "uv")


def test_setup_env_leaves_a_wheel_for_another_python_to_pip(root, tmp_path, wheels, path_with_uv):
    for wheel in wheels.iterdir():
        wheel.rename(str(wheel).replace("py3-none-any", "cp27-cp27m-win32"))
    done = script(root, "setup_env.sh", "--venv", str(tmp_path / "env"), "--dry-run", **{**NO_PIP_SETTINGS, "PIP_FIND_LINKS": str(wheels), "PATH": path_with_uv})
    assert " by uv (it is on PATH)" in done.stdout.splitlines()[0]


@pytest.mark.parametrize("given, version", [(None, "3.11"), ("python3.11", "3.11"), ("3.10", "3.10"), ("3.12.4", "3.12.4"), (sys.executable, "%d.%d" % sys.version_info[:2])])
def test_setup_env_gives_conda_a_version(root, tmp_path, given, version):
    done = script(root, "setup_env.sh", "--manager", "conda", *(["--python", given] if given else []), "--venv", str(tmp_path / "env"), "--dry-run", **NO_PIP_SETTINGS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].endswith(f" python={version} pip")


@pytest.mark.parametrize("settings", [dict(PIP_FIND_LINKS="WHEELS"), dict(PIP_EXTRA_INDEX_URL="https://example.org/whl/cu128")])
@pytest.mark.parametrize("manager", ["pip", "conda"])
def test_setup_env_takes_a_cuda_build_that_pip_is_set_up_to_find(root, tmp_path, wheels, manager, settings):
    done = script(root, "setup_env.sh", "--manager", manager, "--device", "cu128", "--venv", str(tmp_path / "env"), "--dry-run",
                  **{**NO_PIP_SETTINGS, **{k: v.replace("WHEELS", str(wheels)) for k, v in settings.items()}})
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 5, done.stderr


@pytest.mark.parametrize("options, words", [
    (["--manager", "poetry"], ["poetry", "pip, uv, conda"]),
    (["--device", "cu100"], ["cu100", "cpu, cu126, cu128, cu130"]),
    (["--extras", "llama,mice"], ["mice", "llama", "bench", "megatron", "torchao"]),
    (["--python", "/no/python"], ["/no/python", "3.11"]),
    (["--manager", "conda", "--python", "python2"], ["python2", "3.11"]),
    (["--manager", "pip", "--device", "cu126"], ["pip", "cu126", "--manager uv", "--torch-source"]),
    (["--manager", "conda", "--device", "cu130"], ["conda", "cu130", "--manager uv", "--torch-source"]),
    (["--frob"], ["--frob", "--manager"]),
    (["--device"], ["--device", "value"]),
])
def test_setup_env_refuses_in_one_sentence(root, tmp_path, options, words):
    done = script(root, "setup_env.sh", *options, "--venv", str(tmp_path / "env"), "--dry-run", **NO_PIP_SETTINGS) if options[-1] != "--device" else \
        script(root, "setup_env.sh", "--dry-run", *options)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words) and not (tmp_path / "env").exists()


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh", "docs.sh"])
def test_scripts_refuse_unknown_options(root, name):
    done = script(root, name, "--frob")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_readme_is_made_from_the_index(root):
    made = module(root / "scripts" / "readme.py").readme(root / "nbs" / "index.ipynb")
    assert made == (root / "README.md").read_text(encoding="utf-8"), "run: python scripts/readme.py"
    for command in re.findall(r"^bash (\S+)$", made, re.M):
        assert (root / command).is_file(), f"README.md names {command}, which does not exist"


def test_link_check_finds_what_is_broken(root, tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="top">a</h1><a href="b.html#here">ok</a><a href="https://example.org/x">elsewhere</a><a href="/base/sub/">ok</a>')
    (tmp_path / "b.html").write_text('<p id="here"></p><a href="a.html#gone">no anchor</a><img src="no.png"><a href="#here">ok</a>')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.html").write_text('<a href="../a.html#top">ok</a>')
    broken = module(root / "scripts" / "check_links.py").broken_links(tmp_path, "/base")
    assert [(str(page), link) for page, link in broken] == [("b.html", "a.html#gone"), ("b.html", "no.png")]
