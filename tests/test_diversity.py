"""MMD and overlap penalties against loops over scalars."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import poisson
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import structured_ensembles as se
from structured_ensembles.diversity import EPSILON, mmd_penalty, overlap_penalty, terms_for


class CountOperations(TorchDispatchMode):
    """Count every operation of PyTorch, forward and backward."""

    operations = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


def mmd2_by_loops(one: list[float], other: list[float]) -> float:
    """Compute the biased V-statistic kernel by kernel."""
    n = len(one)

    def mean(a: list[float], b: list[float]) -> float:
        return sum(math.exp(-((x - y) ** 2) / n) for x in a for y in b) / n**2

    return mean(one, one) + mean(other, other) - 2 * mean(one, other)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.sampled_from([0.1, 1.0, 5.0, 20.0]), st.integers(0, 2**32))
def test_mmd2_equals_a_sum_over_scalars(size: int, spread: float, seed: int) -> None:
    one, other = spread * torch.randn(2, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    distance = float(se.mmd2(one, other))
    assert distance == pytest.approx(mmd2_by_loops(one.tolist(), other.tolist()), abs=1e-12)
    assert distance >= 0


def test_mmd2_ignores_order_and_accepts_batches() -> None:
    one, other = torch.randn(2, 3, 9, dtype=torch.float64)
    assert torch.allclose(se.mmd2(one, one.flip(-1)), torch.zeros(3, dtype=torch.float64), atol=1e-15)
    expected = [mmd2_by_loops(a.tolist(), b.tolist()) for a, b in zip(one, other, strict=True)]
    assert se.mmd2(one, other).tolist() == pytest.approx(expected)


def test_mmd2_of_wide_layers_has_no_cancellation() -> None:
    """With 4,096 neurons the kernel is almost flat, and float32 sums of kernels are noise."""
    one = torch.linspace(-2, 2, 4096)
    shift = 1e-3
    # To first order the mean features differ by the shift of the mean: 2/n · shift².
    assert float(se.mmd2(one, one + shift)) == pytest.approx(2 / 4096 * shift**2, rel=2e-3)


def penalty_by_loops(vectors: dict[str, Tensor]) -> float:
    members = len(next(iter(vectors.values())))
    total = 0.0
    for i in range(members):
        for j in range(i + 1, members):
            distance = sum(mmd2_by_loops(v[i].tolist(), v[j].tolist()) for v in vectors.values())
            total += 1 / (distance + EPSILON)
    return total * 2 / (members * (members - 1))


def test_mmd_penalty_equals_the_papers_sum_and_gradient() -> None:
    vectors = {name: torch.randn(4, size, dtype=torch.float64) for name, size in (("a", 5), ("b", 8), ("c", 5))}
    terms = {name: terms_for(6.0, value.shape[1]) for name, value in vectors.items()}
    assert float(mmd_penalty(vectors, terms)) == pytest.approx(penalty_by_loops(vectors), rel=1e-9)

    leaf = vectors["a"].requires_grad_()
    mmd_penalty(vectors, terms).backward()
    step = 1e-6
    for member, entry in [(0, 0), (1, 3), (3, 4)]:
        values = []
        for sign in (1, -1):
            moved = {name: value.detach().clone() for name, value in vectors.items()}
            moved["a"][member, entry] += sign * step
            values.append(penalty_by_loops(moved))
        assert float(leaf.grad[member, entry]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4)


def test_mmd_penalty_computes_groups_of_one_size_together() -> None:
    """On a GPU the search is bound by launches: twenty groups must not take ten times those of two."""

    def operations(groups: int) -> int:
        vectors = {f"{i}": torch.randn(3, 8, requires_grad=True) for i in range(groups)}
        terms = dict.fromkeys(vectors, 20)
        with CountOperations() as counter:
            mmd_penalty(vectors, terms).backward()
        return counter.operations

    assert operations(20) <= operations(2) + 2 * 18


@pytest.mark.parametrize("size", [1, 3, 64, 512])
def test_number_of_features_is_scipys_poisson_quantile(size: int) -> None:
    for bound in (0.0, 1e-8, 0.3, 1.0, 2.5, 6.0, 17.0, 40.0, 123.4):
        assert terms_for(bound, size) == int(poisson.isf(1e-16, 2 * bound**2 / size)) + 2


def test_mmd_penalty_is_finite_for_equal_members() -> None:
    vectors = {"a": torch.ones(3, 6, requires_grad=True)}
    penalty = mmd_penalty(vectors, {"a": 20})
    penalty.backward()
    assert float(penalty.detach()) == pytest.approx(1 / EPSILON)
    assert bool(vectors["a"].grad.isfinite().all())


def test_overlap_penalty_depends_on_neuron_positions() -> None:
    same = torch.tensor([[3.0, 1, 0, 0], [3, 1, 0, 0]])
    other = torch.tensor([[3.0, 1, 0, 0], [0, 0, 1, 3]])
    assert float(overlap_penalty([same])) == pytest.approx(1)
    expected = torch.corrcoef(other)[0, 1]
    assert float(overlap_penalty([other])) == pytest.approx(float(expected))
    assert float(overlap_penalty([same, other])) == pytest.approx((1 + float(expected)) / 2)
