"""Networks and data as users bring them: each of these once failed or was silently wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import structured_ensembles as se
from structured_ensembles.methods import METHODS
from structured_ensembles.scaling import apply_scales, can_share_batches
from tests.support.exactness import check_exact
from tests.support.user_models import (
    IMAGES,
    LABELS,
    ROWS,
    SEQUENCES,
    Auxiliary,
    Frozen,
    Gained,
    Renamed,
    TimeFirst,
    Tokens,
    TwoViews,
    mlp,
)

RECIPE = se.Recipe(epochs=1)
generator = np.random.default_rng(1)


def ensemble_of(model: nn.Module, x: Any, y: Any = LABELS, **more: Any) -> tuple[se.Ensemble, se.Data]:
    data = x if isinstance(x, se.Data) else se.Data.from_arrays(x, y, test=(x, y))
    settings = {"members": 2, "prune": 0.5, "recipe": RECIPE, "search_epochs": 1, "quiet": True} | more
    return se.structured_ensemble(model, data, **settings), data


@pytest.mark.parametrize(("make", "x"), [(TimeFirst, SEQUENCES), (TwoViews, IMAGES)])
def test_members_stay_separate_if_the_batch_is_not_the_first_axis(make: Callable[[], nn.Module], x: np.ndarray) -> None:
    torch.manual_seed(0)
    model, few = make().eval(), torch.from_numpy(x[:8])
    graph = se.trace(model, few)
    assert not can_share_batches(model, graph, "output", few)
    vectors = se.Scales.draw(graph, 2).vectors
    with torch.no_grad():
        with apply_scales(model, graph, vectors, "output", together=False) as run:
            found = run(torch.cat([few, few]))
        for member in range(2):
            own = {name: value[member : member + 1] for name, value in vectors.items()}
            with apply_scales(model, graph, own, "output"):
                torch.testing.assert_close(found[8 * member : 8 * member + 8], model(few))
    ensemble, data = ensemble_of(model, x)
    assert ensemble.predict_proba(data.test.inputs).shape == (96, 4)


def test_ordinary_networks_run_members_in_one_pass() -> None:
    for model, x in ((se.zoo.resnet20(num_classes=4), IMAGES), (mlp(4, nn.BatchNorm1d(16)), ROWS)):
        few = torch.from_numpy(x[:4])
        assert can_share_batches(model, se.trace(model, few), "output", few)


@pytest.mark.parametrize("make", [Frozen, Auxiliary])
def test_channels_without_gradient_are_scored_by_their_weights(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    ensemble, data = ensemble_of(model, IMAGES)
    graph = se.trace(model, data.example())
    scores = se.saliency(model, graph, se.Scales.draw(graph, 2), data, quiet=True)
    name = "backbone.0" if make is Frozen else "aside.0"
    torch.testing.assert_close(scores[1].values[name], graph.magnitudes[name].float())
    assert len(ensemble.predict(IMAGES)) == 96


def test_nonpersistent_buffers_are_extracted_on_load(tmp_path: Path) -> None:
    ensemble, _ = ensemble_of(Gained(), ROWS)
    ensemble.save(tmp_path / "e.safetensors")
    loaded = se.Ensemble.load(tmp_path / "e.safetensors", model=Gained())
    assert torch.equal(loaded.predict_proba(ROWS), ensemble.predict_proba(ROWS))


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_float64_networks_search_train_and_save(tmp_path: Path, storage: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    ensemble, _ = ensemble_of(model.double(), IMAGES.astype("d"))
    ensemble.save(tmp_path / "e.safetensors", dtype=storage)
    loaded = se.Ensemble.load(tmp_path / "e.safetensors", model=model)
    torch.testing.assert_close(loaded.predict_proba(IMAGES), ensemble.predict_proba(IMAGES), rtol=0.05, atol=0.01)


class Causal(nn.Module):
    """Keep a mask of -inf, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(10, 8), nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mask", torch.full((7, 7), -torch.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        seen = (x @ x.mT + self.mask).softmax(-1) @ x
        result: Tensor = self.last(self.second(seen).relu()).mean(1)
        return result


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_mask_of_infinities_is_stored_exactly(tmp_path: Path, storage: Any) -> None:
    ensemble = se.Ensemble([Causal()])
    ensemble.save(tmp_path / "e.safetensors", dtype=storage)
    loaded = se.Ensemble.load(tmp_path / "e.safetensors", model=Causal())
    assert torch.equal(loaded.members[0].mask, ensemble.members[0].mask)
    torch.testing.assert_close(loaded.logits(SEQUENCES), ensemble.logits(SEQUENCES), rtol=0.05, atol=0.05)


