"""The deep-ensemble equivalent: how many members of a deep ensemble have the same NLL."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, logsumexp

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.evaluation import deep_ensemble_equivalent
from structured_ensembles.report.deep_equivalents import compute_deep_equivalents
from structured_ensembles.runs.finished import Finished
from structured_ensembles.runs.measurement import Request, measure_experiment


@pytest.mark.parametrize(
    ("nll", "members"),
    [
        (0.6, 1.0),  # worse than one network
        (0.5, 1.0),
        (0.45, 1.5),
        (0.4, 2.0),
        (0.325, 2.75),
        (0.3, 3.0),
        (0.29, math.inf),  # better than all of them
    ],
)
def test_equivalent_is_linear_between_numbers_of_members(nll: float, members: float) -> None:
    assert deep_ensemble_equivalent(nll, [0.5, 0.4, 0.3]) == pytest.approx(members)


def test_equivalent_is_the_smallest_number_if_nll_is_not_monotonic() -> None:
    nlls = [0.5, 0.4, 0.45, 0.3]
    assert deep_ensemble_equivalent(0.4, nlls) == 2
    assert deep_ensemble_equivalent(0.43, nlls) == pytest.approx(1.7)
    assert deep_ensemble_equivalent(0.36, nlls) == pytest.approx(3.6)  # from .45 at 3 to .30 at 4
    assert deep_ensemble_equivalent(0.5, [0.5]) == 1
    assert deep_ensemble_equivalent(0.4, [0.5]) == math.inf
    for wrong in ([], [0.5, math.nan]):
        with pytest.raises(ValueError, match="deep_nlls must be the NLL of 1, 2"):
            deep_ensemble_equivalent(0.4, wrong)


@pytest.fixture(scope="module")
def digits() -> se.Data:
    full = se.load_data("digits")
    return se.Data.from_arrays(
        full.train.inputs, full.train.targets, test=(full.test.inputs, full.test.targets), validation=0.3
    )


def trained(data: se.Data, members: int, seed: int) -> se.Ensemble:
    torch.manual_seed(seed)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(members)])
    se.train(ensemble, data, se.Recipe(epochs=3), "cpu", seed=seed, quiet=True)
    return ensemble


def calibrated_nll(ensemble: se.Ensemble, data: se.Data, members: int) -> float:
    """Fit a temperature with a prior on the validation split by SciPy; return the NLL on the test split."""

    def logs(split: Any) -> tuple[np.ndarray, np.ndarray]:
        logits = ensemble.logits(split.inputs[split.index])[:members].double().numpy()
        return logsumexp(log_softmax(logits, -1), 0) - np.log(members), split.targets[split.index].numpy()

    def nll(temperature: float, scores: np.ndarray, labels: np.ndarray) -> float:
        return -float(log_softmax(scores / temperature, -1)[np.arange(len(labels)), labels].mean())

    def cost(temperature: float, scores: np.ndarray, labels: np.ndarray) -> float:
        prior = 8 if (scores.argmax(-1) != labels).sum() < 3 else 0
        return len(labels) * nll(temperature, scores, labels) + prior * (1 / temperature - 1 + math.log(temperature))

    optimum = minimize_scalar(cost, bounds=(0.05, 20), args=logs(data.validation), method="bounded")
    return nll(optimum.x, *logs(data.test))


def test_evaluate_gives_the_deep_ensemble_equivalent(digits: se.Data) -> None:
    deep, other = trained(digits, 4, 3), trained(digits, 2, 7)
    sizes = np.linspace(1, 4, 30001)
    nlls = np.interp(sizes, [1, 2, 3, 4], [calibrated_nll(deep, digits, members) for members in (1, 2, 3, 4)])
    first_two = se.Ensemble(list(deep.members)[:2])
    for ensemble in (other, first_two, deep):
        as_good = sizes[nlls <= calibrated_nll(ensemble, digits, len(ensemble)) + 1e-7]
        expected = as_good[0] if len(as_good) else math.inf
        figures = se.evaluate(ensemble, digits, deep=deep)
        assert figures["cal/deep_equivalent"] == pytest.approx(expected, abs=2e-3)
    assert "cal/deep_equivalent" not in se.evaluate(other, digits)


def test_invalid_deep_nlls_are_errors_before_any_work(digits: se.Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object) -> None:
        raise AssertionError("work has started")

    monkeypatch.setattr(se.Ensemble, "logits", work)
    ensemble, x = se.Ensemble([se.zoo.mlp(64)]), torch.rand(9, 64)
    with pytest.raises(TypeError, match="deep must be"):
        se.evaluate(ensemble, digits, deep=[se.zoo.mlp(64)])
    with pytest.raises(ValueError, match="votes have no temperature"):
        se.evaluate(ensemble, digits, combine="vote", deep=ensemble)
    y = torch.arange(9) % 3
    alone = se.Data.from_arrays(x, y, test=(x, y), validation=0.0)
    with pytest.raises(ValueError, match="deep needs data with a validation split"):
        se.evaluate(ensemble, alone, deep=ensemble)
    values = se.Data.from_arrays(x, torch.rand(9), test=(x, torch.rand(9)))
    with pytest.raises(ValueError, match="left out for a regression"):
        se.evaluate(se.Ensemble([se.zoo.mlp(64)], task="regression"), values, deep=ensemble)


def run(method: str, seed: int, nlls: list[float], **changes: Any) -> Finished:
    config = {"dataset": "d", "model": "m", "method": method, "method_arguments": {}, "seed": seed, "recipe": "modern"}
    figures = {f"first/{number}/nll_t": nll for number, nll in enumerate(nlls, start=1)}
    return Finished(Path(), {**config, **changes}, {}, {**figures, "size/members": float(len(nlls))})


def test_deep_equivalents_compare_means_over_seeds_of_one_recipe() -> None:
    deep = [run("deep", 0, [0.5, 0.42, 0.3]), run("deep", 1, [0.5, 0.38, 0.3])]  # .5, .4, .3
    runs = {
        "deep": deep,
        "structured": [run("structured", 0, [0.6, 0.37]), run("structured", 1, [0.6, 0.33])],
        "single": [run("single", 0, [0.5])],
        "other recipe": [run("structured", 0, [0.6, 0.35], recipe="paper")],
        "not measured": [Finished(Path(), deep[0].config, {}, {"size/members": 3.0})],
    }
    assert compute_deep_equivalents(runs) == pytest.approx({"deep": 3, "structured": 2.5, "single": 1})
    assert compute_deep_equivalents({name: seed_runs for name, seed_runs in runs.items() if name != "deep"}) == {}


def test_report_shows_deep_ensemble_equivalents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = []
    for method, members in (("single", 1), ("deep", 3)):
        folders.append(str(tmp_path / method))
        options = ["--method", method, "--members", str(members), "--epochs", "2", "--device", "cpu"]
        assert main(["train", "--dataset", "digits", "--model", "mlp", *options, "--out", folders[-1]]) == 0
    nlls = {}
    for folder in folders:
        figures, _ = measure_experiment(Path(folder), Request(), device="cpu")
        members = range(1, int(figures["size/members"]) + 1)
        nlls[Path(folder).name] = [figures[f"first/{number}/nll_t"] for number in members]
        assert nlls[Path(folder).name][-1] == pytest.approx(figures["cal/nll_t"], rel=1e-5)
    assert main(["report", *folders, "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "how many members of the deep ensemble have the same NLL" in text
    header, _, *rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    column = next(number for number, cell in enumerate(header) if "deep-ensemble equivalent" in cell)
    shown = {row[1].strip(): row[column].strip().strip("*") for row in rows}
    assert shown == {name: f"{deep_ensemble_equivalent(curve[-1], nlls['deep']):.2f}" for name, curve in nlls.items()}
