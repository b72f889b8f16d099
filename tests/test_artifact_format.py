"""docs/format.md describes the file completely, and its script reads one with torch and safetensors alone."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import structured_ensembles as se
from structured_ensembles.artifact import FORMAT, VERSION
from structured_ensembles.calibration import Calibration
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def rows(title: str) -> list[list[str]]:
    """Return the cells of the first table after a text of the page, without its header."""
    table = PAGE[PAGE.index(title) :].split("\n|---", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]


def first_codes(title: str) -> set[str]:
    """Return the names in the first column of a table."""
    return {row[0].strip("`") for row in rows(title)}


@pytest.fixture(scope="module")
def resnets() -> se.Ensemble:
    """Cut two members out of a ResNet20, residual sums too, as if they had been trained."""
    torch.manual_seed(0)
    base = se.zoo.resnet20(num_classes=4)
    graph = se.trace(base, torch.rand(2, 3, 16, 16), coupled=True)
    subnets = se.select(graph, prune=0.5, selection="random", members=2)
    networks = [se.extract(base, graph, subnet) for subnet in subnets]
    ensemble = se.Ensemble(networks, subnets=subnets, classes=tuple("abcd"))
    ensemble.normalization = se.Normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    ensemble.input_shape, ensemble.pixels = (3, 16, 16), True
    for network in networks:  # statistics other than 0 and 1
        network.train()(torch.randn(16, 3, 16, 16))
    return ensemble.eval()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_script_predicts_what_the_library_predicts(
    resnets: se.Ensemble, dtype: Any, temperature: float, tmp_path: Path
) -> None:
    resnets.temperature = temperature
    path = tmp_path / "e.safetensors"
    resnets.save(path, dtype)
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    save_file({"images": images}, tmp_path / "images.safetensors")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    program = (
        "import sys; sys.path.insert(0, '.'); sys.modules['structured_ensembles'] = None; import script, torch; "
        "from safetensors.torch import load_file, save_file; torch.set_num_threads(1); "
        "images = load_file('images.safetensors')['images']; "
        "save_file({'p': script.probabilities('e.safetensors', images)}, 'out.safetensors')"
    )
    if (dtype, temperature) == ("int8", 1.7):  # once in a process of its own, where our package cannot be imported
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
        with safe_open(tmp_path / "out.safetensors", "pt") as file:
            found_probabilities = file.get_tensor("p")
    else:
        names: dict[str, Any] = {}
        exec(SCRIPT, names)
        found_probabilities = names["probabilities"](path, images)
    expected = se.Ensemble.load(path).predict_proba(images)
    torch.testing.assert_close(found_probabilities, expected, atol=1e-6, rtol=0)
    assert expected.std() > 0.01  # they are not all alike


def test_the_script_has_about_forty_lines_and_imports_two_packages() -> None:
    lines = [line for line in SCRIPT.splitlines() if line.strip()]
    assert len(lines) <= 45
    assert set(re.findall(r"^(?:import|from) ([a-z, ]+?)(?:\.| import|$)", SCRIPT, flags=re.MULTILINE)) == {
        *("hashlib, json", "torch", "safetensors")
    }


def test_the_script_refuses_damaged_and_newer_files(resnets: se.Ensemble, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(SCRIPT, names)
    path = tmp_path / "e.safetensors"
    resnets.save(path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    newer = re.sub(rb'\\"version\\": \d', rb'\\"version\\": 9', path.read_bytes())
    assert newer != path.read_bytes()
    (tmp_path / "newer").write_bytes(newer)
    for name in ("damaged", "newer"):
        with pytest.raises(ValueError, match="is damaged, or holds what this script does not know"):
            names["read"](tmp_path / name)


def varied_ensembles() -> list[se.Ensemble]:
    """Make ensembles that need, together, every field that a file can have."""
    torch.manual_seed(0)
    converted = BatchEnsembleNetwork(nn.Sequential(nn.Linear(4, 2)), ["0"], members=2)
    regression = se.Ensemble([nn.Linear(4, 2)], task="regression", gaussian=True)
    regression.units = se.data.target_scaling.Units((1.0,), 2.0)
    grouped = se.Ensemble([nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 2))])
    several = se.Ensemble([nn.Linear(4, 2)])
    several.input_kinds, several.input_shape = ("floats", "mask"), ((4,), (4,))
    return [se.Ensemble([converted]), regression, grouped, several, graph_cut()]


def graph_cut() -> se.Ensemble:
    """Make an ensemble whose member was cut in its exported graph."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.hidden(x).view(-1, 8).relu())

    model = Reader()
    graph = se.trace(model, torch.rand(2, 6))
    subnets = se.select(graph, prune=0.5, selection="random", members=1)
    return se.Ensemble([se.extract(model, graph, subnets[0])])


def saved_structure(ensemble: se.Ensemble, path: Path) -> tuple[int, dict[str, Any]]:
    """Save an ensemble; return the version and the structure that its file has."""
    ensemble.save(path)
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == [FORMAT]
        envelope = json.loads(file.metadata()[FORMAT])
    assert set(envelope) == first_codes("**envelope**")
    return envelope["version"], json.loads(envelope["structure"])


@pytest.mark.filterwarnings("ignore:the file cannot say")
def test_the_page_names_every_field_and_the_version_that_introduced_it(resnets: se.Ensemble, tmp_path: Path) -> None:
    since = {row[0].strip("`"): int(row[1]) for row in rows("## Structure")}
    seen: set[str] = set()
    resnets.temperature = 1.5
    for ensemble in [resnets, *varied_ensembles()]:
        version, structure = saved_structure(ensemble, tmp_path / "e.safetensors")
        assert version == max(since[name] for name in structure)
        assert {name for name in since if since[name] == 1} <= structure.keys()
        seen |= structure.keys()
    assert seen == since.keys()
    assert max(since.values()) == VERSION == int(rows("## Versions")[-1][0])


def test_the_page_names_every_field_of_a_calibration_and_every_encoding() -> None:
    assert set(Calibration().to_json()) == first_codes("`calibration`:\n")
    assert first_codes("| encoding (`storage`)") == {"float32", "float16", "int8"}
