"""Triton kernels, run by Triton's interpreter, compute what float64 PyTorch computes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from structured_ensembles.cuda import batch_norm, convolution, pair_copies, tiles
from structured_ensembles.cuda.convolution import BY_INPUT, BY_OUTPUT
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
    here,
    recorded_launches,
)

LAYERS = {
    "narrow, strips of rows": Layer(2, 9, 3, 8, 13, 9),
    "narrow, odd channels": Layer(3, 2, 13, 6, 7, 7),
    "narrow, no padding": Layer(1, 3, 6, 13, 9, 7, padding=0),
    "narrow, more padding than the window": Layer(2, 2, 6, 8, 7, 7, padding=3),
    "narrow, many outputs": Layer(2, 2, 8, 40, 3, 33),
    "wide outputs": Layer(2, 1, 8, 70, 7, 9),
    "wide inputs": Layer(2, 1, 70, 8, 7, 7),
    "more outputs than a tile": Layer(1, 1, 13, 130, 7, 7),
    "more inputs than a tile": Layer(2, 1, 130, 6, 5, 7),
    "whole tiles": Layer(2, 1, 64, 64, 5, 7),
    "stride": Layer(3, 2, 6, 13, 9, 7, stride=2),
    "stride, wide": Layer(2, 1, 70, 70, 5, 7, stride=2),
    "stride, whole tiles": Layer(1, 2, 64, 64, 5, 7, stride=2),
    "stride 3": Layer(1, 2, 8, 8, 13, 7, stride=3, padding=2),
    "1 × 1": Layer(2, 2, 13, 8, 7, 9, rows=1, taps=1, padding=0),
    "1 × 1, stride": Layer(2, 2, 8, 16, 7, 9, rows=1, taps=1, padding=0, stride=2),
    "1 × 1, more padding than the window": Layer(2, 2, 8, 6, 5, 5, rows=1, taps=1),
    "2 × 2": Layer(2, 2, 6, 3, 7, 7, rows=2, taps=2, padding=0),
    "5 × 5": Layer(2, 1, 6, 13, 7, 9, rows=5, taps=5, padding=2),
    "5 × 5, stride": Layer(1, 1, 3, 8, 13, 9, rows=5, taps=5, padding=2, stride=2),
    "1 × 3": Layer(2, 2, 6, 8, 7, 9, rows=1, padding=0),
    "3 × 1": Layer(2, 2, 8, 13, 9, 7, taps=1),
    "1 × 7, one pixel high": Layer(2, 1, 5, 17, 1, 9, rows=1, taps=7),
    "one pixel wide": Layer(2, 3, 5, 17, 9, 1),
    "one pixel wide, stride": Layer(2, 2, 17, 3, 5, 1, stride=2),
    "one channel": Layer(2, 1, 1, 1, 5, 6),
    "wider than a sweep": Layer(1, 1, 3, 5, 1, 130),
}
# In half precision, by the branch of `tiles.tap_tile` that has their tile, which settings of `tiles` lead to.
BUSY, IDLE, LARGE = {"FULL_WAVE": 2, "FEWEST_WAVES": 0}, {"FULL_WAVE": 2, "FEWEST_WAVES": 1e9}, {"FULL_WAVE": 0}
TAP_TILES = {
    "16 outputs": ({}, Layer(2, 1, 70, 13, 3, 5), (128, 16, 64), (128, 64, 16)),
    "32 outputs": ({}, Layer(1, 2, 70, 20, 3, 5), (128, 32, 32), (128, 64, 32)),
    "64 outputs": ({}, Layer(1, 1, 64, 64, 3, 5), (128, 64, 64), (128, 64, 32)),
    "64 outputs, many pixels": ({"MANY_PIXELS": 1}, Layer(1, 1, 64, 64, 3, 5), (256, 64, 64), (256, 64, 64)),
    "more, many programs": (BUSY, Layer(1, 1, 70, 130, 3, 5), (128, 64, 64), (64, 128, 64)),
    "more, few programs": (IDLE, Layer(1, 1, 130, 130, 3, 5), (64, 64, 128), (64, 64, 128)),
    "more, full waves": (LARGE, Layer(1, 1, 128, 128, 5, 3), (256, 128, 64), (256, 128, 64)),
}
SWEEPS = {
    "few columns": Layer(1, 3, 5, 13, 3, 9),
    "few outputs": Layer(1, 3, 21, 7, 3, 9),
    "64 columns": Layer(1, 3, 20, 16, 3, 9),
    "two warps": Layer(1, 2, 20, 24, 3, 9),
    "many columns": Layer(1, 1, 40, 24, 3, 33),
    "many outputs": Layer(1, 1, 12, 60, 3, 20),  # back, more columns than 128
}
DTYPES = {"float32": torch.float32, "float16": torch.float16}


@here
@pytest.mark.parametrize("name", LAYERS)
def test_convolution_and_its_gradients(name: str) -> None:
    check_convolution(LAYERS[name], torch.float32, "cpu")


@here
@pytest.mark.parametrize("name", ["narrow, odd channels", "wide inputs", "stride", "5 × 5"])
def test_convolution_and_its_gradients_in_half_precision(name: str) -> None:
    check_convolution(LAYERS[name], torch.float16, "cpu")


@here
@pytest.mark.parametrize("name", TAP_TILES)
def test_every_tile_by_taps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, layer, forward, backward = TAP_TILES[name]
    taken: list[tuple[int, int, int]] = []

    def noted(size: tiles.LayerSize) -> tiles.Tile:
        tile = tap_tile(size)
        taken.append((tile.pixels, tile.outputs, tile.inputs))
        return tile

    tap_tile = tiles.tap_tile
    monkeypatch.setattr(tiles, "tap_tile", noted)
    for constant, value in settings.items():
        monkeypatch.setattr(tiles, constant, value)
    check_convolution(layer, torch.float16, "cpu")
    check_norm_before(layer, BY_INPUT, False, torch.float16, "cpu")
    assert taken[0] == forward
    assert set(taken[1:]) == {backward}


@here
def test_the_larger_tile_of_a_gradient_with_a_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FEWEST_WAVES", 0)
    check_convolution(LAYERS["stride, wide"], torch.float16, "cpu")
    check_norm_before(LAYERS["stride, wide"], BY_INPUT, True, torch.float32, "cpu")


@here
@pytest.mark.parametrize("name", SWEEPS)
def test_every_tile_of_a_sweep(name: str) -> None:
    with recorded_launches() as names:
        check_convolution(SWEEPS[name], torch.float16, "cpu")
    assert names[0] == "convolve_by_sweep"
    check_norm_before(SWEEPS[name], BY_INPUT, False, torch.float16, "cpu")
    check_norm_before(SWEEPS[name], BY_OUTPUT, True, torch.float16, "cpu")


@here
@pytest.mark.parametrize("name", LAYERS)
def test_moments_that_a_convolution_leaves(name: str) -> None:
    check_moments_of_convolution(LAYERS[name], torch.float32, "cpu")


@here
@pytest.mark.parametrize(
    "layer",
    [
        Layer(1, 4, 6, 3, 9, 9, rows=2, taps=2, padding=0),
        Layer(1, 4, 33, 33, 9, 9),
        Layer(1, 8, 6, 3, 9, 9, stride=2),
    ],
    ids=["by rows", "by taps", "stride"],
)
def test_statistics_of_blocks_of_several_tiles(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiles, convolution):
        monkeypatch.setattr(module, "moment_blocks", lambda _channels: 1)
    check_moments_of_convolution(layer, torch.float32, "cpu")
    check_norm_before(layer, BY_INPUT, False, torch.float32, "cpu")


@here
@pytest.mark.parametrize("guess", [-2.0, 5.0])
@pytest.mark.parametrize("name", ["narrow, strips of rows", "wide inputs"])
def test_moments_do_not_depend_on_the_expected_mean(name: str, guess: float) -> None:
    check_moments_of_convolution(LAYERS[name], torch.float16, "cpu", guess)


@here
@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("name", ["narrow, strips of rows", "wide outputs", "2 × 2", "stride", "stride, wide"])
def test_sums_that_an_input_gradient_leaves_for_the_norm_before(name: str, mask: int, add: bool) -> None:
    check_norm_before(LAYERS[name], mask, add, torch.float32, "cpu")


@here
@pytest.mark.parametrize(
    ("name", "finish"),
    [
        ("narrow, strips of rows", "norm add"),
        ("narrow, odd channels", "bias norm"),
        ("narrow, no padding", "bias add"),
        ("narrow, more padding than the window", ""),
        ("wide outputs", "norm"),
        ("wide inputs", "norm add"),
        ("more outputs than a tile", "bias"),
        ("stride", "bias norm add"),
        ("1 × 1, stride", "norm"),
        ("2 × 2", "add"),
        ("1 × 3", "norm"),
    ],
)
def test_convolution_and_what_follows_in_prediction(name: str, finish: str) -> None:
    check_predicted_convolution(LAYERS[name], finish, torch.float32, "cpu", relu=True)
    check_predicted_convolution(LAYERS[name], finish, torch.float32, "cpu", shared=True)


@here
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's, of a product with inf
def test_float32_is_rounded_to_the_nearest_tf32_in_prediction() -> None:
    check_tf32_is_rounded("cpu")


@here
def test_the_layers_above_reach_every_kernel() -> None:
    with recorded_launches(dry=True) as names:
        for layer in LAYERS.values():
            x, weight, dy = layer.draw(torch.float32, "cpu")
            convolution.forward(x, weight, layer.window)
            convolution.input_gradient(dy, weight, layer.window, x.shape)
            weight_gradient(x, dy, weight, layer.window)
    assert set(names) == set(CONVOLUTION_KERNELS)


@here
def test_weight_gradient_of_more_blocks_than_are_merged_at_a_time() -> None:
    layer = Layer(1, 88, 3, 3, 13, 13)
    with recorded_launches() as names:
        check_weight_gradient(layer)
    assert names == ["weight_products_by_sweep", "merge_blocks"]


@here
@pytest.mark.parametrize(
    ("layer", "kernel"),
    [
        (Layer(1, 8, 3, 3, 9, 9, rows=1, taps=1, padding=0), "weight_products_by_rows"),
        (Layer(1, 8, 3, 40, 9, 9), "weight_products_by_taps"),
    ],
)
def test_weight_gradient_of_several_blocks_of_pixels(layer: Layer, kernel: str) -> None:
    with recorded_launches() as names:
        check_weight_gradient(layer)
    assert names == [kernel, "merge_blocks"]


def check_weight_gradient(layer: Layer) -> None:
    x, weight, dy = layer.draw(torch.float32, "cpu")
    exact = torch.nn.functional.conv2d(
        x.double(), leaf := weight[0].double().requires_grad_(), None, layer.stride, layer.padding
    )
    (expected,) = torch.autograd.grad(exact, leaf, dy.double())
    actual = weight_gradient(x, dy, weight, layer.window)
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@here
@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("dtype", "channels"), [("float32", 6), ("float32", 70), ("float16", 8)])
def test_batch_norm(members: int, add: bool, relu: bool, dtype: str, channels: int) -> None:
    check_batch_norm((2 * members, channels, 7, 5), members, DTYPES[dtype], "cpu", add=add, relu=relu)


@here
@pytest.mark.parametrize("shape", [(6, 1, 2, 1), (4, 130, 3, 3), (6, 3, 33, 31)])
def test_batch_norm_of_extreme_shapes(shape: tuple[int, ...]) -> None:
    check_batch_norm(shape, 2, torch.float32, "cpu", relu=True)


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Cut tensors into small blocks, of which four are merged at a time; returns how many blocks a norm has."""
    monkeypatch.setattr(batch_norm, "moment_blocks", lambda channels: 4)
    monkeypatch.setattr(batch_norm, "TILE", 256)
    return lambda: batch_norm.Blocks(torch.empty(8, 8, 9, 9), 1).number


