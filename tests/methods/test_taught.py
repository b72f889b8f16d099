"""Taught members: what is trained, with which teacher, both costs counted, and a run that resumes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.methods import deep_ensemble, taught_ensemble
from tests.support.engines import Stopped, stop_before_epoch
from tests.support.states import equal, weights

RECIPE = se.Recipe(epochs=3, batch_size=64, rate=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return se.zoo.mlp(64, hidden=(32, 16))


def made(members: int = 2, **arguments: Any) -> se.Ensemble:
    settings = {"recipe": RECIPE, "device": "cpu", "quiet": True, **arguments}
    return taught_ensemble(model(), se.load_data("digits"), members, **settings)


def test_members_are_random_members_taught_by_the_deep_ensemble_of_the_seed() -> None:
    """Train both by hand, with `deep_ensemble` and `structured_ensemble`: the same weights, bit for bit."""
    data = se.load_data("digits")
    settings: dict[str, Any] = {"recipe": RECIPE, "device": "cpu", "seed": 4, "quiet": True}
    teacher = deep_ensemble(model(), data, 3, **settings)
    by_hand = se.structured_ensemble(
        model(), data, 2, memory=1.0, selection="random", teacher=se.Teacher(teacher, 0.6, 3.0), **settings
    )
    ours = made(teachers=3, memory=1.0, share=0.6, temperature=3.0, seed=4)
    assert ours.subnets == by_hand.subnets
    assert equal(weights(ours.members), weights(by_hand.members))


class Residual(nn.Module):
    """Add one block to a residual stream, whose channels only `coupled` members may lose."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.block = nn.Sequential(nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.flatten(1))
        return self.head(torch.relu(x + self.block(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ({}, {"prune": 0.5}),
        ({"prune": 0.8, "round_to": 4}, {"prune": 0.8, "round_to": 4}),
        ({"selection": "mirrored"}, {"prune": 0.5, "selection": "mirrored"}),
        ({"coupled": True}, {"prune": 0.5}),
    ],
)
def test_members_keep_what_select_gives_for_these_arguments(
    arguments: dict[str, Any], selected: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    network, data = Residual(), se.load_data("digits")
    short = replace(RECIPE, epochs=1)
    ensemble = taught_ensemble(network, data, 2, recipe=short, seed=5, device="cpu", quiet=True, **arguments)
    graph = se.trace(network, data.example(), coupled=arguments.get("coupled", False))
    assert len(graph.prunable) == (2 if "coupled" in arguments else 1)
    expected = se.select(graph, **{"selection": "random", "members": 2, "seed": 5, **selected})
    assert list(ensemble.subnets or ()) == expected


def test_by_default_there_are_as_many_teachers_as_members() -> None:
    history = made(recipe=replace(RECIPE, epochs=1)).history
    assert history is not None
    assert {row["member"] for row in history.rows} == {0, 1, 2, 3}  # members, then teachers


def test_history_counts_teacher_and_members() -> None:
    seen: list[se.EpochRow] = []
    history = made(teachers=1, on_epoch=seen.append).history
    assert history is not None
    assert history.epochs == 6
    assert [row["epoch"] for row in history.of(2)] == [0, 1, 2]  # the teacher
    for member in (0, 1):
        assert [row["epoch"] for row in history.of(member)] == [3, 4, 5]
    assert [(row.epoch, sorted(row.losses)) for row in seen] == [
        *((epoch, [2]) for epoch in range(3)),
        *((epoch, [0, 1]) for epoch in range(3, 6)),
    ]


def test_one_member_in_the_memory_of_one_is_the_whole_network() -> None:
    ensemble = made(1, memory=1.0)
    assert ensemble.num_parameters == sum(parameter.numel() for parameter in model().parameters())
    assert len(ensemble) == 1


@pytest.mark.parametrize("stop", ["teacher", "members"])
def test_stopped_run_resumes_to_the_same_members(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: str) -> None:
    whole = made()
    folder = tmp_path / "run"
    if stop == "members":  # the teacher is done: only the members' epochs are left
        calls: list[se.EpochRow] = []

        def stop_in_fifth_epoch(row: se.EpochRow) -> None:
            calls.append(row)
            if row.epoch == 4:
                raise Stopped

        with pytest.raises(Stopped):
            made(folder=folder, on_epoch=stop_in_fifth_epoch)
        assert len(calls) == 5
    else:
        with monkeypatch.context() as patch:
            stop_before_epoch(patch, 1)
            with pytest.raises(Stopped):
                made(folder=folder)
    resumed = made(folder=folder)
    assert equal(weights(whole.members), weights(resumed.members))
    assert resumed.history is not None
    assert resumed.history.epochs == 6


def test_folder_of_another_teacher_is_refused(tmp_path: Path) -> None:
    short = replace(RECIPE, epochs=1)
    made(folder=tmp_path / "run", recipe=short)
    for name, value in {"teachers": 3, "share": 0.4, "temperature": 3.0, "selection": "mirrored"}.items():
        with pytest.raises(ValueError, match=f"differs in {name}"):
            made(folder=tmp_path / "run", recipe=short, **{name: value})


class Noisy(nn.Sequential):
    """Draw random numbers in evaluation mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x.flatten(1), training=True))  # type: ignore[no-any-return]


def test_network_that_cannot_teach_is_refused_before_any_training() -> None:
    rows: list[se.EpochRow] = []
    with pytest.raises(ValueError, match="teacher must predict the same each time"):
        taught_ensemble(
            Noisy(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
            se.load_data("digits"),
            recipe=RECIPE,
            on_epoch=rows.append,
        )
    assert rows == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"teachers": 0}, "teachers must be a whole number of at least 1, or None"),
        ({"share": 2}, "share must be at most 1"),
        ({"temperature": 0}, "temperature must be from 0.01 to 100, not 0"),
        ({"selection": "learned"}, "selection must be one of 'random', 'mirrored'"),
        ({"loss": nn.functional.cross_entropy}, "teacher must be left out with a loss of your own"),
    ],
)
def test_wrong_arguments_are_named_before_any_training(arguments: dict[str, Any], message: str) -> None:
    rows: list[se.EpochRow] = []
    with pytest.raises(ValueError, match=message):
        made(on_epoch=rows.append, **arguments)
    assert rows == []
