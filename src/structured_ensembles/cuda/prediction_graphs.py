"""Prediction on a GPU as CUDA graphs: one for each shape of inputs that comes often, members side by side."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.inputs import Inputs, clone_inputs, map_inputs, tensors_in
from structured_ensembles.cuda.capture import CaptureError, Step, captured, log_once, side_by_side, side_streams
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.prediction.combination import member_outputs

MOST_SHAPES = 8  # further ones run without a graph
MANY = 64  # images: from here on convolutions are faster with the channels last
WORTHWHILE = 4  # a capture takes as long as some passes: a shape that comes less often is not worth one


class Replays:
    """The graphs of one ensemble. They hold addresses of its weights, and are dropped when these have moved."""

    def __init__(self) -> None:
        self.seen: Counter[Hashable] = Counter()
        self.graphs: dict[Hashable, tuple[Inputs, list[Tensor], Step]] = {}
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

    def outputs(self, ensemble: Any, x: Inputs) -> Tensor | None:
        """(members, batch, classes); None where a graph is not possible, or not worth its while."""
        if not self.possible or torch.is_grad_enabled():
            return None
        if not all(type(own) is Tensor and own.is_cuda for own in tensors_in(x)):
            return None
        if torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
            return None
        with self.lock:
            return self._outputs(ensemble, x)

    def _outputs(self, ensemble: Any, x: Inputs) -> Tensor | None:
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
                log_once(f"prediction goes on without a CUDA graph, slower: {error}")
                return None
            self.print = own
        place, results, replay = self.graphs[key]
        map_inputs(Tensor.copy_, place, x)
        replay()
        return torch.cat(results)


class Fingerprint:
    """What a captured forward pass depends on: the modules, where their tensors lie, and the normalisation.

    It does not hold the ensemble, which holds it: in a cycle, graphs would stay on the GPU until a garbage collection.
    """

    def __init__(self, ensemble: Any) -> None:
        self.normalization = ensemble.normalization
        self.modules: list[nn.Module] = [module for member in ensemble.members for module in member.modules()]
        kinds = [(module._modules, module._parameters, module._buffers) for module in self.modules]
        holders = [ensemble._modules, ensemble.members._modules, *chain.from_iterable(kinds)]
        self.holders = [holder for holder in holders if holder]
        self.empty = [holder for holder in holders if not holder]
        self.parts = self._parts()
        self.tensors = [part for part in self.parts if isinstance(part, Tensor)]
        self.addresses = self._addresses()

    def fits(self, ensemble: Any) -> bool:
        """Whether nothing was replaced or moved since. Asked before every prediction, so it has to be quick."""
        now = self._parts()
        return (
            ensemble.normalization is self.normalization
            and not any(self.empty)
            and len(now) == len(self.parts)
            and all(map(is_, now, self.parts))
            and self._addresses() == self.addresses
        )

    def _parts(self) -> list[object]:
        """All submodules, parameters and buffers."""
        return list(chain.from_iterable(holder.values() for holder in self.holders))

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.tensors))

    def quiet(self) -> bool:
        """Whether no module is in training, or wants to be told that it runs."""
        return not any(module.training or module._forward_hooks or module._forward_pre_hooks for module in self.modules)


def _captured(ensemble: Any, x: Inputs) -> tuple[Inputs, list[Tensor], Step]:
    """A place for inputs like x, a place for the outputs of each network, and what computes these from that."""
    # Tensors made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        place, results = map_inputs(Tensor.clone, x), [torch.empty(0)] * len(ensemble.members)
        device = tensors_in(x)[0].device
        streams = side_streams(device, len(ensemble.members))

        changing = [_overwrites(member, ensemble.prepare(place)) for member in ensemble.members]

        def run(number: int, member: nn.Module, prepared: Inputs) -> None:
            results[number] = member_outputs(member, clone_inputs(prepared) if changing[number] else prepared)

        order = memory_order(ensemble, place)

        def step() -> None:
            prepared = map_inputs(partial(Tensor.contiguous, memory_format=order), ensemble.prepare(place))
            members = enumerate(ensemble.members)
            side_by_side([partial(run, number, member, prepared) for number, member in members], streams)

        return place, results, captured(step, device, tensors_of, modules=list(ensemble.members))


def _overwrites(network: nn.Module, inputs: Inputs) -> bool:
    """Tell whether a network works in place on its inputs, which it then cannot share with the other members."""
    own = clone_inputs(inputs)
    before = [tensor._version for tensor in tensors_in(own)]
    member_outputs(network, own)
    return before != [tensor._version for tensor in tensors_in(own)]


def memory_order(ensemble: Any, x: Inputs) -> torch.memory_format:
    """Channels last for many images, if all members can take it: one that flattens by `view` cannot."""
    if isinstance(x, Tensor) and x.dim() == 4 and len(x) >= MANY:
        few = ensemble.prepare(x[:2]).contiguous(memory_format=torch.channels_last)
        with suppress(Exception):
            for member in ensemble.members:
                member(few)
            return torch.channels_last
    return torch.contiguous_format


def _key(x: Inputs) -> Hashable:
    casting = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    tensors = tensors_in(x)
    kinds = tuple((own.shape, own.dtype, own.device) for own in tensors)
    names = tuple(x) if isinstance(x, dict) else None
    return (kinds, names, casting, torch.cuda.current_stream(tensors[0].device))
