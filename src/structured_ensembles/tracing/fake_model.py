"""A ghost of a model: a copy with fake tensors, which runs and exports without memory or arithmetic."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map_only

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import arguments, call
from structured_ensembles.networks.copying import copy_with

FAKES = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True)
class Ghost:
    """The copy, and the inputs it runs on."""

    mode: FakeTensorMode
    model: nn.Module
    inputs: Any  # a tuple of positional, or a dict of keyword arguments

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> Ghost:
        mode = FakeTensorMode()
        copy = copy_with(model, *[lambda _, tensor: mode.from_tensor(tensor)] * 2)
        device = device_of(model)
        with mode:  # of an example only the shapes matter, not where it lies, nor how
            fakes = tree_map_only(Tensor, lambda own: torch.empty(own.shape, dtype=own.dtype, device=device), inputs)
        return cls(mode, copy.eval(), fakes)

    def export(self, model: nn.Module, training: bool = False) -> ExportedProgram:
        """The exported program of `model`, the ghost itself or a smaller one."""
        with self._running(model, training) as inputs:
            program = torch.export.export(model, *arguments(inputs), strict=False)
        _check_ids(program)
        return program

    def failure(self, model: nn.Module, training: bool = False) -> str | None:
        """Run `model`; what its code says if it fails."""
        try:
            with self._running(model, training) as inputs:
                call(model, inputs)
        except Exception as error:  # the model's own code fails, in whatever way it likes
            return first_line(error)
        return None

    @contextmanager
    def _running(self, model: nn.Module, training: bool) -> Iterator[Any]:
        states = random.getstate(), np.random.get_state()  # noqa: NPY002 (a forward may draw from these)
        model.train(training)
        try:
            with self.mode, torch.no_grad(), warnings.catch_warnings(), _quiet(FAKES):
                warnings.simplefilter("ignore")
                # Twice the batch in training mode, where a batch norm refuses a single sample.
                yield tree_map_only(Tensor, _doubled, self.inputs) if training else self.inputs
        finally:
            model.eval()
            random.setstate(states[0])
            np.random.set_state(states[1])  # noqa: NPY002

    @property
    def shapes(self) -> str:
        return ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor))


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """It prints a traceback for whatever fails, and trials are there to fail."""
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def asks_for_its_mode(model: nn.Module) -> bool:
    """Whether code outside PyTorch's own layers looks at `training`, so that both modes have to be followed."""
    for kind in {type(module) for module in model.modules()}:
        for base in kind.__mro__:
            if base.__module__.startswith("torch.nn.") or base is object:
                continue
            codes = [getattr(function, "__code__", None) for function in vars(base).values()]
            if any(code is not None and "training" in code.co_names for code in codes):
                return True
    return False


def _check_ids(program: ExportedProgram) -> None:
    """What an embedding says of other indices than whole numbers: some versions of torch only if tensors are real."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.embedding.default:
            kind = node.args[1].meta["val"].dtype
            if kind not in (torch.int64, torch.int32):
                raise TypeError(f"an embedding needs whole numbers as indices, not {kind}")


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _doubled(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() else tensor
