"""What the whole is for: an ensemble in place of a network, trained for real."""

from collections.abc import Callable

import torch

import structured_ensembles as se


def test_a_structured_ensemble_beats_its_network_on_digits(record_property: Callable[[str, object], None]) -> None:
    """Three seeds, half of the neurons, five members: better accuracy and likelihood on average.

    The ECE is printed, not asserted: on these digits an ensemble is about as well calibrated as one network, and which
    of the two is ahead changes with the network, the recipe and the order of the data. (One setting out of fourteen was
    once picked here, by its test figures, in which the ensemble was ahead; in another order of the batches it is not.)
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
