"""`sens models` and `sens datasets`: the available ones, and how to bring your own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from structured_ensembles import zoo
from structured_ensembles.checking.model_check import check_model
from structured_ensembles.cli.model_row import format_check, make_model_and_example
from structured_ensembles.common.tables import text_table
from structured_ensembles.data.sources import data_sets, is_cached


def models(
    check: str | None = None,
    shape: list[int] | None = None,
    prune: float = 0.5,
    coupled: bool = True,
    model_arguments: dict[str, Any] | None = None,
) -> int:
    """List the networks of the zoo, or check whether a model can be cut.

    Args:
        check: a name, or package.module:function that returns a network, or a network and an example of its inputs
        shape: of one input without the batch, such as 3 224 224, if the function gives no example
        prune: the share of neurons that the check removes
        coupled: also remove neurons that residual sums couple
        model_arguments: what the function of --check is called with

    """
    if check is not None:
        model, example = make_model_and_example(check, shape, model_arguments or {})
        print(format_check(check_model(model, example, prune=prune, coupled=coupled)))
        return 0
    rows = []
    for name in zoo.__all__:
        function = getattr(zoo, name)
        required = {"in_features": 784} if name == "mlp" else {}
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in function(**required).parameters())
        rows.append((name, f"{count:,}", _signature(function)))
    print(text_table(("model", "parameters", "arguments"), rows))
    print("\nYour own: --model package.module:function, a function that returns a torch.nn.Module, installed or")
    print("in a file of the current folder; its arguments go into --model-arguments, such as '{\"width\": 2}'.")
    print("Can it be cut? sens models --check package.module:function --shape 3 224 224")
    return 0


def _signature(function: Callable[..., Any]) -> str:
    """Write the arguments of a function with the types as its source has them."""
    shown = [str(parameter) for parameter in inspect.signature(function).parameters.values()]
    return f"({', '.join(shown)})".replace("collections.abc.", "")


def datasets(root: Path | None = None) -> int:
    """List the data sets and whether they are on this machine.

    Args:
        root: where data sets are kept

    """
    rows = []
    for name, info in data_sets().items():
        at_hand = "embedded" if not info.archives else "cached" if is_cached(name, root) else "will be downloaded"
        size = "×".join(map(str, info.shape))
        rows.append((name, info.title, size, str(info.num_classes), f"{info.train:,}", f"{info.test:,}", at_hand))
    print(text_table(("data set", "", "shape", "classes", "train", "test", "at hand"), rows))
    print("\nYour own pictures: --dataset folder:PATH?size=64, a folder of pictures for each class, in PATH, or in")
    print("PATH/train, PATH/val and PATH/test; &test=0.2 holds out a share of each class where there is no PATH/test.")
    print("Your own: --dataset package.module:function, a function that returns a structured_ensembles.Data.")
    return 0
