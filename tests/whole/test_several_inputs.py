"""Networks of several inputs, and transformers with a padding mask: search, training, files."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import structured_ensembles as se
from structured_ensembles.artifact import FORMAT, VERSION
from structured_ensembles.common.inputs import batch_from, call, call_arguments, map_inputs, select_rows, split_batch
from structured_ensembles.data.kinds import Normalizations, normalization_from_json
from structured_ensembles.data.normalization import Normalization
from structured_ensembles.methods import METHODS
from structured_ensembles.networks.copying import copy_frozen
from structured_ensembles.scaling import can_share_batches
from structured_ensembles.storage.container import read_container
from tests.support.engines import use_engine

VOCABULARY, LENGTH, CLASSES = 12, 6, 3
HOOKED = ("batch-ensemble", "mc-dropout")  # members with hooks, in prediction too
SHORT = se.Recipe(epochs=2, batch_size=16, rate=0.01)


class Text(nn.Module):
    """Classify token ids, 0 for padding; compute the mask inside."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.classified(ids, ids != 0)

    def classified(self, ids: Tensor, mask: Tensor) -> Tensor:
        words = self.encoder(self.embedding(ids), src_key_padding_mask=~mask)
        weights = mask[..., None].to(words.dtype)
        return self.head((words * weights).sum(1) / weights.sum(1).clamp_min(1))  # type: ignore[no-any-return]


class Masked(Text):
    """Take ids and mask as positional inputs."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.classified(ids, mask)


class Named(Text):
    """Take keyword arguments, as tokenizers name them; the mask is of integers."""

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classified(input_ids, attention_mask == 1)


def sentences(number: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw ids padded at the end, and labels: the third of the vocabulary that the first word is from."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (number, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (number, 1), generator=generator)
    ids[torch.arange(LENGTH) >= lengths] = 0
    return ids, ids[:, 0] * CLASSES // VOCABULARY


def inputs_for(model: type[Text], ids: Tensor) -> Any:
    if model is Text:
        return ids
    return (ids, ids != 0) if model is Masked else {"input_ids": ids, "attention_mask": (ids != 0).long()}


def data_for(model: type[Text]) -> se.Data:
    ids, labels = sentences()
    other, truth = sentences(20, seed=1)
    return se.Data.from_arrays(
        inputs_for(model, ids), labels, test=(inputs_for(model, other), truth), classes=CLASSES, ids=model is Text
    )


def new(model: type[Text], dropout: float = 0.1) -> Text:
    torch.manual_seed(0)
    return model(dropout)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return all that a user could notice: tensors, modes, attributes."""
    plain = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | int | float)
    }
    return plain | {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(own, second[name]) if isinstance(own, Tensor) else own == second[name]
        for name, own in first.items()
    )


