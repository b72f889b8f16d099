"""Initialisation of a network's weights."""

from torch import nn

from structured_ensembles.common.devices import device_of, fork_generators, seed_generators


def draw_weights(model: nn.Module, seed: int) -> None:
    """Draw weights with the model's `reset_parameters()`, or else each layer's; the global random state stays."""
    device = device_of(model)
    with fork_generators(device):
        seed_generators(seed, device)
        resets = [module for module in model.modules() if callable(getattr(module, "reset_parameters", None))]
        for module in resets[:1] if resets[:1] == [model] else resets:
            module.reset_parameters()  # type: ignore[operator]
