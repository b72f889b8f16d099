"""Forged records of networks that were cut in their graph, or lost groups: an ArtifactError on load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.artifact import FORMAT, VERSION
from structured_ensembles.storage.container import read_container, write_container


class Viewed(nn.Module):
    """A network whose code relies on 8 channels, with a grouped convolution and a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=4)
        self.norm, self.head = nn.GroupNorm(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.grouped(self.first(x)).view(-1, 8, 4, 4)).mean((2, 3)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Mapping[str, Any], Mapping[str, Tensor]]:
    model, path = Viewed(), tmp_path_factory.mktemp("cuts") / "cut.safetensors"
    graph = se.trace(model, torch.randn(2, 3, 4, 4))
    subnets = se.select(graph, prune=0.5, selection="random", members=1)
    se.Ensemble([se.extract(model, graph, subnet) for subnet in subnets]).save(path)
    return model, *read_container(path, FORMAT, VERSION, "an ensemble")


def load_forged(saved: Any, path: Path, field: str, keys: tuple[str, ...], value: Any) -> se.Ensemble:
    model, structure, tensors = saved
    structure = json.loads(json.dumps(structure))
    container = structure[field][0]
    for key in keys[:-1]:
        container = container[key]
    container[keys[-1]] = value
    write_container(path, FORMAT, VERSION, structure, dict(tensors))
    return se.Ensemble.load(path, model=model)


def test_the_file_itself_loads(saved: Any, tmp_path: Path) -> None:
    assert saved[1]["attributes"] == [{"grouped.groups": 2, "norm.num_groups": 2}]
    loaded = load_forged(saved, tmp_path / "same.safetensors", "cuts", ("options", "coupled"), False)
    assert loaded(torch.randn(7, 3, 4, 4)).shape == (1, 7, 2)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("subnet",), "[]"),
        (("subnet",), '[{"group": "first[groups]", "size": 4, "kept": [0, 9]}]'),
        (("subnet",), '[{"group": "first[groups]", "size": 4, "kept": [0]}]'),
        (("subnet",), 3),
        (("example",), None),
        (("example",), [[[2, 3, 4, 4], "float32"]] * 2),
        (("example",), [[[2, 3, 5, 5], "float32"]]),
        (("example",), [[[2, 3, 2**39, 2**39], "float32"]]),
        (("example",), [[[2, 3, -4, 4], "float32"]]),
        (("example",), [[[2, 3, 4, 4], "load"]]),
        (("options",), {}),
        (("options", "nested"), "os.system"),
        (("options", "graphs"), False),
    ],
)
def test_forged_cut_is_refused(keys: tuple[str, ...], value: Any, saved: Any, tmp_path: Path) -> None:
    with pytest.raises(se.ArtifactError, match="does not fit the base network"):
        load_forged(saved, tmp_path / "forged.safetensors", "cuts", keys, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("grouped.groups", value) for value in (0, -2, 3, 10**12, True, 2.0, "2", None)),
        *(("norm.num_groups", value) for value in (0, 3, 5)),
        ("grouped.stride", 2),
        ("grouped.weight", 1),
        ("__class__", 1),
        ("nowhere.groups", 1),
    ],
)
def test_forged_number_of_groups_is_refused(name: str, value: Any, saved: Any, tmp_path: Path) -> None:
    with pytest.raises(se.ArtifactError):
        load_forged(saved, tmp_path / "forged.safetensors", "attributes", (name,), value)
