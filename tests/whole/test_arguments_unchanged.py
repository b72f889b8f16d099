"""Arguments stay unchanged: models that cannot be copied, inputs, a learner's weights."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import structured_ensembles as se
from structured_ensembles.continual import LEARNERS
from structured_ensembles.cuda import prediction_graphs
from structured_ensembles.methods import METHODS
from structured_ensembles.networks.copying import clone_model, copy_frozen
from tests.support.continual_cases import SHORT, inputs_of, logits_of, make_backbone, make_tasks

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 6, generator=GENERATOR)
Y = torch.arange(60) % 3
RECIPE = se.Recipe(epochs=1, batch_size=20)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.stem(x)))

    def stem(self, x: Tensor) -> Tensor:
        return self.first(x)


def closure(model: Any) -> None:
    model.stem = lambda x: 2 * model.first(x)


def closure_over_a_weight(model: Any) -> None:
    weight = model.first.weight
    model.stem = lambda x: x @ weight.T


def default_argument(model: Any) -> None:
    model.stem = lambda x, layer=model.first: layer(x)


def named_default_argument(model: Any) -> None:
    model.stem = lambda x, *, layer=model.first: layer(x)


def list_of_functions(model: Any) -> None:
    model.stems = [lambda x: 2 * model.first(x)]
    model.stem = partial(model.stems[0])


def function_in_a_function(model: Any) -> None:
    inner = {"run": lambda x: 2 * model.first(x)}
    model.stem = lambda x: -inner["run"](x)


def method_of_a_layer(model: Any) -> None:
    forward = model.first.forward
    model.stem = lambda x: -forward(x)


def hook(model: Any) -> None:
    model.last.register_forward_hook(lambda _layer, inputs, output: output + model.last.bias)


def global_name(model: Any) -> None:
    globals()["KNOWN"] = model
    model.stem = by_global_name


def by_global_name(x: Tensor) -> Tensor:
    return KNOWN.first(x)  # type: ignore[name-defined]  # noqa: F821


KNOTS = [
    closure,
    closure_over_a_weight,
    default_argument,
    named_default_argument,
    list_of_functions,
    function_in_a_function,
    method_of_a_layer,
    hook,
    global_name,
]


def knotted(tie: Callable[[Any], None]) -> nn.Module:
    model = Base()
    tie(model)
    return model


@pytest.mark.parametrize("tie", KNOTS)
@pytest.mark.parametrize("copy", [clone_model, copy_frozen])
def test_copying_a_model_that_refers_to_itself_is_refused(tie: Callable[[Any], None], copy: Any) -> None:
    with pytest.raises(ValueError, match="model keeps a function that refers to its own layers"):
        copy(knotted(tie))


class Registered(nn.Module):
    """Look the original up in a registry, which a copy finds as well."""

    known: ClassVar[dict[str, nn.Module]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.known["self"] = self

    def forward(self, x: Tensor) -> Tensor:
        return self.known["self"].last(x)  # type: ignore[operator]


@pytest.mark.parametrize(
    "method", ["single", "deep", "snapshot", "mc-dropout", "batch-ensemble", "prune-and-tune", "taught"]
)
def test_model_that_reaches_its_original_through_a_registry_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"a copy of it computes with the parameters of another network"):
        METHODS[method](Registered(), se.Data.from_arrays(X, Y), members=2, recipe=RECIPE, quiet=True)


def test_functions_without_references_to_the_model_are_copied() -> None:
    model, other, scale = Base(), nn.Linear(6, 6), 2.0
    model.before = lambda x: other(x) * scale
    model.stem = model.first.forward  # a method, which a copy has of its own layer
    model.last.register_forward_hook(lambda _layer, _inputs, output: output * scale)
    copied = clone_model(model)
    assert copied.stem.__self__ is copied.first


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_a_model_that_refers_to_itself(method: str) -> None:
    model = knotted(closure)
    before = [own.clone() for own in model.parameters()]
    with pytest.raises(ValueError, match="in a copy it would run the model's layers"):
        METHODS[method](model, se.Data.from_arrays(X, Y), members=2, recipe=se.Recipe(epochs=2), quiet=True)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("learner", LEARNERS.values())
def test_every_learner_refuses_a_backbone_that_refers_to_itself(learner: Any) -> None:
    with pytest.raises(ValueError, match="in a copy it would run the model's layers"):
        learner(knotted(closure))


def test_model_that_refers_to_itself_can_be_trained_in_place() -> None:
    model = knotted(closure)
    before = model.first.weight.clone()
    se.train(se.Ensemble([model]), se.Data.from_arrays(X, Y), RECIPE, quiet=True)
    assert not torch.equal(before, model.first.weight)


# Inputs -------------------------------------------------------------------------------------------------------------


class Overwriting(nn.Module):
    """Begin with an in-place operation."""

    def __init__(self, first: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.layer = first or nn.ReLU(inplace=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x[:] = 3 - x
        return self.table(x).mean(1)


def overwriting(members: int = 2, **settings: Any) -> se.Ensemble:
    torch.manual_seed(0)
    return se.Ensemble([Overwriting(**settings) for _ in range(members)])


CALLS: dict[str, Callable[[se.Ensemble, Any], Any]] = {
    "predict": lambda ensemble, x: ensemble.predict(x),
    "predict_proba": lambda ensemble, x: ensemble.predict_proba(x),
    "logits": lambda ensemble, x: ensemble.logits(x, batch_size=7),
    "uncertainty": lambda ensemble, x: ensemble.uncertainty(x),
    "forward": lambda ensemble, x: ensemble(torch.as_tensor(x)),
    "calibrate": lambda ensemble, x: ensemble.calibrate((x, Y)),
    "threshold_for": lambda ensemble, x: ensemble.threshold_for((x, Y), keep=0.9),
    "conformal": lambda ensemble, x: ensemble.conformal((x, Y)),
    "evaluate": lambda ensemble, x: se.evaluate(ensemble, se.Data.from_arrays(x, Y, test=(x, Y), standardize=False)),
    "loader": lambda ensemble, x: ensemble.logits(DataLoader(torch.as_tensor(x), batch_size=None, sampler=[slice(60)])),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_predict_leaves_inputs_unchanged(call: str, kind: str) -> None:
    given: Any = X.clone() if kind == "tensor" else X.numpy().copy()
    CALLS[call](overwriting(), given)
    assert np.array_equal(np.asarray(given), X.numpy())


def test_predict_leaves_ids_and_several_inputs_unchanged() -> None:
    ids = torch.randint(4, (10, 5), generator=GENERATOR)
    given = ids.clone()
    ensemble = se.Ensemble([Tokens(), Tokens()])
    ensemble.ids = True
    ensemble.logits(given)
    assert torch.equal(given, ids)

    class Two(Overwriting):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
            return self.layer(self.first(a).add_(b.mul_(2)))

    pair = X.clone(), X.clone()
    se.Ensemble([Two(), Two()])(pair)
    assert torch.equal(pair[0], X)
    assert torch.equal(pair[1], X)


def test_member_does_not_see_inputs_overwritten_by_another() -> None:
    negated = [Overwriting(first=torch.Tensor.neg_) for _ in range(3)]
    together = se.Ensemble(negated).logits(X)
    for number, member in enumerate(negated):
        assert torch.equal(together[number], se.Ensemble([member]).logits(X)[0])


@pytest.mark.parametrize("streamed", [False, True])
def test_training_and_validation_use_unmodified_inputs(streamed: bool) -> None:
    """Members equal networks trained alone, and the data stay unchanged."""
    inputs = X.clone()
    batches = DataLoader(TensorDataset(inputs, Y), batch_size=None, sampler=[slice(0, 30), slice(30, 60)])
    data = (
        se.Data.from_loaders(batches, validation=batches, classes=3)
        if streamed
        else se.Data.from_arrays(inputs, Y, standardize=False, validation=(inputs, Y))
    )

    def trained(members: int) -> se.Ensemble:
        ensemble = overwriting(members, first=torch.Tensor.neg_)
        se.train(ensemble, data, RECIPE, "cpu", quiet=True)
        return ensemble

    one, two = trained(1), trained(2)
    assert torch.equal(inputs, X)
    assert torch.equal(one.members[0].layer.weight, two.members[0].layer.weight)
    for member, row in enumerate(two.history.rows):
        alone = se.Ensemble([two.members[member]])
        right = (alone.predict(X.clone()) == Y).double().mean()
        assert row["validation_accuracy"] == pytest.approx(float(right))


def test_captured_prediction_copies_inputs_for_members_that_overwrite_them() -> None:
    assert prediction_graphs.overwrites_inputs(Overwriting(), X)
    assert not prediction_graphs.overwrites_inputs(nn.Linear(6, 3), X)


# Learners -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LEARNERS)
def test_changes_to_a_task_network_do_not_reach_the_learner(method: str) -> None:
    tasks = make_tasks(2)
    learner = LEARNERS[method](make_backbone(), **SHORT | {"epochs": 0})
    for task in tasks:
        learner.learn(task)
    before = logits_of(learner, tasks)
    with torch.no_grad():
        for network in (learner.network(0), learner.network(1), learner.ensemble(0), learner.ensemble(1)):
            for tensor in (*network.parameters(), *network.buffers()):
                tensor.add_(1)
    for number, logits in logits_of(learner, tasks).items():
        assert torch.equal(logits, before[number])
    x = inputs_of(tasks[0]).float() / 255
    given = x.clone()
    learner.predict(given, task=0)
    assert torch.equal(given, x)
