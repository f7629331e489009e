"""An ablation from text to table: prepare once, plan, run what was not run before, compare."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regard.ablation import plan
from regard.ablation.plan import Job, Text
from regard.ablation.report import Report, report
from regard.ablation.results import DONE, Results
from regard.ablation.rows import Match, Row, Rows, chosen
from regard.ablation.runner import Resources, Runner, Watch
from regard.demo.corpus import generate
from regard.errors import DataError, SpecError, nearest
from regard.evaluation.validation import metric_for
from regard.files import LOCK, clear, held, replace_text
from regard.planner import adamw
from regard.processes import JobError
from regard.recipe.recipe import Recipe, RecipeRequest, asked
from regard.runs.resolve import resolve
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import read_json, write_json
from regard.variants import variant

WRITTEN = re.compile(r"runs|data|text|results\.jsonl|steps\.json|(table|ladder)\..+|worker-\d+\.log")
LONG = 10**9  # steps that are never made
PROBE = 8.0  # seconds for which the base's speed is measured
DEMO_PAIRS, DEMO_VALIDATION, DEMO_STEPS = 20_000, 400, 400
SMALL: dict[str, Any] = {
    "d_model": 64,
    "heads": 4,
    "encoder.depth": 2,
    "decoder.depth": 2,
    "encoder.pattern[0].branches[1].d_hidden": 256,
    "decoder.pattern[0].branches[2].d_hidden": 256,
}


@dataclass(frozen=True)
class Settings:
    """What is compared, and how often."""

    rows: str = "all"
    seeds: int = 3
    steps: int | None = None  # None: as the recipe says, or as many as the text is worth
    seconds: float | None = None  # as many steps as the base makes in this time
    match: Match = "none"
    search_rates: bool = False
    metric: str | None = None  # beside the loss; None: BLEU, accuracy or perplexity, as the task is
    max_time: float | None = None
    each: bool = False  # `seconds` are those of every row, each at its own speed
    base_seeds: int | None = None  # None: three times as many as a row has
    texts: bool = False  # what was said in the end is kept
    rates: Mapping[str, float] = field(default_factory=dict)  # factors of rows' learning rates that are known already

    def check(self) -> None:
        """Refuse what cannot be meant, before any text is read."""
        if self.seeds < 1:
            raise SpecError("--seeds", f"must be at least 1, not {self.seeds}")
        if self.steps is not None and self.steps < plan.EARLY:
            raise SpecError("--steps", f"must be at least {plan.EARLY}, not {self.steps}")
        if self.steps is not None and self.seconds is not None:
            raise SpecError("--time", "says how many steps are made, and so does --steps; give one of them")
        if self.search_rates and self.rates:
            raise SpecError("rates", "are known, and are to be searched; give one of rates and search_rates")
        chosen(self.rows)


def demo(text: Path, preset: str | None, variants: Sequence[str], changes: Sequence[str]) -> RecipeRequest:
    """The default: the demo's English and German numbers, dates and times, and a small base of the table's kind."""
    record = {
        "model": {"preset": preset or "narang_base"} | ({} if preset else SMALL),
        "data": {
            "train": [{"kind": "tsv", "path": str(text / "train.tsv")}],
            "valid": [{"kind": "tsv", "path": str(text / "valid.tsv")}],
            "tokenizer": {"kind": "bpe", "vocab": 800},
            "batching": {"kind": "buckets", "tokens": 1000},
        },
        "train": {
            "steps": DEMO_STEPS,
            "optimizer": {"kind": "adamw", "learning_rate": 5e-3},
            "schedule": {"kind": "linear", "warmup": DEMO_STEPS // 8},
            "decode": DEMO_VALIDATION // 2,
        },
    }
    return asked(record, changes, variants)


def write_demo(text: Path) -> None:
    """The demo's corpus in files."""
    if (text / "valid.tsv").exists():
        return
    corpus = generate(DEMO_PAIRS, held_out=DEMO_VALIDATION)
    text.mkdir(parents=True, exist_ok=True)
    for name, examples in (("train", corpus.train), ("valid", corpus.test)):
        lines = "".join(f"{example.source}\t{example.target}\n" for example in examples)
        replace_text(text / f"{name}.tsv", lines)


