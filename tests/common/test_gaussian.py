"""Gaussian heads, and user losses whose outputs have another meaning than the targets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.data.target_scaling import Units

RECIPE = se.Recipe.named("regression", epochs=25, batch_size=256)
SCALE, SHIFT = 1000.0, 5000.0


def network(outputs: int = 2, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))


def noise_at(x: np.ndarray) -> np.ndarray:
    """Return the true deviation of a target, which grows from left to right."""
    return SCALE * (0.1 + 0.2 * (x + 1))


def samples(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, number)
    y = SHIFT + SCALE * np.sin(3 * x) + noise_at(x) * rng.standard_normal(number)
    return x[:, None].astype(np.float32), y.astype(np.float32)


@pytest.fixture(scope="module")
def data() -> se.Data:
    return se.Data.from_arrays(*samples(4000, 0), test=samples(3000, 1))


@pytest.fixture(scope="module")
def trained(data: se.Data) -> se.Ensemble:
    ensemble = se.Ensemble([network(seed=0), network(seed=1)])
    se.train(ensemble, data, RECIPE, "cpu", loss=se.gaussian_nll, quiet=True)
    return ensemble


def test_gaussian_nll_equals_scipy_and_torch() -> None:
    outputs, targets = torch.randn(50, 6, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    means, variances = outputs[:, :3], F.softplus(outputs[:, 3:]) + 1e-6
    expected = -norm.logpdf(targets, means, variances.sqrt()).mean()
    assert float(se.gaussian_nll(outputs, targets)) == pytest.approx(expected)
    theirs = nn.GaussianNLLLoss(full=True)(means, targets, variances)
    assert float(se.gaussian_nll(outputs, targets)) == pytest.approx(float(theirs))
    one = se.gaussian_nll(outputs[:, [0, 3]], targets[:, 0])  # targets (batch,)
    assert float(one) == pytest.approx(-norm.logpdf(targets[:, 0], means[:, 0], variances[:, 0].sqrt()).mean())


def test_mixture_statistics_equal_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(3, 40, 2, generator=generator, dtype=torch.float64)
    deviations = 0.2 + torch.rand(3, 40, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    gaussians = se.Gaussians(means, deviations)
    np.testing.assert_allclose(gaussians.nll(targets), -np.log(norm.pdf(targets, means, deviations).mean(0)))
    # Its second moment is the mean of the members'.
    second = (deviations**2 + means**2).mean(0)
    np.testing.assert_allclose(gaussians.deviation**2, second - means.mean(0) ** 2)
    np.testing.assert_allclose(gaussians.aleatoric**2 + gaussians.epistemic**2, gaussians.deviation**2)
    np.testing.assert_allclose(gaussians.epistemic, means.numpy().std(0))
    np.testing.assert_allclose(
        gaussians.matched_nll(targets), -norm.logpdf(targets, gaussians.mean, gaussians.deviation)
    )
    for end, expected in zip(
        gaussians.interval(0.8), norm.interval(0.8, gaussians.mean, gaussians.deviation), strict=True
    ):
        np.testing.assert_allclose(end, expected)
    alone = se.Gaussians(means[:1], deviations[:1])
    np.testing.assert_allclose(alone.nll(targets), alone.matched_nll(targets))
    with pytest.raises(ValueError, match="coverage must be a share between 0 and 1, not 90"):
        gaussians.interval(90)


def test_training_recovers_the_true_deviation(trained: se.Ensemble, data: se.Data) -> None:
    x = np.linspace(-0.9, 0.9, 50, dtype=np.float32)[:, None]
    deviation = trained.spread(x).reshape(-1).numpy()
    np.testing.assert_allclose(deviation, noise_at(x[:, 0]), rtol=0.25)
    assert np.abs(deviation / noise_at(x[:, 0]) - 1).mean() < 0.1
    means = trained.predict(x).reshape(-1).numpy()
    assert np.abs(means - SHIFT - SCALE * np.sin(3 * x[:, 0])).mean() < 0.05 * SCALE
    figures = se.evaluate(trained, data)
    inputs, targets = data.test.inputs[:, 0].numpy(), data.test.targets.numpy()
    best = -norm.logpdf(targets, SHIFT + SCALE * np.sin(3 * inputs), noise_at(inputs)).mean()
    assert best < figures["reg/nll"] < best + 0.03  # of prices in thousands, in nats
    assert figures["reg/coverage_at_90"] == pytest.approx(0.9, abs=0.02)
    assert figures["reg/epistemic"] < figures["reg/aleatoric"] < figures["reg/spread"]
    assert figures["reg/spread"] == pytest.approx(float(noise_at(inputs).mean()), rel=0.06)


def test_evaluate_equals_figures_computed_from_member_outputs(trained: se.Ensemble, data: se.Data) -> None:
    figures = se.evaluate(trained, data, loss=se.gaussian_nll)
    x, y = data.test.inputs, data.test.targets.double().numpy()
    assert trained.units is not None
    with torch.no_grad():
        raw = torch.stack([member(x) for member in trained.members]).double()
    means = (raw[..., 0] * trained.units.deviation + trained.units.mean[0]).numpy()
    deviations = ((F.softplus(raw[..., 1]) + 1e-6).sqrt() * trained.units.deviation).numpy()
    total = np.sqrt((deviations**2).mean(0) + means.var(0))
    expected = {
        "reg/rmse": np.sqrt(((means.mean(0) - y) ** 2).mean()),
        "reg/member_rmse": np.sqrt(((means - y) ** 2).mean(1)).mean(),
        "reg/spread": total.mean(),
        "reg/nll": -np.log(norm.pdf(y, means, deviations).mean(0)).mean(),
        "reg/nll_matched": -norm.logpdf(y, means.mean(0), total).mean(),
        "reg/member_nll": -norm.logpdf(y, means, deviations).mean(),
        "reg/width_at_90": 2 * norm.ppf(0.95) * total.mean(),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert figures["reg/loss"] == figures["reg/nll"]
    assert figures["reg/member_loss"] == figures["reg/member_nll"]
    assert all(isinstance(value, float) for value in figures.values())


def test_conformal_intervals_are_as_wide_as_the_noise(trained: se.Ensemble, data: se.Data) -> None:
    x = np.array([[-0.8], [0.8]], dtype=np.float32)
    low, high = (end.reshape(-1).numpy() for end in trained.predict_interval(x))
    np.testing.assert_allclose(high - low, 2 * norm.ppf(0.95) * noise_at(x[:, 0]), rtol=0.25)
    assert se.evaluate(trained, data)["conf/coverage"] == pytest.approx(0.9, abs=0.04)  # of 400 for validation


def test_file_and_state_dict_keep_the_gaussian_flag(trained: se.Ensemble, tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 9, dtype=np.float32)[:, None]
    trained.save(tmp_path / "a.safetensors")
    other = se.Ensemble([network(), network()], task="regression")
    other.load_state_dict(trained.state_dict())
    for same in (se.Ensemble.load(tmp_path / "a.safetensors", model=network()), other):
        assert same.gaussian
        assert torch.equal(same.logits(x), trained.logits(x))
        assert torch.equal(same.spread(x).flatten(), trained.spread(x))  # a state does not hold their shape
    plain = se.Ensemble([network(1)], task="regression")
    plain.save(tmp_path / "b.safetensors")
    assert not se.Ensemble.load(tmp_path / "b.safetensors", model=network(1)).gaussian
    with pytest.raises(ValueError, match="trained with loss=gaussian_nll"):
        plain.distribution(x)


def test_gaussian_ensemble_continues_training_with_its_loss(trained: se.Ensemble, data: se.Data) -> None:
    again = se.Ensemble([network(), network()], gaussian=True, task="regression", units=trained.units)
    again.load_state_dict(trained.state_dict())
    se.train(again, data, se.Recipe.named("regression", epochs=1), "cpu", quiet=True)
    assert again.gaussian
    assert again.units == trained.units
    assert se.evaluate(again, data)["reg/nll"] == pytest.approx(se.evaluate(trained, data)["reg/nll"], abs=0.2)


def test_structured_ensemble_with_gaussian_heads_of_two_targets() -> None:
    x, y = samples(400, 0)
    both = np.stack([y, y / 100 - 700], axis=1)
    data = se.Data.from_arrays(x, both, test=(x, both))
    recipe = se.Recipe.named("regression", epochs=3)
    ensemble = se.structured_ensemble(
        network(4), data, 2, recipe=recipe, loss=se.gaussian_nll, search_epochs=1, device="cpu", quiet=True
    )
    assert ensemble.units is not None
    assert len(ensemble.units.mean) == 2
    assert ensemble.predict(x).shape == ensemble.spread(x).shape == (400, 2)
    centre = np.abs(ensemble.predict(x).numpy().mean(0) - both.mean(0))
    assert (centre < both.std(0).max()).all()
    assert {"reg/nll", "reg/rmse", "reg/coverage_at_90"} <= set(se.evaluate(ensemble, data))


# A teacher teaches classes.
@pytest.mark.parametrize(
    "method", [name for name in se.methods.METHODS if name not in ("structured", "random", "taught")]
)
def test_every_method_trains_with_gaussian_nll(method: str) -> None:
    """A deep ensemble with Gaussian heads is the one of Lakshminarayanan et al."""
    x, y = samples(300, 0)
    data = se.Data.from_arrays(x, y, test=(x[:50], y[:50]))
    recipe = se.Recipe.named("regression", epochs=4)
    ensemble = se.methods.METHODS[method](network(), data, members=2, recipe=recipe, loss=se.gaussian_nll, quiet=True)
    assert ensemble.gaussian
    assert ensemble.distribution(x[:50]).nll(y[:50]).isfinite().all()  # an array will do
    assert ensemble.predict(x[:50]).shape == (50,)


def test_target_scaling_ignores_predicted_variances() -> None:
    """Raw variances have another scale than the targets, whatever the means are."""
    x, y = samples(200, 0)
    model = network()
    with torch.no_grad():
        model[-1].weight[0] *= SCALE
        model[-1].bias.copy_(torch.tensor([SHIFT, 0.0]))
    ensemble = se.Ensemble([model])
    data = se.Data.from_arrays(x, y)
    se.train(ensemble, data, se.Recipe.named("regression", epochs=0), "cpu", loss=se.gaussian_nll, quiet=True)
    assert ensemble.units is None
    fresh = se.Ensemble([network()])
    se.train(fresh, data, se.Recipe.named("regression", epochs=0), "cpu", loss=se.gaussian_nll, quiet=True)
    assert isinstance(fresh.units, Units)


def quantile_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the pinball loss of the quantiles 0.1, 0.5 and 0.9: three outputs for one target."""
    shares = outputs.new_tensor([0.1, 0.5, 0.9])
    gaps = targets[:, None] - outputs
    return torch.maximum(shares * gaps, (shares - 1) * gaps).mean()