@here
def test_batch_norm_of_more_rows_than_a_tile_has(few_blocks: Callable[[], int]) -> None:
    assert few_blocks() == 4
    blocks = batch_norm.Blocks(torch.empty(16, 8, 9, 9), 2)
    assert blocks.per_block > blocks.tile["HIGH"]
    check_batch_norm((16, 8, 9, 9), 2, torch.float32, "cpu", add=True, relu=True)


@here
def test_more_blocks_of_moments_than_are_merged_at_a_time(few_blocks: Callable[[], int]) -> None:
    """A convolution by sweeps leaves more blocks than the norm has: they are merged in turns of four."""
    layer = Layer(2, 16, 3, 8, 18, 9)
    x, weight, _ = layer.draw(torch.float32, "cpu")
    y, sums = convolution.forward(x, weight, layer.window, torch.zeros(2, 8))
    assert sums is not None
    assert sums.partial.shape[2] > few_blocks()
    norm = batch_norm.Norm(torch.ones(2, 8), torch.zeros(2, 8), torch.zeros(2, 8), torch.ones(2, 8), 1.0, 0.0)
    actual, _ = batch_norm.normalize(y, sums, norm, None, relu=False)
    rows = y.double().view(2, 16, *y.shape[1:])
    torch.testing.assert_close(norm.running_mean.double(), rows.mean((1, 3, 4)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_var.double(), rows.transpose(1, 2).flatten(2).var(2), rtol=1e-5, atol=1e-5)
    whole = actual.view(2, 16, *y.shape[1:]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(whole.mean(2), torch.zeros(2, 8), rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.var(2, correction=0), torch.ones(2, 8), rtol=1e-4, atol=0)


@here
def test_nan_passes_the_relu_of_a_norm() -> None:
    check_nan_passes_relu("cpu")


@here
def test_batch_norm_keeps_padded_channels_zero() -> None:
    check_padded_channels_of_norm("cpu")


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "stride", "channels"),
    [
        ((4, 8, 8, 8), 2, 16),
        ((3, 6, 7, 9), 2, 13),
        ((2, 13, 5, 5), 1, 14),
        ((1, 3, 13, 7), 3, 3),
        ((2, 70, 5, 3), 2, 90),
    ],
)
def test_subsample_and_its_gradient(shape: tuple[int, ...], stride: int, channels: int, dtype: str) -> None:
    check_subsample(shape, stride, channels, DTYPES[dtype], "cpu")


