"""Communication between the processes that `torchrun` starts; a process on its own exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

Decision = TypeVar("Decision")


def world_size() -> int:
    """Return the number of processes that work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def gather(value: Any) -> list[Any]:
    """Collect one value from every process, in the order of their ranks; every process gets the list."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def decide_in_first_process(decide: Callable[[], Decision]) -> Decision:
    """Return in every process what `decide` returns in the first one; its error is raised in all of them."""
    outcome: Decision | Exception | None = None
    if rank() == 0:
        try:
            outcome = decide()
        except Exception as error:  # raised below in all processes: the others would wait for this one otherwise
            outcome = error
    outcome = gather(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return cast(Decision, outcome)


@torch.no_grad()
def sum_over_processes(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its sum over the processes of a group (by default all), with one all-reduce."""
    if world_size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup | None = None, *, has_samples: bool = True) -> None:
    """Replace the statistics that each process collected on its share of the data by their mean.

    has_samples: whether this process had a share; statistics of a process without one do not count. A buffer that is
    not set in every process, or has another shape there, such as a cache, stays as it is.
    """
    if world_size() == 1:
        return
    floats = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    of_processes: list[Any] = [None] * dist.get_world_size(group)
    shapes = {name: buffer.shape for name, buffer in floats.items()}
    dist.all_gather_object(of_processes, (has_samples, shapes), group=group)
    count = sum(has for has, _ in of_processes)
    common = [floats[name] for name in shapes if all(other.get(name) == shapes[name] for _, other in of_processes)]
    for buffer in common:
        buffer.div_(count) if has_samples else buffer.zero_()
    sum_over_processes(common, group)
