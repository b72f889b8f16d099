"""Methods of several phases: ensembles are trained one after the other; one history has the epochs of all."""

from collections.abc import Mapping

from structured_ensembles.training import EpochRow, History
from structured_ensembles.training.history import OnEpoch


def renumber_epochs(on_epoch: OnEpoch | None, first: int, members: Mapping[int, int]) -> OnEpoch | None:
    """Wrap `on_epoch` so that it gets the rows of a phase with epochs from `first`, and new numbers of members.

    members: the new number of each member, by its number in the phase.
    """
    if on_epoch is None:
        return None

    def call(row: EpochRow) -> None:
        on_epoch(row.renumbered(first + row.epoch, members))

    return call


def join_histories(earlier: History, later: History, members: Mapping[int, int]) -> History:
    """Return the history of all epochs: first the earlier ones, then the later ones.

    members: the new number of each member of the earlier phase, by its old one; the later phase keeps its numbers.
    """
    rows = [{**row, "member": members[int(row["member"] or 0)]} for row in earlier.rows]
    rows += [{**row, "epoch": earlier.epochs + int(row["epoch"] or 0)} for row in later.rows]
    stopped = {members[number]: reason for number, reason in earlier.stopped.items()}
    joined = History(rows, later.stopped | stopped)
    for history in (earlier, later):
        for engine in history.engines:
            joined.add_engine(engine, history.fallbacks)
    return joined
