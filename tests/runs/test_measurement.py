"""Measurements of a run: figures of the validation split never mix with those of the test split."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from structured_ensembles.data.splits import take_samples
from structured_ensembles.paper.queue import KEPT, is_finished
from structured_ensembles.paper.sections import Planned
from structured_ensembles.runs import measurement
from structured_ensembles.runs.evaluations import RULES, evaluation_path, read_figures
from structured_ensembles.runs.experiment import Experiment, train_experiment
from structured_ensembles.runs.finished import read_run
from structured_ensembles.runs.ingredients import load_run_ensemble, read_data
from structured_ensembles.runs.measurement import Request, measure_experiment
from structured_ensembles.runs.samples import read_samples, write_samples

EXPERIMENT = Experiment("digits", "lenet5", "deep", members=2, changes={"epochs": 1, "keep": "last"}, limit=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "section" / EXPERIMENT.folder
    train_experiment(EXPERIMENT, folder, device="cpu", quiet=True)
    measure_experiment(folder, Request(), device="cpu")
    return folder


def test_validation_figures_are_those_of_the_validation_samples_alone(run: Path) -> None:
    before = {rule: read_figures(evaluation_path(run, rule)) for rule in RULES}
    planned = Planned("section", EXPERIMENT, Request(validation=True))
    assert is_finished(Planned("section", EXPERIMENT), run.parents[1])
    assert not is_finished(planned, run.parents[1])
    assert read_run(run).combined_by("mean", "validation") == {}
    figures, new = measure_experiment(run, planned.request, device="cpu")
    assert new
    assert is_finished(planned, run.parents[1])
    assert measure_experiment(run, planned.request, device="cpu")[1] is False
    after = {rule: read_figures(evaluation_path(run, rule)) for rule in RULES}
    assert after == before
    assert figures == before["mean"]

    data = read_data("digits", None, 0, limit=300)
    assert data.validation is not None
    inputs, targets = take_samples(data.validation, len(data.validation))
    logits = load_run_ensemble(run, EXPERIMENT.config(), data, False).logits(inputs).double()
    by_rule = {"mean": logits.softmax(-1).mean(0).log(), "logits": logits.mean(0)}  # (samples, classes)
    for rule in RULES:
        known = read_run(run).combined_by(rule, "validation")
        assert known["cal/nll"] == pytest.approx(float(cross_entropy(by_rule[rule], targets)), rel=1e-5)
        assert known["cls/accuracy"] == pytest.approx(float((by_rule[rule].argmax(-1) == targets).double().mean()))
        assert known["cal/nll"] != read_run(run).combined_by(rule)["cal/nll"]
        assert "size/overhead" in known
        fitted = [name for name in known if name.endswith("_t") or name.startswith(("unc/", "conf/"))]
        assert not fitted  # fitted to these samples
        assert evaluation_path(run, rule, "validation").name in KEPT


def test_figures_on_the_test_split_are_not_measured_again_for_those_on_the_validation_split(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for rule in RULES:
        evaluation_path(folder, rule, "validation").unlink(missing_ok=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(measurement, "_measure_test", lambda *_, **__: pytest.fail("it measures the test split again"))
    measure_experiment(folder, Request(validation=True), device="cpu")
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert not measurement.lacks_validation(folder, Request(validation=True))


def test_entropies_under_noise_stay_when_other_figures_are_measured(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    noisy = torch.rand(7)
    write_samples(folder, {**read_samples(folder), "noisy": noisy})
    measure_experiment(folder, Request(fgsm=(0.1,)), device="cpu")
    assert torch.equal(read_samples(folder)["noisy"], noisy)


def test_member_figures_are_those_of_each_member(run: Path) -> None:
    request = Request(members=True)
    assert not is_finished(Planned("section", EXPERIMENT, request), run.parents[1])
    figures, _ = measure_experiment(run, request, device="cpu")
    assert is_finished(Planned("section", EXPERIMENT, request), run.parents[1])
    data = read_data("digits", None, 0, limit=300)
    inputs, targets = take_samples(data.split("test"), len(data.split("test")))
    logits = load_run_ensemble(run, EXPERIMENT.config(), data, False).logits(inputs)
    for number in (0, 1):
        assert figures[f"member/{number}/nll"] == pytest.approx(float(cross_entropy(logits[number], targets)), rel=1e-4)
        correct = torch.eq(logits[number].argmax(-1), targets)
        assert figures[f"member/{number}/accuracy"] == pytest.approx(float(correct.double().mean()))
    assert figures["member/0/nll"] != figures["member/1/nll"]


def test_requests_join() -> None:
    assert Request(validation=True) | Request(fgsm=(0.1,), members=True) == Request(
        (0.1,), validation=True, members=True
    )
