"""Time the paper's main run: five members of ResNet20 on CIFAR-10, search, saliency and 200 epochs.

    python benchmarks/paper_run.py [--root DATA] [--dataset cifar10] [--model resnet20] [--epochs 200] [--json FILE]

The recipe `paper` without early stopping, so that all epochs are computed; validation after every one. The figures at
the end are those of the ensemble on the test split.
"""

import time

import torch

import structured_ensembles as se
from recording import arguments_of, record, wait
from structured_ensembles.common.tables import text_table


def main() -> None:
    """Run and time search, saliency and training, and print the figures."""
    arguments = arguments_of(
        __doc__, root="", dataset="cifar10", model="resnet20", members=5, prune=0.5, epochs=200, search=10, seed=0
    )
    data = se.load_data(arguments.dataset, arguments.root or None, seed=arguments.seed)
    torch.manual_seed(arguments.seed)
    model = getattr(se.zoo, arguments.model)(num_classes=data.num_classes, in_channels=data.shape[0])
    graph = se.trace(model, data.example())
    seconds = {}

    def call_timed(name, function, *inputs, **settings):
        wait(arguments.device)
        start = time.perf_counter()
        result = function(*inputs, **settings)
        wait(arguments.device)
        seconds[name] = time.perf_counter() - start
        print(f"{name}: {seconds[name]:.1f} s", flush=True)
        return result

    common = {"device": arguments.device, "quiet": True}
    scales = call_timed(
        "search", se.learn_scales, model, graph, data, arguments.members, epochs=arguments.search,
        seed=arguments.seed, **common,
    )  # fmt: skip
    scores = call_timed("saliency", se.saliency, model, graph, scales, data, **common)
    subnets = se.select(graph, scores, prune=arguments.prune)
    ensemble = se.Ensemble([se.extract(model, graph, subnet) for subnet in subnets], subnets=subnets)
    recipe = se.Recipe.named("paper", epochs=arguments.epochs, patience=None)
    history = call_timed("training", se.train, ensemble, data, recipe, seed=arguments.seed, **common)
    epochs = [row["seconds"] for row in history.of(0)]
    figures = se.evaluate(ensemble, data)
    print(text_table(("figure", "value"), [(name, f"{value:.4f}") for name, value in figures.items()]))
    rows = {"seconds": seconds, "median_epoch_s": sorted(epochs)[len(epochs) // 2], "figures": figures}
    print(rows["seconds"], "median epoch", rows["median_epoch_s"])
    record(arguments, rows)


if __name__ == "__main__":
    main()
