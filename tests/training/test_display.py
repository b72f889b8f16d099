"""What a training shows: a line for every epoch, accuracies as percentages, losses as numbers; and a bar."""

import pytest

from structured_ensembles.training.display import Display
from structured_ensembles.training.history import COLUMNS, History


@pytest.mark.parametrize(
    ("validation_loss", "validation_accuracy", "shown"),
    [(0.25, 0.934, "93.4%"), (0.25, None, "0.250"), (None, None, "0.700")],
)
def test_losses_are_not_shown_as_accuracies(
    validation_loss: float | None,
    validation_accuracy: float | None,
    shown: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a validation split, a training loss of 0.7 was shown as 70.0%."""
    row = dict(zip(COLUMNS, (0, 0, 0.1, 0.7, validation_loss, validation_accuracy, 1.0), strict=True))
    with Display(members=2, epochs=1, steps=1, quiet=False) as display:
        display.epoch(0, History([row]), 0.1)
    assert capsys.readouterr().err.split() == f"epoch 1/1 rate 0.1000 members {shown} –".split()


def test_bar_of_a_resumed_training_starts_where_it_goes_on() -> None:
    with Display(members=1, epochs=10, steps=4, quiet=True) as display:
        display.resume(3)
        assert (display.bar.tasks[0].completed, display.bar.tasks[0].total) == (12, 40)
