"""load_data(): data sets by name."""

from collections.abc import Callable

from structured_ensembles.data.dataset import Data
from structured_ensembles.data.digits import read_digits

READERS: dict[str, Callable[..., Data]] = {"digits": read_digits}


def load_data(name: str, *, seed: int = 0) -> Data:
    """A data set by name; `seed` draws its validation split."""
    if name not in READERS:
        raise ValueError(f"name must be one of {', '.join(map(repr, READERS))}, not {name!r}")
    return READERS[name](seed=seed)
