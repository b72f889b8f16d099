"""Capture a step once as a CUDA graph, and replay it with one launch instead of thousands.

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

from structured_ensembles.common.logs import log_once

Step = Callable[[], None]
MODULE_INTERNALS = frozenset(vars(nn.Module()))  # parameters, buffers, hooks

logger = logging.getLogger(__name__)

_one_at_a_time = threading.RLock()  # captures share streams
_failed: list[torch.cuda.CUDAGraph] = []  # failed captures; torch may still point to them


class CaptureError(RuntimeError):
    """A step that cannot be captured; the message says why."""


def captured(step: Step, device: torch.device, state: Callable[[], Iterable[Tensor]], **more: Any) -> Step:
    """Capture `step` and return the function that replays it. See `all_captured`."""
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

    state: returns the tensors that the steps change, see `tensors_of`. A step runs twice before it is captured, to warm
        up; afterwards these are restored, and new ones (an optimizer's momentum) are zero.
    modules: all that run in the steps. One that keeps count on the host cannot be captured, since a replay runs nothing
        on the host; nor can one that draws random numbers there, or waits for the device.
    generators: returns the random generators that the steps draw from, beside the default one.
    """
    if device.type != "cuda":
        return list(steps)
    with _one_at_a_time, torch.cuda.device(device), _deterministic(), _in_this_thread():
        ask_for_small_workspaces()
        _drop_workspaces()
        try:
            for step in steps:  # all of them before the first capture, which then has the memory that this took
                _warm_up(step, device, state, modules)
            drawn_from, pool = list(generators()), torch.cuda.graph_pool_handle()
            return [_capture(step, device, drawn_from, pool) for step in steps]
        except ValueError:  # data or a network that fails without a graph, too
            torch.cuda.synchronize(device)
            raise
        except Exception as error:
            torch.cuda.synchronize(device)
            raise CaptureError(str(error).split("\n", 1)[0]) from error
        finally:
            _drop_workspaces()


def _capture(step: Step, device: torch.device, generators: Sequence[torch.Generator], pool: Any) -> Step:
    """Capture a step that has been warmed up, in memory of `pool`."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    _drop_workspaces()
    caller_stream, reason = torch.cuda.current_stream(device), None
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
        _clean_up(graph, pool, caller_stream)
        cause = reason or error
        raise (CaptureError(str(cause)) if isinstance(cause, ValueError) else cause) from None
    return graph.replay


def _clean_up(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> None:
    """Clean up after a failed capture. Torch does not, and then no other capture would succeed."""
    _failed.append(graph)
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
        log_fallback(f"{name} goes on without a CUDA graph, slower: {error}")
        return step


def log_fallback(message: str) -> None:
    """Log a fallback, once in a process: every size of batch would repeat it."""
    log_once(logger, message)


def side_streams(device: torch.device, number: int) -> list[torch.cuda.Stream]:
    """Return streams for `side_by_side`, always the same ones; an empty list on devices without streams."""
    return [_stream(device, 1 + index) for index in range(number)] if device.type == "cuda" else []


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Return a stream by its number, made once."""
    return torch.cuda.Stream(device)


def _drop_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for every stream it ever ran on: a graph allocates its own.

    Those of a user's graphs are freed as well; torch's own graphs (inductor's) do the same.
    """
    torch._C._cuda_clearCublasWorkspaces()


def ask_for_small_workspaces() -> None:
    """Limit cuBLAS to 16 MiB for each stream, as on most GPUs; on newer ones it is 64, and we have many streams.

    A setting of the user's stays. Torch reads the variable whenever it needs a workspace, at least up to 2.11. It is
    not reset: with a larger size, another thread could mistake a small workspace for a large one.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")


def side_by_side(steps: Sequence[Step], streams: Sequence[torch.cuda.Stream]) -> None:
    """Run the steps at the same time, each on a stream; one after the other if there are no streams."""
    if not streams:
        for step in steps:
            step()
        return
    current = torch.cuda.current_stream(streams[0].device)
    used = streams[: len(steps)]
    for stream in used:
        stream.wait_stream(current)
    for number, step in enumerate(steps):
        with torch.cuda.stream(streams[number % len(streams)]):
            step()
    for stream in used:
        current.wait_stream(stream)


def _warm_up(
    step: Step, device: torch.device, state: Callable[[], Iterable[Tensor]], modules: Sequence[nn.Module]
) -> None:
    """Run a step twice and restore its state. Raises `CaptureError` for what a graph could not repeat.

    The device's generator gets its state back, too: a resumed run warms up anew, and its dropout must draw the same.
    """
    random_state = torch.cuda.get_rng_state(device)
    copies = {id(tensor): (tensor, tensor.detach().clone()) for tensor in state()}

    @torch.no_grad()
    def restore() -> None:
        for tensor in state():
            if id(tensor) in copies:
                tensor.copy_(copies[id(tensor)][1])
            else:
                tensor.zero_()

    stream = _stream(device, 0)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            step()  # compiles, chooses algorithms, makes what is made once
            restore()
            before, tensors = host_state(modules), [id(tensor) for tensor in state()]
            with _no_waiting():
                step()
            if host_state(modules) != before:
                raise CaptureError("it draws random numbers, or keeps count, on the host")
            if [id(tensor) for tensor in state()] != tensors:
                raise CaptureError("it replaces tensors instead of changing them in place")
    finally:
        torch.cuda.synchronize(device)  # after an error, side streams may still be at work
        restore()
        torch.cuda.set_rng_state(random_state, device)
        torch.cuda.synchronize(device)


def host_state(modules: Sequence[nn.Module]) -> list[object]:
    """Return the state that a step might change on the host: random states, plain values and lengths of lists."""
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
    """Disable garbage collection: if it freed an earlier graph, that would break the capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _in_this_thread() -> AbstractContextManager[None]:
    """Run backward passes in this thread: in another, cuBLAS would take a second workspace for each stream."""
    return torch.autograd.set_multithreading_enabled(False)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make cuDNN deterministic, unless the user lets it choose its algorithms by timing them."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = before or not torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise an error for whatever makes the host wait for the device, which would break a capture in a worse way."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
