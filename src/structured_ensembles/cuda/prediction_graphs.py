"""Predict on a GPU by CUDA graphs: one for each shape of inputs that comes often.

At first members run as they are, side by side on streams. For a shape that comes very often they are compiled to
programs (prediction.py), which takes seconds; then one kernel computes a layer of all members.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.errors import first_line
from structured_ensembles.common.inputs import Inputs, clone_inputs, map_inputs, tensors_in
from structured_ensembles.cuda.capture import CaptureError, Step, captured, log_fallback, side_by_side, side_streams
from structured_ensembles.cuda.convolution import allows_tf32
from structured_ensembles.cuda.launch import compile_only
from structured_ensembles.cuda.prediction import MemberPredictions, compile_predictions
from structured_ensembles.cuda.state import tensors_of
from structured_ensembles.networks.copying import dtype_of
from structured_ensembles.networks.hooks import has_watching_hooks
from structured_ensembles.prediction.combination import member_outputs

MAX_SHAPES = 8  # further ones run without a graph
CHANNELS_LAST_FROM = 64  # images: from here on convolutions are faster with the channels last
CAPTURE_AFTER = 4  # predictions of a shape: a capture takes as long as some of them
COMPILE_AFTER = 256  # predictions of a shape: a compilation takes as long as some hundreds of them
CLOSE = {torch.float32: 0.02, torch.bfloat16: 0.1}  # how far outputs of programs may be, as a share of the largest


@dataclass(frozen=True)
class Graph:
    """A captured forward pass: copy a batch to `inputs`, call `replay`, read `outputs`, (members, batch, …) each.

    programs: owners of the stacked weights and the tables of addresses that the kernels read. A CUDA graph has
    addresses only: it does not keep this memory from being freed and used by others.
    """

    inputs: Inputs
    outputs: list[Tensor]
    replay: Step
    programs: Sequence[MemberPredictions]


class Replays:
    """The graphs of one ensemble, which hold addresses of its weights and are dropped when these have moved.

    seen: how often a shape of inputs has come. graphs: by shape, what `capture_prediction` returns. fingerprint: of the
    ensemble that was captured. possible: False after a capture has failed.
    """

    def __init__(self) -> None:
        self.seen: Counter[Hashable] = Counter()
        self.graphs: dict[Hashable, Graph] = {}
        self.fingerprint: Fingerprint | None = None
        self.possible = True
        self.lock = threading.Lock()  # a graph has one tensor for its inputs

    def __deepcopy__(self, memo: object) -> Replays:
        return Replays()  # a copy has weights of its own

    def __reduce__(self) -> tuple[type[Replays], tuple[()]]:
        return Replays, ()

    def clear(self) -> None:
        """Drop all graphs."""
        self.graphs.clear()
        self.seen.clear()
        self.fingerprint = None

    def outputs(self, ensemble: Any, x: Inputs) -> Tensor | None:
        """Return outputs (members, batch, classes); None where a graph is impossible, or not worth its capture."""
        if not self.possible or torch.is_grad_enabled():
            return None
        if not all(type(tensor) is Tensor and tensor.is_cuda for tensor in tensors_in(x)):
            return None
        if torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
            return None
        with self.lock:
            return self.replay(ensemble, x)

    def replay(self, ensemble: Any, x: Inputs) -> Tensor | None:
        """Replay the graph of inputs like x, captured now if they have come often enough; the caller has the lock.

        Returns outputs (members, batch, classes), or None.
        """
        if self.fingerprint is not None and not self.fingerprint.fits(ensemble):
            self.clear()
        fingerprint = self.fingerprint or Fingerprint(ensemble)
        if not fingerprint.can_be_replayed():
            return None
        key = _key(x)
        self.seen[key] += 1
        if key not in self.graphs:
            if self.seen[key] < CAPTURE_AFTER or len(self.graphs) >= MAX_SHAPES:
                return None
            try:
                self.graphs[key] = capture_prediction(ensemble, x)
            except CaptureError as error:
                self.possible = False
                log_fallback(f"prediction goes on without a CUDA graph, slower: {error}")
                return None
            self.fingerprint = fingerprint
        elif self.seen[key] == COMPILE_AFTER:
            self.graphs[key] = compiled_prediction(ensemble, x, self.graphs[key])
        return predict_by(self.graphs[key], x)


class Fingerprint:
    """The things that a captured forward pass depends on: modules, addresses of their tensors, and the normalisation.

    It has no reference to the ensemble, which refers to it: in a cycle, graphs would stay on the GPU until a garbage
    collection.
    """

    def __init__(self, ensemble: Any) -> None:
        self.normalization = ensemble.normalization
        self.modules: list[nn.Module] = [module for member in ensemble.members for module in member.modules()]
        kinds = [(module._modules, module._parameters, module._buffers) for module in self.modules]
        holders = [ensemble._modules, ensemble.members._modules, *chain.from_iterable(kinds)]
        self.holders = [holder for holder in holders if holder]
        self.empty = [holder for holder in holders if not holder]
        self.contents = self._contents()
        self.tensors = [item for item in self.contents if isinstance(item, Tensor)]
        self.addresses = self._addresses()

    def fits(self, ensemble: Any) -> bool:
        """Tell whether nothing was replaced or moved since; quickly, as every prediction asks."""
        now = self._contents()
        return (
            ensemble.normalization is self.normalization
            and not any(self.empty)
            and len(now) == len(self.contents)
            and all(map(is_, now, self.contents))
            and self._addresses() == self.addresses
        )

    def _contents(self) -> list[object]:
        """List all submodules, parameters and buffers."""
        return list(chain.from_iterable(holder.values() for holder in self.holders))

    def _addresses(self) -> list[int]:
        """List the addresses of all tensors."""
        return list(map(Tensor.data_ptr, self.tensors))

    def can_be_replayed(self) -> bool:
        """Tell whether no module is in training, and no hook would have to see what it computes."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return False
        return not any(module.training or has_watching_hooks(module) for module in self.modules)


