"""Sequences of tasks: the accuracy matrix, resuming after a kill, the learner's file, inference of the task."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import structured_ensembles as se
from structured_ensembles.continual import (
    LEARNERS,
    AccuracyMatrix,
    Learner,
    NaiveLearner,
    StructuredLearner,
    Task,
    run_sequence,
)
from structured_ensembles.continual.learner import find_surest_task
from structured_ensembles.data.splits import TensorSplit
from structured_ensembles.storage.run_files import read_json, write_json
from tests.support.continual_cases import LONG, SHORT, inputs_of, learn_and_check, logits_of, make_backbone, make_tasks
from tests.support.paths import ROOT

TASKS = make_tasks()
pytestmark = pytest.mark.filterwarnings("ignore:task . gets no neuron")  # small backbones fill up


def test_matrix_figures_equal_a_hand_computation() -> None:
    matrix = AccuracyMatrix(((0.9,), (0.8, 0.7), (0.5, 0.6, 0.95)))
    assert matrix.accuracy == pytest.approx((0.9 + 0.8 + 0.7 + 0.5 + 0.6 + 0.95) / 6)
    assert matrix.final_accuracy == pytest.approx((0.5 + 0.6 + 0.95) / 3)
    assert matrix.forgetting == pytest.approx(((0.9 - 0.5) + (0.7 - 0.6)) / 2)
    assert matrix.backward_transfer == pytest.approx(-matrix.forgetting)
    better = AccuracyMatrix(((0.9,), (0.95, 0.7), (0.92, 0.8, 1.0)))
    assert better.forgetting == pytest.approx(((0.95 - 0.92) + (0.7 - 0.8)) / 2)
    assert better.backward_transfer == pytest.approx(((0.92 - 0.9) + (0.8 - 0.7)) / 2)
    assert matrix.values.isnan().tolist() == [[False, True, True], [False, False, True], [False] * 3]
    assert matrix.table().splitlines()[-1].split() == ["task", "2", "50.00", "60.00", "95.00", "68.33"]
    assert AccuracyMatrix.from_dict(json.loads(json.dumps(matrix.to_dict()))) == matrix
    alone = AccuracyMatrix(((0.9,),))
    assert (alone.accuracy, alone.forgetting, alone.backward_transfer) == (0.9, 0.0, 0.0)
    with pytest.raises(ValueError, match="triangle"):
        AccuracyMatrix(((0.9,), (0.8,)))


def test_surest_task_has_the_lowest_entropy_relative_to_that_of_its_classes() -> None:
    """Of 0.8 and 0.2 it is 0.50 of 0.69 nats; of 0.85 and three times 0.05 it is 0.59 of 1.39."""
    logits = {3: torch.tensor([[0.8, 0.2]]).log(), 5: torch.tensor([[0.85, 0.05, 0.05, 0.05]]).log()}
    assert find_surest_task(logits).tolist() == [5]
    # Of two samples, the second is surer of task 3; together, the mean over both decides.
    both = {3: torch.tensor([[0.8, 0.2], [0.99, 0.01]]).log(), 5: logits[5].repeat(2, 1)}
    assert find_surest_task(both).tolist() == [5, 3]
    assert find_surest_task(both, together=True).tolist() == [3, 3]  # (0.72 + 0.08) / 2 against 0.42


def test_task_of_one_class_is_not_inferred() -> None:
    """Its head is sure of any input: every sample would be of that task."""
    x, one_class = torch.rand(8, 1, 7, 7), torch.zeros(8, dtype=torch.int64)
    learner = LEARNERS["naive"](make_backbone(), seed=0, **SHORT)
    tasks = [Task(0, (3,), se.Data.from_arrays(x, one_class, test=(x, one_class), classes=["3"])), TASKS[1]]
    learner.learn(tasks[0])
    assert learner.infer_task(x).tolist() == [0] * 8  # there is no other
    learner.learn(tasks[1])
    with pytest.raises(ValueError, match=r"task 0 has a single class, of which its head is always sure"):
        learner.infer_task(x)
    matrix = run_sequence(LEARNERS["naive"](make_backbone(), seed=0, **SHORT), tasks)
    assert (matrix.unaided, matrix.inferred) == (None, None)
    assert "identity" not in str(matrix)


class OwnLearner(NaiveLearner):
    """Learner of a user, as `sens continual --method package.module:OwnLearner` takes it."""

    method = "own"


def test_learner_of_a_users_class_is_loaded_by_that_class(tmp_path: Path) -> None:
    learner = OwnLearner(make_backbone(), seed=0, **SHORT)
    learner.learn(TASKS[0])
    learner.save(tmp_path / "learner.safetensors")
    loaded = OwnLearner.load(tmp_path / "learner.safetensors", backbone=make_backbone(seed=1))
    assert type(loaded) is OwnLearner
    assert torch.equal(loaded.logits(inputs_of(TASKS[0]), 0), learner.logits(inputs_of(TASKS[0]), 0))
    with pytest.raises(
        se.ArtifactError, match=r"'own', not of one that Learner\.load knows \(.*\): load it with its own class"
    ):
        Learner.load(tmp_path / "learner.safetensors", backbone=make_backbone())


def test_accuracy_matrix_names_tasks_by_their_own_numbers() -> None:
    tasks = [replace(TASKS[0], number=7), replace(TASKS[1], number=3)]
    matrix = run_sequence(LEARNERS["naive"](make_backbone(), seed=0, **SHORT), tasks)
    assert matrix.tasks == (7, 3)
    lines = [line.split() for line in matrix.table().splitlines()]
    assert lines[0] == ["after", "task", "7", "task", "3", "mean"]
    assert [line[:2] for line in lines[2:]] == [["task", "7"], ["task", "3"]]
    assert [label.get_text() for label in matrix.figure().axes[0].get_yticklabels()] == ["7", "3"]
    assert AccuracyMatrix.from_dict(json.loads(json.dumps(matrix.to_dict()))) == matrix
    earlier = {name: value for name, value in matrix.to_dict().items() if name != "tasks"}  # of an earlier version
    assert AccuracyMatrix.from_dict(earlier).tasks == (0, 1)
    for wrong in ((1,), (1, "a"), (1, 2, 3)):
        with pytest.raises(ValueError, match="tasks must be the numbers of 2 tasks, not"):
            AccuracyMatrix(matrix.rows, tasks=wrong)  # type: ignore[arg-type]


def test_accuracy_matrix_figure_shows_every_number() -> None:
    figure = AccuracyMatrix(((0.9,), (0.8, 0.123))).figure()
    assert {text.get_text() for text in figure.axes[0].texts} == {"90.0", "80.0", "12.3"}


@pytest.mark.parametrize("method", LEARNERS)
def test_matrix_rows_are_the_accuracies_after_each_task(method: str) -> None:
    """Compare with a loop over samples; without task identity, with an argmin over entropies."""
    learner, again = (LEARNERS[method](make_backbone(), seed=1, **SHORT) for _ in range(2))
    matrix = run_sequence(learner, TASKS[:3])
    for index, task in enumerate(TASKS[:3]):
        again.learn(task)
        for column, tested in enumerate(TASKS[: index + 1]):
            split = tested.data.split("test")
            right = [
                int(again.predict(split.inputs[sample : sample + 1], task=column)[0]) == int(split.targets[sample])
                for sample in split.index
            ]
            assert matrix.rows[index][column] == pytest.approx(sum(right) / len(right))
    right = rightly_inferred = samples = 0
    for task in TASKS[:3]:
        x, split = inputs_of(task), task.data.split("test")
        entropies = []
        for number in range(3):
            p = again.logits(x, number).double().softmax(-1)
            entropies.append(-(p * p.log()).sum(-1))
        inferred = torch.stack(entropies).argmin(0)
        assert torch.equal(inferred, again.infer_task(x))
        together = torch.stack(entropies).mean(1).argmin()
        assert again.infer_task(x, together=True).tolist() == [int(together)] * len(x)
        answers = again.predict(x, task.number) == split.targets[split.index]
        right += int(((inferred == task.number) & answers).sum())
        rightly_inferred += int((inferred == task.number).sum())
        samples += len(x)
    assert matrix.unaided == pytest.approx(right / samples)
    assert matrix.inferred == pytest.approx(rightly_inferred / samples)


def test_tasks_of_two_and_of_three_classes_are_told_apart() -> None:
    """The head of two classes has no output for the third label of the other task."""
    three = make_tasks(tasks=2, classes=3)[1]
    learner = NaiveLearner(make_backbone(), seed=1, **SHORT)
    matrix = run_sequence(learner, [TASKS[0], three])
    inferred = [learner.infer_task(inputs_of(task)) == task.number for task in (TASKS[0], three)]
    assert matrix.inferred == pytest.approx(float(torch.cat(inferred).double().mean()))


@pytest.mark.parametrize(
    ("method", "backbone"), [*((method, "normalized") for method in LEARNERS), ("structured", "residual")]
)
def test_loaded_learner_continues_like_the_original(method: str, backbone: str, tmp_path: Path) -> None:
    learner = LEARNERS[method](make_backbone(backbone), seed=2, **SHORT)
    for task in TASKS[:2]:
        learner.learn(task)
    path = tmp_path / "learner.safetensors"
    assert learner.save(path) == path.stat().st_size
    loaded = Learner.load(path, backbone=make_backbone(backbone, seed=5))
    assert type(loaded) is LEARNERS[method]
    assert loaded.learned == learner.learned
    assert loaded.memory() == learner.memory()
    for continued in (learner, loaded):
        continued.quiet = True
        continued.learn(TASKS[2])
    for number, logits in logits_of(learner, TASKS).items():
        assert torch.equal(logits, loaded.logits(inputs_of(TASKS[number]), number))
    loaded.save(tmp_path / "again.safetensors")
    learner.save(path)
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_learner_file_is_compact_and_refuses_wrong_methods_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "learner.safetensors"
    learner = StructuredLearner(se.zoo.lenet5_backbone(), epochs=0, search_epochs=0, quiet=True)
    for task in make_tasks(tasks=5, size=8):
        learner.learn(task)
    learner.save(path)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("own.owners").shape == (3, 18)  # 3 binary digits for 5 owners and free, 142 neurons
        floats = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert sum(t.numel() for t in floats if t.is_floating_point()) == 50550 + learner.memory().heads
    loaded = Learner.load(path)  # the zoo's backbone needs no help
    assert loaded.capacity() == learner.capacity()
    with pytest.raises(
        se.ArtifactError, match=r"of the method 'structured', not of one that NaiveLearner.load knows \(naive\)"
    ):
        LEARNERS["naive"].load(path)
    with pytest.raises(se.ArtifactError, match="does not fit the backbone"):
        Learner.load(path, backbone=make_backbone())
    with pytest.raises(se.ArtifactError, match="there is no file"):
        Learner.load(tmp_path / "nothing")
    with pytest.raises(se.ArtifactError, match="not an ensemble: it holds a continual learner, which the load of its"):
        se.Ensemble.load(path)
    se.Ensemble([nn.Linear(2, 2)]).save(tmp_path / "ensemble.safetensors")
    with pytest.raises(se.ArtifactError, match=r"not a continual learner: it holds an ensemble, which se\.Ensemble"):
        Learner.load(tmp_path / "ensemble.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(se.ArtifactError, match="damaged"):
        Learner.load(path)


SCRIPT = """
import sys
from dataclasses import replace
sys.path.insert(0, {root!r})
import torch
from structured_ensembles.continual import StructuredLearner, run_sequence
from tests.support.continual_cases import LONG, make_backbone, make_tasks

