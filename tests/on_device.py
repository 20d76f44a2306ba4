"""Where tests of kernels run: on a GPU where there is one, else in Triton's interpreter, in a process of its own."""
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

try: import triton
except ImportError: triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_kernels = pytest.mark.skipif(triton is None or not INTERPRETED and DEVICE == "cpu", reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
needs_gpu = pytest.mark.skipif(triton is None or DEVICE == "cpu", reason="needs a GPU")
plain = pytest.mark.skipif(INTERPRETED, reason="the reference is tested outside the interpreter")
starts_interpreter = pytest.mark.skipif(triton is None or INTERPRETED or DEVICE == "cuda", reason="the tests below run right here")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def interpret(file):
    "Run the tests of a file in the interpreter."
    run = subprocess.run([sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file], capture_output=True, text=True,
                         env={**os.environ, "TRITON_INTERPRET": "1"})
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-4000:] + run.stderr[-2000:]


def new_seed():
    "New random numbers each time"
    print("seed", torch.seed() % 2**31)          # pytest shows it with a failure
    torch.manual_seed(torch.initial_seed() % 2**31)


@contextmanager
def poisoned():
    "torch.empty gives NaN, and the largest integer"
    torch.use_deterministic_algorithms(True)
    try: yield
    finally: torch.use_deterministic_algorithms(False)
