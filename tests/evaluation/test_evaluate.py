"""evaluate(): metrics against scikit-learn and loops, one forward pass, errors before any work."""

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch import nn

import structured_ensembles as se
from structured_ensembles.evaluation.calibration import (
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
)
from structured_ensembles.evaluation.discarding import fit_discard_threshold


def ece_by_loop(probabilities: torch.Tensor, targets: torch.Tensor, bins: int) -> float:
    total = 0.0
    for index in range(bins):
        low, high = index / bins, (index + 1) / bins
        inside = [
            i
            for i, row in enumerate(probabilities.double())
            if (low < row.max() <= high) or (index == 0 and row.max() == 0)
        ]
        if inside:
            confidence = np.mean([float(probabilities[i].double().max()) for i in inside])
            accuracy = np.mean([int(probabilities[i].argmax()) == int(targets[i]) for i in inside])
            total += len(inside) / len(targets) * abs(confidence - accuracy)
    return total


@pytest.mark.parametrize("bins", [15, 30])
def test_ece_equals_a_loop_over_bins(bins: int) -> None:
    probabilities = (3 * torch.randn(200, 5)).softmax(-1)
    targets = torch.randint(0, 5, (200,))
    assert expected_calibration_error(probabilities, targets, bins) == pytest.approx(
        ece_by_loop(probabilities, targets, bins)
    )


def test_ece_of_edge_cases() -> None:
    right, wrong = torch.tensor([0, 0]), torch.tensor([1, 1])
    certain = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert expected_calibration_error(certain, right) == 0
    assert expected_calibration_error(certain, wrong) == 1
    assert expected_calibration_error(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), bins=2) == pytest.approx(0.5)
    # Exactly on an edge: 0.5 belongs to (0, 0.5], so that both samples share no bin with 0.6.
    probabilities = torch.tensor([[0.5, 0.5], [0.6, 0.4]], dtype=torch.float64)
    assert expected_calibration_error(probabilities, torch.tensor([0, 1]), bins=2) == pytest.approx((0.5 + 0.6) / 2)
    assert expected_calibration_error(torch.ones(3, 1), torch.zeros(3, dtype=torch.long)) == 0
    assert (
        expected_calibration_error(torch.zeros(4, 2), torch.tensor([0, 0, 1, 1])) == 0.5
    )  # confidence 0: the first bin


def test_nll_and_brier_equal_scikit_learn() -> None:
    probabilities = torch.randn(100, 4, dtype=torch.float64).softmax(-1)
    targets = torch.randint(0, 4, (100,))
    assert negative_log_likelihood(probabilities, targets) == pytest.approx(
        log_loss(targets, probabilities, labels=range(4))
    )
    truth = torch.nn.functional.one_hot(targets, 4)
    expected = sum(brier_score_loss(truth[:, label], probabilities[:, label]) for label in range(4))
    assert brier_score(probabilities, targets) == pytest.approx(expected)
    assert negative_log_likelihood(torch.tensor([[0.0, 1.0]]), torch.tensor([0])) < 100  # finite


def test_evaluate_equals_its_separate_metrics() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(3)])
    ensemble.adopt(data)
    figures = se.evaluate(ensemble, data)
    x, y = data.test.inputs, data.test.targets
    probabilities = ensemble.predict_proba(x)
    assert figures["cls/accuracy"] == pytest.approx(float((probabilities.argmax(1) == y).double().mean()))
    members = [float((logits.argmax(1) == y).double().mean()) for logits in ensemble.logits(x)]
    assert figures["cls/member_accuracy"] == pytest.approx(np.mean(members))
    assert figures["cal/ece"] == pytest.approx(ece_by_loop(probabilities, y, 30), abs=1e-6)
    assert figures["size/parameters"] == 3 * sum(p.numel() for p in se.zoo.mlp(64).parameters())
    assert all(isinstance(value, float) for value in figures.values())
    with pytest.raises(ValueError, match="no test split"):
        se.evaluate(ensemble, se.Data.from_arrays(x, y))


def test_paper_threshold_is_a_percentile_of_the_entropy_of_correct_predictions() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64)])
    se.train(ensemble, data, se.Recipe(epochs=3), quiet=True)
    x, y = data.validation.inputs[data.validation.index], data.validation.targets[data.validation.index]
    entropy = ensemble.uncertainty(x, temperature=1.0).entropy[ensemble.predict(x) == y]
    expected = float(np.percentile(entropy.double().numpy(), 75))
    assert ensemble.calibration.paper_threshold == pytest.approx(expected, rel=1e-6)
    assert fit_discard_threshold(ensemble, data, 0) == pytest.approx(float(entropy.min()), rel=1e-6)


