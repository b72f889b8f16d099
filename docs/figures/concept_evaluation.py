"""Draw docs/images/concept-evaluation.png: reliability before and after temperature, and errors against coverage."""

import style
import torch
from matplotlib.figure import Figure
from torch import Tensor

BINS = 6


def draw() -> Figure:
    """Draw accuracy against confidence, and the share of errors among the surest predictions."""
    ensemble, data = style.trained_ensemble(members=4, epochs=6, hidden=32)
    inputs, targets = next(iter(data.split("test").batches(400)))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color=style.INK, linestyle=":", linewidth=1.2)
    for temperature, colour, label in (
        (1.0, style.ORANGE, "as combined"),
        (None, style.BLUE, f"after temperature {ensemble.temperature:.2f}"),
    ):
        probabilities = ensemble.predict_proba(inputs, temperature=temperature)
        confidence, labels = probabilities.max(-1)
        left.plot(*reliability(confidence, labels == targets), color=colour, marker="o", label=label)
    left.set(xlabel="confidence", ylabel="accuracy", xlim=(0.2, 1.02), ylim=(0.2, 1.02))
    left.legend()
    left.grid()

    entropy = ensemble.uncertainty(inputs).entropy
    wrong = ensemble.predict(inputs) != targets
    order = entropy.argsort()
    kept = torch.arange(1, len(order) + 1)
    right.plot(100 * kept / len(order), 100 * wrong[order].cumsum(0) / kept, color=style.BLUE)
    share = float(ensemble.keep(inputs).double().mean())
    right.axvline(100 * share, color=style.ORANGE, linestyle="--", linewidth=1.2)
    right.text(100 * share - 1, right.get_ylim()[1] * 0.97, "ensemble.keep", color=style.ORANGE, ha="right", va="top")
    right.set(xlabel="predictions kept, surest first (%)", ylabel="errors among them (%)", xlim=(0, 101))
    right.grid(axis="y")
    return figure


def reliability(confidence: Tensor, correct: Tensor) -> tuple[list[float], list[float]]:
    """Average confidence and accuracy in bins of equal width; bins of fewer than five samples are left out."""
    bins = (confidence * BINS).ceil().clamp(1, BINS).long()
    groups = [bins == number for number in range(1, BINS + 1) if int((bins == number).sum()) >= 5]
    return [float(confidence[group].mean()) for group in groups], [
        float(correct[group].double().mean()) for group in groups
    ]


if __name__ == "__main__":
    style.run(__file__, draw)
