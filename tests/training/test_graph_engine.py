"""The graph engine's steps, run without a graph: CI has no GPU, but what is captured is plain code."""

import gc
import math
import os
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda.capture import CaptureError, Step, all_captured
from structured_ensembles.training import graph_engine as graph
from structured_ensembles.training.engine import Member, Result
from structured_ensembles.training.program_runner import ProgramRunner
from tests.support.engines import Stopped, change_validation, stop_before_epoch, use_engine
from tests.support.networks import network
from tests.support.programs import Model
from tests.support.real_data import few_digits

BFLOAT16 = se.Execution(precision="bfloat16")


def trained(recipe: se.Recipe, data: se.Data, **arguments: object) -> tuple[se.Ensemble, se.History]:
    ensemble = se.Ensemble([network(0, dropout=0.0), network(1, width=5, dropout=0.0)])
    return ensemble, se.train(ensemble, data, recipe, seed=3, quiet=True, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_both_engines_compute_the_same(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    recipe = se.Recipe(epochs=3, batch_size=64, rate=0.02, optimizer=optimizer, augmentation="crop", patience=1)
    use_engine(monkeypatch, "graph")
    ours, history = trained(recipe, few_digits())
    use_engine(monkeypatch, "loop")
    plain, expected = trained(recipe, few_digits())
    # Adam blows up the rounding of derivatives that are zero: those of a bias before a normalisation.
    close = 1e-4 if optimizer == "sgd" else 3e-2
    for row, other in zip(history.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=close)
        assert row["validation_loss"] == pytest.approx(other["validation_loss"], rel=close)
    if optimizer == "sgd":
        for name, tensor in ours.members.state_dict().items():
            torch.testing.assert_close(tensor, plain.members.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_half_precision_copies_follow_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02, augmentation="none")
    use_engine(monkeypatch, "graph")
    _, history = trained(recipe, few_digits(), execution=BFLOAT16)
    use_engine(monkeypatch, "loop")
    _, expected = trained(recipe, few_digits(), execution=BFLOAT16)
    for row, other in zip(history.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-2)


def test_streamed_data_with_an_odd_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = few_digits()
    dataset = torch.utils.data.TensorDataset(data.prepare(data.train.inputs), data.train.targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
    streamed = se.Data.from_loaders(loader, validation=loader, classes=10)
    recipe = se.Recipe(epochs=2, rate=0.02)
    use_engine(monkeypatch, "graph")
    _, history = trained(recipe, streamed)
    use_engine(monkeypatch, "loop")
    _, expected = trained(recipe, streamed)
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in expected.rows], rel=1e-4)


@pytest.mark.parametrize("engine", ["graph", "loop"])
def test_last_batch_of_one_sample_is_refused_by_batch_norm(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """In a program it became NaN, and the member stopped with the weights that it had started with."""
    dataset = torch.utils.data.TensorDataset(torch.randn(17, 4), torch.arange(17) % 2)
    data = se.Data.from_loaders(torch.utils.data.DataLoader(dataset, batch_size=8), classes=2)
    use_engine(monkeypatch, engine)
    ensemble = se.Ensemble([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        se.train(ensemble, data, se.Recipe(epochs=2), "cpu", quiet=True)


@pytest.mark.parametrize("engine", ["graph", "loop"])
def test_outputs_that_are_no_logits_are_named(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    use_engine(monkeypatch, engine)
    ensemble = se.Ensemble([Model(lambda self, x: (self.head(x), x), head=nn.Linear(4, 2))])
    data = se.Data.from_arrays(torch.randn(16, 4), torch.arange(16) % 2)
    with pytest.raises(TypeError, match="model must return one tensor"):
        se.train(ensemble, data, se.Recipe(epochs=1), "cpu", quiet=True)


def test_only_what_autocast_casts_has_a_copy() -> None:
    from structured_ensembles.cuda.bf16_copies import castable_parameters

    shared = nn.Linear(4, 4)
    embedding = nn.Embedding(4, 4)
    embedding.weight = shared.weight  # used by two kinds of layers: cast by neither
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), shared, embedding, nn.Linear(4, 2, bias=False))
    assert castable_parameters(net) == ["0.weight", "0.bias", "2.bias", "4.weight"]


def test_workspaces_are_small_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUBLAS_WORKSPACE_CONFIG"
    recipe = se.Recipe(epochs=1)
    for setting, expected in ((None, ":4096:2:16:8"), (":16:8", ":16:8")):
        monkeypatch.delenv(name, raising=False)
        if setting is not None:
            monkeypatch.setenv(name, setting)
        use_engine(monkeypatch, "loop")
        trained(recipe, few_digits())
        assert os.environ.get(name) == setting  # the loop leaves it alone
        use_engine(monkeypatch, "graph")
        trained(recipe, few_digits())
        assert os.environ[name] == expected
    monkeypatch.delenv(name)


@pytest.mark.parametrize("enough", [1, 2, 0])
def test_fewer_members_at_a_time_if_memory_is_short(monkeypatch: pytest.MonkeyPatch, enough: int) -> None:
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
    use_engine(monkeypatch, "graph")
    history = se.train(se.Ensemble(three), few_digits(), recipe, seed=3, quiet=True)
    assert tried == [3, 2, 1][: {1: 3, 2: 2, 0: 3}[enough]]
    assert "not enough memory for 3 members at a time: it trains 2, which Execution(streams=2)" in history.fallbacks[0]
    assert ("without a CUDA graph" in history.fallbacks[-1]) == (enough == 0)
    assert history.engine == ("loop" if enough == 0 else "graph")
    use_engine(monkeypatch, "loop")
    again = [network(number, dropout=0.0) for number in range(3)]
    expected = se.train(se.Ensemble(again), few_digits(), recipe, seed=3, quiet=True)
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in expected.rows], rel=1e-4)


def test_other_errors_are_not_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def broken(*_: object, **__: object) -> list[Step]:
        raise CaptureError("it waits for the device") from RuntimeError("it waits for the device")

    monkeypatch.setattr(graph, "side_streams", lambda device, number: tried.append(number) or [])
    monkeypatch.setattr(graph, "all_captured", broken)
    use_engine(monkeypatch, "graph")
    _, history = trained(se.Recipe(epochs=1), few_digits())
    assert history.fallbacks[-1] == "training goes on without a CUDA graph, slower: it waits for the device"
    assert not [message for message in history.fallbacks if "memory" in message]
    assert history.engine == "loop"
    assert tried == [2, 2]  # again without our own kernels, which might be to blame


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="engine must be 'loop' or 'auto' on cpu"):
        se.train(se.Ensemble([network(0)]), few_digits(), execution=se.Execution(engine="graph"), device="cpu")


