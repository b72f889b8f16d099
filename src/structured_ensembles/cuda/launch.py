"""Launch Triton kernels; or only compile them, many at a time.

A kernel is compiled when it is first launched, which takes half a second, and a training step has dozens. So before the
first step of a run the passes run once in `compile_only`: all kernels are compiled in parallel, and none is launched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

MAX_THREADS = 16

_compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)
_dependent: ContextVar[bool] = ContextVar("dependent", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on a grid of programs; within `compile_only`, compile it."""
    if _dependent.get():
        constants |= {"DEPENDENT": True, "launch_pdl": True}
    if torch.version.hip is not None:
        constants.pop("maxnreg", None)  # a limit of registers that Triton has for NVIDIA's GPUs only
    if _compile_only.get():
        kernel.warmup(*arguments, grid=grid, **constants)
    else:
        kernel[grid](*arguments, **constants)


def empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None, channels_last: bool = False) -> Tensor:
    """Return a tensor that a kernel will fill, on the device of `like`; zeros within `compile_only`."""
    order = torch.channels_last if channels_last else torch.contiguous_format
    result = torch.empty(shape, device=like.device, dtype=dtype or torch.float32, memory_format=order)
    return result.zero_() if _compile_only.get() else result


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Let a GPU start each kernel while the one before it ends, which saves some microseconds between short kernels.

    Kernels wait for each other themselves, see `kernels/order.py`. For GPUs from Hopper on. Training does not use it
    before it has been measured: `benchmarks/speed.py --dependent`.
    """
    token = _dependent.set(True)
    try:
        yield
    finally:
        _dependent.reset(token)


@contextmanager
def compile_only() -> Iterator[bool]:
    """Compile kernels instead of launching them, in parallel; yields False where this Triton cannot.

    Results of kernels within the context mean nothing: they are zeros.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode
    except ImportError:  # before Triton 3.4
        yield False
        return
    token = _compile_only.set(True)
    try:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool, AsyncCompileMode(pool):
            yield True
    finally:
        _compile_only.reset(token)
