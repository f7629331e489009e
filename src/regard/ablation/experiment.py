"""Run an ablation: tokenise the text, plan the training runs, train the unfinished ones, and compare the results."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regard.ablation import plan
from regard.ablation.parallel import Resources, Runner, Watch
from regard.ablation.plan import Job, Rates, Text
from regard.ablation.report import Report, build_report
from regard.ablation.results import DONE, Results
from regard.ablation.rows import MATCHES, Row, RowBuilder, select_rows
from regard.errors import DataError, SpecError, nearest
from regard.evaluation.validation import metric_for
from regard.files import LOCK, clear, locked
from regard.planner import adamw
from regard.processes import JobError
from regard.recipe.recipe import Recipe, RecipeRequest
from regard.runs.resolve import resolve
from regard.training.checkpoint import read_json, write_json
from regard.variants import variant

WRITTEN = re.compile(r"runs|data|text|cluster|results\.jsonl|steps\.json|(table|ladder)\..+|worker-\d+\.log")
LONG = 10**9  # step limit for a run that is limited by time
PROBE = 8.0  # seconds that a measurement of training speed takes
Request = RecipeRequest | Callable[[], RecipeRequest]


@dataclass(frozen=True)
class Settings:
    """The settings of an ablation: the models to compare, the numbers of seeds and steps, and the metric."""

    rows: str = "all"
    seeds: int = 3
    steps: int | None = None  # None: from the recipe, or chosen according to the corpus size
    seconds: float | None = None  # instead of steps: the training time of a run of the base
    match: str = "none"  # one of MATCHES
    search_rates: bool = False
    metric: str | None = None  # in addition to the loss; None: BLEU, accuracy or perplexity, depending on the task
    max_time: float | None = None
    each: bool = False  # `seconds` is the training time of every model, not only of the base
    base_seeds: int | None = None  # None: three times `seeds`
    texts: bool = False  # store the translations of the validation text
    rates: Rates = field(default_factory=dict)  # known learning rates of rows

    def check(self) -> None:
        """Raise an error if the settings are invalid. This does not read the text."""
        if self.seeds < 1:
            raise SpecError("--seeds", f"must be at least 1, not {self.seeds}")
        if self.steps is not None and self.steps < plan.EARLY:
            raise SpecError("--steps", f"must be at least {plan.EARLY}, not {self.steps}")
        if self.steps is not None and self.seconds is not None:
            raise SpecError("--time", "sets the number of steps, and so does --steps; give one of them")
        if self.search_rates and self.rates:
            raise SpecError("rates", "cannot be combined with search_rates, which searches them; give one of the two")
        if self.match not in MATCHES:
            raise SpecError("--match", f"unknown value {self.match!r}; {nearest(self.match, MATCHES)}")
        select_rows(self.rows)


def run_ablation(
    request: Request,
    out: str | Path,
    settings: Settings = Settings(),
    machine: Resources = Resources(),
    watch: Watch = lambda _: None,
) -> Report:
    """Run or continue an ablation in the folder `out`. If `request` is a function, it is called with `out` locked."""
    names, named = select_rows(settings.rows)
    for name in names:
        variant(name, machine.trust_code, "--rows")
    with open_ablation(request, out, settings, machine, watch) as (text, recipe):
        builder = RowBuilder(recipe, text.data, settings.match, machine.trust_code)
        rows = builder.rows(names, named)
        experiment = Experiment(Path(out), settings, machine, watch, text, recipe, builder.base, rows)
        report = experiment.run()
        report.save(Path(out), experiment.report)
        return report


@contextmanager
def open_ablation(
    request: Request, out: str | Path, settings: Settings, machine: Resources, watch: Watch
) -> Iterator[tuple[Text, Recipe]]:
    """Yield the tokenised text and the base model's recipe. The folder `out` is locked until the `with` block ends."""
    settings.check()
    device = machine.planned_device()  # raises an error for a missing device before anything is written
    folder = Path(out)
    _check_folder(folder)  # before the lock file is written
    with locked(folder, lambda: _check_folder(folder), lambda name: bool(WRITTEN.fullmatch(name))), _runs(folder):
        user_request = request() if callable(request) else request

        def report(sentence: str) -> None:
            watch({"event": "message", "text": sentence})

        if unused := plan.unused(user_request):
            report(unused)
        text = plan.tokenised(user_request, folder / "data", report)
        # Batches are not packed by default, because models that do not support packing would need different batches.
        yield text, resolve(_request(user_request, settings), text.data, device, report, packs=False, attention=True)


