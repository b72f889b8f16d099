"""The walk on a GPU gives what it gives on the CPU (CI has none; run this file where there is one)."""

from pathlib import Path

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.methods.batch_ensemble import BatchEnsembleNetwork
from structured_ensembles.methods.layers import called_layers
from structured_ensembles.methods.mc_dropout import DropoutNetwork

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_walk_is_the_same_on_a_gpu() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    data = se.load_data("digits")
    torch.manual_seed(0)
    model = se.zoo.resnet20(in_channels=1)
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=3, epochs=1, device="cpu")
    on_cpu = se.saliency(model, graph, scales, data, device="cpu")
    on_gpu = model.cuda()
    assert se.trace(on_gpu, data.example().cuda()).groups == graph.groups
    assert se.trace(on_gpu, data.example()).axes == graph.axes
    scores = se.saliency(on_gpu, graph, scales, data)
    for own, other in zip(scores, on_cpu, strict=True):
        for name, values in own.values.items():
            torch.testing.assert_close(values, other.values[name], rtol=1e-3, atol=1e-6)
    learned = se.learn_scales(on_gpu, graph, data, members=3, epochs=1)
    for name, values in learned.vectors.items():
        torch.testing.assert_close(values, scales.vectors[name], rtol=0, atol=5e-3)  # a handful of Adam steps of 1e-3
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_training_and_storage_on_a_gpu(tmp_path: Path) -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.structured_ensemble(
        se.zoo.resnet20(in_channels=1), data, members=3, recipe=se.Recipe(epochs=8), search_epochs=2, quiet=True
    )
    assert next(ensemble.parameters()).is_cuda
    assert se.evaluate(ensemble, data)["cls/accuracy"] > 0.9
    ensemble.save(tmp_path / "ensemble.safetensors")
    loaded = se.Ensemble.load(tmp_path / "ensemble.safetensors")
    x = data.test.inputs[:64]
    torch.testing.assert_close(loaded.predict_proba(x), ensemble.predict_proba(x), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["tile", "split", "dropout"])
@pytest.mark.parametrize("training", [False, True])
def test_networks_of_several_members_can_be_captured(kind: str, training: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model, example = se.zoo.lenet5(in_channels=1), torch.randn(13, 1, 28, 28)
    layers = called_layers(model, example)
    network = (
        DropoutNetwork(model, layers.hidden, 5)
        if kind == "dropout"
        else BatchEnsembleNetwork(model, layers.all, 5, kind)
    ).train(training)
    on_cpu = network(example)
    network.cuda()
    x = example.cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up, which capture needs
        network(x).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    network.zero_grad()
    with torch.cuda.graph(graph):
        outputs = network(x)
        outputs.sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    assert outputs.shape == on_cpu.shape
    assert all(bool(parameter.grad.isfinite().all()) for parameter in network.parameters())
    if not (training and kind == "dropout"):  # the hash drops the same elements everywhere
        torch.testing.assert_close(outputs.cpu(), on_cpu, rtol=1e-3, atol=1e-4)
