"""The walk on a GPU gives what it gives on the CPU (CI has none; run this file where there is one)."""

from pathlib import Path

import pytest
import torch

import structured_ensembles as se

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


@pytest.mark.parametrize("name", se.evaluation.CORRUPTIONS)
def test_corruptions_draw_the_same_on_a_gpu(name: str) -> None:
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        on_cpu = se.evaluation.corrupt(images, name, severity, seed=1)
        on_gpu = se.evaluation.corrupt(images.cuda(), name, severity, seed=1)
        assert on_gpu.is_cuda
        # A rounding error may carry a value over a threshold, such as the edge of a drop.
        assert float(((on_gpu.cpu() - on_cpu).abs() > 1e-3).double().mean()) < 0.005


def test_evaluation_on_a_gpu() -> None:
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(2)])
    se.train(ensemble, data, se.Recipe(epochs=2), quiet=True, device="cpu")
    asked = {"fgsm": [0.1], "corruptions": ["fog", "contrast"], "base": se.zoo.mlp(64)}
    on_cpu = se.evaluate(ensemble, data, **asked)
    on_gpu = se.evaluate(ensemble.cuda(), data, **asked)
    assert on_gpu.keys() == on_cpu.keys()
    for key, value in on_gpu.items():
        if key != "size/peak_bytes":
            assert value == pytest.approx(on_cpu[key], rel=1e-2, abs=1e-2)
    assert on_gpu["size/peak_bytes"] > 0
