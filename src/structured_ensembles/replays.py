"""Prediction on a GPU as CUDA graphs: one for each shape of inputs that comes often, members side by side."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.capture import CaptureError, Step, captured, side_by_side, side_streams

MOST_SHAPES = 8  # further ones run without a graph
WORTHWHILE = 4  # a capture takes as long as some passes: a shape that comes less often is not worth one


class Replays:
    """The graphs of one ensemble. They hold addresses of its weights, and are dropped when these have moved."""

    def __init__(self) -> None:
        self.seen: Counter[Hashable] = Counter()
        self.graphs: dict[Hashable, tuple[Tensor, list[Tensor], Step]] = {}
        self.print: Fingerprint | None = None  # of the ensemble that was captured
        self.possible = True
        self.lock = threading.Lock()  # a graph has one place for its inputs

    def __deepcopy__(self, memo: object) -> Replays:
        return Replays()  # a copy has weights of its own

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()

    def clear(self) -> None:
        self.graphs.clear()
        self.seen.clear()
        self.print = None

    def outputs(self, ensemble: Any, x: Tensor) -> Tensor | None:
        """(members, batch, classes); None where a graph is not possible, or not worth its while."""
        if not (x.is_cuda and self.possible and type(x) is Tensor) or torch.is_grad_enabled():
            return None
        if torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
            return None
        with self.lock:
            return self._outputs(ensemble, x)

    def _outputs(self, ensemble: Any, x: Tensor) -> Tensor | None:
        if self.print is not None and not self.print.fits(ensemble):
            self.clear()
        own = self.print or Fingerprint(ensemble)
        if not own.quiet():
            return None
        key = _key(x)
        if key not in self.graphs:
            self.seen[key] += 1
            if self.seen[key] < WORTHWHILE or len(self.graphs) >= MOST_SHAPES:
                return None
            try:
                self.graphs[key] = _captured(ensemble, x)
            except CaptureError as error:
                self.possible = False
                warnings.warn(f"prediction goes on without a CUDA graph, slower: {error}", stacklevel=5)
                return None
            self.print = own
        place, results, replay = self.graphs[key]
        place.copy_(x)
        replay()
        return torch.cat(results)


class Fingerprint:
    """What a captured forward pass depends on: the modules, where their tensors lie, and the normalisation.

    It does not hold the ensemble, which holds it: in a cycle, graphs would stay on the GPU until a garbage collection.
    """

    def __init__(self, ensemble: Any) -> None:
        self.modules: list[nn.Module] = list(ensemble.members.modules())
        holders = [ensemble._modules, *(module._modules for module in self.modules)]
        self.children = [(holder, tuple(holder.values())) for holder in holders]
        self.normalization = ensemble.normalization
        self.places = [
            (holder, name, tensor.data_ptr())
            for module in self.modules
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
            if tensor is not None
        ]

    def fits(self, ensemble: Any) -> bool:
        """Whether nothing was replaced or moved since."""
        return (
            ensemble.normalization is self.normalization
            and all(tuple(holder.values()) == children for holder, children in self.children)
            and all(name in holder and _address(holder[name]) == address for holder, name, address in self.places)
        )

    def quiet(self) -> bool:
        """Whether no module is in training, or wants to be told that it runs."""
        return not any(module.training or module._forward_hooks or module._forward_pre_hooks for module in self.modules)


def _captured(ensemble: Any, x: Tensor) -> tuple[Tensor, list[Tensor], Step]:
    """A place for inputs like x, a place for the outputs of each network, and what computes these from that."""
    from structured_ensembles.ensemble import member_outputs

    # Tensors made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        place, results = x.clone(), [torch.empty(0)] * len(ensemble.members)
        streams = side_streams(x.device, len(ensemble.members))

        def run(number: int, member: nn.Module, prepared: Tensor) -> None:
            results[number] = member_outputs(member, prepared)

        def step() -> None:
            prepared = ensemble.prepare(place)
            members = enumerate(ensemble.members)
            side_by_side([partial(run, number, member, prepared) for number, member in members], streams)

        return place, results, captured(step, x.device, list, modules=list(ensemble.members))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _key(x: Tensor) -> Hashable:
    casting = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return (x.shape, x.dtype, x.device, casting, torch.cuda.current_stream(x.device))
