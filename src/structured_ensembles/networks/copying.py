"""Copies of a model with other tensors in them, so that the user's model is never touched.

Tracing needs a copy with fake tensors (no memory), the search a copy that shares the weights but has its own batch norm
statistics, extraction a copy with sliced weights. All three are one deep copy whose tensors are replaced.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import Lock
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from structured_ensembles.common.devices import device_of
from structured_ensembles.networks.copy_settings import settle_copy

Replace = Callable[[str, Tensor], Tensor]


def copy_with(model: nn.Module, parameter: Replace, buffer: Replace) -> nn.Module:
    """Copy `model` deeply, with every parameter and buffer replaced by the result of a function.

    The functions get the qualified name and the detached tensor. `requires_grad` flags, training mode, hooks and
    attributes are those of the model; a tensor that has several names (shared weights) stays shared. A model whose
    copy would still use the model's layers is refused, see `check_copyable`.
    """
    check_copyable(model)
    with torch.inference_mode(False):  # tensors made under it could not be trained
        copied = _copy_with(model, parameter, buffer)
    for encoder in _encoders_with_nested_tensors(copied.modules()):
        encoder.use_nested_tensor = False
    settle_copy(copied)
    return copied


def _copy_with(model: nn.Module, parameter: Replace, buffer: Replace) -> nn.Module:
    """Copy a checked model, see `copy_with`."""
    memo: dict[int, object] = {}
    for name, original in model.named_parameters():
        replaced = parameter(name, _without_inference(original.detach()))
        memo[id(original)] = nn.Parameter(replaced, requires_grad=original.requires_grad)
    for name, original_buffer in model.named_buffers():
        memo[id(original_buffer)] = buffer(name, _without_inference(original_buffer.detach()))
    for module in model.modules():
        # Tensors in plain attributes, such as the result of an old-style weight norm or stored activations, may belong
        # to an autograd graph, which deepcopy refuses.
        others = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        for tensor in _tensors_in(others):
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)  # takes what the memo has instead of copying it
    except TypeError as error:
        raise TypeError(
            f"model cannot be copied, as every member is: {_uncopyable(model, memo)} refuses copy.deepcopy ({error}). "
            "Keep it outside of the model, or give its class a __deepcopy__"
        ) from error


def _uncopyable(model: nn.Module, memo: Mapping[int, object]) -> str:
    """Name the attribute of a model that cannot be copied; the model itself if none alone is to blame."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                try:
                    copy.deepcopy(value, dict(memo))
                except TypeError:
                    return f"its attribute {f'{name}.{attribute}' if name else attribute}"
    return "it"


