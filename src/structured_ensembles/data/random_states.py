"""Isolation of random states: what a loader or data set draws does not disturb the program."""

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
def preserve_random_states(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Restore the random states of torch, Python and NumPy, and those of `generators`, at the end."""
    before = _get_states(generators)
    try:
        yield
    finally:
        _set_states(generators, before)


def iterate_isolated(loader: DataLoader[Any], seed: Seed | None = None) -> Iterator[Any]:
    """Yield a loader's batches under random states of its own; those of the program stay as they are.

    seed: all that the loader draws depends on it alone. Without one, the loader starts from the program's random
    states, so that a second pass draws the same unless the program has drawn or seeded meanwhile.
    """
    generators = _find_generators(loader)
    states = _get_states(generators) if seed is None else _seeded_states(seed, len(generators))
    batches: Iterator[Any] | None = None
    while True:
        with preserve_random_states(generators):
            _set_states(generators, states)
            batches = iter(loader) if batches is None else batches
            batch = next(batches, END)
            states = _get_states(generators)
        if batch is END:
            return
        yield batch


def _seeded_states(seed: Seed, generators: int) -> list[Any]:
    """Return random states that are all seeded from `seed`, in the order of `_get_states`."""
    number = fold(seed)
    first = torch.Generator().manual_seed(number).get_state()
    others = [random.Random(number).getstate(), np.random.RandomState(number % 2**32).get_state()]
    return [first] * (1 + generators) + others


def _find_generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)  # other loaders than torch's may have no samplers
    owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in generators if isinstance(one, torch.Generator)}.values())


def _get_states(generators: Sequence[torch.Generator]) -> list[Any]:
    """Return the random states of torch, these generators, Python and NumPy: all that a loader may draw from."""
    generator_states = [generator.get_state() for generator in generators]
    return [torch.get_rng_state(), *generator_states, random.getstate(), np.random.get_state()]  # noqa: NPY002


def _set_states(generators: Sequence[torch.Generator], states: Sequence[Any]) -> None:
    """Set what `_get_states` returned."""
    torch.set_rng_state(states[0])
    for generator, state in zip(generators, states[1:], strict=False):
        generator.set_state(state)
    random.setstate(states[-2])
    np.random.set_state(states[-1])  # noqa: NPY002
