"""Target scaling: targets of any magnitude are learned equally well; networks trained on raw targets keep them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import make_friedman1
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.data.losses import loss_for
from structured_ensembles.data.target_scaling import Units, fit_units
from structured_ensembles.methods import METHODS
from structured_ensembles.training.checkpoint import load_checkpoint

X, Y = make_friedman1(600, noise=0.5, random_state=0)
X, Y = X.astype(np.float32), ((Y - Y.mean()) / Y.std()).astype(np.float32)
RECIPE = se.Recipe.named("regression", epochs=30)


def data_of(targets: np.ndarray) -> se.Data:
    return se.Data.from_arrays(X[:500], targets[:500], test=(X[500:], targets[500:]))


def network(values: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, values))


def explained(ensemble: se.Ensemble, data: se.Data) -> float:
    targets = torch.cat([batch for _, batch in data.split("test").batches(512)])
    return 1 - se.evaluate(ensemble, data)["reg/rmse"] ** 2 / float(targets.var(correction=0))


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e5, 5e5), (1e-4, 0.0), (1.0, 1e3)])
def test_targets_of_any_magnitude_are_learned(scale: float, shift: float) -> None:
    data = data_of((Y * scale + shift)[:, None])
    ensemble = se.structured_ensemble(network(), data, 2, recipe=RECIPE, search_epochs=1, device="cpu", quiet=True)
    assert explained(ensemble, data) > 0.75
    assert (ensemble.units is None) == (scale == 1 and shift == 0)
    predicted = ensemble.predict(X[:9])
    assert torch.equal(predicted, ensemble.logits(X[:9]).mean(0))
    if ensemble.units is not None:
        with torch.no_grad():
            outputs = torch.stack([member(torch.tensor(X[:9])) for member in ensemble.members])
        torch.testing.assert_close(predicted, outputs.mean(0) * ensemble.units.deviation + ensemble.units.mean[0])


def test_search_is_invariant_to_target_scale() -> None:
    chosen = []
    for scale, shift in ((100.0, 7.0), (1e5, 5e5)):
        data = data_of((Y * scale + shift)[:, None])
        model = network()
        graph = se.trace(model, data.example())
        scales = se.learn_scales(model, graph, data, 2, epochs=2, device="cpu", quiet=True)
        scores = se.saliency(model, graph, scales, data, device="cpu", quiet=True)
        chosen.append((scales, se.select(graph, scores, prune=0.5)))
    for name, vectors in chosen[0][0].vectors.items():
        torch.testing.assert_close(vectors, chosen[1][0].vectors[name], rtol=1e-3, atol=1e-3)
    assert chosen[0][1] == chosen[1][1]


def trained(scale: float, shift: float) -> nn.Module:
    """Return a network that was trained on targets of this scale."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(200):
        optimizer.zero_grad()
        F.mse_loss(model(torch.tensor(X[:500])), torch.tensor(Y[:500, None])).backward()
        optimizer.step()
    last = model[-1]
    with torch.no_grad():
        last.weight.mul_(scale)
        last.bias.mul_(scale).add_(shift)
    return model


@pytest.mark.parametrize(("scale", "shift"), [(1e5, 5e5), (1e-3, 0.0), (10.0, -3.0), (1.0, 0.0)])
def test_network_trained_on_raw_targets_gets_no_scaling(scale: float, shift: float) -> None:
    data, model = data_of((Y * scale + shift)[:, None]), trained(scale, shift)
    ensemble = se.Ensemble([model])
    se.train(ensemble, data, se.Recipe(epochs=0), "cpu", quiet=True)
    assert ensemble.units is None
    assert explained(ensemble, data) > 0.9
    cut = se.structured_ensemble(
        model, data, 2, 0.3, recipe=se.Recipe(epochs=0), search_epochs=1, device="cpu", quiet=True
    )
    assert cut.units is None


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_file_keeps_target_scaling(tmp_path: Path, storage: Any) -> None:
    data = data_of((Y * 1e5 + 5e5)[:, None])
    ensemble = se.Ensemble([network()])
    se.train(ensemble, data, se.Recipe.named("regression", epochs=1), "cpu", quiet=True)
    ensemble.save(tmp_path / "prices.safetensors", storage)
    loaded = se.Ensemble.load(tmp_path / "prices.safetensors", model=network())
    assert loaded.units == ensemble.units is not None
    torch.testing.assert_close(loaded.predict(X), ensemble.predict(X), rtol=0.05, atol=5e3)
    assert loaded.half().predict(X[:9]).isfinite().all()  # 500,000 is more than half precision has


