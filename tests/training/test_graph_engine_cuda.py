"""Training in CUDA graphs: the losses of the plain loop, bounded memory, and a fallback where a capture fails."""

import gc
import math
import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda.compilation import Compiled, compile_networks
from structured_ensembles.cuda.launch import dependent_launches
from structured_ensembles.training.engine import Member, Result
from tests.support.engines import change_validation
from tests.support.kernel_checks import recorded_launches
from tests.support.networks import Sparse, small_networks

pytestmark = pytest.mark.cuda


@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.01), ("adam", 0.001)])
def test_graph_and_loop_losses_agree_over_100_steps(optimizer: str, rate: float) -> None:
    """Adam divides by the size of the gradient: at a rate of 0.01, rounding alone moves losses by more than 1e-4."""
    data = se.load_data("digits")
    recipe = se.Recipe(epochs=10, rate=rate, optimizer=optimizer, augmentation="crop", batch_size=128)
    losses = {}
    for engine in ("graph", "loop"):
        ensemble = se.Ensemble(small_networks())
        execution = se.Execution(engine=engine, precision="float32")
        history = se.train(ensemble, data, recipe, execution=execution, quiet=True)
        losses[engine] = [row["loss"] for row in history.rows]
    assert data.num_batches("train", 128) * 10 >= 100
    assert losses["graph"] == pytest.approx(losses["loop"], rel=1e-4, abs=1e-4)


@pytest.mark.usefixtures("without_tf32")
def test_graph_and_loop_losses_agree_with_a_teacher() -> None:
    """The teacher predicts within the captured step, on the crops that members see."""
    data = se.load_data("digits")
    recipe = se.Recipe(epochs=5, rate=0.01, augmentation="crop", batch_size=128)
    teacher = se.Ensemble(small_networks(2), normalization=se.Normalization((0.2,), (0.5,)))
    losses = {}
    for engine in ("graph", "loop"):
        ensemble = se.Ensemble(small_networks())
        execution = se.Execution(engine=engine, precision="float32")
        history = se.train(ensemble, data, recipe, execution=execution, teacher=teacher, quiet=True)
        assert history.engine == engine
        losses[engine] = [row["loss"] for row in history.rows]
    assert losses["graph"] == pytest.approx(losses["loop"], rel=1e-4, abs=1e-4)


@pytest.mark.usefixtures("without_tf32")
def test_graph_and_loop_agree_with_cutout_mixup_and_averaging() -> None:
    data = se.load_data("digits")
    recipe = se.Recipe(epochs=5, rate=0.01, averaging=0.4, mixup=0.3, augmentation="crop+flip+cutout", batch_size=128)
    losses, outputs = {}, {}
    for engine in ("graph", "loop"):
        ensemble = se.Ensemble(small_networks())
        execution = se.Execution(engine=engine, precision="float32")
        history = se.train(ensemble, data, recipe, execution=execution, quiet=True)
        assert history.engine == engine
        losses[engine] = [row["loss"] for row in history.rows]
        outputs[engine] = ensemble.logits(data.test.inputs)
    assert losses["graph"] == pytest.approx(losses["loop"], rel=1e-4, abs=1e-4)
    torch.testing.assert_close(outputs["graph"], outputs["loop"], rtol=1e-2, atol=1e-2)


