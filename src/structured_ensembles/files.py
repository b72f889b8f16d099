"""Files that are never half written."""

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write` to another name in the same folder, flush to the disk, rename: whoever looks sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    part = path.with_name(f"{path.name}.{platform.node()}-{os.getpid()}.part")
    try:
        part.touch()
        mode = part.stat().st_mode  # safetensors lets nobody but the owner read; others may want to
        write(part)
        part.chmod(mode)
        with part.open("rb+") as file:
            os.fsync(file.fileno())  # or the new name might outlive a power cut that the data does not
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    def write(part: Path) -> None:
        part.write_text(text, encoding="utf-8")

    write_atomically(path, write)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda part: save_file(contiguous, part, metadata=dict(metadata)))


def _clear_leftovers(path: Path) -> None:
    """Remove what processes of this machine that were killed in the middle of writing `path` have left."""
    prefix = f"{path.name}.{platform.node()}-"
    for leftover in path.parent.glob("*.part"):
        number = leftover.name.removeprefix(prefix).removesuffix(".part")
        if leftover.name.startswith(prefix) and number.isdigit() and not _is_running(int(number)):
            leftover.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # asks only
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
