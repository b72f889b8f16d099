"""Archives: read members by name into memory, with a limit on their size; nothing is unpacked to disk."""

import tarfile
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

LARGEST = 2**28  # bytes; the largest file we read, CIFAR-100's train.bin, has 153,700,000


def read_tar(path: Path, names: Sequence[str]) -> list[bytes]:
    """Read members of a gzipped tar archive, in the order of `names`."""
    contents: dict[str, bytes] = {}
    # One walk in the order of the archive: going back to a member would decompress everything before it again.
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            if member.name in names and member.name not in contents and member.isreg():
                _check_size(member.name, member.size, LARGEST)
                file = archive.extractfile(member)
                assert file is not None  # it is None for other than regular files only
                contents[member.name] = file.read()
                if len(contents) == len(names):
                    break
    for name in names:
        if name not in contents:
            raise ValueError(f"it has no file {name}")
    return [contents[name] for name in names]


def read_zip(archive: ZipFile, name: str, largest: int = LARGEST) -> bytes:
    """Read one member of an open zip archive; several threads may read at the same time."""
    try:
        member = archive.getinfo(name)
    except KeyError:
        raise ValueError(f"it has no file {name}") from None
    _check_size(name, member.file_size, largest)
    return archive.read(member)


def _check_size(name: str, size: int, largest: int) -> None:
    """Raise a ValueError if a member is larger than `largest` bytes."""
    if size > largest:
        raise ValueError(f"its file {name} has {size} bytes, but at most {largest} are expected")