class Versioned(nn.Sequential):
    """Check the version of saved weights, as torchvision's MNASNet does, and keep extra state."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def get_extra_state(self) -> dict[str, int]:
        return {"answer": 42}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"answer": 42}


def test_networks_with_versioned_and_extra_state_round_trip(tmp_path: Path) -> None:
    model = Versioned(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
    ensemble, data = ensemble_of(model, ROWS, folder=tmp_path)
    again = se.structured_ensemble(
        model, data, members=2, prune=0.5, recipe=RECIPE, search_epochs=1, folder=tmp_path, quiet=True
    )
    assert torch.equal(ensemble.predict_proba(ROWS), again.predict_proba(ROWS))
    ensemble.save(tmp_path / "e.safetensors")
    assert len(se.Ensemble.load(tmp_path / "e.safetensors", model=model)) == 2


def test_final_batch_of_one_sample_borrows_one() -> None:
    x, y = np.resize(ROWS, (129, 10)), np.arange(129) % 4
    data = se.Data.from_arrays(x, y, validation=0.0)
    assert [len(inputs) for inputs, _ in data.train.batches(64)] == [64, 63, 2]
    assert data.num_batches("train", 64) == 3
    assert [len(inputs) for inputs, _ in data.train.batches(128)] == [127, 2]
    assert [len(inputs) for inputs, _ in data.train.batches(50)] == [50, 50, 29]
    assert [len(inputs) for inputs, _ in data.train.batches(1)] == [1] * 129
    ensemble_of(mlp(4, nn.BatchNorm1d(16)), data, recipe=se.Recipe(epochs=1, batch_size=64))


def test_image_regression_is_not_augmented() -> None:
    x = generator.normal(size=(128, 3, 16, 16)).astype("f")
    data = se.Data.from_arrays(x, x, test=(x, x))
    histories = []
    for augmentation in ("auto", "none"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
        recipe = se.Recipe(epochs=1, augmentation=augmentation)
        histories.append(se.train(se.Ensemble([model]), data, recipe, "cpu", quiet=True).rows[0]["loss"])
    assert histories[0] == histories[1]


def test_search_with_dropout_depends_only_on_the_seed() -> None:
    model = mlp(4, nn.Dropout(0.5))
    data = se.Data.from_arrays(ROWS, LABELS)
    graph = se.trace(model, data.example())
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        scales = se.learn_scales(model, graph, data, 2, diversity=None, epochs=2, seed=0, quiet=True, device="cpu")
        assert torch.equal(torch.get_rng_state(), before)
        found.append(scales.vectors["0"])
    assert torch.equal(*found)


def test_images_of_more_than_8_bits_keep_their_values() -> None:
    deep = [generator.integers(0, 60000, (12, 12), dtype=np.uint16) for _ in range(16)]
    data = se.Data.from_datasets(
        [(Image.fromarray(own), number % 4) for number, own in enumerate(deep)], validation=0.0
    )
    torch.testing.assert_close(data.train.inputs[3, 0], torch.from_numpy(deep[3] / np.float32(65535)))
    floats = [(Image.fromarray(own.astype(np.float32)), 0) for own in deep]
    with pytest.warns(UserWarning, match="images are floats from"):
        assert float(se.Data.from_datasets(floats, validation=0.0, classes=2).train.inputs.max()) > 50000
    bits = [(Image.fromarray(own > 30000), 0) for own in deep]
    stored = se.Data.from_datasets(bits, validation=0.0, classes=2).train.inputs
    assert stored.shape[1] == 1
    assert set(stored.unique().tolist()) == {0, 255}


def test_loader_of_ready_batches_is_accepted() -> None:
    def loader() -> DataLoader[Any]:
        batches = [(torch.from_numpy(ROWS[i : i + 16]), torch.from_numpy(LABELS[i : i + 16])) for i in range(0, 96, 16)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    data = se.Data.from_loaders(loader(), validation=loader(), test=loader(), classes=4)
    ensemble, _ = ensemble_of(mlp(), data)
    assert 0 <= se.evaluate(ensemble, data)["cls/accuracy"] <= 1


def test_layers_with_two_names_are_extracted_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Renamed(twice=False)
    graph = check_exact(model.double(), torch.from_numpy(IMAGES[:4].astype("d")))
    assert graph.prunable == {"net.0": 16, "net.3": 3}
    assert se.trace(Renamed(twice=True), torch.from_numpy(IMAGES[:4])).prunable == {}  # used by both names
    ensemble, _ = ensemble_of(model.float(), IMAGES)
    ensemble.save(tmp_path / "e.safetensors")
    loaded = se.Ensemble.load(tmp_path / "e.safetensors", model=Renamed(twice=False))
    assert torch.equal(loaded.predict_proba(IMAGES), ensemble.predict_proba(IMAGES))
    assert loaded.members[0].net is loaded.members[0].features


@pytest.mark.parametrize("kind", ["arrays", "datasets", "loaders"])
def test_token_ids_stay_integers(kind: str, tmp_path: Path) -> None:
    ids = generator.integers(0, 50, (96, 9))
    pairs = list(zip(torch.from_numpy(ids), LABELS.tolist(), strict=True))
    made: dict[str, Callable[[], se.Data]] = {
        "arrays": lambda: se.Data.from_arrays(ids, LABELS, test=(ids, LABELS), ids=True),
        "datasets": lambda: se.Data.from_datasets(pairs, test=pairs, ids=True),  # type: ignore[arg-type]
        "loaders": lambda: se.Data.from_loaders(
            DataLoader(pairs, 32),
            test=DataLoader(pairs, 32),
            classes=4,
            ids=True,  # type: ignore[arg-type]
        ),
    }
    ensemble, data = ensemble_of(Tokens(), made[kind]())
    assert "cls/accuracy" in se.evaluate(ensemble, data)
    ensemble.save(tmp_path / "e.safetensors")
    loaded = se.Ensemble.load(tmp_path / "e.safetensors", model=Tokens())
    assert torch.equal(loaded.predict_proba(ids), ensemble.predict_proba(ids))
    with pytest.raises(ValueError, match=r"from_arrays\(…, ids=True\)"):
        ensemble_of(Tokens(), ids)
    with pytest.raises(TypeError, match="x must be whole numbers, as they are ids"):
        loaded.predict(ids + 0.5)
    if kind == "arrays":
        learner = se.continual.NaiveLearner(nn.Linear(9, 4), epochs=1)
        with pytest.raises(ValueError, match="task 0 must have images or other numbers as inputs, not ids"):
            learner.learn(se.continual.split_tasks(data, tasks=2)[0])


@pytest.mark.parametrize("selection", ["learned", "random"])
def test_loss_that_is_not_averaged_is_refused(selection: str) -> None:
    with pytest.raises(ValueError, match=r"loss must give one number, a mean over the samples, not \(\d+,\)"):
        ensemble_of(mlp(), ROWS, selection=selection, loss=nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("kind", [dict, tuple])
@pytest.mark.parametrize("selection", ["learned", "random"])
def test_outputs_that_are_not_one_tensor_are_errors(kind: type, selection: str) -> None:
    with pytest.raises(TypeError, match=f"must return one tensor.*not a {kind.__name__}"):
        ensemble_of(Several(kind), ROWS, selection=selection)


class PointwiseLinear(nn.Linear):
    """Convolve (batch, channels, time) by a 1×1 kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Padded(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (1, 1))).relu() * 2


