#!/usr/bin/env bash
# `source scripts/env.sh` puts the environment of hsmoe on PATH; `bash scripts/env.sh` shows what it finds.
#   HSMOE_VENV     the environment that setup_env.sh built (default: .venv at the top of the repository)
#   HSMOE_PYTHON   an interpreter that already has what hsmoe needs, such as a container's: nothing is built, the source tree is used
HSMOE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export HSMOE_ROOT
if [ -n "${HSMOE_PYTHON:-}" ]; then
    export PYTHONPATH="$HSMOE_ROOT${PYTHONPATH:+:$PYTHONPATH}"
    PATH="$(dirname "$HSMOE_PYTHON"):$PATH"
    export PATH
else
    VIRTUAL_ENV="${HSMOE_VENV:-$HSMOE_ROOT/.venv}"
    case "$VIRTUAL_ENV" in /*) ;; *) VIRTUAL_ENV="$PWD/$VIRTUAL_ENV";; esac
    export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
fi
hsmoe() { python -m hsmoe.cli "$@"; }

# CUDA's compiler and libraries, where a toolkit is installed and nothing else was chosen
if [ -z "${CUDA_HOME:-}" ] && [ -d /usr/local/cuda ]; then export CUDA_HOME=/usr/local/cuda; fi
if [ -n "${CUDA_HOME:-}" ]; then
    export PATH="$CUDA_HOME/bin:$PATH"
    export LD_LIBRARY_PATH="$CUDA_HOME/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
export WANDB_MODE="${WANDB_MODE:-offline}"

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    python - <<'PY'
import os, platform, sys
import torch
print("python        ", platform.python_version(), sys.executable)
print("torch         ", torch.__version__)
print("CUDA_HOME     ", os.environ.get("CUDA_HOME", "none"))
print("CUDA available", torch.cuda.is_available(), "| built for CUDA", torch.version.cuda or "none")
print("NCCL          ", ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none")
print("GPUs          ", ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none")
PY
fi
