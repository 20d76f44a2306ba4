#!/usr/bin/env bash
# Builds the documentation from the notebooks into _docs/ and checks its links: with Quarto where it is installed, else with smalldocs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$HSMOE_ROOT"
[ $# -eq 0 ] || { echo "usage: bash scripts/docs.sh    (builds _docs/ and checks its links; takes no option)" >&2; exit 2; }

rm -rf _proc _docs
# nbdev's own first step of `nbdev_docs`, without its wish to install Quarto. To make the API pages it runs the exported cells and those
# that import; a cell that does more than import may need cells that are not run, and its saved output is shown anyway, so it is left alone.
python - <<'PY'
import ast, pathlib, sys, traceback

import yaml
from nbdev import processors, quarto
from nbdev.serve import proc_nbs

def imports_and_more(cell):
    plain, body = (ast.Import, ast.ImportFrom), cell.parsed_() or []
    inside = any(isinstance(node, plain) for statement in body for node in ast.walk(statement))
    return inside and not all(isinstance(statement, plain) for statement in body)

def needed(cell, nbdev_would_run=processors._do_eval):
    exported = cell.directives_.keys() & {"export", "exports", "exporti", "exec_doc"}
    return cell.cell_type == "code" and (exported or not imports_and_more(cell)) and nbdev_would_run(cell)

processors._do_eval = needed
quarto.refresh_quarto_yml()
quarto.nbdev_sidebar.__wrapped__()

# nbdev sorts folders behind the notebooks, by letters; the guide is where a reader begins, in this order
sidebar = pathlib.Path("nbs/sidebar.yml")
pages = yaml.safe_load(sidebar.read_text(encoding="utf-8"))
contents = pages["website"]["sidebar"]["contents"]
first = ["path", "design", "install", "data", "one_gpu", "four_gpus", "slurm", "resume", "evaluate", "export", "serve", "glossary", "limits"]
guide = next(part for part in contents if isinstance(part, dict) and part["section"] == "guide")
guide["contents"].sort(key=lambda page: first.index(name) if (name := pathlib.Path(page).stem) in first else len(first))
contents.remove(guide)
contents.insert(1, guide)
sidebar.write_text(yaml.safe_dump(pages, sort_keys=False), encoding="utf-8")
try: proc_nbs(n_workers=0)
except Exception as error: sys.exit(f"docs: {error}\n\n{traceback.format_exception_only(error.__cause__ or error)[-1]}")
PY
if command -v quarto > /dev/null; then
    (cd _proc && quarto render --no-cache)
else
    echo "Quarto is not installed; smalldocs renders the same site."
    # nbdev names a page without the number of its notebook and leaves that to Quarto: 10_quant.formats.ipynb becomes quant.formats.html
    python - <<'PY'
import re
from pathlib import Path
pages = [p for p in Path("_proc").rglob("*.ipynb") if re.match(r"\d+_", p.name)]
for page in pages: page.rename(page.with_name(re.sub(r"^\d+_", "", page.name)))
link = re.compile(r"(\]\((?:[\w.-]+/)*)\d+_([\w.-]+\.ipynb)")
for page in Path("_proc").rglob("*.ipynb"): page.write_text(link.sub(r"\1\2", page.read_text(encoding="utf-8")), encoding="utf-8")
sidebar = Path("_proc/sidebar.yml")
sidebar.write_text(re.sub(r"\b\d+_([\w.-]+\.ipynb)", r"\1", sidebar.read_text(encoding="utf-8")), encoding="utf-8")
PY
    smalldocs render --quiet _proc 2>&1 | sed '/output-file is not read/d'
fi
mv _proc/_docs _docs
python scripts/check_links.py _docs "$(sed -n 's/^doc_baseurl *= *//p' settings.ini)"
echo "The site is in _docs/; open _docs/index.html."
