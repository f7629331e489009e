"""The ladder: a fair comparison of the Transformer, its predecessors, and Transformers that lack one component.

Every model of the ladder (a "rung") has as many parameters as the full Transformer, because the model width is
adjusted. All are trained on the same batches in the same order, for the same number of steps or the same time. A ladder
is run like an ablation, but the models may have different architectures.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from regard.ablation import page, tables
from regard.ablation.experiment import Experiment, Request, Settings, open_ablation
from regard.ablation.parallel import Resources, Watch
from regard.ablation.path_length import path_lengths
from regard.ablation.report import Line, Mean, Report, mean, warnings
from regard.ablation.results import DONE, Result
from regard.ablation.rows import Row, RowBuilder
from regard.ablation.sizes import resized
from regard.ablation.tables import number, quantity
from regard.errors import RegardError, SpecError, nearest
from regard.evaluation.lengths import Bucket, buckets
from regard.evaluation.metrics import METRICS, metric_class, metric_heading
from regard.evaluation.significance import Interval, intervals
from regard.models.base import ModelSpec
from regard.presets import preset
from regard.training.checkpoint import finite
from regard.tree import hints
from regard.variants import VARIANTS, apply

FULL = "transformer"  # the last model of the ladder, which is the base
# Models of other families and their presets. LESS contains variants of the full Transformer.
BEFORE = {"rnn": "rnn", "rnn_attention": "rnn_attention", "convs2s": "convs2s", "bytenet": "bytenet_small"}
VERDICTS = {"the base": "the full Transformer", "no base to compare with": "no full Transformer to compare with"}
ABOUT = {
    "rnn": "LSTMs, 2 + 2 layers, bidirectional encoder; the decoder receives only its last state",
    "rnn_attention": "the same with attention to all states of the encoder",
    "convs2s": "gated convolutions, 4 + 3 layers, attention in every layer of the decoder",
    "bytenet": "dilated convolutions, 10 + 10 blocks, decoder stacked on the encoder, no attention",
    FULL: "the full Transformer",
}
LESS = ("no_scaling", "one_head", "no_positions", "no_residual", "no_norm", "no_feed_forward")
RUNGS = (*BEFORE, *LESS, FULL)
BUCKETS = 4
QUICK_SECONDS, QUICK_SEEDS = 25.0, 2


def select_rungs(rungs: str) -> tuple[list[str], set[str]]:
    """Return the models that `rungs` selects, in ladder order, and the set of those that `rungs` lists by name.

    `rungs` is `all` or comma-separated names. The full Transformer, always the last model, is not returned.
    """
    words = [word.strip() for word in rungs.split(",")]
    for word in words:
        if word not in RUNGS and word != "all":
            raise SpecError("--rungs", f"unknown rung {word!r}; {nearest(word, (*RUNGS, 'all'))}")
    names = [name for name in RUNGS if name != FULL and ("all" in words or name in words)]
    if not names:
        raise SpecError("--rungs", "names only the full Transformer, which every ladder includes; add another rung")
    return names, set(words) - {"all", FULL}


def ladder(
    request: Request,
    out: str | Path,
    rungs: str = "all",
    settings: Settings = Settings(),
    machine: Resources = Resources(),
    watch: Watch = lambda _: None,
) -> "Ladder":
    """Train all models of a ladder, write the results to the folder `out`, and return them. Skip finished runs.

    `settings.rows` and `settings.match` have no effect. `settings.seconds` is the training time per model.
    """
    with _open_ladder(request, out, rungs, settings, machine, watch) as experiment:
        result = _build_ladder(experiment, experiment.run())
        result.save(Path(out), experiment.report)
        return result


def rates(
    request: Request,
    out: str | Path,
    rungs: str = "all",
    settings: Settings = Settings(),
    machine: Resources = Resources(),
    watch: Watch = lambda _: None,
) -> dict[str, float]:
    """Search for the best learning rate of every model of a ladder. Return the factors for `Settings.rates`."""
    with _open_ladder(request, out, rungs, settings, machine, watch) as experiment:
        return experiment.rates()


@contextmanager
def _open_ladder(
    request: Request, out: str | Path, rungs: str, settings: Settings, machine: Resources, watch: Watch
) -> Iterator[Experiment]:
    names, named = select_rungs(rungs)
    if settings.metric is not None and metric_class(settings.metric, machine.trust_code, "--metric").needs != "text":
        of_text = [name for name, metric in METRICS.items() if metric.needs == "text"]
        raise SpecError(
            "--metric", f"{settings.metric!r} is not a metric of translations; {nearest(settings.metric, of_text)}"
        )
    settings = replace(settings, each=True, base_seeds=settings.seeds, texts=True)
    with open_ablation(request, out, settings, machine, watch) as (text, recipe):
        if text.data.objective.model != "sequence_to_sequence":
            raise SpecError("data", "a ladder trains on pairs of texts; give --source and --target, or --tsv")
        if not recipe.train.decode:
            raise SpecError("train.decode", "is 0, but a ladder compares translations; leave it out")
        if recipe.data.batching is not None and recipe.data.batching.packed:
            raise SpecError("data.batching", "a recurrent model cannot read packed rows; use kind = 'buckets'")
        builder = RowBuilder(recipe, text.data, "none")
        base = replace(builder.base, name=FULL)
        rows = [_row(builder, base, name, name in named) for name in names]
        yield Experiment(Path(out), settings, machine, watch, text, recipe, base, rows)


def _row(builder: RowBuilder, base: Row, name: str, named: bool) -> Row:
    """Return the table row of the model `name`, resized to as many parameters as the base.

    If the model does not fit the task, the row is marked as left out. If `named` is true, an error is raised instead.
    """
    assert base.model is not None
    try:
        model = apply(name, base.model) if name in LESS else family(name, base.model)
        model = builder.fitted(model, base.model if name in LESS else model)
        sized: Any
        sized, factor = resized(model, base.parameters)
        note = "" if factor == 1.0 else f"model width set to {sized.d_model}"
        return builder.with_cost(Row(name, sized, note=note))
    except RegardError as error:
        if named:
            raise SpecError("--rungs", f"{name!r} does not apply here: {error}") from None
        return Row(name, None, left_out=str(error))


def family(name: str, base: ModelSpec) -> ModelSpec:
    """Return a model of another architecture with the base's dropout, label smoothing and sharing of embedding tables.

    Embedding tables contain most parameters of a small model. If models shared tables differently, equal totals would
    leave some models fewer parameters for layers.
    """
    model: Any = preset(BEFORE[name])
    changes: dict[str, Any] = {
        name: getattr(base, name) for name in hints(type(base)) if name in ("dropout", "sharing")
    }
    label_smoothing = getattr(getattr(base, "head", None), "label_smoothing", None)
    if label_smoothing is not None:
        changes["head"] = replace(model.head, label_smoothing=label_smoothing)
    if getattr(changes.get("sharing"), "input_output", False):
        changes["output_table"] = None
    return replace(model, **changes)


@dataclass(frozen=True)
class Rung:
    """One model of the ladder with its results: a row of the table."""

    name: str
    about: str
    parameters: int | None
    metric: float | None  # mean over seeds
    low: float | None  # 95 % interval of the mean, from resamples
    high: float | None
    sd: float | None  # over seeds
    loss: Mean | None
    tokens_per_second: float | None
    path_length: int | None
    path: str
    shortest_path: int | None
    shortest: str
    steps: int | None
    seconds: float | None  # mean training time per run
    buckets: list[Interval]
    curve: list[tuple[int, float]]
    effect: dict[str, Any] | None  # difference in loss from the full Transformer
    verdict: str
    note: str

    def json(self) -> dict[str, Any]:
        return finite(asdict(self))


@dataclass
class Ladder:
    """The results of all models of the ladder, the full Transformer last, and the settings of the ladder."""

    rungs: list[Rung]
    buckets: list[Bucket]
    metric: str
    seeds: int
    steps: int | None  # steps per model; None if all models have the same training time
    seconds: float | None
    length: int  # the n in path lengths
    devices: list[str]
    complete: bool
    facts: page.Facts = ()  # data, model and command, in words

    @property
    def title(self) -> str:
        """The name of the metric, such as `BLEU`."""
        return metric_heading(self.metric)

    def json(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("complete", "metric", "seeds", "steps", "seconds")}
        return same | {
            "sequence_length": self.length,
            "devices": self.devices,
            "buckets": [
                {"name": bucket.name, "least": bucket.least, "most": bucket.most, "lines": len(bucket.lines)}
                for bucket in self.buckets
            ],
            "rows": [rung.json() for rung in self.rungs],
        }

    def sentences(self) -> list[str]:
        """Return the sentences that explain the table."""
        budget = f"{self.steps:,} steps" if self.seconds is None else f"{self.seconds:g} seconds of training"
        return [
            f"{self.seeds} seed{'s' * (self.seeds > 1)} and {budget} per rung, the same batches in the same order, "
            f"parameters within 5% of the full Transformer's. {self.title} of greedy translations of held-out text: "
            "mean of the seeds, and 95% interval of 1,000 resamples of lines and seeds. Losses are in nats per token.",
            "Path: the largest number of layers or recurrent steps that must run one after the other between source "
            f"and last output, for n = {self.length} source and target tokens; in brackets, the smallest number "
            "between the first source token and the last output.",
            *warnings(self.devices, self.complete),
        ]

    def cells(self) -> list[list[str]]:
        """Return the cells of the table as text. The first row contains the headings."""
        head = ["rung", "parameters", self.title, "95%", "loss", "tokens/s", "path", "steps", "seconds", "verdict"]
        return [head, *(_cells(rung) for rung in self.rungs)]

    def by_length(self) -> list[list[str]]:
        """Return the table of the metric by source length as text cells. The first row contains the headings."""
        head = ["rung", *(f"{bucket.name} tokens ({len(bucket.lines)} lines)" for bucket in self.buckets)]
        return [head, *([rung.name, *map(_score, rung.buckets)] for rung in self.rungs if rung.buckets)]

    def table(self, narrow: bool = False) -> Table:
        """Return the table for a terminal. `narrow` leaves out the columns for steps and seconds."""
        head, *rows = self.cells()
        left_out: set[str] = set()
        if narrow:
            left_out, head[1] = {"steps", "seconds"}, "params"
            for rung, row in zip(self.rungs, rows, strict=True):
                row[1] = quantity(rung.parameters)
        columns = [i for i, heading in enumerate(head) if heading not in left_out]
        cells = [[row[i] for i in columns] for row in (head, *rows)]
        last = len(columns) - 1
        return tables.terminal(cells, (0, last), range(1, last + 1) if narrow else (last,), narrow)

    def plot(self, width: int = 60) -> str:
        """Return a bar chart of the metric as text."""
        most = max((rung.metric or 0.0 for rung in self.rungs), default=0.0) or 1.0
        longest = max((len(rung.name) for rung in self.rungs), default=0)
        return "\n".join(
            f"{rung.name:<{longest}}  {bar((rung.metric or 0.0) / most, width)} {number(rung.metric, '.1f')}"
            for rung in self.rungs
        )

    def length_table(self) -> Table:
        """Return the table of the metric by source length, for a terminal."""
        return tables.terminal(self.by_length(), left=(0,))

    def markdown(self) -> str:
        cells = self.cells()
        lines = ["# The ladder", "", *tables.markdown(cells, left=(0, len(cells[0]) - 1))]
        lines += ["", f"## {self.title} by source length", "", *tables.markdown(self.by_length(), left=(0,))]
        return "\n".join([*lines, "", *(f"{sentence}\n" for sentence in self.sentences())])

    def save(self, folder: Path, report: Callable[[str], None] = lambda _: None) -> None:
        """Write ladder.json, ladder.md and ladder.html."""
        record, parts = self.json(), (self.title, self.cells(), self.by_length(), self.sentences(), self.facts)
        page.save(folder / "ladder", record, self.markdown(), lambda: page.ladder(record, *parts), report)


def bar(share: float, width: int = 20) -> str:
    """Return a text bar that is `share` times `width` characters long, rounded to eighths of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _score(score: Interval) -> str:
    return "" if math.isnan(score.value) else f"{score.value:.1f} [{score.low:.1f}, {score.high:.1f}]"


