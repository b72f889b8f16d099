"""Teachers: the loss by hand, what a teacher sees, both engines, checkpoints, and what cannot teach."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from torch import Tensor, nn

import structured_ensembles as se
from structured_ensembles import build
from structured_ensembles.data.augmentation import augment, draw_crops
from structured_ensembles.data.kinds import Normalizations
from structured_ensembles.train import lessons_of
from structured_ensembles.training.engine import Plan
from structured_ensembles.training.teaching import Lessons, taught_cross_entropy
from tests.support.engines import Stopped, stop_before_epoch, use_engine
from tests.support.networks import Viewing, network
from tests.support.real_data import few_digits
from tests.support.states import equal, weights

RECIPE = se.Recipe(epochs=3, batch_size=96, rate=0.02)
EVERYTHING = se.Recipe(
    epochs=3, batch_size=96, rate=0.02, mixup=0.3, augmentation="crop+flip+cutout", label_smoothing=0.1
)
CPU = torch.device("cpu")


def teacher_of_two() -> se.Ensemble:
    """Make a calibrated ensemble of two networks, with a normalisation of its own."""
    ensemble = se.Ensemble([network(7, width=6), network(8, width=6)], normalization=se.Normalization((0.2,), (0.5,)))
    ensemble.temperature = 1.7
    return ensemble


def taught(recipe: se.Recipe = EVERYTHING, checkpoint: Path | None = None, **options: Any) -> se.Ensemble:
    ensemble = se.Ensemble([network(0, dropout=0.0), network(1, width=5, dropout=0.0)])
    options = {"teacher": se.Teacher(teacher_of_two(), share=0.7, temperature=3.0), **options}
    se.train(ensemble, few_digits(), recipe, "cpu", seed=3, checkpoint=checkpoint, quiet=True, **options)
    return ensemble


class Follower(nn.Module):
    """Give the class after the one of another network, and keep what it was given."""

    def __init__(self, wrapped: nn.Module, kept: list[Tensor]) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.keep = kept.append

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x.clone())
        result: Tensor = self.wrapped(x).roll(1, dims=-1)
        return result


@pytest.mark.parametrize("blended", [False, True])
def test_loss_is_that_of_the_formula_worked_out_sample_by_sample(blended: bool) -> None:
    generator = np.random.default_rng(0)
    z, teacher = generator.normal(size=(5, 6)), softmax(generator.normal(size=(5, 4)), axis=1)
    labels = np.eye(4)[[0, 3, 2, 2, 1]]
    if blended:
        labels = 0.3 * labels + 0.7 * labels[::-1]
    share, temperature, smoothing = 0.6, 2.5, 0.1
    expected = 0.0
    for row in range(5):
        smoothed = (1 - smoothing) * np.pad(labels[row], (0, 2)) + smoothing / 6
        own = -(smoothed * log_softmax(z[row])).sum()
        student = log_softmax(z[row] / temperature)
        divergence = sum(p * (math.log(p) - student[k]) for k, p in enumerate(teacher[row]))
        expected += ((1 - share) * own + share * temperature**2 * divergence) / 5
    targets = torch.from_numpy(np.stack([labels, teacher], axis=1))
    actual = taught_cross_entropy(torch.from_numpy(z), targets, share, temperature, smoothing)
    assert float(actual) == pytest.approx(expected, rel=1e-12)


def test_taught_targets_are_the_calibrated_probabilities_of_the_teacher_softened() -> None:
    """Compare with `predict_proba` of the ensemble on raw pixels; members get them with the data's normalisation."""
    data, teacher = few_digits(), teacher_of_two()
    assert data.normalization != teacher.normalization
    lessons = Lessons(list(teacher.members), teacher.temperature, teacher.normalization, 0.5, 3.0)
    pixels, labels = data.train.inputs[:9], torch.arange(9)
    targets = lessons.prepare(data, CPU).add_to(labels, data.prepare(pixels, torch.float32))
    assert torch.equal(targets[:, 0].argmax(1), labels)
    assert torch.equal(targets[:, 0].sum(1), torch.ones(9))
    probabilities = teacher.predict_proba(pixels, temperature=1.7).double()
    expected = probabilities ** (1 / 3)
    torch.testing.assert_close(targets[:, 1].double(), expected / expected.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_ensemble_teaches_with_its_own_temperature_and_normalisation() -> None:
    teacher = teacher_of_two()
    lessons = lessons_of(se.Teacher(teacher, share=0.7, temperature=3.0), few_digits(), None)
    assert lessons is not None
    assert (lessons.calibration, lessons.normalization) == (1.7, teacher.normalization)
    assert (lessons.share, lessons.temperature) == (0.7, 3.0)
    alone = lessons_of(teacher.members[0], few_digits(), None)
    assert alone is not None
    assert (alone.calibration, alone.normalization) == (1.0, "data")


def test_identity_tells_teachers_apart_by_all_that_changes_what_they_teach() -> None:
    lessons = Lessons([network(7)], 1.7, se.Normalization((0.2,), (0.5,)), 0.7, 3.0)
    others = [
        replace(lessons, networks=[network(8)]),
        replace(lessons, calibration=1.0),
        replace(lessons, normalization=se.Normalization((0.2,), (0.4,))),
        replace(lessons, normalization="data"),
        replace(lessons, normalization=None),
        replace(lessons, share=0.6),
        replace(lessons, temperature=2.0),
    ]
    assert lessons.identity() == replace(lessons, networks=[network(7)]).identity()
    identities = [json.dumps(each.identity(), sort_keys=True) for each in (lessons, *others)]
    assert len(set(identities)) == len(identities)


def test_teacher_of_several_inputs_needs_the_normalisation_of_the_data() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.layer(first + second)  # type: ignore[no-any-return]

    inputs = (torch.randn(40, 3), 5 + torch.randn(40, 3))
    data = se.Data.from_arrays(inputs, (inputs[0][:, 0] > 0).long())
    other = Normalizations((None, se.Normalization((5.0,), (2.0,))))
    with pytest.raises(ValueError, match="another normalisation of its several inputs"):
        Lessons([Sum()], 1.0, other, 0.5, 1.0).prepare(data, CPU)
    assert Lessons([Sum()], 1.0, data.normalization, 0.5, 1.0).prepare(data, CPU).classes == 2


def test_teacher_of_more_classes_than_the_data_have_teaches_what_it_predicts_of_them() -> None:
    """Its members are combined as in its prediction: one that is sure of another class has little to say."""
    data = few_digits()
    torch.manual_seed(0)
    teacher = se.Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(64, 13)) for _ in range(2)])
    nn.init.constant_(teacher.members[0][1].bias[12:], 9.0)  # type: ignore[index]
    pixels = data.train.inputs[:9]
    lessons = Lessons(list(teacher.members), 1.0, None, 1.0, 1.0)
    targets = lessons.prepare(data, CPU).add_to(torch.zeros(9, dtype=torch.int64), data.prepare(pixels, torch.float32))
    expected = teacher.predict_proba(pixels)[:, :10]
    torch.testing.assert_close(targets[:, 1], expected / expected.sum(1, keepdim=True))


