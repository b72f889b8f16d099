"""on_epoch=: a function called after every epoch, with what the history has of it."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.methods import METHODS
from structured_ensembles.training.checkpoint import load_checkpoint

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "loggers.md"
RECIPE = se.Recipe(epochs=4, batch_size=64, rate=0.05)


def some_data() -> se.Data:
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    return se.Data.from_arrays(x, (x.sum(1) > 0).long())


def networks(number: int = 2) -> list[nn.Module]:
    torch.manual_seed(0)
    return [se.zoo.mlp(6, 2, hidden=(8,)) for _ in range(number)]


def test_on_epoch_gets_the_rows_of_the_history() -> None:
    rows: list[se.EpochRow] = []
    history = se.train(se.Ensemble(networks()), some_data(), RECIPE, quiet=True, on_epoch=rows.append)
    assert [row.epoch for row in rows] == [0, 1, 2, 3]
    for row in rows:
        for member in (0, 1):
            kept = history.of(member)[row.epoch]
            assert row.rate == kept["rate"]
            assert row.seconds == kept["seconds"]
            assert row.losses[member] == kept["loss"]
            assert row.validation_losses[member] == kept["validation_loss"]
            assert row.validation_accuracies[member] == kept["validation_accuracy"]
    assert history.epoch(2) == rows[2]
    with pytest.raises(ValueError, match="epoch must be one of the 4 that were trained, from 0, not 4"):
        history.epoch(4)


def test_figures_are_plain_numbers_by_name() -> None:
    row = se.EpochRow(3, 0.1, {0: 1.5, 2: 2.5}, {0: None, 2: None}, {0: 0.5, 2: 0.25}, 7.0)
    assert row.figures() == {
        "rate": 0.1,
        "seconds": 7.0,
        "loss/0": 1.5,
        "loss/2": 2.5,
        "validation_accuracy/0": 0.5,
        "validation_accuracy/2": 0.25,
    }


def test_stopped_member_is_missing_from_later_rows() -> None:
    class Diverging(nn.Module):
        """Trains on NaN from its second epoch on: the training split has three batches."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.passes = nn.Linear(6, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += self.training
            outputs: torch.Tensor = self.layer(x)
            return outputs * (torch.nan if self.training and self.passes > 3 else 1.0)

    data, rows = some_data(), []
    assert data.num_batches("train", RECIPE.batch_size) == 3
    with pytest.warns(UserWarning, match="member 1 stops"):
        se.train(se.Ensemble([*networks(1), Diverging()]), data, RECIPE, quiet=True, on_epoch=rows.append)
    assert [sorted(row.losses) for row in rows] == [[0, 1], [0, 1], [0], [0]]


def test_exception_of_on_epoch_propagates_after_the_checkpoint(tmp_path: Path) -> None:
    class Enough(Exception):  # noqa: N818
        pass

    def stop(row: se.EpochRow) -> None:
        if row.epoch == 1:
            raise Enough

    data, path, later = some_data(), tmp_path / "checkpoint.safetensors", []
    with pytest.raises(Enough):
        se.train(se.Ensemble(networks()), data, RECIPE, checkpoint=path, quiet=True, on_epoch=stop)
    loaded = load_checkpoint(path)
    assert loaded is not None
    assert loaded[1]["epoch"] == 2
    resumed, uninterrupted = se.Ensemble(networks()), se.Ensemble(networks())
    se.train(resumed, data, RECIPE, checkpoint=path, quiet=True, on_epoch=later.append)
    assert [row.epoch for row in later] == [2, 3]  # the new ones only
    se.train(uninterrupted, data, RECIPE, quiet=True)
    assert all(torch.equal(tensor, uninterrupted.state_dict()[name]) for name, tensor in resumed.state_dict().items())


def test_only_the_first_process_calls_on_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    from structured_ensembles.common import processes

    rows: list[se.EpochRow] = []
    monkeypatch.setattr(processes, "rank", lambda: 1)
    se.train(se.Ensemble(networks()), some_data(), RECIPE, quiet=True, on_epoch=rows.append)
    assert rows == []