@here
@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip"])
@pytest.mark.parametrize("members", [1, 3])
def test_batch_drawn_in_one_kernel_equals_the_batches_of_the_feeds(augmentation: str, members: int) -> None:
    check_drawn_batch(augmentation, (3, 9, 12), members, "cpu")
    check_drawn_batch(augmentation, (3, 9, 12), members, "cpu", dtype=torch.float16, last=True)


@here
@pytest.mark.parametrize("augmentation", ["crop", "crop+flip+cutout"])
@pytest.mark.parametrize("mixup", [0.0, 0.3])
def test_drawn_batch_is_cut_out_and_blended_as_those_of_the_feeds(augmentation: str, mixup: float) -> None:
    check_drawn_batch(augmentation, (3, 9, 12), 2, "cpu", mixup=mixup)
    check_drawn_batch(augmentation, (3, 9, 12), 2, "cpu", dtype=torch.float16, last=True, mixup=mixup)


@here
@pytest.mark.parametrize("normalization", ["none", "unit", "imagenet"])
def test_drawn_batch_is_normalised_as_the_data_say(normalization: str) -> None:
    check_drawn_batch("crop", (3, 9, 12), 2, "cpu", normalization)


@here
def test_one_kernel_copies_parts_of_tensors_of_several_types(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def copier(pairs: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)  # the interpreter reads addresses of the host
            copy = pair_copies.copier(pairs)
        copy_all = pair_copies.copy_all
        monkeypatch.setattr(pair_copies, "copy_all", lambda *rest: launched.append(len(rest[0])) or copy_all(*rest))
        return copy

    check_copier("cpu", copier)
    assert launched == [3, 3]  # of thirteen: of other types, and one with gaps between all numbers
