"""Training in several processes: members are spread over them first, then each member's batches.

    torchrun --nproc-per-node 4 -m structured_ensembles train --dataset cifar10 …

The processes form a mesh with the axes `member` and `data`. Members are spread first: that takes no messages at all in
an epoch, and a member is bit for bit what it is in one process. Where there are more processes than members, those of a
member share every batch: each computes the gradients of its rows, which are added up, so that the effective batch is
the recipe's, whatever the number of processes. Batch norm sees the rows of its process only (it is not synchronised);
its running statistics are averaged after every epoch. All members start from the weights of the first process. The
checkpoint is the one that a single process writes: a run may resume with another number of processes. All must see the
same files.

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

from structured_ensembles.common.processes import gather, rank, world_size
from structured_ensembles.storage.tensor_file import to_host

if dist.is_available() and not dist.is_initialized():
    import torch.distributed.nn  # loaded later, its functions would hold the group as their default: see _MESHES


@dataclass(frozen=True)
class Mesh:
    """The rank of this process and the number of processes along each axis of the mesh."""

    member_rank: int = 0
    member_size: int = 1
    data_rank: int = 0
    data_size: int = 1
    group: Any = None  # the processes that share this one's members; None: all of them

    def trains(self, number: int) -> bool:
        """Tell whether this process trains member `number`."""
        return number % self.member_size == self.member_rank

    def source(self, number: int) -> int:
        """Return the first process that trains member `number`; it sends the member to the others."""
        return number % self.member_size * self.data_size


@contextmanager
def join_processes() -> Iterator[None]:
    """Join the process group that `torchrun` started, for as long as this lasts; do nothing in a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with _loopback_on_one_host():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        yield
        dist.destroy_process_group()  # not after an error: the others may be waiting for this process


@contextmanager
def _loopback_on_one_host() -> Iterator[None]:
    """Let gloo and NCCL listen on loopback if all processes are on this host, unless the user chose an interface.

    Every process group that is made later reads these variables again.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        yield
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    variables = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback and name not in os.environ]
    os.environ.update(dict.fromkeys(variables, loopback or ""))
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


# Each mesh is made once, since a process group costs connections. They are freed with the group of all processes: a
# group's threads end when nothing refers to it, and a thread that holds tensors while Python exits aborts the process.
_MESHES: WeakKeyDictionary[Any, dict[tuple[int, str], Mesh]] = WeakKeyDictionary()


def mesh_for(members: int, device: torch.device) -> Mesh:
    """Return a mesh whose member axis is the largest divisor of the number of processes that is at most `members`."""
    processes = world_size()
    if processes == 1:
        return Mesh()
    member_size = max(size for size in range(1, processes + 1) if processes % size == 0 and size <= members)
    meshes = _MESHES.setdefault(dist.group.WORLD, {})
    if (member_size, device.type) not in meshes:
        meshes[member_size, device.type] = _build_mesh(member_size, processes // member_size, device.type)
    return meshes[member_size, device.type]


def _build_mesh(member_size: int, data_size: int, device_type: str) -> Mesh:
    """Build a mesh of this shape over all processes."""
    mesh = init_device_mesh(device_type, (member_size, data_size), mesh_dim_names=("member", "data"))
    group = mesh["data"].get_group() if member_size > 1 else None
    return Mesh(rank() // data_size, member_size, rank() % data_size, data_size, group)


def gather_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the named tensors of all processes, on process 0; None elsewhere."""
    if world_size() == 1:
        return dict(tensors)
    host = to_host(tensors)  # views of a few pieces, which `save` refuses
    packed = save({name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in host.items()})
    messages: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(packed, messages)
    if messages is None:
        return None
    return {name: tensor for message in messages for name, tensor in load(message).items()}


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], source: int) -> None:
    """Copy the tensors of process `source` into those of every process, in place; one message per dtype."""
    if world_size() == 1:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in of_dtype])
        dist.broadcast(flat, source)
        for tensor, received in zip(of_dtype, flat.split([tensor.numel() for tensor in of_dtype]), strict=True):
            tensor.copy_(received.view_as(tensor))


def share_state(state: dict[str, Tensor], source: int) -> None:
    """Set named tensors to those of process `source`, in every process.

    Names and shapes may differ: training may have set a buffer, or let a cache grow, in that process only.
    """
    layout = gather({name: (tensor.shape, tensor.dtype) for name, tensor in state.items()})[source]
    device = next((tensor.device for tensor in state.values()), None)
    for name in state.keys() - layout.keys():
        del state[name]
    for name, (shape, dtype) in layout.items():
        if name not in state or state[name].shape != shape:
            state[name] = torch.empty(shape, dtype=dtype, device=device)
    broadcast_tensors([state[name] for name in layout], source)
