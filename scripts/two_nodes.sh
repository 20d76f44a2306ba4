#!/usr/bin/env bash
# One training job on two hosts by torchrun, started from the first:
#   GPUS=4 OTHER=gpu02 scripts/two_nodes.sh train --preset 5b
# Both hosts have this repository and its environment at the same path, and OTHER can be reached by ssh without a password.
# INFINIBAND=1 uses InfiniBand between them (off by default, SPEC H-04); INTERFACE is the network interface of their addresses, HCA the prefix of the adapters' names.
set -euo pipefail
other=${OTHER:?name of the second host, as in OTHER=gpu02}
[ $# -gt 0 ] || { echo "usage: OTHER=host [GPUS=4] [INFINIBAND=1] [INTERFACE=eth0] $0 COMMAND OF hsmoe ..." >&2; exit 2; }
gpus=${GPUS:-4} port=${PORT:-29500} first=${FIRST:-$(hostname -f)}
cd "$(dirname "$0")/.."

settings=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}")
if [ "${INFINIBAND:-0}" = 1 ]; then settings+=(NCCL_IB_DISABLE=0 NCCL_IB_HCA="${HCA:-mlx5}" NCCL_NET_GDR_LEVEL="${NCCL_NET_GDR_LEVEL:-PHB}")
else settings+=(NCCL_IB_DISABLE=1); fi
if [ -n "${INTERFACE:-}" ]; then settings+=(NCCL_SOCKET_IFNAME="$INTERFACE" GLOO_SOCKET_IFNAME="$INTERFACE"); fi
for name in NCCL_DEBUG NCCL_ALGO WANDB_MODE; do if [ -n "${!name:-}" ]; then settings+=("$name=${!name}"); fi; done

launch() {                                    # the command line of host number $1
    printf '%q ' env "${settings[@]}" "$(command -v python)" -m torch.distributed.run --nnodes 2 --node-rank "$1" --nproc-per-node "$gpus" --max-restarts 0 \
        --master-addr "$first" --master-port "$port" -m hsmoe.cli "${@:2}"
}
ssh -o BatchMode=yes "$other" "cd $(printf '%q' "$PWD") && $(launch 1 "$@")" &
remote=$!
status=0
bash -c "$(launch 0 "$@")" || status=$?
if [ $status -ne 0 ]; then kill "$remote" 2>/dev/null || true; fi
wait "$remote" || { other_status=$?; [ $status -ne 0 ] || status=$other_status; }
exit $status