def _cells(rung: Rung) -> list[str]:
    length = str(rung.path_length)
    formula = length if rung.path == length else f"{rung.path} = {length}"
    return [
        rung.name,
        number(rung.parameters, ","),
        number(rung.metric, ".1f"),
        "" if rung.low is None else f"[{rung.low:.1f}, {rung.high:.1f}]",
        number(rung.loss, ".3f"),
        quantity(rung.tokens_per_second),
        "" if rung.path_length is None else f"{formula} [{rung.shortest}]",
        number(rung.steps, ","),
        number(rung.seconds, ".0f"),
        rung.verdict + (f" ({rung.note})" if rung.note else ""),
    ]


def _build_ladder(experiment: Experiment, report: Report) -> Ladder:
    text, train, settings = experiment.text, experiment.recipe.train, experiment.settings
    records = text.data.valid_texts[: train.decode]
    tokenizer = text.data.tokenizers["source"]
    groups = buckets([len(ids) for ids in tokenizer.encode_batch([record[0] for record in records])], BUCKETS)
    references = [record[1] for record in records]
    metric = experiment.metric.with_tokenizer(train.bleu_tokenize)
    lines = {line.name: line for line in report.lines}
    runs: dict[str, list[Result]] = {}
    for job in experiment.jobs:
        result = experiment.results.get(job.hash)
        if result is not None and result["status"] == DONE:
            runs.setdefault(job.row, []).append(result)

    def rung(row: Row) -> Rung:
        done = runs.get(row.name, [])
        outputs = [result["said"] for result in done]
        subsets = [range(len(references)), *(group.lines for group in groups)]
        scores = intervals(outputs, references, subsets, metric) if done else []
        return _rung(row, lines[row.name], done, scores, report.length)

    return Ladder(
        [rung(row) for row in (*experiment.rows, experiment.base)],
        groups,
        report.metric,
        settings.seeds,
        None if settings.seconds is not None else report.steps,
        settings.seconds,
        report.length,
        report.devices,
        report.complete,
        report.facts,
    )