def test_the_engine_does_not_make_it_another_run(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A run that began on one engine goes on with the other."""
    path = f"{tmp_path}/checkpoint.safetensors"
    recipe = se.Recipe(epochs=4, batch_size=64, rate=0.02, augmentation="none", schedule="constant")
    use_engine(monkeypatch, "loop")
    whole, expected = trained(recipe, few_digits())
    use_engine(monkeypatch, "graph")
    with pytest.MonkeyPatch.context() as patch:
        stop_before_epoch(patch, 2)
        with pytest.raises(Stopped):
            trained(recipe, few_digits(), checkpoint=path)
    use_engine(monkeypatch, "loop")
    resumed, history = trained(recipe, few_digits(), checkpoint=path)
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in expected.rows], rel=1e-4)
    for name, tensor in resumed.members.state_dict().items():
        torch.testing.assert_close(tensor, whole.members.state_dict()[name], rtol=1e-3, atol=1e-5)


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


def test_a_layer_with_two_names_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, "graph")
    ensemble = se.Ensemble([TwoNames()])
    se.train(ensemble, few_digits(), se.Recipe(epochs=1), execution=BFLOAT16, quiet=True)
    assert all(isinstance(parameter, nn.Parameter) for parameter in ensemble.members[0].parameters())
    assert {tensor.dtype for tensor in ensemble.members.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("besides", [False, True])
def test_weights_reached_aside_are_refused(monkeypatch: pytest.MonkeyPatch, besides: bool) -> None:
    use_engine(monkeypatch, "graph")
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


def test_layers_that_no_derivative_reaches_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = PartlyFrozen()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    use_engine(monkeypatch, "graph")
    recipe = se.Recipe(epochs=1, weight_decay=0.1)
    se.train(se.Ensemble([network]), few_digits(), recipe, execution=BFLOAT16, quiet=True)
    changed = {name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"last.weight", "last.bias"}


def test_an_ensemble_goes_with_its_last_reference() -> None:
    """And its CUDA graphs with it, which a cycle would keep until some garbage collection."""
    from structured_ensembles.cuda.prediction_graphs import Fingerprint

    ensemble = se.Ensemble([network(0), network(1)]).eval()
    ensemble.replays.fingerprint = Fingerprint(ensemble)
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

    ensemble, fingerprint = fresh()
    assert fingerprint.fits(ensemble)
    assert fingerprint.can_be_replayed()
    with torch.no_grad():
        next(ensemble.parameters()).mul_(2)  # in place: the graph sees it
    assert fingerprint.fits(ensemble)
    ensemble.members[0][0] = nn.Conv2d(1, 8, 3)
    assert not fingerprint.fits(ensemble)
    ensemble, fingerprint = fresh()
    ensemble.members[1] = network(3)
    assert not fingerprint.fits(ensemble)
    ensemble, fingerprint = fresh()
    parameter = next(ensemble.parameters())
    parameter.data = parameter.data.clone()
    assert not fingerprint.fits(ensemble)
    ensemble, fingerprint = fresh()
    ensemble.normalization = se.Normalization((0.5,), (0.5,))
    assert not fingerprint.fits(ensemble)
    ensemble, fingerprint = fresh()
    ensemble.members[0].train()
    assert not fingerprint.can_be_replayed()
    ensemble = se.Ensemble([nn.Sequential(network(0), nn.Sequential())]).eval()
    fingerprint = Fingerprint(ensemble)
    ensemble.members[0][1].append(nn.Linear(10, 10))  # a shortcut that was none
    assert not fingerprint.fits(ensemble)
    ensemble, fingerprint = fresh()
    ensemble.train()
    for member in ensemble.members:
        member.eval()  # as training leaves them
    assert fingerprint.can_be_replayed()
    ensemble, fingerprint = fresh()
    ensemble.members[0][1].register_forward_pre_hook(lambda module, inputs: None)
    assert not fingerprint.can_be_replayed()
    ensemble, fingerprint = fresh()
    hook = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)  # of all modules
    assert not fingerprint.can_be_replayed()
    hook.remove()
    assert fingerprint.can_be_replayed()


@pytest.mark.parametrize("graph", [False, True])
def test_double_precision_trains_too(monkeypatch: pytest.MonkeyPatch, graph: bool) -> None:
    use_engine(monkeypatch, "graph" if graph else "loop")
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


def residual(width: int, seed: int = 0) -> nn.Module:
    """Make a network whose members of different widths share a program."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 3, bias=False)]
    return nn.Sequential(*layers, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def trained_together(**arguments: object) -> tuple[se.Ensemble, se.History]:
    ensemble = se.Ensemble([residual(8), residual(6, seed=1), residual(7, seed=2)])
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02, augmentation="none", keep="last")
    history = se.train(ensemble, few_digits(), recipe, "cpu", seed=3, quiet=True, **arguments)  # type: ignore[arg-type]
    return ensemble, history


def test_members_of_one_program_are_those_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, statistics and counters of batches of three members with different widths."""
    use_engine(monkeypatch, "graph")
    ours, history = trained_together()
    assert history.fallbacks == []
    use_engine(monkeypatch, "loop")
    plain, expected = trained_together()
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in expected.rows], rel=1e-4)
    assert ours.members[0][1].num_batches_tracked > 2
    for name, tensor in ours.members.state_dict().items():
        torch.testing.assert_close(tensor, plain.members.state_dict()[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_program", [True, False])
def test_weights_that_on_epoch_changes_count_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch, precision: Any, has_program: bool
) -> None:
    """With all weights zero, every class is as likely; the graph engine's copies of weights must be zero as well."""
    use_engine(monkeypatch, "graph")
    ensemble = se.Ensemble([residual(8) if has_program else nn.Sequential(residual(8), Peering())])

    def forget(_row: object) -> None:
        with torch.no_grad():
            for tensor in ensemble.parameters():
                tensor.zero_()

    recipe = se.Recipe(epochs=3, batch_size=1000, warmup=0, keep="last")  # one batch is an epoch
    execution = se.Execution(precision=precision)
    history = se.train(ensemble, few_digits(), recipe, "cpu", on_epoch=forget, execution=execution, quiet=True)
    assert [row["loss"] for row in history.rows[1:]] == pytest.approx([math.log(10)] * 2, rel=1e-5)
    assert (history.fallbacks == []) is has_program


class FixedFilters(nn.Module):
    """A network whose first convolution has a buffer as its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters", torch.randn(8, 1, 3, 3, generator=torch.Generator().manual_seed(0)))
        self.rest = residual(8)[1:]

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(F.conv2d(x, self.filters))  # type: ignore[arg-type,no-any-return]


def test_filters_that_are_buffers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, "graph")
    ensemble = se.Ensemble([FixedFilters(), FixedFilters()])
    history = se.train(ensemble, few_digits(), se.Recipe(epochs=2), "cpu", execution=BFLOAT16, quiet=True)
    assert (history.engine, history.fallbacks) == ("graph", [])
    for member in ensemble.members:
        assert torch.equal(member.filters, FixedFilters().filters)  # type: ignore[arg-type]


def test_a_member_of_a_program_is_the_network_trained_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, "graph")
    _, history = trained_together()
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02, augmentation="none", keep="last")
    alone = se.train(se.Ensemble([residual(6, seed=1)]), few_digits(), recipe, "cpu", seed=3, numbers=[1], quiet=True)
    assert [row["loss"] for row in alone.rows] == pytest.approx([row["loss"] for row in history.of(1)], rel=1e-4)


def test_streamed_batches_are_shared_by_the_members_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    data = few_digits()
    dataset = torch.utils.data.TensorDataset(data.prepare(data.train.inputs), data.train.targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
    streamed = se.Data.from_loaders(loader, validation=loader, classes=10)
    losses = []
    for engine in ("graph", "loop"):
        use_engine(monkeypatch, engine)  # type: ignore[arg-type]
        ensemble = se.Ensemble([residual(8), residual(6, seed=1)])
        history = se.train(ensemble, streamed, se.Recipe(epochs=2, rate=0.02), "cpu", quiet=True)
        assert history.fallbacks == []
        losses.append([row[name] for row in history.rows for name in ("loss", "validation_loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_members_of_a_program_learn_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    losses = []
    for engine in ("graph", "loop"):
        use_engine(monkeypatch, engine)  # type: ignore[arg-type]
        torch.manual_seed(0)
        ensemble = se.Ensemble([se.zoo.mlp(3, 1, hidden=(8,)) for _ in range(3)])
        recipe = se.Recipe(epochs=3, rate=0.02, batch_size=16)
        history = se.train(ensemble, se.Data.from_arrays(x, x.sum(1)), recipe, "cpu", quiet=True)
        assert history.fallbacks == []
        losses.append([row[name] for row in history.rows for name in ("loss", "validation_loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_program_for_fewer_members_at_a_time_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, "graph")
    _, whole = trained_together()
    _, history = trained_together(execution=se.Execution(streams=2))
    assert [row["loss"] for row in history.rows] == pytest.approx([row["loss"] for row in whole.rows], rel=1e-4)


def test_members_that_stop_early_leave_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that go on have the same losses as in the loop, with their own batches and momentum."""
    scores = count()

    def change(member: Member, result: Result) -> Result:
        return result[0], 0.0 if member.number == 1 else next(scores) / 1000  # one does not improve

    change_validation(monkeypatch, change)
    recipe = se.Recipe(epochs=4, batch_size=64, rate=0.02, augmentation="none", patience=1)
    histories = []
    for engine in ("graph", "loop"):
        use_engine(monkeypatch, engine)  # type: ignore[arg-type]
        ensemble = se.Ensemble([residual(8), residual(6, seed=1), residual(7, seed=2)])
        histories.append(se.train(ensemble, few_digits(), recipe, "cpu", seed=3, quiet=True))
    graph_rows, loop_rows = (history.rows for history in histories)
    assert [len(histories[0].of(number)) for number in range(3)] == [4, 2, 4]
    assert [row["loss"] for row in graph_rows] == pytest.approx([row["loss"] for row in loop_rows], rel=1e-4)


class Peering(nn.Module):
    """Refuse anything but a plain tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor:
            raise TypeError("something else than a tensor")
        return x.clamp(min=0)


@pytest.mark.filterwarnings("ignore:member 1 stops")
def test_member_that_stopped_before_a_resume_counts_for_the_common_widths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without it, the other member was computed with fewer channels, and ended with other weights by rounding."""

    def diverge(member: Member, result: Result) -> Result:
        return (math.nan, result[1]) if member.number == 1 else result

    def trained(stop: int | None, checkpoint: Path | None = None) -> dict[str, Tensor]:
        ensemble = se.Ensemble([residual(20), residual(30, seed=1)])
        recipe = se.Recipe(epochs=4, batch_size=64, rate=0.02, augmentation="none")
        with monkeypatch.context() as patch:
            use_engine(patch, "graph")
            change_validation(patch, diverge)
            stop_before_epoch(patch, stop)
            se.train(ensemble, few_digits(), recipe, "cpu", seed=3, checkpoint=checkpoint, quiet=True)
        return ensemble.members.state_dict()

    expected = trained(None)
    with pytest.raises(Stopped):
        trained(2, tmp_path / "checkpoint.safetensors")
    actual = trained(None, tmp_path / "checkpoint.safetensors")
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_networks_without_a_program_train_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for engine in ("graph", "loop"):
        use_engine(monkeypatch, engine)  # type: ignore[arg-type]
        network = residual(8)
        network[2] = Peering()
        history = se.train(se.Ensemble([network]), few_digits(), se.Recipe(epochs=2), "cpu", quiet=True)
        losses.append([row["loss"] for row in history.rows])
        if engine == "graph":
            (told,) = history.fallbacks
            assert told.startswith("PyTorch's own kernels are used, slower: the network cannot be exported")
            assert history.engine == "graph"
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.fixture
def warmed_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps run once before they are taken, as on a GPU; lists how many there were."""
    numbers: list[int] = []

    def captured(steps: Sequence[Step], *_: object, **__: object) -> list[Step]:
        numbers.append(len(steps))
        try:
            for step in steps:
                step()
        except Exception as error:
            raise CaptureError(str(error)) from error
        return list(steps)

    monkeypatch.setattr(graph, "all_captured", captured)
    use_engine(monkeypatch, "graph")
    return numbers


def broken(message: str, error: type[Exception] = RuntimeError) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error(message)

    return fail


@pytest.mark.parametrize("method", ["train_step", "compile_kernels"])
def test_where_our_kernels_do_not_run_pytorchs_do(
    method: str, warmed_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError if method == "train_step" else CaptureError
    with monkeypatch.context() as patch:
        patch.setattr(ProgramRunner, method, broken("Failed to find C compiler.", error))
        _, history = trained_together(execution=BFLOAT16)
    assert history.fallbacks == ["training goes on without our own kernels, slower: Failed to find C compiler."]
    assert history.engine == "graph"
    assert len(warmed_up) == (2 if method == "train_step" else 1)
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]


def test_what_no_kernel_is_to_blame_for_trains_in_the_loop(
    warmed_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "side_by_side", broken("it waits for the device"))
    _, history = trained_together(execution=BFLOAT16)
    assert history.fallbacks == ["training goes on without a CUDA graph, slower: it waits for the device"]
    assert history.engine == "loop"
    assert len(warmed_up) == 2


def test_kernels_are_compiled_on_the_first_batch_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a member has stopped, the counter stood behind the last batch, where the tables of mixup and cutout end."""
    compiled: list[int] = []  # numbers of members

    def draw_batches(runner: ProgramRunner, sizes: Sequence[int]) -> None:
        for size in sizes:
            runner._batch(size, None)
        compiled.extend(member.number for member in runner.members)

    def stop_first(member: Member, result: Result) -> Result:
        return (math.nan, 0.0) if member.number == 0 else result

    monkeypatch.setattr(ProgramRunner, "compile_kernels", draw_batches)
    change_validation(monkeypatch, stop_first)
    use_engine(monkeypatch, "graph")
    recipe = se.Recipe(epochs=2, batch_size=64, rate=0.02, mixup=0.3, augmentation="crop+flip+cutout")
    with pytest.warns(UserWarning, match="member 0 stops"):
        _, history = trained(recipe, few_digits())
    assert compiled == [0, 1, 1]
    assert history.engine == "graph"
