"""The ladder: what the Transformer replaced, and the Transformer less one of its parts, under one budget.

Every rung has the full Transformer's parameters (its width is solved for), the same batches in the same order, and the
same steps or the same seconds of training. It is an ablation whose rows may be of other families.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from regard.ablation import page
from regard.ablation.experiment import Experiment, Settings, begun
from regard.ablation.path import path_lengths
from regard.ablation.report import Line, Mean, Report, mean, plain, quantity
from regard.ablation.results import DONE, Result
from regard.ablation.rows import Row, Rows
from regard.ablation.runner import Resources, Watch
from regard.ablation.sizes import resized
from regard.errors import RegardError, SpecError, nearest
from regard.evaluation.lengths import Bucket, buckets
from regard.evaluation.metric import Metric
from regard.evaluation.metrics import METRICS, metric_class, metric_heading
from regard.evaluation.significance import Interval, intervals
from regard.files import replace_text
from regard.models.base import ModelSpec
from regard.presets import preset
from regard.recipe.recipe import RecipeRequest
from regard.training.checkpoint import write_json
from regard.tree import hints
from regard.variants import VARIANTS, apply

FULL = "transformer"  # the last rung: the base
# What came before, and of which preset it is; then the Transformer without one of its parts, as variants.
BEFORE = {"rnn": "rnn", "rnn_attention": "rnn_attention", "convs2s": "convs2s", "bytenet": "bytenet_small"}
VERDICTS = {"the base": "the full Transformer", "no base to compare with": "no full Transformer to compare with"}
ABOUT = {
    "rnn": "LSTMs, 2 + 2 layers, the encoder both ways: the decoder knows the source by its last state alone",
    "rnn_attention": "the same, and the decoder looks at all states of the encoder",
    "convs2s": "gated convolutions, 4 + 3 layers, attention in every layer of the decoder",
    "bytenet": "dilated convolutions, 10 + 10 blocks, the decoder stacked on the encoder; no attention",
    FULL: "the whole of it",
}
LESS = ("no_scaling", "one_head", "no_positions", "no_residual", "no_norm", "no_feed_forward")
RUNGS = (*BEFORE, *LESS, FULL)
BUCKETS = 4
QUICK_SECONDS, QUICK_SEEDS = 25.0, 2


def chosen(wanted: str) -> tuple[list[str], set[str]]:
    """The rungs of `all` or of names between commas, from the bottom; and which of them were asked for by name.

    The full Transformer is the last of every ladder.
    """
    words = [word.strip() for word in wanted.split(",")]
    for word in words:
        if word not in RUNGS and word != "all":
            raise SpecError("--rungs", f"unknown rung {word!r}; {nearest(word, (*RUNGS, 'all'))}")
    names = [name for name in RUNGS if name != FULL and ("all" in words or name in words)]
    if not names:
        raise SpecError("--rungs", "names only the full Transformer, which every ladder has; name what leads to it")
    return names, set(words) - {"all", FULL}


def ladder(
    wanted: RecipeRequest | Callable[[], RecipeRequest],
    out: str | Path,
    rungs: str = "all",
    settings: Settings = Settings(),
    machine: Resources = Resources(),
    watch: Watch = lambda _: None,
) -> "Ladder":
    """Climb the ladder in the folder `out`, or go on climbing it, and return it.

    Of the settings, `rows` and `match` are the ladder's own; `seconds` are those of every rung.
    """
    with _planned(wanted, out, rungs, settings, machine, watch) as experiment:
        found = _climbed(experiment, experiment.run())
        found.save(Path(out), experiment.say)
        return found


def rates(
    wanted: RecipeRequest | Callable[[], RecipeRequest],
    out: str | Path,
    rungs: str = "all",
    settings: Settings = Settings(),
    machine: Resources = Resources(),
    watch: Watch = lambda _: None,
) -> dict[str, float]:
    """The factor of the learning rate at which each rung does best: to be found on one text and used on another."""
    with _planned(wanted, out, rungs, settings, machine, watch) as experiment:
        return experiment.rates()


@contextmanager
def _planned(
    wanted: RecipeRequest | Callable[[], RecipeRequest],
    out: str | Path,
    rungs: str,
    settings: Settings,
    machine: Resources,
    watch: Watch,
) -> Iterator[Experiment]:
    """The experiment of a ladder, in its folder."""
    names, named = chosen(rungs)
    if settings.metric is not None and metric_class(settings.metric, machine.trust_code, "--metric").needs != "text":
        of_text = [name for name, metric in METRICS.items() if metric.needs == "text"]
        raise SpecError("--metric", f"{settings.metric!r} cannot be resampled; {nearest(settings.metric, of_text)}")
    settings = replace(settings, each=True, base_seeds=settings.seeds, texts=True)
    with begun(wanted, out, settings, machine, watch) as (text, recipe):
        if text.data.objective.model != "sequence_to_sequence":
            raise SpecError("data", "a ladder is climbed with pairs of texts; give --source and --target, or --tsv")
        if not recipe.train.decode:
            raise SpecError("train.decode", "is 0, but a ladder compares translations; leave it out")
        if recipe.data.batching is not None and recipe.data.batching.packed:
            raise SpecError("data.batching", "a recurrent model takes no packed rows; use kind = 'buckets'")
        rows = Rows(recipe, text.data, "none")
        base = replace(rows.vanilla, name=FULL)
        planned = [_rung(rows, base, name, name in named) for name in names]
        yield Experiment(Path(out), settings, machine, watch, text, recipe, base, planned)


def _rung(rows: Rows, base: Row, name: str, named: bool) -> Row:
    """A rung of the base's size; left out with the reason if it does not apply, unless it was asked for by name."""
    assert base.model is not None
    try:
        if name in LESS:
            model = rows.fitted(apply(name, base.model), base.model)
        else:
            before = family(name, base.model)
            model = rows.fitted(before, before)
        sized, factor = resized(model, base.parameters)
        note = "" if factor == 1.0 else f"width x {factor:.2f}" if name in LESS else f"width {_width(sized)}"
        return rows.measured(Row(name, sized, note=note))
    except RegardError as error:
        if named:
            raise SpecError("--rungs", f"{name!r} does not apply here: {error}") from None
        return Row(name, None, left_out=str(error))


