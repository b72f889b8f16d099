"""The models of benchmarks/models.py, of torchvision, timm and transformers: random weights, nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from transformers_list import TRANSFORMERS, make_example, make_model

CLASSES = 10


@dataclass(frozen=True)
class Entry:
    """A model: how it is made, and how a batch for it is."""

    library: str
    family: str
    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]


def list_models() -> dict[str, Entry]:
    """List all models by name, such as "timm/vit_tiny_patch16_224"."""
    entries = [*_torchvision(), *_timm(), *_transformers()]
    return {f"{entry.library}/{entry.name}": entry for entry in entries}


def declare_operators() -> None:
    """Declare torchvision's compiled operators where they do not match the installed torch: no model here uses them.

    Must come before the first import of torchvision, which timm and transformers import too.
    """
    spec = find_spec("torchvision")
    folder = Path(str(spec.origin)).parent if spec else Path()
    try:
        torch.ops.load_library(next(folder.glob("_C*.so")))
    except (OSError, StopIteration):
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        DECLARED.append(library)


DECLARED: list[Any] = []  # declarations last as long as their objects

# torchvision ----------------------------------------------------------------------------------------------------------

TORCHVISION = {
    "AlexNet": "alexnet",
    "VGG": "vgg11_bn",
    "ResNet": "resnet18 resnet50",
    "ResNeXt": "resnext50_32x4d",
    "Wide ResNet": "wide_resnet50_2",
    "RegNet": "regnet_x_400mf regnet_y_400mf",
    "DenseNet": "densenet121",
    "SqueezeNet": "squeezenet1_1",
    "MobileNet": "mobilenet_v2 mobilenet_v3_small mobilenet_v3_large",
    "EfficientNet": "efficientnet_b0 efficientnet_v2_s",
    "MNASNet": "mnasnet0_5 mnasnet1_0",
    "ShuffleNet": "shufflenet_v2_x0_5 shufflenet_v2_x1_0",
    "GoogLeNet": "googlenet",
    "Inception": "inception_v3",
    "ConvNeXt": "convnext_tiny",
    "Swin": "swin_t swin_v2_t",
    "ViT": "vit_b_16",
    "MaxViT": "maxvit_t",
}
VIDEO = {"ResNet 3D": "r3d_18 mc3_18 r2plus1d_18", "S3D": "s3d", "MViT": "mvit_v2_s"}
SEGMENTATION = {"FCN": "fcn_resnet50", "DeepLab": "deeplabv3_mobilenet_v3_large", "LRASPP": "lraspp_mobilenet_v3_large"}
TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {
    "vit_b_16": {"image_size": 64},
    "maxvit_t": {"input_size": (224, 224)},
}
TORCHVISION_SIZES = {"inception_v3": 299, "maxvit_t": 224}


def _torchvision() -> list[Entry]:
    entries = []
    for family, name in _pairs(TORCHVISION):
        size = TORCHVISION_SIZES.get(name, 64)
        options = {"num_classes": CLASSES, **TORCHVISION_OPTIONS.get(name, {})}
        entries.append(Entry("torchvision", family, name, partial(_make_torchvision, name, options), _images(size)))
    for family, name in _pairs(VIDEO):
        shape = (2, 3, 4, 32, 32) if family == "ResNet 3D" else (1, 3, 16, 224, 224)
        make = partial(_make_torchvision, name, {"num_classes": CLASSES})
        entries.append(Entry("torchvision", family, name, make, partial(torch.randn, *shape)))
    for family, name in _pairs(SEGMENTATION):
        options = {"num_classes": CLASSES, "weights_backbone": None}
        entries.append(Entry("torchvision", family, name, partial(_make_torchvision, name, options), _images(64)))
    return entries


def _make_torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    import torchvision

    more = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **more, **options)
    return model


# timm -----------------------------------------------------------------------------------------------------------------

TIMM = {
    "ResNet-D, -T, SE": "resnet18d resnet26t seresnet18 ecaresnet26t resnetrs50",
    "ResNeXt": "seresnext26d_32x4d",
    "Res2Net": "res2net50_14w_8s",
    "ResNeSt": "resnest14d",
    "SKNet": "skresnet18",
    "HRNet": "hrnet_w18_small",
    "DLA": "dla34 dla46x_c",
    "DPN": "dpn48b",
    "CSPNet": "cspresnet50 cspdarknet53",
    "DarkNet": "darknet17",
    "VoVNet": "ese_vovnet19b_dw",
    "SelecSLS": "selecsls42",
    "TResNet": "tresnet_m",
    "NFNet": "nf_resnet26 nf_regnet_b0 dm_nfnet_f0 eca_nfnet_l0",
    "RepVGG": "repvgg_a0",
    "ReXNet": "rexnet_100",
    "MixNet": "mixnet_s",
    "HardCoRe-NAS": "hardcorenas_a hardcorenas_b",
    "FBNet": "fbnetc_100 fbnetv3_b",
    "TinyNet": "tinynet_e",
    "LCNet": "lcnet_050",
    "GhostNet": "ghostnet_050 ghostnetv2_100",
    "MobileOne": "mobileone_s0",
    "MobileNet": "mobilenetv1_100 mobilenetv4_conv_small",
    "EfficientNet": "efficientnet_lite0 tf_efficientnetv2_b0 gc_efficientnetv2_rw_t",
    "SPNASNet": "spnasnet_100",
    "SEMNASNet": "semnasnet_075",
    "RegNet": "regnety_002 regnetz_b16",
    "DenseNet": "densenetblur121d",
    "Inception": "inception_v4",
    "Xception": "legacy_xception",
    "BiT": "resnetv2_50 resnetv2_50x1_bit",
    "HGNet": "hgnetv2_b0",
    "StarNet": "starnet_s1",
    "RepGhost": "repghostnet_050",
    "ConvNeXt": "convnext_atto convnextv2_atto",
    "ConvMixer": "convmixer_768_32",
    "InceptionNeXt": "inception_next_atto",
    "EdgeNeXt": "edgenext_xx_small",
    "MambaOut": "mambaout_femto",
    "PoolFormer": "poolformer_s12 poolformerv2_s12",
    "CAFormer": "convformer_s18 caformer_s18",
    "FastViT": "fastvit_t8",
    "EfficientFormer": "efficientformer_l1 efficientformerv2_s0",
    "EfficientViT": "efficientvit_b0 efficientvit_m0",
    "RepViT": "repvit_m0_9",
    "MobileViT": "mobilevit_xxs mobilevitv2_050",
    "CoAtNet": "coatnet_0_rw_224",
    "MaxViT": "maxvit_tiny_rw_224",
    "BoTNet": "botnet26t_256",
    "HaloNet": "halonet26t",
    "LambdaNet": "lambda_resnet26t",
    "ViT": "vit_tiny_patch16_224 vit_base_patch32_siglip_256 vit_small_r26_s32_224 eva02_tiny_patch14_224",
    "DeiT": "deit_tiny_patch16_224 deit3_small_patch16_224",
    "BEiT": "beit_base_patch16_224 beitv2_base_patch16_224",
    "CaiT": "cait_xxs24_224",
    "XCiT": "xcit_nano_12_p16_224",
    "PiT": "pit_ti_224",
    "PVT": "pvt_v2_b0",
    "Twins": "twins_pcpvt_small twins_svt_small",
    "CoaT": "coat_lite_tiny",
    "LeViT": "levit_128s",
    "ConViT": "convit_tiny",
    "TNT": "tnt_s_legacy_patch16_224",
    "CrossViT": "crossvit_tiny_240",
    "Visformer": "visformer_tiny",
    "NesT": "nest_tiny",
    "GCViT": "gcvit_xxtiny",
    "DaViT": "davit_tiny",
    "FocalNet": "focalnet_tiny_srf",
    "Hiera": "hiera_tiny_224",
    "MViT": "mvitv2_tiny",
    "Swin": "swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224",
    "MLP-Mixer": "mixer_s16_224",
    "gMLP": "gmlp_ti16_224",
    "ResMLP": "resmlp_12_224",
    "TinyViT": "tiny_vit_5m_224",
    "VOLO": "volo_d1_224",
    "Sequencer": "sequencer2d_s",
    "NextViT": "nextvit_small",
    "RDNet": "rdnet_tiny",
}  # fmt: skip
FIXED_224 = (
    *("vit_small_r26_s32_224", "cait_xxs24_224", "xcit_nano_12_p16_224", "pit_ti_224", "twins_pcpvt_small"),
    *("twins_svt_small", "coat_lite_tiny", "levit_128s", "convit_tiny", "tnt_s_legacy_patch16_224", "visformer_tiny"),
    *("gcvit_xxtiny", "hiera_tiny_224", "mvitv2_tiny", "swin_tiny_patch4_window7_224", "swinv2_cr_tiny_224"),
    *("tiny_vit_5m_224", "volo_d1_224", "sequencer2d_s", "coatnet_0_rw_224", "maxvit_tiny_rw_224", "nest_tiny"),
    *("davit_tiny", "efficientformer_l1", "efficientformerv2_s0", "resmlp_12_224", "mixer_s16_224", "gmlp_ti16_224"),
    *("beit_base_patch16_224", "beitv2_base_patch16_224", "eva02_tiny_patch14_224", "vit_base_patch32_siglip_256"),
    *("efficientvit_m0", "focalnet_tiny_srf"),
)
TIMM_SIZES = dict.fromkeys(FIXED_224, 224) | {
    "vit_base_patch32_siglip_256": 256,
    "swinv2_tiny_window8_256": 256,
    "crossvit_tiny_240": 240,
    "botnet26t_256": 256,
    "halonet26t": 256,
    "lambda_resnet26t": 256,
    "inception_v4": 96,
    "legacy_xception": 96,
    "fastvit_t8": 128,
    "mobilevit_xxs": 128,
    "mobilevitv2_050": 128,
    "nextvit_small": 128,
}
TIMM_OPTIONS: dict[str, dict[str, Any]] = {
    name: {"img_size": 64} for name in ("vit_tiny_patch16_224", "deit_tiny_patch16_224", "deit3_small_patch16_224")
}


def _timm() -> list[Entry]:
    entries = []
    for family, name in _pairs(TIMM):
        make = partial(_make_timm, name, TIMM_OPTIONS.get(name, {}))
        entries.append(Entry("timm", family, name, make, _images(TIMM_SIZES.get(name, 64))))
    return entries


def _make_timm(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    return model


# transformers ---------------------------------------------------------------------------------------------------------


def _transformers() -> list[Entry]:
    entries = []
    for prefix, suffix, options, kind in TRANSFORMERS:
        make = partial(make_model, prefix, suffix, {"num_labels": CLASSES, **options})
        entries.append(Entry("transformers", prefix, f"{prefix}{suffix}", make, partial(make_example, kind)))
    return entries


# ----------------------------------------------------------------------------------------------------------------------


def _pairs(families: dict[str, str]) -> list[tuple[str, str]]:
    """List families and names."""
    return [(family, name) for family, names in families.items() for name in names.split()]


def _images(size: int) -> Callable[[], Any]:
    """Return a function that makes two images; one if they are large."""
    return partial(torch.randn, 1 if size > 128 else 2, 3, size, size)
