#!/usr/bin/env bash
# Everything CI runs, in order: environment, notebooks in step with what is made from them, notebooks' own tests, documentation, pytest.
# A section that fails does not stop the next; the last line sums up, and the exit code is 0 only when nothing failed.
set -uo pipefail        # no -e out here: bash ignores it in whatever is asked for its status; each section runs under its own
[ $# -eq 0 ] || { echo "usage: bash scripts/test.sh    (takes no option; for one part: nbdev_test --path nbs/FILE.ipynb, pytest tests/FILE.py)" >&2; exit 2; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
scratch="$(mktemp -d)"; trap 'rm -rf "$scratch"' EXIT
passed=0 failed=0 skipped=0 summary=

section() {     # section TITLE COMMAND…
    local title="$1" start=$SECONDS word=ok line; shift
    printf '\n==== %s\n' "$title"
    (set -e; "$@")
    if [ $? -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)) word=FAILED; fi
    printf -v line '%-32s %-6s %4s s' "$title" "$word" $((SECONDS - start))
    summary+="$line"$'\n'
    printf -- '---- %s\n' "$line"
}

environment() {
    if [ -n "${HSMOE_PYTHON:-}" ]; then echo "Using $HSMOE_PYTHON, as HSMOE_PYTHON says."
    else bash "$here/setup_env.sh" --if-needed --extras data,export,eval; fi
    bash "$here/env.sh"
}

contents() {    # a checksum of every file that is not ignored
    if git rev-parse --is-inside-work-tree > /dev/null 2>&1; then git ls-files --cached --others --exclude-standard -z
    else find nbs hsmoe README.md -type f -not -path '*/__pycache__/*' -print0; fi |
        sort -z | while IFS= read -r -d '' file; do if [ -f "$file" ]; then cksum "$file"; else echo "absent $file"; fi; done
}
in_step() {     # cleaning, exporting and writing README.md again changes nothing; on CI nothing is left uncommitted either
    contents > "$scratch/before"
    nbdev_clean
    nbdev_export
    python scripts/readme.py
    contents > "$scratch/after"
    if ! diff "$scratch/before" "$scratch/after" > "$scratch/changed"; then
        echo "These files were not in step with the notebooks and have been written again; look at them and commit them:"
        sed -n 's/^[<>] [0-9]* [0-9]* /  /p; s/^[<>] absent /  /p' "$scratch/changed" | sort -u
        return 1
    fi
    if [ -n "${CI:-}" ] && [ -n "$(git status --porcelain)" ]; then
        echo "Files are left uncommitted after the export:"; git status --porcelain; return 1
    fi
    echo "Notebooks, modules and README.md are in step."
}

notebooks() {
    local flags=()
    if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then flags=(--flags cuda); fi
    OMP_NUM_THREADS=1 nbdev_test --n_workers 2 --timing ${flags[@]+"${flags[@]}"}
}

tests() { python -m pytest -n 2 --dist worksteal --junitxml="$scratch/pytest.xml" -o junit_family=xunit2; }
count_tests() { # adds pytest's own figures
    [ -f "$scratch/pytest.xml" ] || return 0
    local p f s
    read -r p f s < <(python - "$scratch/pytest.xml" <<'PY'
import sys
from xml.etree import ElementTree
suite = ElementTree.parse(sys.argv[1]).getroot().find("testsuite")
total, failed, errors, skipped = (int(suite.get(k)) for k in ("tests", "failures", "errors", "skipped"))
print(total - failed - errors - skipped, failed + errors, skipped)
PY
)
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

begun=$SECONDS
section "environment" environment
if [ $failed -eq 0 ]; then
    source "$here/env.sh"
    cd "$HSMOE_ROOT"
    section "notebooks in step" in_step
    section "notebook tests" notebooks
    section "documentation and its links" bash scripts/docs.sh
    section "pytest" tests
    count_tests
fi
printf '\n==== summary (%s s)\n%s' $((SECONDS - begun)) "$summary"
line="$passed passed, $failed failed"
[ $skipped -eq 0 ] || line+=", $skipped skipped"
echo "$line"
[ $failed -eq 0 ]
