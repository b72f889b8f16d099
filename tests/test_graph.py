"""The graph engine's steps, run without a graph: CI has no GPU, but what is captured is plain code."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.training import fleet
from structured_ensembles.training.graph import GraphEngine
from test_training import few_digits, network


@pytest.fixture
def stepwise(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Choose the engine: the graph's steps, or the loop."""

    def choose(graph: bool) -> None:
        monkeypatch.setattr(fleet, "_captured", lambda recipe, device, mesh: graph)

    return choose


def trained(recipe: se.Recipe, data: se.Data, **arguments: object) -> tuple[se.Ensemble, se.History]:
    ensemble = se.Ensemble([network(0, dropout=0.0), network(1, width=5, dropout=0.0)])
    return ensemble, se.train(ensemble, data, recipe, seed=3, quiet=True, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_both_engines_compute_the_same(stepwise: Callable[[bool], None], optimizer: str) -> None:
    recipe = se.Recipe(epochs=3, batch_size=64, rate=0.02, optimizer=optimizer, augmentation="crop", patience=1)
    stepwise(True)
    ours, history = trained(recipe, few_digits())
    stepwise(False)
    plain, expected = trained(recipe, few_digits())
    # Adam blows up the rounding of derivatives that are zero: those of a bias before a normalisation.
    close = 1e-4 if optimizer == "sgd" else 3e-2
    for row, other in zip(history.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=close)
        assert row["validation_loss"] == pytest.approx(other["validation_loss"], rel=close)
    if optimizer == "sgd":
        for name, tensor in ours.state_dict().items():
            torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_half_precision_copies_follow_the_weights(stepwise: Callable[[bool], None]) -> None:
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02, precision="bfloat16", augmentation="none")
    stepwise(True)
    _, history = trained(recipe, few_digits())
    stepwise(False)
    _, expected = trained(recipe, few_digits())
    for row, other in zip(history.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-2)


def test_streamed_data_with_an_odd_last_batch(stepwise: Callable[[bool], None]) -> None:
    data = few_digits()
    dataset = torch.utils.data.TensorDataset(data.prepare(data.train.inputs), data.train.targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
    streamed = se.Data.from_loaders(loader, validation=loader, classes=10)
    recipe = se.Recipe(epochs=2, rate=0.02)
    stepwise(True)
    _, history = trained(recipe, streamed)
    stepwise(False)
    _, expected = trained(recipe, streamed)
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in expected.rows], rel=1e-4)


def test_only_what_autocast_casts_has_a_copy() -> None:
    from structured_ensembles.training.graph import _castable

    shared = nn.Linear(4, 4)
    embedding = nn.Embedding(4, 4)
    embedding.weight = shared.weight  # used by two kinds of layers: cast by neither
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), shared, embedding, nn.Linear(4, 2, bias=False))
    assert _castable(net, dict(net.named_parameters())) == ["0.weight", "0.bias", "2.bias", "4.weight"]


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="engine must be 'loop' or 'auto' on cpu"):
        se.train(se.Ensemble([network(0)]), few_digits(), se.Recipe(engine="graph"), device="cpu")


def test_the_engine_does_not_make_it_another_run(stepwise: Callable[[bool], None], tmp_path: object) -> None:
    """A run that began on one engine goes on with the other."""
    path = f"{tmp_path}/checkpoint.safetensors"
    recipe = se.Recipe(epochs=4, batch_size=64, rate=0.02, augmentation="none", schedule="constant")
    stepwise(False)
    whole, expected = trained(recipe, few_digits())

    class Stopped(Exception):  # noqa: N818
        pass

    stepwise(True)
    train_epoch = GraphEngine.train_epoch

    def until_two(self: GraphEngine, active: object, epoch: int, advance: object) -> list[float]:
        if epoch == 2:
            raise Stopped
        return train_epoch(self, active, epoch, advance)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphEngine, "train_epoch", until_two)
        with pytest.raises(Stopped):
            trained(recipe, few_digits(), checkpoint=path)
    stepwise(False)
    resumed, history = trained(recipe, few_digits(), checkpoint=path)
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in expected.rows], rel=1e-4)
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=1e-3, atol=1e-5)
