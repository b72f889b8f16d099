"""Many devices: the members of a fleet spread over processes, and each member's batches over the processes left.

    torchrun --nproc-per-node 4 -m structured_ensembles train --dataset cifar10 …

The processes form a mesh with the axes `member` and `data`. Members are spread first: that takes no messages at all in
an epoch, and a member is bit for bit what it is in one process. Where there are more processes than members, those of a
member share every batch: each computes the derivatives of its part, which are added up, so that the effective batch is
the recipe's, whatever the number of processes. Normalisation sees a process's own part only (no synchronised batch
normalisation); its running statistics are averaged after every epoch. The checkpoint is the one that a single process
writes: a run may go on with another number of processes. All must see the same files.

Processes of one host talk over its loopback interface. `torchrun` itself listens on all interfaces, and has no
authentication: on several hosts, and on a host that others can reach, it needs a network that can be trusted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from structured_ensembles.common.processes import rank, world

if dist.is_available() and not dist.is_initialized():
    import torch.distributed.nn  # loaded later, its functions would hold the group as their default: see _MESHES


@dataclass(frozen=True)
class Mesh:
    """Where this process is: its place and the number of places along each axis."""

    member_place: int = 0
    member_places: int = 1
    data_place: int = 0
    data_places: int = 1
    group: Any = None  # the processes that share this one's members; None: all of them

    def trains(self, number: int) -> bool:
        """Whether member `number` is one of this process's."""
        return number % self.member_places == self.member_place

    def source(self, number: int) -> int:
        """The process that speaks for member `number`."""
        return number % self.member_places * self.data_places


@contextmanager
def processes() -> Iterator[None]:
    """The group of processes that `torchrun` started, for as long as this lasts; nothing if there is only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with _loopback_on_one_host():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        yield
        dist.destroy_process_group()  # not after an error: it would wait for processes that wait for this one


@contextmanager
def _loopback_on_one_host() -> Iterator[None]:
    """Let gloo and NCCL listen on loopback if all processes are on this host; the user's own choice comes first.

    Every group of processes that is made later reads these variables again.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        yield
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    own = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback and name not in os.environ]
    os.environ.update(dict.fromkeys(own, loopback or ""))
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]


# Made once: every group of processes costs connections. They go with the group of all processes: a group's threads end
# when nobody holds it any more, and a thread that has tensors in hand while Python ends aborts the process.
_MESHES: WeakKeyDictionary[Any, dict[tuple[int, str], Mesh]] = WeakKeyDictionary()


def mesh_for(members: int, device: torch.device) -> Mesh:
    """Members first: as many places for them as divide the processes evenly, the rest for data."""
    processes = world()
    if processes == 1:
        return Mesh()
    places = max(own for own in range(1, processes + 1) if processes % own == 0 and own <= members)
    known = _MESHES.setdefault(dist.group.WORLD, {})
    if (places, device.type) not in known:
        known[places, device.type] = _mesh(places, processes // places, device.type)
    return known[places, device.type]


def _mesh(member_places: int, data_places: int, kind: str) -> Mesh:
    whole = init_device_mesh(kind, (member_places, data_places), mesh_dim_names=("member", "data"))
    group = whole["data"].get_group() if member_places > 1 else None
    return Mesh(rank() // data_places, member_places, rank() % data_places, data_places, group)


def collect_tensors(own: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The named tensors of all processes, on process 0; None elsewhere."""
    if world() == 1:
        return dict(own)
    packed = save({name: tensor.detach().cpu().contiguous() for name, tensor in own.items()})
    found: list[Any] | None = [None] * world() if rank() == 0 else None
    dist.gather_object(packed, found)
    if found is None:
        return None
    return {name: tensor for part in found for name, tensor in load(part).items()}


@torch.no_grad()
def spread(tensors: Sequence[Tensor], source: int) -> None:
    """Give every process the tensors that process `source` has; one message for each type."""
    if world() == 1:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in own])
        dist.broadcast(flat, source)
        for tensor, given in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(given.view_as(tensor))
