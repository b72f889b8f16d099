"""Experiments on folders of pictures: limited, with validation joined, and without trust in any code."""

from pathlib import Path

import pytest
import torch

from structured_ensembles.data import Data, sources
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.runs.ingredients import check_trust, read_data
from structured_ensembles.storage.container import ArtifactError
from tests.support.picture_folder import write_shapes


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_samples_are_limited_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_bytes: int) -> None:
    folder = write_shapes(tmp_path / "shapes", count=10)
    from_folder = sources.Data.from_folder
    monkeypatch.setattr(
        sources.Data, "from_folder", lambda *paths, **named: from_folder(*paths, **named, cache_bytes=cache_bytes)
    )
    name = f"folder:{folder}?test=0.2&validation=0.25"
    held_out = read_data(name, None, seed=0)
    assert held_out.validation is not None
    whole = read_data(name, None, seed=0, validation=False)
    assert whole.validation is None
    assert (len(held_out.train), len(held_out.validation), len(whole.train)) == (18, 6, 24)
    seen = [torch.cat([images for images, _ in split.batches(9)]) for split in (held_out.train, held_out.validation)]
    joined = torch.cat([images for images, _ in whole.train.batches(9)])
    assert torch.equal(joined, torch.cat(seen))
    few = read_data(name, None, seed=0, limit=5)
    images, labels = next(iter(few.train.batches(5)))
    assert labels.tolist() == [0, 0, 1, 1, 2]  # pictures are sorted by class: the first of each in turn
    assert torch.equal(images, seen[0][[0, 1, 6, 7, 12]])
    with pytest.raises(ValueError, match="must have a folder test beside train, or a share"):
        read_data(f"folder:{folder}", None, seed=0)


def sorted_data() -> Data:
    """Data whose samples are sorted by class; each input is its number."""
    labels = torch.tensor([0] * 40 + [1] * 8 + [2] * 2)
    return Data.from_arrays(torch.arange(50.0)[:, None], labels, validation=0, test=(torch.rand(3, 1), torch.arange(3)))


def test_limited_samples_are_of_all_classes() -> None:
    name = f"{__name__}:sorted_data"
    limited = {limit: read_data(name, None, seed=0, limit=limit).train for limit in (2, 6, 12, 49, 50)}
    chosen = {limit: train.index.tolist() for limit, train in limited.items() if isinstance(train, TensorSplit)}
    assert chosen[2] == [0, 40]
    assert chosen[6] == [0, 1, 40, 41, 48, 49]
    assert chosen[12] == [0, 1, 2, 3, 4, 40, 41, 42, 43, 44, 48, 49]
    assert chosen[49] == list(range(49))  # the first ones have all classes
    assert chosen[50] == list(range(50))


def test_pictures_need_no_trust_but_a_module_named_folder_does(tmp_path: Path) -> None:
    check_trust(tmp_path, {"dataset": "folder:pets", "model": "mlp"}, trust_code=False)
    with pytest.raises(ArtifactError, match="asks to import 'folder:network' for its model"):
        check_trust(tmp_path, {"dataset": "folder:pets", "model": "folder:network"}, trust_code=False)
