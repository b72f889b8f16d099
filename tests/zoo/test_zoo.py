"""Networks of the zoo: parameter counts, shapes, initialisation."""

import pytest
import torch
from torch import nn

import structured_ensembles as se


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (lambda: se.zoo.resnet20(10), 269_722),
        (lambda: se.zoo.resnet20(100), 275_572),
        (lambda: se.zoo.resnet32(200), 476_504),
        (lambda: se.zoo.resnet20(10, width=4), 4_286_026),
        (lambda: se.zoo.resnet18(10), 11_173_962),
        (se.zoo.lenet5, 61_706),
        (se.zoo.lenet5_backbone, 50_550),
        (se.zoo.half_vgg11_backbone, 2_304_864),
        (lambda: se.zoo.mlp(64), 64 * 256 + 256 + 256 * 256 + 256 + 2570),
    ],
)
def test_networks_have_the_expected_number_of_parameters(model, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in model().parameters()) == parameters


@pytest.mark.parametrize(("model", "parameters"), [(se.zoo.vgg11, 128_796_352), (se.zoo.vgg16, 134_289_088)])
def test_vgg_networks_have_the_expected_number_of_parameters(model, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in model().parameters()) == parameters


@pytest.mark.parametrize("name", ["resnet20", "resnet32", "resnet18", "lenet5", "half_vgg11"])
@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_networks_accept_images_of_any_size(name: str, size: int) -> None:
    model = getattr(se.zoo, name)(num_classes=7, in_channels=3).eval()
    assert model(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_backbones_return_features() -> None:
    assert se.zoo.lenet5_backbone()(torch.randn(2, 1, 28, 28)).shape == (2, 120)
    assert se.zoo.half_vgg11_backbone()(torch.randn(2, 3, 32, 32)).shape == (2, 256)


def test_weights_are_initialised_by_kaiming() -> None:
    torch.manual_seed(0)
    model = se.zoo.resnet18()
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
            fan_in = module.weight[0].numel()
            assert float(module.weight.std()) == pytest.approx((2 / fan_in) ** 0.5, rel=0.05)


def test_resnet_shortcut_subsamples_and_pads_with_zeros() -> None:
    """Option A: every second pixel, and zeros for the missing channels."""
    block = se.zoo.resnet20().layer2[0].eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert not out[:, 16:].any()