def test_state_dict_keeps_target_scaling() -> None:
    data = data_of(np.stack([Y * 100 + 500, Y * 10 - 2000], axis=1))
    ensemble, other = se.Ensemble([network(2)]), se.Ensemble([network(2)])
    before = ensemble.state_dict()
    assert "units" not in before
    se.train(ensemble, data, se.Recipe.named("regression", epochs=1), "cpu", quiet=True)
    other.load_state_dict(ensemble.state_dict())
    assert other.units == ensemble.units is not None
    assert torch.equal(other.logits(X), ensemble.logits(X))
    other.load_state_dict(before)  # of a network that had none
    assert other.units is None
    regrouped = se.Ensemble(list(ensemble.members), task="regression", units=ensemble.units)
    assert torch.equal(regrouped.predict(X), ensemble.predict(X))


@pytest.mark.parametrize("seed", [0, 2])  # they decide for different units
def test_resumed_run_keeps_its_target_scaling(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data, path = data_of((Y + 2)[:, None]), tmp_path / "checkpoint.safetensors"

    def train(passes: int) -> se.Ensemble:
        monkeypatch.setitem(globals(), "PASSES", iter(range(passes)))
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), Stopping(), nn.Linear(32, 1))
        ensemble = se.Ensemble([model])
        se.train(ensemble, data, se.Recipe.named("regression", epochs=6), "cpu", checkpoint=path, quiet=True)
        return ensemble

    with pytest.raises(Stopped):
        train(20)
    began = read_units(path)
    ensemble = train(10**6)
    assert ensemble.units == began
    assert explained(ensemble, data) > 0.3
    again = train(10**6)  # nothing left to do
    assert torch.equal(again.predict(X), ensemble.predict(X))


class Stopped(Exception):  # noqa: N818
    pass


