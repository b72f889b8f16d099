"""Copies of a model with fake tensors, which run and export without memory or arithmetic."""

from __future__ import annotations

import inspect
import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.errors import first_line
from structured_ensembles.common.exports import quiet_export, without_stack_traces
from structured_ensembles.common.inputs import call, call_arguments
from structured_ensembles.data.random_states import preserve_random_states
from structured_ensembles.networks.copying import copy_with
from structured_ensembles.tracing.recurrent_shapes import reading_one_token

FAKE_TENSOR_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True)
class FakeModel:
    """A copy of a model with fake tensors, and the fake inputs that it runs on."""

    mode: FakeTensorMode
    model: nn.Module
    inputs: Any  # a tuple of positional, or a dict of keyword arguments
    doubled: bool = False  # whether the example has one sample, and the inputs two: one is no dimension to follow

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> FakeModel:
        """Copy a model and its inputs with fake tensors."""
        mode = FakeTensorMode()
        copy = copy_with(model, *[lambda _, tensor: mode.from_tensor(tensor)] * 2)
        device = device_of(model)
        with mode:  # only the shapes and dtypes of an example matter, not its device and strides
            fake_inputs = tree_map_only(
                Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device), inputs
            )
            batches = [leaf for leaf in tree_leaves(fake_inputs) if isinstance(leaf, Tensor) and leaf.dim()]
            doubled = bool(batches) and all(len(leaf) == 1 for leaf in batches)
            if doubled:
                fake_inputs = tree_map_only(Tensor, _double, fake_inputs)
        return cls(mode, copy.eval(), fake_inputs, doubled)

    def export(self, model: nn.Module, training: bool = False, more_samples: bool = False) -> ExportedProgram:
        """Export `model`, which is this copy or a smaller one; see `running` for the arguments."""
        with self.running(model, training, more_samples) as inputs, without_stack_traces(), quiet_export():
            program = torch.export.export(model, *call_arguments(inputs), strict=False)
        _check_ids(program)
        return program

    def failure(self, model: nn.Module, training: bool = False) -> str | None:
        """Run `model`; return the first line of its error, or None if it runs."""
        try:
            with self.running(model, training) as inputs, self._sizes_that_depend_on_data():
                call(model, inputs)
        except Exception as error:  # the model's code may raise anything
            return first_line(error)
        return None

    @contextmanager
    def running(self, model: nn.Module, training: bool, more_samples: bool = False) -> Iterator[Any]:
        """Set the mode of `model` and yield its inputs; restore the mode and the random states at the end.

        Code that draws a branch from Python's or NumPy's random state takes the same one in every run.
        Callers hold `exclusive_export`, since this changes globals.
        more_samples: yield inputs of three times as many samples as the example.
        """
        with preserve_random_states():
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            model.train(training)
            try:
                with (
                    self.mode,
                    torch.no_grad(),
                    warnings.catch_warnings(),
                    _silence(FAKE_TENSOR_LOGGER),
                    reading_one_token(),
                ):
                    warnings.simplefilter("ignore")
                    yield tree_map_only(Tensor, _triple, self.inputs) if more_samples else self.inputs
            finally:
                model.eval()

    @contextmanager
    def _sizes_that_depend_on_data(self) -> Iterator[None]:
        """Let fake tensors have sizes that depend on data, as in an export, such as what a mask picks."""
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy, which takes half a second

        self.mode.shape_env = ShapeEnv()
        try:
            yield
        finally:
            self.mode.shape_env = None

    @property
    def shapes(self) -> str:
        """Return the shapes of the inputs, for error messages."""
        return ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor))


@contextmanager
def _silence(logger: logging.Logger) -> Iterator[None]:
    """Disable a logger that prints a traceback of every failure: trials are expected to fail."""
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def reads_training_flag(model: nn.Module) -> bool:
    """Tell whether code other than PyTorch's layers reads `training`, so that both modes must be followed."""
    for module_type in {type(module) for module in model.modules()}:
        for base in module_type.__mro__:
            if base.__module__.startswith("torch.nn.") or base is object:
                continue
            codes = [getattr(inspect.unwrap(function), "__code__", None) for function in vars(base).values()]
            if any(code is not None and _names_training(code) for code in codes):
                return True
    return False


def _names_training(code: CodeType) -> bool:
    """Tell whether a function's code, or that of a function inside of it, names `training`."""
    inside = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return "training" in code.co_names or any(map(_names_training, inside))


def _check_ids(program: ExportedProgram) -> None:
    """Raise a TypeError for an embedding with float indices, as some versions of torch do only on real tensors."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.embedding.default:
            dtype = node.args[1].meta["val"].dtype
            if dtype not in (torch.int64, torch.int32):
                raise TypeError(f"an embedding needs whole numbers as indices, not {dtype}")


def _double(tensor: Tensor) -> Tensor:
    """Repeat a batch."""
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor


def _triple(tensor: Tensor) -> Tensor:
    """Repeat a batch twice."""
    return torch.cat([tensor] * 3) if tensor.dim() else tensor
