"""Several combination rules in one evaluation, and the precision that a run records."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

import structured_ensembles as se
from structured_ensembles.continual.experiment import ContinualExperiment, run_continual
from structured_ensembles.report.page import describe_precisions
from structured_ensembles.runs.experiment import Experiment, train_experiment
from structured_ensembles.runs.finished import Finished
from structured_ensembles.runs.measurement import Request, measure_experiment


def by_hand(ensemble: se.Ensemble, split: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the entropies of softmax(mean logits) and whether each is correct, both (samples,)."""
    inputs, targets = next(iter(split.batches(10_000)))  # type: ignore[attr-defined]
    mean = ensemble.logits(inputs).double().numpy().mean(0)
    entropy = -(softmax(mean, -1) * log_softmax(mean, -1)).sum(-1)
    return entropy, mean.argmax(-1) == targets.numpy()


def test_logits_rule_discards_by_its_own_entropy(trained: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = trained
    figures = se.evaluate(ensemble, data, combine="logits")
    entropy, right = by_hand(ensemble, data.validation)
    threshold = np.percentile(entropy[right], 75)
    assert threshold != pytest.approx(
        ensemble.calibration.paper_threshold, rel=0.01
    )  # that of the mean of probabilities
    entropy, right = by_hand(ensemble, data.test)
    kept = entropy <= threshold
    assert figures["cls/accuracy"] == pytest.approx(right.mean())
    assert figures["unc/discarded"] == pytest.approx(1 - kept.mean())
    assert figures["unc/filtered_accuracy"] == pytest.approx(right[kept].mean())
    assert figures["div/entropy"] == pytest.approx(entropy.mean(), rel=1e-5)
    # Entropy over log C is the paper's diversity, of which it is the mean here.
    assert figures["div/cc"] == pytest.approx(100 * entropy[right].mean() / np.log(10), rel=1e-5)


def test_several_rules_share_one_forward_pass(
    trained: tuple[se.Ensemble, se.Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble, data = trained
    asked = {"fgsm": (0.1,), "corruptions": ["fog"], "severities": (3,)}
    alone = {rule: se.evaluate(ensemble, data, combine=rule, **asked) for rule in ("mean", "logits")}
    seen: list[int] = []
    logits_method = se.Ensemble.logits
    monkeypatch.setattr(
        se.Ensemble, "logits", lambda self, x, size=512: seen.append(len(x)) or logits_method(self, x, size)
    )
    both = se.evaluate(ensemble, data, combine=("mean", "logits"), **asked)
    assert sum(seen) == 3 * len(data.test) + len(data.validation)  # clean, attacked, in fog; and for the threshold
    ruled = {name: value for name, value in alone["logits"].items() if not name.startswith("size/")}
    assert both == alone["mean"] | {f"{name}/logits": value for name, value in ruled.items()}
    assert both["adv/fgsm@0.1/logits"] == alone["logits"]["adv/fgsm@0.1"]
    assert both["cor/mean@3/discarded/logits"] == alone["logits"]["cor/mean@3/discarded"]
    assert both["cal/ece/logits"] != both["cal/ece"]


def test_without_validation_the_logits_rule_has_no_threshold(trained: tuple[se.Ensemble, se.Data]) -> None:
    ensemble, data = trained
    inputs, targets = next(iter(data.test.batches(10_000)))
    bare = se.Data.from_arrays(inputs, targets, test=(inputs, targets), validation=0.0)
    figures = se.evaluate(ensemble, bare, combine=("mean", "logits"))
    assert "unc/discarded" in figures
    assert "unc/discarded/logits" not in figures


@pytest.mark.parametrize("combine", ["median", ("mean", "median"), ()])
def test_unknown_rule_is_an_error(combine: object, trained: tuple[se.Ensemble, se.Data]) -> None:
    with pytest.raises(ValueError, match=r"combine must .*'mean', 'logits', 'vote'"):
        se.evaluate(*trained, combine=combine)  # type: ignore[arg-type]


def regression() -> se.Data:
    x = torch.rand(60, 5, generator=torch.Generator().manual_seed(0))
    return se.Data.from_arrays(x, x.sum(1), test=(x, x.sum(1)))


def test_regression_is_evaluated_once_by_one_rule(tmp_path: Path) -> None:
    experiment = Experiment(
        "tests.evaluation.test_rules:regression", "mlp", "single", members=1, recipe="regression", changes={"epochs": 1}
    )
    folder = tmp_path / "run"
    train_experiment(experiment, folder, device="cpu", quiet=True)
    assert measure_experiment(folder, Request(), device="cpu", trust_code=True)[1]
    assert not (folder / "evaluation-test-logits.json").exists()
    assert not measure_experiment(folder, Request(), device="cpu", trust_code=True)[1]


def test_auto_precision_is_bfloat16_where_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert se.Execution().precision_on(cpu) == "float32"
    assert se.Execution(precision="bfloat16").precision_on(cpu) == "bfloat16"
    for supported, expected in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, supported=supported: supported)
        assert se.Execution().precision_on(gpu) == expected
        assert se.Execution(precision="float32").precision_on(gpu) == "float32"


def test_runs_record_their_precision(tmp_path: Path) -> None:
    for precision, expected in (("auto", "float32"), ("bfloat16", "bfloat16")):
        execution = se.Execution(precision=precision)
        folder = tmp_path / precision
        experiment = Experiment(
            "digits", "lenet5", "single", members=1, changes={"epochs": 1}, limit=64, execution=execution
        )
        result, _ = train_experiment(experiment, folder, device="cpu", quiet=True)
        assert result["precision"] == expected
        assert json.loads((folder / "result.json").read_text())["precision"] == expected
    learned = ContinualExperiment("digits", "lenet5", "naive", tasks=2, method_arguments={"epochs": 1}, limit=64)
    result, _ = run_continual(learned, tmp_path / "learned", device="cpu", quiet=True)
    assert result["precision"] == "float32"


def test_report_names_the_precision() -> None:
    def runs(*precisions: str | None) -> list[Finished]:
        return [
            Finished(Path("a"), {}, {} if precision is None else {"precision": precision}, {})
            for precision in precisions
        ]

    assert describe_precisions([]) == []
    assert describe_precisions(runs("bfloat16", "bfloat16")) == ["Trained in bfloat16."]
    assert describe_precisions(runs("float32", "bfloat16", "float32")) == [
        "Trained in bfloat16 (1 run), float32 (2 runs)."
    ]
    assert describe_precisions(runs(None)) == ["Trained in a precision that was not recorded."]
