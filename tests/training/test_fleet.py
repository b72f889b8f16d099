"""train(): members equal networks trained alone, runs resume, and a diverging member stops alone."""

import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import structured_ensembles as se
from structured_ensembles.data.augmentation import augment, draw_crops, resolve_augmentation
from structured_ensembles.data.drawing import derive_seed
from structured_ensembles.training import optimizers
from structured_ensembles.training.optimizers import optimizer_for
from tests.support.engines import use_engine
from tests.support.fork_server import ForkServer, Program
from tests.support.networks import Sparse, network
from tests.support.paths import ROOT
from tests.support.real_data import few_digits
from tests.support.states import equal, weights

RECIPE = se.Recipe(epochs=4, batch_size=64, rate=0.05, augmentation="crop")


class Gaps(nn.Module):
    """Use a weight that is a strided view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((0.1 * torch.randn(64, 20))[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) @ self.weight


class Late(nn.Module):
    """Use a layer from the third batch on, and then in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra, self.batches = nn.Linear(64, 10), nn.Linear(64, 10), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.batches += self.training
        extra = self.extra(x.flatten(1)) if self.batches > 2 and self.batches % 2 else 0
        return self.body(x.flatten(1)) + extra


class Relaid(nn.Sequential):
    """Permute the layout of a gradient by a hook."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 10))

        def relay(weight: torch.Tensor) -> None:
            weight.grad = weight.grad.clone(memory_format=torch.contiguous_format)

        self[1].weight.register_post_accumulate_grad_hook(relay)


@pytest.mark.parametrize("network_class", [Gaps, Sparse, Late, Relaid, se.zoo.lenet5])
def test_fused_and_plain_optimizers_train_unusual_networks_equally(
    network_class: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused optimizer kernels fail or are wrong for some of them."""
    momentum = 0.0 if network_class is Sparse else 0.9
    rate = 3.0 if network_class is Sparse else 0.005
    recipe = se.Recipe(epochs=3, batch_size=32, rate=rate, momentum=momentum, nesterov=False, weight_decay=0.0)
    data = few_digits()
    if network_class is se.zoo.lenet5:
        images = F.interpolate(data.train.inputs.float(), 28).byte()
        data = se.Data.from_arrays(images, data.train.targets)
    losses = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(optimizers, "can_be_fused", lambda parameter: False)
        torch.manual_seed(0)
        history = se.train(se.Ensemble([network_class()]), data, recipe, "cpu", quiet=True)
        losses.append([row["loss"] for row in history.rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def test_ordinary_networks_use_the_fused_optimizer() -> None:
    for optimizer in ("sgd", "adam", "adamw"):
        network = se.zoo.resnet20().to(memory_format=torch.channels_last)
        network(torch.randn(4, 3, 8, 8)).sum().backward()
        built = optimizer_for(se.Recipe(optimizer=optimizer), network)
        built.step()
        assert built.param_groups[0]["fused"] is True
        assert not optimizer_for(se.Recipe(optimizer=optimizer), Gaps()).param_groups[0]["fused"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_parameters_of_any_dtype_are_updated(dtype: torch.dtype, optimizer: str) -> None:
    """Torch's fused kernels do not update half precision on a CPU."""
    network, reference = se.zoo.mlp(64).to(dtype), se.zoo.mlp(64).to(dtype)
    reference.load_state_dict(network.state_dict())
    recipe = se.Recipe(optimizer=optimizer)
    optimizer_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    settings = {"momentum": recipe.momentum, "nesterov": recipe.nesterov} if optimizer == "sgd" else {}
    plain = optimizer_class(
        reference.parameters(), recipe.rate, weight_decay=recipe.weight_decay, foreach=False, **settings
    )
    step = optimizer_for(recipe, network)
    for _ in range(3):
        for one, other in zip(network.parameters(), reference.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        step.step()
        plain.step()
    for one, other in zip(network.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5 if dtype == torch.float64 else 1e-2, atol=1e-6)


def test_gradients_are_gone_after_training() -> None:
    ensemble = se.Ensemble([network(0), network(1)])
    se.train(ensemble, few_digits(), se.Recipe(epochs=1), "cpu", quiet=True)
    assert all(parameter.grad is None for parameter in ensemble.parameters())


def test_member_without_trained_parameters_is_refused() -> None:
    ensemble = se.Ensemble([network(0), network(1).requires_grad_(False)])
    with pytest.raises(ValueError, match="member 1 has no parameter that requires gradients"):
        se.train(ensemble, few_digits(), se.Recipe(epochs=1), "cpu", quiet=True)
    assert se.train(ensemble, few_digits(), se.Recipe(epochs=0), "cpu", quiet=True).epochs == 0


@pytest.mark.parametrize("engine", ["loop", "graph"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_networks_learn_exact_targets(
    dtype: torch.dtype, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision 100,000 is infinite, or rounded to a multiple of 512; networks learn standardised targets."""
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    data = se.Data.from_arrays(x, x.sum(1) + 1e5)
    use_engine(monkeypatch, engine)
    torch.manual_seed(0)
    ensemble = se.Ensemble([nn.Linear(4, 1).to(dtype)])
    history = se.train(ensemble, data, se.Recipe(epochs=5, batch_size=32, rate=0.05, warmup=0.0), "cpu", quiet=True)
    assert [row["validation_loss"] for row in history.rows][-1] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_member_equals_the_network_trained_alone(optimizer: str) -> None:
    data, recipe = few_digits(), se.Recipe(epochs=4, rate=0.02, optimizer=optimizer, augmentation="crop", patience=2)
    makers = [lambda: network(0), lambda: network(1, width=5), lambda: network(2, width=12, dropout=0.5)]
    fleet = se.Ensemble([make() for make in makers])
    se.train(fleet, data, recipe, seed=7, quiet=True)
    for number, (member, make) in enumerate(zip(fleet.members, makers, strict=True)):
        alone = se.Ensemble([make()])
        se.train(alone, data, recipe, seed=7, numbers=[number], quiet=True)
        assert equal(weights(member), weights(alone.members[0]))
        assert not equal(weights(member), weights(make()))


def test_training_equals_a_plain_pytorch_loop() -> None:
    """Three epochs of SGD."""
    data = few_digits()
    recipe = se.Recipe(epochs=3, batch_size=50, rate=0.1, warmup=1.0, weight_decay=1e-3, augmentation="none")
    ours = se.Ensemble([network(0, dropout=0.0)])
    history = se.train(ours, data, recipe, seed=5, quiet=True)

    plain = network(0, dropout=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, 0.9, weight_decay=1e-3, nesterov=True)
    best = -1.0
    steps = -(-len(data.train) // 50)
    for epoch in range(3):
        plain.train()
        losses = []
        for step, (images, labels) in enumerate(data.train.batches(50, derive_seed(5, "order", 0, epoch))):
            done = (epoch * steps + step) / steps
            rate = 0.1 * (step + 1) / steps if epoch == 0 else 0.05 * (1 + np.cos(np.pi * (done - 1) / 2))
            optimizer.param_groups[0]["lr"] = rate
            loss = F.cross_entropy(plain(data.prepare(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        plain.eval()
        with torch.no_grad():
            outputs = plain(data.prepare(data.validation.inputs[data.validation.index]))
            truth = data.validation.targets[data.validation.index]
        score = float((outputs.argmax(1) == truth).double().mean())
        row = history.of(0)[epoch]
        assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert row["validation_loss"] == pytest.approx(float(F.cross_entropy(outputs, truth)), rel=1e-4)
        assert row["validation_accuracy"] == pytest.approx(score)
        if score >= best:
            best, kept = score, weights(plain)
    for name, tensor in ours.members[0].state_dict().items():
        torch.testing.assert_close(tensor, kept[name], rtol=1e-4, atol=1e-6)


CHILD = """
    import sys, time
    sys.path.insert(0, sys.argv[2])
    import torch
    torch.set_num_threads(1)
    import structured_ensembles as se
    from tests.support.real_data import few_digits
    from tests.support.networks import network
    from structured_ensembles.training.loop_engine import LoopEngine

    train_epoch = LoopEngine.train_epoch
    def slowly(*arguments):  # so that the parent can hit any moment of an epoch
        losses = train_epoch(*arguments)
        time.sleep(0.05)
        return losses
    LoopEngine.train_epoch = slowly
    ensemble = se.Ensemble([network(0), network(1, width=5)])
    recipe = se.Recipe(epochs=8, batch_size=64, rate=0.05, optimizer=sys.argv[3], augmentation="crop")
    se.train(ensemble, few_digits(), recipe, seed=3, checkpoint=sys.argv[1] + "/checkpoint.safetensors", quiet=True)
    ensemble.save(sys.argv[1] + "/final.safetensors")
"""


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_killed_run_resumes_to_the_same_weights(tmp_path: Path, programs: ForkServer, optimizer: str) -> None:
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))

    def start(folder: Path) -> Program:
        folder.mkdir(exist_ok=True)
        return programs.start(script, str(folder), str(ROOT), optimizer)

    uninterrupted, broken = tmp_path / "whole", tmp_path / "broken"
    first = start(uninterrupted)
    assert first.wait() == 0, first.stderr.read_text()
    kills = 0
    for wait in (0.05, 0.21, 0.4):
        child = start(broken)
        before = _epochs_done(broken)
        deadline = time.monotonic() + 60
        while _epochs_done(broken) <= before and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait)  # somewhere in a later epoch
        if child.poll() is None:
            child.kill()
            kills += 1
        child.wait()
    assert kills >= 2
    last = start(broken)
    assert last.wait() == 0, last.stderr.read_text()
    assert equal(load_file(uninterrupted / "final.safetensors"), load_file(broken / "final.safetensors"))
    assert not list(broken.glob("*.part"))


def _epochs_done(folder: Path) -> float:
    path = folder / "checkpoint.safetensors"
    return path.stat().st_mtime_ns if path.exists() else 0


def test_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, checkpoint=path, quiet=True)
    with pytest.raises(ValueError, match="is of another run") as raised:
        se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, seed=1, checkpoint=path, quiet=True)
    assert not isinstance(raised.value, se.ArtifactError)  # the file is sound
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(se.ArtifactError, match=r"not a checkpoint.*delete it"):
        se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, checkpoint=path, quiet=True)


class Exploding(nn.Module):
    """Return infinity after some steps."""

    def __init__(self, inner: nn.Module, after: int) -> None:
        super().__init__()
        self.inner, self.after = inner, after
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
        return self.inner(x) * (float("inf") if self.steps > self.after else 1.0)


def test_diverging_member_stops_alone_with_its_best_weights() -> None:
    data = few_digits()
    steps = data.num_batches("train", 64)
    ensemble = se.Ensemble([network(0), Exploding(network(1), after=2 * steps + 1)])
    with pytest.warns(
        UserWarning, match=r"member 1 stops with the weights of epoch [12]: its loss became (nan|inf) in epoch 3.*lower"
    ):
        history = se.train(ensemble, data, RECIPE, quiet=True)
    assert len(history.of(0)) == 4
    assert len(history.of(1)) == 3
    assert "became" in history.stopped[1]
    assert all(bool(tensor.isfinite().all()) for tensor in ensemble.members[1].state_dict().values())
    alone = se.Ensemble([network(0)])
    se.train(alone, data, RECIPE, quiet=True)
    assert equal(weights(alone.members[0]), weights(ensemble.members[0]))


def test_early_stopping_keeps_the_best_epoch() -> None:
    data = few_digits()
    recipe = se.Recipe(epochs=60, rate=0.3, warmup=0, schedule="constant", patience=2, augmentation="none")
    ensemble = se.Ensemble([network(0), network(1)])
    history = se.train(ensemble, data, recipe, quiet=True)
    assert history.stopped == {
        0: "no better validation result for 2 epochs",
        1: "no better validation result for 2 epochs",
    }
    for number, member in enumerate(ensemble.members):
        rows = history.of(number)
        assert len(rows) < 60
        scores = [row["validation_accuracy"] for row in rows]
        best = len(scores) - 1 - scores[::-1].index(max(scores))  # of equal epochs, the last
        assert scores.index(max(scores)) == len(scores) - 3  # two epochs without a better one
        with torch.no_grad():
            outputs = member(data.prepare(data.validation.inputs[data.validation.index]))
        truth = data.validation.targets[data.validation.index]
        assert float(F.cross_entropy(outputs, truth)) == pytest.approx(rows[best]["validation_loss"], rel=1e-4)


@pytest.mark.parametrize(("scale", "max_error"), [(1.0, 0.45), (100.0, 0.85)])
def test_regression_is_learned_with_default_settings(scale: float, max_error: float) -> None:
    """Large targets diverge at the rate of classification."""
    torch.manual_seed(0)
    x = torch.rand(1000, 6)
    y = scale * (3 + torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] - x[:, 3])
    data = se.Data.from_arrays(x[:800], y[:800], test=(x[800:], y[800:]))
    ensemble = se.structured_ensemble(se.zoo.mlp(6, 1), data, members=2, search_epochs=1, quiet=True)
    error = se.evaluate(ensemble, data)["reg/rmse"]
    assert error < max_error * float(y[800:].std())


def test_regression_trains_without_validation_and_from_loaders() -> None:
    x = torch.randn(200, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    recipe = se.Recipe(epochs=30, rate=0.02, optimizer="adam", weight_decay=0.0)
    data = se.Data.from_arrays(x, y, validation=0.0, test=(x, y))
    ensemble = se.Ensemble([se.zoo.mlp(3, 1, hidden=(16,)) for _ in range(2)])
    se.train(ensemble, data, recipe, quiet=True)
    assert se.evaluate(ensemble, data)["reg/rmse"] < 0.3
    assert ensemble.spread(x).shape == (200,)  # as the targets

    dataset = torch.utils.data.TensorDataset(x, (y > 0).long())
    loader = torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True)
    streamed = se.Data.from_loaders(loader, validation=loader, test=loader, classes=2)
    first, second = (se.Ensemble([_seeded_mlp()]) for _ in range(2))
    for ensemble in (first, second):
        se.train(ensemble, streamed, se.Recipe(epochs=5, rate=0.05), seed=2, quiet=True)
    assert equal(weights(first), weights(second))  # the seed decides a loader's order too
    assert se.evaluate(first, streamed)["cls/accuracy"] > 0.9


def _seeded_mlp() -> nn.Module:
    torch.manual_seed(0)
    return se.zoo.mlp(3, 2, hidden=(16,))


def test_named_recipes_have_their_rates() -> None:
    paper = se.Recipe.named("paper")
    assert [paper.rate_at(epoch * 10, 10) for epoch in (0, 49, 50, 100, 150, 199)] == pytest.approx(
        [0.1, 0.1, 0.08, 0.064, 0.0512, 0.0512]
    )
    assert (paper.epochs, paper.batch_size, paper.weight_decay, paper.patience, paper.nesterov) == (
        200,
        128,
        0,
        20,
        False,
    )
    modern = se.Recipe.named("modern", epochs=11)
    rates = [modern.rate_at(step, 10) for step in range(110)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[9] == pytest.approx(0.1)
    assert rates[60] == pytest.approx(0.05)
    assert rates[-1] < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": -1}, "epochs must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"rate": float("nan")}, "rate must be"),
        ({"optimizer": "lion"}, "optimizer must be one of 'sgd', 'adam', 'adamw'"),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"label_smoothing": 1.0}, "label_smoothing must be"),
        ({"patience": 0}, "patience must be"),
        ({"mixup": -0.1}, "mixup must be"),
        ({"averaging": 1.5}, "averaging must be a share of the epochs, from 0 to 1, not 1.5"),
        ({"averaging": 0.5, "patience": 3}, "patience must be None with averaging, not 3"),
        ({"augmentation": "cutout"}, "augmentation must be one of"),
    ],
)
def test_invalid_recipes_are_errors(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.Recipe.named("modern", **changes)


def test_unknown_recipe_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a recipe has no 'ratee'; it has epochs, .* rules$"):
        se.Recipe.named("modern", ratee=0.1)
    with pytest.raises(ValueError, match=r"name must be one of paper, modern, regression, tune, .*, not"):
        se.Recipe.named("fast")


def test_bfloat16_training_lowers_the_loss_and_keeps_float32_weights() -> None:
    data = few_digits()
    ensemble = se.Ensemble([network(0)])
    bfloat16 = se.Execution(precision="bfloat16")
    history = se.train(ensemble, data, se.Recipe(epochs=4, rate=0.05), execution=bfloat16, quiet=True)
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert next(ensemble.parameters()).dtype == torch.float32


def test_global_random_state_is_restored() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    ensemble = se.Ensemble([network(11)])
    torch.manual_seed(11)
    se.train(ensemble, few_digits(), RECIPE, quiet=True)
    assert torch.equal(torch.rand(3), expected)


def test_augmentation_gives_crops_and_flips_of_the_image() -> None:
    images = torch.arange(1, 16 * 16 + 1, dtype=torch.int16).view(1, 1, 16, 16).repeat(64, 3, 1, 1)
    padded = F.pad(images, (2, 2, 2, 2))
    possible = {}
    for down in range(5):
        for right in range(5):
            crop = padded[0, :, down : down + 16, right : right + 16]
            possible[crop.numpy().tobytes()] = False
            possible[crop.flip(2).numpy().tobytes()] = True
    crops = draw_crops("crop+flip", (3, 16, 16), 64, (0, 1))
    augmented = [image.contiguous().numpy().tobytes() for image in augment(images, crops)]
    assert all(one in possible for one in augmented)
    assert 20 < sum(possible[one] for one in augmented) < 44
    assert len(set(augmented)) > 20
    assert torch.equal(crops, draw_crops("crop+flip", (3, 16, 16), 64, (0, 1)))
    unflipped = augment(images, draw_crops("crop", (3, 16, 16), 64, (0, 1)))
    assert not any(possible[image.contiguous().numpy().tobytes()] for image in unflipped)
    assert resolve_augmentation("auto", (3, 32, 32)) == "crop+flip"
    assert resolve_augmentation("auto", (1, 28, 28)) == "none"
    assert resolve_augmentation("auto", (3, 32, 32), "regression") == "none"
