"""The table of an ablation: on a terminal, as Markdown, as JSON, and as a page with pictures."""

import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from regard.ablation import page
from regard.ablation.plan import Job, early_step
from regard.ablation.results import DIVERGED, DONE, Result, Results
from regard.ablation.rows import Row, sequence_length
from regard.ablation.statistics import BETTER, WORSE, Effect, Spread, compare
from regard.data.prepare import Prepared
from regard.evaluation.metrics import metric_heading
from regard.files import replace_text
from regard.recipe.recipe import Recipe
from regard.training.checkpoint import write_json
from regard.variants import VARIANTS

COLUMNS = ("row", "parameters", "operations", "steps/s", "early loss", "final loss")
LEVEL, POWER = 0.05, 0.8
HUGE = 1e100  # of values beyond it there is no standard deviation


def mean(values: Sequence[float]) -> float:
    """The mean of values, which may be anything: a perplexity may be infinite, and no table is to be lost for it."""
    return sum(values) / len(values)


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, and their standard deviation where there are several."""

    value: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Of values, at least one."""
        known = len(values) > 1 and all(abs(value) < HUGE for value in values)
        return cls(mean(values), statistics.stdev(values) if known else None)

    def text(self, digits: int) -> str:
        """`2.184 ± 0.005`."""
        return f"{self.value:.{digits}f}" + ("" if self.sd is None else f" ± {self.sd:.{digits}f}")


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    name: str
    about: str
    parameters: int | None
    operations: float | None
    speed: float | None
    early: Mean | None
    final: Mean | None
    metric: Mean | None
    losses: dict[int, float]
    curve: list[tuple[int, float]]  # mean of the seeds
    effect: Effect | None
    verdict: str
    note: str

    def json(self) -> dict[str, Any]:
        """As JSON; a number that is not finite is null."""
        return plain(asdict(self) | {"losses": {str(seed): loss for seed, loss in self.losses.items()}})


