"""Draw docs/images/concept-prediction.png: what the members say of three digits, and how unsure they are together."""

import style
from matplotlib.figure import Figure


def draw() -> Figure:
    """Draw a sure digit, one that members disagree on, and noise: members' probabilities and the combined ones."""
    ensemble, data = style.trained_ensemble(members=4, epochs=12)
    inputs, _ = next(iter(data.split("test").batches(400)))
    uncertainty = ensemble.uncertainty(inputs)
    sure = int(uncertainty.entropy.argmin())
    torn = int(uncertainty.mutual_information.argmax())
    vague = int((uncertainty.entropy - 3 * uncertainty.mutual_information).argmax())
    chosen = inputs[[sure, torn, vague]]
    uncertainty = ensemble.uncertainty(chosen)
    members = (ensemble.logits(chosen) / ensemble.temperature).softmax(-1)  # (members, 3, classes)
    combined = ensemble.predict_proba(chosen)

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots(3, 3, width_ratios=(0.55, 2, 2.2))
    titles = ("all sure", "members disagree", "all unsure")
    for row, (image, cells, bars) in enumerate(axes):
        style.show_cells(image, chosen[row, 0], cmap="gray", aspect="equal")
        image.set_title(titles[row], loc="left")
        style.show_cells(cells, members[:, row], cmap=style.SHADES, vmin=0, vmax=1)
        cells.set_yticks(range(len(members)), [f"member {member}" for member in range(len(members))])
        bars.bar(range(10), combined[row].tolist(), color=style.BLUE)
        bars.set(ylim=(0, 1), yticks=(0, 1), xticks=range(10))
        bars.set_title(
            f"entropy {uncertainty.entropy[row]:.2f}, mutual information {uncertainty.mutual_information[row]:.2f}, "
            f"disagreement {uncertainty.disagreement[row]:.2f}",
            loc="right",
            fontsize=9,
        )
        cells.tick_params(length=0)
        cells.set_xticks(range(10))
    axes[2, 1].set_xlabel("members' probabilities of the classes 0 to 9")
    axes[2, 2].set_xlabel("their mean, after temperature")
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)