@pytest.mark.parametrize("kind", [Text, Masked, Named])
def test_walk_accepts_several_inputs_and_leaves_the_model_unchanged(kind: type[Text], tmp_path: Path) -> None:
    model, data = new(kind), data_for(kind)
    before, fast = state_of(model), torch.backends.mha.get_fastpath_enabled()
    graph = se.trace(model, data.example())
    assert set(graph.prunable) == {"encoder.layers.0.linear1"}
    scales = se.learn_scales(model, graph, data, members=2, epochs=1, batch_size=16, quiet=True)
    scores = se.saliency(model, graph, scales, data, batch_size=16, quiet=True)
    assert all(bool((own > 0).all()) for score in scores for own in score.values.values())
    subnets = se.select(graph, scores, prune=0.5)
    networks = [se.extract(model, graph, subnet) for subnet in subnets]
    ensemble = se.Ensemble(networks, subnets=subnets)
    se.train(ensemble, data, SHORT, quiet=True)
    assert same(before, state_of(model))
    assert torch.backends.mha.get_fastpath_enabled() is fast

    unseen, _ = sentences(7, seed=2)
    x = inputs_for(kind, unseen)
    logits = ensemble.logits(x, batch_size=3)
    assert logits.shape == (2, 7, CLASSES)
    alone = torch.stack([call(member, x) for member in ensemble.members])
    torch.testing.assert_close(logits, alone)
    torch.testing.assert_close(ensemble(x), alone)
    positional, named = call_arguments(x)
    torch.testing.assert_close(ensemble(*positional, **named), alone)
    torch.testing.assert_close(ensemble.predict_proba(x, temperature=1.0), alone.softmax(-1).mean(0))
    assert ensemble.uncertainty(x).entropy.shape == (7,)
    assert ensemble.calibrate(data) > 0
    ensemble.conformal(data, coverage=0.5)
    assert ensemble.predict_set(x).shape == (7, CLASSES)
    figures = se.evaluate(ensemble, data, base=model)
    right = ensemble.predict(data.split("test")) == sentences(20, seed=1)[1]
    assert figures["cls/accuracy"] == pytest.approx(float(right.float().mean()))

    ensemble.save(tmp_path / "text.safetensors")
    loaded = se.Ensemble.load(tmp_path / "text.safetensors", model=kind())
    assert torch.equal(loaded.logits(x), ensemble.logits(x))
    assert (loaded.input_shape, loaded.input_kinds) == (ensemble.input_shape, ensemble.input_kinds)
    assert loaded.input_shape == data.shape


def test_search_is_equal_with_and_without_nested_tensors() -> None:
    """Compared with an explicit mask in a network that cannot nest."""
    data, found = data_for(Text), []
    for nested in (True, False):
        model = new(Text)
        model.encoder.use_nested_tensor = nested
        graph = se.trace(model, data.example())
        found.append(se.learn_scales(model, graph, data, members=2, epochs=2, batch_size=16, quiet=True))
        assert model.encoder.use_nested_tensor is nested
        assert can_share_batches(copy_frozen(model), graph, "output", data.example())  # all members in one pass
    for name, vectors in found[0].vectors.items():
        assert torch.equal(vectors, found[1].vectors[name])
    assert found[0].history == found[1].history


def test_extraction_is_exact_for_several_inputs() -> None:
    """In evaluation mode without gradients, where the full network uses nested tensors."""
    model, data = new(Text).eval(), data_for(Text)
    graph = se.trace(model, data.example())
    subnet = se.select(graph, prune=0.5, selection="random", members=1)[0]
    ids, _ = sentences(20, seed=3)
    silenced = copy.deepcopy(model)
    with torch.no_grad():
        for name, kept in subnet.kept.items():
            dropped = [channel for channel in range(12) if channel not in kept]
            silenced.get_submodule(name.replace("linear1", "linear2")).weight[:, dropped] = 0  # type: ignore[index, operator]
        torch.testing.assert_close(se.extract(model, graph, subnet)(ids), silenced(ids))


@pytest.mark.parametrize(
    ("method", "kind"),
    [*((name, Masked) for name in METHODS), *((name, kind) for name in HOOKED for kind in (Text, Named))],
)
def test_every_method_trains_saves_and_loads_several_inputs(method: str, kind: type[Text], tmp_path: Path) -> None:
    model, data = new(kind), data_for(kind)
    before = state_of(model)
    more = {"search_epochs": 1} if method == "structured" else {}
    ensemble = METHODS[method](model, data, members=2, recipe=SHORT, quiet=True, **more)
    assert same(before, state_of(model))
    x = inputs_for(kind, sentences(5, seed=4)[0])
    logits = ensemble.logits(x)
    assert logits.shape == (1 if method == "single" else 2, 5, CLASSES)
    torch.testing.assert_close(logits[:, 3:], ensemble.logits(select_rows(x, slice(3, None))))  # rows stay apart
    ensemble.save(tmp_path / "text.safetensors")
    assert torch.equal(se.Ensemble.load(tmp_path / "text.safetensors", model=kind()).logits(x), logits)


