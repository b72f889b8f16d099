"""load_data(): data sets by name, read from their official archives once and from a cached file afterwards.

A folder of pictures has a name, too: `folder:PATH`, with settings as in `folder:PATH?size=64&test=0.2`.
"""

import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from structured_ensembles.common.checks import check_type
from structured_ensembles.data.cache import cache_path, read_cache, write_cache
from structured_ensembles.data.cifar import CIFAR10, CIFAR100
from structured_ensembles.data.dataset import Data
from structured_ensembles.data.digits import read_digits
from structured_ensembles.data.download import fetch_archives
from structured_ensembles.data.info import Contents, DataInfo
from structured_ensembles.data.mnist import FASHION_MNIST, MNIST
from structured_ensembles.data.normalization import Choice
from structured_ensembles.data.svhn import SVHN
from structured_ensembles.data.tiny_imagenet import TINY_IMAGENET

ROOT = "~/.cache/structured-ensembles"
DIGITS = DataInfo(
    name="digits",
    title="Digits: scikit-learn's handwritten digits, no download",
    shape=(1, 8, 8),
    num_classes=10,
    train=1438,
    test=359,
)
FOLDER = "folder:"  # before the path of a folder of pictures
DATA_SETS = {info.name: info for info in (DIGITS, MNIST, FASHION_MNIST, CIFAR10, CIFAR100, SVHN, TINY_IMAGENET)}


def load_data(name: str, root: str | Path | None = None, *, seed: int = 0, normalization: Choice = "auto") -> Data:
    """Load a data set by name; `data_sets()` lists them. "folder:PATH?size=64" is a folder of pictures.

    Of the arguments of `Data.from_folder`, such a name can have size, channels, validation and test.

    root: the folder of the cached data sets, by default ~/.cache/structured-ensembles. Archives in its folder
        `downloads` are not downloaded again.
    seed: draws the validation split.
    normalization: of the pixels, see `Data.from_arrays`.
    """
    check_type("name", name, str, f"one of {', '.join(DATA_SETS)}, or {FOLDER}PATH for a folder of pictures")
    if is_folder(name):
        return _load_folder(name, seed, normalization)
    info = _info(name)
    if info.read is None:
        return read_digits(seed, normalization)
    folder = data_folder(root)
    path = cache_path(folder, name)
    if not path.exists():
        write_cache(path, info, _read_archives(info, folder / "downloads"))
    contents = read_cache(path, info)
    return Data.from_arrays(
        contents.train_images,
        contents.train_labels,
        test=(contents.test_images, contents.test_labels),
        classes=contents.classes,
        seed=seed,
        name=name,
        normalization=normalization,
    )


def data_sets() -> dict[str, DataInfo]:
    """Return the descriptions of all data sets that `load_data` can load, by name."""
    return dict(DATA_SETS)


def is_cached(name: str, root: str | Path | None = None) -> bool:
    """Tell whether `load_data` needs neither archives nor network for a data set."""
    return _info(name).read is None or cache_path(data_folder(root), name).exists()


def is_folder(name: str) -> bool:
    """Tell whether the name of a data set is that of a folder of pictures, `folder:PATH`."""
    return name.startswith(FOLDER)


def _load_folder(name: str, seed: int, normalization: Choice) -> Data:
    """Read a folder of pictures by its name, such as "folder:pets?size=64&test=0.2"."""
    path, _, query = name.removeprefix(FOLDER).partition("?")
    settings = dict(setting.partition("=")[::2] for setting in query.split("&")) if query else {}
    if not path or not settings.keys() <= FOLDER_SETTINGS.keys() or not all(settings.values()):
        raise ValueError(
            f"a folder of pictures must be named {FOLDER}PATH, with any of {', '.join(FOLDER_SETTINGS)} as in "
            f"{FOLDER}PATH?size=64&test=0.2, not {name!r}"
        )
    try:
        arguments: dict[str, Any] = {setting: FOLDER_SETTINGS[setting](value) for setting, value in settings.items()}
    except ValueError as error:
        raise ValueError(f"size and channels of {name!r} must be whole numbers: {error}") from error
    return Data.from_folder(path, **arguments, seed=seed, normalization=normalization)


def _share_or_path(value: str) -> float | str:
    """Read a share, such as "0.2"; anything else is a folder."""
    try:
        return float(value)
    except ValueError:
        return value


def _info(name: str) -> DataInfo:
    """Return the description of a data set; raise a ValueError that lists the names if it is unknown."""
    if name not in DATA_SETS:
        known = ", ".join(map(repr, DATA_SETS))
        raise ValueError(f"name must be one of {known}, or {FOLDER}PATH for a folder of pictures, not {name!r}")
    return DATA_SETS[name]


def data_folder(root: str | Path | None) -> Path:
    """Return the folder of the cached data sets; the default one for None."""
    return Path(ROOT if root is None else root).expanduser()


def _read_archives(info: DataInfo, downloads: Path) -> Contents:
    """Download what is missing, and read and check the archives of a data set."""
    assert info.read is not None
    paths = fetch_archives(info.archives, downloads)
    try:
        contents = info.read(paths)
        info.check(contents)
    except (ValueError, OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        files = " and ".join(map(str, paths))
        raise ValueError(f"{files} cannot be read as {info.name}: {error}") from error
    return contents


FOLDER_SETTINGS: dict[str, Callable[[str], Any]] = {
    "size": int,
    "channels": int,
    "validation": _share_or_path,
    "test": _share_or_path,
}
