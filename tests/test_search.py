"""learn_scales and saliency against plain loops, with an unchanged model."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles import build
from structured_ensembles.data.batch_shares import assign_samples
from structured_ensembles.diversity import overlap_penalty
from structured_ensembles.resuming.folder import RunFile
from structured_ensembles.scaling import apply_scales
from structured_ensembles.search import _Search


def small_data(samples: int = 60, classes: int = 3) -> se.Data:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % classes
    images = torch.randn(samples, 2, 6, 6, generator=generator) + labels[:, None, None, None]
    return se.Data.from_arrays(images, labels, validation=0.2)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


@pytest.fixture
def walk() -> tuple[nn.Module, se.ChannelGraph, se.Data]:
    model, data = small_model(), small_data()
    return model, se.trace(model, data.example()), data


def under_scales(model: nn.Module, scales: se.Scales, member: int, x: Tensor, vectors: dict[str, Tensor]) -> Tensor:
    """Run the small model under one member's vectors, written out."""
    conv1, norm, _, conv2, *_, linear = model
    x = conv1(x)
    if scales.placement == "output":
        x = x * vectors["0"][member][:, None, None]
    mean, var = scales.statistics["1.running_mean"], scales.statistics["1.running_var"]
    x = F.batch_norm(x, mean, var, norm.weight, norm.bias)
    if scales.placement == "norm":
        x = x * vectors["0"][member][:, None, None]
    return linear(F.relu(conv2(F.relu(x)) * vectors["3"][member][:, None, None]).flatten(1))


@pytest.mark.parametrize("placement", ["output", "norm"])
@pytest.mark.parametrize(("members", "batch_size"), [(3, 16), (2, 7), (5, 3), (1, 64)])
def test_saliency_equals_a_loop_over_members_and_batches(walk, placement: str, members: int, batch_size: int) -> None:
    model, graph, data = walk
    scales = se.learn_scales(model, graph, data, members=members, epochs=1, placement=placement, batch_size=16)
    scores = se.saliency(model, graph, scales, data, batch_size=batch_size)
    assert len(scores) == members
    assert not any(value.requires_grad for value in scales.vectors.values())
    for member in range(members):
        vectors = {name: value.clone().requires_grad_() for name, value in scales.vectors.items()}
        totals = {name: torch.zeros(value.shape[1]) for name, value in vectors.items()}
        batches = list(data.batches("train", batch_size))
        for inputs, targets in batches:
            loss = F.cross_entropy(under_scales(model, scales, member, inputs, vectors), targets)
            for name, gradient in zip(vectors, torch.autograd.grad(loss, list(vectors.values())), strict=True):
                totals[name] += gradient[member].abs()
        for name, total in totals.items():
            torch.testing.assert_close(scores[member].values[name], total / len(batches), rtol=1e-4, atol=1e-7)


def test_model_is_bit_identical_after_search_and_saliency(walk) -> None:
    model, graph, data = walk
    model[0].weight.requires_grad_(False)
    model[3].eval()
    before = copy.deepcopy(model.state_dict())
    flags = [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    scales = se.learn_scales(model, graph, data, members=2, epochs=2)
    subnets = se.select(graph, se.saliency(model, graph, scales, data), prune=0.5)
    networks = [se.extract(model, graph, subnet) for subnet in subnets]
    for network in networks:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()] == flags
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())


def test_search_lowers_the_loss_and_keeps_the_best_epoch(walk) -> None:
    model, graph, data = walk
    scales = se.learn_scales(model, graph, data, members=3, epochs=60, diversity=None, rate=0.05, batch_size=16)
    losses = [figures["loss"] for figures in scales.history]
    assert losses[-1] < 0.9 * losses[0]
    # The vectors kept have the validation loss of the best epoch: compute it again, member by member.
    total, seen = 0.0, 0
    for step, (inputs, targets) in enumerate(data.batches("validation", 16)):
        for member, rows in enumerate(assign_samples(len(inputs), 3, step)):
            outputs = under_scales(model, scales, member, inputs[rows], scales.vectors).detach()
            total += float(F.cross_entropy(outputs, targets[rows])) * len(inputs) / 3
        seen += len(inputs)
    assert total / seen == pytest.approx(min(figures["validation_loss"] for figures in scales.history), rel=1e-5)