def _rung(row: Row, line: Line, done: Sequence[Result], scores: Sequence[Interval], length: int) -> Rung:
    """Return a model's table row, with path lengths for `length` tokens.

    `scores` contains the score for all texts, then the score for each bucket of source lengths.
    """
    total: dict[str, Any] = asdict(scores[0]) if scores else {}
    longest, shortest = (None, None) if row.model is None else path_lengths(row.model)
    return Rung(
        name=row.name,
        about=about(row.name),
        parameters=line.parameters,
        metric=total.get("value"),
        low=total.get("low"),
        high=total.get("high"),
        sd=None if line.metric is None else line.metric.sd,
        loss=line.final,
        tokens_per_second=mean([result["tokens_per_second"] for result in done]) if done else None,
        path_length=None if longest is None else longest.at(length),
        path="" if longest is None else str(longest),
        shortest_path=None if shortest is None else shortest.at(length),
        shortest="" if shortest is None else str(shortest),
        steps=done[0]["steps"] if done else None,
        seconds=mean([result["training_seconds"] for result in done]) if done else None,
        buckets=list(scores[1:]),
        curve=line.curve,
        effect=None if line.effect is None else asdict(line.effect),
        verdict=VERDICTS.get(line.verdict, line.verdict),
        note=line.note,
    )


def about(name: str) -> str:
    """Return the one-line description of the model `name` for tables."""
    return VARIANTS[name].about if name in LESS else ABOUT[name]
