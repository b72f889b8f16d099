"""Copies of a model whose tensors are replaced on the way: how we work on a model without ever touching it.

Tracing needs a copy with fake tensors (no memory), the search a copy that shares the weights but owns its
normalisation statistics, extraction a copy with sliced weights. All three are one deep copy with other tensors in it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import device_of

Replace = Callable[[str, Tensor], Tensor]


def copy_with(model: nn.Module, parameter: Replace, buffer: Replace) -> nn.Module:
    """A deep copy of `model` in which every parameter and buffer is what the given function makes of it.

    The functions get the qualified name and the tensor, detached. `requires_grad` flags, training mode, hooks and
    attributes are those of the model; a tensor that has several names (shared weights) stays shared. A model whose
    copy would still use the model's own layers is refused, see `check_copyable`.
    """
    check_copyable(model)
    memo: dict[int, object] = {}
    for name, original in model.named_parameters():
        memo[id(original)] = nn.Parameter(parameter(name, original.detach()), requires_grad=original.requires_grad)
    for name, stored in model.named_buffers():
        memo[id(stored)] = buffer(name, stored.detach())
    for module in model.modules():
        # Tensors kept as plain attributes, such as the result of an old-style weight norm or remembered activations:
        # part of a graph, so that a deep copy would refuse them.
        kept = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        for value in _tensors_in(kept):
            if id(value) not in memo:
                memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(model, memo)  # looks into the memo before it copies anything
    for encoder in _nesting(copied):
        encoder.use_nested_tensor = False
    return copied


def _nesting(model: nn.Module) -> list[nn.TransformerEncoder]:
    """List the transformer encoders that would use nested tensors; our copies do not.

    Given a padding mask, `nn.TransformerEncoder` turns to nested tensors in evaluation mode, without gradients, if the
    padding is at the end: another computation than in training (padded places become zero), which no hook can scale
    and no CUDA graph can hold, as the host has to look at the mask. The fused kernel of its layers stays on. It is an
    attribute of the module: the user's model and torch's global switch for such kernels are left alone.
    """
    encoders = [module for module in model.modules() if isinstance(module, nn.TransformerEncoder)]
    return [encoder for encoder in encoders if getattr(encoder, "use_nested_tensor", False)]


@contextmanager
def without_nested_tensors(model: nn.Module) -> Iterator[None]:
    """Turn nested tensors off in a network that is not our copy, and back on afterwards."""
    encoders = _nesting(model)
    try:
        for encoder in encoders:
            encoder.use_nested_tensor = False
        yield
    finally:
        for encoder in encoders:
            encoder.use_nested_tensor = True


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def check_copyable(model: nn.Module) -> None:
    """Refuse a model that keeps a function, or a hook, which refers to its layers: a copy would run the model's own."""
    own = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules") and any(
                _reaches(function, own, set()) for function in _functions_in(value)
            ):
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(
                    f"model keeps a function that refers to its own layers, {where}: in a copy it would run the "
                    "model's layers, not the copy's. Make it a method, or a module"
                )


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions in containers, partial functions and methods; a deep copy keeps them as they are."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType):
        yield from _functions_in(value.__func__)
    else:
        for item in _items(value):
            yield from _functions_in(item)


def _reaches(value: Any, own: set[int], seen: set[int]) -> bool:
    """Tell whether a function refers to one of the objects with these ids: around it, by default, or by a global name.

    Looks into containers, partial functions, methods and other functions on the way.
    """
    if id(value) in own:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, FunctionType):
        used = (value.__globals__.get(name) for name in value.__code__.co_names)
        modules = [found for found in used if isinstance(found, nn.Module | Tensor)]
        cells = [_content(cell) for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return any(_reaches(item, own, seen) for item in (*cells, *defaults, *modules))
    parts = [value.__self__, value.__func__] if isinstance(value, MethodType) else _items(value)
    return any(_reaches(item, own, seen) for item in parts)


def _items(value: Any) -> list[Any]:
    """What containers and partial functions hold; nothing for anything else."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def clone_of(model: nn.Module) -> nn.Module:
    """A copy with tensors of its own."""
    return copy_with(model, parameter=lambda _, weight: weight.clone(), buffer=lambda _, value: value.clone())


def shadow_of(model: nn.Module) -> nn.Module:
    """A copy that shares the weights' storage, frozen, and owns its buffers: to run a model without changing it."""
    shadow = copy_with(model, parameter=lambda _, weight: weight, buffer=lambda _, value: value.clone())
    for weight in shadow.parameters():
        weight.requires_grad_(False)
    return shadow


def bystander_of(model: nn.Module) -> nn.Module:
    """Make a shadow in evaluation mode and without hooks, for a trial that must leave no trace in the model.

    Where hooks are part of what it computes, it computes something else.
    """
    shadow = shadow_of(model).eval()
    clear_hooks(shadow)
    return shadow


def clear_hooks(model: nn.Module) -> None:
    """Remove the forward hooks of a copy; those of the original stay."""
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Its state, without what else a module may keep there."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Its state and its non-persistent buffers: every tensor that its outputs may depend on."""
    state = tensors_of(model)
    return state | {name: buffer for name, buffer in model.named_buffers() if name not in state}


def unsaved_buffers(model: nn.Module) -> set[str]:
    """Name the non-persistent buffers, which a state dict leaves out."""
    return {name for name, _ in model.named_buffers()} - set(tensors_of(model))


def check_fits(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless tensors have the names and shapes of a model's state.

    A non-persistent buffer may be missing, or have another shape, such as a cache that grows.
    """
    optional = unsaved_buffers(model)
    expected = {(name, tensor.shape) for name, tensor in tensors_of(model).items()}
    found = {(name, tensor.shape) for name, tensor in tensors.items() if name not in optional}
    if differing := {name for name, _ in expected ^ found}:
        raise ValueError(f"{min(differing)} has another shape, or is not in both")


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model, in place, by the names of `all_tensors`; a buffer that is not among them stays.

    Raises a RuntimeError if the state has other names or shapes. A non-persistent buffer may have another shape than
    the model's, such as a cache that grows.
    """
    state = model.state_dict()  # has versions of its modules with it, which some of them ask for
    apart = {name: tensor for name, tensor in tensors.items() if name not in state}
    strangers = {name for name in apart if not _is_buffer(model, name)}
    missing = {name for name, value in state.items() if isinstance(value, Tensor)} - tensors.keys()
    if strangers or missing:
        raise RuntimeError(f"{min(strangers or missing)} is not in both")
    state.update({name: tensor for name, tensor in tensors.items() if name in state})
    model.load_state_dict(state)
    for name, tensor in apart.items():
        owner, _, attribute = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        buffer = buffers[attribute]
        if buffer is not None and buffer.shape == tensor.shape:
            buffer.copy_(tensor)
        else:
            buffers[attribute] = tensor.to(device_of(model), copy=True)


def _is_buffer(model: nn.Module, name: str) -> bool:
    """Tell whether a model has registered a buffer of this name, set or not."""
    owner, _, attribute = name.rpartition(".")
    return attribute in getattr(dict(model.named_modules()).get(owner), "_buffers", {})


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of numbers it computes with: that of its first parameter of floats."""
    for own in model.parameters():  # no generator: torch 2.6 cannot export those
        if own.is_floating_point():
            return own.dtype
    return torch.float32


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without nested tensors, as in training, and back to whatever each part was in."""
    modes: Mapping[nn.Module, bool] = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with without_nested_tensors(module):
            yield
    finally:
        for part, training in modes.items():
            part.training = training
