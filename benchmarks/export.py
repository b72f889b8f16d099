"""Size and CPU latency of exported ensembles beside the one network that they were cut out of.

    python benchmarks/export.py --folder FILES [--rounds 9] [--json benchmarks/results/export-cpu.json] [--docs]

Each base network for CIFAR, alone and as five members in its memory, runs in PyTorch, as .pt2, in ONNX Runtime, there
also in int8, at batch 1 and 64. Weights are random, which changes no time. All ways of a base and a batch are timed in
turns, one after the other, round by round, on one thread. A time is the smallest processor time of one call over all
rounds (the median is recorded too): other processes on the machine lengthen the wall time, but hardly that.
Files go into FILES and are used again if they are there. --docs writes docs/export.md from the records.
"""

import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import structured_ensembles as se
from recording import arguments_of, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.export import Predictor, quantize_onnx
from structured_ensembles.report.docs.export import CHECKS, PAGE, RECORD, SINGLE, render_export

SHAPE, CLASSES, MEMBERS = (3, 32, 32), 10, 5
BASES: dict[str, dict[str, Any]] = {"resnet18": {}, "resnet20": {"width": 4}}
CUTS: dict[str, dict[str, Any] | None] = {
    SINGLE: None,
    "memory=1": {"memory": 1.0, "coupled": False, "round_to": 1},
    "memory=1, coupled, round_to=16": {"memory": 1.0, "coupled": True, "round_to": 16},
    "memory=0.85, coupled, round_to=16": {"memory": 0.85, "coupled": True, "round_to": 16},
}
BATCHES = {1: 10, 64: 1}  # calls in a row that are timed together


def main() -> None:
    """Export, time and print; write the record and the page."""
    arguments = arguments_of(__doc__, only_cpu=True, folder="", rounds=9, bases=list(BASES), docs=False)
    if arguments.folder:
        torch.set_num_threads(1)
        rows = [row for base in arguments.bases for row in measure(base, Path(arguments.folder), arguments.rounds)]
        rows = kept_rows(arguments.json, {row["base"] for row in rows}) + rows
        header = ("base", "ensemble", "way", "bytes", "batch 1 ms", "batch 64 ms")
        print(text_table(header, [_cells(row) for row in rows]))
        del arguments.folder, arguments.bases
        record(arguments, rows)
    if arguments.docs:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in (RECORD, CHECKS)]
        PAGE.write_text(render_export(*records), encoding="utf-8")


def kept_rows(path: Path | None, measured: set[str]) -> list[dict[str, Any]]:
    """Return the rows of other base networks that the record has already."""
    if path is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["base"] not in measured]


def measure(name: str, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return a row for every ensemble of a base network and every way to run it."""
    torch.manual_seed(0)
    base = getattr(se.zoo, name)(num_classes=CLASSES, **BASES[name])
    title = f"{name}{''.join(f', {key}={value}' for key, value in BASES[name].items())}"
    rows, ways = [], {}
    for cut, options in CUTS.items():
        ensemble = make_ensemble(base, options)
        size = sum(parameter.numel() for parameter in base.parameters())
        shared = {
            "base": title,
            "ensemble": cut,
            "members": len(ensemble),
            "parameters": ensemble.num_parameters,
            "memory": ensemble.num_parameters / size,
            "computation": count_operations(ensemble) / count_operations(make_ensemble(base, None)),
        }
        for way, (path, run) in export(ensemble, folder / f"{name}-{cut}".replace(" ", "")).items():
            rows.append({**shared, "way": way, "bytes": path.stat().st_size, "milliseconds": {}})
            ways[len(rows) - 1] = run
            print(title, cut, way, "is ready", flush=True)
    for batch, calls in BATCHES.items():
        times = time_in_turns(ways, torch.rand(batch, *SHAPE), calls, rounds)
        for number, values in times.items():
            rows[number]["milliseconds"][str(batch)] = {"min": min(values), "median": statistics.median(values)}
    return rows


def make_ensemble(base: torch.nn.Module, options: Mapping[str, Any] | None) -> se.Ensemble:
    """Cut five members out of a network, or make an ensemble of the network alone for None."""
    networks = [base]
    if options is not None:
        graph = se.trace(base, torch.rand(2, *SHAPE), coupled=options["coupled"])
        settings = {key: value for key, value in options.items() if key != "coupled"}
        subnets = se.select(graph, selection="random", members=MEMBERS, **settings)
        networks = [se.extract(base, graph, subnet) for subnet in subnets]
    ensemble = se.Ensemble(networks, normalization=se.Normalization((0.5,) * 3, (0.25,) * 3))
    ensemble.input_shape, ensemble.pixels = SHAPE, True
    ensemble.classes = tuple(f"class {number}" for number in range(CLASSES))
    return ensemble.eval()


def count_operations(ensemble: se.Ensemble) -> int:
    """Count the multiplications and additions of convolutions and linear layers for one image."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        ensemble(torch.rand(1, *SHAPE))
    return counter.get_total_flops()


def export(ensemble: se.Ensemble, stem: Path) -> dict[str, tuple[Path, Callable[[Tensor], object]]]:
    """Write the files that are not there yet; return for every way its file, and a function of images that predicts."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    names = {"PyTorch": "safetensors", ".pt2": "pt2", "ONNX": "onnx", "ONNX, int8": "int8.onnx"}
    files = {way: stem.with_name(f"{stem.name}.{ending}") for way, ending in names.items()}
    images = torch.rand(32, *SHAPE, generator=torch.Generator().manual_seed(1))
    makers: dict[str, Callable[[Path], object]] = {
        "PyTorch": ensemble.save,
        ".pt2": lambda path: se.export_pt2(ensemble, path),
        "ONNX": lambda path: se.export_onnx(ensemble, path),
        "ONNX, int8": lambda path: quantize_onnx(files["ONNX"], path, images),
    }
    for way, path in files.items():
        if not path.exists():
            makers[way](path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(files[".pt2"]).module()
    predictor = Predictor(ensemble)
    runs: dict[str, Callable[[Tensor], object]] = {
        "PyTorch": predictor,
        ".pt2": program,
        **{way: onnx_run(files[way]) for way in ("ONNX", "ONNX, int8")},
    }
    return {way: (files[way], run) for way, run in runs.items()}


def onnx_run(path: Path) -> Callable[[Tensor], object]:
    """Return a function of images that runs a file in ONNX Runtime, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"input": images.numpy()})


@torch.inference_mode()
def time_in_turns(
    ways: Mapping[int, Callable[[Tensor], object]], images: Tensor, calls: int, rounds: int
) -> dict[int, list[float]]:
    """Return the processor milliseconds of one call, for every way and round; the first round is not counted."""
    times: dict[int, list[float]] = {key: [] for key in ways}
    for number in range(rounds + 1):
        for key, run in ways.items():
            start = time.process_time()
            for _ in range(calls):
                run(images)
            if number:
                times[key].append(1000 * (time.process_time() - start) / calls)
    return times


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Write a row of the table."""
    times = [f"{row['milliseconds'][str(batch)]['min']:.1f}" for batch in BATCHES]
    return (row["base"], row["ensemble"], row["way"], f"{row['bytes']:,}", *times)


if __name__ == "__main__":
    main()
