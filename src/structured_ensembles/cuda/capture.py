"""Steps captured once as a CUDA graph, and replayed with one launch instead of thousands.

A step is a function without arguments that works in place on tensors that stay where they are. On any other device a
captured step is the step itself, so that the code around it need not ask.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Step = Callable[[], None]
MODULE_INTERNALS = frozenset(vars(nn.Module()))  # parameters, buffers, hooks

logger = logging.getLogger(__name__)

_one_at_a_time = threading.RLock()  # captures share streams
_broken: list[torch.cuda.CUDAGraph] = []  # captures that broke off; torch may still point to them


class CaptureError(RuntimeError):
    """A step that cannot be captured; the message says why."""


def captured(step: Step, device: torch.device, state: Callable[[], Iterable[Tensor]], **more: Any) -> Step:
    """Capture `step`; what comes back does the same. See `all_captured`."""
    return all_captured([step], device, state, **more)[0]


def all_captured(
    steps: Sequence[Step],
    device: torch.device,
    state: Callable[[], Iterable[Tensor]],
    *,
    modules: Sequence[nn.Module] = (),
    generators: Callable[[], Iterable[torch.Generator]] = tuple,
) -> list[Step]:
    """Capture steps that never run at the same time, and so share their memory.

    state: gives the tensors that the steps change, see `tensors_of`. A step runs twice before it is captured, to warm
        up; afterwards these are as they were, and those that came up meanwhile (an optimizer's momentum) are zero.
    modules: those that run in the steps. One that keeps count on the host cannot be captured, since the host takes no
        part in a replay; nor can one that draws random numbers there, or waits for the device.
    generators: random generators of their own that the steps draw from.
    """
    if device.type != "cuda":
        return list(steps)
    with _one_at_a_time, torch.cuda.device(device), _deterministic(), _in_this_thread():
        ask_for_small_workspaces()
        _drop_workspaces()
        try:
            for step in steps:  # all of them before the first capture, which then has the memory that this took
                _warm_up(step, device, state, modules)
            own, pool = list(generators()), torch.cuda.graph_pool_handle()
            return [_capture(step, device, own, pool) for step in steps]
        except ValueError:  # data or a network that would not do without a graph either
            torch.cuda.synchronize(device)
            raise
        except Exception as error:
            torch.cuda.synchronize(device)
            raise CaptureError(str(error).split("\n", 1)[0]) from error
        finally:
            _drop_workspaces()


def _capture(step: Step, device: torch.device, generators: Sequence[torch.Generator], pool: Any) -> Step:
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    _drop_workspaces()
    here, reason = torch.cuda.current_stream(device), None
    try:
        # "thread_local": a loader's thread may pin memory meanwhile.
        with (
            _no_collecting(),
            torch.cuda.graph(graph, pool=pool, stream=_stream(device, 0), capture_error_mode="thread_local"),
        ):
            try:
                step()
            except BaseException as error:  # the end of the capture would complain of something else
                reason = error
                raise
    except BaseException as error:
        _clean_up(graph, pool, here)
        cause = reason or error
        raise (CaptureError(str(cause)) if isinstance(cause, ValueError) else cause) from None
    return graph.replay


def _clean_up(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> None:
    """End what a capture that broke off has begun. Torch does not, and then no other capture would succeed."""
    _broken.append(graph)
    torch.cuda.set_stream(stream)
    index = stream.device_index
    with suppress(RuntimeError):  # it had ended
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    # The generator is in a state that only a graph may draw from; its copy is not.
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())


def captured_if_possible(
    step: Step, device: torch.device, state: Callable[[], Iterable[Tensor]], name: str, **more: Any
) -> Step:
    """Capture `step`, or return it as it is and log why it cannot be captured. name: of the work, for the log."""
    try:
        return captured(step, device, state, **more)
    except CaptureError as error:
        log_once(f"{name} goes on without a CUDA graph, slower: {error}")
        return step


@cache
def log_once(message: str) -> None:
    """Log a fallback, once in a process: every size of batch would repeat it."""
    logger.warning(message)


def side_streams(device: torch.device, number: int) -> list[torch.cuda.Stream]:
    """Streams for `side_by_side`, always the same ones; none where there are no streams."""
    return [_stream(device, 1 + index) for index in range(number)] if device.type == "cuda" else []


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _drop_workspaces() -> None:
    """Free what cuBLAS keeps for every stream it ever ran on: a graph gets its own, and leaves none.

    What a graph of the user's was warmed up with goes too; torch's own graphs (inductor's) do the same.
    """
    torch._C._cuda_clearCublasWorkspaces()


def ask_for_small_workspaces() -> None:
    """16 MiB for each stream that cuBLAS runs on, as on most GPUs: on the newer ones it is 64, and we have many.

    Unless the user has said how much. Torch reads this whenever it needs a workspace, at least up to 2.11. It stays so:
    were it to grow again, another thread could take a small workspace for a large one.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")


def side_by_side(parts: Sequence[Step], streams: Sequence[torch.cuda.Stream]) -> None:
    """Run the parts at the same time, each on a stream; one after the other if there are no streams."""
    if not streams:
        for part in parts:
            part()
        return
    here = torch.cuda.current_stream(streams[0].device)
    used = streams[: len(parts)]
    for stream in used:
        stream.wait_stream(here)
    for number, part in enumerate(parts):
        with torch.cuda.stream(streams[number % len(streams)]):
            part()
    for stream in used:
        here.wait_stream(stream)


def _warm_up(
    step: Step, device: torch.device, state: Callable[[], Iterable[Tensor]], modules: Sequence[nn.Module]
) -> None:
    kept = {id(tensor): (tensor, tensor.detach().clone()) for tensor in state()}

    @torch.no_grad()
    def restore() -> None:
        for tensor in state():
            if id(tensor) in kept:
                tensor.copy_(kept[id(tensor)][1])
            else:
                tensor.zero_()

    stream = _stream(device, 0)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            step()  # compiles, chooses algorithms, makes what is made once
            restore()
            before, places = host_state(modules), [id(tensor) for tensor in state()]
            with _no_waiting():
                step()
            if host_state(modules) != before:
                raise CaptureError("it draws random numbers, or keeps count, on the host")
            if [id(tensor) for tensor in state()] != places:
                raise CaptureError("it replaces tensors instead of changing them in place")
    finally:
        torch.cuda.synchronize(device)  # after an error, side streams may still be at work
        restore()
        torch.cuda.synchronize(device)


def host_state(modules: Sequence[nn.Module]) -> list[object]:
    """Return what a step on the host might change: random states, plain values of modules, lengths of their lists."""
    drawn = np.random.get_state()  # noqa: NPY002
    state: list[object] = [random.getstate(), str(drawn), torch.get_rng_state().tolist()]
    for module in modules:
        for layer in module.modules():
            for name, value in vars(layer).items():
                if name != "training" and isinstance(value, bool | int | float | str):
                    state.append((name, value))
                elif name not in MODULE_INTERNALS and isinstance(value, list | dict | set | deque):
                    state.append((name, len(value)))
    return state


@contextmanager
def _no_collecting() -> Iterator[None]:
    """No garbage collection: if it came upon a graph of earlier, that graph's end would break the capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _in_this_thread() -> AbstractContextManager[None]:
    """Backward passes too: in a thread of their own, cuBLAS takes a second workspace for each stream."""
    return torch.autograd.set_multithreading_enabled(False)


@contextmanager
def _deterministic() -> Iterator[None]:
    """The same seed gives the same numbers, unless cuDNN was told to choose its algorithms by timing them."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = before or not torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


@contextmanager
def _no_waiting() -> Iterator[None]:
    """An error for whatever makes the host wait for the device: it would break a capture in a worse way."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
