"""Memory in bytes: of a saved ensemble, and at the peak of a prediction or any function."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from structured_ensembles.common.devices import device_of
from structured_ensembles.common.inputs import Inputs, batch_size, move_inputs, select_rows
from structured_ensembles.ensemble import Ensemble


def measure_file_bytes(ensemble: Ensemble) -> int:
    """Return the size of the file that `save` writes."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what `save` says of loading the file
        return ensemble.save(Path(folder) / "ensemble.safetensors")


def measure_prediction_bytes(ensemble: Ensemble, inputs: Inputs) -> int:
    """Measure the peak bytes of predicting a batch (batch, …), beyond weights and the batch itself."""
    device = device_of(ensemble)
    batch = move_inputs(inputs, device)
    ensemble.logits(select_rows(batch, slice(1)))  # sets up what stays, such as a library's workspace
    return measure_peak_memory(lambda: ensemble.logits(batch, batch_size(batch)), device)


def measure_peak_memory(run: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Measure the peak bytes that `run` allocates in tensors, beyond what was allocated before."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silence_stderr():
        profiler.start()
    try:
        run()
    finally:
        with _silence_stderr():
            profiler.stop()
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    allocated = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Silence stderr at the file descriptor: the profiler writes its messages past Python, with no option to stop."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