def ablate(
    wanted: RecipeRequest | Callable[[], RecipeRequest],
    out: str | Path,
    settings: Settings = Settings(),
    machine: Resources = Resources(),
    watch: Watch = lambda _: None,
) -> Report:
    """Run an ablation in the folder `out`, or go on with one, and return its table.

    `wanted` may be a function, which is called once the folder is there.
    """
    names, named = chosen(settings.rows)
    for name in names:
        variant(name, machine.trust_code, "--rows")
    with begun(wanted, out, settings, machine, watch) as (text, recipe):
        rows = Rows(recipe, text.data, settings.match, machine.trust_code)
        planned = rows.rows(names, named)
        experiment = Experiment(Path(out), settings, machine, watch, text, recipe, rows.vanilla, planned)
        found = experiment.run()
        found.save(Path(out), experiment.say)
        return found


@contextmanager
def begun(
    wanted: RecipeRequest | Callable[[], RecipeRequest],
    out: str | Path,
    settings: Settings,
    machine: Resources,
    watch: Watch,
) -> Iterator[tuple[Text, Recipe]]:
    """The text and the base's recipe of an experiment in the folder `out`, which is held while it lasts."""
    settings.check()
    choose_device(machine.device)  # one that is not there is said before anything is made
    folder = Path(out)
    _check_folder(folder)  # nothing, not even a lock, is written to a folder of something else
    with held(folder, lambda: _check_folder(folder), _writes), _runs(folder):
        found = wanted() if callable(wanted) else wanted

        def say(sentence: str) -> None:
            watch({"event": "say", "sentence": sentence})

        if unused := plan.unused(found):
            say(unused)
        text = plan.tokenised(found, folder / "data", say)
        # Not packed unless asked for: rows that cannot be packed would be trained on other batches than the base.
        yield (
            text,
            resolve(
                _asked(found, settings), text.data, choose_device(machine.device), say, packs=False, attention=True
            ),
        )