def test_kernels_that_start_while_others_end_compute_the_same() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU from Hopper on")
    data = se.load_data("digits")
    losses = []
    for launches in (nullcontext, dependent_launches):
        torch.manual_seed(0)
        ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(3)])
        with launches():
            history = se.train(ensemble, data, se.Recipe(epochs=5, batch_size=128), quiet=True)
        assert (history.engine, history.fallbacks) == ("graph", [])
        losses.append([row["loss"] for row in history.rows])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_members_go_on_with_cutout_and_mixup_after_one_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels are compiled anew, on the first batch: the tables of an epoch have no row after the last."""

    def stop_first(member: Member, result: Result) -> Result:
        return (math.nan, 0.0) if member.number == 0 else result

    change_validation(monkeypatch, stop_first)
    ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(3)])
    recipe = se.Recipe(epochs=3, mixup=0.3, augmentation="crop+flip+cutout")
    with pytest.warns(UserWarning, match="member 0 stops"):
        history = se.train(ensemble, se.load_data("digits"), recipe, quiet=True)
    assert history.engine == "graph"
    assert history.fallbacks == []
    assert [len(history.of(number)) for number in range(3)] == [1, 3, 3]


def test_members_learn_from_a_teacher_in_bfloat16() -> None:
    data = se.load_data("digits")
    teacher = se.Ensemble([se.zoo.resnet20(in_channels=1)])
    se.train(teacher, data, se.Recipe(epochs=6), quiet=True)
    ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(2)])
    history = se.train(ensemble, data, se.Recipe(epochs=6), teacher=se.Teacher(teacher, share=1.0), quiet=True)
    assert history.engine == "graph"
    assert history.fallbacks == []
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.9


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_member_of_a_graph_equals_the_network_trained_alone(dropout: float) -> None:
    data = se.load_data("digits")
    recipe = se.Recipe(epochs=4, rate=0.02, patience=1)
    fleet = se.Ensemble(small_networks(dropout=dropout))
    history = se.train(fleet, data, recipe, seed=3, quiet=True)
    for number, network in enumerate(small_networks(dropout=dropout)):
        alone = se.train(se.Ensemble([network]), data, recipe, seed=3, numbers=[number], quiet=True)
        assert [row["loss"] for row in alone.rows] == pytest.approx(
            [row["loss"] for row in history.of(number)], rel=1e-3
        )
    again = se.train(se.Ensemble(small_networks(dropout=dropout)), data, recipe, seed=3, quiet=True)
    assert [row["loss"] for row in again.rows] == [row["loss"] for row in history.rows]


def memory_of(data: se.Data, members: int, **execution: object) -> float:
    """Return the peak of bytes that training reserves on the GPU, besides those allocated before."""
    ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(members)])
    before = from_scratch()
    recipe = se.Recipe(epochs=2, batch_size=1024)
    se.train(ensemble, data, recipe, execution=se.Execution(**execution), quiet=True)
    return torch.cuda.max_memory_reserved() - before


def from_scratch() -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def test_training_releases_its_gpu_memory() -> None:
    data = se.load_data("digits")
    memory_of(data, 3)  # what is done once
    from_scratch()
    before = torch.cuda.memory_reserved()
    memory_of(data, 3)
    left = torch.cuda.memory_allocated()
    assert left - from_scratch() < 80 * 2**20  # cuBLAS's, for the stream of the caller
    assert torch.cuda.memory_reserved() - before < 25 * 2**20  # a segment that is not quite empty


def test_one_stream_reserves_at_most_1_3_times_the_memory_of_the_loop() -> None:
    data = se.load_data("digits")
    loop, one, all_five = (memory_of(data, 5, **how) for how in ({"engine": "loop"}, {"streams": 1}, {}))
    assert one <= 1.3 * loop
    assert one < 0.5 * all_five


def test_members_together_reserve_no_more_than_one_by_one() -> None:
    """All hold their activations at the same time; stacking them takes nothing beside that."""
    data = se.load_data("digits")
    alone, together = memory_of(data, 1), memory_of(data, 5)
    assert together <= 5 * alone


def test_fewer_members_run_in_parallel_if_memory_is_short() -> None:
    def history() -> se.History:
        torch.manual_seed(0)
        ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(5)])
        return se.train(ensemble, data, recipe, quiet=True)

    data, recipe = se.load_data("digits"), se.Recipe(epochs=2, batch_size=1024)
    all_five, one = memory_of(data, 5), memory_of(data, 5, streams=1)
    expected = [row["loss"] for row in history().rows]
    from_scratch()
    enough = torch.cuda.memory_reserved() + one + 0.7 * (all_five - one)  # three fit
    torch.cuda.set_per_process_memory_fraction(enough / torch.cuda.get_device_properties(0).total_memory)
    try:
        actual = history()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "not enough memory for 5 members at a time" in actual.fallbacks[0]
    assert actual.engine == "graph"
    losses = [row["loss"] for row in actual.rows]
    assert losses[:5] == pytest.approx(expected[:5], rel=1e-3)
    # Kernels of fewer members add up in another order, and training at this rate makes the difference grow.
    assert losses[5:] == pytest.approx(expected[5:], rel=5e-2)


def test_losses_do_not_depend_on_the_number_of_streams() -> None:
    data = se.load_data("digits")
    losses = []
    for streams in (None, 2, 1):
        recipe, execution = se.Recipe(epochs=2, rate=0.02), se.Execution(streams=streams)
        history = se.train(se.Ensemble(small_networks()), data, recipe, execution=execution, quiet=True)
        losses.append([row["loss"] for row in history.rows])
    assert losses[0] == losses[1] == losses[2]


def test_dropout_of_our_own_trains_as_a_program() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    model = se.zoo.resnet20(in_channels=1)
    recipe = se.Recipe(epochs=3, rate=0.05, augmentation="none")
    histories = []
    for engine in ("graph", "graph", "loop"):
        execution = se.Execution(engine=engine, precision="bfloat16")
        ensemble = se.methods.mc_dropout(model, data, recipe=recipe, execution=execution, quiet=True)
        assert ensemble.history is not None
        assert ensemble.history.fallbacks == []
        histories.append([row["loss"] for row in ensemble.history.rows])
    assert histories[0] == histories[1]
    assert histories[0] == pytest.approx(histories[2], rel=0.3)  # other masks


def test_rank_one_members_train_as_a_program() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    model = se.zoo.resnet20(in_channels=1)
    recipe = se.Recipe(epochs=3, rate=0.05, augmentation="none")
    losses = []
    for engine in ("graph", "graph", "loop"):
        execution = se.Execution(engine=engine, precision="bfloat16")
        with recorded_launches() as names:
            ensemble = se.methods.batch_ensemble(model, data, recipe=recipe, execution=execution, quiet=True)
        assert ("convolve_by_sweep" in names) == (engine == "graph")
        assert ensemble.history is not None
        assert ensemble.history.fallbacks == []
        losses.append([row["loss"] for row in ensemble.history.rows])
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=0.1)


class Unkind(nn.Module):
    """Fail only while a capture is under way."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a graph")
        return self.inner(x)


