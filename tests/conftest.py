"""Set up torch, torchvision and the device for all tests, and provide the fixtures that several rooms use."""

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist runs one worker per core
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run without a GPU; Triton asks for it when it is first imported

# torchvision's compiled operators may not match the installed torch; its models only need their names to exist.
try:
    _folder = Path(str(find_spec("torchvision").origin)).parent
    torch.ops.load_library(next(_folder.glob("_C*.so")))
except (OSError, StopIteration):
    _library = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _library.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import structured_ensembles as se  # noqa: E402 - after what it needs
from structured_ensembles.common.logs import log_once  # noqa: E402
from structured_ensembles.cuda import capture  # noqa: E402
from tests.support.fork_server import ForkServer, fork_server  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `cuda` on a machine without a GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Keep what importing and collecting has made out of garbage collection, which took a quarter of tracing's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="module", autouse=True)
def _gpu_only_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hide the GPU from files without the marker `cuda`, so that `device="auto"` means the CPU there."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("cuda"):
            patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the processes that tests start
            patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture
def without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make cuDNN compute in full float32 and by deterministic algorithms."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(autouse=True)
def _no_unexpected_fallback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test that logged an uncaptured step; a test that expects the log calls `caplog.clear()`."""
    log_once.cache_clear()
    yield
    told = [record.getMessage() for record in caplog.get_records("call") if record.name == capture.logger.name]
    assert not told, f"a fallback was logged: {told}"


@pytest.fixture(scope="module")
def trained() -> tuple[se.Ensemble, se.Data]:
    """Train three small networks on digits for three epochs, once per file; return the ensemble and the data."""
    data = se.load_data("digits")
    torch.manual_seed(0)
    ensemble = se.Ensemble([se.zoo.mlp(64) for _ in range(3)])
    se.train(ensemble, data, se.Recipe(epochs=3), quiet=True)
    return ensemble, data


@pytest.fixture(scope="session")
def programs() -> Iterator[ForkServer]:
    """Start Python programs without the seconds that importing torch takes."""
    with fork_server() as server:
        yield server


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have measured (`record_property("figures", …)`), also those of other processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", ()):
            if name == "figures" and report.when == "call":
                terminalreporter.write_line(str(value))
