"""`sens --help`: what new users read first, and that its examples are command lines that parse."""

import re
import shlex

import pytest
import torch

from structured_ensembles.cli.command_line import parse_words
from structured_ensembles.cli.help import EXAMPLES
from structured_ensembles.cli.main import COMMANDS, main
from structured_ensembles.cli.options import read_options
from structured_ensembles.common.version import VERSION
from structured_ensembles.data import Data
from structured_ensembles.paper.catalogue import study_names
from structured_ensembles.runs.ingredients import add_data_arguments

RAW = ("Optional[", "Literal[", "<class", "print_config", "typing.", "Union[", "pathlib", "null")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_is_readable_and_complete(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert not [word for word in RAW if word in shown]
    options = read_options(COMMANDS[name])
    for option in options.values():
        labels = [field.label for field in option.fields.values()] or [option.label]
        for label in labels:
            entry = re.search(rf"^  {re.escape(label)}\b[^\n]*\n?[^\n]*", shown, re.MULTILINE)
            assert entry is not None, label
            assert len(entry[0].split()) > 2, f"{label} has no text"
    usage = shown.splitlines()[0]
    assert [word for word in usage.split() if word.isupper()] == [o.label for o in options.values() if o.is_positional]
    assert shown.index("examples:") > shown.index("--help")
    assert max(map(len, shown.partition("examples:")[0].splitlines())) <= 100


def test_examples_of_the_help_are_command_lines_that_parse() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()
    for name, lines in EXAMPLES.items():
        for line in lines:
            program, command, *words = shlex.split(line.partition(" > ")[0])
            assert (program, command) == ("sens", name)
            parse_words(command, words, read_options(COMMANDS[command]))
    options = parse_words("train", shlex.split(EXAMPLES["train"][-1])[2:], read_options(COMMANDS["train"]))
    assert (options["changes"], options["execution"].precision) == ({"rate": 0.05}, "float32")


def test_help_of_the_program_lists_commands_and_version_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w", shown, re.MULTILINE) for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"structured-ensembles {VERSION}, torch ")


def test_help_of_reproduce_lists_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--help"]) == 0
    listed = re.search(r"arguments: NAME (.*?), or queue:", " ".join(capsys.readouterr().out.split()))
    assert listed is not None
    assert listed[1].split(", ") == [*study_names(), "all"]


@pytest.mark.parametrize(("name", "facts"), [("train", "classes and channels"), ("continual", "channels")])
def test_help_says_that_only_models_of_the_zoo_get_facts_of_the_data(
    name: str, facts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Data.from_arrays(torch.rand(40, 1, 8, 8), torch.arange(40) % 4)
    assert add_data_arguments("lenet5", data, {"a": 1}) == {"num_classes": 4, "in_channels": 1, "a": 1}
    assert add_data_arguments("package.module:function", data, {"a": 1}) == {"a": 1}
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"is called with; those of the zoo get the {facts} of the data, too" in shown


def test_help_after_two_dashes_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "nowhere", "--", "--help"]) == 2
    assert "nowhere" in capsys.readouterr().err
