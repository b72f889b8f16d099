"""export_onnx and export_pt2: the graph computes what the ensemble does, for any batch, and says what it is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import structured_ensembles as se
from structured_ensembles.common.inputs import call_arguments, map_inputs, tensors_in
from structured_ensembles.export import CLASSIFICATION, Predictor, quantize_onnx, run_onnx

onnxruntime = pytest.importorskip("onnxruntime")


def make_ensemble(network: nn.Module, shape: tuple[int, ...], **options: object) -> se.Ensemble:
    """Cut two halves out of a network, as if it had been trained on pixels with a temperature and a threshold."""
    torch.manual_seed(0)
    graph = se.trace(network, torch.rand(2, *shape))
    subnets = se.select(graph, prune=0.5, selection="random", members=2)
    normalization = se.Normalization((0.4,) * shape[0], (0.2,) * shape[0])
    ensemble = se.Ensemble([se.extract(network, graph, subnet) for subnet in subnets], normalization=normalization)
    ensemble.input_shape, ensemble.pixels, ensemble.classes = shape, True, ("cat", "dog", "bird")
    ensemble.temperature = 1.5
    inputs = torch.rand(9, *shape, generator=torch.Generator().manual_seed(2))
    ensemble.threshold = float(ensemble.uncertainty(inputs).entropy.median())
    return ensemble.eval()


def expected(ensemble: se.Ensemble, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the library itself predicts."""
    uncertainty = ensemble.uncertainty(inputs)
    return {
        "probabilities": ensemble.predict_proba(inputs),
        "entropy": uncertainty.entropy,
        "mutual_information": uncertainty.mutual_information,
        "keep": ensemble.keep(inputs),
    }


@pytest.fixture(scope="module")
def lenet(tmp_path_factory: pytest.TempPathFactory) -> tuple[se.Ensemble, Path]:
    """Export an ensemble of LeNet5 once; return it and its file."""
    ensemble = make_ensemble(se.zoo.lenet5(num_classes=3), (1, 28, 28))
    path = tmp_path_factory.mktemp("lenet") / "e.onnx"
    assert se.export_onnx(ensemble, path) == path.stat().st_size
    return ensemble, path


ZOO = {  # the cheap ones besides LeNet5; benchmarks/export_check.py has all of them, and some of torchvision
    "mlp": (1, 8, 8),
    "resnet20": (3, 32, 32),
    "half_vgg11": (3, 32, 32),
}


@pytest.mark.parametrize("name", ZOO)
def test_onnx_graph_predicts_what_the_ensemble_predicts(name: str, tmp_path: Path) -> None:
    shape = ZOO[name]
    options = {"in_features": 64} if name == "mlp" else {}
    ensemble = make_ensemble(getattr(se.zoo, name)(num_classes=3, **options), shape)
    size = se.export_onnx(ensemble, tmp_path / "e.onnx")
    assert size == (tmp_path / "e.onnx").stat().st_size
    for count in (1, 5):
        inputs = torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))
        outputs = run_onnx(tmp_path / "e.onnx", inputs)
        for output, values in expected(ensemble, inputs).items():
            torch.testing.assert_close(outputs[output], values.to(outputs[output].dtype), atol=1e-4, rtol=1e-4)


ONLY_ONNXRUNTIME = """
import json, sys
import numpy
for name in ("torch", "onnx", "structured_ensembles"):
    sys.modules[name] = None  # importing it fails
import onnxruntime

session = onnxruntime.InferenceSession("e.onnx", providers=["CPUExecutionProvider"])
images = numpy.load("images.npy")
names = [output.name for output in session.get_outputs()]
results = [dict(zip(names, session.run(None, {"input": images[:count]}))) for count in (1, 2, 7)]
for result in results:
    count = len(result["entropy"])
    assert result["probabilities"].shape == (count, 3) and result["mutual_information"].shape == (count,)
    assert result["keep"].dtype == bool and result["keep"].shape == (count,)
    for name in names:
        assert numpy.allclose(result[name], results[-1][name][:count], atol=1e-6), name  # the batch changes nothing
metadata = session.get_modelmeta().custom_metadata_map
assert "structured-ensembles" in metadata["producer"] and "torch" in metadata["producer"]
classes = json.loads(metadata["classes"])
numpy.savez("outputs.npz", **results[-1])
print(*(classes[number] for number in results[-1]["probabilities"].argmax(1)))
"""


