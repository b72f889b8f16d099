"""The device, the versions and the code that figures come from, as records name them."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

from structured_ensembles.common.devices import Device
from structured_ensembles.common.version import VERSION


def describe_machine(device: Device) -> dict[str, Any]:
    """Describe the device that was used and the versions, on which figures depend besides the configuration."""
    used = torch.device(device)
    names = {"cpu": f"CPU, {torch.get_num_threads()} threads"}
    return {
        "device": torch.cuda.get_device_name(used) if used.type == "cuda" else names.get(used.type, str(used)),
        "versions": {
            "structured-ensembles": VERSION,
            "source": source_digest(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


@cache
def source_digest() -> str:
    """Return 12 hex digits of a digest over all source files of the package, which identify the running code."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
