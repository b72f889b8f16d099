"""Evaluation mode for a while, without nested tensors, which differ from what training computes."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock

from torch import nn

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


def without_nested_tensors(model: nn.Module) -> AbstractContextManager[None]:
    """Turn nested tensors off in a network that is not our copy, and on again afterwards."""
    return _turn_nested_tensors_off(list_modules(model))


@contextmanager
def _turn_nested_tensors_off(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Turn nested tensors off in modules, and on again afterwards."""
    encoders = encoders_with_nested_tensors(modules)
    try:
        for encoder in encoders:
            encoder.use_nested_tensor = False
        yield
    finally:
        for encoder in encoders:
            encoder.use_nested_tensor = True


def encoders_with_nested_tensors(modules: Iterable[nn.Module]) -> list[nn.TransformerEncoder]:
    """List the transformer encoders among modules that may use nested tensors, which our copies turn off.

    In evaluation mode without gradients, `nn.TransformerEncoder` uses nested tensors if a padding mask has its padding
    at the end. That differs from training (padded positions become zero), no hook can scale it, and no CUDA graph can
    hold it, as the host has to read the mask. The layers' fused kernels stay on. `use_nested_tensor` is an attribute of
    the encoder, so that neither the user's model nor a global switch of torch changes.
    """
    encoders = [module for module in modules if isinstance(module, nn.TransformerEncoder)]
    return [encoder for encoder in encoders if getattr(encoder, "use_nested_tensor", False)]


def list_modules(module: nn.Module) -> list[nn.Module]:
    """List a module and its submodules, each once, in no certain order; several times as fast as `modules()`."""
    seen = {module}
    unvisited = [module]
    while unvisited:
        children = [child for child in unvisited.pop()._modules.values() if child is not None and child not in seen]
        seen.update(children)
        unvisited += children
    return list(seen)
