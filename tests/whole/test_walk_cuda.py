"""Search, training, evaluation and files give on a GPU what they give on the CPU."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda import capture
from structured_ensembles.cuda.prediction_graphs import CAPTURE_AFTER
from tests.support.user_models import (
    IMAGES,
    LABELS,
    ROWS,
    SEQUENCES,
    Auxiliary,
    Frozen,
    Gained,
    Renamed,
    TimeFirst,
    Tokens,
    TwoViews,
    mlp,
)

pytestmark = pytest.mark.cuda


def test_search_and_saliency_are_equal_on_a_gpu(without_tf32: None) -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    model = se.zoo.resnet20(in_channels=1)
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=3, epochs=1, device="cpu")
    on_cpu = se.saliency(model, graph, scales, data, device="cpu")
    on_gpu = model.cuda()
    assert se.trace(on_gpu, data.example().cuda()).groups == graph.groups
    assert se.trace(on_gpu, data.example()).axes == graph.axes
    scores = se.saliency(on_gpu, graph, scales, data)
    for own, other in zip(scores, on_cpu, strict=True):
        for name, values in own.values.items():
            torch.testing.assert_close(values, other.values[name], rtol=5e-3, atol=1e-5)
    learned = se.learn_scales(on_gpu, graph, data, members=3, epochs=1, precision="float32")
    for name, values in learned.vectors.items():
        torch.testing.assert_close(values, scales.vectors[name], rtol=0, atol=5e-3)  # a handful of Adam steps of 1e-3
    assert all(parameter.is_cuda for parameter in model.parameters())


@pytest.mark.parametrize("model", [se.zoo.resnet20, partial(se.zoo.vgg11, dropout=0.0)])
def test_search_by_a_program_in_bfloat16_is_near_that_in_float32(model: Callable[..., nn.Module]) -> None:
    data = se.load_data("digits") if model is se.zoo.resnet20 else small_pictures()
    torch.manual_seed(0)
    network = model(in_channels=data.shape[0]).cuda()
    graph = se.trace(network, data.example().cuda())
    drawn = se.Scales.draw(graph, 3)
    search = partial(se.learn_scales, network, graph, data, members=3, epochs=2, quiet=True)
    learned = search()  # a fallback would be logged, and fail the test
    exact = search(precision="float32")

    def distance(one: se.Scales, other: se.Scales) -> float:
        return sum(float((one.vectors[name] - other.vectors[name]).square().sum()) for name in one.vectors) ** 0.5

    assert distance(learned, exact) < 0.2 * distance(exact, drawn)
    for name, statistic in exact.statistics.items():
        torch.testing.assert_close(learned.statistics[name], statistic, rtol=0.1, atol=0.05)


def test_search_of_a_network_with_dropout_is_a_program() -> None:
    """A fallback would be logged, and fail the test."""
    data = small_pictures()
    network = se.zoo.vgg11().cuda()
    graph = se.trace(network, data.example().cuda())
    learned = [se.learn_scales(network, graph, data, members=2, epochs=1, quiet=True) for _ in range(2)]
    drawn = se.Scales.draw(graph, 2)
    for name, vectors in learned[0].vectors.items():
        assert vectors.isfinite().all()
        assert not torch.equal(vectors.cpu(), drawn.vectors[name])
        torch.testing.assert_close(vectors, learned[1].vectors[name])  # the seed draws the masks, too


def small_pictures() -> se.Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (512, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return se.Data.from_arrays(images, torch.arange(512) % 10, validation=0.25)


def test_ensemble_trains_and_round_trips_through_a_file_on_a_gpu(tmp_path: Path) -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.structured_ensemble(
        se.zoo.resnet20(in_channels=1), data, members=3, recipe=se.Recipe(epochs=8), search_epochs=2, quiet=True
    )
    assert next(ensemble.parameters()).is_cuda
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.9
    ensemble.save(tmp_path / "ensemble.safetensors")
    loaded = se.Ensemble.load(tmp_path / "ensemble.safetensors")
    x = data.test.inputs[:64]
    torch.testing.assert_close(loaded.predict_proba(x), ensemble.predict_proba(x), rtol=1e-2, atol=1e-3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.GRU(10, 12, batch_first=True), nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.second(self.first(x)[0][:, -1]).relu())
        return result


WORDS = np.random.default_rng(1).integers(0, 50, (96, 9))

# Network, inputs, and whether its search can run as a program: members share a batch, and nothing draws numbers.
USERS: list[tuple[Callable[[], nn.Module], np.ndarray, bool]] = [
    (TimeFirst, SEQUENCES, False),
    (Recurrent, SEQUENCES, False),
    (TwoViews, IMAGES, False),
    (Frozen, IMAGES, False),
    (Auxiliary, IMAGES, True),
    (partial(Renamed, twice=False), IMAGES, True),
    (Gained, ROWS, True),
    (Tokens, WORDS, True),
]


@pytest.mark.parametrize(("make", "inputs", "is_program"), USERS)
def test_user_networks_search_train_and_predict_on_a_gpu(
    make: Callable[[], nn.Module],
    inputs: np.ndarray,
    is_program: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A log that a step runs without a CUDA graph is an error, see conftest.py."""
    torch.manual_seed(0)
    model = make()
    data = se.Data.from_arrays(inputs, LABELS, test=(inputs, LABELS), ids=inputs is WORDS)
    ensemble = se.structured_ensemble(
        model, data, members=2, prune=0.5, recipe=se.Recipe(epochs=2), search_epochs=1, quiet=True
    )
    fallbacks = [record.getMessage() for record in caplog.records if record.name == capture.logger.name]
    assert [message.startswith("the search computes in float32") for message in fallbacks] == [True] * (not is_program)
    caplog.clear()
    ensemble.save(tmp_path / "ensemble.safetensors")
    loaded = se.Ensemble.load(tmp_path / "ensemble.safetensors", model=make())
    assert next(ensemble.parameters()).is_cuda
    for _ in range(CAPTURE_AFTER + 1):
        found = ensemble.predict_proba(inputs)
    assert ensemble.replays.graphs
    torch.testing.assert_close(found.cpu(), loaded.predict_proba(inputs), rtol=1e-2, atol=2e-3)
    recipe, losses = se.Recipe(epochs=3, batch_size=32, rate=0.02, augmentation="none"), {}
    exact = se.Execution(precision="float32")
    for device in ("cuda", "cpu"):
        both = se.Ensemble([deepcopy(model), deepcopy(model)])
        history = se.train(both, data, recipe, device, execution=exact, quiet=True)
        losses[device] = [row["loss"] for row in history.rows]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-2)


