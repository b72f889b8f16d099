"""Refuse on a CPU what a CUDA graph cannot hold: reads by the host and tensors that come from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCHRONIZING = (
    "_local_scalar_dense",  # item(), float(), if, …
    "nonzero",
    "masked_select",
    "_unique",
    "allclose",
    "equal.default",
    "bincount",
    "repeat_interleave.Tensor",
    "lift_fresh",  # torch.tensor(…): a copy from the host
)


class OnTheHost(TorchFunctionMode):
    """Refuse `tolist`, `numpy` and `cpu`, which wait for the device without dispatching an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (Tensor.tolist, Tensor.numpy, Tensor.cpu), f"{func.__name__} waits for the device"
        return func(*args, **(kwargs or {}))


class InAGraph(TorchDispatchMode):
    """Refuse operations that a capture would refuse, except inside optimizers: on a GPU theirs are capturable."""

    optimizing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.optimizing:
            return func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.")
        assert not name.startswith(SYNCHRONIZING), f"{name} waits for the device"
        if name.startswith(("index.", "index_put", "_index_put")):
            masks = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
            assert not masks, f"{name} by a mask waits for the device"
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            assert not isinstance(leaf, Tensor) or not leaf.is_meta, f"{name} works on the host"
        return result


@contextmanager
def as_in_a_graph() -> Iterator[None]:
    """Run a step under the rules of a capture; tensors made without a device land on "meta" and are refused."""
    with torch.device("meta"), OnTheHost(), InAGraph():
        yield
