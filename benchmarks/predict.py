"""Measure predictions: latency of one image, throughput at batch 512.

    python benchmarks/predict.py [--model resnet20] [--members 5] [--batches 1 512] [--json FILE]

Our ensemble (on a GPU: a program of all members in a CUDA graph), what users call (`predict_proba`, with its checks,
normalisation and combination), an eager loop over the same members, one full network, and ONNX Runtime, on the CPU,
where it is installed. All in one run, in turns, inputs on the device. On a CPU one thread computes, and its processor
time is measured, which other programs change less than the time on the wall.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import structured_ensembles as se
from recording import arguments_of, milliseconds, record
from structured_ensembles.common.tables import text_table
from structured_ensembles.cuda.prediction_graphs import COMPILE_AFTER

ROUNDS = 25  # of small batches: the median of them is recorded


def main() -> None:
    """Time all ways at both batch sizes and print the table."""
    arguments = arguments_of(__doc__, model="resnet20", members=5, prune=0.5, size=32, repeats=0, batches=[1, 512])
    device = arguments.device
    torch.set_num_threads(1)
    arguments.repeats = arguments.repeats or (50 if device.startswith("cuda") else 5)
    networks, ways = make_ways(arguments)
    rows = []
    for batch in arguments.batches:
        x = torch.rand(batch, 3, arguments.size, arguments.size, device=device)
        measured = dict(ways)
        if runtime := onnx(networks, x):
            measured["ONNX Runtime, CPU"] = runtime
        times: dict[str, list[float]] = {name: [] for name in measured}
        with torch.inference_mode():
            for way in measured.values():
                warm_up(way, x)
            for _ in range(ROUNDS if batch < 64 else 3):
                for name, way in measured.items():
                    repeats = 3 if "CPU" in name else arguments.repeats
                    times[name].append(measure(partial(way, x), device, repeats))
        for name, values in times.items():
            ms = statistics.median(values)
            rows.append({"name": name, "batch": batch, "ms": ms, "images_per_second": 1000 * batch / ms})
    cells = [(row["name"], str(row["batch"]), f"{row['ms']:.3f}", f"{row['images_per_second']:,.0f}") for row in rows]
    print(text_table(("", "batch", "ms", "images/s"), cells))
    record(arguments, rows)


def measure(run: Callable[[], object], device: str, repeats: int) -> float:
    """Measure the milliseconds of one call: on a CPU the processor time, on a GPU that on the wall."""
    if device != "cpu":
        return milliseconds(run, device, repeats, rounds=1)
    start = time.process_time()
    for _ in range(repeats):
        run()
    return 1000 * (time.process_time() - start) / repeats


def make_ways(arguments: argparse.Namespace) -> tuple[list[nn.Module], dict[str, Callable[[Tensor], object]]]:
    """Return the members' networks, and the ways to predict by name: functions of images (batch, 3, size, size)."""
    device = arguments.device
    torch.manual_seed(0)
    base = getattr(se.zoo, arguments.model)()
    graph = se.trace(base, torch.randn(2, 3, arguments.size, arguments.size))
    subnets = se.select(graph, prune=arguments.prune, selection="random", members=arguments.members)
    networks = [se.extract(base, graph, subnet) for subnet in subnets]
    ensemble = se.Ensemble(networks).to(device).eval()
    return networks, {
        "one full network": base.to(device).eval(),
        "eager loop over the members": lambda x: torch.stack([member(x) for member in ensemble.members]),
        "our ensemble": ensemble,
        "our ensemble, predict_proba": ensemble.predict_proba,
    }


def warm_up(way: Callable[[Tensor], object], x: Tensor) -> None:
    """Predict as often as it takes until an ensemble on a GPU has captured and compiled its prediction."""
    for _ in range(COMPILE_AFTER + 1 if x.is_cuda and isinstance(way, se.Ensemble) else 1):
        way(x)


class StackedMembers(nn.Module):
    """All members as one network that can be exported."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([network(x) for network in self.networks])


def onnx(networks: list[nn.Module], x: Tensor) -> Callable[[Tensor], object] | None:
    """Return the prediction in ONNX Runtime; None if it is not installed or the export fails."""
    try:
        import onnxruntime
    except ImportError:
        return None
    import copy

    stacked = StackedMembers([copy.deepcopy(network).cpu().eval() for network in networks])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ensemble.onnx"
        try:
            torch.onnx.export(stacked, (x.cpu(),), path, dynamo=False)
        except Exception as error:
            print(f"ONNX: {error}")
            return None
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    name, images = session.get_inputs()[0].name, x.cpu().numpy()
    return lambda _x: session.run(None, {name: images})


if __name__ == "__main__":
    main()