def test_user_loss_may_use_outputs_of_another_shape_than_targets() -> None:
    x, y = samples(400, 0)
    y = (y - SHIFT) / SCALE
    data = se.Data.from_arrays(x, y, test=(x[:100], y[:100]))
    ensemble = se.Ensemble([network(3, 0), network(3, 1)])
    recipe = se.Recipe.named("regression", epochs=2)
    se.train(ensemble, data, recipe, "cpu", loss=quantile_loss, quiet=True)
    figures = se.evaluate(ensemble, data)
    assert set(figures) == {"size/members", "size/parameters"}  # nothing to compare the outputs with
    figures = se.evaluate(ensemble, data, loss=quantile_loss)
    members = ensemble.logits(x[:100]).double().numpy()

    def by_loop(outputs: np.ndarray) -> float:
        shares = (0.1, 0.5, 0.9)
        pairs = [(y[i] - outputs[i, k], share) for i in range(100) for k, share in enumerate(shares)]
        return float(np.mean([share * gap if gap > 0 else (share - 1) * gap for gap, share in pairs]))

    assert figures["reg/loss"] == pytest.approx(by_loop(members.mean(0)), rel=1e-5)
    assert figures["reg/member_loss"] == pytest.approx(np.mean([by_loop(outputs) for outputs in members]), rel=1e-5)


