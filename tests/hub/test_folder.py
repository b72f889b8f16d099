"""A shared folder holds the whole ensemble, and a model card with counted, fitted and measured numbers only."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import structured_ensembles as se

FIGURES = {"cls/accuracy": 0.91234567, "cal/nll": 0.25}


def make_ensemble() -> se.Ensemble:
    """Cut two halves out of a LeNet5, with everything that a file keeps."""
    torch.manual_seed(0)
    network = se.zoo.lenet5(num_classes=3)
    graph = se.trace(network, torch.rand(2, 1, 28, 28))
    subnets = se.select(graph, prune=0.5, selection="random", members=2)
    networks = [se.extract(network, graph, subnet) for subnet in subnets]
    ensemble = se.Ensemble(networks, subnets=subnets, classes=("cat", "dog|`x`", "bird"))
    ensemble.normalization = se.Normalization((0.4,), (0.2,))
    ensemble.input_shape, ensemble.pixels = (1, 28, 28), True
    ensemble.temperature, ensemble.threshold = 1.5, 0.875
    return ensemble.eval()


def test_a_folder_gives_the_same_ensemble_back(tmp_path: Path) -> None:
    ensemble = make_ensemble()
    assert ensemble.save_pretrained(tmp_path / "shared") == tmp_path / "shared"
    assert {path.name for path in (tmp_path / "shared").iterdir()} == {
        *("ensemble.safetensors", "config.json", "README.md")
    }
    loaded = se.Ensemble.from_pretrained(tmp_path / "shared")
    inputs = torch.rand(5, 1, 28, 28)
    assert torch.equal(loaded.predict_proba(inputs), ensemble.predict_proba(inputs))
    assert (loaded.classes, loaded.threshold, loaded.subnets) == (ensemble.classes, 0.875, ensemble.subnets)


def test_a_folder_is_written_again_in_place_and_in_fewer_bits(tmp_path: Path) -> None:
    ensemble = make_ensemble()
    ensemble.save_pretrained(tmp_path)
    size = (tmp_path / "ensemble.safetensors").stat().st_size
    ensemble.save_pretrained(str(tmp_path), dtype="int8", figures=FIGURES)
    assert (tmp_path / "ensemble.safetensors").stat().st_size < 0.6 * size
    assert json.loads((tmp_path / "config.json").read_text())["storage"] == "int8"
    assert "| `cls/accuracy` | 0.912346 |" in (tmp_path / "README.md").read_text()


def test_the_card_has_only_numbers_that_were_counted_fitted_or_handed_in(tmp_path: Path) -> None:
    ensemble = make_ensemble()
    ensemble.save_pretrained(tmp_path, figures=FIGURES, dataset="my *test* split")
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "structured-ensembles",
        "tags": ["ensemble", "uncertainty", "calibration"],
        "pipeline_tag": "image-classification",
    }
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, flags=re.MULTILINE))
    full = sum(parameter.numel() for parameter in se.zoo.lenet5(num_classes=3).parameters())
    assert rows["members"] == "2"
    assert rows["parameters of all members"] == f"{ensemble.num_parameters:,}"
    assert rows["parameters of the one network they were cut out of"] == f"{full:,}"
    assert rows["memory, in networks of that size"] == f"{ensemble.num_parameters / full:.3f}"
    assert rows["size of the file"].startswith(f"{(tmp_path / 'ensemble.safetensors').stat().st_size:,} bytes")
    assert (rows["temperature, rule `mean`"], rows["`cls/accuracy`"], rows["`cal/nll`"]) == ("1.5", "0.912346", "0.25")
    assert rows["entropy above which a prediction is discarded"] == "0.875"
    assert r"measured them on my \*test\* split" in text
    assert r"3 classes: cat, dog\|\`x\`, bird." in text
    assert "`(batch, 1, 28, 28)`" in text


def test_memory_on_the_card_counts_parameters_without_statistics(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    graph = se.trace(network, torch.rand(2, 4))
    subnets = se.select(graph, prune=0.5, selection="random", members=1)
    se.Ensemble([se.extract(network, graph, subnets[0])], subnets=subnets).save_pretrained(tmp_path)
    # 4·8 + 8, 8 + 8, 8·2 + 2 parameters; of eight neurons four are left, since ⌈0.5·7⌉ are removed
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", (tmp_path / "README.md").read_text(), flags=re.MULTILINE))
    assert rows["parameters of the one network they were cut out of"] == "74"
    assert rows["parameters of all members"] == str(4 * 4 + 4 + 4 + 4 + 4 * 2 + 2)


def test_a_card_without_figures_has_none(tmp_path: Path) -> None:
    se.Ensemble([se.zoo.mlp(4, num_classes=2)]).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "None were recorded" in card
    assert "## Calibration" not in card
    assert "cut out of" not in card


def test_the_cards_code_loads_the_ensemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ensemble().save_pretrained(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), flags=re.DOTALL)
    names = {"x": torch.rand(2, 1, 28, 28)}
    exec(code.replace("path/to/this/folder", str(tmp_path)), names)
    assert isinstance(names["ensemble"], se.Ensemble)


def test_an_own_network_is_loaded_with_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ensemble = se.Ensemble([nn.Linear(4, 2)]).eval()
    ensemble.save_pretrained(tmp_path)
    assert "model=your_network" in (tmp_path / "README.md").read_text()
    with pytest.raises(se.ArtifactError, match="pass one as model="):
        se.Ensemble.from_pretrained(tmp_path)
    loaded = se.Ensemble.from_pretrained(tmp_path, model=nn.Linear(4, 2))
    assert torch.equal(loaded.predict_proba(torch.ones(1, 4)), ensemble.predict_proba(torch.ones(1, 4)))


def test_folders_of_others_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(se.ArtifactError, match=r"has no ensemble\.safetensors"):
        se.Ensemble.from_pretrained(tmp_path)
    for text, reason in (
        ('{"model_type": "bert"}', r"describes a model of another library \('bert'\)"),
        ("[1]", "describes something else"),
        ("{", "is damaged"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(se.ArtifactError, match=reason):
            se.Ensemble.from_pretrained(tmp_path)


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    ensemble = make_ensemble()
    (tmp_path / "file").write_text("")
    for options, error, reason in (
        ({"folder": tmp_path / "file"}, ValueError, "is a file"),
        ({"figures": {"cls/accuracy": float("nan")}}, ValueError, "finite numbers by name, not nan"),
        ({"figures": [0.9]}, TypeError, "figures must be"),
        ({"dataset": 3}, TypeError, "dataset must be"),
        ({"dtype": "int4"}, ValueError, "dtype must be one of"),
    ):
        with pytest.raises(error, match=reason):
            ensemble.save_pretrained(**{"folder": tmp_path / "new", **options})
    assert not (tmp_path / "new").exists()


def test_a_readme_written_by_hand_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# My project")
    with pytest.raises(ValueError, match="is no model card of an ensemble"):
        make_ensemble().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
