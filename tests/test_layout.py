"""The order of the notebooks is the order of the modules: each imports only from lower numbers (DESIGN)."""
import ast, json
from pathlib import Path

from conftest import ROOT


def modules():
    "Module name -> number of its notebook."
    return {path.stem.split("_", 1)[1]: int(path.stem.split("_", 1)[0]) for path in (ROOT / "nbs").glob("[0-9]*_*.ipynb")}


def imports_of(path: Path):
    "Names of the package's own modules that a module imports: `from .a import b` is a.b where that is a module, else a."
    package, known = path.relative_to(ROOT / "hsmoe").parts[:-1], modules()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom): continue
        if node.level: base = [*package[:len(package) - node.level + 1], *(node.module or "").split(".")]
        elif (node.module or "").split(".")[0] == "hsmoe": base = node.module.split(".")[1:]
        else: continue
        base = [part for part in base if part]
        for name in node.names: yield whole if (whole := ".".join([*base, name.name])) in known else ".".join(base)


def test_modules_import_from_lower_notebooks_only():
    number = modules()
    assert len(number) >= 20
    seen = 0
    for name, own in number.items():
        for other in filter(None, imports_of(ROOT / "hsmoe" / (name.replace(".", "/") + ".py"))):
            assert other in number, f"{name} imports {other}, which has no notebook"
            assert number[other] < own or other == name, f"{name} ({own}) imports {other} ({number[other]})"
            seen += 1
    assert seen > 30


def test_every_module_comes_from_a_notebook():
    made = {p.relative_to(ROOT / "hsmoe").with_suffix("").as_posix().replace("/", ".") for p in (ROOT / "hsmoe").rglob("*.py")}
    assert {m for m in made if not m.endswith("__init__") and m != "_modidx"} == set(modules())


def test_the_first_cell_holds_the_title_alone():
    "The site takes title, subtitle and `- key: value` lines from the first cell and drops whatever else is in it."
    for path in (ROOT / "nbs").rglob("*.ipynb"):
        if ".ipynb_checkpoints" in path.parts: continue
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        lines = [line for line in "".join(first["source"]).splitlines() if line.strip()]
        assert first["cell_type"] == "markdown" and lines[0].startswith("# ") and lines[1].startswith("> "), path
        assert all(line.startswith("- ") for line in lines[2:]), f"{path}: {lines[2]!r} would not be on the site"
