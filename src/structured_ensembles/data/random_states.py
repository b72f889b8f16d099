"""Random states that a loader or data set draws from, and how they are left as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from structured_ensembles.data.drawing import Seed, fold

END = object()  # of a loader


@contextmanager
def kept_states(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the random states of torch, Python and NumPy, and those of `generators`, back to what they were."""
    before = _states(generators)
    try:
        yield
    finally:
        _set_states(generators, before)


def undisturbed(loader: DataLoader[Any], seed: Seed | None = None) -> Iterator[Any]:
    """Yield a loader's batches under random states of its own; those of the program stay as they are.

    seed: all that the loader draws depends on it, and on nothing between. Without one, it goes on from the program's
    random states, so that a second pass draws the same unless somebody has drawn or seeded meanwhile.
    """
    generators = _generators(loader)
    own = _states(generators) if seed is None else _seeded(seed, len(generators))
    batches: Iterator[Any] | None = None
    while True:
        with kept_states(generators):
            _set_states(generators, own)
            batches = iter(loader) if batches is None else batches
            batch = next(batches, END)
            own = _states(generators)
        if batch is END:
            return
        yield batch


def _seeded(seed: Seed, generators: int) -> list[Any]:
    number = fold(seed)
    first = torch.Generator().manual_seed(number).get_state()
    others = [random.Random(number).getstate(), np.random.RandomState(number % 2**32).get_state()]
    return [first] * (1 + generators) + others


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """List those that a loader and its samplers were given."""
    owners = [loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(own): own for own in found if isinstance(own, torch.Generator)}.values())


def _states(generators: Sequence[torch.Generator]) -> list[Any]:
    """Return those of torch, of these generators, of Python and of NumPy: whatever a loader may draw from."""
    own = [generator.get_state() for generator in generators]
    return [torch.get_rng_state(), *own, random.getstate(), np.random.get_state()]  # noqa: NPY002


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Any]) -> None:
    torch.set_rng_state(states[0])
    for generator, state in zip(generators, states[1:], strict=False):
        generator.set_state(state)
    random.setstate(states[-2])
    np.random.set_state(states[-1])  # noqa: NPY002
