"""Wrong words on the command line: each gets a sentence with what was wrong, what was given, what is possible."""

import pytest

from structured_ensembles.cli.main import main

WRONG = [
    (["trian"], "there is no command 'trian': did you mean train? the commands are demo, train"),
    (["train", "--member", "3"], "train has no option --member: did you mean --members? `sens train --help`"),
    (["train", "--zzz", "3"], "train has no option --zzz: `sens train --help` lists all of them"),
    (["train", "--search-epochs", "3"], "no option --search-epochs: write --method-arguments.search_epochs …; `sens"),
    (["train", "--rate", "0.1"], "no option --rate: write --changes.rate …; `sens train --help` lists all of them"),
    (["train", "--members", "many"], "--members must be a whole number, not 'many'"),
    (["train", "--epochs", "0.5"], "--epochs must be a whole number, not '0.5'"),
    (["train", "--prune", "half"], "--prune must be a number, not 'half'"),
    (["train", "--scope", "layr"], "--scope must be layer or network, not 'layr': did you mean layer?"),
    (["train", "--quiet=maybe"], "--quiet must be true or false, not 'maybe'"),
    (["train", "--out"], "--out needs a value: a path"),
    (["train", "runs/a"], "takes only options with a name, not also 'runs/a'"),
    (["train", "--model-arguments", "3"], "--model-arguments must be a mapping, such as '{name: 1}', not 3"),
    (["train", "--changes", "{a: ["], "--changes must be a mapping"),
    (["train", "--execution.engin", "loop"], "no option --execution.engin: did you mean --execution.engine?"),
    (["train", "--execution", "{engin: loop}"], "--execution has engine, precision, streams, compile, not engin"),
    (["train", "--execution.engine", "fast"], "--execution.engine must be auto, loop or graph, not 'fast'"),
    (["train", "--threads", "0"], "--threads must be a whole number of at least 1, not 0"),
    (["train", "--limit", "0"], "--limit must be a whole number of at least 1, not 0"),
    (["predict"], "predict needs RUN and IMAGES: sens predict RUN IMAGES … [options]"),
    (["predict", "--run", "a"], "RUN has no name: sens predict RUN IMAGES … [options]"),
    (["evaluate", "a", "b"], "takes RUN without a name, not also 'b'"),
    (["evaluate", "a", "--severities", "1", "x"], "--severities must be a whole number, not 'x'"),
    (["train", "--method", "deep", "--prune", "0.5"], "method 'deep' has no argument 'prune': it has loss, loss_name"),
    (["train", "--method-arguments", "{members: 3}"], "has no argument 'members'"),
    (["continual", "--method", "naive", "--prune", "0.5"], "method 'naive' has no argument 'prune': it has augment"),
    (["train", "--model", "mlp", "--model-arguments", "{depth: 3}"], "takes the arguments in_features"),
    (["continual", "--method", "foo"], "batch-ensemble, structured, or package.module:class, not 'foo'"),
    (
        ["train", "--dataset", "foo"],
        "'tiny-imagenet', folder:PATH (a folder of pictures for each class), or package.mod",
    ),
    (["reproduce", "foo"], "figure-continual-pruning, all, queue, not 'foo'"),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_wrong_words_get_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sens: ")
    assert len(captured.err.splitlines()) == 1
    assert sentence in captured.err
    for raw in ("Union", "unexpected keyword", "subtypes", "Parser"):
        assert raw not in captured.err