@pytest.mark.parametrize("kind", [Masked, Named])
def test_member_equals_the_network_trained_alone(kind: type[Text]) -> None:
    data, whole, names = data_for(kind), [new(kind) for _ in range(3)], list(new(kind).state_dict())
    for number, network in enumerate(whole):
        torch.manual_seed(number)
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.3)
    together = se.Ensemble(copy.deepcopy(whole))
    se.train(together, data, SHORT, device="cpu", quiet=True)
    alone = se.Ensemble(copy.deepcopy(whole[1:2]))
    se.train(alone, data, SHORT, device="cpu", numbers=[1], quiet=True)
    states = [ensemble.members[number].state_dict() for ensemble, number in ((together, 1), (alone, 0))]
    assert all(torch.equal(states[0][name], states[1][name]) for name in names)
    assert not torch.equal(states[0]["head.weight"], whole[1].head.weight)


@pytest.mark.parametrize(("kind", "precision"), [(Masked, "float32"), (Named, "bfloat16")])
def test_both_engines_have_equal_losses(kind: type[Text], precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph engine's steps run without a graph."""
    rows = []
    for engine in ("graph", "loop"):
        use_engine(monkeypatch, engine)
        ensemble = se.Ensemble([new(kind, dropout=0.0), new(kind, dropout=0.0)])
        history = se.train(
            ensemble, data_for(kind), SHORT, execution=se.Execution(precision=precision), device="cpu", quiet=True
        )
        rows.append([(row["loss"], row["validation_loss"]) for row in history.rows])
        assert ensemble.members[0].encoder.use_nested_tensor  # type: ignore[union-attr]
    torch.testing.assert_close(*map(torch.tensor, rows), rtol=1e-4 if precision == "float32" else 3e-2, atol=0)


class PaddedMean(nn.Module):
    """Let padded positions reach the output; they are zero only with nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0).mean(1))


def test_prediction_equals_validation_and_the_loaded_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 20, (60, 6))
    ids[:, 4:] = torch.where(torch.rand(60, 1) < 0.7, 0, ids[:, 4:])
    data = se.Data.from_arrays(ids, ids[:, 0] % 3, ids=True, classes=3, validation=0.5)
    ensemble = se.Ensemble([PaddedMean()])
    history = se.train(ensemble, data, se.Recipe(epochs=3, rate=0.05), "cpu", quiet=True)
    figures = se.evaluate(ensemble, data, "validation")
    best = max(range(3), key=lambda epoch: (history.rows[epoch]["validation_accuracy"], epoch))
    assert figures["cal/nll"] == pytest.approx(history.rows[best]["validation_loss"], rel=1e-4)
    ensemble.save(tmp_path / "a.safetensors")
    loaded = se.Ensemble.load(tmp_path / "a.safetensors", model=PaddedMean())
    torch.testing.assert_close(loaded.logits(ids), ensemble.logits(ids))
    assert ensemble.members[0].encoder.use_nested_tensor  # type: ignore[union-attr]


def test_computed_and_given_masks_give_equal_logits() -> None:
    """The mask computed by the network or given with the ids: bit-identical."""
    found = []
    for kind in (Text, Masked, Named):
        data = data_for(kind)
        ensemble = se.structured_ensemble(new(kind), data, 2, recipe=SHORT, search_epochs=1, quiet=True)
        found.append(ensemble.logits(data.split("test")))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# Data ---------------------------------------------------------------------------------------------------------------


def test_kind_of_each_input_follows_its_dtype() -> None:
    pictures = np.arange(4 * 2 * 5 * 5).reshape(4, 2, 5, 5).astype(np.uint8)
    given = {
        "picture": pictures,
        "ids": np.arange(8, dtype=np.int32).reshape(4, 2),
        "mask": np.ones((4, 2), dtype=bool),
        "numbers": np.arange(4, dtype=np.float64),
    }
    data = se.Data.from_arrays(given, [0, 1, 0, 1], validation=0)
    assert data.shape == {"picture": (2, 5, 5), "ids": (2,), "mask": (2,), "numbers": ()}
    assert data.kinds == {"picture": "pixels", "ids": "whole numbers", "mask": "mask", "numbers": "floats"}
    example = data.example(4)
    assert [own.dtype for own in example.values()] == [torch.float32, torch.int64, torch.bool, torch.float32]
    assert isinstance(data.normalization, Normalizations)
    assert data.normalization.by_input["picture"] == Normalization.of(torch.from_numpy(pictures))  # type: ignore[call-overload]
    flat = example["picture"].transpose(0, 1).flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(flat.std(1, correction=0), torch.ones(2))
    assert torch.equal(example["numbers"], torch.arange(4.0))
    assert "ids: int64 of shape (2,)" in repr(data)


def test_each_input_has_its_own_normalization() -> None:
    """Columns are standardised by training samples; one input's choice may differ."""
    pictures, columns = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8), 1000 + 50 * torch.randn(8, 2)
    labels = torch.arange(8) % 2
    data = se.Data.from_arrays({"a": pictures, "b": columns}, labels, validation=0, normalization={"a": "none"})
    example = data.example(8)
    assert torch.equal(example["a"].round(), pictures.float())
    expected = (columns - columns.mean(0)) / columns.std(0, correction=0)
    torch.testing.assert_close(example["b"], expected, rtol=1e-3, atol=1e-3)
    kept = normalization_from_json(json.loads(json.dumps(data.normalization.to_json())))  # type: ignore[union-attr]
    assert kept == data.normalization
    assert kept.by_input["a"] == Normalization((0.0,), (1 / 255,))  # type: ignore[union-attr, call-overload, index]
    plain = se.Data.from_arrays((pictures, columns), labels, validation=0, standardize=False, normalization="unit")
    assert plain.normalization is None
    assert torch.equal(plain.example(8)[0], pictures / 255)
    assert torch.equal(plain.example(8)[1], columns)


