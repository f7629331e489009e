"""The table of an ablation, for the terminal, as Markdown, as JSON, and as an HTML page with plots."""

import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from regard.ablation import page, tables
from regard.ablation.plan import Rates, early_step
from regard.ablation.results import DIVERGED, DONE, Result
from regard.ablation.rows import Row, sequence_length
from regard.ablation.statistics import BETTER, WORSE, Effect, Spread, compare
from regard.ablation.tables import number, quantity
from regard.data.prepare import Prepared
from regard.evaluation.metrics import metric_heading
from regard.recipe.recipe import Recipe
from regard.training.checkpoint import finite
from regard.variants import VARIANTS

if TYPE_CHECKING:
    from regard.ablation.experiment import Experiment

COLUMNS = ("row", "parameters", "operations", "steps/s", "early loss", "final loss")
LEVEL, POWER = 0.05, 0.8
HUGE = 1e100  # larger values have no standard deviation


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean. It is infinite if one of the values is infinite."""
    return sum(values) / len(values)


@dataclass(frozen=True)
class Mean:
    """The mean and the standard deviation over seeds. The standard deviation is None for a single seed."""

    value: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Return the mean and the standard deviation of `values`, which must not be empty."""
        known = len(values) > 1 and all(abs(value) < HUGE for value in values)
        return cls(mean(values), statistics.stdev(values) if known else None)

    def __format__(self, style: str) -> str:
        """Return the mean and the standard deviation, such as `2.184 ± 0.005`, with both in the format `style`."""
        return format(self.value, style) + ("" if self.sd is None else f" ± {format(self.sd, style)}")


@dataclass(frozen=True)
class Line:
    """One row of the table: a model with its cost, its losses averaged over seeds, and the comparison with the base."""

    name: str
    about: str
    parameters: int | None
    operations: float | None
    speed: float | None
    early: Mean | None
    final: Mean | None
    metric: Mean | None
    losses: dict[int, float]
    curve: list[tuple[int, float]]  # (step, mean loss over seeds)
    effect: Effect | None
    verdict: str
    note: str

    def json(self) -> dict[str, Any]:
        return finite(asdict(self) | {"losses": {str(seed): loss for seed, loss in self.losses.items()}})