def test_evaluate_adds_a_user_loss_to_the_usual_figures() -> None:
    x, y = samples(300, 0)
    data = se.Data.from_arrays(x, y, test=(x[:50], y[:50]))
    ensemble = se.Ensemble([network(1)], task="regression")
    figures = se.evaluate(ensemble, data, loss=lambda outputs, targets: (outputs[:, 0] - targets).abs().mean())
    assert figures["reg/loss"] == pytest.approx(
        float(np.abs(ensemble.predict(x[:50]).reshape(-1).numpy() - y[:50]).mean())
    )
    assert figures["reg/rmse"] > 0
    digits = se.load_data("digits")
    classes = se.Ensemble([se.zoo.mlp(64)])
    cross_entropy = se.evaluate(classes, digits, loss=F.cross_entropy)
    assert cross_entropy["cls/loss"] == pytest.approx(cross_entropy["cal/nll"], rel=1e-5)  # of one member


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda d: se.evaluate(se.Ensemble([network()], task="regression"), d, loss="mse"),
            r"loss must be a function of \(outputs",
        ),
        (lambda d: _train(network(3), d), "twice as many outputs as values"),
        (lambda d: _train(network(1), d), "twice as many outputs as values"),
        (lambda d: _train(se.zoo.mlp(64), se.load_data("digits")), "for a regression: the targets of data are classes"),
    ],
)
def test_invalid_gaussian_arguments_are_errors(call: Any, message: str, data: se.Data) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(data)


def _train(model: nn.Module, data: se.Data) -> None:
    se.train(se.Ensemble([model]), data, se.Recipe(epochs=1), "cpu", loss=se.gaussian_nll, quiet=True)
