"""docs/architecture.md, "… end to end": the functions that it names exist, and run in its order."""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.cuda import batch_norm, convolution, prediction_graphs, weight_gradient
from structured_ensembles.cuda.launch import empty
from tests.support.engines import use_engine
from tests.support.kernel_checks import here
from tests.support.paths import ROOT
from tests.support.programs import conv, norm

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PAGE, _, PREDICTION_PAGE = TEXT.partition("## One batch, end to end")[2].partition("## One prediction, end to end")
NAMED = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
PREDICTION = [NAMED.findall(text) for text in PREDICTION_PAGE.split("A step is")]
PREPARATION, STEP = (NAMED.findall(text) for text in PAGE.split("**A step**"))
ON_A_GPU = {"BatchDrawer.batch"}


@contextmanager
def recorded_calls(codes: dict[CodeType, str]) -> Iterator[list[str]]:
    """List the names of functions whenever they are called."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            calls.append(codes[frame.f_code])

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def code_of(path: str, name: str) -> CodeType:
    """Return the code of a function, a method or a class's `__init__`, without decorators such as `torch.no_grad`."""
    value: Any = importlib.import_module(f"structured_ensembles.{path.removesuffix('.py').replace('/', '.')}")
    for attribute in name.split("."):
        value = getattr(value, attribute)
    value = value.__init__ if isinstance(value, type) else value
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value.__code__  # type: ignore[no-any-return]


def zeros(*shape: int, like: Tensor, dtype: torch.dtype | None = None, channels_last: bool = False) -> Tensor:
    """Return what `cuda.launch.empty` does, filled."""
    return empty(*shape, like=like, dtype=dtype, channels_last=channels_last).zero_()


def small_network(width: int) -> nn.Module:
    layers = [conv(3, width), norm(width), nn.ReLU(), conv(width, 4), norm(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def test_no_step_swaps_anything() -> None:
    assert "swap" not in (PAGE + PREDICTION_PAGE).lower()
    assert len(PREPARATION) > 15
    assert len(STEP) > 10


@here
def test_the_functions_of_the_page_run_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small members of different widths, on a CPU, where kernels are not launched: their outputs are zeros."""
    codes = {code_of(path, name): f"{path}: {name}" for path, name in PREPARATION + STEP}
    monkeypatch.setattr(convolution, "fits", lambda x, weight, window: x.dtype == torch.float32)
    monkeypatch.setattr(batch_norm, "fits", lambda x, members: x.dim() == 4 and x.dtype == torch.float32)
    for module in (convolution, weight_gradient, batch_norm):
        monkeypatch.setattr(module, "launch", lambda *_arguments, **_constants: None)
        monkeypatch.setattr(module, "empty", zeros)
    use_engine(monkeypatch, "graph")
    images = torch.randint(0, 256, (4, 3, 6, 6), dtype=torch.uint8)
    data = se.Data.from_arrays(images, torch.arange(4), validation=0.0)
    networks = [small_network(width) for width in (5, 6)]
    recipe = se.Recipe(epochs=1, batch_size=4, augmentation="none")
    with recorded_calls(codes) as calls:
        history = se.train(se.Ensemble(networks), data, recipe, "cpu", quiet=True)
    assert history.fallbacks == []
    begin = calls.index("training/program_runner.py: ProgramRunner.train_step")
    for named, section in ((PREPARATION, calls[:begin]), (STEP, calls[begin:])):
        listed = [f"{path}: {name}" for path, name in named if name not in ON_A_GPU]
        assert list(dict.fromkeys(call for call in section if call in listed)) == listed


@here
def test_the_functions_of_a_prediction_run_in_the_order_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {code_of(path, name): f"{path}: {name}" for path, name in PREDICTION[0] + PREDICTION[1]}
    ensemble = se.Ensemble([small_network(width) for width in (7, 8)]).eval()
    x = torch.randn(4, 3, 6, 6)
    monkeypatch.setattr(prediction_graphs, "COMPILE_AFTER", 5)
    with torch.no_grad():
        for _ in range(4):
            ensemble.replays.replay(ensemble, x)
        monkeypatch.setattr(convolution, "fits_prediction", lambda x, weight, window: x.dtype == torch.float32)
        with recorded_calls(codes) as calls:
            outputs = ensemble.replays.replay(ensemble, x)
    begin = calls.index("cuda/prediction.py: MemberPredictions.outputs")
    for named, section in zip(PREDICTION, (calls[:begin], calls[begin:]), strict=True):
        listed = [f"{path}: {name}" for path, name in named]
        assert list(dict.fromkeys(call for call in section if call in listed)) == listed
    assert outputs is not None
    torch.testing.assert_close(outputs, torch.stack([member(x) for member in ensemble.members]), rtol=0.01, atol=0.01)
