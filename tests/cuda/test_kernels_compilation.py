"""Kernels compile for real GPUs, and fit into their shared memory: no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.kernel_checks import LAUNCHED, here
from tests.support.paths import ROOT

OTHERS = {"copy_pieces", "draw_images"}


SHARED_MEMORY = 101_376  # of an RTX 5090, whose capability is 12.0


@here
def test_kernels_compile_for_an_rtx_5090_and_fit(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.gpu_compilation", "120", str(SHARED_MEMORY)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    compiled = json.loads(run.stdout)
    assert [kernel for kernel in compiled if kernel["error"]] == []
    assert [kernel for kernel in compiled if kernel["shared"] > SHARED_MEMORY] == []
    assert [kernel for kernel in compiled if not kernel["waits"]] == []
    assert {kernel["kernel"] for kernel in compiled} == LAUNCHED | OTHERS