@dataclass
class Report:
    """The results of an ablation: the table rows (the base model first), and the settings."""

    lines: list[Line]
    spread: Spread | None
    seeds: int
    steps: int
    early: int
    length: int
    metric: str
    devices: list[str]
    complete: bool = True
    facts: page.Facts = ()  # data, model and command, in words

    @property
    def detectable(self) -> float | None:
        """The smallest effect detected with probability POWER, for models of typical variance. None if unknown."""
        return next((line.effect.detectable for line in self.lines if line.effect and line.effect.steady), None)

    def sentences(self) -> list[str]:
        """Return the sentences that explain the table."""
        sentences = [
            f"{self.seeds} seed{'s' * (self.seeds > 1)} per row, {3 * self.seeds} of the base; {self.steps:,} steps. "
            "Losses are in nats per token on held-out text, ± the standard deviation over seeds; the early loss is "
            f"measured after {self.early:,} steps. Operations are those of a forward pass over {self.length} tokens."
        ]
        if self.spread is not None and self.detectable is not None:
            paired = self.spread.paired is not None
            sentences.append(
                f"Verdicts compare final losses{', paired by seed,' * paired} at a level of {LEVEL:.0%} over all rows "
                f"(Holm's correction). The standard deviation over seeds is {self.spread.seeds:.2g}; the smallest "
                f"effect detected with {POWER:.0%} power is {self.detectable:.2g}."
            )
        if names := ", ".join(line.name for line in self.lines if line.effect and not line.effect.steady):
            sentences.append(f"Rows with a much larger variance are compared by their own variance alone: {names}.")
        return sentences + warnings(self.devices, self.complete)

    def json(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "seeds": self.seeds,
            "base_seeds": 3 * self.seeds,
            "steps": self.steps,
            "early_step": self.early,
            "sequence_length": self.length,
            "metric": self.metric,
            "level": LEVEL,
            "power": POWER,
            "detectable": finite(self.detectable),
            "spread": finite(asdict(self.spread)) if self.spread else None,
            "devices": self.devices,
            "rows": [line.json() for line in self.lines],
        }

    def cells(self) -> list[list[str]]:
        """Return the cells of the table as text. The first row contains the headings."""
        head = [*COLUMNS, metric_heading(self.metric), "effect", "verdict"]
        return [head, *(_cells(line) for line in self.lines)]

    def markdown(self) -> str:
        cells = self.cells()
        lines = tables.markdown(cells, left=(0, len(cells[0]) - 1))
        return "\n".join(["# Ablation", "", *lines, "", *(f"{sentence}\n" for sentence in self.sentences())])

    def table(self, narrow: bool = False) -> Table:
        """Return the table for a terminal. With `narrow`, standard deviations and intervals are on separate lines."""
        head, *rows = self.cells()
        if narrow:
            head = ["row", "params", "ops", "steps\n/s", "early\nloss", "final\nloss", *head[6:]]
            rows = [[_narrow(cell) for cell in row[:-1]] + row[-1:] for row in rows]
            for line, row in zip(self.lines, rows, strict=True):
                row[1] = quantity(line.parameters)
        last = len(head) - 1
        styles = [{BETTER: "green", WORSE: "red"}.get(line.verdict, "") for line in self.lines]
        return tables.terminal([head, *rows], (0, last), (last,), narrow, styles)

    def save(self, folder: Path, report: Callable[[str], None] = lambda _: None) -> None:
        """Write table.json, table.md and table.html to `folder`. `report` receives a warning if a plot fails."""
        record, parts = self.json(), (self.cells(), self.sentences(), self.facts)
        page.save(folder / "table", record, self.markdown(), lambda: page.html(record, *parts), report)


def _narrow(cell: str) -> str:
    return cell.replace(" ± ", "\n±").replace(" [", "\n[").replace(", ", "\n ")


def _cells(line: Line) -> list[str]:
    effect = line.effect
    return [
        line.name,
        number(line.parameters, ","),
        quantity(line.operations),
        number(line.speed, ".2f" if line.speed is not None and line.speed < 10 else ".1f"),
        number(line.early, ".3f"),
        number(line.final, ".3f"),
        number(line.metric, ".2f" if line.metric is not None and line.metric.value < 10 else ".1f"),
        "" if effect is None else f"{effect.effect:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]",
        line.verdict + (f" ({line.note})" if line.note else ""),
    ]


def build_report(experiment: "Experiment", rates: Rates, complete: bool) -> Report:
    """Return the report of an ablation. Every model whose training runs are all done is compared with the base."""
    recipe, data, base, results = experiment.recipe, experiment.text.data, experiment.base, experiment.results
    seeds = experiment.settings.seeds
    runs: dict[str, dict[int, Result | None]] = {}
    for job in experiment.jobs:
        runs.setdefault(job.row, {})[job.seed] = results.get(job.hash)
    of_base = _losses(runs.get(base.name, {}))
    compared = {name: _losses(own) for name, own in runs.items() if name != base.name and not _state(own)}
    effects: dict[str, Effect] = {}
    spread = None
    if compared and len(of_base) > 1 and seeds > 1:
        effects, spread = compare(of_base, compared, level=LEVEL, power=POWER)
    lines = [
        _line(row, runs.get(row.name, {}), effects.get(row.name), rates, row.name == base.name, results.metric)
        for row in (base, *experiment.rows)
    ]
    done = [result for own in runs.values() for result in _done(own)]
    return Report(
        lines,
        spread,
        seeds,
        recipe.train.steps or 0,
        early_step(recipe.train),
        sequence_length(recipe, data),
        results.metric,
        sorted({str(result["device"]) for result in done}),
        complete,
        facts(recipe, data, base.parameters),
    )


