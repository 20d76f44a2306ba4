#!/usr/bin/env bash
# Text to a trained, evaluated model on this machine: environment, corpus, training, evaluation, a sample.
set -euo pipefail
minutes=3 run_dir=
die() { printf 'quickstart: %s\n' "$*" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case "$1" in
        --minutes|--run-dir) [ $# -ge 2 ] || die "$1 needs a value."
            case "$1" in --minutes) minutes="$2";; --run-dir) run_dir="$2";; esac; shift 2;;
        -h|--help) echo "usage: bash scripts/quickstart.sh [--minutes M] [--run-dir DIR]    (default: 3 minutes of training, runs/<date>-quickstart)"; exit 0;;
        *) die "unknown option '$1'; allowed are --minutes, --run-dir, --help.";;
    esac
done
[[ "$minutes" =~ ^[0-9]+(\.[0-9]*)?$|^\.[0-9]+$ && "$minutes" =~ [1-9] ]] || die "--minutes $minutes is not a number of minutes above 0."

begun=$SECONDS
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
case "$run_dir" in ''|/*) ;; *) run_dir="$PWD/$run_dir";; esac
[ -n "${HSMOE_PYTHON:-}" ] || bash "$here/setup_env.sh" --if-needed
source "$here/env.sh"
cd "$HSMOE_ROOT"

if [ -z "$run_dir" ]; then      # a second run on one day gets a folder of its own
    first="runs/$(date +%F)-quickstart" run_dir="runs/$(date +%F)-quickstart" n=2
    while [ -e "$run_dir" ]; do run_dir="$first-$n"; n=$((n + 1)); done
fi

step() {        # step TITLE COMMAND…: says what is done, does it, says how long it took
    local title="$1" start=$SECONDS line; shift
    printf -v line '%q ' "$@"
    printf '\n== %s\n$ %s\n' "$title" "${line% }"
    "$@"
    printf '   (%s s)\n' $((SECONDS - start))
}
step "Corpus: the Python library's own sources, tokenised and packed" hsmoe prepare --preset tiny
step "Training for $minutes minutes, by the notebook" hsmoe run nbs/runs/train.ipynb -p preset tiny -p minutes "$minutes" -p run_dir "$run_dir"
step "Evaluation on held-out text" hsmoe eval "$run_dir"
step "A sample" hsmoe generate "$run_dir" --prompt 'def '

printf '\n== Done in %s s\n' $((SECONDS - begun))
for made in "executed notebook:$run_dir/train.ipynb" "model:$run_dir/checkpoints" "report:$run_dir/report.json"; do
    [ -e "${made#*:}" ] || { echo "quickstart: ${made#*:} is missing, though every step succeeded." >&2; exit 1; }
    case "$made" in *:/*) path="${made#*:}";; *) path="$HSMOE_ROOT/${made#*:}";; esac
    printf '%-18s %s\n' "${made%%:*}" "$path"
done