def test_tuple_of_numbers_is_one_array() -> None:
    rows = ((1.0, 2.0), (3.0, 4.0))
    assert se.Data.from_arrays(rows, [0, 1], validation=0).shape == (2,)
    assert se.Data.from_arrays([np.ones(3), np.zeros(3)], [0, 1], validation=0).shape == (3,)
    assert se.Data.from_arrays((np.ones((2, 3)), np.zeros((2, 4))), [0, 1], validation=0).shape == ((3,), (4,))
    assert se.Data.from_datasets([(row, 0) for row in rows], validation=0.0).shape == (2,)  # type: ignore[arg-type]


def samples(kind: type[Text], labelled: bool = False) -> list[Any]:
    ids, labels = sentences()
    x = inputs_for(kind, ids)
    pairs = [(map_inputs(lambda own, row=row: own[row], x), int(label)) for row, label in enumerate(labels)]
    return [{**own, "labels": label} for own, label in pairs] if labelled else pairs


@pytest.mark.parametrize(("kind", "labelled"), [(Masked, False), (Named, False), (Named, True)])
def test_datasets_and_loaders_of_several_inputs_equal_arrays(kind: type[Text], labelled: bool) -> None:
    rows, expected = samples(kind, labelled), data_for(kind)
    stacked = se.Data.from_datasets(rows, classes=CLASSES)  # type: ignore[arg-type]
    assert all(torch.equal(*pair) for pair in zip(*(_leaves(d.train.inputs) for d in (stacked, expected)), strict=True))  # type: ignore[attr-defined]
    loader: DataLoader[Any] = DataLoader(rows, 16)
    streamed = se.Data.from_loaders(loader, validation=loader, test=loader, classes=CLASSES)
    assert streamed.shape == expected.shape
    ensemble = se.structured_ensemble(new(kind), streamed, 2, recipe=SHORT, search_epochs=1, quiet=True)
    ids, labels = sentences()
    logits = ensemble.logits(inputs_for(kind, ids))
    for source in (loader, streamed.split("test")):
        torch.testing.assert_close(ensemble.logits(source), logits)
    accuracy = float((ensemble.predict(loader) == labels).float().mean())
    assert se.evaluate(ensemble, streamed)["cls/accuracy"] == pytest.approx(accuracy)
    bare: DataLoader[Any] = DataLoader([own[0] if isinstance(own, tuple) else own for own in rows], 16)
    torch.testing.assert_close(ensemble.logits(bare), logits)


