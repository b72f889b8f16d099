"""Copying of tensors from a device for a file: in few pieces, to the same bytes."""

import torch
from torch import Tensor

from structured_ensembles.storage.tensor_file import bytes_of, copy_in_pieces, to_host


def various_tensors() -> dict[str, Tensor]:
    """Make tensors of several types, layouts and sizes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 4, 5, generator=generator)
    return {
        "channels_last": images.to(memory_format=torch.channels_last),
        "bfloat16": images.bfloat16(),
        "transposed": torch.randn(3, 4, generator=generator).T,
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(4, generator=generator)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }


def test_tensors_copied_in_pieces_have_the_same_bytes_types_and_shapes() -> None:
    tensors = various_tensors()
    for max_bytes in (1, 40, 2**20):
        copies = copy_in_pieces(tensors, max_bytes)
        assert copies.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert copies[name].dtype == tensor.dtype
            assert copies[name].shape == tensor.shape
            assert bytes(bytes_of(copies[name])) == bytes(bytes_of(tensor)), name


def test_a_piece_has_one_type_and_at_most_the_bytes_that_are_allowed() -> None:
    tensors = {str(number): torch.full((10,), float(number)) for number in range(8)}
    tensors["large"] = torch.zeros(100)
    tensors["whole"] = torch.zeros(10, dtype=torch.int32)
    copies = copy_in_pieces(tensors, max_bytes=120)
    storages: dict[int, list[Tensor]] = {}
    for copy in copies.values():
        storages.setdefault(copy.untyped_storage().data_ptr(), []).append(copy)
    assert sorted(len(piece) for piece in storages.values()) == [1, 1, 2, 3, 3]
    for piece in storages.values():
        assert len({copy.dtype for copy in piece}) == 1
        assert len(piece) == 1 or sum(copy.nbytes for copy in piece) <= 120


def test_tensors_on_the_cpu_are_not_copied() -> None:
    tensors = various_tensors()
    assert all(tensor is tensors[name] for name, tensor in to_host(tensors).items())


def test_a_tensor_larger_than_a_piece_is_not_copied_on_its_device() -> None:
    """A GPU that training has filled may not have the memory for a second one."""
    tensors = {"large": torch.zeros(100), "small": torch.zeros(10), "also small": torch.zeros(10)}
    copies = copy_in_pieces(tensors, max_bytes=120)
    assert copies["large"].data_ptr() == tensors["large"].data_ptr()  # on the CPU, to go there is no copy either
    assert copies["small"].data_ptr() != tensors["small"].data_ptr()
