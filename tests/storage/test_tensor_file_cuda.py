"""Copying of a GPU's tensors for a file."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from structured_ensembles.storage.tensor_file import to_host

pytestmark = pytest.mark.cuda


def test_tensors_of_a_gpu_arrive_equal_in_one_copy_per_type() -> None:
    tensors = {str(size): torch.randn(size, 3, device="cuda") for size in range(1, 200)}
    tensors["images"] = torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    tensors["narrow"] = torch.randn(7, device="cuda").bfloat16()
    tensors["here"] = torch.arange(3)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        copies = to_host(tensors)
    for name, tensor in tensors.items():
        assert copies[name].device.type == "cpu"
        assert torch.equal(copies[name], tensor.cpu())
    assert sum(event.count for event in recorded.key_averages() if "DtoH" in event.key) <= 2
