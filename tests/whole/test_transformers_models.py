"""Classifiers of transformers as they come go through the whole walk: trace, select, extract, train, predict, files."""

from pathlib import Path
from typing import Any

import pytest
import torch

import structured_ensembles as se
from structured_ensembles.checking.masking import without_channels
from structured_ensembles.checking.weights import randomize, remove_randomness
from structured_ensembles.common.inputs import call, call_arguments, map_inputs, select_rows
from structured_ensembles.common.logs import log_once
from structured_ensembles.networks.copying import clone_model
from tests.support.engines import use_engine
from tests.support.transformers_models import CLASSES, MODELS

pytest.importorskip("transformers")
SAMPLES = 24
# The hidden layers of the MLPs, which trace must find: (12,) in all of these
HIDDEN = {
    "bert": "bert.encoder.layer.0.intermediate.dense",
    "gpt2": "transformer.h.0.mlp.c_fc",
    "llama": "model.layers.0.mlp.gate_proj",
    "vit": "vit.layers.0.mlp.fc1",
    "whisper": "encoder.layers.0.fc1",
}


def as_arrays(inputs: Any) -> Any:
    return map_inputs(torch.Tensor.numpy, inputs)


def make_data(inputs: Any) -> se.Data:
    labels = (torch.arange(SAMPLES) % CLASSES).numpy()
    return se.Data.from_arrays(as_arrays(inputs), labels, test=(as_arrays(inputs), labels), validation=0.25)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *((name, "loop") for name in HIDDEN),
        ("bert", "graph"),
    ],
)
def test_a_classifier_goes_through_the_whole_walk(
    name: str, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, make_inputs = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make(), make_inputs(SAMPLES)
    data = make_data(inputs)
    graph = se.trace(model, select_rows(inputs, slice(2)), coupled=True)
    assert graph.prunable[HIDDEN[name]] == 12
    assert graph.output_shape == (2, CLASSES)
    subnets = se.select(graph, prune=0.5, selection="random", members=2, seed=0)
    ensemble = se.Ensemble([se.extract(model, graph, subnet) for subnet in subnets], subnets=subnets)
    for member, subnet in zip(ensemble.members, subnets, strict=True):
        assert subnet.counts[HIDDEN[name]] == 6
        assert sum(parameter.numel() for parameter in member.parameters()) == graph.num_parameters(subnet.counts)
    use_engine(monkeypatch, engine)
    before = [parameter.detach().clone() for parameter in ensemble.parameters()]
    se.train(ensemble, data, se.Recipe(epochs=1, batch_size=8, rate=0.01), seed=0, quiet=True)
    changed = [not torch.equal(old, new) for old, new in zip(before, ensemble.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2
    probabilities = ensemble.predict_proba(as_arrays(inputs))
    assert probabilities.shape == (SAMPLES, CLASSES)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(SAMPLES))
    ensemble.save(tmp_path / "e.safetensors")
    loaded = se.Ensemble.load(tmp_path / "e.safetensors", model=make())
    assert torch.equal(loaded.predict_proba(as_arrays(inputs)), probabilities)
    member, some = loaded.members[0].eval(), select_rows(inputs, slice(3))
    positional, keywords = call_arguments(some)
    exported = torch.export.export(member, positional, keywords).module()
    torch.testing.assert_close(call(exported, some), call(member, some))


@pytest.mark.parametrize("name", HIDDEN)
def test_the_cut_of_a_classifier_is_exact_in_both_modes(name: str) -> None:
    make, make_inputs = MODELS[name]
    model = randomize(remove_randomness(clone_model(make())))
    inputs = map_inputs(lambda x: x.double() if x.is_floating_point() else x, make_inputs(4))
    graph = se.trace(model, inputs, coupled=True)
    (subnet,) = se.select(graph, prune=0.5, selection="random", members=1, seed=1)
    small, masked = se.extract(model, graph, subnet), without_channels(model, graph, subnet)
    for training in (False, True):
        with torch.no_grad():
            ours, expected, full = (call(net.train(training), inputs) for net in (small, masked, model))
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)  # Llama's norms compute in float32
        assert (full - expected).abs().max() > 1e-3


def test_a_model_that_returns_a_cache_is_traced_without_it_and_stays_as_it_is() -> None:
    make, make_inputs = MODELS["gpt2"]
    model = make().eval()
    inputs = make_inputs(2)
    assert model(**inputs).past_key_values is not None
    assert se.trace(model, inputs).output_shape == (2, CLASSES)
    assert model(**inputs).past_key_values is not None, "the user's model is not changed"
    assert clone_model(model)(**inputs).get("past_key_values") is None


def test_layer_drop_is_off_in_copies_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    model = MODELS["whisper"][0]()
    copies = [clone_model(model) for _ in range(2)]
    assert [copied.encoder.layerdrop for copied in copies] == [0, 0]
    assert (model.encoder.layerdrop, model.config.encoder_layerdrop) == (0.5, 0.5)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["LayerDrop is off in copies of the network: a random choice of layers cannot be cut exactly"]