def test_layers_that_permute_their_output_are_fixed() -> None:
    x = torch.from_numpy(SEQUENCES)
    graph = se.trace(nn.Sequential(PointwiseLinear(7, 10), nn.ReLU(), nn.Flatten(), nn.Linear(100, 4)), x)
    assert "0 does more than its kind of layer: transpose" in str(graph["0"].reason)
    graph = check_exact(nn.Sequential(Padded(7, 8, 3), nn.Flatten(), nn.Linear(80, 4)).double(), x.double())
    assert graph.prunable == {"0": 8}


@pytest.mark.parametrize("given", ["loader", "sampler", "none"])
def test_loader_with_its_own_generator_obeys_the_seed(given: str) -> None:
    class Noisy(torch.utils.data.Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 96

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.from_numpy(ROWS[index]) + float(np.random.normal()), int(LABELS[index])  # noqa: NPY002

    own = torch.Generator().manual_seed(3)
    how = {
        "loader": {"shuffle": True, "generator": own},
        "sampler": {"sampler": torch.utils.data.RandomSampler(Noisy(), generator=own)},
        "none": {"shuffle": True},
    }[given]
    split = se.Data.from_loaders(DataLoader(Noisy(), 16, **how), classes=4).train  # type: ignore[arg-type]
    before, drawn = own.get_state(), np.random.get_state()[1]  # noqa: NPY002
    first, again, other = ([x for x, _ in split.batches(16, seed)] for seed in (1, 1, 2))
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first), torch.cat(other))
    assert torch.equal(own.get_state(), before)  # as they were
    assert np.array_equal(np.random.get_state()[1], drawn)  # noqa: NPY002


class Closure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 4)
        self.stem = lambda x: F.relu(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.stem(x))
        return result