def _width(model: Any) -> int:
    return model.d_model


def family(name: str, base: ModelSpec) -> ModelSpec:
    """Another family's model with what is the base's to say: dropout, smoothing, and which tables are one.

    Tables are most of a small model: were they not shared alike, equal parameters would leave one of the two the less
    to think with.
    """
    found: Any = preset(BEFORE[name])
    changes: dict[str, Any] = {}
    for field in ("dropout", "sharing"):
        if field in hints(type(base)):
            changes[field] = getattr(base, field)
    label_smoothing = getattr(getattr(base, "head", None), "label_smoothing", None)
    if label_smoothing is not None:
        changes["head"] = replace(found.head, label_smoothing=label_smoothing)
    if getattr(changes.get("sharing"), "input_output", False):
        changes["output_table"] = None  # there is none of its own
    return replace(found, **changes)


@dataclass(frozen=True)
class Rung:
    """One line of the ladder."""

    name: str
    about: str
    parameters: int | None
    metric: float | None  # mean of the seeds
    low: float | None  # 95 % of the resampled means
    high: float | None
    sd: float | None  # over seeds
    loss: Mean | None
    tokens_per_second: float | None
    path_length: int | None
    path: str
    shortest_path: int | None
    shortest: str
    steps: int | None
    seconds: float | None  # of training, a run
    buckets: list[Interval]
    curve: list[tuple[int, float]]
    effect: dict[str, Any] | None  # on the loss, against the full Transformer
    verdict: str
    note: str

    def json(self) -> dict[str, Any]:
        """As JSON; a number that is not finite is null."""
        return plain(asdict(self))


