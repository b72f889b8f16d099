"""Several processes: what they share, if there are several. Started by `torchrun`; alone, all of this does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Decision = TypeVar("Decision")


def world() -> int:
    """How many processes work together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if world() > 1 else 0


def gather(own: Any) -> list[Any]:
    """What every process has to tell, in the order of the processes."""
    found: list[Any] = [None] * world()
    if world() == 1:
        return [own]
    dist.all_gather_object(found, own)
    return found


def decided_by_first(decide: Callable[[], Decision]) -> Decision:
    """Return in every process what `decide` returns in the first one; its error is raised in all of them."""
    found: Decision | Exception | None = None
    if rank() == 0:
        try:
            found = decide()
        except Exception as error:  # which the others must hear of, or they would wait
            found = error
    found = gather(found)[0]
    if isinstance(found, Exception):
        raise found
    return cast(Decision, found)


@torch.no_grad()
def add_up(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its sum over the processes of a group (all of them by default); one message for all."""
    if world() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace statistics that each process collected on its own part of the data by their mean."""
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    if world() == 1 or not floats:
        return
    size = dist.get_world_size(group)
    for buffer in floats:
        buffer.div_(size)
    add_up(floats, group)
