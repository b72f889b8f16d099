"""Metrics of tables: titles, units, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """Metric as tables show it.

    percent: stored as a share of 1, shown in percent. decimals: shown after the point.
    better: which of two values is better; None where neither is.
    """

    title: str
    percent: bool = False
    decimals: int = 2
    better: Literal["higher", "lower"] | None = None

    def shown(self, value: float) -> str:
        """Format a value in the metric's unit."""
        return f"{100 * value if self.percent else value:,.{self.decimals}f}"


METRICS = {
    "cls/accuracy": Metric("accuracy (%)", percent=True, better="higher"),
    "cal/ece": Metric("ECE (%)", percent=True, better="lower"),
    # The paper's diversity: the entropy of the mean logits over log C, of correctly and wrongly classified samples.
    "div/cc": Metric("CC diversity (%)"),
    "div/wc": Metric("WC diversity (%)"),
    "div/disagreement": Metric("disagreement (%)", percent=True),
    "div/mutual_information": Metric("mutual information (nats)", decimals=4),
    "cls/brier": Metric("Brier", decimals=4, better="lower"),
    "cal/nll": Metric("NLL", decimals=4, better="lower"),
    "cal/ece15": Metric("ECE, 15 bins (%)", percent=True, better="lower"),
    "cal/adaptive_ece": Metric("adaptive ECE (%)", percent=True, better="lower"),
    "cal/classwise_ece": Metric("classwise ECE (%)", percent=True, better="lower"),
    "cal/deep_equivalent": Metric("deep-ensemble equivalent (members)", better="higher"),
    "cal/nll_t": Metric("NLL after temperature", decimals=4, better="lower"),
    "cal/ece_t": Metric("ECE after temperature (%)", percent=True, better="lower"),
    "cal/ece15_t": Metric("ECE after temperature, 15 bins (%)", percent=True, better="lower"),
    "conf/coverage": Metric("conformal coverage (%)", percent=True),
    "conf/size": Metric("conformal set size", better="lower"),
    "conf/width": Metric("conformal width", decimals=4, better="lower"),
    "unc/kept": Metric("kept (%)", percent=True, better="higher"),
    "unc/kept_accuracy": Metric("accuracy of the kept (%)", percent=True, better="higher"),
    "unc/kept_right": Metric("kept of the right (%)", percent=True, better="higher"),
    "unc/auroc": Metric("AUROC of errors (%)", percent=True, better="higher"),
    "unc/fpr95": Metric("FPR95 of errors (%)", percent=True, better="lower"),
    "unc/aurc": Metric("AURC (%)", percent=True, better="lower"),
    "unc/coverage_at_5_risk": Metric("coverage at 5 % risk (%)", percent=True, better="higher"),
    "reg/rmse": Metric("RMSE", decimals=4, better="lower"),
    "reg/member_rmse": Metric("RMSE of members", decimals=4, better="lower"),
    "reg/spread": Metric("spread", decimals=4),
    "reg/loss": Metric("loss", decimals=4, better="lower"),
    "reg/nll": Metric("NLL", decimals=4, better="lower"),
    "reg/coverage_at_90": Metric("coverage of 90 % intervals (%)", percent=True),
    "size/file_bytes": Metric("file (bytes)", decimals=0, better="lower"),
    "size/overhead": Metric("overhead (×)", better="lower"),
    "unc/filtered_accuracy": Metric("filtered accuracy (%)", percent=True, better="higher"),
    "unc/discarded": Metric("discarded (%)", percent=True),
    "cl/accuracy": Metric("accuracy (%)", percent=True, better="higher"),
    "cl/final_accuracy": Metric("final accuracy (%)", percent=True, better="higher"),
    "cl/forgetting": Metric("forgetting (%)", percent=True, better="lower"),
    "cl/accuracy_without_identity": Metric("without task identity (%)", percent=True, better="higher"),
    "size/bits": Metric("bits", decimals=0),
    "size/bits_per_task": Metric("bits per task", decimals=0),
    "size/floats": Metric("floats / b", decimals=3),
    "size/floats_per_task": Metric("floats per task / b", decimals=4),
    "size/binaries_per_task": Metric("binary values per task / b", decimals=4),
}


def metric_of(name: str) -> Metric:
    """Return the metric of a figure of `evaluate()` or of the paper's tables."""
    if name not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {name!r}")
    return METRICS[name]