@dataclass
class Ladder:
    """All rungs, from the bottom, and what holds for all of them."""

    rungs: list[Rung]
    buckets: list[Bucket]
    metric: str
    seeds: int
    steps: int | None  # of every rung; None where every rung has the same seconds
    seconds: float | None
    length: int  # n of the path lengths
    devices: list[str]
    complete: bool
    facts: page.Facts = ()  # data, model and command, in words

    @property
    def title(self) -> str:
        """`BLEU`."""
        return metric_heading(self.metric)

    def json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "complete": self.complete,
            "metric": self.metric,
            "seeds": self.seeds,
            "steps": self.steps,
            "seconds": self.seconds,
            "sequence_length": self.length,
            "devices": self.devices,
            "buckets": [
                {"name": one.name, "least": one.least, "most": one.most, "lines": len(one.lines)}
                for one in self.buckets
            ],
            "rows": [rung.json() for rung in self.rungs],
        }

    def sentences(self) -> list[str]:
        """What one must know to read it."""
        budget = f"{self.steps:,} steps" if self.seconds is None else f"{self.seconds:g} seconds of training"
        said = [
            f"{self.seeds} seed{'s' * (self.seeds > 1)} and {budget} a rung, the same batches in the same order, "
            f"parameters within 5% of the full Transformer's. {self.title} of greedy translations of held-out text, "
            "mean of the seeds, with the interval of 95% of 1,000 resamples of lines and seeds; loss in nats a token.",
            "Path: the longest chain of layers or recurrent steps, none of which can begin before the one before it, "
            f"from the source to the last output, for n = {self.length} tokens on either side; in brackets the "
            "shortest from the first source token, which a signal has to go through.",
        ]
        if len(self.devices) > 1:
            said.append(f"Run on different devices ({', '.join(self.devices)}): compare no speeds.")
        if not self.complete:
            said.append("Not all runs are made yet; the same command goes on.")
        return said

    def cells(self) -> list[list[str]]:
        """The table as text, its heading first."""
        head = ["rung", "parameters", self.title, "95%", "loss", "tokens/s", "path", "steps", "seconds", "verdict"]
        return [head, *(_cells(rung) for rung in self.rungs)]

    def by_length(self) -> list[list[str]]:
        """The metric by source length as text, its heading first."""
        head = ["rung", *(f"{one.name} tokens ({len(one.lines)} lines)" for one in self.buckets)]
        return [head, *([rung.name, *(_score(one) for one in rung.buckets)] for rung in self.rungs if rung.buckets)]

    def table(self, narrow: bool = False) -> Table:
        """For a terminal; `narrow` leaves out what the budget was made of."""
        head, *rows = self.cells()
        left_out: set[str] = set()
        if narrow:
            left_out, head[1] = {"steps", "seconds"}, "params"
            for rung, row in zip(self.rungs, rows, strict=True):
                row[1] = "" if rung.parameters is None else quantity(rung.parameters)
        kept = [i for i, heading in enumerate(head) if heading not in left_out]
        found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0) if narrow else (0, 1))
        for i in kept:
            last = i == len(head) - 1
            found.add_column(
                head[i], justify="right" if i and not last else "left", no_wrap=not i or not (last or narrow)
            )
        for row in rows:
            found.add_row(*(row[i].replace("[", "\\[") for i in kept))
        return found

    def plot(self, width: int = 60) -> str:
        """A bar for every rung."""
        most = max((rung.metric or 0.0 for rung in self.rungs), default=0.0) or 1.0
        wide = max((len(rung.name) for rung in self.rungs), default=0)
        return "\n".join(
            f"{rung.name:<{wide}}  {bar((rung.metric or 0.0) / most, width)} "
            + ("" if rung.metric is None else f"{rung.metric:.1f}")
            for rung in self.rungs
        )

    def length_table(self) -> Table:
        """The metric by source length, for a terminal."""
        head, *rows = self.by_length()
        found = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i, heading in enumerate(head):
            found.add_column(heading, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            found.add_row(*(cell.replace("[", "\\[") for cell in row))
        return found

    def markdown(self) -> str:
        """As a Markdown page."""
        lines = ["# The ladder", ""]
        for title, (head, *rows) in ((None, self.cells()), (f"{self.title} by source length", self.by_length())):
            if title is not None:
                lines += ["", f"## {title}", ""]
            right = ["---", *["--:"] * (len(head) - (2 if title is None else 1)), *["---"] * (title is None)]
            lines += [
                "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, right, *rows)
            ]
        return "\n".join([*lines, "", *(f"{sentence}\n" for sentence in self.sentences())])

    def save(self, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        """Leave ladder.json and ladder.md in a folder, then ladder.html; what is wrong with the page is said."""
        write_json(folder / "ladder.json", self.json())
        replace_text(folder / "ladder.md", self.markdown())
        parts = (self.title, self.cells(), self.by_length(), self.sentences(), self.facts)
        page.save(folder / "ladder.html", lambda: page.ladder(self.json(), *parts), say)


def bar(share: float, width: int = 20) -> str:
    """A bar of eighths of a character."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def _score(one: Interval) -> str:
    return "" if math.isnan(one.value) else f"{one.value:.1f} [{one.low:.1f}, {one.high:.1f}]"


def _cells(rung: Rung) -> list[str]:
    def shown(value: Any, how: str) -> str:
        return "" if value is None else format(value, how)

    path = "" if rung.path_length is None else f"{rung.path} = {rung.path_length} [{rung.shortest}]"
    if rung.path == str(rung.path_length):
        path = f"{rung.path_length} [{rung.shortest}]"
    return [
        rung.name,
        shown(rung.parameters, ","),
        shown(rung.metric, ".1f"),
        "" if rung.low is None else f"[{rung.low:.1f}, {rung.high:.1f}]",
        "" if rung.loss is None else rung.loss.text(3),
        "" if rung.tokens_per_second is None else quantity(rung.tokens_per_second),
        path,
        shown(rung.steps, ","),
        shown(rung.seconds, ".0f"),
        rung.verdict + (f" ({rung.note})" if rung.note else ""),
    ]


def _climbed(experiment: Experiment, report: Report) -> Ladder:
    text, recipe = experiment.text, experiment.recipe
    records = text.data.valid_texts[: recipe.train.decode]
    tokenizer = text.data.tokenizers["source"]
    groups = buckets([len(ids) for ids in tokenizer.encode_batch([record[0] for record in records])], BUCKETS)
    lines = {line.name: line for line in report.lines}
    runs: dict[str, list[Result]] = {}
    for job in experiment.jobs:
        result = experiment.results.get(job.hash)
        if result is not None and result["status"] == DONE:
            runs.setdefault(job.row, []).append(result)
    references = [record[1] for record in records]

    metric = experiment.metric.with_tokenizer(recipe.train.bleu_tokenize)

    def rung(row: Row) -> Rung:
        return _measured(row, lines[row.name], runs.get(row.name, []), references, groups, report, metric)

    settings = experiment.settings
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


def _measured(
    row: Row,
    line: Line,
    done: Sequence[Result],
    references: Sequence[str],
    groups: Sequence[Bucket],
    report: Report,
    metric: Metric,
) -> Rung:
    whole: Interval | None = None
    inside: list[Interval] = []
    if done:
        everything = [range(len(references)), *(one.lines for one in groups)]
        whole, *inside = intervals([one["said"] for one in done], references, everything, metric)
    longest, shortest = (None, None) if row.model is None else path_lengths(row.model)
    effect = None if line.effect is None else asdict(line.effect)
    return Rung(
        row.name,
        about(row.name),
        line.parameters,
        None if whole is None else whole.value,
        None if whole is None else whole.low,
        None if whole is None else whole.high,
        None if line.metric is None else line.metric.sd,
        line.final,
        mean([one["tokens_per_second"] for one in done]) if done else None,
        None if longest is None else longest.at(report.length),
        "" if longest is None else str(longest),
        None if shortest is None else shortest.at(report.length),
        "" if shortest is None else str(shortest),
        done[0]["steps"] if done else None,
        mean([one["training_seconds"] for one in done]) if done else None,
        inside,
        line.curve,
        effect,
        VERDICTS.get(line.verdict, line.verdict),
        line.note,
    )


def about(name: str) -> str:
    """What a rung is."""
    if name in LESS:
        return VARIANTS[name].about
    return ABOUT[name]