def test_networks_of_more_outputs_than_classes_teach_and_learn() -> None:
    """A teacher's other outputs do not count; a member's have a probability of zero."""
    data = few_digits()
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(64, 13))
    lessons = Lessons([wide], 1.0, "data", 1.0, 1.0)
    inputs = data.prepare(data.train.inputs[:9], torch.float32)
    targets = lessons.prepare(data, CPU).add_to(torch.zeros(9, dtype=torch.int64), inputs)
    torch.testing.assert_close(targets[:, 1], wide(inputs)[:, :10].softmax(1).detach())
    ensemble = se.Ensemble([nn.Sequential(nn.Flatten(), nn.Linear(64, 11))])
    se.train(ensemble, data, RECIPE, "cpu", teacher=wide, quiet=True)
    assert math.isfinite(ensemble.history.rows[-1]["loss"])


def test_members_follow_a_teacher_with_all_of_the_loss_and_not_one_with_none() -> None:
    """The teacher names the class after the true one."""
    data = se.load_data("digits")
    base = se.Ensemble([network(0, dropout=0.0)])
    recipe = se.Recipe(epochs=8, rate=0.05)
    se.train(base, data, recipe, "cpu", quiet=True)
    teacher = Follower(base.members[0], [])
    predicted = {}
    for share in (0.0, 1.0):
        student = se.Ensemble([network(1, dropout=0.0)])
        se.train(student, data, recipe, "cpu", teacher=se.Teacher(teacher, share), quiet=True)
        predicted[share] = student.predict(data.test.inputs)
    labels = data.test.targets
    assert (predicted[0.0] == labels).float().mean() > 0.8
    assert (predicted[1.0] == (labels + 1) % 10).float().mean() > 0.8