def test_figures_come_from_one_pass(trained: tuple[se.Ensemble, se.Data], monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble, data = trained
    seen: list[int] = []
    logits_method = se.Ensemble.logits
    monkeypatch.setattr(
        se.Ensemble, "logits", lambda self, x, size=512: seen.append(len(x)) or logits_method(self, x, size)
    )
    figures = se.evaluate(ensemble, data)
    assert sum(seen) == len(data.test)
    x, y = data.test.inputs, data.test.targets
    correct, entropy = ensemble.predict(x) == y, ensemble.uncertainty(x, temperature=1.0).entropy
    threshold = ensemble.calibration.paper_threshold
    kept = [bool(right) for right, value in zip(correct, entropy.double(), strict=True) if value <= threshold]
    assert figures["unc/accuracy"] == figures["cls/accuracy"]
    assert figures["unc/filtered_accuracy"] == pytest.approx(np.mean(kept))
    assert figures["unc/discarded"] == pytest.approx(1 - len(kept) / len(y))
    assert figures["unc/auroc"] == pytest.approx(roc_auc_score(~correct.numpy(), entropy.numpy()))
    mean = logits_method(ensemble, x).double().mean(0).softmax(-1)
    values = 100 * -(mean * mean.log()).sum(-1) / np.log(10)
    assert figures["div/cc"] == pytest.approx(float(values[correct].mean()))
    assert figures["div/wc"] == pytest.approx(float(values[~correct].mean()))
    assert figures["div/wc"] > figures["div/cc"]


def test_attacks_and_corruptions_only_on_request(trained: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = trained
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (50, 1, 8, 8), dtype=np.uint8)
    foreign = se.Data.from_arrays(noise, rng.integers(0, 2, 50), test=(noise, rng.integers(0, 2, 50)))
    base = se.zoo.mlp(64)
    asked = {"fgsm": [0.02, 0.5], "corruptions": ["fog", "snow"], "severities": [1, 5], "ood": foreign, "base": base}
    figures = se.evaluate(ensemble, data, batch_size=100, seed=3, **asked)
    assert all(isinstance(value, float) for value in figures.values())
    x, y = data.test.inputs.float() / 255, data.test.targets

    def accuracy(images: torch.Tensor) -> float:
        return float((ensemble.predict(images) == y).double().mean())

    for epsilon in (0.02, 0.5):
        attacked = se.evaluation.fgsm(ensemble, x, y, epsilon)
        assert figures[f"adv/fgsm@{epsilon:g}"] == pytest.approx(accuracy(attacked), abs=1.1 / len(y))
    assert figures["adv/fgsm@0.5"] < figures["adv/fgsm@0.02"] < figures["cls/accuracy"]
    for severity in (1, 5):
        changed = {name: se.evaluation.corrupt(x, name, severity, seed=3) for name in ("fog", "snow")}
        for name, images in changed.items():
            assert figures[f"cor/{name}@{severity}"] == pytest.approx(accuracy(images), abs=1.1 / len(y))
        both = figures[f"cor/fog@{severity}"], figures[f"cor/snow@{severity}"]
        assert figures[f"cor/mean@{severity}"] == pytest.approx(np.mean(both))
        threshold = ensemble.calibration.paper_threshold
        discarded = [
            (ensemble.uncertainty(inputs, temperature=1.0).entropy > threshold).double().mean()
            for inputs in changed.values()
        ]
        assert figures[f"cor/mean@{severity}/discarded"] == pytest.approx(float(np.mean(discarded)), abs=1.1 / len(y))
    scores = torch.cat([ensemble.uncertainty(inputs, temperature=1.0).entropy for inputs in (x, noise)])
    assert figures["ood/entropy_auroc"] == pytest.approx(roc_auc_score([0] * len(x) + [1] * 50, scores.numpy()))
    assert figures["size/overhead"] == pytest.approx(3.0)
    assert figures["size/file_bytes"] > 4 * figures["size/parameters"]
    assert figures["size/peak_bytes"] > 0
    plain = se.evaluate(ensemble, data)
    assert set(plain) == {name for name in figures if name.split("/")[0] in ("cls", "cal", "div", "unc", "conf")} | {
        *("size/members", "size/parameters")
    }


def test_grey_images_skip_saturation(trained: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = trained
    figures = se.evaluate(ensemble, data, corruptions=True, severities=[2])
    names = {name.removeprefix("cor/").removesuffix("@2") for name in figures if name.startswith("cor/")}
    means = ("mean", "extra_mean")
    others = {f"{mean}@2/{figure}" for mean in means for figure in ("ece", "filtered_accuracy", "discarded")}
    assert names - others - set(means) == set(se.evaluation.CORRUPTIONS) - {"saturate"}
    extra = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    standard = [figures[f"cor/{name}@2"] for name in se.evaluation.CORRUPTIONS if name not in extra]
    assert len(standard) == 15
    assert figures["cor/mean@2"] == pytest.approx(np.mean(standard))
    assert figures["cor/extra_mean@2"] == pytest.approx(np.mean([figures[f"cor/{name}@2"] for name in extra[:3]]))
    some = se.evaluate(ensemble, data, corruptions=["spatter", "speckle_noise"], severities=[2])
    assert "cor/mean@2" not in some
    assert some["cor/extra_mean@2"] == pytest.approx((some["cor/spatter@2"] + some["cor/speckle_noise@2"]) / 2)


def test_undefined_figures_are_left_out() -> None:
    x = torch.rand(12, 4)
    y = torch.zeros(12, dtype=torch.long)
    data = se.Data.from_arrays(x, y, test=(x, y), classes=2)
    always = torch.nn.Linear(4, 2)
    with torch.no_grad():
        always.weight.zero_()
        always.bias.copy_(torch.tensor([200.0, 0.0]))  # confidence exactly 1, entropy exactly 0
    right = se.evaluate(se.Ensemble([always]), data)
    assert right["cls/accuracy"] == 1
    assert right["cal/ece"] == right["cal/nll"] == right["div/entropy"] == 0
    assert right["div/cc"] == pytest.approx(0)
    assert not {"div/wc", "unc/auroc", "unc/filtered_accuracy", "unc/discarded"} & set(right)  # no errors, no threshold
    with torch.no_grad():
        always.bias.neg_()
    wrong = se.evaluate(se.Ensemble([always], threshold=-1.0), data)
    assert wrong["cls/accuracy"] == 0
    assert wrong["cal/ece"] == 1
    assert wrong["unc/discarded"] == 1
    assert wrong["div/wc"] == pytest.approx(0)
    assert not {"div/cc", "unc/auroc", "unc/filtered_accuracy"} & set(wrong)
    only = se.Data.from_arrays(x, y, test=(x, y), classes=1)
    assert se.evaluate(se.Ensemble([torch.nn.Linear(4, 1)]), only)["div/cc"] == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"fgsm": [2.0]}, "each of fgsm must be between 0 and 1"),
        ({"corruptions": ["rain"]}, "each of corruptions must be one of"),
        ({"corruptions": "fog"}, r"must be a list of names, such as \['fog'\]"),
        ({"corruptions": True, "severities": [0]}, "each of severities must be one of"),
        ({"combine": "median"}, "combine"),
        ({"ood": se.Data.from_arrays(torch.rand(9, 5), torch.arange(9) % 3)}, "no test split"),
    ],
)
def test_invalid_evaluate_arguments_are_errors_before_any_work(
    asked: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object) -> None:
        raise AssertionError("work has started")

    monkeypatch.setattr(se.Ensemble, "logits", work)
    data = se.load_data("digits")
    with pytest.raises(ValueError, match=message):
        se.evaluate(se.Ensemble([se.zoo.mlp(64)]), data, **asked)


