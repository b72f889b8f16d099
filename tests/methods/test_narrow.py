"""Narrow networks equal members of Packed-Ensembles only if the residual stream is narrow, too."""

import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.methods import narrow_ensemble


@pytest.mark.parametrize("coupled", [False, True])
def test_only_coupled_narrows_every_hidden_layer(coupled: bool) -> None:
    images, labels = torch.rand(40, 3, 8, 8), torch.arange(40) % 2
    torch.manual_seed(0)
    model = se.zoo.resnet20(num_classes=2)
    data = se.Data.from_arrays(images, labels)
    settings = {"recipe": se.Recipe(epochs=0), "device": "cpu", "quiet": True}
    ensemble = narrow_ensemble(model, data, 2, prune=0.5, coupled=coupled, **settings)
    widths = {
        name: (layer.out_channels, model.get_submodule(name).out_channels)
        for name, layer in ensemble.members[0].named_modules()
        if isinstance(layer, nn.Conv2d)
    }
    # Packed-Ensembles of M networks with their α = M/2: every hidden width is halved.
    unpruned = {name for name, (width, full) in widths.items() if width == full}
    assert all(2 * width == full for name, (width, full) in widths.items() if name not in unpruned)
    first_of_blocks = {name for name in widths if name.endswith("conv1") and "." in name}
    assert unpruned == (set() if coupled else widths.keys() - first_of_blocks)
