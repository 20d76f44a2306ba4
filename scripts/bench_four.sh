#!/usr/bin/env bash
# The job of nbs/bench/four: unattended, under nine minutes on four GPUs of one host, with its record in nbs/bench/results.
#   scripts/bench_four.sh [name=value ...]
#   scripts/bench_four.sh corpus=corpora/mixture results_dir=out
#   scripts/bench_four.sh device=cpu ranks=4 preset=tiny            # four gloo processes, small sizes: shows that it runs
# Names: device ranks corpus preset steps warmup batch_sequences micro_batch_sequences calls groups seconds results_dir, or overrides
# such as model.n_layers=4. Where papermill and nbdev are missing, as on a bare GPU machine, the same parts run without a notebook.
# LIMIT is the outer time limit in seconds; groups of parts have limits of their own within it. RUNNER=python asks for the way without a notebook.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
python=${PYTHON:-$(command -v python || command -v python3)}
limit=(timeout --signal=TERM --kill-after=5 "${LIMIT:-530}")

runner=${RUNNER:-page}
if [ "$runner" = page ] && ! "$python" -c 'import nbdev, papermill' 2>/dev/null; then runner=python; fi
begun=$SECONDS
if [ "$runner" = python ]; then
    "${limit[@]}" "$python" -m hsmoe.speed_four "$@"
else
    given=() overrides=()
    for word in "$@"; do
        name=${word%%=*} value=${word#*=}
        case $name in
            *.*) overrides+=("$word") ;;
            groups) given+=(-p groups "$("$python" -c 'import json, sys; print(json.dumps(sys.argv[1].split(",")))' "$value")") ;;
            *) given+=(-p "$name" "$value") ;;
        esac
    done
    if [ ${#overrides[@]} -gt 0 ]; then given+=(-p overrides "$("$python" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "${overrides[@]}")"); fi
    "${limit[@]}" "$python" -m hsmoe.cli bench four "${given[@]}"
fi
status=$?
if [ $status -eq 124 ] || [ $status -eq 137 ]; then echo "bench_four: not done within ${LIMIT:-530} s; the record has the groups that were" >&2; fi
echo "bench_four: $((SECONDS - begun)) s, exit code $status"
exit $status
