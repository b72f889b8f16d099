"""check_model: what it says of models that can be cut, cannot be, or are cut wrongly."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles.checking import model_check
from structured_ensembles.checking.comparison import Difference, comparison_inputs
from structured_ensembles.checking.model_check import check_model
from structured_ensembles.checking.weights import copy_undrawn, perturb_by_rounding, randomize, remove_randomness
from structured_ensembles.networks.copying import clone_model

EXAMPLE = torch.rand(2, 3, 8, 8)


class Block(nn.Module):
    """A residual block with dropout, in a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 8, 1)
        self.norm, self.dropout, self.head = nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.norm(self.second(torch.relu(self.first(x))))
        return self.head(self.dropout(x.mean((2, 3))))  # type: ignore[no-any-return]


def test_a_cut_that_is_exact() -> None:
    model = Block()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check = check_model(model, EXAMPLE)
    assert (check.groups, check.prunable, check.ways) == (3, 2, ("layers", "residual sums"))
    assert check.parameters == 3 * 8 * 9 + 8 + 8 * 6 + 6 + 6 * 8 + 8 + 8 + 8 + 8 * 4 + 4
    assert check.left == 3 * 4 * 9 + 4 + 4 * 3 + 3 + 3 * 4 + 4 + 4 + 4 + 4 * 4 + 4
    assert check.cut
    assert check.exact
    assert check.error is None
    assert check.evaluation is not None
    assert check.training is not None
    assert max(check.evaluation.relative, check.training.relative) < 1e-12
    assert min(check.evaluation.effect, check.training.effect) > 1e-3
    assert check.reasons == {"reaches the network's output": 1}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert check_model(model, EXAMPLE, coupled=False).ways == ("layers",)


def test_a_wrong_cut_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first channels are kept in place of the chosen ones, in all layers: the network runs, but is another one."""

    def extract_wrongly(model: nn.Module, graph: Any, subnet: Any) -> nn.Module:
        first = tuple((name, size, tuple(range(len(kept)))) for name, size, kept in subnet.groups)
        return se.extract(model, graph, dataclasses.replace(subnet, groups=first))

    monkeypatch.setattr(model_check, "extract", extract_wrongly)
    check = check_model(Block(), EXAMPLE)
    assert check.cut
    assert not check.exact
    assert check.evaluation is not None
    assert check.evaluation.relative > 1e-3


def test_whole_numbers_may_be_parameters() -> None:
    class Reordering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.order = nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x[:, self.order]).relu())  # type: ignore[no-any-return]

    assert check_model(Reordering(), torch.rand(2, 4)).exact


def test_complex_parameters_are_compared_in_double_precision_too() -> None:
    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4)
            return self.last(self.first(x).relu())  # type: ignore[no-any-return]

    assert check_model(Filtered(), torch.rand(2, 4)).exact


def test_models_that_cannot_be_cut_or_followed() -> None:
    linear = check_model(nn.Linear(3, 2), torch.rand(2, 3))
    assert (linear.error, linear.cut, linear.exact, linear.left) == (None, False, False, 8)
    refused = check_model(Block(), torch.rand(2, 5))
    assert refused.error is not None
    assert "cannot be followed" in refused.error
    assert (refused.cut, refused.groups) == (False, 0)


def test_training_that_draws_random_numbers_is_not_compared() -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand_like(x) if self.training else x)

    check = check_model(Noisy(), EXAMPLE)
    assert check.random
    assert check.exact


@pytest.mark.parametrize(
    ("relative", "effect", "exact"),
    [(1e-16, 1.0, True), (1e-3, 1.0, False), (1e-9, 1e-6, False), (0.0, 0.5, True), (0.0, 0.0, False)],
)
def test_rounding_is_told_from_a_difference_by_what_the_cut_changes(
    relative: float, effect: float, exact: bool
) -> None:
    assert Difference(relative, effect).exact is exact


@pytest.mark.parametrize(
    ("relative", "noise", "exact"),
    [(2e-9, 3e-9, True), (2e-9, 1e-10, False), (9e-7, 1e-3, True), (2e-6, 1e-3, False)],
)
def test_a_difference_within_the_noise_of_rounding_is_none_unless_a_mistake_could_hide_in_it(
    relative: float, noise: float, exact: bool
) -> None:
    assert Difference(relative, 1.0, noise).exact is exact


def test_noise_is_what_rounding_errors_of_the_weights_change() -> None:
    class Magnifier(nn.Module):
        """A difference of nearly equal numbers: rounding errors of 2e-16 become 2e-16 · 1e7 of the output."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([1.0, 1.0 + 1e-7], dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.weight[1] - self.weight[0])

    magnifier, x = Magnifier(), torch.ones(1, dtype=torch.float64)
    for seed in range(20):
        rounded = perturb_by_rounding(magnifier, seed)
        if float((rounded.weight[1] - rounded.weight[0]) / (magnifier.weight[1] - magnifier.weight[0])) != 1:
            break
    relative = (rounded.weight / magnifier.weight - 1).abs()
    assert bool((relative <= 4e-16).all())
    assert bool((rounded.weight != magnifier.weight).all())
    difference = Difference(2e-9, 1.0).with_noise([magnifier(x)], [rounded(x)])
    assert 1e-9 < difference.noise < 1e-8
    assert difference.exact
    assert not Difference(2e-9, 1.0).exact


