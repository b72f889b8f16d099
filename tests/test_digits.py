"""What the whole is for: an ensemble in place of a network, trained for real."""

from collections.abc import Callable

import torch

import structured_ensembles as se
from structured_ensembles.data.splits import hold_out
from structured_ensembles.evaluation.calibration import expected_calibration_error, negative_log_likelihood


def test_a_structured_ensemble_beats_its_network_on_digits(record_property: Callable[[str, object], None]) -> None:
    """Three seeds, half of the neurons, five members: better accuracy and likelihood on average.

    The ECE is printed, not asserted: with 359 test images in 30 bins even a perfectly calibrated network has an ECE of
    about 2 %, and 143 validation images say little about a temperature. The next test has enough of both.
    """
    recipe = se.Recipe.named("modern", epochs=30)
    found: dict[str, list[dict[str, float]]] = {"single": [], "structured": []}
    for seed in range(3):
        data = se.load_data("digits", seed=seed)
        torch.manual_seed(seed)
        model = se.zoo.mlp(64)
        for method, figures in found.items():
            ensemble = se.methods.METHODS[method](model, data, members=5, recipe=recipe, seed=seed, quiet=True)
            figures.append(se.evaluate(ensemble, data))
    mean = {
        method: {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} for method, rows in found.items()
    }
    for method, row in mean.items():
        accuracy, error, likelihood = row["cls/accuracy"], row["cal/ece"], row["cal/nll"]
        shown = f"accuracy {100 * accuracy:.2f} %, ECE {100 * error:.2f} %, NLL {likelihood:.4f}"
        record_property("figures", f"digits, 3 seeds, {method}: {shown}")
    assert mean["structured"]["cls/accuracy"] > mean["single"]["cls/accuracy"]
    assert mean["structured"]["cal/nll"] < mean["single"]["cal/nll"]


def test_after_temperature_it_is_better_calibrated_than_its_network(
    record_property: Callable[[str, object], None],
) -> None:
    """Of all digits a third to learn from, a third to fit the temperature, a third to test; four draws.

    The ECE is that of the predictions of all four draws together: with 30 bins, fewer would mostly show noise.
    """
    recipe = se.Recipe.named("modern", epochs=30)
    whole = se.load_data("digits")
    images = torch.cat([whole.train.inputs, whole.test.inputs])
    labels = torch.cat([whole.train.targets, whole.test.targets])
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {"single": [], "structured": []}
    for seed in range(4):
        kept, tested = hold_out(labels, 1 / 3, seed)
        test = images[tested], labels[tested]
        data = se.Data.from_arrays(images[kept], labels[kept], test=test, validation=0.5, classes=10, seed=seed)
        torch.manual_seed(seed)
        model = se.zoo.mlp(64)
        for method, rows in found.items():
            ensemble = se.methods.METHODS[method](model, data, members=5, recipe=recipe, seed=seed, quiet=True)
            before, after = ensemble.predict_proba(test[0], temperature=1.0), ensemble.predict_proba(test[0])
            rows.append((before, after, test[1]))
    error, likelihood = {}, {}
    for method, rows in found.items():
        before, after, truth = (torch.cat(parts) for parts in zip(*rows, strict=True))
        error[method] = [expected_calibration_error(own, truth) for own in (before, after)]
        likelihood[method] = [negative_log_likelihood(own, truth) for own in (before, after)]
        shown = [f"{100 * ece:.2f} % and {nll:.4f}" for ece, nll in zip(error[method], likelihood[method], strict=True)]
        record_property("figures", f"digits, ECE and NLL of {method}: {shown[0]}, after temperature {shown[1]}")
        assert likelihood[method][1] < likelihood[method][0]
    assert error["structured"][1] <= error["single"][0]