def _request(request: RecipeRequest, settings: Settings) -> RecipeRequest:
    """Return the recipe request with the number of steps from the settings, and without early stopping."""
    train = request.train
    steps = settings.steps or (None if settings.seconds is not None else train.steps)
    # AdamW is the default for all rows, because Muon treats a row differently if fewer of its parameters are matrices.
    optimizer = train.optimizer or adamw(request.data.objective)
    train = replace(train, steps=steps, time=settings.seconds, optimizer=optimizer, patience=0, validate_every=1)
    return replace(request, train=train)


def _check_folder(folder: Path) -> None:
    """Raise an error if the folder contains files but no ablation."""
    if folder.exists() and (
        not folder.is_dir() or (any(path.name != LOCK for path in folder.iterdir()) and not (folder / "runs").is_dir())
    ):
        raise DataError(f"{folder} is not the folder of an ablation; choose another one with --out")


@contextmanager
def _runs(folder: Path) -> Iterator[None]:
    """Create the folder `runs`. Remove it again if the `with` block ends before the first training run."""
    runs = folder / "runs"
    new = not runs.exists()
    try:
        runs.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create the folder {runs}: {error.strerror}") from None
    try:
        yield
    finally:
        if new and runs.is_dir() and not any(runs.iterdir()):
            clear(folder, [LOCK])