class Talking(StructuredLearner):
    def _learn(self, number, data, head):
        print("task", number, flush=True)
        return super()._learn(number, data, head)

torch.set_num_threads(1)
run_sequence(Talking(make_backbone("normalized"), **LONG), make_tasks(), {folder!r})
"""


def test_killed_sequence_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Killed with SIGKILL in the third task; the learner's file equals that of an unbroken run byte by byte."""
    folder, uninterrupted = tmp_path / "killed", tmp_path / "whole"
    script = SCRIPT.format(root=str(ROOT), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(3)] == ["task 0", "task 1", "task 2"]
        process.kill()
    assert len(json.loads((folder / "matrix.json").read_text())["rows"]) == 2
    learner, never = (StructuredLearner(make_backbone("normalized"), **LONG) for _ in range(2))
    resumed = run_sequence(learner, TASKS, folder)
    assert resumed == run_sequence(never, TASKS, uninterrupted)
    assert (folder / "learner.safetensors").read_bytes() == (uninterrupted / "learner.safetensors").read_bytes()
    for number, logits in logits_of(learner, TASKS).items():
        assert torch.equal(logits, never.logits(inputs_of(TASKS[number]), number))


@pytest.mark.parametrize("method", ["naive", "single", "structured"])
def test_learner_with_earlier_tasks_resumes_a_sequence(method: str, tmp_path: Path) -> None:
    settings = {"search_epochs": 0} if method == "structured" else {}
    backbone = make_backbone()

    def learner_of_two() -> Learner:
        learner = LEARNERS[method](backbone, **SHORT, **settings)
        for task in TASKS[:2]:
            learner.learn(task)
        return learner

    matrix = run_sequence(learner_of_two(), TASKS[2:], tmp_path)
    resumed = learner_of_two()
    assert run_sequence(resumed, TASKS[2:], tmp_path) == matrix
    assert list(resumed.learned) == [0, 1, 2, 3]


