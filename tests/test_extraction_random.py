"""Extraction is exact for random architectures."""

import warnings

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.exactness import check_exact, randomize
from tests.support.random_networks import (
    networks,
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(networks(), st.booleans(), st.sampled_from(["finest", "all"]), st.sampled_from([0.3, 0.5, 0.8]))
def test_extraction_is_exact_for_random_networks(network: nn.Module, coupled: bool, nested: str, prune: float) -> None:
    example = torch.randn(3, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # prune may empty a small layer
        graph = check_exact(randomize(network), example, coupled=coupled, nested=nested, prune=prune)
    # The hidden layer of the classifier can always be pruned.
    assert f"{len(network) - 3}" in graph.prunable
