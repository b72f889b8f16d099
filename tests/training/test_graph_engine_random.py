"""A hundred random networks, trained in programs and in the plain loop, have the same loss in each of twenty steps."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor, nn

import structured_ensembles as se
from tests.support.engines import use_engine
from tests.support.random_networks import networks

IMAGES = torch.randint(0, 256, (80, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
DATA = se.Data.from_arrays(IMAGES, torch.arange(80) % 3, validation=0.0)
RECIPE = se.Recipe(
    epochs=2, batch_size=8, rate=0.01, warmup=0, schedule="constant", augmentation="none", weight_decay=0.0, keep="last"
)
STEPS = 20  # two epochs of ten batches
EXECUTION = se.Execution(precision="float32")
COUNT, TENS, PAIRS = 10, 10, (0, 5)  # the tens in which there are two members of each network
LEAST_PROGRAMS, LEAST_TOGETHER = 9, 2  # of ten; see the figures that are printed


def members_of(network: nn.Module, pair: bool) -> list[nn.Module]:
    """Return a network, or also a copy with other weights, which may share a program."""
    if not pair:
        return [network]
    other = copy.deepcopy(network)
    torch.manual_seed(1)
    for layer in other.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return [network, other]


def trained(members: list[nn.Module]) -> tuple[se.History, list[float]]:
    """Train copies of networks; returns the history, and the loss of every step, of one member after the other."""
    losses: list[float] = []

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, targets)
        losses.append(loss.item())
        return loss

    ensemble = se.Ensemble([copy.deepcopy(network) for network in members])
    return se.train(ensemble, DATA, RECIPE, "cpu", execution=EXECUTION, loss=cross_entropy, quiet=True), losses


@pytest.mark.parametrize("ten", range(TENS))
def test_random_networks_have_the_losses_of_the_loop(
    ten: int, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    figures = {"networks": 0, "programs": 0, "together": 0}

    @seed(ten)
    @settings(
        max_examples=COUNT, database=None, deadline=None, phases=[Phase.generate], derandomize=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(networks())
    def check(network: nn.Module) -> None:
        members = members_of(network, ten in PAIRS)
        use_engine(monkeypatch, "graph")
        history, losses = trained(members)
        use_engine(monkeypatch, "loop")
        plain, expected = trained(members)
        assert (history.engine, plain.engine) == ("graph", "loop")
        assert len(expected) == STEPS * len(members)
        assert losses == pytest.approx(expected, abs=1e-4)
        figures["networks"] += 1
        figures["programs"] += not any("PyTorch's own kernels" in message for message in history.fallbacks)
        figures["together"] += not history.fallbacks

    check()
    record_property(
        "figures",
        f"random networks {ten}: {figures['programs']} of {figures['networks']} became programs"
        + f", {figures['together']} of them one for two members" * (ten in PAIRS),
    )
    assert figures["networks"] == COUNT
    assert figures["programs"] >= LEAST_PROGRAMS
    assert figures["together"] >= LEAST_TOGETHER
