"""A normalised image that waits for what comes next.

After most batch normalisations comes a ReLU, often after the sum with a shortcut. Kernels that do all of it at once
read and write less. So a normalisation hands on a `Pending` tensor: a sum and a ReLU become part of it, and whatever
else anybody does with it finds the ordinary tensor in its place. Where that would not be the same (something has
changed meanwhile, an autograd function or a hook wants a derivative of its own) there is an error, and the pass has to
be run without. Only code that asks for the type of a tensor, and goes another way, could notice something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from structured_ensembles.cuda import batch_norm

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
_WATCHING: set[Function] = {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad}


class Waiting:
    """The normalisations of one pass through a network."""

    def __init__(self) -> None:
        self.used = False
        self._open: list[Normalisation] = []

    def add(self, x: Tensor, module: nn.BatchNorm2d) -> Pending:
        """What `module` makes of x, some time."""
        for earlier in self._open:
            if earlier.module is module:  # running statistics learn in the order of the calls
                earlier.finish()
        self._open = [own for own in self._open if not own.done]  # the others need not be kept
        self._open.append(Normalisation(x, module))
        self.used = True
        return _pending(self._open[-1])

    def finish(self) -> None:
        """Tell the running statistics of those whose result nobody wanted."""
        for normalisation in self._open:
            normalisation.finish()
        self._open = []


class Normalisation:
    """What `module` is to make of x (batch, channels, height, width)."""

    def __init__(self, x: Tensor, module: nn.BatchNorm2d) -> None:
        self.x, self.module = x, module
        self.reads = self._reads()
        self.with_gradients = torch.is_grad_enabled()
        self.done = False

    def result(self, other: Tensor | None = None, relu: bool = False) -> Tensor:
        if self._reads() != self.reads:
            raise RuntimeError("what a normalisation was to read has changed meanwhile")
        with torch.set_grad_enabled(self.with_gradients):
            result = batch_norm.batch_norm(self.x, self.module, other, relu, again=self.done)
        self.done = True
        return result

    def finish(self) -> None:
        if not self.done:
            self.result()

    def _reads(self) -> list[object]:
        module = self.module
        sources = [_State(source, source._version) for source in (self.x, module.weight, module.bias)]
        kept = [_State(buffer, 0) for buffer in (module.running_mean, module.running_var)]
        needed = (module.weight.requires_grad, module.bias.requires_grad)
        return [*sources, *kept, needed, module.momentum, module.eps]


class _State:
    """A tensor as it is now."""

    def __init__(self, tensor: Tensor | None, version: int) -> None:
        self.tensor, self.version = tensor, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and other.tensor is self.tensor and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


class Pending(Tensor):
    """The result of a normalisation, with `other` added if there is one, all (batch, channels, height, width)."""

    _normalisation: Normalisation
    _other: Tensor | None
    _others_version: int
    _instead: Tensor | None  # what stands for it, once that is known or something has changed it in place
    _node: object  # where its derivatives go

    @staticmethod
    def __new__(cls, normalisation: Normalisation, other: Tensor | None) -> Pending:
        x = normalisation.x
        self: Pending = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        self._normalisation, self._other, self._instead = normalisation, other, None
        self._others_version = 0 if other is None else other._version
        return self

    def __init__(self, *given: object) -> None:
        super().__init__()

    def latest(self) -> Tensor:
        """What stands for this by now; the pending tensor itself, if nothing does."""
        if _node_of(self) is not self._node:
            raise RuntimeError("an autograd function has given back what is still pending")
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
            raise RuntimeError("what was added to a normalisation has changed meanwhile")
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
            and type(other) in (Tensor, nn.Parameter, Pending)
            and other.shape == self.shape
            and other.dtype == self.dtype
            and other.device == self.device
        )

    def _sum(self, function: Function, other: Tensor) -> Pending:
        result = _pending(self._normalisation, other.value() if isinstance(other, Pending) else other)
        if function in _SUMS_IN_PLACE:
            self._instead = result
        return result

    def _relu(self, function: Function, given: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
        result = self._result(relu=True)
        if function in _RELUS_IN_PLACE or named.get("inplace") or True in given:
            self._instead = result
        return result

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _SIZES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if func in _WATCHING:
            raise RuntimeError("what is pending may have no derivative of its own")
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


def _pending(normalisation: Normalisation, other: Tensor | None = None) -> Pending:
    module = normalisation.module
    result: Pending = _Promise.apply(normalisation.x, other, module.weight, module.bias, normalisation)
    result._node = _node_of(result)
    return result


def _node_of(tensor: Tensor) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


class _Promise(torch.autograd.Function):
    """Where derivatives would go if an autograd function took what is pending. That they get lost must not happen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor, normalisation: Normalisation
    ) -> Pending:
        return Pending(normalisation, other)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:  # type: ignore[override]
        raise RuntimeError("an autograd function has taken what was pending")
