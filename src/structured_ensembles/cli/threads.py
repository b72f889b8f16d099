"""Threads of a command: chosen by the size of its work, and described for its output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from structured_ensembles.common.checks import check_whole
from structured_ensembles.common.devices import pick_device
from structured_ensembles.common.inputs import Inputs
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.threads import choose_threads, use_threads
from structured_ensembles.networks.work import estimate_work


@contextmanager
def threads_for_work(wanted: int | None, work: float = math.inf) -> Iterator[int]:
    """Compute on the wanted number of threads, or on the one that `choose_threads` chooses; yield it.

    work: multiply-adds of a forward pass on one batch.
    """
    check_whole("--threads", 1 if wanted is None else wanted)
    count = choose_threads(wanted, work)
    with use_threads(count):
        yield count


def describe_device(device: str, network: nn.Module, threads: int) -> str:
    """Describe what a command computes on: a GPU, or threads of the CPU."""
    picked = pick_device(device, network)
    return str(picked) if picked.type != "cpu" else f"the CPU, {counted(threads, 'thread')}"


def work_of_batch(network: nn.Module, example: Inputs, device: str, size: int) -> float:
    """Estimate the multiply-adds of a network on a batch of `size`; a GPU's work needs no threads: infinity."""
    return size * estimate_work(network, example) if pick_device(device, network).type == "cpu" else math.inf