def predict_by(graph: Graph, x: Inputs) -> Tensor:
    """Replay a graph on inputs; returns outputs (members, batch, classes)."""
    map_inputs(Tensor.copy_, graph.inputs, x)
    graph.replay()
    return torch.cat(graph.outputs)


def capture_prediction(ensemble: Any, x: Inputs, programs: Sequence[MemberPredictions] = ()) -> Graph:
    """Capture the forward pass of all members on inputs like x: some by programs, the others as they are."""
    # Tensors made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        inputs, results = map_inputs(Tensor.clone, x), [torch.empty(0)] * len(ensemble.members)
        device = tensors_in(x)[0].device
        streams = side_streams(device, len(ensemble.members))
        programmed = {number for program in programs for number in program.numbers}
        rest = {number: member for number, member in enumerate(ensemble.members) if number not in programmed}
        overwrites = {number: overwrites_inputs(member, ensemble.prepare(inputs)) for number, member in rest.items()}

        def run(number: int, member: nn.Module, prepared: Inputs) -> None:
            results[number] = member_outputs(member, clone_inputs(prepared) if overwrites[number] else prepared)

        def run_program(program: MemberPredictions, prepared: Inputs) -> None:
            for number, outputs in zip(program.numbers, program.outputs(prepared), strict=True):
                results[number] = outputs[None]

        order = memory_order(ensemble, inputs)

        def step() -> None:
            prepared = map_inputs(partial(Tensor.contiguous, memory_format=order), ensemble.prepare(inputs))
            members = [partial(run, number, member, prepared) for number, member in rest.items()]
            side_by_side([partial(run_program, program, prepared) for program in programs] + members, streams)

        replay = captured(step, device, tensors_of, modules=list(ensemble.members))
        return Graph(inputs, results, replay, programs)


def compiled_prediction(ensemble: Any, x: Inputs, graph: Graph) -> Graph:
    """Capture the prediction anew by programs. Returns the earlier graph, and logs why, where that is impossible."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            programs = _programs(ensemble, map_inputs(Tensor.clone, x))
            if not programs:
                return graph
            compiled = capture_prediction(ensemble, x, programs)
            if not _agree(predict_by(graph, x), predict_by(compiled, x)):
                raise CaptureError("its outputs differ from the networks' by more than their precision")
    except (CaptureError, torch.OutOfMemoryError) as error:
        log_fallback(f"prediction goes on without our own kernels, slower: {first_line(error)}")
        return graph
    return compiled


def _programs(ensemble: Any, x: Inputs) -> list[MemberPredictions]:
    """Compile the members for inputs like x, without those for which that is impossible or would not pay."""
    precision, device = _precision(ensemble), tensors_in(x)[0].device
    if precision is None:
        return []
    networks = list(ensemble.members)
    with torch.autocast(device.type, enabled=False):  # programs are checked in double precision
        compiled = compile_predictions(
            networks,
            ensemble.prepare(x),
            precision == torch.bfloat16,
            lambda reason: log_fallback(f"prediction: {reason}"),
        )
        programs = [MemberPredictions(one, networks) for one in compiled]
    if programs and device.type == "cuda":
        try:
            with compile_only() as possible:
                for program in programs if possible else ():
                    program.outputs(ensemble.prepare(x))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton needs a C compiler, and some kernels more than a GPU has
            raise CaptureError(first_line(error)) from error
    return programs


def _precision(ensemble: Any) -> torch.dtype | None:
    """Return the type that convolutions compute in, as they do without a program; None if programs have no kernels."""
    device = device_of(ensemble)
    if device.type == "cuda" and find_spec("triton") is None:
        return None
    casting = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    precision = casting or dtype_of(ensemble)
    if precision == torch.float32 and not allows_tf32(device):
        return None
    return precision if precision in CLOSE else None


def _agree(expected: Tensor, actual: Tensor) -> bool:
    """Tell whether outputs are as near as their precision lets them be."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    close = CLOSE[expected.dtype] if expected.dtype in CLOSE else CLOSE[torch.float32]
    finite = expected.isfinite()
    scale = expected[finite].abs().max().item() if finite.any() else 0.0
    return torch.allclose(expected, actual, rtol=close, atol=close * scale, equal_nan=True)


def overwrites_inputs(network: nn.Module, inputs: Inputs) -> bool:
    """Tell whether a network works in place on its inputs, which it then cannot share with the other members."""
    copies = clone_inputs(inputs)
    before = [tensor._version for tensor in tensors_in(copies)]
    member_outputs(network, copies)
    return before != [tensor._version for tensor in tensors_in(copies)]


def memory_order(ensemble: Any, x: Inputs) -> torch.memory_format:
    """Return channels last for many images, if all members can run so: one that flattens by `view` cannot."""
    if isinstance(x, Tensor) and x.dim() == 4 and len(x) >= CHANNELS_LAST_FROM:
        few = ensemble.prepare(x[:2]).contiguous(memory_format=torch.channels_last)
        with suppress(Exception):
            for member in ensemble.members:
                member(few)
            return torch.channels_last
    return torch.contiguous_format


def _key(x: Inputs) -> Hashable:
    """Return all that a graph depends on beside the ensemble: shapes and types of inputs, precisions, the stream."""
    casting = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    tensors = tensors_in(x)
    kinds = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    names = tuple(x) if isinstance(x, dict) else None
    device = tensors[0].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return (kinds, names, casting, stream, allows_tf32(device))
