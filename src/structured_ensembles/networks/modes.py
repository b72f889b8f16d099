"""Evaluation mode for a while, without nested tensors, which differ from what training computes."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, without nested tensors as in training; restore each submodule's mode at the end."""
    submodules = list_modules(module)
    modes = [(submodule, submodule.training) for submodule in submodules]
    switched = any(training for _, training in modes)
    if switched:  # eval() sets an attribute of every submodule, which takes as long as a small network's prediction
        module.eval()
    try:
        with _turn_nested_tensors_off(submodules):
            yield
    finally:
        if switched:
            for submodule, training in modes:
                submodule.training = training


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
