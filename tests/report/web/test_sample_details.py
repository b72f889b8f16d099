"""Details of single samples: equal to what the ensemble and `evaluate` say, kept in a run folder, checked when read."""

import base64
import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.report.web.sample_details import (
    FILE,
    SampleDetails,
    encode_picture,
    measure_details,
    measure_run_details,
    read_details,
)


@pytest.fixture(scope="module")
def data() -> se.Data:
    return se.load_data("digits")


@pytest.fixture(scope="module")
def ensemble(data: se.Data) -> se.Ensemble:
    """Train three members for an epoch, so that there is something to be unsure of."""
    torch.manual_seed(0)
    networks = [torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)) for _ in range(3)]
    trained = se.Ensemble(networks)
    se.train(trained, data, recipe=se.Recipe.named("modern", epochs=2), seed=0, quiet=True)
    trained.conformal(data, coverage=0.9)
    return trained


@pytest.fixture(scope="module")
def details(ensemble: se.Ensemble, data: se.Data) -> SampleDetails:
    return measure_details(ensemble, data)


def test_samples_are_the_most_uncertain_discarded_and_kept(
    details: SampleDetails, ensemble: se.Ensemble, data: se.Data
) -> None:
    test = data.split("test")
    entropy = ensemble.uncertainty(test).entropy.double()
    keep = ensemble.keep(test)
    for kept in (False, True):
        shown = [sample for sample in details.samples if sample.kept == kept]
        expected = entropy[keep == kept].sort(descending=True).values[:12]
        assert [sample.entropy for sample in shown] == pytest.approx(expected.tolist())
    labels, sets = ensemble.predict(test), ensemble.predict_set(test)
    logits = torch.cat([ensemble.logits(inputs) for inputs, _ in test.batches(512)], 1)
    targets = torch.cat([targets for _, targets in test.batches(512)])
    for sample in details.samples:
        assert sample.guess == data.classes[int(labels[sample.number])]
        assert sample.truth == data.classes[int(targets[sample.number])]
        assert sample.right == (sample.guess == sample.truth)
        votes = logits[:, sample.number].argmax(-1)
        assert [vote.name for vote in sample.votes] == [data.classes[int(vote)] for vote in votes]
        assert sample.names == tuple(data.classes[label] for label in sets[sample.number].nonzero().flatten().tolist())


def test_output_without_a_class_is_named_by_its_number() -> None:
    """A network may have more outputs than there are classes; guesses, votes and sets may name them."""
    pixels = torch.randint(0, 256, (60, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(60) % 2
    data = se.Data.from_arrays(pixels, labels, test=(pixels[:20], labels[:20]), classes=["cat", "dog"])
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
    torch.nn.init.zeros_(network[1].weight)
    with torch.no_grad():
        network[1].bias.copy_(torch.tensor([1.0, 0.0, 0.0, 2.0]))
    ensemble = se.Ensemble([network])
    ensemble.adopt(data)
    ensemble.conformal(data, 0.8)
    details = measure_details(ensemble, data)
    assert {(sample.guess, sample.votes[0].name) for sample in details.samples} == {("3", "3")}
    assert {"cat", "dog", "3"} <= {name for sample in details.samples for name in sample.names or ()}


def test_reliability_and_coverage_equal_the_evaluation(
    details: SampleDetails, ensemble: se.Ensemble, data: se.Data
) -> None:
    figures = se.evaluate(ensemble, data)
    assert details.after is not None
    samples = len(data.split("test"))
    # Bins of fewer than five samples are left out, and there are ten of them where the ECE has thirty.
    assert 0.95 * samples < sum(one.samples for one in details.before) <= samples
    right = sum(one.accuracy * one.samples for one in details.before)
    assert right / samples == pytest.approx(figures["cls/accuracy"], abs=0.03)
    assert [one.promised for one in details.coverages] == sorted(one.promised for one in details.coverages)
    promised = next(one for one in details.coverages if one.promised == 0.9)
    assert promised.observed == pytest.approx(figures["conf/coverage"])
    assert promised.size == pytest.approx(figures["conf/size"])
    assert details.temperature == ensemble.temperature != 1


def test_pictures_are_the_pixels() -> None:
    grey = torch.arange(64, dtype=torch.uint8).view(1, 8, 8)
    decoded = Image.open(io.BytesIO(base64.b64decode(encode_picture(grey).partition(",")[2])))
    assert np.array_equal(np.array(decoded), grey[0].numpy())
    large = Image.open(io.BytesIO(base64.b64decode(encode_picture(torch.rand(3, 200, 100)).partition(",")[2])))
    assert large.size == (48, 96)


def test_details_are_measured_once_per_run_and_damaged_ones_left_out(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", "--out", str(run), "--model", "mlp", "--members", "2", "--method", "deep"]
    assert main([*command, "--epochs", "1", "--quiet"]) == 0
    assert read_details(run) is None
    measured = measure_run_details(run)
    assert read_details(run) == measured
    content = json.loads((run / FILE).read_text())
    del content["sha256"]
    content["samples"][0]["picture"] = "https://evil.example/p.png"
    (run / FILE).write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="a picture is not a PNG"):
        assert read_details(run) is None
    for damage in ('{"temperature": "high"}', "[]", '{"samples": 3'):
        (run / FILE).write_text(damage)
        with pytest.warns(UserWarning, match="is left out"):
            assert read_details(run) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert measure_run_details(run) == measured  # measured again
    assert read_details(run) == measured