@pytest.mark.parametrize("method", METHODS)
def test_every_method_passes_on_epoch(method: str) -> None:
    rows: list[se.EpochRow] = []
    arguments = {"search_epochs": 1} if method == "structured" else {}
    ensemble = METHODS[method](
        networks(1)[0], some_data(), members=2, recipe=RECIPE, quiet=True, on_epoch=rows.append, **arguments
    )
    epochs = 8 if method == "taught" else 4  # the teacher's come first
    assert [row.epoch for row in rows] == list(range(epochs))
    assert ensemble.history is not None
    assert rows == [ensemble.history.epoch(number) for number in range(epochs)]


def test_on_epoch_that_is_not_callable_is_refused_before_any_work() -> None:
    wrong: Any = "tensorboard"
    for work in (
        lambda: se.train(se.Ensemble(networks()), some_data(), RECIPE, on_epoch=wrong),
        lambda: se.structured_ensemble(networks(1)[0], some_data(), recipe=RECIPE, on_epoch=wrong),
    ):
        with pytest.raises(TypeError, match="on_epoch must be a function of an EpochRow, such as print, not 'tensor"):
            work()


# The how-to ---------------------------------------------------------------------------------------------------------


class Logger:
    """Stands for a run or writer of any of the three; keeps what it is given."""

    def __init__(self, logged: list[tuple[str, float, int]]) -> None:
        self.logged = logged
        self.summary: dict[str, float] = {}  # figures of the whole run

    def __enter__(self) -> "Logger":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:  # as SummaryWriter has it
        self.logged.append((tag, scalar_value, global_step))

    def add_hparams(self, hparam_dict: dict[str, float], metric_dict: dict[str, float]) -> None:
        self.summary |= metric_dict

    def log(self, data: dict[str, float], step: int | None = None) -> None:  # as wandb's Run and MLflow have it
        if step is None:
            self.summary |= data
        else:
            self.logged += [(name, value, step) for name, value in data.items()]


def tensorboard(logger: Logger) -> dict[str, Any]:
    return {"SummaryWriter": lambda log_dir: logger}


def mlflow(logger: Logger) -> dict[str, Any]:
    return {
        "start_run": lambda: logger,
        "log_params": lambda params: None,
        "log_metrics": logger.log,
        "log_artifact": se.Ensemble.load,
    }


def wandb(logger: Logger) -> dict[str, Any]:
    return {"init": lambda project, config: logger}


@pytest.mark.parametrize(
    ("title", "module", "fake"),
    [
        ("TensorBoard", "torch.utils.tensorboard", tensorboard),
        ("MLflow", "mlflow", mlflow),
        ("Weights & Biases", "wandb", wandb),
    ],
)
def test_how_to_code_logs_every_figure(
    title: str, module: str, fake: Callable[[Logger], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # the code writes files
    text = HOW_TO.read_text(encoding="utf-8")
    first, code = (
        re.search(r"```python[^\n]*\n(.*?)```", section, re.DOTALL)
        for section in (text, text.partition(f"## {title}")[2])
    )
    assert first is not None
    assert code is not None
    logged: list[tuple[str, float, int]] = []
    stand_in = ModuleType(module)
    logger = Logger(logged)
    vars(stand_in).update(fake(logger))
    monkeypatch.setitem(sys.modules, module, stand_in)
    names: dict[str, Any] = {}
    exec(first[1], names)
    exec(code[1], names)
    assert logger.summary["cls/accuracy"] == se.evaluate(names["ensemble"], names["data"])["cls/accuracy"]
    figures = {"rate", "seconds"}
    figures |= {f"{figure}/{n}" for figure in ("loss", "validation_loss", "validation_accuracy") for n in (0, 1)}
    assert {(name, step) for name, _, step in logged} == {(name, step) for name in figures for step in range(3)}
    assert all(isinstance(value, float) for _, value, _ in logged)
