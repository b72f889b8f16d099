"""Finished: a finished run, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from structured_ensembles.data.dataset import SplitName
from structured_ensembles.prediction.combination import Combine
from structured_ensembles.runs.evaluations import RULES, evaluation_path, read_figures
from structured_ensembles.runs.folder import read_config, read_history, read_result
from structured_ensembles.runs.samples import read_samples

PACKAGE = f"{__name__.partition('.')[0]}."
HIDDEN = ("epochs", "search_epochs", "cycle", "head", "optimizer", "rate", "batch_size")  # equal throughout a report


@dataclass(frozen=True)
class Finished:
    """Finished run: its configuration, its figures, and tensors of its single samples.

    figures: on the test split, of the members' mean probabilities.
    by_logits: the same of the softmax of their mean logits, where measured.
    validation: figures on the validation split by combination rule, where measured.
    """

    folder: Path
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    figures: Mapping[str, float]
    by_logits: Mapping[str, float] = field(default_factory=dict)
    validation: Mapping[Combine, Mapping[str, float]] = field(default_factory=dict)

    @cached_property
    def samples(self) -> dict[str, Tensor]:
        """Read the tensors of single samples, shapes (samples,); empty if they were not measured."""
        return read_samples(self.folder)

    @property
    def label(self) -> str:
        """Return the method with its non-default arguments; of a function of this package only the name."""
        settings = self.config.get("method_arguments", {}).items()
        shown = [
            f"{name}={value}" for name, value in settings if name not in HIDDEN and (name, value) != ("prune", 0.5)
        ]
        method = str(self.config["method"])
        return ", ".join([method.rpartition(":")[2] if method.startswith(PACKAGE) else method, *shown])

    def combined_by(self, rule: Combine, split: SplitName = "test") -> Mapping[str, float]:
        """Return its figures under a combination rule, "mean" or "logits", on the test or the validation split."""
        if split != "test":
            return self.validation.get(rule, {}) if split == "validation" else {}
        return self.by_logits if rule == "logits" else self.figures

    @cached_property
    def seconds(self) -> float:
        """Return the seconds of its training, see `read_run_seconds`."""
        return read_run_seconds(self.folder, self.result)

    @property
    def precision(self) -> str:
        """Return the precision of its training."""
        return str(self.result.get("precision", "a precision that was not recorded"))

    @property
    def setup(self) -> str:
        """Return "dataset/model", the setup that it belongs to."""
        return f"{self.config['dataset']}/{self.config['model']}"


def read_run(folder: Path) -> Finished:
    """Read a run folder of `sens train` or `sens reproduce`."""
    config, result = read_config(folder), read_result(folder)
    mean, logits = (read_figures(evaluation_path(folder, rule)) for rule in RULES)
    validation = {rule: read_figures(evaluation_path(folder, rule, "validation")) for rule in RULES}
    return Finished(folder, config, result, {**result["figures"], **mean}, logits, validation)


def read_run_seconds(folder: Path, result: Mapping[str, Any]) -> float:
    """Return the seconds of a run's training, or those of its epochs if they took longer. result: that of the run.

    They did where a run was resumed before there was `run_stopwatch`: its result has the seconds of its last start.
    """
    by_epoch = {row["epoch"]: float(row["seconds"] or 0) for row in read_history(folder, result)}
    return max(float(result["seconds"]), sum(by_epoch.values()))
