"""Memory layout: networks train channels last where they can, and users need not care."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda.prediction_graphs import CHANNELS_LAST_FROM, memory_order
from tests.support.networks import Viewing


def digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images * 15).astype(np.uint8)[:400], digits.target[:400]


def grey(images: np.ndarray) -> Any:
    return images[:, None]


def grey_floats(images: np.ndarray) -> Any:
    return torch.from_numpy(images).float()[..., None].permute(0, 3, 1, 2) / 255


def coloured(images: np.ndarray) -> Any:
    """Return colour images stored channels last, as image files are."""
    return torch.from_numpy(np.stack([images] * 3, axis=-1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("kind", [grey, grey_floats, coloured])
def test_network_that_flattens_by_view_searches_trains_and_predicts(kind: Any) -> None:
    images, labels = digits()
    inputs = kind(images)
    data = se.Data.from_arrays(inputs[:300], labels[:300], test=(inputs[300:], labels[300:]))
    torch.manual_seed(0)
    recipe = se.Recipe(epochs=8, batch_size=32, rate=0.05, warmup=0)
    ensemble = se.structured_ensemble(
        Viewing(inputs.shape[1]), data, members=2, recipe=recipe, search_epochs=1, quiet=True
    )
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.8
    assert len(ensemble.predict(inputs[300:])) == 100
    se.trace(Viewing(3), torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2))


def test_large_batches_are_predicted_channels_last_if_all_members_can() -> None:
    few, many = torch.rand(8, 3, 8, 8), torch.rand(CHANNELS_LAST_FROM, 3, 8, 8)
    able, unable = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 10)), Viewing(3)
    assert memory_order(se.Ensemble([able, able]), many) == torch.channels_last
    assert memory_order(se.Ensemble([able, able]), few) == torch.contiguous_format
    assert memory_order(se.Ensemble([able, unable]), many) == torch.contiguous_format
    assert memory_order(se.Ensemble([se.zoo.mlp(4, 2)]), torch.rand(CHANNELS_LAST_FROM, 4)) == torch.contiguous_format

    class Careful(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) != CHANNELS_LAST_FROM:
                raise ValueError(f"made for batches of {CHANNELS_LAST_FROM}, not {len(x)}")
            return super().forward(x)

    assert memory_order(se.Ensemble([Careful()]), many) == torch.contiguous_format


class Centring(nn.Module):
    """Take the scale from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale == 0:
            self.scale.copy_(1 / (x.detach().std() + 1e-6))
        return x * self.scale


class Auxiliary(nn.Module):
    """Flatten by `view` in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        result: Tensor = self.head(x.view(len(x), -1) if self.training else x.flatten(1))
        return result


def test_probing_channels_last_leaves_no_trace_in_a_network() -> None:
    """The layout is tried on a copy."""
    images, labels = digits()
    data = se.Data.from_arrays(coloured(images), labels)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), Centring(), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    seen: list[tuple[bool, int]] = []
    network.register_forward_hook(lambda module, inputs, outputs: seen.append((module.training, len(inputs[0]))))
    se.train(se.Ensemble([network]), data, se.Recipe(epochs=1, batch_size=90), "cpu", quiet=True)
    assert seen[0] == (True, 90)
    assert network[1].scale < 100
    se.train(se.Ensemble([Auxiliary()]), data, se.Recipe(epochs=1), "cpu", quiet=True)


class Watched(nn.Sequential):
    seen: str = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            last = self[0](x).is_contiguous(memory_format=torch.channels_last)
            self.seen = "channels last" if last else "in order"
        result: Tensor = super().forward(x)
        return result


def test_other_networks_train_channels_last_and_return_to_their_layout() -> None:
    images, labels = digits()
    data = se.Data.from_arrays(coloured(images), labels)
    network = Watched(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    se.train(se.Ensemble([network]), data, se.Recipe(epochs=1), "cpu", quiet=True)
    assert network.seen == "channels last"
    assert network[0].weight.stride() == (27, 9, 3, 1)


def test_the_walk_and_continual_learners_run_channels_last_on_a_cpu() -> None:
    layouts: dict[str, set[bool]] = {"frozen": set(), "trained": set()}

    class Layouts(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            if len(x) > 4:  # few samples try how the network can run
                kind = "trained" if self.weight.requires_grad else "frozen"
                layouts[kind].add(result.is_contiguous(memory_format=torch.channels_last))
            return result

    images, labels = digits()
    data = se.Data.from_arrays(coloured(images), labels, normalization="unit")
    network = nn.Sequential(Layouts(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 10))
    graph = se.trace(network, data.example())
    scales = se.learn_scales(network, graph, data, members=2, epochs=1, device="cpu", quiet=True)
    assert layouts["frozen"] == {True}
    layouts["frozen"].clear()
    se.saliency(network, graph, scales, data, device="cpu", quiet=True)
    assert layouts["frozen"] == {True}
    backbone = nn.Sequential(*network[:-1])
    learner = se.continual.NaiveLearner(backbone, epochs=1, device="cpu", quiet=True)
    learner.learn(se.continual.split_tasks(data, tasks=5)[0])
    assert True in layouts["trained"]
    assert network[0].weight.stride() == learner.network(0).backbone[0].weight.stride() == (27, 9, 3, 1)