def test_first_step_equals_adam_on_the_papers_loss(walk) -> None:
    """One step by hand: every member on its share, batch statistics shared, penalty over pairs."""
    model, graph, data = walk
    drawn = se.Scales.draw(graph, 2, seed=3)
    learned = se.learn_scales(model, graph, data, members=2, epochs=1, seed=3, batch_size=1000, strength=0.1)
    inputs, targets = next(iter(data.batches("train", 1000, seed=(3, 0))))
    vectors = {name: value.clone().requires_grad_() for name, value in drawn.vectors.items()}
    conv1, norm, _, conv2, *_, linear = model
    half = len(inputs) // 2
    owner = torch.arange(len(inputs)) // half
    x = conv1(inputs) * vectors["0"][owner][:, :, None, None]
    x = F.relu(F.batch_norm(x, None, None, norm.weight, norm.bias, training=True))
    outputs = linear(F.relu(conv2(x) * vectors["3"][owner][:, :, None, None]).flatten(1))
    loss = F.cross_entropy(outputs, targets)  # equal shares: the mean of the members' means
    distance = sum(se.mmd2(value[0], value[1]) for value in vectors.values())
    (loss + 0.1 / (distance + 1e-6)).backward()
    for name, value in vectors.items():
        # Adam's first step is the rate times the sign of the gradient.
        moved = drawn.vectors[name] - 1e-3 * value.grad / (value.grad.abs() + 1e-8)
        torch.testing.assert_close(learned.vectors[name], moved, rtol=0, atol=2e-5)


def test_each_row_is_scaled_by_its_members_vectors(walk) -> None:
    model, graph, data = walk
    scales = se.Scales.draw(graph, 3)
    x = data.example(4)
    with apply_scales(model.eval(), graph, scales.vectors, "output"):
        together = model(x.repeat(3, 1, 1, 1))
    statistics = {f"1.{name}": getattr(model[1], name) for name in ("running_mean", "running_var")}
    with_statistics = se.Scales(scales.vectors, "output", statistics)
    for member, rows in enumerate(together.chunk(3)):
        torch.testing.assert_close(rows, under_scales(model, with_statistics, member, x, scales.vectors))


def test_search_accepts_regression_and_a_user_loss() -> None:
    x, y = torch.randn(50, 4), torch.randn(50)
    data = se.Data.from_arrays(x, y)
    assert data.task == "regression"
    model = se.zoo.mlp(4, 1, hidden=(8,))
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=2, epochs=2)
    default = se.saliency(model, graph, scales, data)
    same = se.saliency(model, graph, scales, data, loss=lambda o, t: (o[:, 0] - t).square().mean())
    other = se.saliency(model, graph, scales, data, loss=lambda o, t: (o[:, 0] - t).abs().mean())
    torch.testing.assert_close(default[0].values["layers.1"], same[0].values["layers.1"])
    assert not torch.allclose(default[0].values["layers.1"], other[0].values["layers.1"])


def test_overlap_penalty_makes_members_prefer_other_neurons() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    model = se.zoo.mlp(64, hidden=(32, 32))
    graph = se.trace(model, data.example())

    def agreement(strength: float) -> float:
        settings = {"members": 3, "epochs": 6, "rate": 0.02, "diversity": "overlap"}
        scores = se.saliency(model, graph, se.learn_scales(model, graph, data, strength=strength, **settings), data)
        return float(
            overlap_penalty([torch.stack([score.values[name] for score in scores]) for name in graph.prunable])
        )

    assert agreement(5.0) < agreement(0.0) - 0.15


