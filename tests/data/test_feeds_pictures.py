"""The feed of pictures in files gives the batches of the feed of the same pictures in memory."""

from typing import Any

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.data.feeds import Feed, PictureFeed, TableFeed, feed_for
from tests.support.picture_folder import write_shapes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[se.Data, se.Data]:
    folder = write_shapes(tmp_path_factory.mktemp("shapes"), count=11)
    return se.Data.from_folder(folder), se.Data.from_folder(folder, cache_bytes=0, workers=2)


def epoch_of(feed: Feed, seed: Any) -> list[tuple[Any, Any]]:
    batches = []
    for size in feed.epoch(seed):
        inputs, targets = feed.batch(size)
        batches.append((inputs.clone(), targets.clone()))  # type: ignore[union-attr]
        feed.step.add_(1)
    return batches


def assert_equal(batches: list[tuple[Any, Any]], others: list[tuple[Any, Any]]) -> None:
    for (inputs, targets), (other_inputs, other_targets) in zip(batches, others, strict=True):
        assert torch.equal(inputs, other_inputs)
        assert torch.equal(targets, other_targets)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("augmentation", ["none", "crop", "crop+flip"])
def test_epochs_are_those_of_a_table(both: tuple[se.Data, se.Data], augmentation: Any, even: bool) -> None:
    table, pictures = (feed_for(data.train, data, 8, CPU, augmentation=augmentation, even=even) for data in both)
    assert isinstance(table, TableFeed)
    assert isinstance(pictures, PictureFeed)
    assert table.sizes == pictures.sizes
    seen = []
    for seed in (5, (5, 1), None, 5):
        expected = epoch_of(table, seed)
        assert_equal(epoch_of(pictures, seed), expected)
        seen.append(torch.cat([targets for _, targets in expected]))
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[3])


def test_members_have_batches_of_their_own_on_one_counter(both: tuple[se.Data, se.Data]) -> None:
    feeds = [feed_for(data.train, data, 8, CPU, augmentation="crop") for data in both]
    drawn = []
    for shared in feeds:
        assert isinstance(shared, TableFeed | PictureFeed)
        members = [shared.for_member() for _ in range(3)]
        for number, member in enumerate(members[:2]):  # the third one has stopped
            member.shuffle((number, 0), (number, 1))
        batches: list[tuple[Any, Any]] = []
        for size in shared.epoch(None):
            batches += [tuple(tensor.clone() for tensor in member.batch(size)) for member in members[:2]]  # type: ignore
            shared.step.add_(1)
        drawn.append(batches)
    assert_equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0][0][0], drawn[0][1][0])
