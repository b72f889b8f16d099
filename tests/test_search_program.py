"""The search by a program (cuda/scaled_program.py) finds what it finds by hooks; on a CPU, by PyTorch's operations."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda.scaled_program import ScaledProgram
from structured_ensembles.searching import objective


def pictures(samples: int = 90, size: int = 16) -> se.Data:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, 3, size, size), generator=generator, dtype=torch.uint8)
    return se.Data.from_arrays(images, torch.arange(samples) % 3, validation=0.2)


def with_draws(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), layer, nn.Flatten(), nn.Linear(980, 3))


def distance(one: se.Scales, other: se.Scales) -> float:
    return sum(float((one.vectors[name] - other.vectors[name]).square().sum()) for name in one.vectors) ** 0.5


def searching(model: nn.Module, data: se.Data, **settings: Any) -> Callable[..., se.Scales]:
    """Return a search of three members, in batches whose last one is smaller, on the CPU."""
    graph = se.trace(model, data.example())
    common: dict[str, Any] = {"members": 3, "epochs": 2, "batch_size": 20, "rate": 0.01, "device": "cpu", "quiet": True}
    return partial(se.learn_scales, model, graph, data, **common | settings)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[ScaledProgram]:
    """Let programs compute in float32, so that results can be compared; list them."""
    compiled: list[ScaledProgram] = []

    def compile_in_float32(network: nn.Module, *arguments: Any) -> ScaledProgram:
        compiled.append(ScaledProgram(compile_and_check(network, *arguments).program, network, bfloat16=False))
        return compiled[-1]

    compile_and_check = objective.compile_and_check
    monkeypatch.setattr(objective, "compile_and_check", compile_in_float32)
    return compiled


@pytest.mark.parametrize("placement", ["output", "norm"])
@pytest.mark.parametrize("name", ["resnet20", "half_vgg11", "lenet5"])
def test_programs_find_the_vectors_of_hooks(programs: list[ScaledProgram], name: str, placement: str) -> None:
    torch.manual_seed(0)
    data = pictures(size=32 if name != "resnet20" else 16)
    find = searching(getattr(se.zoo, name)(num_classes=3, in_channels=3), data, placement=placement)
    by_program, by_hooks = find(precision="bfloat16"), find(precision="float32")
    assert len(programs) == 1
    for group, vector in by_hooks.vectors.items():
        torch.testing.assert_close(by_program.vectors[group], vector, rtol=1e-4, atol=1e-4)
    for buffer, value in by_hooks.statistics.items():
        torch.testing.assert_close(by_program.statistics[buffer], value, rtol=1e-4, atol=1e-5)
    for row, expected in zip(by_program.history, by_hooks.history, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


def test_bfloat16_moves_vectors_little() -> None:
    torch.manual_seed(0)
    model, data = se.zoo.resnet20(num_classes=3), pictures()
    find = searching(model, data)
    narrow, exact = find(precision="bfloat16"), find(precision="float32")
    drawn = se.Scales.draw(se.trace(model, data.example()), 3)
    assert 0 < distance(narrow, exact) < 0.2 * distance(exact, drawn)


def test_checkpoints_are_of_one_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    find = searching(se.zoo.resnet20(num_classes=3), pictures(), checkpoint=tmp_path / "search.safetensors")
    assert find(precision="bfloat16").history == find(precision="bfloat16").history
    with pytest.raises(ValueError, match="differs in precision"):
        find(precision="float32")


def test_networks_without_a_program_are_searched_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    find = searching(with_draws(nn.RReLU()), pictures())
    narrow = find(precision="bfloat16")
    assert "the search computes in float32" in caplog.text
    assert "draws random numbers" in caplog.text
    caplog.clear()
    assert distance(narrow, find(precision="float32")) == 0


def test_a_search_with_dropout_is_a_program_and_depends_on_its_seed(programs: list[ScaledProgram]) -> None:
    torch.manual_seed(0)
    find = searching(with_draws(nn.Dropout(0.3)), pictures(), precision="bfloat16")
    first = find(seed=1)
    assert len(programs) == 1
    assert distance(first, find(seed=1)) == 0
    assert distance(first, find(seed=2)) > 0


def test_the_penalty_overlap_computes_in_float32(programs: list[ScaledProgram]) -> None:
    torch.manual_seed(0)
    find = searching(se.zoo.resnet20(num_classes=3), pictures(), diversity="overlap", epochs=1)
    assert distance(find(precision="bfloat16"), find(precision="float32")) == 0
    assert programs == []


def test_one_member_is_searched_in_float32(programs: list[ScaledProgram]) -> None:
    torch.manual_seed(0)
    find = searching(se.zoo.resnet20(num_classes=3), pictures(), members=1, epochs=1)
    assert distance(find(precision="bfloat16"), find(precision="float32")) == 0
    assert programs == []


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision must be one of"):
        searching(with_draws(nn.RReLU()), pictures())(precision="half")