def _asked(wanted: RecipeRequest, settings: Settings) -> RecipeRequest:
    """What is chosen for a single run is not chosen here: every run is trained to its end."""
    steps = settings.steps or (None if settings.seconds is not None else wanted.train.steps)
    # AdamW for all, unless another is given: Muon would treat a row by how many of its parameters are matrices.
    optimizer = wanted.train.optimizer or adamw(wanted.data.objective)
    train = replace(wanted.train, steps=steps, time=settings.seconds, optimizer=optimizer, patience=0, validate_every=1)
    return replace(wanted, train=train)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than an ablation."""
    if folder.exists() and (
        not folder.is_dir() or (any(path.name != LOCK for path in folder.iterdir()) and not (folder / "runs").is_dir())
    ):
        raise DataError(f"{folder} holds something else than an ablation; choose another folder with --out")


def _writes(name: str) -> bool:
    return WRITTEN.fullmatch(name) is not None


@contextmanager
def _runs(folder: Path) -> Iterator[None]:
    """Make the folder `runs` in a folder that is held. What is refused before the first run leaves nothing."""
    runs = folder / "runs"
    made = not runs.exists()
    try:
        runs.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot make the folder {runs}: {error.strerror}") from None
    try:
        yield
    finally:
        if made and runs.is_dir() and not any(runs.iterdir()):
            clear(folder, [LOCK])


class Experiment:
    """Rows and a base on one text: makes the runs that were not made before, and compares."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        machine: Resources,
        watch: Watch,
        text: Text,
        recipe: Recipe,
        base: Row,
        rows: list[Row],
    ) -> None:
        self.folder, self.settings, self.machine, self.watch = folder, settings, machine, watch
        self.text, self.recipe, self.base, self.rows = text, recipe, base, rows
        self.metric = metric_for(text.data.objective, settings.metric, recipe.train.decode, machine.trust_code)
        self.results = Results(folder, self.metric.name, settings.texts)
        self.jobs: list[Job] = []
        names = [row.name for row in (base, *rows)]
        for name in settings.rates:
            if name not in names:
                raise SpecError("rates", f"{name!r} is no row here; {nearest(name, names)}")
        for row in rows:
            if row.left_out:
                self.say(f"{row.name} is left out: {row.left_out}")
        self.deadline = None if settings.max_time is None else time.monotonic() + settings.max_time

    def run(self) -> Report:
        """The table of all rows."""
        settings, complete, rates = self.settings, True, dict(self.settings.rates)
        with Runner(self.folder, self.machine) as runner:
            left = self._budgeted(runner)
            if settings.search_rates:
                complete, rates = self._searched(runner, left)
            # Without all searches done, rates may still change: only the rows whose search is whole go on.
            ready = [row for row in left if not settings.search_rates or row.name in rates]
            many = settings.base_seeds
            self.jobs = plan.runs(self.base, ready, settings.seeds, self.recipe, self.text, rates, many)
            if complete:
                complete = self._make(runner, self.jobs, "runs")
        seeds = settings.seeds
        found = report(self.recipe, self.text.data, self.base, self.rows, self.jobs, self.results, seeds, rates)
        found.complete = complete
        return found

    def rates(self) -> dict[str, float]:
        """The factor of the learning rate at which each row does best, and nothing more."""
        with Runner(self.folder, self.machine) as runner:
            return self._searched(runner, self._budgeted(runner))[1]

    def _budgeted(self, runner: Runner) -> list[Row]:
        """The rows that can be trained, after the steps that they and the base are worth have been settled."""
        settings, steps = self.settings, self.settings.steps
        if settings.seconds is not None:
            steps = self._steps(runner, self.base, settings.seconds)
            if settings.each:
                self.rows = [self._paced(runner, row, settings.seconds) for row in self.rows]
        before = getattr(self.recipe.train.schedule, "warmup", None)
        self.recipe = replace(self.recipe, train=plan.training(self.recipe.train, steps))
        after = getattr(self.recipe.train.schedule, "warmup", None)
        if before != after:
            self.say(f"warm-up: {after:,} steps, a quarter of all, instead of {before:,}")
        return [row for row in self.rows if row.model is not None]

    def _searched(self, runner: Runner, rows: list[Row]) -> tuple[bool, dict[str, float]]:
        """Whether the search for rates is whole, and what it found."""
        searches = plan.searches([self.base, *rows], self.recipe, self.text)
        return self._make(runner, searches, "learning rates"), self._rates(searches)

    def _make(self, runner: Runner, jobs: list[Job], what: str) -> bool:
        """Make the runs that were not made before; whether all are made."""
        left = {job.hash: job for job in jobs if not self.results.finished(job.hash)}
        every = {job.hash for job in jobs}
        self.watch({"event": "plan", "what": what, "runs": len(every), "made": len(every) - len(left)})

        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "done":
                self.results.add(event["result"])
            self.watch(event)

        measured = {"metric": self.settings.metric or self.metric.name, "texts": self.settings.texts}
        return runner.run(left.values(), self.text, measured, watch, self.deadline) if left else True

    def _rates(self, searches: list[Job]) -> dict[str, float]:
        """The factor of the learning rate at which each row did best; a run that failed did worst."""
        best: dict[str, tuple[float, float]] = {}
        for job in searches:
            result = self.results.get(job.hash)
            if result is None:
                best[job.row] = (-math.inf, math.nan)  # not known yet
                continue
            loss = result["loss"] if result["status"] == DONE else math.inf
            before = best.get(job.row, (math.inf, 1.0))
            best[job.row] = (loss, job.factor) if loss < before[0] else before
        return {row: factor for row, (_, factor) in best.items() if not math.isnan(factor)}

    def _paced(self, runner: Runner, row: Row, seconds: float) -> Row:
        """A row with the steps that it makes in this time; left out if it cannot be trained at all."""
        if row.model is None:
            return row
        try:
            return replace(row, steps=self._steps(runner, row, seconds))
        except DataError as error:
            self.say(f"{row.name} is left out: {error}")
            return Row(row.name, None, left_out=str(error))

    def say(self, sentence: str) -> None:
        """Show a sentence."""
        self.watch({"event": "say", "sentence": sentence})

    def _steps(self, runner: Runner, row: Row, seconds: float) -> int:
        """As many steps as a row makes in this time: measured once, then the same in all sessions."""
        train = plan.training(self.recipe.train, LONG)
        probe = plan.job(row, 1, replace(self.recipe, train=train), self.text)
        known, path = probe.hash, self.folder / "steps.json"
        table: dict[str, Any] = read_json(path) if path.exists() else {}
        if f"{known} {seconds:g}" not in table:
            self.say(f"measuring the speed of {self._called(row)}")
            limit = min(PROBE, seconds / 4 if self.settings.each else seconds)
            try:
                speed = runner.speed(probe, self.text, limit, self.watch)
            except JobError as error:
                raise DataError(f"{self._called(row)} cannot be trained here: {error}") from None
            table[f"{known} {seconds:g}"] = max(plan.EARLY, round(seconds * speed))
            write_json(path, table)
        steps = table[f"{known} {seconds:g}"]
        self.say(f"steps: {steps:,}, what {self._called(row)} makes in {seconds:g} s")
        return steps

    def _called(self, row: Row) -> str:
        return "the base" if row is self.base else row.name
