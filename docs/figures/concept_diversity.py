"""Draw docs/images/concept-diversity.png: two estimators of the MMD², and what it does not see."""

import style
import torch
from matplotlib.figure import Figure
from torch import Tensor

import structured_ensembles as se

SIZE, PAIRS = 64, 2000


def draw() -> Figure:
    """Draw histograms of both estimators, and the MMD² of pairs of vectors against the neurons that they share."""
    torch.manual_seed(0)
    one, other = torch.randn(2, PAIRS, SIZE, dtype=torch.float64)
    used, printed = se.mmd2(one, other), unbiased(one, other)

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    scale = 1e3
    bins = torch.linspace(float(printed.quantile(0.005)) * scale, float(used.quantile(0.98)) * scale, 45).tolist()
    left.hist(printed * scale, bins, color=style.ORANGE, alpha=0.75, label="unbiased, as printed")
    left.hist(used * scale, bins, color=style.BLUE, alpha=0.75, label="biased, as used")
    left.axvline(0, color=style.INK, linewidth=1)
    share = float((printed < 0).double().mean())
    left.set_title(f"independent vectors: printed form below 0 in {100 * share:.0f} %", loc="left")
    left.set(xlabel="MMD² · 1000", ylabel=f"of {PAIRS:,} pairs")
    left.legend()

    permuted = torch.stack([row[torch.randperm(SIZE)] for row in one])
    for vectors, label, colour in ((other, "another draw", style.BLUE), (permuted, "permuted entries", style.ORANGE)):
        shown = slice(0, 400)
        shared = common_halves(one[shown], vectors[shown])
        jitter = 1.2 * torch.rand(len(shared)) - 0.6  # shares are multiples of 1/32
        right.scatter(
            100 * shared + jitter,
            se.mmd2(one[shown], vectors[shown]) * scale,
            s=9,
            color=colour,
            label=label,
            linewidths=0,
        )
    right.set(xlabel="neurons common to both upper halves (%)", ylabel="MMD² · 1000")
    right.set_title("the MMD² does not know neurons", loc="left")
    right.legend(markerscale=2)
    return figure


def unbiased(one: Tensor, other: Tensor) -> Tensor:
    """Compute the U-statistic of the paper's formula, with its minus sign: (pairs, n) and (pairs, n) give (pairs,)."""
    size = one.shape[-1]

    def kernel(first: Tensor, second: Tensor) -> Tensor:
        return (-(first[:, :, None] - second[:, None, :]).square() / size).exp()

    off_diagonal = ~torch.eye(size, dtype=torch.bool)
    within = sum(kernel(vectors, vectors)[:, off_diagonal].mean(-1) for vectors in (one, other))
    return within - 2 * kernel(one, other).mean((-1, -2))


def common_halves(one: Tensor, other: Tensor) -> Tensor:
    """Return the share of neurons that are in the upper halves of both vectors, (pairs,)."""
    halves = [vectors >= vectors.median(-1, keepdim=True).values for vectors in (one, other)]
    return (halves[0] & halves[1]).sum(-1) / halves[0].sum(-1)


if __name__ == "__main__":
    style.run(__file__, draw)
