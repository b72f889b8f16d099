"""What all tests share."""

import contextlib

import torch

torch.set_num_threads(1)  # pytest-xdist runs one worker per core

# torchvision's compiled operators may not match the installed torch; its models only need their names to exist.
_library = torch.library.Library("torchvision", "FRAGMENT")
for _schema in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        _library.define(f"{_schema}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