@dataclass
class Experiment:
    """The training runs of a base model and its modifications on one text. Finished runs are not repeated."""

    folder: Path
    settings: Settings
    machine: Resources
    watch: Watch
    text: Text
    recipe: Recipe
    base: Row
    rows: list[Row]

    def __post_init__(self) -> None:
        settings, objective = self.settings, self.text.data.objective
        self.metric = metric_for(objective, settings.metric, self.recipe.train.decode, self.machine.trust_code)
        self.results = Results(self.folder, self.metric.name, settings.texts)
        self.jobs: list[Job] = []
        names = [row.name for row in (self.base, *self.rows)]
        for name in settings.rates:
            if name not in names:
                raise SpecError("rates", f"{name!r} is not a row of this ablation; {nearest(name, names)}")
        for row in self.rows:
            if row.left_out:
                self.report(f"{row.name} is left out: {row.left_out}")
        self.deadline = None if settings.max_time is None else time.monotonic() + settings.max_time

    def run(self) -> Report:
        """Train all models and return the report that compares them."""
        settings, complete, rates = self.settings, True, dict(self.settings.rates)
        with Runner(self.folder, self.machine) as runner:
            left = self._budgeted(runner)
            if settings.search_rates:
                complete, rates = self._searched(runner, left)
            # A row is not trained until the search for its learning rate is complete.
            ready = [row for row in left if not settings.search_rates or row.name in rates]
            jobs = plan.runs(self.base, ready, settings.seeds, self.recipe, self.text, rates, settings.base_seeds)
            self.jobs = self._stored(jobs)
            if complete:
                complete = self._train(runner, self.jobs, "runs")
        return build_report(self, rates, complete)

    def rates(self) -> dict[str, float]:
        """Search for the best learning rate of every model. Return each as a multiple of the base's learning rate."""
        with Runner(self.folder, self.machine) as runner:
            return self._searched(runner, self._budgeted(runner))[1]

    def _budgeted(self, runner: Runner) -> list[Row]:
        """Set the number of training steps of every row, and return the rows whose models can be trained."""
        settings, steps = self.settings, self.settings.steps
        if settings.seconds is not None:
            steps = self._steps(runner, self.base, settings.seconds)
            if settings.each:
                self.rows = [self._paced(runner, row, settings.seconds) for row in self.rows]
        before = getattr(self.recipe.train.schedule, "warmup", None)
        self.recipe = replace(self.recipe, train=plan.training(self.recipe.train, steps))
        after = getattr(self.recipe.train.schedule, "warmup", None)
        if before != after:
            self.report(f"learning rate warm-up: {after:,} steps, a quarter of all, instead of {before:,}")
        return [row for row in self.rows if row.model is not None]

    def _searched(self, runner: Runner, rows: list[Row]) -> tuple[bool, dict[str, float]]:
        """Search for learning rates. Return whether the search is complete, and the best factor for each row name."""
        searches = self._stored(plan.searches([self.base, *rows], self.recipe, self.text))
        return self._train(runner, searches, "learning rates"), self._rates(searches)

    def _stored(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs, with the hash of an earlier version if that version has finished the same training run."""
        hashes = [next(filter(self.results.finished, (job.hash, *job.former_hashes)), job.hash) for job in jobs]
        return [replace(job, hash=hash_) for job, hash_ in zip(jobs, hashes, strict=True)]

    def _train(self, runner: Runner, jobs: list[Job], what: str) -> bool:
        """Train the jobs that have no result yet. Return True if all jobs have a result now."""
        left = {job.hash: job for job in jobs if not self.results.finished(job.hash)}
        every = {job.hash for job in jobs}
        self.watch({"event": "plan", "what": what, "runs": len(every), "finished": len(every) - len(left)})

        def watch(event: dict[str, Any]) -> None:
            if event["event"] == "done":
                self.results.add(event["result"])
            self.watch(event)

        measured = {"metric": self.settings.metric or self.metric.name, "texts": self.settings.texts}
        return runner.run(left.values(), self.text, measured, watch, self.deadline) if left else True

    def _rates(self, searches: list[Job]) -> dict[str, float]:
        """Return the best learning-rate factor of each row whose search is complete. Failed runs have infinite loss."""
        best: dict[str, tuple[float, float]] = {}
        for job in searches:
            result = self.results.get(job.hash)
            if result is None:
                best[job.row] = (-math.inf, math.nan)  # the search of this row is incomplete
                continue
            loss = result["loss"] if result["status"] == DONE else math.inf
            before = best.get(job.row, (math.inf, 1.0))
            best[job.row] = (loss, job.factor) if loss < before[0] else before
        return {row: factor for row, (_, factor) in best.items() if not math.isnan(factor)}

    def _paced(self, runner: Runner, row: Row, seconds: float) -> Row:
        """Return the row with the number of steps that take `seconds`. A failed row is marked as left out."""
        if row.model is None:
            return row
        try:
            return replace(row, steps=self._steps(runner, row, seconds))
        except DataError as error:
            self.report(f"{row.name} is left out: {error}")
            return Row(row.name, None, left_out=str(error))

    def report(self, sentence: str) -> None:
        """Send a message event to `watch`, which prints it above the progress bars."""
        self.watch({"event": "message", "text": sentence})

    def _steps(self, runner: Runner, row: Row, seconds: float) -> int:
        """Return how many training steps fit into `seconds`. The number is measured, or read from `steps.json`."""
        train = plan.training(self.recipe.train, LONG)
        probe = plan.job(row, 1, replace(self.recipe, train=train), self.text)
        path = self.folder / "steps.json"
        steps: dict[str, int] = read_json(path) if path.exists() else {}
        keys = [f"{hash_} {seconds:g}" for hash_ in (probe.hash, *probe.former_hashes)]
        key = next((key for key in keys if key in steps), keys[0])
        if key not in steps:
            self.report(f"measuring the speed of {self._title(row)}")
            limit = min(PROBE, seconds / 4 if self.settings.each else seconds)
            try:
                speed = runner.speed(probe, self.text, limit, self.watch)
            except JobError as error:
                raise DataError(f"{self._title(row)} cannot be trained here: {error}") from None
            steps[key] = max(plan.EARLY, round(seconds * speed))
            write_json(path, steps)
        self.report(f"{self._title(row)} trains for {steps[key]:,} steps in {seconds:g} s")
        return steps[key]

    def _title(self, row: Row) -> str:
        return "the base" if row is self.base else row.name