def test_a_user_with_only_onnxruntime_has_everything(lenet: tuple[se.Ensemble, Path]) -> None:
    ensemble, path = lenet
    inputs = torch.rand(7, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    np.save(path.with_name("images.npy"), inputs.numpy())
    command = [sys.executable, "-c", ONLY_ONNXRUNTIME]
    printed = subprocess.run(command, cwd=path.parent, check=True, capture_output=True, text=True).stdout.split()
    assert printed == [ensemble.classes[label] for label in ensemble.predict(inputs)]
    outputs = np.load(path.with_name("outputs.npz"))
    for name, values in expected(ensemble, inputs).items():
        np.testing.assert_allclose(outputs[name], values, atol=1e-4)
    assert set(outputs["keep"]) == {True, False}


def test_a_network_of_torchvision_is_exported(tmp_path: Path) -> None:
    import torchvision

    ensemble = make_ensemble(torchvision.models.squeezenet1_1(weights=None, num_classes=3), (3, 32, 32))
    se.export_onnx(ensemble, tmp_path / "e.onnx")
    inputs = torch.rand(2, 3, 32, 32)
    outputs = run_onnx(tmp_path / "e.onnx", inputs)
    torch.testing.assert_close(outputs["probabilities"], ensemble.predict_proba(inputs), atol=1e-4, rtol=1e-4)


def test_onnx_file_says_what_it_is_and_nothing_of_this_machine(lenet: tuple[se.Ensemble, Path]) -> None:
    _, path = lenet
    session = onnxruntime.InferenceSession(str(path))
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["classes"]) == ["cat", "dog", "bird"]
    assert (metadata["task"], metadata["members"], metadata["temperature"]) == ("classification", "2", "1.5")
    assert tuple(json.loads(metadata["outputs"])) == CLASSIFICATION
    assert [output.name for output in session.get_outputs()] == list(CLASSIFICATION)
    assert session.get_inputs()[0].shape[1:] == [1, 28, 28]
    assert isinstance(session.get_inputs()[0].shape[0], str), "the batch is dynamic"
    assert b"/src/structured_ensembles" not in path.read_bytes()


def test_pt2_program_predicts_what_the_ensemble_predicts(tmp_path: Path) -> None:
    ensemble = make_ensemble(se.zoo.lenet5(num_classes=3), (1, 28, 28))
    assert se.export_pt2(ensemble, tmp_path / "e.pt2") > 10_000
    extra = {"metadata.json": ""}
    program = torch.export.load(tmp_path / "e.pt2", extra_files=extra).module()
    inputs = torch.rand(4, 1, 28, 28)
    for values, exported in zip(expected(ensemble, inputs).values(), program(inputs), strict=True):
        torch.testing.assert_close(exported, values.to(exported.dtype))
    assert json.loads(extra["metadata.json"])["members"] == 2


def test_regression_exports_mean_and_deviation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ensemble = se.Ensemble([nn.Linear(4, 1) for _ in range(3)], task="regression").eval()
    ensemble.input_shape = (4,)
    se.export_onnx(ensemble, tmp_path / "r.onnx")
    inputs = torch.rand(6, 4)
    outputs = run_onnx(tmp_path / "r.onnx", inputs)
    torch.testing.assert_close(outputs["mean"].flatten(), ensemble.predict(inputs).flatten())
    torch.testing.assert_close(outputs["deviation"].flatten(), ensemble.spread(inputs).flatten())


@pytest.mark.parametrize("dtype", [None, torch.int64, torch.uint8])
def test_graph_networks_and_token_ids_are_exported(dtype: torch.dtype | None, tmp_path: Path) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.hidden, self.head = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.hidden(self.embed(tokens)).view(-1, 5, 8).relu().mean(1))

    model = Reader()
    graph = se.trace(model, torch.zeros(2, 5, dtype=torch.long))
    subnets = se.select(graph, prune=0.5, selection="random", members=2)
    ensemble = se.Ensemble([se.extract(model, graph, subnet) for subnet in subnets]).eval()
    ensemble.input_shape, ensemble.ids, ensemble.id_limit = (5,), True, 9
    tokens = torch.randint(0, 9, (4, 5))
    se.export_onnx(ensemble, tmp_path / "t.onnx", example=None if dtype is None else tokens.to(dtype))
    torch.testing.assert_close(
        run_onnx(tmp_path / "t.onnx", tokens)["probabilities"], ensemble.predict_proba(tokens), atol=1e-4, rtol=1e-4
    )