def test_teacher_without_a_share_changes_nothing_but_rounding() -> None:
    plain = taught(RECIPE, teacher=None)
    alike = taught(RECIPE, teacher=se.Teacher(teacher_of_two(), share=0.0))
    for name, tensor in plain.members.state_dict().items():
        torch.testing.assert_close(alike.members.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


def test_teacher_sees_the_batch_as_the_member_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    inputs_of_member: list[Tensor] = []
    plain_teach = Plan.teach

    def watch(self: Plan, targets: Tensor, inputs: Tensor) -> Tensor:
        inputs_of_member.append(inputs.clone())
        return plain_teach(self, targets, inputs)

    monkeypatch.setattr(Plan, "teach", watch)
    data, recipe = few_digits(), se.Recipe(epochs=1, batch_size=96, augmentation="crop+flip")
    ensemble = se.Ensemble([network(0)])
    teacher = Follower(network(7), seen)
    se.train(ensemble, data, recipe, "cpu", seed=3, teacher=teacher, quiet=True)
    assert len(inputs_of_member) == data.num_batches("train", 96)
    for batch, copied in zip(seen[-len(inputs_of_member) :], inputs_of_member, strict=True):
        assert torch.equal(batch, copied)
    crops = draw_crops("crop+flip", data.shape, len(data.train), 0, CPU)
    assert crops is not None
    plain = data.prepare(augment(data.train.inputs[:96], crops[:96] * 0), torch.float32)
    assert not torch.equal(seen[-1][: len(plain)], plain[: len(seen[-1])])


def test_teacher_does_not_change() -> None:
    teacher = teacher_of_two().train()
    before = weights(teacher)
    taught(teacher=teacher)
    assert equal(before, weights(teacher))
    assert all(module.training for module in teacher.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in teacher.parameters())


def test_network_can_be_taught_by_itself_as_it_was() -> None:
    base = network(0, dropout=0.0)
    ensemble = se.Ensemble([base])
    se.train(ensemble, few_digits(), RECIPE, "cpu", teacher=se.Teacher(base, share=1.0), quiet=True)
    own = se.Ensemble([network(0, dropout=0.0)])
    se.train(own, few_digits(), RECIPE, "cpu", teacher=se.Teacher(network(0, dropout=0.0), share=1.0), quiet=True)
    assert equal(weights(ensemble.members), weights(own.members))


def test_both_engines_teach_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    ensembles = {}
    for engine in ("graph", "loop"):
        use_engine(monkeypatch, engine)  # type: ignore[arg-type]
        ensemble = se.Ensemble([network(0, dropout=0.0), network(1, width=5, dropout=0.0)])
        teacher = se.Teacher(teacher_of_two(), share=0.7, temperature=3.0)
        se.train(ensemble, few_digits(), EVERYTHING, "cpu", seed=3, teacher=teacher, quiet=True)
        assert ensemble.history is not None
        assert ensemble.history.engine == engine
        ensembles[engine] = ensemble.members.state_dict()
    for name, tensor in ensembles["graph"].items():
        torch.testing.assert_close(tensor, ensembles["loop"][name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", ["graph", "loop"])
def test_members_learn_from_a_teacher_by_the_batches_of_a_loader(
    monkeypatch: pytest.MonkeyPatch, engine: Literal["loop", "graph"]
) -> None:
    use_engine(monkeypatch, engine)
    data = few_digits()
    pairs = torch.utils.data.TensorDataset(data.train.inputs.float() / 255, data.train.targets)
    streamed = se.Data.from_loaders(torch.utils.data.DataLoader(pairs, 64), classes=10)
    kept: list[Tensor] = []
    ensemble = se.Ensemble([network(0, dropout=0.0), network(1, dropout=0.0)])
    teacher = se.Teacher(Follower(network(7), kept), share=1.0, temperature=1.0)
    history = se.train(ensemble, streamed, RECIPE, "cpu", teacher=teacher, quiet=True)
    assert history.rows[-1]["loss"] < history.rows[0]["loss"]
    assert kept


def test_member_with_a_teacher_is_the_network_trained_alone() -> None:
    fleet = taught()
    alone = se.Ensemble([network(1, width=5, dropout=0.0)])
    teacher = se.Teacher(teacher_of_two(), share=0.7, temperature=3.0)
    se.train(alone, few_digits(), EVERYTHING, "cpu", seed=3, numbers=[1], teacher=teacher, quiet=True)
    assert equal(weights(fleet.members[1]), weights(alone.members[0]))


@pytest.mark.parametrize("engine", ["loop", "graph"])
def test_resumed_run_with_a_teacher_ends_with_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Literal["loop", "graph"]
) -> None:
    use_engine(monkeypatch, engine)
    whole = taught()
    with monkeypatch.context() as patch:
        stop_before_epoch(patch, 1)
        with pytest.raises(Stopped):
            taught(checkpoint=tmp_path / "checkpoint")
    assert equal(weights(whole.members), weights(taught(checkpoint=tmp_path / "checkpoint").members))


@pytest.mark.parametrize(
    "other",
    [
        None,
        se.Teacher(teacher_of_two(), share=0.6, temperature=3.0),
        se.Teacher(network(9), share=0.7, temperature=3.0),
    ],
    ids=["none", "another share", "another network"],
)
def test_checkpoint_of_another_teacher_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: se.Teacher | None
) -> None:
    with monkeypatch.context() as patch:
        stop_before_epoch(patch, 1)
        with pytest.raises(Stopped):
            taught(checkpoint=tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="differs in teacher"):
        taught(checkpoint=tmp_path / "checkpoint", teacher=other)


def test_validation_loss_knows_no_teacher() -> None:
    ensemble = taught(RECIPE)
    data = few_digits()
    row = ensemble.history.of(0)[ensemble.history.epochs - 1]
    alone = se.Ensemble([ensemble.members[0]])
    alone.adopt(data)
    logits = alone.logits(data.validation.inputs[data.validation.index])[0]
    best = max(ensemble.history.of(0), key=lambda epoch: (epoch["validation_accuracy"], epoch["epoch"]))
    assert best["epoch"] <= row["epoch"]
    expected = nn.functional.cross_entropy(logits, data.validation.targets[data.validation.index])
    assert best["validation_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_double_precision_networks_learn_from_a_float32_teacher() -> None:
    ensemble = se.Ensemble([network(0).double()])
    se.train(ensemble, few_digits(), EVERYTHING, "cpu", teacher=network(7), quiet=True)
    assert math.isfinite(ensemble.history.rows[-1]["loss"])


def test_structured_ensemble_hands_its_teacher_on_and_keeps_it_in_the_identity(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = se.zoo.lenet5(in_channels=1)
    arguments: dict[str, Any] = {"members": 2, "recipe": RECIPE, "selection": "random", "device": "cpu", "quiet": True}
    pixels = few_digits().train.inputs
    images = torch.nn.functional.interpolate(pixels.float(), (32, 32)).byte()
    data = se.Data.from_arrays(images, few_digits().train.targets, classes=10)
    teacher = se.Ensemble([se.zoo.lenet5(in_channels=1)])
    plain = se.structured_ensemble(model, data, **arguments)
    with_teacher = se.structured_ensemble(model, data, teacher=teacher, folder=tmp_path / "run", **arguments)
    assert not equal(weights(plain.members), weights(with_teacher.members))
    with pytest.raises(ValueError, match="differs in teacher"):
        se.structured_ensemble(model, data, folder=tmp_path / "run", **arguments)


@pytest.mark.parametrize("flattens_by_view", [False, True])
def test_teacher_gets_images_in_an_order_that_it_can_run(
    caplog: pytest.LogCaptureFixture, flattens_by_view: bool
) -> None:
    """Members may get images channels last, as on a GPU; a network that flattens by `view` cannot."""
    data = few_digits()
    torch.manual_seed(0)
    teacher = Viewing(1) if flattens_by_view else network(0)
    teaching = Lessons([teacher], 1.0, "data", 1.0, 1.0).prepare(data, CPU)
    assert teaching.order == (torch.contiguous_format if flattens_by_view else torch.channels_last)
    assert ("the teacher's convolutions stay channels first, slower: view size" in caplog.text) == flattens_by_view
    caplog.clear()
    batch = data.prepare(data.train.inputs[:9], torch.float32)
    labels = torch.zeros(9, dtype=torch.int64)
    expected = teacher.eval()(batch).softmax(1)
    for order in (torch.contiguous_format, torch.channels_last):
        targets = teaching.add_to(labels, batch.clone().contiguous(memory_format=order))
        torch.testing.assert_close(targets[:, 1], expected)


def test_convolutions_of_volumes_teach(caplog: pytest.LogCaptureFixture) -> None:
    volumes = torch.rand(60, 1, 4, 6, 6)
    data = se.Data.from_arrays(volumes, (volumes.mean((1, 2, 3, 4)) > 0.5).long())
    teacher = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(64, 2))
    teacher.append(nn.Unflatten(1, (2, 1, 1))).append(nn.Conv2d(2, 2, 1)).append(nn.Flatten())
    teaching = Lessons([teacher], 1.0, "data", 1.0, 1.0).prepare(data, CPU)
    assert "the teacher's convolutions stay channels first" in caplog.text
    caplog.clear()
    targets = teaching.add_to(torch.zeros(9, dtype=torch.int64), volumes[:9])
    torch.testing.assert_close(targets[:, 1], teacher(volumes[:9]).softmax(1).detach())


def test_inputs_of_a_half_precision_teacher_are_normalised_before_they_are_cast() -> None:
    """Columns around 1,000,000 are beyond float16, whose largest number is 65,504."""
    columns = 1e6 + 1e5 * torch.randn(100, 3)
    data = se.Data.from_arrays(columns, (columns[:, 0] > 1e6).long(), standardize=False)
    teacher = nn.Linear(3, 2).half()
    lessons = Lessons([teacher], 1.0, se.Normalization((1e6,), (1e5,)), 1.0, 1.0)
    targets = lessons.prepare(data, CPU).add_to(torch.zeros(9, dtype=torch.int64), columns[:9])
    expected = teacher(((columns[:9] - 1e6) / 1e5).half()).float().softmax(1).detach()
    torch.testing.assert_close(targets[:, 1], expected, rtol=1e-2, atol=1e-2)


def test_compiled_network_teaches_as_the_one_that_was_compiled() -> None:
    ensembles = []
    for teacher in (network(7), torch.compile(network(7), backend="eager")):
        ensemble = se.Ensemble([network(0)])
        se.train(ensemble, few_digits(), RECIPE, "cpu", teacher=teacher, quiet=True)
        ensembles.append(ensemble)
    assert equal(weights(ensembles[0]), weights(ensembles[1]))


def test_teacher_with_the_classes_in_another_order_is_refused() -> None:
    digits = few_digits()
    names = [f"class {number}" for number in range(10)]
    data = se.Data.from_arrays(digits.train.inputs, digits.train.targets, classes=names)
    teacher = se.Ensemble([network(7)], classes=names[::-1])
    with pytest.raises(ValueError, match="'class 0' is its class 9 and class 0 of data"):
        se.train(se.Ensemble([network(0)]), data, RECIPE, "cpu", teacher=teacher, quiet=True)
    for classes in (names, [*names, "another"], ["of", "other", "names"]):
        teacher = se.Ensemble([network(7)], classes=classes)
        se.train(se.Ensemble([network(0)]), data, replace(RECIPE, epochs=1), "cpu", teacher=teacher, quiet=True)


def test_what_cannot_teach_is_refused_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "learn_scales", lambda *_, **__: pytest.fail("the search began"))
    with pytest.raises(ValueError, match="teacher must return logits"):
        se.structured_ensemble(
            network(0),
            few_digits(),
            2,
            recipe=RECIPE,
            teacher=nn.Sequential(nn.Flatten(), nn.Linear(64, 4)),
            quiet=True,
        )


def test_refused_teacher_leaves_the_calibration() -> None:
    ensemble = se.Ensemble([network(0)])
    se.train(ensemble, few_digits(), RECIPE, "cpu", quiet=True)
    before = ensemble.calibration
    assert before.fitted
    with pytest.raises(ValueError, match="teacher fails on samples of data"):
        se.train(ensemble, few_digits(), RECIPE, "cpu", teacher=nn.Linear(3, 10), quiet=True)
    assert ensemble.calibration == before


def few_values() -> se.Data:
    return se.Data.from_arrays(torch.randn(64, 3), torch.randn(64))


def broken() -> nn.Module:
    """Make a network whose logits are infinite."""
    layer = nn.Linear(64, 10)
    nn.init.constant_(layer.bias, math.inf)
    return nn.Sequential(nn.Flatten(), layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": "network"}, "teacher must be a torch.nn.Module, not a str: a trained network or Ensemble"),
        ({"teacher": nn.Sequential(nn.Flatten(), nn.Linear(64, 4))}, r"teacher must return logits \(batch, 10\)"),
        ({"teacher": nn.Conv2d(1, 10, 1)}, r"not outputs of shape \(8, 10, 8, 8\)"),
        ({"teacher": nn.Conv2d(3, 10, 1)}, "teacher fails on samples of data: .* expected input"),
        ({"teacher": network(0).to("meta")}, "teacher cannot be copied: Cannot copy out of meta tensor"),
        ({"teacher": broken()}, "teacher must give a probability to every class, but on samples of data it gives NaN"),
        ({"teacher": network(0), "loss": nn.functional.cross_entropy}, "left out with a loss of your own"),
        ({"teacher": network(0).apply(lambda module: None), "data": few_values()}, "left out for a regression"),
        ({"teacher": se.Ensemble([nn.Linear(64, 10)], task="regression")}, "left out for a regression"),
    ],
)
def test_what_cannot_teach_is_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    arguments = {"data": few_digits(), **options}
    data = arguments.pop("data")
    member = network(0) if data.task == "classification" else nn.Linear(3, 1)
    before = weights(member)
    with pytest.raises((TypeError, ValueError), match=message):
        se.train(se.Ensemble([member]), data, RECIPE, "cpu", quiet=True, **arguments)
    assert equal(before, weights(member))


class Drawing(nn.Module):
    """Draw random numbers in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(nn.functional.dropout(x.flatten(1), training=True))  # type: ignore[no-any-return]


def test_teacher_that_draws_random_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="teacher must predict the same each time"):
        se.train(se.Ensemble([network(0)]), few_digits(), RECIPE, "cpu", teacher=Drawing(), quiet=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1.5}, "share must be at most 1, not 1.5"),
        ({"share": -0.1}, "share must be a finite number of at least 0, not -0.1"),
        ({"temperature": 0}, "temperature must be from 0.01 to 100, not 0"),
        ({"temperature": 1e3}, "temperature must be from 0.01 to 100, not 1000.0"),
        ({"temperature": math.inf}, "temperature must be a finite number"),
    ],
)
def test_wrong_settings_of_a_teacher_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        se.Teacher(network(0), **values)
