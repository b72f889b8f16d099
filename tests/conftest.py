"""What all tests share."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist runs one worker per core

# torchvision's compiled operators may not match the installed torch; its models only need their names to exist.
try:
    _folder = Path(str(find_spec("torchvision").origin)).parent
    torch.ops.load_library(next(_folder.glob("_C*.so")))
except (OSError, StopIteration):
    _library = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _library.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that tests have measured (`record_property("figures", …)`), also those of other processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", ()):
            if name == "figures" and report.when == "call":
                terminalreporter.write_line(str(value))
