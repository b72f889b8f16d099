"""Containers give back what was written, in memory of their own."""

from pathlib import Path

import torch

from structured_ensembles.storage.container import read_container, write_container


def test_tensors_of_a_file_multiply_to_the_same_numbers_bit_for_bit(tmp_path: Path) -> None:
    """MKL may add up in another order where a vector does not start at a multiple of 64 bytes."""
    path, generator = tmp_path / "file", torch.Generator().manual_seed(0)
    weights = {f"w{size}": torch.randn(1, size, generator=generator) for size in range(17, 49)}
    write_container(path, "form", 1, {}, weights)
    _, loaded = read_container(path, "form", 1, "a file")
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.values())
    for name, weight in weights.items():
        x = torch.randn(75, weight.shape[1], generator=generator)
        assert torch.equal(x @ loaded[name].T, x @ weight.T)


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_container(path, "form", 1, {}, {"weight": torch.ones(10_000)})
    _, loaded = read_container(path, "form", 1, "a file")
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert bool((loaded["weight"] == 1).all())
