"""Several combination rules in one evaluation: their thresholds, and the names of their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from structured_ensembles.common.checks import check_choice, check_list
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.discarding import fit_discard_threshold
from structured_ensembles.prediction.combination import COMBINE, Combine

Rules = Mapping[Combine, float | None]  # by rule, the entropy above which it discards; None if it never does


def check_rules(combine: Combine | Sequence[Combine]) -> tuple[Combine, ...]:
    """Check the combination rules; return each once."""
    if isinstance(combine, str):
        check_choice("combine", combine, COMBINE)
        return (combine,)
    check_list("combine", combine, "rules")
    if not combine:
        raise ValueError(f"combine must name at least one of {', '.join(map(repr, COMBINE))}")
    for rule in combine:
        check_choice("combine", rule, COMBINE)
    return tuple(dict.fromkeys(combine))


def pair_with_thresholds(rules: Sequence[Combine], ensemble: Ensemble, data: Data) -> Rules:
    """Pair each rule with its discard threshold: the paper's, or one of its own for the mean of logits.

    The entropies of the mean of logits differ, so its threshold is fitted on the validation split, or None without one.
    """
    threshold = ensemble.calibration.paper_threshold
    thresholds: dict[Combine, float | None] = dict.fromkeys(rules, threshold)
    if "logits" in thresholds and threshold is not None:
        thresholds["logits"] = (
            None if data.validation is None else fit_discard_threshold(ensemble, data, combine="logits")
        )
    return thresholds


def suffix_of(rule: Combine, rules: Rules) -> str:
    """Return the suffix of the names of a rule's figures: empty for the first rule."""
    return "" if rule == next(iter(rules)) else f"/{rule}"


def sort_by_rule(figures: Mapping[str, float], rules: Sequence[Combine]) -> dict[Combine, dict[str, float]]:
    """Sort figures by rule, under their plain names; every rule gets the sizes, which do not depend on it."""
    others = tuple(f"/{rule}" for rule in rules[1:])
    by_rule = {rules[0]: {name: value for name, value in figures.items() if not name.endswith(others)}}
    sizes = {name: value for name, value in figures.items() if name.startswith("size/")}
    for rule in rules[1:]:
        suffix = f"/{rule}"
        by_rule[rule] = {
            name.removesuffix(suffix): value for name, value in figures.items() if name.endswith(suffix)
        } | sizes
    return by_rule
