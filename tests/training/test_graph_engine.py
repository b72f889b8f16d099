"""The graph engine's steps, run without a graph: CI has no GPU, but what is captured is plain code."""

import gc
import os
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda.capture import CaptureError, Step, all_captured
from structured_ensembles.training import fleet
from structured_ensembles.training import graph_engine as graph
from structured_ensembles.training.graph_engine import GraphEngine
from tests.support.networks import network
from tests.support.real_data import few_digits

BFLOAT16 = se.Execution(precision="bfloat16")


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
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02, augmentation="none")
    stepwise(True)
    _, history = trained(recipe, few_digits(), execution=BFLOAT16)
    stepwise(False)
    _, expected = trained(recipe, few_digits(), execution=BFLOAT16)
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
    from structured_ensembles.cuda.bf16_copies import castable

    shared = nn.Linear(4, 4)
    embedding = nn.Embedding(4, 4)
    embedding.weight = shared.weight  # used by two kinds of layers: cast by neither
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), shared, embedding, nn.Linear(4, 2, bias=False))
    assert castable(net) == ["0.weight", "0.bias", "2.bias", "4.weight"]


def test_workspaces_are_small_unless_the_user_said_otherwise(
    stepwise: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    recipe = se.Recipe(epochs=1)
    for given, expected in ((None, ":4096:2:16:8"), (":16:8", ":16:8")):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
        stepwise(False)
        trained(recipe, few_digits())
        assert os.environ.get(name) == given  # the loop leaves it alone
        stepwise(True)
        trained(recipe, few_digits())
        assert os.environ[name] == expected
    monkeypatch.delenv(name)


@pytest.mark.parametrize("enough", [1, 2, 0])
def test_fewer_members_at_a_time_if_memory_is_short(
    stepwise: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, enough: int
) -> None:
    """A GPU with memory for `enough` members at a time; the loop needs no more than one, either."""
    tried: list[int] = []

    def scarce(*arguments: object, **more: object) -> list[Step]:
        if tried[-1] > enough:
            raise CaptureError("CUDA out of memory") from torch.OutOfMemoryError("CUDA out of memory")
        return all_captured(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(graph, "side_streams", lambda device, number: tried.append(number) or [])
    monkeypatch.setattr(graph, "all_captured", scarce)
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02)
    three = [network(number, dropout=0.0) for number in range(3)]
    stepwise(True)
    history = se.train(se.Ensemble(three), few_digits(), recipe, seed=3, quiet=True)
    assert tried == [3, 2, 1][: {1: 3, 2: 2, 0: 3}[enough]]
    assert "not enough memory for 3 members at a time: it trains 2, which Execution(streams=2)" in history.fallbacks[0]
    assert ("without a CUDA graph" in history.fallbacks[-1]) == (enough == 0)
    assert history.engine == ("loop" if enough == 0 else "graph")
    stepwise(False)
    again = [network(number, dropout=0.0) for number in range(3)]
    expected = se.train(se.Ensemble(again), few_digits(), recipe, seed=3, quiet=True)
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in expected.rows], rel=1e-4)


def test_other_errors_are_not_for_want_of_memory(
    stepwise: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def broken(*_: object, **__: object) -> list[Step]:
        raise CaptureError("it waits for the device") from RuntimeError("it waits for the device")

    monkeypatch.setattr(graph, "side_streams", lambda device, number: tried.append(number) or [])
    monkeypatch.setattr(graph, "all_captured", broken)
    stepwise(True)
    _, history = trained(se.Recipe(epochs=1), few_digits())
    assert history.fallbacks == ["training goes on without a CUDA graph, slower: it waits for the device"]
    assert history.engine == "loop"
    assert tried == [2]


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="engine must be 'loop' or 'auto' on cpu"):
        se.train(se.Ensemble([network(0)]), few_digits(), execution=se.Execution(engine="graph"), device="cpu")


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


