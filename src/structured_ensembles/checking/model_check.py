"""check_model(): trace a model, cut it, and compare the cut network with the full one without those channels."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from structured_ensembles.channels import ChannelGraph, trace
from structured_ensembles.checking.comparison import Difference, comparison_inputs, largest_difference, run_network
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.checking.weights import copy_undrawn, perturb_by_rounding, randomize, remove_randomness
from structured_ensembles.common.checks import check_flags, check_seed, check_share, check_type
from structured_ensembles.common.errors import first_line
from structured_ensembles.extraction import extract
from structured_ensembles.selection import select


@dataclass(frozen=True)
class ModelCheck:
    """Result of `check_model`: what `trace` and `extract` make of a model.

    error: why the model cannot be traced or cut; None if it can.
    seconds: processor time of tracing.
    peak_megabytes: of the process, after tracing and before the comparison; None where the system does not tell.
    groups, prunable: numbers of channel groups, all and those that can be pruned.
    parameters, left: numbers of parameters, of the model and of the cut network.
    ways: what was cut: "layers" (channels between layers), "residual sums" (channels of a residual stream), and
        "in the graph" if the model's code cannot be cut.
    evaluation, training: the differences in both modes; None where there is nothing to compare. Training mode is
        compared without dropout and the like.
    random: whether training mode draws random numbers even so, so that its outputs cannot be compared.
    reasons: why groups are fixed, with how many of them.
    """

    error: str | None = None
    seconds: float | None = None
    peak_megabytes: float | None = None
    groups: int = 0
    prunable: int = 0
    parameters: int = 0
    left: int = 0
    ways: tuple[str, ...] = ()
    evaluation: Difference | None = None
    training: Difference | None = None
    random: bool = False
    reasons: Mapping[str, int] = field(default_factory=dict)

    @property
    def cut(self) -> bool:
        """Tell whether the model was cut."""
        return self.error is None and self.left < self.parameters

    @property
    def exact(self) -> bool:
        """Tell whether the cut network is exact in both modes (only in evaluation mode if training draws numbers)."""
        modes = [self.evaluation] if self.random else [self.evaluation, self.training]
        return self.cut and all(mode is not None and mode.exact for mode in modes)


def check_model(
    model: nn.Module, example: Any, *, prune: float = 0.5, coupled: bool = True, seed: int = 0
) -> ModelCheck:
    """Trace a model, remove a random share `prune` of its channels, and compare; the model is not changed.

    example, coupled: as in `trace`. The comparison is in double precision, with weights drawn at random.
    """
    check_type("model", model, nn.Module)
    check_share("prune", prune)
    check_flags(coupled=coupled)
    seed = check_seed(seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Traced as it is compared: a cut graph keeps the rates of dropout, and conversions to single precision.
    full = remove_randomness(copy_undrawn(model))
    start = time.process_time()
    try:
        graph = trace(full, comparison_inputs(example, seed, full), coupled=coupled)
    except Exception as error:  # the model's code may raise anything
        return ModelCheck(first_line(error), time.process_time() - start, peak_megabytes(), parameters=parameters)
    traced: dict[str, Any] = {
        "seconds": time.process_time() - start,
        "peak_megabytes": peak_megabytes(),
        "groups": len(graph.groups),
        "prunable": len(graph.prunable),
        "parameters": parameters,
        "reasons": dict(Counter(group.reason for group in graph.groups if group.reason).most_common()),
        "ways": _ways(graph),
    }
    if not graph.prunable:
        return ModelCheck(**traced, left=parameters)
    try:
        return ModelCheck(**traced, **_compare(randomize(full, seed), graph, example, prune, seed))
    except Exception as error:  # a mistake of ours, which the row must show
        return ModelCheck(**traced, left=parameters, error=f"{type(error).__name__}: {first_line(error)}")


def _compare(full: nn.Module, graph: ChannelGraph, example: Any, prune: float, seed: int) -> dict[str, Any]:
    """Cut a network and compare it with the masked one in both modes."""
    (subnet,) = select(graph, prune=prune, selection="random", members=1, seed=seed)
    small, masked = extract(full, graph, subnet), without_channels(full, graph, subnet)
    inputs = comparison_inputs(example, seed, full)
    outputs = {
        training: [run_network(network, inputs, training) for network in (small, masked, full)]
        for training in (False, True)
    }
    figures = {}
    random = False
    for mode, training in (("evaluation", False), ("training", True)):
        figures[mode] = Difference.of(*outputs[training])
        if not figures[mode].exact:
            if training:  # networks that draw numbers would not agree
                random = largest_difference(run_network(masked, inputs, training), outputs[training][1]) > 0
            rounded = run_network(perturb_by_rounding(masked, seed), inputs, training)
            figures[mode] = figures[mode].with_noise(outputs[training][1], rounded)
    left = sum(parameter.numel() for parameter in small.parameters())
    return {**figures, "left": left, "random": random}


def _ways(graph: ChannelGraph) -> tuple[str, ...]:
    """Name what the prunable groups are, and whether they are cut in the code or in the graph."""
    coupled = [group.coupled for group in graph.groups if group.prunable]
    kinds = (*["layers"] * (False in coupled), *["residual sums"] * (True in coupled))
    return (*kinds, "in the graph") if graph.templates else kinds


def peak_megabytes() -> float | None:
    """Return the peak resident memory of this process in megabytes; None on a system that does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