class Merging(nn.Module):
    """Takes numbers and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.embed, self.hidden = nn.Linear(4, 6), nn.Embedding(9, 6), nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.numbers(numbers) + self.embed(ids)).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", [None, ("numbers", "ids"), ("ids", "numbers")])
def test_ensembles_of_several_inputs_are_exported_for_batches_of_any_size(
    order: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """Inputs of a dict could not be exported: torch.export found no dimension in keywords without names."""
    torch.manual_seed(0)
    named = {"numbers": torch.randn(40, 4), "ids": torch.randint(0, 9, (40,))}
    inputs: Any = tuple(named.values()) if order is None else {name: named[name] for name in order}
    ensemble = se.Ensemble([Merging(), Merging()]).eval()
    ensemble.adopt(se.Data.from_arrays(inputs, torch.arange(40) % 3))
    few = map_inputs(lambda tensor: tensor[:7], inputs)
    se.export_pt2(ensemble, tmp_path / "e.pt2", example=map_inputs(lambda tensor: tensor[:4], inputs))
    positional, keywords = call_arguments(few)
    probabilities, *_ = torch.export.load(tmp_path / "e.pt2").module()(*positional, **keywords)
    torch.testing.assert_close(probabilities, ensemble.predict_proba(few))
    se.export_onnx(ensemble, tmp_path / "e.onnx", example=map_inputs(lambda tensor: tensor[:4], inputs))
    names = ("input_0", "input_1") if order is None else order
    feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors_in(few), strict=True)}
    session = onnxruntime.InferenceSession(str(tmp_path / "e.onnx"))
    torch.testing.assert_close(torch.from_numpy(session.run(None, feeds)[0]), ensemble.predict_proba(few))


def test_operation_that_onnx_lacks_is_named_in_one_line(tmp_path: Path) -> None:
    class Householder(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.linalg.householder_product(self.weight, self.bias)

    ensemble = se.Ensemble([Householder(3, 3)])
    with pytest.raises(RuntimeError, match=r"torch\.onnx cannot convert the ensemble: .*householder") as raised:
        se.export_onnx(ensemble, tmp_path / "e.onnx", example=torch.rand(4, 3))
    assert "\n" not in str(raised.value)


def test_int8_file_is_smaller_and_close(lenet: tuple[se.Ensemble, Path], tmp_path: Path) -> None:
    _, path = lenet
    inputs = torch.rand(64, 1, 28, 28)
    assert quantize_onnx(path, tmp_path / "e8.onnx", inputs) < 0.6 * path.stat().st_size
    exact, quantized = (run_onnx(file, inputs)["probabilities"] for file in (path, tmp_path / "e8.onnx"))
    assert 0 < (exact - quantized).abs().max() < 0.1


def test_failed_exports_leave_no_file_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="example must be given"):
        se.export_onnx(se.Ensemble([nn.Linear(4, 2)]), tmp_path / "e.onnx")
    with pytest.raises(TypeError, match="ensemble must be"):
        se.export_onnx(nn.Linear(4, 2), tmp_path / "e.onnx")
    ensemble = make_ensemble(se.zoo.lenet5(num_classes=3), (1, 28, 28))
    with pytest.raises(ValueError, match="example must be a batch of inputs of shape"):
        se.export_onnx(ensemble, tmp_path / "e.onnx", torch.rand(2, 3, 28, 28))
    right = Predictor.forward

    def wrong(self: Predictor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = right(self, *inputs)
        return (outputs[0] + (0 if torch.compiler.is_exporting() else 0.01), *outputs[1:])

    monkeypatch.setattr(Predictor, "forward", wrong)
    with pytest.raises(RuntimeError, match=r"onnxruntime computes other probabilities than PyTorch: .* 0\.01"):
        se.export_onnx(ensemble, tmp_path / "e.onnx")
    assert not list(tmp_path.iterdir())
