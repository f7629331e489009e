"""Plots of a report: curves of a training run, and lengths of a text, as SVG by matplotlib."""

from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.ablation.plots import COLOURS, MISSING, SOFT, new_figure, to_svg

if TYPE_CHECKING:
    from regard.doctor.reading import Examples
    from regard.doctor.run_record import RunRecord

Curve = Sequence[tuple[int, float]]
LARGEST = 1e6  # larger values are not drawn


def of_run(run: "RunRecord") -> list[tuple[str, str]]:
    """Return (title, SVG) of the curves of a run: loss, gradient norm and learning rate, scores."""
    loss = {"training loss": run.train_loss, "validation loss": run.valid_loss}
    if run.unigram_entropy is not None and run.train_loss:
        ends = run.train_loss[0][0], run.train_loss[-1][0]
        loss["entropy of the token frequencies"] = [(step, run.unigram_entropy) for step in ends]
    names = ("bleu", "chrf", "accuracy", "exact_match", "rougeL", "repeating", "unfinished")
    scores = {name: run.curve("valid", name) for name in names}
    pictures = [
        ("Loss, nats per token", loss),
        ("Gradient norm before clipping", {"gradient norm": run.curve("step", "gradient")}),
        ("Learning rate", {"learning rate": run.curve("step", "learning_rate")}),
        ("Validation scores and shares of faulty outputs, percent", scores),
    ]
    return _drawn([(title, lines) for title, lines in pictures if any(len(curve) > 1 for curve in lines.values())])


def of_text(text: "Examples", names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (title, SVG) of the distribution of lengths of each column, in characters."""
    lines = dict[str, Curve]()
    for name in names:
        sizes = np.asarray([len(each) for each in text.columns[name]] or [0])
        edges = np.linspace(0, max(1.0, float(np.quantile(sizes, 0.995))), 41)
        counts, _ = np.histogram(sizes, edges)
        middles = (edges[:-1] + edges[1:]) / 2
        lines[name] = [(round(at), 100 * count / max(1, len(sizes))) for at, count in zip(middles, counts, strict=True)]
    title = "Lengths in characters, percent of the texts (0.5 % are longer than the axis)"
    return _drawn([(title, lines)], axis="characters")


def _drawn(pictures: Sequence[tuple[str, Mapping[str, Curve]]], axis: str = "training steps") -> list[tuple[str, str]]:
    if find_spec("matplotlib") is None:
        return [("Curves", MISSING)] if pictures else []
    return [(title, _plot(title, lines, axis)) for title, lines in pictures]


def _plot(title: str, lines: Mapping[str, Curve], axis: str) -> str:
    drawing, axes = new_figure(3.2)
    colours = [COLOURS["base"], COLOURS["worse"], COLOURS["better"], SOFT]
    known = {name: [(x, y) for x, y in curve if abs(y) < LARGEST] for name, curve in lines.items()}
    for number, (name, curve) in enumerate((name, curve) for name, curve in known.items() if curve):
        steps, values = zip(*curve, strict=True)
        style: dict[str, Any] = {"color": colours[number % 4], "linewidth": 1.6}
        if len(curve) == 1:
            style["marker"] = "o"
        axes.plot(steps, values, label=name, linestyle="--" if number >= 4 or "entropy" in name else "-", **style)
    axes.set_xlabel(axis)
    axes.legend(frameon=False, labelcolor=SOFT, fontsize=9)
    return to_svg(drawing, escape(title))