def facts(recipe: Recipe, data: Prepared, parameters: int) -> page.Facts:
    """Return descriptions of an experiment's data, model and command line, as pairs (name, description)."""
    spec, objective, model = recipe.data, data.objective, recipe.model
    train = ", ".join(str(path) for corpus in spec.train for path in corpus.files())
    valid = ", ".join(str(path) for corpus in spec.valid for path in corpus.files())
    held_out = 0 if data.valid is None else data.valid.rows
    vocabulary = "; ".join(f"{name} vocabulary of {tokens.size:,}" for name, tokens in data.tokenizers.items())
    size = [model.kind, *(f"{name} {getattr(model, name)}" for name in ("d_model", "heads") if hasattr(model, name))]
    depths = {side: getattr(getattr(model, side, None), "depth", None) for side in ("encoder", "decoder")}
    size += [f"{side} depth {depth}" for side, depth in depths.items() if isinstance(depth, int)]
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if words[0] == "__main__.py":
        words[0] = "regard"
    text = (
        f"{objective.kind.replace('_', ' ')}; {sum(table.rows for table in data.train):,} training examples from "
        f"{train}; {held_out:,} held-out examples{f' from {valid}' if valid else ''}; {vocabulary}"
    )
    model_text = ", ".join([*size, f"{parameters:,} parameters"]).replace("_", " ")
    return (("Data", text), ("Model", model_text), ("Command", shlex.join(words)))


def warnings(devices: Sequence[str], complete: bool) -> list[str]:
    """Return warnings if the training runs used different devices or if some of them are missing."""
    sentences = []
    if len(devices) > 1:
        sentences.append(f"Runs were made on different devices ({', '.join(devices)}): speeds cannot be compared.")
    if not complete:
        sentences.append("Some runs are missing; run the same command again to continue.")
    return sentences


def _done(runs: dict[int, Result | None]) -> list[Result]:
    return [result for result in runs.values() if result and result["status"] == DONE]


def _losses(runs: dict[int, Result | None]) -> dict[int, float]:
    return {seed: result["loss"] for seed, result in runs.items() if result and result["status"] == DONE}


def _state(runs: dict[int, Result | None]) -> str:
    """Return the reason why a model cannot be compared, or an empty string if all of its training runs are done."""
    if not runs or any(result is None for result in runs.values()):
        return "not run yet"
    bad = [result for result in runs.values() if result and result["status"] != DONE]
    if not bad:
        return ""
    outcome = "diverged" if all(result["status"] == DIVERGED for result in bad) else "failed"
    return f"{outcome}, {len(bad)} of {len(runs)} runs: {bad[0]['error']}"


def _line(
    row: Row, runs: dict[int, Result | None], effect: Effect | None, rates: Rates, is_base: bool, metric: str
) -> Line:
    done = _done(runs)
    verdict = f"left out: {row.left_out}" if row.left_out else _state(runs)
    if not verdict and is_base:
        verdict = "the base"
    elif not verdict:
        unknown = "no base to compare with" if len(runs) > 1 else "needs at least 2 seeds"
        verdict = effect.verdict if effect else unknown
    factor = rates.get(row.name, 1.0)
    notes = [row.note, f"learning rate x {factor:g}" if factor != 1.0 else ""]
    variant = VARIANTS.get(row.name)
    return Line(
        row.name,
        row.about or (variant.about if variant else "the unchanged base"),
        None if row.model is None else row.parameters,
        None if row.model is None else row.operations,
        mean([result["steps_per_second"] for result in done]) if done else None,
        Mean.of([result["early"]["loss"] for result in done]) if done else None,
        Mean.of([result["loss"] for result in done]) if done else None,
        Mean.of([result["scores"][metric] for result in done]) if done else None,
        _losses(runs),
        _curve(done),
        effect,
        verdict,
        ", ".join(note for note in notes if note),
    )


def _curve(done: Sequence[Result]) -> list[tuple[int, float]]:
    if not done:
        return []
    steps = [step for step, _ in done[0]["curve"]]
    by_run = [dict(result["curve"]) for result in done]
    return [(step, mean([run[step] for run in by_run])) for step in steps if all(step in run for run in by_run)]
