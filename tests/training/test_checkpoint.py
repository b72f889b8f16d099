"""Checkpoints: a damaged one is never used; those of earlier versions still are."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import structured_ensembles as se
from structured_ensembles.storage.container import read_container, write_container
from structured_ensembles.storage.files import write_tensors
from structured_ensembles.training.checkpoint import (
    FORMAT,
    flatten_optimizer_state,
    load_checkpoint,
    restore_optimizer,
    save_checkpoint,
)
from structured_ensembles.training.engine import Member
from structured_ensembles.training.fleet_checkpoint import set_standing
from structured_ensembles.training.history import COLUMNS, History
from tests.support.engines import Stopped, stop_after_checkpoint

RECIPE = se.Recipe(epochs=2, batch_size=8, rate=0.05)


def few() -> se.Data:
    generator = torch.Generator().manual_seed(0)
    return se.Data.from_arrays(torch.randn(40, 4, generator=generator), torch.arange(40) % 3)


def train(checkpoint: Path | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    networks = [nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2)]
    ensemble = se.Ensemble(networks)
    se.train(ensemble, few(), RECIPE, checkpoint=checkpoint, device="cpu", quiet=True)
    return ensemble.state_dict()


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a checkpoint after the first of two epochs."""
    with monkeypatch.context() as patch:
        stop_after_checkpoint(patch)
        with pytest.raises(Stopped):
            train(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_flipped_bits_are_refused_or_harmless(begun: Path) -> None:
    content, draw = begun.read_bytes(), random.Random(0)
    tensors, state = load_checkpoint(begun) or ({}, {})
    header = 8 + int.from_bytes(content[:8], "little")
    positions = [draw.randrange(header) for _ in range(200)] + [
        draw.randrange(header, len(content)) for _ in range(200)
    ]
    refused = 0
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << draw.randrange(8)
        begun.write_bytes(damaged)
        try:
            checkpoint = load_checkpoint(begun)
        except se.ArtifactError as error:
            assert str(begun) in str(error)  # noqa: PT017
            assert "delete it to start anew" in str(error)  # noqa: PT017
            refused += 1
            continue
        assert checkpoint is not None
        assert same(checkpoint[0], tensors)
        assert checkpoint[1] == state
    assert refused >= 390  # spaces in the header may change


def test_checkpoints_of_earlier_versions_resume_to_the_same_weights(begun: Path) -> None:
    state, tensors = read_container(begun, FORMAT, 1, "a checkpoint")
    write_tensors(begun, {name: tensor.clone() for name, tensor in tensors.items()}, {"state": json.dumps(state)})
    assert same(train(begun), train())
    with safe_open(begun, framework="pt") as file:
        assert FORMAT in file.metadata()


def changed(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    return others if value is None else {**others, name: value}


@pytest.mark.parametrize("name", ["0.now.3.weight", "1.best.1.running_mean", "1.best.1.num_batches_tracked"])
def test_missing_or_extra_tensors_are_refused(name: str, begun: Path) -> None:
    tensors, state = load_checkpoint(begun) or ({}, {})
    for value in (None, torch.zeros(7)):
        save_checkpoint(begun, changed(tensors, name, value), state)
        with pytest.raises(ValueError, match=rf"{name[6:].lstrip('.')}.* has another shape, or is not in both"):
            train(begun)


def test_checkpoint_without_an_optimizer_tensor_is_refused(begun: Path) -> None:
    state, tensors = read_container(begun, FORMAT, 1, "a checkpoint")
    del tensors["0.optimizer.2.momentum_buffer"]
    write_container(begun, FORMAT, 1, state, tensors)
    with pytest.raises(ValueError, match=r"does not have the tensors that it lists.*delete it"):
        train(begun)


def test_unexpected_tensors_and_fields_are_refused(begun: Path) -> None:
    tensors, state = load_checkpoint(begun) or ({}, {})
    for name, value, reason in (
        ("2.now.0.weight", torch.zeros(1), "it has 2.now.0.weight"),
        ("0.now.stranger", torch.zeros(1), "stranger"),
        ("0.optimizer.99.momentum_buffer", torch.zeros(1), "there are 6 parameters"),
        ("0.optimizer.0.momentum_buffer", torch.zeros(9), "has the shape"),
        ("0.optimizer.0.momentum_buffer", torch.tensor(0.0), "has the shape"),
        ("0.optimizer.0.exp_avg", torch.zeros(5, 4), "holds"),
        ("0.optimizer.x.momentum_buffer", torch.zeros(9), "invalid literal"),
    ):
        save_checkpoint(begun, changed(tensors, name, value), state)
        with pytest.raises(ValueError, match=reason):
            train(begun)
    for field, value in (
        ("rows", 5),
        ("rows", []),
        ("epoch", "two"),
        ("epoch", 0),  # one epoch is done, so that the next has the number 1
        ("epoch", 2),
        ("members", []),
        ("members", [{}, {}]),
        ("members", None),
        ("units", 5),
    ):
        save_checkpoint(begun, tensors, {**state, field: value})
        with pytest.raises(ValueError, match="delete it to start anew"):
            train(begun)
    save_checkpoint(begun, tensors, {})
    with pytest.raises(ValueError, match="another run"):
        train(begun)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": {}}, "must have epoch, member"),
        ({"rows": [{"epoch": 0}]}, "must have epoch, member"),
        ({"rows": [dict.fromkeys(COLUMNS, 0) | {"member": "0"}]}, "'0' as member"),
        ({"rows": [dict.fromkeys(COLUMNS, 0) | {"loss": [1.0]}]}, "as loss"),
        ({"rows": [dict.fromkeys(COLUMNS, 0) | {"epoch": True}]}, "True as epoch"),
        ({"engines": {}}, "must be lists of strings"),
        ({"fallbacks": [1]}, "must be lists of strings"),
    ],
)
def test_history_of_wrong_types_is_refused(change: dict[str, object], reason: str) -> None:
    right = {"rows": [dict.fromkeys(COLUMNS, 0)], "engines": ["loop"], "fallbacks": []}
    assert History.restore(**right).epochs == 1
    with pytest.raises(ValueError, match=reason):
        History.restore(**{**right, **change})


def test_invalid_optimizer_step_is_refused() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors = flatten_optimizer_state(optimizer)
    restore_optimizer(optimizer, tensors)
    for value in (-1e30, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"step of the optimizer's state 0 cannot be"):
            restore_optimizer(optimizer, {**tensors, "0.step": torch.tensor(value)})


def test_optimizer_steps_of_a_bfloat16_number_are_counted_on_after_a_resume() -> None:
    """The counter has the shape of such a parameter, but not its type: bfloat16 has no whole numbers after 256."""
    parameter = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer, resumed = torch.optim.Adam([parameter]), torch.optim.Adam([parameter])
    for _ in range(257):
        optimizer.step()
    restore_optimizer(resumed, flatten_optimizer_state(optimizer))
    resumed.step()
    assert float(resumed.state[parameter]["step"]) == 258


@pytest.mark.parametrize("field", ["score", "epoch", "rise", "stopped"])
def test_member_progress_of_wrong_types_is_refused(field: str) -> None:
    layer = nn.Linear(2, 1)
    member = Member(layer, 0, {})
    standing = {"score": -math.inf, "epoch": 0, "rise": 0, "stopped": None}
    set_standing(member, standing)
    for value in ([], {}, True):
        with pytest.raises(ValueError, match="member"):
            set_standing(member, {**standing, field: value})
