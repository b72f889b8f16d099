"""Several rules of combination in one evaluation: their thresholds, and the names of their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from structured_ensembles.common.checks import check_choice, check_list
from structured_ensembles.data import Data
from structured_ensembles.ensemble import Ensemble
from structured_ensembles.evaluation.discarding import discard_threshold
from structured_ensembles.prediction.combination import COMBINE, Combine

Rules = Mapping[Combine, float | None]  # by rule, the entropy above which it discards; None if it never does


def checked_rules(combine: Combine | Sequence[Combine]) -> tuple[Combine, ...]:
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


def with_thresholds(rules: Sequence[Combine], ensemble: Ensemble, data: Data) -> Rules:
    """Pair each rule with the paper's threshold; the mean of logits, whose entropies differ, has its own.

    It comes from the validation split; without one the mean of logits has no threshold.
    """
    threshold = ensemble.calibration.paper_threshold
    found: dict[Combine, float | None] = dict.fromkeys(rules, threshold)
    if "logits" in found and threshold is not None:
        found["logits"] = None if data.validation is None else discard_threshold(ensemble, data, combine="logits")
    return found


def suffix_of(rule: Combine, rules: Rules) -> str:
    """Return the suffix of the names of a rule's figures: empty for the first rule."""
    return "" if rule == next(iter(rules)) else f"/{rule}"


def figures_by_rule(figures: Mapping[str, float], rules: Sequence[Combine]) -> dict[Combine, dict[str, float]]:
    """Sort figures by rule, under their plain names; every rule gets the sizes, which none changes."""
    others = tuple(f"/{rule}" for rule in rules[1:])
    found = {rules[0]: {name: value for name, value in figures.items() if not name.endswith(others)}}
    sizes = {name: value for name, value in figures.items() if name.startswith("size/")}
    for rule in rules[1:]:
        end = f"/{rule}"
        found[rule] = {name.removesuffix(end): value for name, value in figures.items() if name.endswith(end)} | sizes
    return found
