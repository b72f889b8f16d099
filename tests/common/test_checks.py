"""Argument validation: errors name the argument, what was given and what is possible, before any work."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se
from structured_ensembles.calibration import check_threshold_rule
from structured_ensembles.calibration.conformal import fit_sets
from structured_ensembles.common.checks import check_flags, check_number, check_seed, check_type, check_whole
from structured_ensembles.methods import METHODS

Call = Callable[["Things"], Any]
X, Y = torch.rand(20, 6), torch.arange(20) % 2


class Things:
    """Valid arguments for the calls below, which get one invalid argument each."""

    def __init__(self) -> None:
        self.data = se.load_data("digits")
        self.network = se.zoo.lenet5(num_classes=10, in_channels=1)
        self.graph = se.trace(self.network, self.data.example())
        self.ensemble = se.Ensemble([self.network])
        self.scores = se.Scores({name: torch.rand(size) for name, size in self.graph.prunable.items()})

    def scales(self, extra: int = 0) -> se.Scales:
        """Draw scales for the network's groups, each with `extra` channels too many."""
        return se.Scales({name: torch.rand(2, size + extra) for name, size in self.graph.prunable.items()})


@pytest.fixture(scope="module")
def things() -> Things:
    return Things()


WRONG: list[tuple[Call, str]] = [
    (
        lambda t: se.Ensemble([t.network], task="regresion"),
        "task must be one of 'classification', 'regression', not 're",
    ),  # type: ignore[arg-type]
    (lambda t: se.Ensemble([t.network], normalization="imagenet"), "normalization must be a Normalization, not a str"),
    (lambda t: se.evaluate(t.network, t.data), r"ensemble must be an Ensemble, not a LeNet5: make one with Ensemble\("),
    (lambda t: se.evaluate(t.ensemble, "digits"), "data must be a Data, not a str: see Data.from_arrays"),
    (lambda t: se.evaluate(t.ensemble, t.data, "tset"), "split must be one of 'train', 'validation', 'test', not"),
    (lambda t: se.evaluate(t.ensemble, t.data, fgsm=0.1), r"fgsm must be a list, such as \[0.1\]"),
    (lambda t: se.evaluate(t.ensemble, t.data, fgsm=["a"]), "each of fgsm must be between 0 and 1"),
    (lambda t: se.evaluate(t.ensemble, t.data, severities=3), r"severities must be a list, such as \[3\]"),
    (lambda t: se.evaluate(t.ensemble, t.data, corruptions=3), r"corruptions must be a list of names, such as \[3\]"),
    (lambda t: se.evaluate(t.ensemble, t.data, ood="digits"), "ood must be a Data, not a str"),
    (lambda t: se.train(t.network, t.data), "ensemble must be an Ensemble, not a LeNet5"),
    (lambda t: se.train(t.ensemble, [1, 2]), "data must be a Data, not a list"),
    (lambda t: se.train(t.ensemble, t.data, "modern"), "recipe must be a Recipe, such as"),
    (lambda t: se.train(t.ensemble, t.data, seed="a"), "seed must be a whole number, not 'a'"),
    (lambda t: se.train(t.ensemble, t.data, device="tpu"), "device must be 'auto', 'cpu', .*, not 'tpu'"),
    (lambda t: se.structured_ensemble("lenet5", t.data), "model must be a torch.nn.Module, not a str"),
    (lambda t: se.structured_ensemble(t.network, "digits"), "data must be a Data, not a str"),
    (lambda t: se.structured_ensemble(t.network, t.data, prune="a"), "prune must be at least 0 and less than 1, not"),
    (lambda t: se.structured_ensemble(t.network, t.data, members=2.5), "members must be a whole number .*, not 2.5"),
    (lambda t: se.structured_ensemble(t.network, t.data, seed="a"), "seed must be a whole number, not 'a'"),
    (lambda t: se.learn_scales(t.network, t.graph, t.data, seed="a"), "seed must be a whole number, not 'a'"),
    (lambda t: se.learn_scales(t.network, t.data, t.graph), "graph must be a ChannelGraph, not a Data: trace"),
    (lambda t: se.learn_scales(t.network, t.graph, t.data, strength="a"), "strength must be a finite number"),
    (lambda t: se.saliency(t.network, t.graph, "x", t.data), "scales must be a Scales, not a str"),
    (lambda t: se.select(t.network, prune=0.5), "graph must be a ChannelGraph, not a LeNet5"),
    (lambda t: se.extract(t.network, t.graph, [0, 1]), "subnet must be a Subnet, not a list"),
    (lambda t: se.Ensemble(t.network), r"networks must be a list of networks, .*Ensemble\(\[network\]\)"),
    (lambda t: se.Ensemble(["a"]), "each of networks must be a torch.nn.Module, not a str"),
    (lambda t: se.Recipe(rate="a"), "rate must be a finite number of at least 0, not 'a'"),
    (lambda t: se.Recipe(patience=2.5), "patience must be a whole number of at least 1, or None, not 2.5"),
    (lambda t: se.Recipe(milestones=3), r"milestones must be a list, such as \[3\]"),
    (lambda t: se.Recipe(milestones=(1, "a")), "each of milestones must be a whole number of at least 0, not 'a'"),
    (lambda t: se.Recipe(momentum=2), "momentum must be at least 0 and less than 1, not 2"),
    (lambda t: se.continual.StructuredLearner(t.network, seed=0.5), "seed must be a whole number, not 0.5"),
    (lambda t: se.continual.StructuredLearner(t.network, prune="a"), "prune must be at least 0"),
    (lambda t: se.continual.split_tasks("digits", 5), "data must be a Data, not a str"),
    (lambda t: se.train(t.ensemble, t.data, loss="mse"), r"loss must be a function of \(outputs, targets\), not 'mse'"),
    (lambda t: se.train(t.ensemble, t.data, checkpoint=3), "checkpoint must be a path, .*, not 3"),
    (lambda t: se.structured_ensemble(t.network, t.data, folder=3), "folder must be a path, .*, not 3"),
    (lambda t: se.learn_scales(t.network, t.graph, t.data, loss=3), "loss must be a function of .*, not 3"),
    (lambda t: se.learn_scales(t.network, t.graph, t.data, checkpoint=3), "checkpoint must be a path, .*, not 3"),
    (
        lambda t: se.learn_scales(se.zoo.mlp(64), t.graph, t.data),
        "graph was traced from another model: layers.1",
    ),
    (lambda t: se.saliency(t.network, t.graph, t.scales(6), t.data), "scales do not belong to this graph"),
    (lambda t: se.saliency(t.network, t.graph, se.Scales({}), t.data), "scales do not belong to this graph"),
    (lambda t: se.saliency(t.network, t.graph, t.scales(), t.data, batch_size=0), "batch_size must be a whole number"),
    (
        lambda t: se.saliency(t.network, t.graph, replace(t.scales(), placement="input"), t.data),
        "placement of scales must be one of 'output', 'norm', not 'input'",
    ),
    (
        lambda t: se.select(t.graph, t.scores, prune=0.5),
        "scores must be a list of Scores, .*, not one of them",
    ),
    (lambda t: se.select(t.graph, [], prune=0.5), r"scores must be a list of Scores, .*, not \[\]"),
    (lambda t: se.select(t.graph, [1], prune=0.5), "each of scores must be a Scores, not an int"),
    (lambda t: se.select(t.graph, memory=True, selection="random", members=2), "memory must be a number of networks"),
    (lambda t: se.evaluate(t.ensemble, t.data, batch_size=0), "batch_size must be a whole number of at least 1, not 0"),
    (lambda t: se.evaluate(t.ensemble, t.data, base=3), "base must be a torch.nn.Module, not an int"),
    (lambda t: t.ensemble.predict(t.data.example(), batch_size=0), "batch_size must be a whole number"),
    (lambda t: t.ensemble.spread(t.data.example()), "spread is for regression; for classification there are"),
    (lambda t: t.ensemble.overhead(3), "base must be a torch.nn.Module, not an int"),
    (lambda t: t.ensemble.save(3), "path must be a path, .*, not 3"),
    (lambda t: se.Ensemble.load("a.safetensors", model=3), "model must be a torch.nn.Module, not an int"),  # type: ignore[arg-type]
    (lambda t: se.export_pt2(t.ensemble, 3), "path must be a path, .*, not 3"),
    (lambda t: se.export_pt2(t.ensemble, "a.pt2", "digits"), "example must be numbers"),
    (lambda t: se.load_data(3), "name must be a str, not an int: one of digits, .*folder:PATH"),  # type: ignore[arg-type]
    (lambda t: t.data.num_batches("train", 0), "size must be a whole number of at least 1, not 0"),
    (lambda t: next(t.data.batches("train", 2.5)), "size must be a whole number of at least 1, not 2.5"),
    (lambda t: t.data.example(0), "batch must be a whole number of at least 1, not 0"),
    (lambda t: se.Data.from_arrays(X, Y, task="ranking"), "task must be one of 'classification', 'regression', None"),
    (lambda t: se.Data.from_arrays(X, Y, test=X), r"test must be a pair of arrays \(inputs, targets\), not tensor"),
    (lambda t: se.Data.from_arrays(X, Y, validation=(X,)), "validation must be a pair of arrays .*, not a tuple of 1"),
    (lambda t: se.Data.from_loaders([(X, Y)]), "train must be a DataLoader that knows how many"),  # type: ignore[arg-type]
    (lambda t: se.Data.from_folder(3), "path must be a path, .*, not 3"),  # type: ignore[arg-type]
    (lambda t: se.check_model(t.network, t.data.example(), prune=2), "prune must be at least 0 and less than 1, not 2"),
    (lambda t: se.mmd2(X[0], X[0, :3]), r"one and other must be vectors of the same length, not .* \(6,\) and \(3,\)"),
    (lambda t: se.mmd2([1.0], [2.0]), "one must be a Tensor, not a list"),  # type: ignore[arg-type]
    (lambda t: se.zoo.resnet20(num_classes=0), "num_classes must be a whole number of at least 1, not 0"),
    (lambda t: se.zoo.resnet32(width=0), "width must be a whole number of at least 1, not 0"),
    (lambda t: se.zoo.mlp(4, hidden=8), r"hidden must be a list of whole numbers, such as \[8\]"),  # type: ignore[arg-type]
    (lambda t: se.zoo.mlp(4, hidden=(8, 0)), "each of hidden must be a whole number of at least 1, not 0"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_invalid_argument_error_names_the_argument(things: Things, call: Call, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(things)


LEARNERS = se.continual.LEARNERS.values()
LOADER = DataLoader(TensorDataset(X, Y), batch_size=4)
# Whatever a user can give a flag to, and the arguments that it needs besides.
FLAGGED: dict[Callable[..., Any], Callable[[Things], tuple[Any, ...]]] = {
    se.trace: lambda t: (t.network, t.data.example()),
    se.check_model: lambda t: (t.network, t.data.example()),
    se.extract: lambda t: (t.network, t.graph, se.select(t.graph, prune=0.5, selection="random", members=1)[0]),
    se.learn_scales: lambda t: (t.network, t.graph, t.data),
    se.saliency: lambda t: (t.network, t.graph, t.scales(), t.data),
    se.train: lambda t: (t.ensemble, t.data),
    se.run_grid: lambda t: ([],),
    se.Recipe: lambda t: (),
    se.Execution: lambda t: (),
    se.Ensemble: lambda t: ([t.network],),
    se.Ensemble.push_to_hub: lambda t: (t.ensemble, "owner/name"),
    se.Data.from_arrays: lambda t: (X, Y),
    se.Data.from_datasets: lambda t: (TensorDataset(X, Y),),
    se.Data.from_loaders: lambda t: (LOADER,),
    se.continual.split_tasks: lambda t: (t.data, 5),
    se.continual.load_tasks: lambda t: ("digits",),
    se.continual.Learner.infer_task: lambda t: (se.continual.NaiveLearner(se.zoo.lenet5_backbone()), X),
    se.continual.Memory.bits: lambda t: (se.continual.Memory(1),),
    se.continual.Memory.bytes: lambda t: (se.continual.Memory(1),),
    se.structured_ensemble: lambda t: (t.network, t.data),
    **dict.fromkeys(METHODS.values(), lambda t: (t.network, t.data)),
    **dict.fromkeys(LEARNERS, lambda t: (se.zoo.lenet5_backbone(),)),
}
OTHERS = {"trust_code", "corruptions"}  # they take names, too


def flags_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments whose default is True or False."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if isinstance(parameter.default, bool)]


@pytest.mark.parametrize("value", ["yes", 0, None])
@pytest.mark.parametrize("function", FLAGGED, ids=lambda function: function.__qualname__)
def test_flags_are_true_or_false(things: Things, function: Callable[..., Any], value: Any) -> None:
    for flag in {*flags_of(function), "quiet"} - OTHERS if function in LEARNERS else set(flags_of(function)) - OTHERS:
        with pytest.raises(TypeError, match=f"{flag} must be True or False, not {value!r}"):
            function(*FLAGGED[function](things), **{flag: value})


def test_every_public_flag_is_tried() -> None:
    names = [*(vars(se)[name] for name in se.__all__ if name in vars(se)), *vars(se.continual).values()]
    public = [value for value in names if callable(value)]
    methods = [getattr(value, name) for value in public if isinstance(value, type) for name in vars(value)]
    callables = [value for value in (*public, *methods) if inspect.isfunction(value) or inspect.ismethod(value)]
    with_flags = {f.__qualname__ for f in callables if set(flags_of(f)) - OTHERS and not f.__name__.startswith("_")}
    assert with_flags - {function.__qualname__ for function in FLAGGED} == set()
    check_flags(ids=np.bool_(True))


def test_numpy_numbers_equal_python_numbers(things: Things) -> None:
    assert type(check_seed(np.int64(3))) is int
    check_number("rate", np.float32(0.5))
    recipe = se.Recipe(rate=np.float32(0.5), patience=np.int64(3), warmup=torch.tensor(1.0), momentum=np.array(0.9))
    assert recipe == se.Recipe(rate=0.5, patience=3, warmup=1.0, momentum=np.array(0.9).item())
    json.dumps(recipe.to_dict())
    plain, other = (
        se.evaluate(things.ensemble, things.data, fgsm=sizes) for sizes in ([0.125, 0.25], np.float32([0.125, 0.25]))
    )
    assert plain == other
    assert len(se.Ensemble(se.zoo.mlp(64) for _ in range(3))) == 3  # type: ignore[arg-type]
    subnets = [
        se.select(things.graph, prune=share, members=1, selection="random")[0] for share in (0.5, np.float32(0.5))
    ]
    assert subnets[0] == subnets[1]
    budgets = [se.select(things.graph, memory=m, members=2, selection="random") for m in (1, np.float32(1))]
    assert budgets[0] == budgets[1]
    assert len(se.Data.from_arrays(X, Y, validation=np.float32(0.5)).train) == 10
    shares = [check_threshold_rule("keep", share) for share in (0.5, np.float32(0.5))]
    assert shares[0] == shares[1]
    sets = [fit_sets(torch.eye(4), torch.arange(4), coverage=share) for share in (0.5, np.float32(0.5))]
    assert sets[0] == sets[1]


def test_numpy_seed_equals_the_same_int(things: Things, tmp_path: Path) -> None:
    losses = []
    for seed in (1, np.int64(1), np.int64(2)):
        torch.manual_seed(0)
        ensemble, recipe = se.Ensemble([se.zoo.mlp(64)]), se.Recipe(epochs=1)
        checkpoint = tmp_path / f"{len(losses)}.safetensors"  # holds the seed, too
        history = se.train(ensemble, things.data, recipe, "cpu", seed=seed, checkpoint=checkpoint, quiet=True)
        losses.append(history.rows[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_none_is_accepted_only_where_allowed() -> None:
    check_whole("workers", None, or_none=True)
    with pytest.raises(ValueError, match="members must be a whole number of at least 1, not None"):
        check_whole("members", None)
    with pytest.raises(TypeError, match="x must be a Tensor, not an int"):
        check_type("x", 3, torch.Tensor)


@pytest.mark.parametrize("seed", [2**64, 2**70, -(2**63) - 1])
def test_seed_outside_64_bits_is_refused(things: Things, seed: int) -> None:
    """Torch fails for some of them, and takes others for a smaller seed."""
    x, y = torch.rand(20, 6), torch.arange(20) % 2
    calls: list[Callable[[], Any]] = [
        lambda: se.Data.from_arrays(x, y, seed=seed),
        lambda: se.load_data("digits", seed=seed),
        lambda: se.select(things.graph, prune=0.5, selection="random", members=1, seed=seed),
        lambda: se.learn_scales(things.network, things.graph, things.data, 2, seed=seed),
        lambda: se.train(things.ensemble, things.data, seed=seed),
        lambda: se.continual.split_tasks(things.data, 5, shuffle_labels=True, seed=seed),
        lambda: se.continual.StructuredLearner(things.network, seed=seed),
        *(partial(method, things.network, things.data, seed=seed, quiet=True) for method in METHODS.values()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"seed must be a whole number from -2\*\*63 to 2\*\*64 - 1, not {seed}"):
            call()


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63, -1, -(2**63)])
def test_every_64_bit_seed_works(seed: int) -> None:
    data = se.Data.from_arrays(torch.rand(20, 64), torch.arange(20) % 10, seed=seed)
    for method in ("deep", "random", "mc-dropout", "batch-ensemble"):
        METHODS[method](se.zoo.mlp(64), data, members=2, recipe=se.Recipe(epochs=1), seed=seed, quiet=True)
