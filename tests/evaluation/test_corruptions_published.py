"""Corruptions against the published generator: pixel by pixel on photographs, by distance on CIFAR-10."""

import json

import numpy as np
import pytest
import torch

from structured_ensembles.evaluation.corruptions import CORRUPTIONS, SEVERITIES, corrupt, edges, weather
from structured_ensembles.evaluation.corruptions.randomness import Draws
from tests.support import published_corruptions as reference
from tests.support.paths import ROOT
from tests.support.real_data import photographs

RECORD = ROOT / "benchmarks" / "results" / "corruption-rmse-cpu.json"
COUNT = 8  # images


class Shared:
    """Give the reference the numbers that `corrupt` draws for one sample."""

    def __init__(self, name: str, sample: int) -> None:
        self.draws = Draws(0, torch.tensor([sample]), name)

    def uniform(self, stream: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        return self.draws.uniform(stream, shape, low, high)[0].double().numpy()

    def normal(self, stream: str, shape: tuple[int, ...]) -> np.ndarray:
        return self.draws.normal(stream, shape)[0].double().numpy()

    def integers(self, stream: str, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
        return self.draws.integers(stream, shape, low, high)[0].numpy()

    def poisson(self, stream: str, rates: np.ndarray) -> np.ndarray:
        return self.draws.poisson(stream, torch.from_numpy(rates)[None].float())[0].double().numpy()


@pytest.mark.parametrize("name", reference.FORMULAS)
def test_corrupt_equals_the_published_formula(name: str) -> None:
    images = photographs(32)[::3][:COUNT]
    images[0, :, :4] = images[0, :1, :4]  # some grey
    pixels = (255 * images).round().byte().numpy()
    for severity in SEVERITIES:
        corrupted = (255 * corrupt(images, name, severity)).round().byte().numpy()
        expected = np.stack(
            [reference.published(image, name, severity, Shared(name, number)) for number, image in enumerate(pixels)]
        )
        apart = np.abs(corrupted.astype(int) - expected)
        if name != "jpeg_compression":  # libjpeg computes in integers; see test_jpeg_equals_pillow
            assert apart.max() <= 1  # level of 255, where float32 and float64 round differently
            assert (apart > 0).mean() < (0.15 if (name, severity) == ("defocus_blur", 4) else 0.03)
        assert reference.rmse(corrupted, pixels) == pytest.approx(reference.rmse(expected, pixels), rel=0.01)


def test_every_corruption_but_frost_has_a_reference() -> None:
    assert set(CORRUPTIONS) - set(reference.FORMULAS) == {"frost"}


def test_frost_has_the_published_mixture_and_colours() -> None:
    black = torch.zeros(1000, 3, 32, 32)
    ice = corrupt(black, "frost", 3) / 0.4
    # Measured on 2,500 pieces of the five photographs: mean colour, contrast within a piece, spread between pieces.
    torch.testing.assert_close(ice.mean((0, 2, 3)), torch.tensor([0.565, 0.648, 0.695]), rtol=0, atol=0.02)
    grey = ice.mean(1)
    assert float(grey.std((1, 2)).mean()) == pytest.approx(0.087, abs=0.01)
    assert float(grey.mean((1, 2)).std()) == pytest.approx(0.151, abs=0.015)
    for severity, (keep, add) in enumerate(((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)), 1):
        grey_image = torch.full((50, 3, 32, 32), 102 / 255)
        frosted = corrupt(grey_image, "frost", severity)
        expected = keep * 102 / 255 + add * ice[:50]
        inside = expected < 0.99
        assert float((frosted - expected)[inside].abs().max()) < 4 / 255


def test_edges_equal_opencv_pixel_by_pixel() -> None:
    rng = np.random.default_rng(0)
    for shape in ((32, 32), (20, 45)):
        liquid = reference.smooth(0.65 + 0.1 * rng.normal(size=shape), 0.8)
        drops = np.uint8(255 * np.where(liquid < 0.7, 0, liquid))
        detected = edges.canny(torch.from_numpy(drops).float()[None], 50, 150)
        expected = reference.canny(drops, 50, 150)
        assert expected.any()
        np.testing.assert_array_equal(detected[0].numpy(), expected)
        far = edges.edge_distances(detected, 20.0)[0].numpy()
        np.testing.assert_allclose(far, np.minimum(reference.chamfer(expected), 20), rtol=1e-6)
        levels = np.uint8(far)
        np.testing.assert_array_equal(
            edges.equalize(torch.from_numpy(levels).float()[None])[0].numpy(), reference.equalize(levels)
        )


def test_weak_edges_are_kept_next_to_strong_ones() -> None:
    image = torch.zeros(1, 12, 12)
    image[:, :6, 6:], image[:, 6:, 6:] = 30, 120  # one line with gradients of 120 and 480
    assert edges.canny(image, 100, 400)[0].any(1).all()
    assert not edges.canny(image, 130, 400)[0, :5].any()
    assert not edges.canny(image.clamp_max(30), 100, 400).any()


def test_spatter_without_drops_leaves_the_image_unchanged() -> None:
    assert float(weather._shine(torch.zeros(2, 16, 16), 1.0).abs().max()) == 0


def test_recorded_distances_match_the_published_corruptions() -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    assert list(rows) == list(CORRUPTIONS)
    for name, row in rows.items():
        for ours, published in zip(row["ours"], row["published"], strict=True):
            assert ours == pytest.approx(published, rel=0.03), name
    # Recorded from the published generator, on some hundred images of CIFAR-10.
    assert rows["glass_blur"]["ours"] == pytest.approx([0.089, 0.088, 0.081, 0.127, 0.118], abs=0.002)
    assert rows["zoom_blur"]["ours"] == pytest.approx([0.058, 0.067, 0.079, 0.091, 0.101], abs=0.002)
    assert rows["elastic_transform"]["ours"][2] == pytest.approx(0.116, abs=0.002)
    assert rows["saturate"]["ours"][2] == pytest.approx(0.054, abs=0.002)
