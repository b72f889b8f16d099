"""Comparison of a cut network with the full one without the dropped channels, in double precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from structured_ensembles.common.inputs import call_arguments

TOLERANCE = 1e-9  # of the difference, relative to what dropping the channels changes
ROUNDINGS = 10  # a difference may be so many times the noise of the network's own arithmetic
LARGEST_NOISE = 1e-6  # relative to what dropping the channels changes: in more noise, a mistake could hide


@dataclass(frozen=True)
class Difference:
    """Distance of the cut network from the full one without the dropped channels, in double precision.

    relative: the largest difference of outputs, divided by the largest output.
    effect: the same between the full network with and without the channels: a cut that changed nothing would not show
        a mistake.
    noise: the same between the masked network and itself with every weight changed by one rounding error. Some networks
        magnify rounding, such as those of many batch norms in training mode. Measured only if it matters.
    """

    relative: float
    effect: float
    noise: float = 0.0

    @classmethod
    def of(cls, cut: Sequence[Tensor], masked: Sequence[Tensor], full: Sequence[Tensor]) -> Difference:
        """Compare the outputs of the cut network, of the masked one, and of the full one."""
        size = _largest(masked)
        return cls(largest_difference(cut, masked) / size, largest_difference(full, masked) / size)

    @property
    def exact(self) -> bool:
        """Tell whether the two are equal, up to rounding, and the removal changed something."""
        effect = min(1.0, self.effect)
        return self.effect > 0 and self.relative <= max(
            TOLERANCE * effect, min(ROUNDINGS * self.noise, LARGEST_NOISE * effect)
        )

    def with_noise(self, masked: Sequence[Tensor], rounded: Sequence[Tensor]) -> Difference:
        """Add the noise: the difference of the masked network's outputs to those with perturbed weights, `rounded`."""
        return replace(self, noise=largest_difference(masked, rounded) / _largest(masked))


def comparison_inputs(example: Any, seed: int, network: nn.Module) -> Any:
    """Return inputs like the example's, doubles drawn from a normal distribution in place of floats.

    They are twice the batch for a network with batch norms: these need several samples in training mode; with two,
    their outputs would be signs.
    """
    generator = torch.Generator().manual_seed(seed)
    normed = any("BatchNorm" in base.__name__ for module in network.modules() for base in type(module).__mro__)

    def draw(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            count = 2 * len(tensor) if normed else len(tensor)
            return torch.randn(count, *tensor.shape[1:], generator=generator, dtype=torch.float64)
        return (torch.cat([tensor, tensor.flip(0)]) if normed else tensor).cpu()

    return tree_map_only(Tensor, draw, example)


@torch.no_grad()
def run_network(network: nn.Module, inputs: Any, training: bool) -> list[Tensor]:
    """Run a network in one of its modes and return its output tensors; its buffers, such as statistics, stay."""
    positional, keywords = call_arguments(inputs)
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    outputs = list(_tensors(network.train(training)(*positional, **keywords)))
    for name, buffer in network.named_buffers():
        if name in before and buffer.shape == before[name].shape:
            buffer.copy_(before[name])
    return outputs


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested outputs."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for item in outputs:
            yield from _tensors(item)


def _largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest absolute value of floating-point tensors; an error if one is not finite or all are zero."""
    largest = max(float(tensor.abs().max()) for tensor in tensors if tensor.is_floating_point())
    if not 0 < largest < float("inf"):
        raise ValueError(f"outputs with random weights cannot be compared: the largest is {largest}")
    return largest


def largest_difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest absolute difference of two lists of tensors; infinity if their shapes differ."""
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return float("inf")
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.is_floating_point()]
    return max(float((a - b).abs().max().nan_to_num(nan=float("inf"))) for a, b in pairs)