def test_sequence_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    settings = {"epochs": 0, "search_epochs": 0, "quiet": True}
    first = StructuredLearner(make_backbone(), **settings)
    matrix = run_sequence(first, TASKS[:2], tmp_path)
    # A kill between the learner's file and the matrix: the row is computed from the learner.
    progress = read_json(tmp_path / "matrix.json", "")
    progress["rows"].pop()
    write_json(tmp_path / "matrix.json", progress)
    assert run_sequence(StructuredLearner(make_backbone(), **settings), TASKS[:2], tmp_path) == matrix
    changed = [with_other_inputs(task) for task in TASKS[:2]]
    for other, tasks in (
        (StructuredLearner(make_backbone(), **settings), changed),
        (StructuredLearner(make_backbone(seed=1), **settings), TASKS[:2]),
        (StructuredLearner(make_backbone(), prune=0.6, **settings), TASKS[:2]),
        (StructuredLearner(make_backbone(), **settings), TASKS[:3]),
    ):
        with pytest.raises(ValueError, match="another learner, backbone or tasks"):
            run_sequence(other, tasks, tmp_path)
    with pytest.raises(ValueError, match="new to the learner"):
        run_sequence(first, TASKS)
    with pytest.raises(ValueError, match="at least one task"):
        run_sequence(first, [])
    for content in ("", "[1]"):
        (tmp_path / "matrix.json").write_text(content)
        with pytest.raises(ValueError, match=r"matrix.json is damaged"):
            run_sequence(StructuredLearner(make_backbone(), **settings), TASKS[:2], tmp_path)


