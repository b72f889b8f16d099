"""`print` shows the values of the walk as small tables."""

import torch

import structured_ensembles as se
from structured_ensembles.continual import AccuracyMatrix, StructuredLearner
from structured_ensembles.saliency import Scores
from structured_ensembles.scaling import Scales
from structured_ensembles.training.history import History


def test_scales_print_as_a_table() -> None:
    scales = Scales({"fc1": torch.tensor([[-1.0, 0.5, 2.0], [0.0, 0.0, 0.0]])})
    assert str(scales).splitlines() == [
        "group  neurons   least   mean  greatest",
        "─────  ───────  ──────  ─────  ────────",
        "fc1          3  -1.000  0.250     2.000",
        "2 scaling vectors for each group, on its output",
    ]


def test_scores_print_as_a_table() -> None:
    assert str(Scores({"fc1": torch.tensor([0.001, 0.02, 0.3])})).splitlines()[-1].split() == [
        "fc1", "3", "1.00e-03", "2.00e-02", "3.00e-01"
    ]  # fmt: skip


def test_lists_of_scores_and_subnets_print_shortly() -> None:
    assert str([Scores({"fc1": torch.ones(3), "fc2": torch.ones(4)})]) == "[Scores(7 neurons in 2 groups)]"
    assert str([se.Subnet((("fc1", 8, (0, 3, 5)),))]) == "[Subnet(3 of 8 channels kept)]"


def row(epoch: int, member: int, loss: float, validation: float | None, accuracy: float | None) -> dict:
    return {
        "epoch": epoch, "member": member, "rate": 0.1, "loss": loss, "validation_loss": validation,
        "validation_accuracy": accuracy, "seconds": 1.5,
    }  # fmt: skip


def test_history_prints_one_row_per_member() -> None:
    history = History([row(0, 0, 2.0, 1.0, 0.5), row(0, 1, 2.0, 1.5, 0.4), row(1, 0, 1.0, 1.25, 0.75)])
    lines = str(history).splitlines()
    assert lines[2].split() == ["0", "2", "1.0000", "1.0000", "0.7500"]
    assert lines[3].split() == ["1", "1", "2.0000", "1.5000", "0.4000"]
    assert lines[-1] == "2 epochs in 3.0 s"
    history.add_engine("graph", ["something is slower"])
    history.add_engine("loop", ["something is slower", "all is slower"])
    assert str(history).splitlines()[-1] == "2 epochs in 3.0 s, engine: graph, then loop"
    assert history.fallbacks == ["something is slower", "all is slower"]
    history.stopped[1] = "no better validation result for 1 epochs"
    assert str(history).splitlines()[3].endswith("0.4000  no better validation result for 1 epochs")
    without = str(History([row(0, 0, 2.0, None, None)])).splitlines()
    assert "1 epoch in" in "\n".join(without)
    assert without[2].split() == ["0", "1", "2.0000", "–", "–"]
    assert "0 epochs" in str(History())


def test_learner_and_matrix_print_as_tables() -> None:
    assert repr(StructuredLearner(se.zoo.lenet5_backbone())) == "StructuredLearner(Backbone, tasks learned: none yet)"
    matrix = AccuracyMatrix(((1.0,), (0.5, 0.75)), unaided=0.25)
    assert str(matrix) == (
        f"{matrix.table()}\naccuracy 75.00 %, final accuracy 62.50 %, forgetting 50.00 %, "
        "backward transfer -50.00 %, accuracy without identity 25.00 %"
    )