def test_same_seed_gives_the_same_scales(walk) -> None:
    model, graph, data = walk
    first, second, other = (se.learn_scales(model, graph, data, members=2, epochs=2, seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(value, second.vectors[name]) for name, value in first.vectors.items())
    assert not all(torch.equal(value, other.vectors[name]) for name, value in first.vectors.items())


@pytest.mark.parametrize(
    ("initial", "mean", "deviation"),
    [("N(0,1)", 0, 1), ("N(0,5)", 0, 5), ("U(0,1)", 0.5, 0.289), ("U(-1,1)", 0, 0.577), ("N(1,0.1)", 1, 0.1)],
)
def test_initial_scales_follow_their_distribution(initial: str, mean: float, deviation: float) -> None:
    model = se.zoo.mlp(4, 2, hidden=(4000,))
    values = se.Scales.draw(se.trace(model, torch.randn(2, 4)), 3, initial).vectors["layers.1"]
    assert float(values.mean()) == pytest.approx(mean, abs=4 * deviation / 12000**0.5)
    assert float(values.std()) == pytest.approx(deviation, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"members": 0}, "members must be"),
        ({"diversity": "cosine"}, "diversity must be one of 'mmd', 'overlap', None"),
        ({"placement": "input"}, "placement must be one of"),
        ({"initial": "N(1,1)"}, "initial must be one of"),
        ({"epochs": -1}, "epochs must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"strength": float("nan")}, "strength must be"),
    ],
)
def test_invalid_arguments_are_errors(walk, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.learn_scales(*walk, **arguments)


def test_arguments_are_checked_before_the_network_runs() -> None:
    """The normalisation that a network expects is found by evaluating it, which takes a while."""
    passes = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passes.append(len(x))
            return super().forward(x)

    pixels = torch.randint(0, 256, (40, 4), dtype=torch.uint8)
    data = se.Data.from_arrays(pixels, torch.arange(40) % 3, normalization="auto")
    model = nn.Sequential(Counting(4, 8), nn.ReLU(), nn.Linear(8, 3))
    graph = se.trace(model, data.example())
    passes.clear()
    for wrong in ({"rate": -1.0}, {"strength": float("nan")}, {"precision": "half"}, {"seed": 2**70}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            se.learn_scales(model, graph, data, **wrong)  # type: ignore[arg-type]
    assert not passes


def test_nan_loss_stops_the_search(walk) -> None:
    model, graph, data = walk
    with pytest.raises(FloatingPointError, match=r"loss became nan in epoch 1.*`data`"):
        se.learn_scales(model, graph, data, members=2, loss=lambda o, t: o.mean() * float("nan"))


def test_validation_split_without_a_finite_loss_is_refused() -> None:
    """No epoch would be the best, and the vectors would be those of before the search."""
    outlier = torch.cat([torch.randn(5, 4), torch.full((1, 4), 3e38)])
    data = se.Data.from_arrays(torch.randn(40, 4), torch.arange(40) % 3, validation=(outlier, torch.arange(6) % 3))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.ones_(model[0].weight)  # the sum of an outlier's values overflows
    with pytest.raises(FloatingPointError, match=r"validation split was (nan|inf) in every epoch"):
        se.learn_scales(model, se.trace(model, data.example()), data, members=2, epochs=2, quiet=True)


def test_more_labels_than_outputs_are_refused_before_any_work(walk) -> None:
    model, graph, _ = walk
    with pytest.raises(ValueError, match=r"data has 4 classes, but the model has 3 outputs"):
        se.learn_scales(model, graph, small_data(classes=4))


def test_model_without_prunable_channels_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    data = small_data()
    with pytest.raises(ValueError, match="no prunable channels"):
        se.learn_scales(model, se.trace(model, data.example()), data)


def dropout_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(80, 3)
    )


def tensors_of_scales(scales: se.Scales) -> list[Tensor]:
    return [*scales.vectors.values(), *scales.statistics.values()]


@pytest.mark.parametrize("validation", [0.2, 0.0])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_interrupted_search_resumes_to_the_same_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, validation: float
) -> None:
    """With dropout, batch statistics and momentum."""
    model, data = dropout_model(), small_data()
    data = data if validation else replace(data, validation=None)
    graph = se.trace(model, data.example())
    settings = {"members": 2, "epochs": 4, "rate": 0.1, "batch_size": 16, "quiet": True}
    uninterrupted = se.learn_scales(model, graph, data, **settings)
    file = RunFile(tmp_path / "search.safetensors", {"seed": 0})
    learned, epoch = [], _Search.epoch

    def counted(self: _Search, feed: Any, seed: Any, learn: bool, **more: Any) -> float:
        if learn and len(learned) == stop:
            raise KeyboardInterrupt
        learned.extend([seed] * learn)
        return epoch(self, feed, seed, learn, **more)

    monkeypatch.setattr(_Search, "epoch", counted)
    with pytest.raises(KeyboardInterrupt):
        se.learn_scales(model, graph, data, checkpoint=file, **settings)
    assert len(learned) == stop
    learned.clear()
    stop = -1
    resumed = se.learn_scales(model, graph, data, checkpoint=file, **settings)
    assert [seed[1] for seed in learned] == list(range(4))[4 - len(learned) :]
    assert len(learned) < 4
    assert all(map(torch.equal, tensors_of_scales(resumed), tensors_of_scales(uninterrupted)))
    assert resumed.history == uninterrupted.history
    learned.clear()
    again = se.learn_scales(model, graph, data, checkpoint=file, **settings)  # as after a kill in what follows
    assert learned == []
    assert all(map(torch.equal, tensors_of_scales(again), tensors_of_scales(uninterrupted)))