@pytest.mark.parametrize(
    "rows", [None, 3, [3], [["a"]], [[None]], [[2.0]], [[True]], [[0.5, 0.5]], [[0.5], [0.5, 0.5], [0.5, 0.5, 0.5]], []]
)
def test_forged_matrix_file_is_refused(tmp_path: Path, rows: object) -> None:
    """The checksum is valid; the rows do not fit two learned tasks."""
    settings = {"epochs": 0, "search_epochs": 0, "quiet": True}
    run_sequence(StructuredLearner(make_backbone(), **settings), TASKS[:2], tmp_path)
    progress = read_json(tmp_path / "matrix.json", "")
    for changed in ({**progress, "rows": rows}, {"identity": progress["identity"]}):
        write_json(tmp_path / "matrix.json", changed)
        with pytest.raises(ValueError, match=r"matrix.json is damaged"):
            run_sequence(StructuredLearner(make_backbone(), **settings), TASKS[:2], tmp_path)


def test_failing_first_task_leaves_an_empty_folder(tmp_path: Path) -> None:
    class Failing(StructuredLearner):
        def learn(self, task: Task) -> None:
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        run_sequence(Failing(make_backbone(), quiet=True), TASKS[:2], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sequence_checks_its_arguments_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StructuredLearner, "learn", lambda *_: pytest.fail("work has started"))
    learner = StructuredLearner(make_backbone(), **SHORT)
    train = TASKS[1].data.train
    assert isinstance(train, TensorSplit)
    empty = replace(TASKS[1], data=replace(TASKS[1].data, train=replace(train, index=train.index[:0])))
    with pytest.raises(ValueError, match=r"task 1 \(.*\) has no samples to learn from"):
        run_sequence(learner, [TASKS[0], empty])
    for tasks in ([], TASKS[0], [TASKS[0].data]):
        with pytest.raises(ValueError, match="tasks must hold at least one task"):
            run_sequence(learner, tasks)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="learner must be a Learner, not a Sequential"):
        run_sequence(nn.Sequential(), TASKS)  # type: ignore[arg-type]


def with_other_inputs(task: Task) -> Task:
    split = task.data.train
    assert isinstance(split, TensorSplit)
    return replace(task, data=replace(task.data, train=replace(split, inputs=split.inputs.flip(-1))))


def test_evaluate_of_a_task_equals_the_sequence_accuracy() -> None:
    learner = StructuredLearner(make_backbone(), search_epochs=1, **SHORT)
    learn_and_check(learner, TASKS[:2])
    figures = se.evaluate(learner.ensemble(1), TASKS[1].data)
    assert figures["cls/accuracy"] == pytest.approx(se.continual.sequence.measure_accuracy(learner, TASKS[1]))
