"""`sens models --check`: the row of the user's own model."""

from pathlib import Path

import pytest

from structured_ensembles.cli.main import main

MINE = """
import torch
from torch import nn

def net(width=8):
    layers = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6, 4))

def pair():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)), torch.rand(2, 5)

def fixed():
    return nn.Linear(5, 4), torch.rand(2, 5)

def needy(width, depth):
    return nn.Linear(width, depth)

network = nn.Linear(5, 4)

def number():
    return 3

def unfitting():
    try:
        raise RuntimeError("operator torchvision::nms does not exist")  # as of a torchvision built for another torch
    except RuntimeError as error:
        raise ImportError("Could not import module") from error  # as transformers does
"""


@pytest.fixture(autouse=True)
def _own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models_of_mine.py").write_text(MINE)
    (tmp_path / "breaking.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.chdir(tmp_path)


def test_the_row_of_a_model_with_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "3", "9", "9", "--model-arguments", '{"width": 4}']
    assert main(["models", "--check", "models_of_mine:net", *arguments]) == 0
    header, _, row, _, verdict, reason = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["seconds", "peak", "MB", "groups", "parameters"]
    # 3·4·9 + 4, 4·6·9 + 6, 6·4 + 4 parameters; half of each width left: 3·2·9 + 2, 2·3·9 + 3, 3·4 + 4
    assert row.split()[2:6] == ["2/3", "362", "129", "layers"]
    assert verdict.startswith("The cut is exact")
    assert reason.strip() == "1 fixed: reaches the network's output"


def test_the_row_of_a_model_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--check", "models_of_mine:pair", "--prune", "0.25"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[2:5] == ["1/2", "34", "26"]
    assert main(["models", "--check", "models_of_mine:fixed"]) == 0
    assert "Nothing can be cut." in capsys.readouterr().out


def test_the_list_shows_types_without_their_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    (mlp,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mlp ")]
    assert mlp.endswith("(in_features: int, num_classes: int = 10, hidden: Sequence[int] = (256, 256))")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["models_of_mine:net"], "needs an example of its inputs: give --shape"),
        (["models_of_mine:number"], "must return a torch.nn.Module, or a pair of one and an example, not a int"),
        (["models_of_mine:needy"], "model 'models_of_mine:needy' takes the arguments width, depth, but was given none"),
        (["models_of_mine:network"], "model 'models_of_mine:network' is not a function"),
        (["models_of_mine:net", "--shape", "3", "0"], "--shape must be positive numbers"),
        (["models_of_mine:missing", "--shape", "3"], "cannot be imported"),
        (["models_of_mine:unfitting", "--shape", "3"], "torchvision was built for another version than torch"),
        (["breaking:net", "--shape", "3"], "does not exist'); the installed torchvision was built for another version"),
        (["resnet999", "--shape", "3"], "model must be one of"),
    ],
)
def test_what_cannot_be_checked_is_said(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--check", *words]) != 0
    assert told in capsys.readouterr().err


def test_a_model_that_cannot_be_followed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--check", "models_of_mine:net", "--shape", "7"]) == 0
    assert capsys.readouterr().out.startswith("The model cannot be traced: the model cannot be followed")


def test_a_file_may_name_a_model_to_check_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.yaml").write_text("check: models_of_mine:pair\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["models", "--config", "options.yaml"]) != 0
    assert "asks to import models_of_mine:pair as check" in capsys.readouterr().err
    assert main(["models", "--config", "options.yaml", "--trust-code"]) == 0
