"""Triton kernels, compiled, compute what PyTorch computes."""

import pytest
import torch
from torch import nn

from structured_ensembles.cuda import convolution
from tests.support.fused_norms import CASES, check
from tests.support.kernel_checks import check_batch_norm, check_channels_of_zeros, check_convolution, check_drawn_batch

pytestmark = pytest.mark.cuda


@pytest.mark.usefixtures("without_tf32")
@pytest.mark.parametrize("shape", [(128, 8, 32, 32), (3, 7, 5, 5), (16, 70, 4, 4), (300, 3, 33, 31), (2, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_equals_pytorch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_batch_norm(shape, dtype, "cuda")


def test_batch_norm_keeps_padded_channels_zero() -> None:
    check_channels_of_zeros(9, "cuda")


@pytest.mark.parametrize("name", CASES)
def test_fused_sums_and_relus_equal_plain_pytorch(name: str) -> None:
    following, joined = CASES[name]
    assert check(following, "cuda") == joined


@pytest.mark.parametrize(
    ("shape", "outputs", "size", "stride", "padding"),
    [
        ((128, 16, 32, 32), 8, 3, 1, 1),
        ((5, 3, 11, 7), 16, 3, 2, 1),
        ((4, 7, 9, 9), 5, 5, 1, 0),
        ((2, 8, 6, 6), 16, 1, 2, 0),
        ((32, 24, 16, 16), 32, 3, 1, 1),
        ((32, 64, 8, 8), 32, 3, 1, 1),
        ((9, 32, 8, 8), 64, 3, 2, 1),
        ((3, 1, 28, 28), 20, 7, 1, 3),
    ],
)
def test_convolution_equals_float64_pytorch(
    shape: tuple[int, ...], outputs: int, size: int, stride: int, padding: int
) -> None:
    check_convolution(shape, outputs, size, stride, padding, torch.bfloat16, "cuda")


def test_convolution_of_a_strided_view_equals_pytorch() -> None:
    whole = torch.randn(8, 32, 16, 16, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)
    layer = nn.Conv2d(16, 8, 3, padding=1, bias=False).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        for x in (*whole.chunk(2, 1), whole[:, :16, ::2, ::2], whole[:, 8:24, 1:, :-1].contiguous()):
            assert convolution.fits(x, layer)
            found, expected = convolution.convolution(x, layer), layer(x)
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip"])
def test_batch_drawn_in_one_kernel_equals_the_feeds_batch(augmentation: str) -> None:
    check_drawn_batch(augmentation, (3, 32, 32), "cuda")
    check_drawn_batch(augmentation, (1, 11, 7), "cuda")