def _leaves(inputs: Any) -> list[Tensor]:
    return list(inputs.values()) if isinstance(inputs, dict) else list(inputs)


@pytest.mark.parametrize("engine", ["graph", "loop"])
def test_batches_padded_to_different_lengths_train(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As collators pad them; a captured step fits one length only."""
    use_engine(monkeypatch, engine)

    def collated(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        ids, labels = torch.stack([ids for ids, _ in rows]), torch.tensor([label for _, label in rows])
        ids = ids[:, : int((ids != 0).sum(1).max())]
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}

    ids, labels = sentences()
    order = (ids != 0).sum(1).argsort()
    rows = [(own, int(label)) for own, label in zip(ids[order], labels[order], strict=True)]
    loader: DataLoader[Any] = DataLoader(rows, 12, collate_fn=collated)  # type: ignore[arg-type]
    assert len({batch["input_ids"].shape for batch in loader}) > 1
    data = se.Data.from_loaders(loader, validation=loader, test=loader, classes=CLASSES)
    recipe = replace(SHORT, epochs=5)
    ensemble = se.structured_ensemble(new(Named), data, 2, recipe=recipe, search_epochs=1, quiet=True)
    torch.testing.assert_close(ensemble.logits(loader), ensemble.logits(inputs_for(Named, ids[order])))


def test_regression_accepts_two_inputs() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 8), nn.Linear(2, 8)
            self.head = nn.Linear(8, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head((self.first(a) + self.second(b)).relu())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    a, b = torch.randn(80, 3), torch.randn(80, 2)
    data = se.Data.from_arrays((a, b), 1000 * (a.sum(1) + b.sum(1)), test=((a, b), 1000 * (a.sum(1) + b.sum(1))))
    recipe = se.Recipe(epochs=30, batch_size=16, rate=0.03)
    ensemble = se.structured_ensemble(Sum(), data, 2, recipe=recipe, search_epochs=1, coupled=True, quiet=True)
    assert se.evaluate(ensemble, data)["reg/rmse"] < 700  # the targets' deviation is 2,200


# What is wrong is said ----------------------------------------------------------------------------------------------


def test_invalid_data_of_several_inputs_are_errors() -> None:
    ids, labels = sentences()
    with pytest.raises(ValueError, match=r"each of inputs must have the shape .* as targets \(60\), not \(59, 6\)"):
        se.Data.from_arrays((ids, ids[:59]), labels)
    with pytest.raises(ValueError, match=r"test inputs must be .*bool.* not .*int64"):
        se.Data.from_arrays((ids, ids != 0), labels, test=((ids, ids), labels))
    with pytest.raises(ValueError, match="inputs must hold at least one"):
        se.Data.from_arrays({}, labels)
    with pytest.raises(TypeError, match=r"inputs\['a'\] must be numbers"):
        se.Data.from_arrays({"a": np.array(["x", "y"])}, [0, 1])
    for choice in ((0.5, 0.5), ["none"], {"ids": "none"}):
        with pytest.raises(ValueError, match=r"normalization of several inputs must be a word, .* a list of 2 choices"):
            se.Data.from_arrays((ids, ids != 0), labels, normalization=choice)
    unknown = se.Data.from_arrays((ids + 5, ids != 0), labels)
    with pytest.raises(ValueError, match=r"embedding knows the ids from 0 to 11, .* reach from 5 to 16"):
        se.structured_ensemble(new(Masked), unknown, 2, quiet=True)
    with pytest.raises(TypeError, match="different structures"):
        se.Data.from_datasets([({"a": ids[0]}, 0), ({"b": ids[0]}, 1)])  # type: ignore[arg-type]


TRAINED = {
    kind: lambda kind=kind: METHODS["single"](new(kind), data_for(kind), recipe=SHORT, quiet=True)
    for kind in (Text, Masked, Named)
}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Masked, lambda ids: ids, r"x must be a tuple of 2 inputs, as in training, not one input"),
        (Masked, lambda ids: (ids, ids, ids), r"a tuple of 2 inputs, as in training, not a tuple of 3 inputs"),
        (Masked, lambda ids: {"ids": ids}, r"a tuple of 2 inputs, as in training, not a dict of 'ids'"),
        (
            Named,
            lambda ids: {"input_ids": ids},
            r"a dict of 'attention_mask', 'input_ids', .* not a dict of 'input_ids'",
        ),
        (Text, lambda ids: (ids, ids), r"x must be one input, as in training, not a tuple of 2 inputs"),
        (Masked, lambda ids: (ids[:, 0], ids), r"x\[0\] must have the shape \('batch', 6\), not \(60,\)"),
        (Masked, lambda ids: (ids.float(), ids), r"x\[0\] must be whole numbers as in training, not torch.float32"),
        (Masked, lambda ids: (ids + 5, ids != 0), r"x\[0\] must be ids from 0 to 11, .* not 5 to 16"),
        (Masked, lambda ids: (ids, ids[:3]), r"as many samples in every input, not 3, 60"),
    ],
)
def test_inputs_of_another_structure_are_errors(
    kind: type[Text], change: Callable[[Tensor], Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TRAINED[kind]().predict(change(sentences()[0]))


def test_boolean_mask_may_be_given_as_numbers() -> None:
    ids, _ = sentences()
    masked, named = TRAINED[Masked](), TRAINED[Named]()
    assert torch.equal(masked.logits((ids, (ids != 0).long())), masked.logits((ids, ids != 0)))
    expected = named.logits(inputs_for(Named, ids))
    assert torch.equal(named.logits({"attention_mask": (ids != 0), "input_ids": ids.int().numpy()}), expected)


def test_image_only_features_are_refused_for_several_inputs() -> None:
    data, ids = data_for(Masked), sentences()[0]
    ensemble = TRAINED[Masked]()
    for request in ({"fgsm": [0.1]}, {"corruptions": True}):
        with pytest.raises(ValueError, match="must be left out for data of several inputs"):
            se.evaluate(ensemble, data, **request)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="several inputs"):
        se.train(ensemble, data, se.Recipe(epochs=1, augmentation="crop"), quiet=True)
    learner = se.continual.NaiveLearner(new(Masked), epochs=1, quiet=True)
    with pytest.raises(ValueError, match="must have one input"):
        learner.learn(se.continual.split_tasks(data, 1)[0])
    with pytest.raises(TypeError, match="all positional or all keyword"):
        batch_from((ids,), {"mask": ids})


def test_file_of_one_input_keeps_its_format(tmp_path: Path) -> None:
    data = se.Data.from_arrays(torch.randn(20, 3), torch.arange(20) % 2)
    ensemble = METHODS["single"](nn.Linear(3, 2), data, recipe=SHORT, quiet=True)
    ensemble.save(tmp_path / "one.safetensors")
    structure, _ = read_container(tmp_path / "one.safetensors", FORMAT, VERSION, "an ensemble")
    assert structure["input_shape"] == [3]
    assert "input_kinds" not in structure
    assert se.Ensemble.load(tmp_path / "one.safetensors", model=nn.Linear(3, 2)).input_shape == (3,)


def test_batch_helpers_split_and_call_tuples_and_dicts() -> None:
    batch = {"a": torch.arange(5), "b": torch.arange(10).view(5, 2)}
    assert [own["b"].tolist() for own in split_batch(batch, 2)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert [own.tolist() for own in split_batch(torch.arange(3), 2)] == [[0, 1], [2]]
    assert batch_from(*call_arguments(batch)) == batch
    pair = (batch["a"], batch["b"])
    assert batch_from(*call_arguments(pair)) == pair
    assert call(lambda a, b: a.sum() + b.sum(), pair) == call(lambda *, b, a: a.sum() + b.sum(), batch) == 55
