"""Draw docs/images/concept-training.png: the learning curves of all members, which train at once and independently."""

import style
from matplotlib.figure import Figure

import structured_ensembles as se


def draw() -> Figure:
    """Draw training loss and validation accuracy of every member, its best epoch, and the ensemble's accuracy."""
    ensemble, data = style.trained_ensemble(members=4, epochs=15)
    history = ensemble.history
    assert history is not None
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for member in range(len(ensemble)):
        rows, colour = history.of(member), style.SERIES[member]
        epochs = [row["epoch"] + 1 for row in rows]
        left.plot(epochs, [row["loss"] for row in rows], color=colour, label=f"member {member}")
        accuracies = [100 * row["validation_accuracy"] for row in rows]
        right.plot(epochs, accuracies, color=colour)
        best = min(range(len(rows)), key=lambda epoch: rows[epoch]["validation_loss"])
        right.plot(epochs[best], accuracies[best], marker="o", markersize=7, color=colour)
    combined = 100 * se.evaluate(ensemble, data, split="validation")["cls/accuracy"]
    right.axhline(combined, color=style.INK, linestyle="--", linewidth=1.2)
    right.text(1, combined, "all members together", va="bottom")
    left.set(xlabel="epoch", ylabel="training loss")
    left.legend()
    left.grid(axis="y")
    right.set(xlabel="epoch", ylabel="validation accuracy (%)", ylim=(60, 101))
    right.set_title("dot: the epoch whose weights a member keeps", loc="left")
    right.grid(axis="y")
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)