def test_failed_capture_leaves_streams_and_generators_usable() -> None:
    data = se.load_data("digits")
    ensemble = se.Ensemble([Unkind(network) for network in small_networks(2, dropout=0.3)])
    history = se.train(ensemble, data, se.Recipe(epochs=2, rate=0.02), quiet=True)
    assert "training goes on without a CUDA graph" in history.fallbacks[-1]
    assert history.engine == "loop"
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(3, device="cuda")
    again = se.train(se.Ensemble(small_networks(2, dropout=0.3)), data, se.Recipe(epochs=2, rate=0.02), quiet=True)
    assert again.rows[-1]["loss"] < again.rows[0]["loss"]


class Impossible(nn.Module):
    """Use the host in a way that a graph cannot hold."""

    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.calls = inner, how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(x)
        if self.how == "waits":
            return outputs * (1.0 if float(outputs.detach().sum()) != 0.5 else 2.0)
        if self.how == "counts":
            self.calls += 1
            return outputs
        return outputs * (1 + 0.01 * random.random())


@pytest.mark.parametrize("how", ["waits", "counts", "draws"])
def test_uncapturable_networks_fall_back_to_the_loop(how: str) -> None:
    data = se.load_data("digits")
    ensemble = se.Ensemble([Impossible(network, how) for network in small_networks(2, dropout=0.3)])
    history = se.train(ensemble, data, se.Recipe(epochs=3, rate=0.02), quiet=True)
    assert "training goes on without a CUDA graph" in history.fallbacks[-1]
    assert history.engine == "loop"
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]


def test_compiled_fleet_has_the_losses_of_an_uncompiled_one() -> None:
    data = se.load_data("digits")
    losses = []
    for compiled in (False, True):
        ensemble = se.Ensemble(small_networks())
        recipe, execution = se.Recipe(epochs=3, rate=0.02), se.Execution(compile=compiled)
        history = se.train(ensemble, data, recipe, execution=execution, quiet=True)
        losses.append([row["loss"] for row in history.rows])
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_a_fleet_of_resnets_runs_on_our_kernels_only() -> None:
    """Every norm behind its convolution, with sum and ReLU; all members in one launch per layer."""
    data, recipe = se.load_data("digits"), se.Recipe(epochs=1, batch_size=1600)
    with recorded_launches() as names:
        ensemble = se.Ensemble([se.zoo.resnet20(in_channels=1) for _ in range(3)])
        history = se.train(ensemble, data, recipe, quiet=True)
    assert history.fallbacks == []
    assert history.engine == "graph"
    steps = 3  # to warm up twice, to be captured
    assert names.count("normalize") == names.count("input_gradient") == 19 * steps
    assert "moments" not in names
    assert names.count("gradient_sums") == steps  # of the last norm, which no convolution reads


def test_channel_padding_does_not_change_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.training import graph_engine as engine

    data = se.load_data("digits")
    torch.manual_seed(0)
    base = se.zoo.resnet20(in_channels=1)
    traced = se.trace(base, data.example())
    subnets = se.select(traced, prune=0.8, selection="random", members=2)
    actual, programs = [], []
    for padded in (True, False):

        def compiled(*arguments: object, padded: bool = padded) -> list[Compiled]:
            results = compile_networks(*arguments) if padded else []  # type: ignore[arg-type]
            programs.extend(results)
            return results

        monkeypatch.setattr(engine, "compile_networks", compiled)
        ensemble = se.Ensemble([se.extract(base, traced, subnet) for subnet in subnets])
        recipe = se.Recipe(epochs=2, warmup=0, rate=1e-3, augmentation="none")  # so low that rounding does not grow
        history = se.train(ensemble, data, recipe, quiet=True)
        actual.append([row[name] for row in history.rows for name in ("loss", "validation_loss")])
        assert ensemble.members[0].layer1[0].conv1.weight.shape == (4, 16, 3, 3)
    (one,) = programs
    assert one.program.members == 2
    assert one.shapes["layer1.0.conv1.weight"] == (8, 16, 3, 3)
    assert actual[0] == pytest.approx(actual[1], rel=0.02)  # bfloat16, other kernels


def test_sparse_gradients_train_in_the_loop() -> None:
    """Fused optimizers, which a graph needs, do not take sparse gradients."""
    data, recipe = se.load_data("digits"), se.Recipe(epochs=2, rate=3.0, momentum=0.0, weight_decay=0.0)
    history = se.train(se.Ensemble([Sparse()]), data, recipe, quiet=True)
    assert history.engine == "loop"
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
