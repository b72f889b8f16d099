"""Execution: how training is computed, apart from the recipe; and what was written before it was apart."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import structured_ensembles as se
from structured_ensembles.cli.main import main
from structured_ensembles.methods import METHODS
from structured_ensembles.runs.experiment import Experiment, prepare_experiment, train_experiment
from structured_ensembles.runs.folder import read_config
from structured_ensembles.storage.run_files import read_json, write_json, write_yaml
from structured_ensembles.training.checkpoint import load_checkpoint, save_checkpoint
from structured_ensembles.training.execution import split_config, split_settings

RECIPE = se.Recipe(epochs=3, batch_size=64, rate=0.05)
FIELDS = {"engine": "loop", "precision": "bfloat16", "streams": 2, "compile": True}
TRAIN = ["train", "--model", "mlp", "--method", "single", "--epochs", "1", "--quiet", "true"]


def some_data() -> se.Data:
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    return se.Data.from_arrays(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    torch.manual_seed(0)
    return se.zoo.mlp(6, 2, hidden=(8,))


def stopped_after_an_epoch(row: se.EpochRow) -> None:
    raise InterruptedError


# The value ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "fast"}, "engine must be one of 'auto', 'loop', 'graph', not 'fast'"),
        ({"precision": "int4"}, "precision must be one of 'auto', 'float32', 'bfloat16', not 'int4'"),
        ({"streams": 0}, "streams must be a whole number of at least 1, or None, not 0"),
        ({"compile": "no"}, "compile must be True or False, not 'no'"),
    ],
)
def test_invalid_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        se.Execution(**settings)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda settings: se.Recipe(epochs=1, **settings),
        lambda settings: se.Recipe.named("modern", **settings),
        lambda settings: replace(RECIPE, **settings),
    ],
)
def test_recipe_error_names_execution_for_moved_settings(
    make: Callable[[dict[str, Any]], se.Recipe], name: str
) -> None:
    with pytest.raises(TypeError, match=rf"{name} moved to Execution\({name}=…\): .* --execution.{name}"):
        make({name: FIELDS[name]})


def test_recipe_keeps_and_lists_its_own_fields() -> None:
    assert se.Recipe(3, 16).batch_size == 16
    assert list(inspect.signature(se.Recipe).parameters) == list(se.Recipe().to_dict())
    with pytest.raises(TypeError, match="unexpected keyword argument 'ratee'"):
        se.Recipe(ratee=1)  # type: ignore[call-arg]


def test_execution_of_another_type_is_refused() -> None:
    wrong: Any = {"precision": "float32"}
    with pytest.raises(TypeError, match=r"execution must be an Execution, such as .* not {'precision'"):
        se.train(se.Ensemble([network()]), some_data(), execution=wrong)
    for make in METHODS.values():
        with pytest.raises(TypeError, match="execution must be an Execution"):
            make(network(), some_data(), members=2, execution=wrong)


# Every way to train -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_uses_its_execution(method: str) -> None:
    """In bfloat16 the outputs are other numbers, and the same at every call."""
    arguments = {"selection": "random"} if method == "structured" else {}

    def outputs(precision: Any) -> torch.Tensor:
        execution = se.Execution(precision=precision)
        made = METHODS[method](
            network(), some_data(), members=2, recipe=RECIPE, execution=execution, quiet=True, **arguments
        )
        return made.logits(torch.ones(3, 6))

    assert torch.equal(outputs("float32"), outputs("auto"))  # on a CPU
    assert not torch.equal(outputs("float32"), outputs("bfloat16"))


# Runs of earlier versions -------------------------------------------------------------------------------------------


def test_old_recipes_are_split_into_recipe_and_execution() -> None:
    assert split_settings({"rate": 0.1, **FIELDS}) == ({"rate": 0.1}, FIELDS)
    old = {"method": "deep", "changes": {"rate": 0.1, "precision": "float32"}}
    new = {"method": "deep", "changes": {"rate": 0.1}, "execution": {"precision": "float32"}}
    assert split_config(old) == new
    assert split_config(new) == new
    assert split_config({"method": "naive"}) == {"method": "naive"}  # of continual learning


def test_run_folder_of_an_earlier_version_is_recognised(tmp_path: Path) -> None:
    execution = se.Execution(precision="bfloat16")
    experiment = Experiment(
        "digits", "mlp", "single", members=1, changes={"epochs": 1, "rate": 0.01}, limit=64, execution=execution
    )
    train_experiment(experiment, tmp_path, device="cpu", quiet=True)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert config.pop("execution") == {"engine": "auto", "precision": "bfloat16", "streams": None, "compile": False}
    assert "precision" not in config["changes"]
    write_yaml(tmp_path / "config.yaml", {**config, "changes": {**config["changes"], "precision": "bfloat16"}})
    assert read_config(tmp_path)["execution"] == {"precision": "bfloat16"}
    assert read_config(tmp_path)["changes"] == {"epochs": 1, "rate": 0.01}
    assert train_experiment(experiment, tmp_path, device="cpu", quiet=True)[1] is False  # nothing to do
    for other in (se.Execution(), se.Execution(precision="bfloat16", engine="loop")):
        with pytest.raises(ValueError, match=r"holds a run with another (precision|engine)"):
            train_experiment(replace(experiment, execution=other), tmp_path, device="cpu", quiet=True)


def test_run_folder_that_names_a_default_is_recognised(tmp_path: Path) -> None:
    """One of an earlier version could say `changes: {precision: auto}`."""
    experiment = Experiment("digits", "mlp", "single", members=1, changes={"epochs": 1}, limit=64)
    train_experiment(experiment, tmp_path, device="cpu", quiet=True)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    write_yaml(tmp_path / "config.yaml", {**config, "changes": {"epochs": 1, "precision": "auto"}})
    assert train_experiment(experiment, tmp_path, device="cpu", quiet=True)[1] is False


def test_default_execution_is_not_recorded() -> None:
    """So that runs without one, recorded before, are the runs of today."""
    plain = Experiment("digits", "mlp", "single")
    assert "execution" not in plain.config()
    assert plain.folder == "digits-mlp-single-5x-recipe=modern-0"
    changed = replace(plain, changes={"rate": 0.01}, execution=se.Execution(precision="float32"))
    assert changed.folder == "digits-mlp-single-5x-recipe=modern-rate=0.01-precision=float32-0"
    assert prepare_experiment(plain).folder == "digits-mlp-single-0"
    assert prepare_experiment(changed).folder == "digits-mlp-single-precision=float32-rate=0.01-0"


def test_checkpoint_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    path, data = tmp_path / "checkpoint.safetensors", some_data()
    with pytest.raises(InterruptedError):
        se.train(se.Ensemble([network()]), data, RECIPE, checkpoint=path, quiet=True, on_epoch=stopped_after_an_epoch)
    loaded = load_checkpoint(path)
    assert loaded is not None
    tensors, state = loaded
    assert state["identity"].pop("execution.precision") == "auto"
    state["identity"]["recipe.precision"] = "auto"  # the name of earlier versions
    save_checkpoint(path, tensors, state)
    exact = se.Execution(precision="float32")
    with pytest.raises(ValueError, match=r"differs in execution\.precision \(there 'auto', here 'float32'\)"):
        se.train(se.Ensemble([network()]), data, RECIPE, execution=exact, checkpoint=path, quiet=True)
    resumed, uninterrupted = se.Ensemble([network()]), se.Ensemble([network()])
    loop = se.Execution(engine="loop")
    assert se.train(resumed, data, RECIPE, execution=loop, checkpoint=path, quiet=True).epochs == 3
    se.train(uninterrupted, data, RECIPE, quiet=True)
    assert all(torch.equal(tensor, uninterrupted.state_dict()[name]) for name, tensor in resumed.state_dict().items())


def test_folder_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    def made(**how: Any) -> se.Ensemble:
        return se.methods.deep_ensemble(network(), some_data(), 2, recipe=RECIPE, folder=tmp_path, quiet=True, **how)

    with pytest.raises(InterruptedError):
        made(on_epoch=stopped_after_an_epoch)
    known = read_json(tmp_path / "identity.json", "delete it")
    known["parts"]["recipe.precision"] = known["parts"].pop("execution.precision")
    write_json(tmp_path / "identity.json", known)
    with pytest.raises(ValueError, match=r"differs in execution\.precision \(there 'auto', here 'bfloat16'\)"):
        made(execution=se.Execution(precision="bfloat16"))
    rows: list[se.EpochRow] = []
    made(on_epoch=rows.append)
    assert [row.epoch for row in rows] == [1, 2]


def test_folder_of_an_earlier_version_keeps_its_subnets(tmp_path: Path) -> None:
    """Its checksum stays in identity.json, so that a run that is stopped once more does not search again."""

    def made(**how: Any) -> se.Ensemble:
        return se.structured_ensemble(
            network(), some_data(), 2, recipe=RECIPE, search_epochs=1, folder=tmp_path, quiet=True, **how
        )

    with pytest.raises(InterruptedError):
        made(on_epoch=stopped_after_an_epoch)
    known = read_json(tmp_path / "identity.json", "delete it")
    checksums = known["files"]
    assert list(checksums) == ["subnets.json"]
    known["parts"]["recipe.precision"] = known["parts"].pop("execution.precision")
    write_json(tmp_path / "identity.json", known)
    with pytest.raises(InterruptedError):
        made(on_epoch=stopped_after_an_epoch)
    assert read_json(tmp_path / "identity.json", "delete it")["files"] == checksums


# A user's own method ------------------------------------------------------------------------------------------------


def test_method_without_an_execution_argument_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def plain(
        model: nn.Module, data: se.Data, members: int, recipe: Any, seed: int, device: Any, folder: Any, quiet: bool
    ) -> se.Ensemble:
        ensemble = se.Ensemble([model])
        se.train(ensemble, data, recipe, device, seed, quiet=quiet)
        return ensemble

    monkeypatch.setitem(METHODS, "plain", plain)
    experiment = Experiment("digits", "mlp", "plain", changes={"epochs": 1}, limit=64)
    assert train_experiment(experiment, tmp_path / "run", device="cpu", quiet=True)[1]
    with pytest.raises(ValueError, match="execution must be left out, or method 'plain' must take execution="):
        prepare_experiment(replace(experiment, execution=se.Execution(engine="loop")))


# The command line ---------------------------------------------------------------------------------------------------


def test_command_line_has_every_execution_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"--execution.{name}" in output for name in FIELDS)
    words = ["--execution.precision", "bfloat16", "--execution.compile", "--execution.streams=2"]
    assert main([*TRAIN, *words, "--out", str(tmp_path / "run")]) == 0
    assert read_config(tmp_path / "run")["execution"] == {
        "engine": "auto",
        "precision": "bfloat16",
        "streams": 2,
        "compile": True,
    }
    assert read_json(tmp_path / "run" / "result.json", "")["precision"] == "bfloat16"
    assert main([*TRAIN, "--execution.streams", "0", "--out", str(tmp_path / "other")]) == 2
    assert "streams must be a whole number of at least 1, or None, not 0" in capsys.readouterr().err


def test_old_options_are_read_from_config_files_and_refused_as_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "options.yaml", tmp_path / "run"
    file.write_text("changes: {rate: 0.01, precision: bfloat16}\n")
    assert main([*TRAIN, "--config", str(file), "--out", str(out)]) == 0
    assert read_config(out)["changes"] == {"rate": 0.01, "epochs": 1}
    assert read_config(out)["execution"]["precision"] == "bfloat16"
    capsys.readouterr()
    assert main([*TRAIN, "--changes.precision", "bfloat16", "--out", str(tmp_path / "other")]) == 2
    assert "--execution.precision on the command line" in capsys.readouterr().err
