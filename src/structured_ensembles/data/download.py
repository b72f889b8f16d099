"""Official archives: from the folder of downloads or from the network, always with their checksums verified."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from structured_ensembles.data.info import Archive
from structured_ensembles.storage.files import check_regular

DOWNLOAD_CHUNK = 2**16  # bytes of a download
READ_CHUNK = 2**22  # bytes of a file
TIMEOUT = 30  # seconds without any answer


def fetch_archives(archives: Sequence[Archive], folder: Path) -> list[Path]:
    """Return the paths of the archives under `folder`, with verified checksums; download those that are missing."""
    for archive in archives:
        path = folder / archive.file
        if path.exists():
            check_archive(path, archive)
            continue
        try:
            _download(archive, path)
        except OSError as error:  # every error of the network is one
            response = getattr(error, "response", None)
            if response is not None:
                response.close()  # pooch leaves the connection open when the server's answer is an error
            missing = [other for other in archives if not (folder / other.file).exists()]
            placements = " and ".join(f"{other.url} at {folder / other.file}" for other in missing)
            raise RuntimeError(
                f"{archive.url} cannot be downloaded ({type(error).__name__}): put {placements}"
            ) from error
        except ValueError as error:
            name, value = next(iter(archive.checksums.items()))
            raise ValueError(
                f"{archive.url} gave a file that does not have the {name} checksum {value}; it was thrown away: "
                f"try again, or put the right file at {path}"
            ) from error
    return [folder / archive.file for archive in archives]


def check_archive(path: Path, archive: Archive) -> None:
    """Raise a ValueError unless a regular file has all checksums of an archive."""
    try:
        check_regular(path)
    except OSError as error:
        raise ValueError(f"{error}: replace it, or delete it and it will be downloaded") from error
    digests = {name: hashlib.new(name) for name in archive.checksums}
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK):
            for digest in digests.values():
                digest.update(chunk)
    for name, expected in reversed(archive.checksums.items()):
        actual = digests[name].hexdigest()
        if actual != expected:
            raise ValueError(
                f"{path} has the {name} checksum {actual}, but {archive.url} has {expected}: "
                "replace it, or delete it and it will be downloaded"
            )


def _download(archive: Archive, path: Path) -> None:
    """Download an archive, with a progress bar, and verify its checksum."""
    import pooch  # imported here, since most calls download nothing

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True
    ) as bars:
        pooch.retrieve(
            archive.url,
            known_hash=":".join(next(iter(archive.checksums.items()))),
            fname=path.name,
            path=path.parent,
            downloader=pooch.HTTPDownloader(
                progressbar=_Bar(bars, path.name),
                chunk_size=DOWNLOAD_CHUNK,
                timeout=TIMEOUT,
                headers={"Accept-Encoding": "identity"},  # the checksum is of the file as it is stored
            ),
        )


class _Bar:
    """A progress bar of rich with the methods that pooch calls; it closes with the context that holds it."""

    def __init__(self, bars: Progress, description: str) -> None:
        self._bars = bars
        self._task = bars.add_task(description, total=None)

    @property
    def total(self) -> float | None:
        """Return the size in bytes; None if the server does not tell."""
        return self._bars.tasks[self._task].total

    @total.setter
    def total(self, size: int) -> None:
        self._bars.update(self._task, total=size or None)

    def update(self, size: int) -> None:
        """Advance by so many bytes."""
        self._bars.advance(self._task, size)

    def reset(self) -> None:
        """Go back to the start."""
        self._bars.update(self._task, completed=0)

    def close(self) -> None:
        """Do nothing: the context closes the bar."""
