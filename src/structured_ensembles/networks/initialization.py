"""Draw a network's weights anew."""

import torch
from torch import nn

from structured_ensembles.common.devices import device_of, seed_generators


def draw_weights(model: nn.Module, seed: int) -> None:
    """By the model's own `reset_parameters()` if it has one, else by that of each layer; random state is left alone."""
    device = device_of(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed_generators(seed, device)
        resets = [module for module in model.modules() if callable(getattr(module, "reset_parameters", None))]
        for module in resets[:1] if resets[:1] == [model] else resets:
            module.reset_parameters()  # type: ignore[operator]
