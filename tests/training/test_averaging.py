"""Averaged weights, cutout and mixup: the same in both engines, alone and in a fleet, after a checkpoint and before."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.training import averaging, loop_engine
from tests.support.engines import Stopped, stop_before_epoch, use_engine
from tests.support.networks import network
from tests.support.real_data import few_digits
from tests.support.states import equal, weights

EVERYTHING = se.Recipe(
    epochs=4, batch_size=96, rate=0.02, averaging=0.5, mixup=0.3, augmentation="crop+flip+cutout", label_smoothing=0.1
)


def trained(checkpoint: Path | None = None) -> se.Ensemble:
    ensemble = se.Ensemble([network(0, dropout=0.0), network(1, width=5, dropout=0.0)])
    se.train(ensemble, few_digits(), EVERYTHING, "cpu", seed=3, checkpoint=checkpoint, quiet=True)
    return ensemble


def test_weights_of_each_step_count_alike() -> None:
    recipe = se.Recipe(epochs=10, averaging=0.25)  # the last two epochs
    used = [recipe.averaging_weight(step, 3) for step in range(30)]
    assert used[:24] == [0.0] * 24
    average = 0.0
    for step, weight in enumerate(used):
        average += weight * (step - average)
    assert average == pytest.approx(26.5)  # the mean of 24, …, 29
    assert se.Recipe(epochs=3, averaging=0.01).averaging_weight(2, 1) == 1.0  # at least the last epoch
    assert se.Recipe().averaging_weight(59, 1) == 0.0


def test_member_ends_with_the_mean_of_the_weights_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a sum over copies of the weights, and the statistics with those of `recalibrate_statistics`."""
    seen: list[dict[str, torch.Tensor]] = []

    def watch(members: list, weight: float) -> None:
        averaging.update_average(members, weight)
        seen.append(weights(members[0].network))

    monkeypatch.setattr(loop_engine, "update_average", watch)
    data, recipe = few_digits(), se.Recipe(epochs=3, batch_size=96, rate=0.02, averaging=0.34)
    ensemble = se.Ensemble([network(0, dropout=0.0)])
    se.train(ensemble, data, recipe, "cpu", quiet=True)
    assert len(seen) == data.num_batches("train", 96)
    (member,) = ensemble.members
    for name, parameter in member.named_parameters():
        mean = torch.stack([state[name].double() for state in seen]).mean(0)
        torch.testing.assert_close(parameter.double(), mean, rtol=1e-5, atol=1e-7)
    ended = weights(member)
    se.recalibrate_statistics(member, data)
    for name, tensor in weights(member).items():
        torch.testing.assert_close(tensor, ended[name])


def test_both_engines_average_blend_and_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    use_engine(monkeypatch, "graph")
    ours = trained()
    assert ours.history is not None
    assert ours.history.engine == "graph"
    use_engine(monkeypatch, "loop")
    plain = trained()
    for name, tensor in ours.members.state_dict().items():
        torch.testing.assert_close(tensor, plain.members.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_member_with_every_option_is_the_network_trained_alone() -> None:
    fleet = trained()
    alone = se.Ensemble([network(1, width=5, dropout=0.0)])
    se.train(alone, few_digits(), EVERYTHING, "cpu", seed=3, numbers=[1], quiet=True)
    assert equal(weights(fleet.members[1]), weights(alone.members[0]))


@pytest.mark.parametrize("engine", ["loop", "graph"])
@pytest.mark.parametrize("stop", [1, 3])  # before the averaging begins, and within
def test_resumed_run_ends_with_the_same_average(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Literal["loop", "graph"], stop: int
) -> None:
    use_engine(monkeypatch, engine)
    whole = trained()
    with monkeypatch.context() as patch:
        stop_before_epoch(patch, stop)
        with pytest.raises(Stopped):
            trained(tmp_path / "checkpoint")
    assert equal(weights(whole.members), weights(trained(tmp_path / "checkpoint").members))


def test_diverged_member_ends_with_its_best_weights_not_an_average() -> None:
    recipe = se.Recipe(epochs=3, batch_size=96, rate=1e30, warmup=0, averaging=1.0)
    ensemble = se.Ensemble([network(0, dropout=0.0)])
    with pytest.warns(UserWarning, match="stops with the weights it started with"):
        se.train(ensemble, few_digits(), recipe, "cpu", quiet=True)
    assert equal(weights(ensemble.members[0]), weights(network(0, dropout=0.0)))


def test_average_of_other_parameters_is_refused() -> None:
    average = averaging.start_average(nn.Linear(3, 2))
    for wrong in ({"weight": torch.zeros(2, 3)}, {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}):
        with pytest.raises(ValueError, match="averages are not those of the networks' parameters"):
            averaging.restore_average(average, wrong)
    averaging.restore_average(average, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in average.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"averaging": 1.5}, "averaging must be a share of the epochs, from 0 to 1, not 1.5"),
        ({"averaging": 0.5, "patience": 3}, "patience must be None with averaging, not 3"),
    ],
)
def test_average_that_cannot_be_is_an_error(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.Recipe(**changes)  # type: ignore[arg-type]
    assert se.Recipe(averaging=1.0).averaging_weight(0, 1) == 1.0