def test_checkpoint_of_another_search_is_refused(walk, tmp_path: Path) -> None:
    model, graph, data = walk
    path = tmp_path / "search.safetensors"
    settings = {"members": 2, "epochs": 1, "quiet": True}
    se.learn_scales(model, graph, data, checkpoint=RunFile(path, {"seed": 1}), **settings)
    with pytest.raises(ValueError, match="of another run, which differs in seed"):
        se.learn_scales(model, graph, data, checkpoint=RunFile(path, {"seed": 2}), **settings)
    with pytest.raises(ValueError, match="does not fit this search"):  # of other shapes, whoever says what
        se.learn_scales(model, graph, data, checkpoint=RunFile(path, {"seed": 1}), **{**settings, "members": 3})
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(se.ArtifactError, match="do not match its checksum"):
        se.learn_scales(model, graph, data, checkpoint=RunFile(path, {"seed": 1}), **settings)


def test_checkpoint_may_be_a_path_and_knows_its_search(walk, tmp_path: Path) -> None:
    model, graph, data = walk
    path = tmp_path / "search.safetensors"
    settings = {"members": 2, "epochs": 1, "quiet": True}
    first = se.learn_scales(model, graph, data, checkpoint=str(path), strength=np.float32(0.5), **settings)
    written = path.read_bytes()
    again = se.learn_scales(model, graph, data, checkpoint=path, strength=0.5, **settings)
    assert path.read_bytes() == written  # no epoch was left to learn
    assert all(map(torch.equal, tensors_of_scales(again), tensors_of_scales(first)))
    for name, value in {"seed": 1, "strength": 0.2, "placement": "norm", "rate": 0.01}.items():
        with pytest.raises(ValueError, match=f"of another run, which differs in .*{name}"):
            se.learn_scales(model, graph, data, checkpoint=path, **{"strength": 0.5, **settings, name: value})
    with pytest.raises(ValueError, match="differs in loss"):
        se.learn_scales(model, graph, data, checkpoint=path, strength=0.5, loss=F.cross_entropy, **settings)


def test_folder_keeps_an_interrupted_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the saliency: the second call does not search again, and gives the same."""
    data, recipe = small_data(), se.Recipe(epochs=1)
    settings = {"members": 2, "recipe": recipe, "search_epochs": 2, "quiet": True}
    uninterrupted = se.structured_ensemble(dropout_model(), data, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(build, "saliency", interrupt)
        with pytest.raises(KeyboardInterrupt):
            se.structured_ensemble(dropout_model(), data, folder=tmp_path, **settings)
    searched, epoch = [], _Search.epoch
    monkeypatch.setattr(
        _Search, "epoch", lambda *arguments, **keywords: searched.append(1) or epoch(*arguments, **keywords)
    )
    resumed = se.structured_ensemble(dropout_model(), data, folder=tmp_path, **settings)
    assert searched == []
    assert resumed.subnets == uninterrupted.subnets
    states = [ensemble.state_dict().values() for ensemble in (resumed, uninterrupted)]
    assert all(map(torch.equal, *states))
    assert not (tmp_path / "checkpoint-search.safetensors").exists()


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_half_precision_networks_are_searched_with_exact_targets() -> None:
    """In bfloat16, targets around 100,000 are multiples of 512: their standardised values were mostly alike."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = se.Data.from_arrays(x, x.sum(1) + 1e5)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)).to(dtype)
        graph = se.trace(model, data.example(dtype=dtype))
        history = se.learn_scales(model, graph, data, 2, diversity=None, epochs=1, device="cpu", quiet=True).history
        losses.append(history[0]["validation_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
