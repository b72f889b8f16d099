"""A vision transformer of timm goes through the whole walk: cut, trained, saved, loaded, exported."""

from pathlib import Path

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.networks.graph_network import GraphNetwork
from tests.support.exactness import check_exact, randomize

timm = pytest.importorskip("timm")
CLASSES = 4


def make_vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=CLASSES)


def make_data() -> se.Data:
    """Images whose class is their brightness."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(96) % CLASSES
    pixels = torch.randint(0, 40, (96, 3, 32, 32), generator=generator) + 50 * labels.view(-1, 1, 1, 1)
    return se.Data.from_arrays(pixels.to(torch.uint8), labels, test=(pixels[:32].to(torch.uint8), labels[:32]))


def test_vit_tiny_is_cut_exactly() -> None:
    example = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    graph = check_exact(randomize(make_vit()), example)
    assert graph.prunable["blocks.1.attn.qkv[within]"] == 64
    assert graph.prunable["blocks.1.mlp.fc1"] == 768


def test_vit_tiny_loses_three_quarters_with_everything_on() -> None:
    graph = se.trace(make_vit(), torch.zeros(2, 3, 32, 32), coupled=True, approximate=True, nested="all")
    (subnet,) = se.select(graph, prune=0.5, selection="random", members=1)
    assert graph.num_parameters(subnet.counts) < 0.3 * graph.num_parameters()
    network = se.extract(make_vit(), graph, subnet)
    network(torch.randn(3, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_vit_tiny_goes_through_the_whole_walk(tmp_path: Path) -> None:
    data, recipe = make_data(), se.Recipe.named("tune-adamw", rate=1e-3, epochs=8, batch_size=16)
    ensemble = se.structured_ensemble(
        make_vit(), data, members=2, prune=0.5, recipe=recipe, search_epochs=1, quiet=True
    )
    assert all(isinstance(member, GraphNetwork) for member in ensemble.members)
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.6
    images, _ = data.test.inputs, data.test.targets
    probabilities = ensemble.predict_proba(images)
    ensemble.save(tmp_path / "vit.safetensors")
    loaded = se.Ensemble.load(tmp_path / "vit.safetensors", model=make_vit())
    assert torch.equal(loaded.predict_proba(images), probabilities)
    pixels = images[:3].float() / 255
    exported = torch.export.export(loaded.eval(), (pixels,)).module()
    torch.testing.assert_close(exported(pixels), loaded(pixels))
