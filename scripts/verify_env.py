"""What scripts/setup_env.sh looks at when it has built an environment: `python scripts/verify_env.py cpu|cu126|cu128|cu130`.

Versions, NCCL and whether CUDA is there (SPEC E-12), the rows of `hsmoe preflight` about software that are not as asked, and what keeps PyTorch from a GPU: another build than wanted,
a driver that is missing or too old for it, a card that it has no code for. The exit code is 1 where this environment cannot do what it was built for; a CUDA build on a machine without
a GPU can still wait for one.
"""
import os, platform, re, subprocess, sys
from typing import Optional

import torch

import hsmoe
from hsmoe.config import load_config
from hsmoe.preflight import FAIL, WARN, installed, release, stack_checks

DEVICES = ("cpu", "cu126", "cu128", "cu130")        # as in setup_env.sh


def no_gpu(built: str, smi: Optional[str], hidden: Optional[str], error: str = "") -> Optional[str]:
    "Why PyTorch, built for CUDA `built`, finds no GPU. `smi`: output of nvidia-smi, None where it does not run; `hidden`: CUDA_VISIBLE_DEVICES; `error`: CUDA's own words."
    driver = smi and re.search(r"Driver Version: *([\d.]+).*CUDA Version: *([\d.]+)", smi)
    if not driver:
        return ("no NVIDIA driver answers (nvidia-smi does not run or finds none); install the driver, and start a container with --gpus all. "
                "Until then everything runs on the CPU")
    if release(driver[2])[0] < release(built)[0]:
        return (f"driver {driver[1]} knows CUDA up to {driver[2]}, and this torch is built for {built}; "
                f"renew the driver, or build a new --venv for a CUDA {release(driver[2])[0]}.x with --device")
    if hidden is not None and not re.match(r"\s*(\d|GPU-|MIG-)", hidden): return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all GPUs; unset it, or name the GPUs to use, as 0,1"
    return f"driver {driver[1]} answers, and CUDA does not start: {error or 'without a reason'}"


def has_code(capability: tuple, archs: list) -> bool:
    "Whether a build with these architectures (`torch.cuda.get_arch_list()`) runs on a card: code of the same major number that is no newer, or PTX that is no newer."
    for kind, major, minor, only in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(archs)):
        built = (int(major), int(minor))
        if only == "a": fits = built == capability
        elif kind == "sm" or only: fits = built[0] == capability[0] and built <= capability
        else: fits = built <= capability
        if fits: return True
    return False


def no_code(gpus: list, archs: list) -> Optional[str]:
    "Which card of [(name, compute capability)] the build has no code for; None where it has it for all."
    for i, (name, capability) in enumerate(gpus):
        if not has_code(capability, archs):
            return (f"GPU {i}, an {name}, has compute capability {capability[0]}.{capability[1]}, and this torch has code for {', '.join(archs)} only; "
                    "build a new --venv for a newer CUDA with --device")
    return None


def other_build(want: str, version: str, built: Optional[str]) -> Optional[str]:
    "Whether torch is another build than `want`, as cu128."
    if want == "cpu" or (built or "").replace(".", "") == want[2:]: return None
    return f"torch {version} is not the {want} build; build a new --venv and name a source that holds it with --torch-source, or use --manager uv"


def said_by_nvidia_smi() -> Optional[str]:
    try: done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired): return None
    return done.stdout if done.returncode == 0 else None


def why_not_started() -> str:
    try: torch.cuda.init()
    except Exception as e: return str(e).splitlines()[0]
    return ""


def main(args: list) -> int:
    if len(args) != 1 or args[0] not in DEVICES:
        print(f"usage: python scripts/verify_env.py {'|'.join(DEVICES)}", file=sys.stderr)
        return 2
    (want,) = args
    built, there, n, found = torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count(), installed()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if built and torch.distributed.is_nccl_available() else "none"
    print(f"  Python {platform.python_version()}, torch {torch.__version__}, hsmoe {hsmoe.__version__}")
    print(f"  CUDA {built or 'none'}, available {there}, GPUs visible {n}, NCCL {nccl}")
    from megatron.core import parallel_state        # that it imports beside this torch
    print(f"  Megatron Core {found['megatron-core']}, TorchAO {found['torchao']}")
    five = load_config("5b")
    for check in stack_checks(five, found, there, five.printed):
        if check.verdict in (WARN, FAIL): print(f"  note: {check.item}: {check.reason} ({check.row})")
    if want != "cpu" and built and not there: print(f"  note: {no_gpu(built, said_by_nvidia_smi(), os.environ.get('CUDA_VISIBLE_DEVICES'), why_not_started())}")
    cards = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(n)] if there else []
    wrong = other_build(want, torch.__version__, built) or no_code(cards, torch.cuda.get_arch_list() if there else [])
    if wrong: print(f"setup_env: {wrong}.", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__": sys.exit(main(sys.argv[1:]))
