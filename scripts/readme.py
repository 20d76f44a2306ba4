"Writes README.md from nbs/index.ipynb: markdown cells as they are, code cells and their printed output as blocks, hidden cells left out."
import re
import sys
from pathlib import Path

import nbformat

root = Path(__file__).resolve().parent.parent


def blocks(cell):
    "The markdown of one cell, as a list of blocks."
    if cell.cell_type == "markdown":
        return [cell.source]
    if cell.cell_type != "code" or re.search(r"^#\|\s*(hide|default_exp|include:\s*false)\b", cell.source, re.M):
        return []
    source = re.sub(r"^#\|.*\n?", "", cell.source, flags=re.M).strip("\n")
    shown = [f"```python\n{source}\n```"] if source else []
    printed = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return shown + [f"```text\n{p.rstrip()}\n```" for p in printed if p]


def readme(notebook):
    "The whole page, which starts by saying where it comes from."
    cells = nbformat.read(notebook, as_version=4).cells
    note = "<!-- Made from nbs/index.ipynb by scripts/readme.py: edit the notebook. -->"
    return "\n\n".join([note] + [b for cell in cells for b in blocks(cell)]) + "\n"


if __name__ == "__main__":
    notebook = root / "nbs" / "index.ipynb"
    if not notebook.exists():
        sys.exit(f"readme: {notebook} does not exist; README.md is made from it.")
    (root / "README.md").write_text(readme(notebook), encoding="utf-8")
