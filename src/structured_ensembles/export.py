"""export_onnx(), export_pt2(): an ensemble as one graph that runs without this library.

The graph takes inputs as users have them (pixels as floats in [0,1], features, or token ids) and has everything inside:
normalisation, all members, the temperature and the discard threshold. Batches may have any size.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from structured_ensembles.common.checks import check_path, check_type
from structured_ensembles.common.exports import exclusive_export
from structured_ensembles.common.gaussian import mean_and_spread
from structured_ensembles.common.inputs import Inputs, call, call_arguments, map_inputs, tensors_in
from structured_ensembles.common.version import VERSION
from structured_ensembles.data.conversion import as_tensor
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.networks.copying import clone_model
from structured_ensembles.networks.modes import evaluation_mode
from structured_ensembles.prediction.combination import combine_logits, uncertainty_of
from structured_ensembles.prediction.input_checks import check_inputs
from structured_ensembles.prediction.undecided import CAUSE
from structured_ensembles.storage.files import write_atomically

CLASSIFICATION = ("probabilities", "entropy", "mutual_information", "keep")
REGRESSION = ("mean", "deviation")
TOLERANCE = 1e-4  # of the exported graph's outputs, against PyTorch's
OPSET = 18


class Predictor(nn.Module):
    """The combined prediction of an ensemble, as one module with a tuple of outputs, see `outputs_of`."""

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, ...]:
        """Return the outputs for a batch: (batch, classes), then (batch,) each; of a regression (batch, …) each."""
        outputs = self.ensemble(*inputs, **keywords)
        if self.ensemble.task == "regression":
            return mean_and_spread(outputs, self.ensemble.gaussian)
        temperature = self.ensemble.calibration.temperature_for("mean", None)
        uncertainty = uncertainty_of(outputs, temperature)
        threshold = self.ensemble.threshold
        keep = uncertainty.entropy <= (float("inf") if threshold is None else threshold)
        probabilities = combine_logits(outputs, "mean", temperature)
        return probabilities, uncertainty.entropy, uncertainty.mutual_information, keep


def predictor_of(ensemble: Ensemble, inputs: Any) -> Predictor:
    """Return the predictor of an ensemble for such inputs.

    Inputs of a dict are named in the signature of its `forward`: in keywords without names, `torch.export` would find
    no dimension that may vary.
    """
    if not isinstance(inputs, dict):
        return Predictor(ensemble)

    class NamedPredictor(Predictor):
        def forward(self, *positional: Any, **keywords: Any) -> tuple[Tensor, ...]:
            return super().forward(*positional, **keywords)

    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *inputs)]
    NamedPredictor.forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return NamedPredictor(ensemble)


def outputs_of(ensemble: Ensemble) -> tuple[str, ...]:
    """Name the outputs of an exported ensemble."""
    return REGRESSION if ensemble.task == "regression" else CLASSIFICATION


def export_onnx(ensemble: Ensemble, path: str | Path, example: Inputs | None = None) -> int:
    """Write an ensemble as one ONNX file; return its size in bytes. Needs the extra `onnx`.

    Outputs of a classification: probabilities (batch, classes) after temperature, entropy (batch,), mutual_information
    (batch,), and keep (batch,): whether the entropy is at most the threshold (always true without one). Of a
    regression: mean and deviation, in the units of the targets. The metadata has task, classes, outputs, temperature,
    threshold and versions. The file is run by onnxruntime on the example and compared with PyTorch before it is kept.

    example: a batch of inputs; by default random ones of the shape that the ensemble was trained with.
    """
    path = check_path("path", path)
    onnx, runtime = _import_onnx()
    predictor, inputs = _prepare(ensemble, example)
    names = _input_names(inputs)
    with exclusive_export(), _quiet():
        exported = _export(predictor, inputs)
        try:
            program = torch.onnx.export(
                exported,
                dynamo=True,
                input_names=names,
                output_names=list(outputs_of(ensemble)),
                opset_version=OPSET,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:  # pages long; its first cause names the operation
            reason: BaseException = error
            while reason.__cause__ is not None:
                reason = reason.__cause__
            raise RuntimeError(
                f"torch.onnx cannot convert the ensemble: {str(reason).strip().partition(chr(10))[0]} "
                "(export_pt2 writes a file for PyTorch)"
            ) from error
    assert program is not None
    model = program.model_proto
    for node in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output):
        del node.metadata_props[:]  # stack traces with the paths of this machine
    onnx.helper.set_model_props(model, {name: str(value) for name, value in _metadata(ensemble).items()})
    _check_onnx(runtime, model.SerializeToString(), predictor, inputs, names)
    write_atomically(path, lambda temporary: onnx.save(model, str(temporary)))
    return path.stat().st_size


def export_pt2(ensemble: Ensemble, path: str | Path, example: Inputs | None = None) -> int:
    """Write an ensemble as a `.pt2` file, which `torch.export.load` reads; return its size in bytes.

    Outputs, metadata and example: as in `export_onnx`; the metadata is the file "metadata.json" in it.
    """
    path = check_path("path", path)
    predictor, inputs = _prepare(ensemble, example)
    with exclusive_export(), _quiet():
        program = _export(predictor, inputs)
    _compare(predictor, inputs, call(program.module(), inputs), "the exported program")
    extra = {"metadata.json": json.dumps(_metadata(ensemble))}

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            torch.export.save(program, file, extra_files=extra)

    write_atomically(path, write)
    return path.stat().st_size


def quantize_onnx(source: str | Path, target: str | Path, samples: Tensor | np.ndarray) -> int:
    """Write an 8-bit version of an exported file by onnxruntime's quantiser; return its size in bytes.

    Weights are quantised per channel, activations by their range on the samples.
    samples: inputs as the graph takes them, (samples, …), such as some hundred of the training split.
    """
    _, runtime = _import_onnx()
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    name = runtime.InferenceSession(str(source), providers=["CPUExecutionProvider"]).get_inputs()[0].name
    batches = iter([{name: np.asarray(batch, dtype=np.float32)} for batch in torch.as_tensor(samples).split(32)])

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        """Batches of samples, one after the other."""

        def get_next(self) -> Any:
            """Return the next batch; None at the end."""
            return next(batches, None)

    target = Path(target)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        prepared, quantized = Path(folder) / "prepared.onnx", Path(folder) / "quantized.onnx"
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(quantized),
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        content = quantized.read_bytes()
    write_atomically(target, lambda temporary: temporary.write_bytes(content))
    return target.stat().st_size


def run_onnx(path: str | Path, inputs: Tensor, batch_size: int = 256) -> dict[str, Tensor]:
    """Run an exported file by onnxruntime on inputs (samples, …); return its outputs by name, each (samples, …)."""
    _, runtime = _import_onnx()
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    batches = [session.run(None, {name: batch.numpy()}) for batch in inputs.split(batch_size)]
    names = [output.name for output in session.get_outputs()]
    columns = zip(*batches, strict=True)
    return {
        output: torch.cat([torch.from_numpy(batch) for batch in column])
        for output, column in zip(names, columns, strict=True)
    }


def _prepare(ensemble: Ensemble, example: Inputs | None) -> tuple[Predictor, Any]:
    """Return the predictor of a copy of the ensemble on the CPU, and the inputs to export it with."""
    check_type("ensemble", ensemble, Ensemble)
    inputs = _random_inputs(ensemble) if example is None else _convert_example(example, ensemble.ids)
    check_inputs(
        inputs, ensemble.input_shape, ensemble.input_kinds, ensemble.ids, ensemble.id_limit, argument="example"
    )
    copied = clone_model(ensemble).cpu().float().eval()
    assert isinstance(copied, Ensemble)
    return predictor_of(copied, inputs).eval(), inputs


def _random_inputs(ensemble: Ensemble) -> Any:
    """Draw three inputs of the shape that the ensemble was trained with."""
    shape = ensemble.input_shape
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ValueError("example must be given for an ensemble of several inputs, or of inputs that it does not know")
    generator = torch.Generator().manual_seed(0)
    if ensemble.ids:
        return torch.randint(0, int(ensemble.id_limit or 2), (3, *shape), generator=generator)
    return torch.rand(3, *shape, generator=generator)


def _convert_example(example: Inputs, ids: bool) -> Any:
    """Return an example on the CPU, of at least two samples; uint8 are pixels, made floats in [0,1], unless `ids`."""

    def convert(tensor: Tensor) -> Tensor:
        tensor = as_tensor("example", tensor).cpu()
        if tensor.dtype == torch.uint8:
            tensor = tensor.long() if ids else tensor / 255
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        return torch.cat([tensor, tensor]) if len(tensor) == 1 else tensor

    return map_inputs(convert, example)


def _export(predictor: Predictor, inputs: Any) -> ExportedProgram:
    """Export a predictor for batches of any size."""
    positional, keywords = call_arguments(inputs)
    shapes = ShapesCollection()
    batch = Dim("batch", min=1)
    for tensor in tensors_in(inputs):
        shapes[tensor] = {0: batch}
    dynamic = shapes.dynamic_shapes(predictor, positional, keywords)
    with evaluation_mode(predictor), torch.no_grad():
        return torch.export.export(predictor, positional, keywords, strict=False, dynamic_shapes=dynamic)


def _input_names(inputs: Any) -> list[str]:
    """Name the inputs of an exported graph: as the network does, or "input"."""
    if isinstance(inputs, dict):
        return list(inputs)
    count = len(tensors_in(inputs))
    return ["input"] if count == 1 else [f"input_{number}" for number in range(count)]


def _metadata(ensemble: Ensemble) -> dict[str, Any]:
    """Return what a reader of the file should know of the ensemble."""
    return {
        "producer": f"structured-ensembles {VERSION}, torch {torch.__version__}",
        "task": ensemble.task,
        "members": len(ensemble),
        "classes": json.dumps(list(ensemble.classes)),
        "outputs": json.dumps(outputs_of(ensemble)),
        "temperature": ensemble.temperature if ensemble.task == "classification" else 1.0,
        "threshold": ensemble.threshold,
        "pixels": "floats in [0,1]" if ensemble.pixels else "none",
    }


def _check_onnx(runtime: Any, content: bytes, predictor: Predictor, inputs: Any, names: list[str]) -> None:
    """Run an ONNX graph by onnxruntime and compare its outputs with PyTorch's; also for a single sample."""
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for batch in (inputs, map_inputs(lambda tensor: tensor[:1], inputs)):
        feeds = {name: tensor.numpy() for name, tensor in zip(names, tensors_in(batch), strict=True)}
        _compare(predictor, batch, [torch.from_numpy(output) for output in session.run(None, feeds)], "onnxruntime")


@torch.no_grad()
def _compare(predictor: Predictor, inputs: Any, outputs: Any, where: str) -> None:
    """Raise a RuntimeError unless outputs are those of PyTorch; a ValueError if those are NaN."""
    for name, one, other in zip(outputs_of(predictor.ensemble), call(predictor, inputs), outputs, strict=True):
        if bool(one.isnan().any()):
            raise ValueError(f"the ensemble cannot be exported, as its {name} of the example are NaN: {CAUSE}")
        if one.dtype != torch.bool and not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE):
            difference = float((one - other).abs().max())
            raise RuntimeError(f"{where} computes other {name} than PyTorch: they differ by {difference:.2g}")


def _import_onnx() -> tuple[Any, Any]:
    """Import onnx and onnxruntime; raise an ImportError that says how to install them."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError as error:
        raise ImportError(
            f"export_onnx needs the extra onnx: pip install 'structured-ensembles[onnx]' ({error})"
        ) from error
    return onnx, onnxruntime


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporters, which print their progress and warn of their own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
