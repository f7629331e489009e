"""The attention heads of a trained model: what they attend to, and how much the loss depends on each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.batch import Batch
from regard.data.text import Lines, ParallelFiles
from regard.errors import DataError, SpecError, nearest
from regard.inspection import head_plot
from regard.inspection.importance import Importance, importance_by_ablation, importance_by_gradient, mean_loss
from regard.inspection.interventions import Head, head_counts
from regard.inspection.patterns import NAMES, HeadPatterns, head_patterns
from regard.nn.checks import check_count
from regard.runs.inference import Runs, load_one, load_runs
from regard.runs.options import LoadOptions, accepts, cpu_threads
from regard.runs.trained_model import TrainedModel, held_out
from regard.training.checkpoint import RunFolder

ROWS = 32  # texts per batch
SHORT = dict(zip(NAMES, ("entropy", "dist", "prev", "next", "cur", "same", "delim"), strict=True))  # column headings
METHODS = ("gradient", "ablation")
Texts = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class HeadRow:
    """One head with its patterns, keyed by name as in `HeadPatterns`, and its importance."""

    head: Head
    patterns: Mapping[str, float | None]
    importance: float

    def json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {**self.head._asdict(), **self.patterns, "importance": self.importance}


@dataclass(frozen=True, repr=False)
class HeadTable:
    """All attention heads of a model, measured on `texts` texts. `loss` is the loss per label of the whole model."""

    rows: tuple[HeadRow, ...]
    by: str
    texts: int
    loss: float

    def json(self) -> dict[str, Any]:
        """Return the table as a JSON object."""
        return {"by": self.by, "texts": self.texts, "loss": self.loss, "heads": [row.json() for row in self.rows]}

    def table(self) -> Table:
        """Return the table for a terminal. A dash stands for a value that is not defined for cross-attention."""
        table = Table(box=None, pad_edge=False)
        table.add_column("head", no_wrap=True)
        for column in (*SHORT.values(), self.by):
            table.add_column(column, justify="right")
        for row in self.rows:
            cells = ["-" if row.patterns[name] is None else f"{row.patterns[name]:.2f}" for name in SHORT]
            table.add_row(Text(str(row.head)), *cells, f"{row.importance:.4f}")
        return table

    def plot(self, path: str | Path) -> None:
        """Draw the importance of every head, as a .png, .svg or .pdf file. This needs matplotlib."""
        values = {(row.head.kind, row.head.layer, row.head.head): row.importance for row in self.rows}
        head_plot.write(values, path, f"importance by {self.by}")


@accepts(LoadOptions, load_runs)
def heads(
    run: Runs,
    *,
    source: str | Path | None = None,
    target: str | Path | None = None,
    text: str | Path | None = None,
    by: str = "gradient",
    limit: int = 200,
    threads: int | None = None,
    progress: Callable[[Head], None] = lambda _: None,
    **options: Unpack[LoadOptions],
) -> HeadTable:
    """Return a table of the attention heads of a trained model, measured on at most `limit` texts.

    The texts are the line pairs of `source` and `target`, the lines of `text`, or by default the validation text of the
    run. `by` selects the importance: "gradient" (one backward pass; Michel et al. 2019), or "ablation" (the increase of
    the loss per label if the head is switched off; one pass per head).
    """
    with cpu_threads(threads):
        return _measured(
            load_one(run, "heads", **options), {"source": source, "target": target, "text": text}, by, limit, progress
        )


def _measured(
    run: TrainedModel, files: Mapping[str, Any], by: str, limit: int, progress: Callable[[Head], None]
) -> HeadTable:
    require_heads(run)
    texts = texts_for(run, **files, limit=limit)
    batches = batches_of(run, texts)
    values = importance(run, batches, by, progress)
    ends = {run.tokenizer.bos, run.tokenizer.eos, *delimiters(run)}
    found = head_patterns(run.model, (row for batch in batches for row in single_rows(batch)), ends)
    rows = tuple(
        HeadRow(Head(kind, n, h), _of_head(layer, h), float(values[kind][n][h]))
        for kind, layers in found.items()
        for n, layer in enumerate(layers)
        for h in range(head_counts(run.model)[kind][n])
    )
    return HeadTable(rows, by, len(texts), mean_loss(run.model, batches))


def _of_head(patterns: HeadPatterns, head: int) -> dict[str, float | None]:
    values = {name: getattr(patterns, name) for name in NAMES}
    return {name: None if value is None else float(value[head]) for name, value in values.items()}


def require_heads(run: TrainedModel) -> None:
    """Raise a DataError if a model has no attention heads."""
    if not head_counts(run.model):
        raise DataError(f"{run.path} has no attention heads; its model is {run.recipe.model.kind!r}")


def importance(
    run: TrainedModel, batches: Sequence[Batch], by: str, progress: Callable[[Head], None] = lambda _: None
) -> Importance:
    """Return the importance of every head by the method `by`."""
    if by not in METHODS:
        raise SpecError("--by", f"{by!r} is not known; {nearest(by, METHODS)}")
    if by == "gradient":
        return importance_by_gradient(run.model, batches)
    return importance_by_ablation(run.model, batches, progress)


def texts_for(
    run: TrainedModel,
    source: str | Path | None = None,
    target: str | Path | None = None,
    text: str | Path | None = None,
    limit: int = 200,
) -> Texts:
    """Return the first `limit` examples in the files, or by default of the validation text of the run."""
    check_count("--limit", limit)
    option = {"translate": "--source and --target", "generate": "--text"}.get(run.command)
    if (source is None) != (target is None) or (text is not None and source is not None):
        raise DataError("give --source and --target, or --text, or none of them for the validation text of the run")
    if (source is not None and run.command != "translate") or (text is not None and run.command != "generate"):
        remedy = f"give {option}" if option else "its own validation text is used"
        raise DataError(f"{run.path} was trained for {run.objective.kind}, which has no such files; {remedy}")
    if source is None and text is None:
        examples = held_out(RunFolder(run.path))[:limit]
        if not examples:
            raise DataError(
                f"{run.path} has no validation text to measure heads on" + (f"; give {option}" if option else "")
            )
        return examples
    corpus = Lines(str(text)) if text is not None else ParallelFiles(str(source), str(target))
    return [tuple(record) for record, _ in zip(corpus.records(), range(limit), strict=False)]


def batches_of(run: TrainedModel, texts: Texts) -> list[Batch]:
    """Return the texts in batches of 32."""
    return [run.batch(list(texts[i : i + ROWS])) for i in range(0, len(texts), ROWS)]


def delimiters(run: TrainedModel) -> list[int]:
    """Return the ids of the tokens that have no letter and no digit, such as punctuation."""
    tokenizers = {id(tokenizer): tokenizer for tokenizer in run.tokenizers.values()}
    if len({tokenizer.sha256 for tokenizer in tokenizers.values()}) > 1:
        return []  # the same id stands for different tokens in source and target
    names = run.tokenizer.tokens(range(run.tokenizer.size))
    return [i for i, name in enumerate(names) if not any(character.isalnum() for character in name)]


def single_rows(batch: Batch) -> Iterator[Batch]:
    """Yield every row of a batch as a batch of its own, without padding."""
    for i in range(batch.target.shape[0]):
        lengths = {
            side: _length(getattr(batch, side), getattr(batch, f"{side}_seg"), i) for side in ("source", "target")
        }
        changes: dict[str, Any] = {}
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                side = "source" if field.name.startswith("source") else "target"
                changes[field.name] = value[i : i + 1] if value.dim() == 1 else value[i : i + 1, : lengths[side]]
        yield replace(batch, **changes | {"source_seg": None, "target_seg": None} if not batch.packed else changes)


def _length(ids: Tensor | None, seg: Tensor | None, row: int) -> int:
    if ids is None:
        return 0
    return ids.shape[1] if seg is None else int((seg[row] != 0).sum())
