"""Triton kernels, compiled, compute what float64 PyTorch computes."""

import pytest
import torch

from structured_ensembles.cuda import convolution
from structured_ensembles.cuda.pair_copies import copier
from structured_ensembles.cuda.weight_gradient import weight_gradient
from tests.support.kernel_checks import (
    CONVOLUTION_KERNELS,
    Layer,
    check_batch_norm,
    check_convolution,
    check_copier,
    check_drawn_batch,
    check_moments_of_convolution,
    check_nan_passes_relu,
    check_norm_before,
    check_padded_channels_of_norm,
    check_predicted_convolution,
    check_subsample,
    check_tf32_is_rounded,
    recorded_launches,
)

pytestmark = pytest.mark.cuda

LAYERS = {
    "resnet, first stage": Layer(5, 128, 16, 8, 32, 32),
    "resnet, second stage": Layer(5, 32, 16, 32, 16, 16),
    "narrow, strips of rows": Layer(2, 9, 3, 8, 13, 9),
    "narrow, odd channels": Layer(3, 2, 13, 6, 7, 7),
    "narrow, no padding": Layer(1, 3, 6, 13, 9, 7, padding=0),
    "narrow, more padding than the window": Layer(2, 2, 6, 8, 7, 7, padding=3),
    "wide outputs": Layer(2, 1, 8, 70, 7, 9),
    "wide inputs": Layer(2, 1, 70, 8, 7, 7),
    "more channels than a tile": Layer(2, 4, 130, 130, 7, 7),
    "wide, many pixels": Layer(1, 160, 64, 64, 32, 32),
    "wide, large tiles": Layer(1, 128, 128, 128, 16, 16),
    "wide, few pixels": Layer(2, 16, 256, 128, 4, 4),
    "stride": Layer(3, 2, 6, 13, 9, 7, stride=2),
    "stride, wide": Layer(2, 8, 70, 130, 7, 9, stride=2),
    "stride, many cells": Layer(1, 128, 64, 128, 32, 32, stride=2),
    "stride 3": Layer(1, 2, 8, 8, 13, 7, stride=3, padding=2),
    "1 × 1": Layer(2, 2, 13, 8, 7, 9, rows=1, taps=1, padding=0),
    "1 × 1, stride": Layer(2, 2, 8, 16, 7, 9, rows=1, taps=1, padding=0, stride=2),
    "1 × 1, more padding than the window": Layer(2, 2, 8, 6, 5, 5, rows=1, taps=1),
    "2 × 2": Layer(2, 2, 6, 3, 7, 7, rows=2, taps=2, padding=0),
    "5 × 5": Layer(2, 2, 6, 13, 9, 9, rows=5, taps=5, padding=2),
    "7 × 7, stride": Layer(1, 3, 3, 20, 28, 28, rows=7, taps=7, padding=3, stride=2),
    "1 × 3": Layer(2, 2, 6, 8, 7, 9, rows=1, padding=0),
    "3 × 1": Layer(2, 2, 8, 13, 9, 7, taps=1),
    "1 × 7, one pixel high": Layer(2, 1, 5, 17, 1, 9, rows=1, taps=7),
    "one pixel wide": Layer(2, 3, 5, 17, 9, 1),
    "one channel": Layer(2, 1, 1, 1, 5, 6),
    "the widest rows of a sweep": Layer(1, 4, 20, 32, 16, 128),
    "wider than a sweep": Layer(1, 1, 3, 5, 1, 130),
    "a sweep back from many channels": Layer(2, 4, 12, 60, 20, 20),
}


@pytest.mark.parametrize("name", LAYERS)
def test_convolution_and_its_gradients(name: str) -> None:
    check_convolution(LAYERS[name], torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("guess", [0.0, 5.0])
def test_moments_that_a_convolution_leaves(name: str, guess: float) -> None:
    check_moments_of_convolution(LAYERS[name], torch.bfloat16, "cuda", guess)


@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_that_an_input_gradient_leaves_for_the_norm_before(name: str, mask: int, add: bool) -> None:
    check_norm_before(LAYERS[name], mask, add, torch.bfloat16, "cuda")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("finish", ["", "bias", "norm", "norm add", "bias norm add"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_convolution_and_what_follows_in_prediction(name: str, dtype: torch.dtype, finish: str, shared: bool) -> None:
    check_predicted_convolution(LAYERS[name], finish, dtype, "cuda", relu="norm" in finish, shared=shared)


def test_float32_is_rounded_to_the_nearest_tf32_in_prediction() -> None:
    check_tf32_is_rounded("cuda")


def test_the_layers_above_reach_every_kernel() -> None:
    with recorded_launches(dry=True) as names:
        for layer in LAYERS.values():
            x, weight, dy = layer.draw(torch.bfloat16, "cuda")
            assert convolution.fits(x, weight, layer.window)
            convolution.forward(x, weight, layer.window)
            convolution.input_gradient(dy, weight, layer.window, x.shape)
            weight_gradient(x, dy, weight, layer.window)
    assert set(names) == set(CONVOLUTION_KERNELS)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 8, 32, 32), (2, 7, 5, 5), (16, 70, 4, 4), (50, 3, 33, 31), (4, 130, 3, 3)])
def test_batch_norm(shape: tuple[int, ...], members: int, add: bool, relu: bool, dtype: torch.dtype) -> None:
    check_batch_norm((members * shape[0], *shape[1:]), members, dtype, "cuda", add=add, relu=relu)


def test_nan_passes_the_relu_of_a_norm() -> None:
    check_nan_passes_relu("cuda")


def test_batch_norm_keeps_padded_channels_zero() -> None:
    check_padded_channels_of_norm("cuda")


@pytest.mark.parametrize(
    ("shape", "stride", "channels"), [((640, 8, 32, 32), 2, 16), ((3, 6, 7, 9), 2, 13), ((2, 70, 5, 3), 3, 130)]
)
def test_subsample_and_its_gradient(shape: tuple[int, ...], stride: int, channels: int) -> None:
    check_subsample(shape, stride, channels, torch.bfloat16, "cuda")


@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip"])
@pytest.mark.parametrize("members", [1, 3])
def test_batch_drawn_in_one_kernel_equals_the_batches_of_the_feeds(augmentation: str, members: int) -> None:
    check_drawn_batch(augmentation, (3, 32, 32), members, "cuda")
    check_drawn_batch(augmentation, (1, 11, 7), members, "cuda", dtype=torch.bfloat16, last=True)


@pytest.mark.parametrize("mixup", [0.0, 0.3])
def test_drawn_batch_is_cut_out_and_blended_as_those_of_the_feeds(mixup: float) -> None:
    check_drawn_batch("crop+flip+cutout", (3, 32, 32), 3, "cuda", mixup=mixup)
    check_drawn_batch("crop+flip+cutout", (1, 11, 7), 3, "cuda", dtype=torch.bfloat16, last=True, mixup=mixup)


def test_one_kernel_copies_parts_of_tensors_of_several_types() -> None:
    check_copier("cuda", copier)