def test_invalid_input_is_the_same_error_on_a_gpu() -> None:
    data = se.Data.from_arrays(ROWS, LABELS.astype("f"))
    with pytest.raises(ValueError, match="for classes give whole numbers"):
        se.structured_ensemble(mlp(), data, members=2, prune=0.5, search_epochs=1, quiet=True)
    with pytest.raises(ValueError, match="for classes give whole numbers"):
        se.train(se.Ensemble([mlp()]), data, quiet=True)


@pytest.mark.parametrize("name", se.evaluation.CORRUPTIONS)
def test_corruptions_are_equal_on_a_gpu(name: str) -> None:
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        on_cpu = se.evaluation.corrupt(images, name, severity, seed=1)
        on_gpu = se.evaluation.corrupt(images.cuda(), name, severity, seed=1)
        assert on_gpu.is_cuda
        # A rounding error may carry a value over a threshold, such as the edge of a drop.
        assert float(((on_gpu.cpu() - on_cpu).abs() > 1e-3).double().mean()) < 0.005


def test_evaluation_is_equal_on_a_gpu() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(2)])
    se.train(ensemble, data, se.Recipe(epochs=2), quiet=True, device="cpu")
    asked = {"fgsm": [0.1], "corruptions": ["fog", "contrast"], "base": se.zoo.mlp(64)}
    on_cpu = se.evaluate(ensemble, data, **asked)
    on_gpu = se.evaluate(ensemble.cuda(), data, **asked)
    assert on_gpu.keys() == on_cpu.keys()
    for key, value in on_gpu.items():
        if key != "size/peak_bytes":
            assert value == pytest.approx(on_cpu[key], rel=1e-2, abs=1e-2)
    assert on_gpu["size/peak_bytes"] > 0
