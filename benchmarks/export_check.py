"""Compare exported ensembles with PyTorch: every network of the zoo and five of torchvision.

    python benchmarks/export_check.py [--models lenet5 torchvision/vit_b_16] [--json FILE]

Two halves of each network, with random weights and statistics, a normalisation, a temperature and a threshold, are
exported to ONNX and .pt2 with batches of three. onnxruntime and torch.export.load then predict for other batches, of 1
and 5 images, as a user who has nothing but the file. A row has the largest difference to the ensemble's own
predictions. Rows that the file of --json has already are kept: delete it to measure all.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import structured_ensembles as se
from model_list import declare_operators
from recording import arguments_of, record
from structured_ensembles.common.tables import text_table

NAMES = ("probabilities", "entropy", "mutual_information", "keep")
CLASSES = ("cat", "dog", "bird")
ZOO: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "lenet5": ((1, 28, 28), {"num_classes": 3}),
    "lenet5_backbone": ((1, 28, 28), {}),
    "mlp": ((1, 8, 8), {"num_classes": 3, "in_features": 64}),
    "half_vgg11": ((3, 32, 32), {"num_classes": 3}),
    "half_vgg11_backbone": ((3, 32, 32), {}),
    **{name: ((3, 32, 32), {"num_classes": 3}) for name in ("resnet18", "resnet20", "resnet32", "vgg11", "vgg16")},
    "wrn28_10": ((3, 16, 16), {"num_classes": 3}),
}
TORCHVISION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    **{name: ((3, 64, 64), {}) for name in ("resnet18", "mobilenet_v2", "efficientnet_b0", "densenet121")},
    "vit_b_16": ((3, 32, 32), {"image_size": 32}),
}


def main() -> None:
    """Check all models and print the table."""
    names = [*ZOO, *(f"torchvision/{name}" for name in TORCHVISION)]
    arguments = arguments_of(__doc__, only_cpu=True, models=names)
    models = vars(arguments).pop("models")  # the record has those of several calls
    torch.set_num_threads(1)
    declare_operators()
    rows: dict[str, dict[str, Any]] = {}
    if arguments.json and arguments.json.exists():
        rows = {row["model"]: row for row in json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]}
    for name in models:
        if name not in rows:
            rows[name] = check(name)
            print(rows[name], flush=True)
            record(arguments, [rows[known] for known in names if known in rows])
    cells = [
        (row["model"], *(f"{row[way]['difference']:.1e}" for way in ("onnx", "pt2")), f"{row['onnx']['bytes']:,}")
        for row in rows.values()
    ]
    print(text_table(("model", "ONNX", ".pt2", "bytes"), cells))


def check(name: str) -> dict[str, Any]:
    """Export an ensemble of a model in both ways; return the row of both."""
    shape, options = (TORCHVISION if "/" in name else ZOO)[name.rpartition("/")[2]]
    ensemble = make_ensemble(build(name, options), shape)
    row: dict[str, Any] = {"model": name, "shape": list(shape), "parameters": ensemble.num_parameters}
    for way, export, run in (("onnx", se.export_onnx, run_onnx), ("pt2", se.export_pt2, run_pt2)):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, start = Path(folder) / f"ensemble.{way}", time.process_time()
            export(ensemble, path)
            seconds = time.process_time() - start
            row[way] = {"bytes": path.stat().st_size, "seconds": seconds, **compare(ensemble, shape, run(path))}
    return row


def build(name: str, options: Mapping[str, Any]) -> nn.Module:
    """Make a network, its batch norms with statistics of their own."""
    torch.manual_seed(0)
    if "/" not in name:
        network = getattr(se.zoo, name)(**options)
    else:
        import torchvision

        network = getattr(torchvision.models, name.rpartition("/")[2])(weights=None, num_classes=3, **options)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2)
            module.running_var.uniform_(0.5, 1.5)
        if isinstance(module, nn.Linear) and not module.weight.any():
            module.reset_parameters()  # such as the head of torchvision's vision transformers
    return network


def make_ensemble(network: nn.Module, shape: tuple[int, ...]) -> se.Ensemble:
    """Cut two halves out of a network, as if they had been trained and calibrated."""
    graph = se.trace(network, torch.rand(2, *shape))
    subnets = se.select(graph, prune=0.5, selection="random", members=2)
    networks = [se.extract(network, graph, subnet) for subnet in subnets]
    ensemble = se.Ensemble(networks, normalization=se.Normalization((0.4,) * shape[0], (0.2,) * shape[0]))
    ensemble.input_shape, ensemble.pixels, ensemble.classes = shape, True, CLASSES
    images = torch.rand(8, *shape)
    # Logits of random weights may be huge or tiny, and probabilities all 0 and 1, or all alike, which never differ.
    ensemble.temperature = float(ensemble.logits(images).std())
    ensemble.threshold = float(ensemble.uncertainty(images).entropy.median())
    return ensemble.eval()


def run_onnx(path: Path) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function of images that runs the file by onnxruntime alone; check what the file says of itself."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(metadata["classes"])) == CLASSES
    assert "structured-ensembles" in metadata["producer"]
    assert "torch" in metadata["producer"]
    assert tuple(output.name for output in session.get_outputs()) == NAMES

    def run(images: Tensor) -> dict[str, Tensor]:
        return dict(zip(NAMES, map(torch.from_numpy, session.run(None, {"input": images.numpy()})), strict=True))

    return run


def run_pt2(path: Path) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function of images that runs the file by torch alone; check what the file says of itself."""
    extra = {"metadata.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    assert tuple(json.loads(json.loads(extra["metadata.json"])["classes"])) == CLASSES
    return lambda images: dict(zip(NAMES, program(images), strict=True))


def compare(
    ensemble: se.Ensemble, shape: tuple[int, ...], run: Callable[[Tensor], dict[str, Tensor]]
) -> dict[str, Any]:
    """Return the largest difference to the ensemble over batches of 1 and 5, and whether all decisions agree."""
    difference, same_decisions = 0.0, True
    for count in (1, 5):
        images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(count))
        outputs, uncertainty = run(images), ensemble.uncertainty(images)
        expected = {
            "probabilities": ensemble.predict_proba(images),
            "entropy": uncertainty.entropy,
            "mutual_information": uncertainty.mutual_information,
        }
        difference = max(difference, *(float((outputs[key] - value).abs().max()) for key, value in expected.items()))
        same_decisions &= bool((outputs["keep"] == ensemble.keep(images)).all())
    assert difference < 1e-4, f"the exported outputs differ by {difference:.2g}"
    return {"difference": difference, "same_decisions": same_decisions, "spread": float(outputs["probabilities"].std())}


if __name__ == "__main__":
    main()