@dataclass
class Report:
    """An ablation: its rows, the base first, and what holds for all of them."""

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
        """The smallest effect that would be found, of a row that varies as the others do."""
        found = [line.effect.detectable for line in self.lines if line.effect and line.effect.steady]
        return found[0] if found else None

    def sentences(self) -> list[str]:
        """What one must know to read the table."""
        said = [
            f"{self.seeds} seed{'s' * (self.seeds > 1)} a row, {3 * self.seeds} of the base; {self.steps:,} steps. "
            f"Losses are nats a token on held-out text, early after {self.early:,} steps, ± the standard deviation "
            f"over seeds; operations those of a forward pass over a sequence of {self.length} tokens."
        ]
        if self.spread is not None and self.detectable is not None:
            paired = self.spread.paired is not None
            said.append(
                f"A verdict compares final losses{', paired by seed,' * paired} at {LEVEL:.0%} over all rows together "
                "(Holm), also where one row varies more than the others. A run varies by "
                f"±{self.spread.seeds:.2g} with its seed, taken over all rows; the smallest effect found with "
                f"{POWER:.0%} power is {self.detectable:.2g}."
            )
        if any(line.effect and not line.effect.steady for line in self.lines):
            names = ", ".join(line.name for line in self.lines if line.effect and not line.effect.steady)
            said.append(f"Varying far more than the others, and judged by their own variance alone: {names}.")
        if len(self.devices) > 1:
            said.append(f"Run on different devices ({', '.join(self.devices)}): compare no speeds.")
        if not self.complete:
            said.append("Not all runs are made yet; the same command goes on.")
        return said

    def json(self) -> dict[str, Any]:
        """As JSON."""
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
            "detectable": plain(self.detectable),
            "spread": plain(asdict(self.spread)) if self.spread else None,
            "devices": self.devices,
            "rows": [line.json() for line in self.lines],
        }

    def cells(self) -> list[list[str]]:
        """The table as text, its heading first."""
        head = [*COLUMNS, metric_heading(self.metric), "effect", "verdict"]
        return [head, *(_cells(line) for line in self.lines)]

    def markdown(self) -> str:
        """As a Markdown page."""
        head, *rows = self.cells()
        right = ["---", *["--:"] * (len(head) - 2), "---"]
        table = [head, right, *([cell.replace("|", "\\|") for cell in row] for row in rows)]
        lines = ["| " + " | ".join(row) + " |" for row in table]
        return "\n".join(["# Ablation", "", *lines, "", *(f"{sentence}\n" for sentence in self.sentences())])

    def table(self, narrow: bool = False) -> Table:
        """For a terminal; `narrow` puts what follows a ± or a bracket below it."""
        head, *rows = self.cells()
        if narrow:
            head = ["row", "params", "ops", "steps\n/s", "early\nloss", "final\nloss", *head[6:]]
            rows = [[_narrow(cell) for cell in row[:-1]] + row[-1:] for row in rows]
            for line, row in zip(self.lines, rows, strict=True):
                row[1] = "" if line.parameters is None else quantity(line.parameters)
        found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
        for i, heading in enumerate(head):
            last = i == len(head) - 1
            found.add_column(heading, justify="right" if i > 0 and not last else "left", no_wrap=not last)
        colours = {BETTER: "green", WORSE: "red"}
        for line, row in zip(self.lines, rows, strict=True):
            colour = colours.get(line.verdict)
            *cells, verdict = (cell.replace("[", "\\[") for cell in row)
            found.add_row(*cells, f"[{colour}]{verdict}[/]" if colour else verdict)
        return found

    def save(self, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        """Leave table.json and table.md in a folder, then table.html; what is wrong with the page is said."""
        write_json(folder / "table.json", self.json())
        replace_text(folder / "table.md", self.markdown())
        page.save(
            folder / "table.html", lambda: page.html(self.json(), self.cells(), self.sentences(), self.facts), say
        )


def plain(value: Any) -> Any:
    """A value as JSON has it: a number that is not finite is null."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _narrow(cell: str) -> str:
    return cell.replace(" ± ", "\n±").replace(" [", "\n[").replace(", ", "\n ")


def _cells(line: Line) -> list[str]:
    digits = 1 if line.metric is None or line.metric.value >= 10 else 2
    effect = line.effect
    shown = "" if effect is None else f"{effect.effect:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]"
    return [
        line.name,
        "" if line.parameters is None else f"{line.parameters:,}",
        "" if line.operations is None else quantity(line.operations),
        "" if line.speed is None else f"{line.speed:.2f}" if line.speed < 10 else f"{line.speed:.1f}",
        "" if line.early is None else line.early.text(3),
        "" if line.final is None else line.final.text(3),
        "" if line.metric is None else line.metric.text(digits),
        shown,
        line.verdict + (f" ({line.note})" if line.note else ""),
    ]


def quantity(value: float | int) -> str:
    """`12.3M`: three digits and a letter."""
    power = min(5, max(0, int(math.log10(max(value, 1))) // 3))
    return f"{value / 1000**power:.3g}{['', 'K', 'M', 'G', 'T', 'P'][power]}"


def report(
    recipe: Recipe,
    data: Prepared,
    base: Row,
    rows: Iterable[Row],
    jobs: Sequence[Job],
    results: Results,
    seeds: int,
    rates: dict[str, float],
) -> Report:
    """The table of all results there are."""
    found: dict[str, dict[int, Result | None]] = {}
    for job in jobs:
        found.setdefault(job.row, {})[job.seed] = results.get(job.hash)
    whole = {name: _losses(runs) for name, runs in found.items() if _state(runs) == ""}
    of_base = _losses(found.get(base.name, {}))
    compared = {name: losses for name, losses in whole.items() if name != base.name}
    effects: dict[str, Effect] = {}
    spread = None
    if compared and len(of_base) > 1 and seeds > 1:
        effects, spread = compare(of_base, compared, level=LEVEL, power=POWER)
    lines = [
        _line(row, found.get(row.name, {}), effects.get(row.name), rates, row.name == base.name, results.metric)
        for row in (base, *rows)
    ]
    done = [result for runs in found.values() for result in runs.values() if result and result["status"] == DONE]
    train = recipe.train
    return Report(
        lines,
        spread,
        seeds,
        train.steps or 0,
        early_step(train),
        sequence_length(recipe, data),
        results.metric,
        sorted({str(result["device"]) for result in done}),
        facts=facts(recipe, data, base.parameters),
    )


def facts(recipe: Recipe, data: Prepared, parameters: int) -> page.Facts:
    """Return the data, the model and the command of an experiment in words."""
    spec, objective, model = recipe.data, data.objective, recipe.model
    train = ", ".join(str(path) for corpus in spec.train for path in corpus.files())
    valid = ", ".join(str(path) for corpus in spec.valid for path in corpus.files())
    held_out = 0 if data.valid is None else data.valid.rows
    vocabulary = "; ".join(f"{name} vocabulary of {tokens.size:,}" for name, tokens in data.tokenizers.items())
    kind = model.kind.replace("_", " ")
    sizes = [
        f"{name.replace('_', ' ')} {getattr(model, name)}" for name in ("d_model", "heads") if hasattr(model, name)
    ]
    depths = [f"{side} depth {getattr(model, side).depth}" for side in ("encoder", "decoder") if _depth(model, side)]
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    shown = shlex.join(["regard", *words[1:]] if words[0] in ("regard", "__main__.py") else words)
    return (
        (
            "Data",
            f"{objective.kind.replace('_', ' ')}; {sum(table.rows for table in data.train):,} training records from "
            f"{train}; {held_out:,} held-out records{f' from {valid}' if valid else ''}; {vocabulary}",
        ),
        ("Model", ", ".join([kind, *sizes, *depths, f"{parameters:,} parameters"])),
        ("Command", shown),
    )


def _depth(model: Any, side: str) -> bool:
    return isinstance(getattr(getattr(model, side, None), "depth", None), int)


def _losses(runs: dict[int, Result | None]) -> dict[int, float]:
    return {seed: result["loss"] for seed, result in runs.items() if result and result["status"] == DONE}


def _state(runs: dict[int, Result | None]) -> str:
    """Why a row has no verdict; empty if all its runs are done."""
    if not runs or any(result is None for result in runs.values()):
        return "not run yet"
    bad = [result for result in runs.values() if result and result["status"] != DONE]
    if not bad:
        return ""
    diverged = all(result["status"] == DIVERGED for result in bad)
    what = "diverged" if diverged else "failed"
    return f"{what}, {len(bad)} of {len(runs)} runs: {bad[0]['error']}"


def _unjudged(seeds: int) -> str:
    return "no base to compare with" if seeds > 1 else "needs at least 2 seeds"


def _line(
    row: Row,
    runs: dict[int, Result | None],
    effect: Effect | None,
    rates: dict[str, float],
    is_base: bool,
    metric: str,
) -> Line:
    done = [result for result in runs.values() if result and result["status"] == DONE]
    state = f"left out: {row.left_out}" if row.left_out else _state(runs)
    verdict = state or ("the base" if is_base else effect.verdict if effect else _unjudged(len(runs)))
    factor = rates.get(row.name, 1.0)
    notes = [row.note, f"rate x {factor:g}" if factor != 1.0 else ""]
    variant = VARIANTS.get(row.name)
    return Line(
        row.name,
        row.about or (variant.about if variant else "the base as it is"),
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
