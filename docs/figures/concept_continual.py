"""Draw docs/images/concept-continual.png: the owner of every neuron, and the accuracies after each of five tasks."""

import style
import torch
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure

import structured_ensembles as se

COLUMNS = 24  # neurons of a layer are drawn in rows of so many


def draw() -> Figure:
    """Learn five tasks of two digits each; draw the neurons that each task owns, and the accuracy matrix."""
    torch.manual_seed(0)
    settings = {"epochs": 10, "batch_size": 32, "rate": 3e-3, "search_epochs": 1}
    learner = se.continual.StructuredLearner(se.zoo.lenet5_backbone(), quiet=True, **settings)
    tasks = se.continual.split_tasks(se.load_data("digits"), tasks=5)
    matrix = se.continual.run_sequence(learner, tasks)

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    cells, labels = [], {}
    for name, owners in learner.shared.owners.groups.items():
        labels[len(cells)] = f"{name} ({len(owners)})"
        padded = torch.cat([owners, torch.full((-len(owners) % COLUMNS,), -2)]).view(-1, COLUMNS)
        cells += [*padded, torch.full((COLUMNS,), -2)]
    colours = ListedColormap(["none", style.FAINT, *style.SERIES])
    style.show_cells(left, torch.stack(cells[:-1]), cmap=colours, vmin=-2, vmax=len(tasks) - 1)
    left.set_yticks(list(labels), list(labels.values()))
    left.tick_params(length=0)
    for task, colour in enumerate(style.SERIES):
        left.plot([], [], "s", color=colour, label=f"task {task}")
    left.plot([], [], "s", color=style.FAINT, label="free")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=3, columnspacing=1)
    left.set_title("the task that owns each neuron", loc="left")

    values = 100 * matrix.values
    shades = LinearSegmentedColormap.from_list("solid", ["#4f5b6b", style.BLUE])  # white text must be legible
    style.show_cells(right, values, cmap=shades, vmin=80, vmax=100)
    for row, accuracies in enumerate(matrix.rows):
        for column, value in enumerate(accuracies):
            right.text(column, row, f"{100 * value:.1f}", ha="center", va="center", color="white", fontweight="bold")
    right.set(xticks=range(5), yticks=range(5), xlabel="accuracy on task (%)", ylabel="after learning task")
    right.tick_params(length=0)
    right.set_title(f"forgetting {100 * matrix.forgetting:.2f} %", loc="left")
    return figure


if __name__ == "__main__":
    style.run(__file__, draw)
