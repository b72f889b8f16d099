"""Optimizers: groups by rule, built for the engine, with state that survives a change of engine."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.cuda.capture import CaptureError, Step
from structured_ensembles.training import graph_engine as graph
from structured_ensembles.training.engine import Member, Result
from structured_ensembles.training.optimizers import optimizer_for
from tests.support.engines import Stopped, change_validation, stop_before_epoch, use_engine
from tests.support.networks import Sparse, Viewing, network
from tests.support.real_data import few_digits
from tests.support.states import weights


def test_rules_put_parameters_into_groups() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    rules = (se.ParameterRule("*.bias", weight_decay=0.0), se.ParameterRule("1.*", rate_factor=0.1))
    optimizer = optimizer_for(se.Recipe(rate=0.2, weight_decay=0.01, rules=rules), net)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = {
        tuple(names[id(parameter)] for parameter in group["params"]): (group["weight_decay"], group["lr"])
        for group in optimizer.param_groups
    }
    assert groups == {
        ("0.weight", "2.weight"): (0.01, 0.2),
        ("0.bias",): (0.0, 0.2),
        ("1.weight", "1.bias"): (0.01, pytest.approx(0.02)),  # of two rules that fit, the last
    }


def test_rules_round_trip_through_a_dict() -> None:
    recipe = se.Recipe(rules=[{"pattern": "*.bias", "weight_decay": 0.0}])  # type: ignore[arg-type]
    assert recipe.rules == (se.ParameterRule("*.bias", weight_decay=0.0),)
    assert se.Recipe(**recipe.to_dict()) == recipe
    of_numpy = se.ParameterRule("*", np.float32(0.5), np.float64(0.25))  # type: ignore[arg-type]
    assert json.loads(json.dumps(se.Recipe(rules=(of_numpy,)).to_dict()))["rules"][0]["rate_factor"] == 0.5
    with pytest.raises(ValueError, match="rate_factor must be a finite number"):
        se.ParameterRule("*", rate_factor=-1)
    with pytest.raises(TypeError, match="each of rules must be a ParameterRule"):
        se.Recipe(rules=("*.bias",))  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ["loop", "graph"])
def test_batch_ensemble_factors_have_no_decay_and_half_the_rate(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one step of SGD, factors moved by half the rate, and weights also by their decay."""
    use_engine(monkeypatch, engine)
    data = few_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    size = len(data.train)
    recipe = se.Recipe(
        epochs=1, batch_size=size, rate=0.1, momentum=0.0, weight_decay=0.5, warmup=0, schedule="constant", keep="last",
        augmentation="none",
    )  # fmt: skip
    changes = {}
    for decay in (0.0, 0.5):
        ensemble = se.methods.batch_ensemble(model, data, 2, recipe=replace(recipe, weight_decay=decay), quiet=True)
        changes[decay] = weights(ensemble.members[0])
    for name, tensor in changes[0.5].items():
        moved = bool((tensor != changes[0.0][name]).any())
        assert moved == (not name.endswith("_factors")), name

    rule = se.ParameterRule("*_factors", weight_decay=0.0, rate_factor=1.0)  # the user's rule comes last
    faster = se.methods.batch_ensemble(model, data, 2, recipe=replace(recipe, rules=(rule,)), quiet=True)
    slow, fast = changes[0.5]["network.1.input_factors"], weights(faster.members[0])["network.1.input_factors"]
    start = slow.sign()
    torch.testing.assert_close(fast - start, 2 * (slow - start), rtol=1e-4, atol=1e-6)