class Several(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner, self.kind = mlp(), kind

    def forward(self, x: Tensor) -> Any:
        return {"classes": self.inner(x), "inputs": x} if self.kind is dict else (self.inner(x), x)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "labels", "more", "message"),
    [
        (Closure(), LABELS, {}, "stem: in a copy it would run the model's layers"),
        (Several(dict), LABELS, {}, "model must return one tensor .* not a dict"),
        (Several(tuple), LABELS, {}, "model must return one tensor .* not a tuple"),
        (frozen(), LABELS, {}, "no parameter that requires gradients"),
        (mlp(), LABELS.astype("f"), {}, "for classes give whole numbers"),
        (mlp(1), LABELS % 2, {"loss": F.mse_loss}, "needs one for each class"),
        (nn.Linear(10, 4), LABELS, {}, "no prunable channels.*reaches the network's output"),
    ],
)
def test_unsupported_requests_are_errors(model: nn.Module, labels: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ensemble_of(model, ROWS, labels, **more)


@pytest.mark.parametrize("sample", [(ROWS[0], "cat"), (ROWS[0], 1, 2), {"x": ROWS[0]}, ROWS[0]])
def test_samples_that_are_not_pairs_are_errors(sample: Any) -> None:
    with pytest.raises(TypeError, match=r"train\[1\] must be a pair \(input, target\) of numbers"):
        se.Data.from_datasets([(ROWS[0], 1), sample])  # type: ignore[arg-type]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(ROWS[0], 1)] * 8)


def test_invalid_loaders_are_errors() -> None:
    pairs = [(ROWS[0], 1)] * 8
    for given in ([{"x": ROWS[0], "y": 1}] * 8, [(ROWS[0], 1, 2)] * 8, [((ROWS[0], "a"), 1)] * 8):
        with pytest.raises(TypeError, match="train must give batches"):
            se.Data.from_loaders(DataLoader(given, 4), classes=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="test must give batches"):
        se.Data.from_loaders(DataLoader(pairs, 4), test=DataLoader([ROWS[0]] * 8, 4), classes=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="train must be a DataLoader that knows how many batches"):
        se.Data.from_loaders(DataLoader(Endless(), 4), classes=4)


def test_inputs_of_another_shape_are_errors() -> None:
    ensemble, _ = ensemble_of(TwoViews(), IMAGES)
    for x in (IMAGES[:, :1], IMAGES[0], IMAGES.transpose(0, 2, 3, 1)):
        with pytest.raises(ValueError, match="x must be a batch of inputs of shape"):
            ensemble.predict_proba(x)
    assert ensemble.predict_proba(generator.normal(size=(5, 3, 16, 16)).astype("f")).shape == (5, 4)  # larger ones
    with pytest.raises(TypeError, match="data must be a Data, not a DataLoader"):
        se.structured_ensemble(mlp(), DataLoader([(ROWS[0], 1)]))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.int64])
def test_loaders_may_give_labels_of_any_integer_dtype(dtype: torch.dtype) -> None:
    labels = torch.from_numpy(LABELS).to(dtype)
    loader = DataLoader(TensorDataset(torch.rand(len(labels), 10), labels), 32)
    data = se.Data.from_loaders(loader, validation=loader, test=loader, classes=4)
    for method in ("deep", "structured"):
        own = {"search_epochs": 1} if method == "structured" else {}
        ensemble = METHODS[method](mlp(), data, members=2, recipe=se.Recipe(epochs=1), quiet=True, **own)
        assert 0 <= se.evaluate(ensemble, data)["cls/accuracy"] <= 1


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (4, "a loader's targets must be labels from 0 to 3, but reach from 0 to 4"),
        (-1, "a loader's targets must be labels from 0 to 3, but reach from -1 to 3"),
        (0.5, "a loader's targets must be labels in every batch, as in the first, not torch.float32"),
    ],
)
def test_invalid_label_in_a_later_batch_is_an_error(split: str, wrong: float, message: str) -> None:
    def loader(last: Any) -> DataLoader[Any]:
        batches = [(torch.rand(8, 10), torch.arange(8) % 4), (torch.rand(8, 10), last)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    last = torch.arange(8) % 4
    last = last + wrong if isinstance(wrong, float) else torch.where(last == 1, wrong, last)
    loaders = {name: loader(last if name == split else torch.arange(8) % 4) for name in ("train", "validation", "test")}
    data = se.Data.from_loaders(**loaders, classes=4)

    def used() -> None:
        ensemble = METHODS["deep"](mlp(), data, members=1, recipe=se.Recipe(epochs=1), quiet=True)
        se.evaluate(ensemble, data)

    with pytest.raises((ValueError, TypeError), match=message):
        used()
