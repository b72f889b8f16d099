"""A normalised image that waits for what comes next.

After most batch normalisations comes a ReLU, often after the sum with a shortcut. Kernels that do all of it at once
read and write less. So a normalisation hands on a `Pending` tensor: a sum and a ReLU become part of it, and whatever
else anybody does with it finds the ordinary tensor in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from structured_ensembles.training import batch_norm

Function = Callable[..., Any]

_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cuda")
_SIZES: set[Function] = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
}
_SUMS: set[Function] = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_SUMS_IN_PLACE: set[Function] = {Tensor.add_, Tensor.__iadd__}
_RELUS: set[Function] = {F.relu, torch.relu, Tensor.relu}
_RELUS_IN_PLACE: set[Function] = {torch.relu_, Tensor.relu_}


class Normalisation:
    """What `module` is to make of x (batch, channels, height, width)."""

    def __init__(self, x: Tensor, module: nn.BatchNorm2d) -> None:
        self.x, self.module = x, module
        self.version = x._version
        self.with_gradients = torch.is_grad_enabled()
        self.done = False

    def result(self, other: Tensor | None = None, relu: bool = False) -> Tensor:
        if self.x._version != self.version:
            raise RuntimeError("what a normalisation was to read has been changed in place")
        with torch.set_grad_enabled(self.with_gradients):
            result = batch_norm.batch_norm(self.x, self.module, other, relu, again=self.done)
        self.done = True
        return result

    def finish(self) -> None:
        """Tell the running statistics, in case that nobody wanted the result."""
        if not self.done:
            self.result()


def pending(normalisation: Normalisation, other: Tensor | None = None) -> Pending:
    """The result of a normalisation, with `other` added if there is one, all (batch, channels, height, width)."""
    module = normalisation.module
    return _Promise.apply(normalisation.x, other, module.weight, module.bias, normalisation)  # type: ignore[no-any-return]


class Pending(Tensor):
    """See `pending`."""

    _normalisation: Normalisation
    _other: Tensor | None
    _others_version: int
    _instead: Tensor | None  # what stands for it, once that is known or something has changed it in place
    _changes: list[Function]  # in place

    @staticmethod
    def __new__(cls, normalisation: Normalisation, other: Tensor | None) -> Pending:
        x = normalisation.x
        self: Pending = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        self._normalisation, self._other, self._instead = normalisation, other, None
        self._others_version = 0 if other is None else other._version
        self._changes = []
        return self

    def __init__(self, *given: object) -> None:
        super().__init__()

    def latest(self) -> Tensor:
        """What stands for this by now; the pending tensor itself, if nothing does."""
        own: Tensor = self
        while isinstance(own, Pending) and own._instead is not None:
            own = own._instead
        return own

    def value(self) -> Tensor:
        """The tensor that this stands for."""
        own = self.latest()
        if not isinstance(own, Pending):
            return own
        own._instead = own._result(relu=False)
        return own._instead

    def _result(self, relu: bool) -> Tensor:
        if self._other is not None and self._other._version != self._others_version:
            raise RuntimeError("what was added to a normalisation has been changed in place")
        return self._normalisation.result(self._other, relu)

    def _joins(self, function: Function, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Whether a sum or a ReLU can become part of this."""
        if torch.is_grad_enabled() != self._normalisation.with_gradients:
            return False
        if function in _RELUS | _RELUS_IN_PLACE:
            return not set(named) - {"inplace"}
        other = given[0] if len(given) == 1 else None
        return (
            self._other is None
            and not named
            and isinstance(other, Tensor)
            and other.shape == self.shape
            and other.dtype == self.dtype
            and other.device == self.device
        )

    def _sum(self, function: Function, other: Tensor) -> Pending:
        result = pending(self._normalisation, other.value() if isinstance(other, Pending) else other)
        if function in _SUMS_IN_PLACE:
            self._instead = result
            self._changes.append(function)
        return result

    def _relu(self, function: Function, given: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
        result = self._result(relu=True)
        if function in _RELUS_IN_PLACE or named.get("inplace") or True in given:
            self._instead = result
            self._changes.append(function)
        return result

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _SIZES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        args, named = tree_map_only(Pending, Pending.latest, (args, named))
        if func in _SUMS | _SUMS_IN_PLACE | _RELUS | _RELUS_IN_PLACE:
            # A sum is the same either way, unless it changes what comes first.
            either = func in _SUMS and len(args) == 2 and not isinstance(args[0], Pending)
            own, *others = reversed(args) if either else args or (None,)
            if isinstance(own, Pending) and own._joins(func, others, named):
                return own._sum(func, *others) if func in _SUMS | _SUMS_IN_PLACE else own._relu(func, others, named)
        args, named = tree_map_only(Pending, Pending.value, (args, named))
        return func(*args, **named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise TypeError(f"{func} got a tensor that is still pending: it was not called from Python")


class _Promise(torch.autograd.Function):
    """Where derivatives go if an autograd function takes what is pending, and reads it in its own way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor, normalisation: Normalisation
    ) -> Pending:
        ctx.save_for_backward(x)
        ctx.add, ctx.module = other is not None, normalisation.module
        result = Pending(normalisation, other)
        ctx.changes = result._changes
        return result

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.changes:
            raise RuntimeError("the result of a normalisation has been changed in place")
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = batch_norm.batch_norm(x, ctx.module, again=True)
        dx, dweight, dbias = torch.autograd.grad(y, [x, ctx.module.weight, ctx.module.bias], dy)
        return dx, dy if ctx.add else None, dweight, dbias, None
