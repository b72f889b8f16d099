"""Recurrent layers on fake tensors: one token is enough to know the shapes of all.

PyTorch runs LSTMs, GRUs and simple RNNs on fake tensors token by token, in Python: a trace of a network that reads
many tokens would spend most of its time there. The results for one token have all sizes but the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Kernel = Callable[..., Any]
Kernels = dict[Any, Kernel]  # by dispatch key

OPERATIONS = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]


@contextmanager
def reading_one_token() -> Iterator[None]:
    """Let recurrent layers read one token on fake tensors; the outcome for other tensors is the same as outside.

    For one thread at a time: it replaces the operations' kernels in Python. A later PyTorch without any keeps its own.
    """
    before: dict[Any, Kernels] = {operation: dict(getattr(operation, "py_kernels", {})) for operation in OPERATIONS}
    for operation, kernels in before.items():
        _set_kernels(operation, {key: partial(_read_one_token, kernel) for key, kernel in kernels.items()})
    try:
        yield
    finally:
        for operation, kernels in before.items():
            _set_kernels(operation, kernels)


def _set_kernels(operation: Any, kernels: Kernels) -> None:
    """Give an operation these kernels in Python, and let PyTorch choose among them again, as its `py_impl` does."""
    if kernels:
        operation.py_kernels.update(kernels)
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
