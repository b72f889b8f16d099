"""Prediction on a GPU as CUDA graphs: one for each shape of inputs that comes again, members side by side."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.capture import CaptureError, Step, captured, side_by_side

MOST_SHAPES = 8


class Replays:
    """The graphs of one ensemble. They hold addresses of its weights, and are dropped when these have moved."""

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()
        self.graphs: OrderedDict[Hashable, tuple[Tensor, list[Tensor], Step]] = OrderedDict()
        self.places: list[tuple[dict[str, Any], str, int]] = []
        self.modules: list[nn.Module] = []
        self.possible = True

    def __deepcopy__(self, memo: object) -> Replays:
        return Replays()  # a copy has weights of its own

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()

    def fit(self, ensemble: nn.Module, x: Tensor) -> bool:
        """Whether a graph may do it; the first time that a shape is seen, none is captured."""
        if not (x.is_cuda and self.possible and type(x) is Tensor) or torch.is_grad_enabled():
            return False
        if torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
            return False
        if self.graphs and not self._unchanged():
            self.graphs.clear()
        if self.graphs and any(module.training or module._forward_hooks for module in self.modules):
            return False
        if not self.graphs and any(module.training or module._forward_hooks for module in ensemble.modules()):
            return False
        key = _key(x)
        known = key in self.seen
        self.seen.add(key)
        return known

    def outputs(self, ensemble: Any, x: Tensor) -> Tensor:
        """(members, batch, classes)."""
        key = _key(x)
        if key not in self.graphs:
            try:
                self._capture(ensemble, key, x)
            except CaptureError as error:
                self.possible = False
                warnings.warn(f"prediction goes on without a CUDA graph, slower: {error}", stacklevel=3)
                return ensemble(x)  # type: ignore[no-any-return]
        self.graphs.move_to_end(key)
        place, results, replay = self.graphs[key]
        place.copy_(x)
        replay()
        return torch.cat(results)

    def _capture(self, ensemble: Any, key: Hashable, x: Tensor) -> None:
        from structured_ensembles.ensemble import member_outputs

        self.modules = list(ensemble.modules())
        self.places = list(_places(self.modules))
        while len(self.graphs) >= MOST_SHAPES:
            self.graphs.popitem(last=False)
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            place, results = x.clone(), [torch.empty(0)] * len(ensemble.members)
            streams = [torch.cuda.Stream(x.device) for _ in ensemble.members]

            def run(number: int, member: nn.Module, prepared: Tensor) -> None:
                results[number] = member_outputs(member, prepared)

            def step() -> None:
                prepared = ensemble.prepare(place)
                members = enumerate(ensemble.members)
                side_by_side([partial(run, number, member, prepared) for number, member in members], streams)

            replay = captured(step, x.device, list, modules=list(ensemble.members))
        self.graphs[key] = place, results, replay

    def _unchanged(self) -> bool:
        return all(holder[name].data_ptr() == address for holder, name, address in self.places)


def _places(modules: list[nn.Module]) -> Iterator[tuple[dict[str, Any], str, int]]:
    for module in modules:
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield holder, name, tensor.data_ptr()


def _key(x: Tensor) -> Hashable:
    return (x.shape, x.dtype, x.device, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
