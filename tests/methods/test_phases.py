"""Histories of methods of two phases."""

from typing import Any

from structured_ensembles.methods.phases import join_histories
from structured_ensembles.training import History
from structured_ensembles.training.history import COLUMNS


def row(epoch: int, member: int, seconds: float) -> dict[str, Any]:
    return dict(zip(COLUMNS, (epoch, member, 0.1, 1.0, 1.0, 0.5, seconds), strict=True))


def test_joined_history_has_the_epochs_engines_and_early_stops_of_both_phases() -> None:
    """Two teachers, of which the second stops early; then one member, which stops too."""
    earlier = History([row(0, 0, 2.0), row(0, 1, 2.0), row(1, 0, 1.0)], {1: "diverged"}, ["graph"], ["too large"])
    later = History([row(0, 0, 4.0)], {0: "patience"}, ["loop"], ["no memory"])
    joined = join_histories(earlier, later, {0: 1, 1: 2})
    assert [(row["epoch"], row["member"]) for row in joined.rows] == [(0, 1), (0, 2), (1, 1), (2, 0)]
    assert joined.seconds == 7.0  # an epoch's seconds are those of all members together
    assert joined.stopped == {2: "diverged", 0: "patience"}
    assert joined.engine == "graph, then loop"
    assert sorted(joined.fallbacks) == ["no memory", "too large"]
    assert [row["member"] for row in earlier.rows] == [0, 1, 0]  # those given stay as they are
