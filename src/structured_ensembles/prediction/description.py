"""Text that `print` shows for an ensemble and for uncertainties: a line, or a small table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from structured_ensembles.calibration import Calibration
from structured_ensembles.calibration.conformal import ConformalSets
from structured_ensembles.common.plurals import counted
from structured_ensembles.common.tables import text_table

MAX_ROWS = 10  # samples of a table


def describe_ensemble(ensemble: Any) -> dict[str, str]:
    """Describe an ensemble in words, by topic: members, parameters, task, inputs, calibration."""
    kinds = Counter(type(member).__name__ for member in ensemble.members)
    names = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in kinds.items())
    parameters = f"{ensemble.num_parameters:,}"
    base = ensemble.base_parameters
    if base:
        ratio = ensemble.num_parameters / base
        parameters += f", {ratio:.2f} × those of the network that they were cut from"
    task = ensemble.task
    if ensemble.task == "classification" and ensemble.classes:
        task += f" of {counted(len(ensemble.classes), 'class')}"
    inputs = "any, as they are" if ensemble.input_shape is None else f"of shape {ensemble.input_shape}"
    return {
        "members": f"{len(ensemble)} ({names})",
        "parameters": parameters,
        "task": task,
        "inputs": inputs,
        "calibration": _describe_calibration(ensemble.calibration, ensemble.task),
    }


def _describe_calibration(calibration: Calibration, task: str) -> str:
    """Describe what was fitted to held-out samples."""
    fitted = []
    if task == "classification" and calibration.temperature("mean") != 1:
        fitted.append(f"temperature {calibration.temperature('mean'):.3g}")
    if calibration.threshold is not None:
        fitted.append(f"discards above an entropy of {calibration.threshold:.3g}")
    if calibration.conformal is not None:
        kind = "sets" if isinstance(calibration.conformal, ConformalSets) else "intervals"
        fitted.append(f"{kind} of {100 * calibration.conformal.coverage:g} %")
    return ", ".join(fitted) or "none yet"


def format_ensemble(ensemble: Any) -> str:
    """Write an ensemble as a small table."""
    lines = [f"  {topic:<12}{words}" for topic, words in describe_ensemble(ensemble).items()]
    return "\n".join(["Ensemble", *lines])


def format_ensemble_line(ensemble: Any) -> str:
    """Write an ensemble in a line."""
    words = describe_ensemble(ensemble)
    count = counted(ensemble.num_parameters, "parameter")
    if ensemble.base_parameters:
        count += f" ({ensemble.num_parameters / ensemble.base_parameters:.2f} × the base)"
    return f"Ensemble({words['members']}, {count}, {words['task']}, calibration: {words['calibration']})"


def format_uncertainty(measures: dict[str, Tensor]) -> str:
    """Write measures of samples, each of shape (samples,), as a table: the first samples, and the means over all."""
    samples = len(next(iter(measures.values())))
    rows = [
        (str(sample), *(f"{float(values[sample]):.3f}" for values in measures.values()))
        for sample in range(min(samples, MAX_ROWS))
    ]
    if samples > MAX_ROWS:
        rows.append(("…", *["–"] * len(measures)))
    rows.append(("mean", *(f"{float(values.double().mean()):.3f}" for values in measures.values())))
    return text_table(("sample", *(name.replace("_", " ") for name in measures)), rows)


def format_uncertainty_line(measures: dict[str, Tensor]) -> str:
    """Write the means of measures of samples, each of shape (samples,), in a line."""
    samples = len(next(iter(measures.values())))
    means = [f"{name.replace('_', ' ')} {float(values.double().mean()):.3f}" for name, values in measures.items()]
    return f"Uncertainty({counted(samples, 'sample')}, on average: {', '.join(means)})"