class Refusing:
    """Refuse captures from some call on; before that, return the steps as they are."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, steps: list[Step], *_: object, **__: object) -> list[Step]:
        self.after -= 1
        if self.after < 0:
            raise CaptureError("it waits for the device")
        return list(steps)


def test_sparse_gradients_train_after_a_capture_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fused optimizer of a graph does not take sparse gradients; the loop builds its own."""
    use_engine(monkeypatch, "graph")
    monkeypatch.setattr(graph, "all_captured", Refusing(after=0))
    recipe = se.Recipe(epochs=3, batch_size=32, rate=3.0, momentum=0.0, weight_decay=0.0)
    with caplog.at_level(logging.WARNING, "structured_ensembles"):
        history = se.train(se.Ensemble([Sparse()]), few_digits(), recipe, "cpu", quiet=True)
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert history.engine == "loop"
    assert [record.message for record in caplog.records if "slower" in record.message] == history.fallbacks
    assert history.fallbacks == [
        "PyTorch's own kernels are used, slower: an embedding has sparse gradients",
        "training goes on without a CUDA graph, slower: it waits for the device",
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_fallback_from_graph_to_loop_keeps_momentum(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first member stops, the others are captured again, which fails here."""

    def trained(engine: Literal["loop", "graph"]) -> se.History:
        use_engine(monkeypatch, engine)
        monkeypatch.setattr(graph, "all_captured", Refusing(after=1))
        recipe = se.Recipe(epochs=5, rate=0.01, optimizer=optimizer, warmup=0, schedule="constant")
        ensemble = se.Ensemble([network(0, dropout=0.0), network(1, dropout=0.0)])
        with pytest.warns(UserWarning, match="member 0 stops"):
            return se.train(ensemble, few_digits(), recipe, seed=3, quiet=True)

    def diverged_in_the_second_epoch(member: Member, result: Result) -> Result:
        return (math.nan, result[1]) if member.number == 0 and member.best_epoch == 0 else result

    change_validation(monkeypatch, diverged_in_the_second_epoch)
    graph_history, loop_history = trained("graph"), trained("loop")
    assert graph_history.engine == "graph, then loop"
    assert loop_history.engine == "loop"
    close = 1e-4 if optimizer == "sgd" else 3e-2
    losses = [[row["loss"] for row in history.of(1)] for history in (graph_history, loop_history)]
    assert losses[0] == pytest.approx(losses[1], rel=close)


def test_failed_capture_leaves_members_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "all_captured", Refusing(after=0))
    prepared: list[Member] = []
    prepare = graph.GraphEngine.prepare

    def watched(self: graph.GraphEngine, active: list[Member]) -> None:
        before = [weights(member.network) for member in active]
        try:
            prepare(self, active)
        finally:
            prepared.extend(active)
            assert all(member.optimizer_state.optimizer is None for member in active)
            for member, expected in zip(active, before, strict=True):
                assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(member.network).items())

    monkeypatch.setattr(graph.GraphEngine, "prepare", watched)
    use_engine(monkeypatch, "graph")
    se.train(se.Ensemble([network(0)]), few_digits(), se.Recipe(epochs=1), "cpu", quiet=True)
    assert len(prepared) == 1
    group = prepared[0].optimizer_state.optimizer.param_groups[0]  # type: ignore[union-attr]
    assert isinstance(group["lr"], float)


def test_network_that_cannot_run_channels_last_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "structured_ensembles"):
        history = se.train(se.Ensemble([Viewing(1), Viewing(1)]), few_digits(), se.Recipe(epochs=2), quiet=True)
    assert len(history.fallbacks) == 1
    assert "weights of convolutions stay channels first, slower" in history.fallbacks[0]
    assert [record.message for record in caplog.records] == history.fallbacks


def test_network_with_hooks_trains_without_a_program_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 10))
    calls: list[int] = []
    net[2].register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    use_engine(monkeypatch, "graph")
    bfloat16 = se.Execution(precision="bfloat16")
    history = se.train(se.Ensemble([net]), few_digits(), se.Recipe(epochs=1), "cpu", execution=bfloat16, quiet=True)
    assert history.engine == "graph"
    assert history.fallbacks == ["PyTorch's own kernels are used, slower: the network has hooks"]
    assert calls


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("first", ["loop", "graph"])
def test_resumed_run_may_change_its_engine(
    optimizer: str, first: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Momentum comes from the checkpoint, rates from the new engine; the history names both."""

    def trained(engine: Any, stop: int | None, checkpoint: Path | None = None) -> se.History:
        ensemble = se.Ensemble([network(0, dropout=0.0), network(1, dropout=0.0)])
        recipe = se.Recipe(epochs=6, rate=0.01, optimizer=optimizer, augmentation="crop")
        with monkeypatch.context() as patch:
            use_engine(patch, engine)
            stop_before_epoch(patch, stop)
            return se.train(ensemble, few_digits(), recipe, seed=3, checkpoint=checkpoint, quiet=True)

    other = "graph" if first == "loop" else "loop"
    expected = trained("loop", None)
    with pytest.raises(Stopped):
        trained(first, 3, tmp_path / "checkpoint.safetensors")
    history = trained(other, None, tmp_path / "checkpoint.safetensors")
    assert history.engine == f"{first}, then {other}"
    close = 1e-4 if optimizer == "sgd" else 3e-2
    losses = [[row["loss"] for row in run.rows] for run in (history, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=close)


def test_rule_without_a_matching_parameter_is_refused() -> None:
    recipe = se.Recipe(epochs=1, rules=(se.ParameterRule("*.bais", weight_decay=0.0),))
    with pytest.raises(
        ValueError, match=r"pattern '\*.bais' of a rule fits no parameter; parameters have names such as 0.bias"
    ):
        se.train(se.Ensemble([network(0)]), few_digits(), recipe, quiet=True)
