"""`sens export`: a trained ensemble as one ONNX or .pt2 file, or as a folder for sharing."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from structured_ensembles.data.splits import TensorSplit, take_samples
from structured_ensembles.export import export_onnx, export_pt2, quantize_onnx, run_onnx
from structured_ensembles.runs.folder import read_config, read_result
from structured_ensembles.runs.ingredients import load_run_data, load_run_ensemble

CALIBRATION_SAMPLES = 256  # of the training split, by which the quantiser chooses ranges
TESTED_SAMPLES = 2000


def export(
    run: Path,
    onnx: Path | None = None,
    int8: Path | None = None,
    pt2: Path | None = None,
    folder: Path | None = None,
    root: Path | None = None,
    trust_code: bool = False,
) -> int:
    """Write a trained ensemble as files that run without this library, or as a folder for sharing.

    Args:
        run: a run folder of sens train
        onnx: the ONNX file to write
        int8: an ONNX file of 8-bit weights and activations to write beside it; what it costs in accuracy is printed
        pt2: the file for torch.export.load to write
        folder: the folder for sharing to write: the ensemble's file, and a model card with the figures of the run
        root: where data sets are kept
        trust_code: let the folder import the functions that build its network and its data

    """
    if onnx is None and pt2 is None and folder is None:
        raise ValueError("give --onnx FILE, --pt2 FILE, --folder FOLDER, or several of them")
    if int8 is not None and onnx is None:
        raise ValueError("--int8 needs --onnx FILE, which it is made of")
    config = read_config(run)
    data = None if int8 is None else load_run_data(run, config, root, trust_code)  # no other file needs them
    ensemble = load_run_ensemble(run, config, data, trust_code)
    if int8 is not None and ensemble.ids:
        raise ValueError("--int8 is for pixels and other floats, but this ensemble takes whole numbers")
    if folder is not None:
        result = read_result(run)
        figures = {name: value for name, value in result["figures"].items() if math.isfinite(value)}
        tested_on = f"the test split of {config['dataset']}"
        ensemble.save_pretrained(folder, result.get("storage", "float32"), figures=figures, dataset=tested_on)
        print(f"{folder}: Ensemble.from_pretrained loads it, push_to_hub uploads it")
    if pt2 is not None:
        print(f"{pt2}: {export_pt2(ensemble, pt2):,} bytes")
    if onnx is None:
        return 0
    print(f"{onnx}: {export_onnx(ensemble, onnx):,} bytes")
    if int8 is not None and data is not None:
        samples, _ = _spread_samples(data.train, CALIBRATION_SAMPLES)
        tested = _spread_samples(data.test, TESTED_SAMPLES)
        size = quantize_onnx(onnx, int8, samples)
        print(f"{int8}: {size:,} bytes, {_describe_cost(onnx, int8, *tested)}")
    return 0


def _spread_samples(split: object, count: int) -> tuple[Tensor, Tensor]:
    """Return samples from all over a split as the exported graph takes them, pixels in [0,1], with their targets."""
    if not isinstance(split, TensorSplit) or not isinstance(split.inputs, Tensor):
        raise ValueError("--int8 needs data of one input that fit in memory, with a test split, to be tried on")
    inputs, targets = take_samples(split, count)  # the first ones may be of one class
    assert isinstance(inputs, Tensor)
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs.float(), targets


def _describe_cost(exact: Path, quantized: Path, inputs: Tensor, targets: Tensor) -> str:
    """Say what 8 bits cost on samples: in accuracy, or of a regression in the root mean squared error."""
    outputs = [run_onnx(path, inputs) for path in (exact, quantized)]
    if "mean" in outputs[0]:
        before, after = (
            float((output["mean"].reshape(targets.shape) - targets).double().square().mean().sqrt())
            for output in outputs
        )
        return f"root mean squared error {after:.4g} instead of {before:.4g} ({after - before:+.2g})"
    before, after = (float((output["probabilities"].argmax(1) == targets).double().mean()) for output in outputs)
    return f"accuracy {after:.2%} instead of {before:.2%} ({after - before:+.2%})"
