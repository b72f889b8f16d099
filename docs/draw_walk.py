"""Draw docs/images/walk.svg: the walk from one network to a calibrated prediction, as it runs on real digits.

python docs/draw_walk.py
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

import structured_ensembles as se

WIDTH, HEIGHT, HIDDEN = 720, 640, 12
INK, MUTED, LINE, PAPER = "#1f2937", "#4b5563", "#d1d5db", "#ffffff"
COLOURS = ("#0072B2", "#D55E00", "#009E73")  # of Okabe and Ito, one for each member


def main() -> None:
    """Run the walk with a network of two hidden layers, draw it and print where."""
    torch.manual_seed(0)
    data = se.load_data("digits")
    model = se.zoo.mlp(64, hidden=(HIDDEN, HIDDEN))
    graph = se.trace(model, data.example())
    scales = se.learn_scales(model, graph, data, members=len(COLOURS))
    scores = se.saliency(model, graph, scales, data)
    subnets = se.select(graph, scores, prune=0.5)
    ensemble = se.Ensemble([se.extract(model, graph, subnet) for subnet in subnets], subnets=subnets)
    se.train(ensemble, data, se.Recipe.named("modern", epochs=30, rate=0.05))

    sample = int(ensemble.uncertainty(data.test.inputs).entropy.argmax())  # the one that members doubt most
    kept = [[set(subnet.kept[name]) for name in subnet.kept] for subnet in subnets]
    salient = [torch.stack([member.values[name] for name in member.values]) for member in scores]
    target = Path(__file__).parent / "images" / "walk.svg"
    target.write_text("\n".join(draw_page(data, ensemble, sample, kept, salient)) + "\n", encoding="utf-8")
    print(target)


def draw_page(
    data: se.Data, ensemble: se.Ensemble, sample: int, kept: list[list[set[int]]], salient: list[Tensor]
) -> Iterator[str]:
    """Yield the lines of the SVG. kept: by member and layer. salient: by member, (layers, neurons)."""
    inputs = data.test.inputs[sample : sample + 1]
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="16" fill="{PAPER}"/>'
    yield from draw_title(24, 40, "1  One network", "trace: which neurons can go")
    yield from draw_digit(inputs[0, 0], 36, 150)
    whole = [set(range(HIDDEN))] * 2
    yield from draw_network(150, 90, whole, INK, 190)

    yield from draw_title(384, 40, "2  What matters to whom", "learn_scales, saliency, select")
    for member, (values, layers, colour) in enumerate(zip(salient, kept, COLOURS, strict=True)):
        yield from draw_scores(384, 100 + 68 * member, values, layers, colour)

    yield from draw_title(24, 350, "3  Members", "extract, train: all at once")
    for member, (layers, colour) in enumerate(zip(kept, COLOURS, strict=True)):
        yield from draw_network(36 + 108 * member, 410, layers, colour, 74)

    yield from draw_title(384, 350, "4  One calibrated answer", "predict_proba, uncertainty")
    yield from draw_prediction(384, 400, ensemble, inputs)
    yield "</svg>"


def draw_title(x: float, y: float, title: str, functions: str) -> Iterator[str]:
    """Yield a heading and the functions below it."""
    yield f'<text x="{x}" y="{y}" font-size="20" font-weight="bold" fill="{INK}">{escape(title)}</text>'
    yield f'<text x="{x}" y="{y + 26}" font-size="17" fill="{MUTED}">{escape(functions)}</text>'


def draw_digit(pixels: Tensor, x: float, y: float, size: float = 11) -> Iterator[str]:
    """Yield the squares of an image (height, width) of uint8 pixels, dark on light."""
    for row, values in enumerate(pixels.tolist()):
        for column, value in enumerate(values):
            grey = 255 - value * 7 // 8
            place = f'x="{x + size * column}" y="{y + size * row}" width="{size}" height="{size}"'
            yield f'<rect {place} fill="rgb({grey},{grey},{grey})"/>'


def draw_network(x: float, y: float, layers: Sequence[set[int]], colour: str, width: float) -> Iterator[str]:
    """Yield two layers of neurons and the connections between those that are kept; the others are hollow."""
    places = [[(x + width * layer, y + 17 * neuron) for neuron in range(HIDDEN)] for layer in (0, 1)]
    for first in sorted(layers[0]):
        for second in sorted(layers[1]):
            (x1, y1), (x2, y2) = places[0][first], places[1][second]
            yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-opacity="0.22"/>'
    for layer, column in zip(layers, places, strict=True):
        for neuron, (across, down) in enumerate(column):
            fill, stroke = (colour, colour) if neuron in layer else (PAPER, LINE)
            yield f'<circle cx="{across}" cy="{down}" r="6.5" fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'


def draw_scores(x: float, y: float, values: Tensor, layers: Sequence[set[int]], colour: str) -> Iterator[str]:
    """Yield a bar for each neuron, as high as its saliency (layers, neurons); filled if the member keeps it."""
    heights = (values / values.amax(1, keepdim=True)).clamp(min=0.06)
    for layer, row in enumerate(heights.tolist()):
        for neuron, height in enumerate(row):
            left, tall = x + 12.2 * neuron + 162 * layer, 48 * height
            fill = colour if neuron in layers[layer] else LINE
            yield f'<rect x="{left:.1f}" y="{y + 50 - tall:.1f}" width="9.5" height="{tall:.1f}" fill="{fill}"/>'


def draw_prediction(x: float, y: float, ensemble: se.Ensemble, inputs: Tensor) -> Iterator[str]:
    """Yield bars of the probabilities of the ten classes, with each member's as a tick, and the entropy."""
    probabilities = ensemble.predict_proba(inputs)[0].tolist()
    members = ensemble.logits(inputs).softmax(-1)[:, 0].tolist()
    floor, tall = y + 160, 150
    for label, probability in enumerate(probabilities):
        left = x + 31 * label
        bar = f'x="{left}" y="{floor - tall * probability:.1f}" width="24" height="{tall * probability:.1f}"'
        yield f'<rect {bar} fill="#94a3b8"/>'
        for values, colour in zip(members, COLOURS, strict=True):
            if values[label] > 0.02:
                tick = f"M{left - 2},{floor - tall * values[label]:.1f}h28"
                yield f'<path d="{tick}" stroke="{colour}" stroke-width="3"/>'
        yield f'<text x="{left + 12}" y="{floor + 21}" font-size="19" text-anchor="middle" fill="{INK}">{label}</text>'
    yield f'<line x1="{x - 4}" y1="{floor}" x2="{x + 308}" y2="{floor}" stroke="{MUTED}"/>'
    entropy = float(ensemble.uncertainty(inputs).entropy[0])
    verdict = "keep" if bool(ensemble.keep(inputs)[0]) else "better discarded"
    text = f"entropy {entropy:.2f}: {verdict}"
    yield f'<text x="{x}" y="{floor + 54}" font-size="20" fill="{INK}">{text}</text>'


if __name__ == "__main__":
    main()
