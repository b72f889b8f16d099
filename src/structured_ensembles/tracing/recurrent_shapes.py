"""Recurrent layers on fake tensors: one token is enough to know the shapes of all.

PyTorch runs LSTMs, GRUs and simple RNNs on fake tensors token by token, in Python: a trace of a network that reads
many tokens would spend most of its time there. The results for one token have all sizes but the number of tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Kernel = Callable[..., Any]
Kernels = dict[Any, Kernel]  # by dispatch key

OPERATIONS = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
_lock = threading.Lock()
_before: dict[Any, Kernels] = {}  # the kernels in Python of each operation, while others stand in for them
_users: list[int] = []  # the threads that are tracing


@contextmanager
def reading_one_token() -> Iterator[None]:
    """Let recurrent layers read one token on fake tensors; the outcome for other tensors is the same as outside."""
    with _lock:
        if not _users:
            _replace()
        _users.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _users.remove(threading.get_ident())
            if not _users:
                _restore()


def _replace() -> None:
    """Put kernels for one token in the place of those for all; a later PyTorch without any in Python keeps its own."""
    for operation in OPERATIONS:
        kernels: Kernels = getattr(operation, "py_kernels", {})
        _before[operation] = dict(kernels)
        kernels.update({key: partial(_read_one_token, kernel) for key, kernel in kernels.items()})
        _forget_choices(operation)


def _restore() -> None:
    """Put the kernels for all tokens back."""
    for operation, kernels in _before.items():
        if kernels:
            operation.py_kernels.update(kernels)
        _forget_choices(operation)
    _before.clear()


def _forget_choices(operation: Any) -> None:
    """Let PyTorch choose an operation's kernels again, as its own `py_impl` does."""
    getattr(operation, "_dispatch_cache", {}).clear()


def _read_one_token(kernel: Kernel, *arguments: Any, **keywords: Any) -> Any:
    """Run a kernel on the first of the fake tokens; return outputs of the shape and strides that all of them have."""
    tokens, *others = arguments
    if keywords or type(tokens) is not FakeTensor:
        return kernel(*arguments, **keywords)
    samples_first = bool(others[-1])
    dim = 1 if samples_first else 0
    output, *final_states = kernel(tokens.narrow(dim, 0, 1), *others)
    by_token = output.transpose(0, 1) if samples_first else output
    outputs = torch.cat([by_token] * tokens.shape[dim])  # kernels join their outputs by tokens, and then transpose
    return (outputs.transpose(0, 1) if samples_first else outputs), *final_states