class TwoNames(nn.Module):
    """A layer that is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        self.head = self.body[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Aside(nn.Module):
    """Reaches its weights by another way than through the layer, alone or besides."""

    def __init__(self, besides: bool) -> None:
        super().__init__()
        self.layer, self.besides = nn.Linear(64, 10), besides
        self.rows = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aside = x.flatten(1) @ self.rows[0].T
        return aside + self.layer(x.flatten(1)) if self.besides else aside


def test_a_layer_with_two_names_stays_whole(stepwise: Callable[[bool], None]) -> None:
    stepwise(True)
    ensemble = se.Ensemble([TwoNames()])
    se.train(ensemble, few_digits(), se.Recipe(epochs=1), execution=BFLOAT16, quiet=True)
    assert all(isinstance(own, nn.Parameter) for own in ensemble.members[0].parameters())
    assert {tensor.dtype for tensor in ensemble.members.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("besides", [False, True])
def test_weights_reached_aside_are_refused(stepwise: Callable[[bool], None], besides: bool) -> None:
    stepwise(True)
    with pytest.raises(RuntimeError, match="by another way"):
        se.train(se.Ensemble([Aside(besides)]), few_digits(), se.Recipe(epochs=1), execution=BFLOAT16, quiet=True)


class PartlyFrozen(nn.Module):
    """A layer that runs without gradients, and one that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(64, 16), nn.Linear(16, 10), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.first(x.flatten(1)).relu()
        outputs: torch.Tensor = self.last(features)
        return outputs


def test_layers_that_no_derivative_reaches_stay_as_they_are(stepwise: Callable[[bool], None]) -> None:
    torch.manual_seed(0)
    network = PartlyFrozen()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    stepwise(True)
    recipe = se.Recipe(epochs=1, weight_decay=0.1)
    se.train(se.Ensemble([network]), few_digits(), recipe, execution=BFLOAT16, quiet=True)
    changed = {name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"last.weight", "last.bias"}


def test_an_ensemble_goes_with_its_last_reference() -> None:
    """And its CUDA graphs with it, which a cycle would keep until some garbage collection."""
    from structured_ensembles.cuda.prediction_graphs import Fingerprint

    ensemble = se.Ensemble([network(0), network(1)]).eval()
    ensemble.replays.print = Fingerprint(ensemble)
    watched = weakref.ref(ensemble)
    gc.disable()
    try:
        del ensemble
        assert watched() is None
    finally:
        gc.enable()


def test_a_fingerprint_notices_what_moves() -> None:
    from structured_ensembles.cuda.prediction_graphs import Fingerprint

    def fresh() -> tuple[se.Ensemble, Fingerprint]:
        ensemble = se.Ensemble([network(0), network(1)]).eval()
        return ensemble, Fingerprint(ensemble)

    ensemble, found = fresh()
    assert found.fits(ensemble)
    assert found.quiet()
    with torch.no_grad():
        next(ensemble.parameters()).mul_(2)  # in place: the graph sees it
    assert found.fits(ensemble)
    ensemble.members[0][0] = nn.Conv2d(1, 8, 3)
    assert not found.fits(ensemble)
    ensemble, found = fresh()
    ensemble.members[1] = network(3)
    assert not found.fits(ensemble)
    ensemble, found = fresh()
    parameter = next(ensemble.parameters())
    parameter.data = parameter.data.clone()
    assert not found.fits(ensemble)
    ensemble, found = fresh()
    ensemble.normalization = se.Normalization((0.5,), (0.5,))
    assert not found.fits(ensemble)
    ensemble, found = fresh()
    ensemble.members[0].train()
    assert not found.quiet()
    ensemble = se.Ensemble([nn.Sequential(network(0), nn.Sequential())]).eval()
    found = Fingerprint(ensemble)
    ensemble.members[0][1].append(nn.Linear(10, 10))  # a shortcut that was none
    assert not found.fits(ensemble)
    ensemble, found = fresh()
    ensemble.train()
    for member in ensemble.members:
        member.eval()  # as training leaves them
    assert found.quiet()
    ensemble, found = fresh()
    ensemble.members[0][1].register_forward_pre_hook(lambda module, inputs: None)
    assert not found.quiet()


@pytest.mark.parametrize("graph", [False, True])
def test_double_precision_trains_too(stepwise: Callable[[bool], None], graph: bool) -> None:
    stepwise(graph)
    ensemble = se.Ensemble([network(0).double()])
    exact = se.Execution(precision="float32")
    history = se.train(ensemble, few_digits(), se.Recipe(epochs=2, rate=0.02), execution=exact, quiet=True)
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert next(ensemble.parameters()).dtype == torch.float64
    x = torch.randn(60, 3)
    ensemble = se.Ensemble([se.zoo.mlp(3, 1, hidden=(8,)).double()])
    data = se.Data.from_arrays(x, x.sum(1))
    history = se.train(ensemble, data, se.Recipe(epochs=3, rate=0.02), execution=exact, quiet=True)
    assert history.rows[-1]["validation_loss"] < history.rows[0]["validation_loss"]