def _without_inference(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd may use: a copy of one that was made under `torch.inference_mode`."""
    return tensor.clone() if tensor.is_inference() else tensor


def _encoders_with_nested_tensors(modules: Iterable[nn.Module]) -> list[nn.TransformerEncoder]:
    """List the transformer encoders among modules that may use nested tensors, which our copies turn off.

    In evaluation mode without gradients, `nn.TransformerEncoder` uses nested tensors if a padding mask has its padding
    at the end. That differs from training (padded positions become zero), no hook can scale it, and no CUDA graph can
    hold it, as the host has to read the mask. The layers' fused kernels stay on. `use_nested_tensor` is an attribute of
    the encoder, so that neither the user's model nor a global switch of torch changes.
    """
    encoders = [module for module in modules if isinstance(module, nn.TransformerEncoder)]
    return [encoder for encoder in encoders if getattr(encoder, "use_nested_tensor", False)]


def without_nested_tensors(model: nn.Module) -> AbstractContextManager[None]:
    """Turn nested tensors off in a network that is not our copy, and on again afterwards."""
    return _turn_nested_tensors_off(list_modules(model))


@contextmanager
def _turn_nested_tensors_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Turn nested tensors off in modules, and on again afterwards."""
    encoders = _encoders_with_nested_tensors(modules)
    try:
        for encoder in encoders:
            encoder.use_nested_tensor = False
        yield
    finally:
        for encoder in encoders:
            encoder.use_nested_tensor = True


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def check_copyable(model: nn.Module) -> None:
    """Raise a ValueError if a model keeps a function or hook that refers to its layers, which a copy would run too."""
    targets = {id(target) for target in (*model.modules(), *model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            inside = ".".join(filter(None, ("model", name, "_orig_mod")))
            raise ValueError(
                f"model is wrapped by torch.compile, and a copy would run the model's layers: give the network inside, "
                f"{inside}, and compile afterwards. How members are computed, Execution(compile=…) says"
            )
        for attribute, value in vars(module).items():
            # A deep copy leaves out what `module.compile()` has compiled.
            if attribute not in ("_parameters", "_buffers", "_modules", "_compiled_call_impl") and any(
                _reaches(function, targets, set()) for function in _functions_in(value)
            ):
                where = f"{name}.{attribute}" if name else attribute
                raise ValueError(
                    f"model keeps a function that refers to its own layers, {where}: in a copy it would run the "
                    "model's layers, not the copy's. Make it a method, or a module"
                )


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions in containers, partial functions and methods, which a deep copy does not copy."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, MethodType):
        yield from _functions_in(value.__func__)
    else:
        for item in _items(value):
            yield from _functions_in(item)


def _reaches(value: Any, targets: set[int], seen: set[int]) -> bool:
    """Tell whether a value refers to an object with one of the ids `targets`.

    A function refers to what its closure, its defaults and its global names hold. Containers, partial functions,
    methods and other functions are searched too.
    """
    if id(value) in targets:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, FunctionType):
        global_values = (value.__globals__.get(name) for name in value.__code__.co_names)
        modules = [item for item in global_values if isinstance(item, nn.Module | Tensor)]
        cells = [_content(cell) for cell in value.__closure__ or ()]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return any(_reaches(item, targets, seen) for item in (*cells, *defaults, *modules))
    items = [value.__self__, value.__func__] if isinstance(value, MethodType) else _items(value)
    return any(_reaches(item, targets, seen) for item in items)


def _items(value: Any) -> list[Any]:
    """List what a container or partial function holds; nothing for any other value."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else []


def _content(cell: CellType) -> object:
    """Return what a closure's cell holds; None for an empty one."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def clone_model(model: nn.Module) -> nn.Module:
    """Copy a model and all its tensors."""
    return copy_with(model, parameter=lambda _, weight: weight.clone(), buffer=lambda _, value: value.clone())


def copy_frozen(model: nn.Module) -> nn.Module:
    """Copy a model to run it unchanged: the weights share their storage and are frozen, the buffers are copies."""
    copied = copy_with(model, parameter=lambda _, weight: weight, buffer=lambda _, value: value.clone())
    for weight in copied.parameters():
        weight.requires_grad_(False)
    return copied


def copy_for_trial(model: nn.Module) -> nn.Module:
    """Copy a model frozen, in evaluation mode and without hooks, for a trial run that must leave no trace in the model.

    Where a hook changes the model's outputs, those of the copy differ.
    """
    copied = copy_frozen(model).eval()
    clear_hooks(copied)
    return copied


def clear_hooks(model: nn.Module) -> None:
    """Remove the forward hooks of a copy; those of the original stay."""
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict, without other values that a module may keep there."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state and its non-persistent buffers: every tensor that its outputs may depend on."""
    state = saved_tensors(model)
    return state | {name: buffer for name, buffer in model.named_buffers() if name not in state}


def unsaved_buffers(model: nn.Module) -> set[str]:
    """Name the non-persistent buffers, which a state dict leaves out."""
    return {name for name, _ in model.named_buffers()} - set(saved_tensors(model))


def check_fits(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless tensors have the names and shapes of a model's state.

    A non-persistent buffer may be missing, or have another shape, such as a cache that grows.
    """
    optional = unsaved_buffers(model)
    expected = {(name, tensor.shape) for name, tensor in saved_tensors(model).items()}
    actual = {(name, tensor.shape) for name, tensor in tensors.items() if name not in optional}
    if differing := {name for name, _ in expected ^ actual}:
        raise ValueError(f"{min(differing)} has another shape, or is not in both")


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a model, in place, by the names of `all_tensors`; a non-persistent buffer without one stays.

    Raises a RuntimeError if the state has other names or shapes. A non-persistent buffer may have another shape than
    the model's, such as a cache that grows.
    """
    state = model.state_dict()  # carries the modules' versions, which some of them need to load it
    unsaved = {name: tensor for name, tensor in tensors.items() if name not in state}
    unknown = {name for name in unsaved if not _is_buffer(model, name)}
    missing = {name for name, value in state.items() if isinstance(value, Tensor)} - tensors.keys()
    if unknown or missing:
        raise RuntimeError(f"{min(unknown or missing)} is not in both")
    state.update({name: tensor for name, tensor in tensors.items() if name in state})
    model.load_state_dict(state)
    for name, tensor in unsaved.items():
        owner, _, attribute = name.rpartition(".")
        buffers = model.get_submodule(owner)._buffers
        buffer = buffers[attribute]
        if buffer is not None and buffer.shape == tensor.shape:
            buffer.copy_(tensor)
        else:
            buffers[attribute] = tensor.to(device_of(model), copy=True)


def _is_buffer(model: nn.Module, name: str) -> bool:
    """Tell whether a model has registered a buffer of this name, even if it is None."""
    owner, _, attribute = name.rpartition(".")
    return attribute in getattr(dict(model.named_modules()).get(owner), "_buffers", {})


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that a model computes with: that of its first floating-point parameter."""
    for parameter in model.parameters():  # no generator expression: torch 2.6 cannot export one
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.float32


_mode_lock = Lock()
_evaluating: dict[int, tuple[int, ExitStack]] = {}  # by the id of a module: how many use it, and how its modes return


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, without nested tensors as in training; restore each submodule's mode at the end.

    Of several threads that predict with one module, the first switches and the last restores. Otherwise some would
    compute in training mode, and change the statistics of batch norm.
    """
    with _mode_lock:
        users, restoring = _evaluating.get(id(module)) or (0, _switch_to_evaluation(module))
        _evaluating[id(module)] = users + 1, restoring
    try:
        yield
    finally:
        with _mode_lock:
            users, restoring = _evaluating.pop(id(module))
            if users > 1:
                _evaluating[id(module)] = users - 1, restoring
            else:
                restoring.close()


def _switch_to_evaluation(module: nn.Module) -> ExitStack:
    """Switch to evaluation mode, see `evaluation_mode`; closing the result restores what was switched."""
    submodules, restoring = list_modules(module), ExitStack()
    modes = [(submodule, submodule.training) for submodule in submodules]
    if any(training for _, training in modes):  # eval() takes as long as a small network's prediction
        module.eval()
        restoring.callback(_restore_modes, modes)
    restoring.enter_context(_turn_nested_tensors_off(submodules))
    return restoring


def _restore_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Give each module its mode back."""
    for module, training in modes:
        module.training = training


def list_modules(module: nn.Module) -> list[nn.Module]:
    """List a module and its submodules, each once, in no certain order; several times as fast as `modules()`."""
    seen = {module}
    unvisited = [module]
    while unvisited:
        children = [child for child in unvisited.pop()._modules.values() if child is not None and child not in seen]
        seen.update(children)
        unvisited += children
    return list(seen)