class Stopping(nn.Module):
    """Raise in the middle of training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and next(PASSES, None) is None:
            raise Stopped
        return x


PASSES: Iterator[int] = iter(())  # how many are left; a run's identity has only the type of an iterator


def read_units(path: Path) -> Units | None:
    checkpoint = load_checkpoint(path)
    assert checkpoint is not None
    return Units.from_json(checkpoint[1]["units"])


def test_further_training_keeps_the_target_scaling() -> None:
    first, second = data_of((Y * 100 + 500)[:, None]), data_of((Y * 50 + 400)[:, None])
    ensemble = se.Ensemble([network()])
    se.train(ensemble, first, RECIPE, "cpu", quiet=True)
    units, before = ensemble.units, ensemble.predict(X)
    se.train(ensemble, second, se.Recipe(epochs=0), "cpu", quiet=True)
    assert ensemble.units == units is not None
    assert torch.equal(ensemble.predict(X), before)


def test_user_loss_sees_unscaled_targets() -> None:
    seen: list[tuple[float, float]] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((float(outputs.detach().mean()), float(targets.mean())))
        return F.mse_loss(outputs, targets)

    data = data_of((Y * 100 + 500)[:, None])
    untrained = se.Ensemble([network()])
    with pytest.warns(UserWarning, match=r"mean of \d+ and a deviation of \d+, which a loss of your own gets"):
        se.train(untrained, data, se.Recipe(epochs=1, rate=1e-6), "cpu", loss=loss, quiet=True)
    assert untrained.units is None
    assert all(abs(outputs) < 1 for outputs, _ in seen)  # as they are
    ensemble = se.Ensemble([network()])
    se.train(ensemble, data, RECIPE, "cpu", quiet=True)
    assert ensemble.units is not None
    seen.clear()
    se.train(ensemble, data, se.Recipe(epochs=1, rate=1e-6), "cpu", loss=loss, quiet=True)
    assert all(abs(outputs - targets) < 50 for outputs, targets in seen)
    assert all(450 < targets < 550 for _, targets in seen)


@pytest.mark.parametrize("method", ["snapshot", "deep", "batch-ensemble", "mc-dropout", "narrow", "prune-and-tune"])
def test_every_method_scales_targets(method: str) -> None:
    data = data_of((Y * 1e5 + 5e5)[:, None])
    model = se.zoo.mlp(10, num_classes=1)
    ensemble = METHODS[method](model, data, members=2, recipe=RECIPE, seed=0, device="cpu", quiet=True)
    assert explained(ensemble, data) > 0.5


def test_several_targets_have_a_mean_each_and_one_deviation() -> None:
    targets = np.stack([Y * 100 + 500, Y * 10 - 2000], axis=1)
    units = fit_units([network(2)], data_of(targets))
    assert units is not None
    train = torch.tensor(targets[data_of(targets).train.index]).double()  # type: ignore[union-attr]
    torch.testing.assert_close(torch.tensor(units.mean).double(), train.mean(0))
    assert units.deviation == pytest.approx(float(train.var(0, correction=0).mean().sqrt()))
    standard = units.standardize(train)
    torch.testing.assert_close(standard.mean(0), torch.zeros(2).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(units.restore(standard), train)
    # Where outputs have another shape, one mean serves all.
    for shape, model in (((600,), network()), ((600, 2, 1), network(2))):
        values = np.broadcast_to(Y.reshape(600, *[1] * (len(shape) - 1)) * 100 + 500, shape)
        units = fit_units([model], data_of(values.copy()))
        assert units is not None
        assert len(units.mean) == 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_streamed_targets_are_scaled(shuffle: bool) -> None:
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y[:, None] * 1e5 + 5e5))
    loader = torch.utils.data.DataLoader(rows, batch_size=100, shuffle=shuffle)
    data = se.Data.from_loaders(loader, test=loader)
    model, before = network(), torch.get_rng_state()
    units = fit_units([model], data)
    assert units is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert units.mean[0] == pytest.approx(5e5, rel=0.02)
    assert units.deviation == pytest.approx(1e5, rel=0.1)
    torch.randn(7)
    assert fit_units([model], data) == units  # whatever was drawn meanwhile
    ensemble = se.Ensemble([network()])
    se.train(ensemble, data, RECIPE, "cpu", quiet=True)
    assert ensemble.units == units
    assert explained(ensemble, data) > 0.75


def test_constant_targets_and_classes_are_not_scaled() -> None:
    constant = data_of(np.full((600, 1), 5000.0, np.float32))
    assert fit_units([network()], constant) is None
    assert fit_units([se.zoo.mlp(64)], se.load_data("digits")) is None
    zero = network()
    nn.init.zeros_(zero[-1].weight)  # a network that gives the same for everything
    nn.init.zeros_(zero[-1].bias)
    assert fit_units([zero], data_of(Y[:, None] * 1e5)) is not None


def test_classification_has_no_target_scaling() -> None:
    ensemble = se.Ensemble([network(3)])
    prices = np.stack([Y * 100 + 500] * 3, axis=1)
    se.train(ensemble, data_of(prices), se.Recipe.named("regression", epochs=1), "cpu", quiet=True)
    assert ensemble.units is not None
    classes = se.Data.from_arrays(X, (Y > 0).astype(np.int64) + (Y > 1))
    for smoothing in (0.0, 0.1):
        se.train(ensemble, classes, se.Recipe(epochs=1, label_smoothing=smoothing), "cpu", quiet=True)
        assert ensemble.units is None
        with torch.no_grad():
            assert torch.equal(ensemble.logits(X)[0], ensemble.members[0](torch.tensor(X)))


@pytest.mark.parametrize("values", [1, 2])
def test_ensemble_with_target_scaling_can_be_exported(values: int) -> None:
    """Fake tensors of the export must not be cached for later calls."""
    targets = np.stack([Y * 123 + 500, Y * 10 - 2000], axis=1)[:, :values]
    ensemble = se.Ensemble([network(values)])
    se.train(ensemble, data_of(targets), se.Recipe.named("regression", epochs=1), "cpu", quiet=True)
    assert ensemble.units is not None
    units, x = Units(tuple(mean + 1e-3 for mean in ensemble.units.mean), ensemble.units.deviation), torch.tensor(X[:4])
    ensemble.units = units  # not in any cache yet
    with torch.no_grad():
        program = torch.export.export(ensemble, (x,))
        expected = units.restore(ensemble.members[0](x))
    outputs = ensemble.logits(x)[0]
    assert type(outputs) is Tensor
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(program.module()(x)[0], expected)


def test_module_loss_stays_a_module() -> None:
    """The graph engine needs the modules that run in a step."""
    loss = nn.SmoothL1Loss()
    wrapped = loss_for(data_of(Y[:, None]), loss, Units((5.0,), 2.0))
    assert isinstance(wrapped, nn.Module)
    assert loss in list(wrapped.modules())
    outputs, targets = torch.randn(9, 1), torch.randn(9, 1)
    torch.testing.assert_close(wrapped(outputs, targets), loss(outputs * 2 + 5, targets))


def test_target_scaling_has_a_readable_repr() -> None:
    assert repr(Units((1.0,), 2.0)) == "Units(mean=(1.0,), deviation=2.0)"