def test_figures_that_do_not_fit_the_data_are_refused() -> None:
    x = torch.rand(20, 5)
    rows = se.Data.from_arrays(x, torch.arange(20) % 2, test=(x, torch.arange(20) % 2))
    ensemble = se.Ensemble([torch.nn.Linear(5, 2)])
    with pytest.raises(ValueError, match=r"corruptions are for images .* not for inputs of shape \(5,\)"):
        se.evaluate(ensemble, rows, corruptions=True)
    with pytest.raises(ValueError, match=r"ood must have inputs of shape \(5,\)"):
        se.evaluate(ensemble, rows, ood=se.load_data("digits"))
    values = se.Data.from_arrays(x, torch.rand(20), test=(x, torch.rand(20)))
    with pytest.raises(ValueError, match="left out for a regression"):
        se.evaluate(se.Ensemble([torch.nn.Linear(5, 1)], task="regression"), values, fgsm=[0.1])


def test_data_of_other_classes_or_another_task_are_refused() -> None:
    """An evaluation on regression data once gave the ensemble's size and nothing else."""
    x = torch.randn(40, 4)
    ensemble = se.Ensemble([nn.Linear(4, 3)])
    five, values = se.Data.from_arrays(x, torch.arange(40) % 5, test=(x, torch.arange(40) % 5)), x[:, 0]
    for measure in (se.evaluate, se.Ensemble.calibrate, se.Ensemble.conformal):
        with pytest.raises(ValueError, match="labels up to 4, but the ensemble has 3 outputs"):
            measure(ensemble, five)
        with pytest.raises(ValueError, match="data are for regression, but the ensemble is for classification"):
            measure(ensemble, se.Data.from_arrays(x, values, test=(x, values)))
    with pytest.raises(TypeError, match=r"one split, such as data\.test, not all of data"):
        ensemble.predict_proba(five)