def test_network_that_magnifies_rounding_is_cut_exactly() -> None:
    class Magnifier(nn.Module):
        """A rounding error of its head, of about 1e-16, becomes more than a billionth of the output."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.head = nn.Linear(8, 256), nn.Linear(256, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(3e8 * self.head(torch.relu(self.hidden(x))))

    check = check_model(Magnifier(), torch.rand(16, 8))
    assert check.evaluation is not None
    assert check.evaluation.relative > 1e-9 * min(1.0, check.evaluation.effect)
    assert check.exact


def test_randomness_is_removed_wherever_rates_are() -> None:
    class Config:
        hidden_dropout_prob, apply_spec_augment = 0.0, False

    class Rates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop_prob, self.width, self.config = 0.3, 0.5, Config()
            self.config.hidden_dropout_prob, self.config.apply_spec_augment = 0.1, True
            self.inner = nn.Dropout2d(0.2)

    rates = Rates()
    assert remove_randomness(rates) is rates
    assert (rates.drop_prob, rates.width, rates.inner.p) == (0, 0.5, 0)
    assert (rates.config.hidden_dropout_prob, rates.config.apply_spec_augment) == (0, False)


def test_random_weights_are_drawn_by_seed() -> None:
    states: list[Mapping[str, Tensor]] = [randomize(Block(), seed).state_dict() for seed in (0, 0, 1)]
    for name in ("norm.weight", "norm.running_var", "head.bias", "first.weight"):
        assert torch.equal(states[0][name], states[1][name])
        assert not torch.equal(states[0][name], states[2][name])
        assert states[0][name].dtype == torch.float64
        assert bool((states[0][name] != 0).all())


def test_weights_are_drawn_after_the_trace_and_in_double_precision() -> None:
    model = Block().half()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = copy_undrawn(model)
    sizes = {name: (value.shape, value.dtype) for name, value in copied.state_dict().items()}
    integers = {"norm.num_batches_tracked"}
    assert sizes == {
        name: (value.shape, value.dtype if name in integers else torch.float64) for name, value in before.items()
    }
    randomize(copied)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    expected = randomize(clone_model(model))
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in expected.state_dict().items())


@pytest.mark.parametrize(("norm", "samples"), [(nn.BatchNorm1d(6), 4), (nn.LayerNorm(6), 2)])
def test_only_a_network_with_batch_norms_is_compared_on_more_samples(norm: nn.Module, samples: int) -> None:
    example = {"features": torch.rand(2, 6), "ids": torch.tensor([[1], [2]])}
    inputs = comparison_inputs(example, 0, nn.Sequential(norm))
    assert inputs["features"].shape == (samples, 6)
    assert inputs["features"].dtype == torch.float64
    assert inputs["ids"].flatten().tolist() == [1, 2, 2, 1][:samples]
