"""Rows: which modifications are tried, what each makes of the base, and the base's size given back to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from regard import variants
from regard.data.prepare import Prepared
from regard.errors import RegardError, SpecError
from regard.models.base import ModelSpec
from regard.models.build import count
from regard.models.cost import cost
from regard.nn.branches.feedforward import FeedForward
from regard.planner import fit as fitting
from regard.recipe.recipe import Recipe, fit
from regard.runs.request import check_family
from regard.tree import swap, walk
from regard.variants import apply, variant

BASE = "base"
ROUND, LARGE = 8, 64  # hidden widths from LARGE on are multiples of ROUND
CLOSE = 0.01
MATCHES = ("none", "parameters", "compute")


@dataclass(frozen=True)
class Row:
    """A modification of the base: its model and what that costs, or why there is none."""

    name: str
    model: ModelSpec | None
    parameters: int = 0
    operations: float = 0.0  # of a forward pass over one sequence
    note: str = ""
    left_out: str = ""
    steps: int | None = None  # None: as many as all others
    about: str = ""


def chosen(wanted: str) -> tuple[list[str], set[str]]:
    """The rows of `all`, `table`, a group, or names between commas; and which of them were asked for by name."""
    words = [word.strip() for word in wanted.split(",")]
    names = [name for word in words for name in variants.chosen([word]) if name != "vanilla"]
    if not names:
        raise SpecError("--rows", "names only the base, which every ablation has; name what it is compared with")
    return list(dict.fromkeys(names)), {word for word in words if word in variants.VARIANTS or ":" in word}


class Rows:
    """Makes the rows of one base on one text."""

    def __init__(self, recipe: Recipe, data: Prepared, match: str, trust_code: bool = False) -> None:
        self.trust_code = trust_code
        self.base, self.match, self.objective = recipe.model, match, data.objective
        self.sizes = {name: data.tokenizers[name].size for name in data.objective.encoded}
        self.joint = len({tokenizer.sha256 for tokenizer in data.tokenizers.values()}) == 1
        window = getattr(recipe.data.batching, "length", None)
        self.longest = window or 0 if data.objective.stream else recipe.data.longest + 2
        self.length = sequence_length(recipe, data)
        self.vanilla = self.measured(Row(BASE, self.base))

    def row(self, name: str) -> Row:
        """The base with a modification, of the base's size if that is asked for."""
        model = self.fitted(apply(name, self.base, self.trust_code), self.base)
        row = self.measured(Row(name, model, about=variant(name, self.trust_code).about))
        return row if self.match == "none" else self._matched(row, model)

    def fitted(self, model: ModelSpec, before: ModelSpec) -> ModelSpec:
        """A model that was made of `before`, with what the text asks for; refused if it cannot learn the task."""
        fits = fitting.fitted(model, self.objective, self.sizes, self.longest, self.joint)
        model = fit(model, before, fits, self.trust_code)
        check_family(model, self.objective)
        return model

    def rows(self, names: list[str], named: set[str]) -> list[Row]:
        """All rows. One that does not apply is left out with the reason, unless it was asked for by name."""
        found = []
        for name in names:
            try:
                found.append(self.row(name))
            except RegardError as error:
                if name in named:
                    raise SpecError("--rows", f"{name!r} does not apply here: {error}") from None
                found.append(Row(name, None, left_out=str(error)))
            except Exception as error:  # a fault of one row must not cost the others
                if name in named:
                    raise
                found.append(Row(name, None, left_out=f"{type(error).__name__}: {error}"))
        if not any(row.model for row in found):
            raise SpecError("--rows", f"no row applies here: {found[0].name}: {found[0].left_out}")
        return found

    def measured(self, row: Row) -> Row:
        """A row with what its model costs."""
        assert row.model is not None
        found = cost(row.model, self.length)
        return replace(row, parameters=found.parameters, operations=found.flops_per_token * found.length)

    def _matched(self, row: Row, model: ModelSpec) -> Row:
        """Hidden widths of all feed-forward layers times one factor, until the size is the base's within 1 %."""
        measure: Callable[[ModelSpec], float] = count
        wanted, what = float(self.vanilla.parameters), "parameters"
        if self.match == "compute":
            measure = lambda m: cost(m, self.length).flops_per_token * self.length  # noqa: E731
            wanted, what = self.vanilla.operations, "operations"
        size = measure(model)
        if abs(size / wanted - 1) <= CLOSE:
            return row
        least = measure(scaled(model, 0.0, 1))
        # What a model costs grows by the same amount with every hidden unit.
        factor = (wanted - least) / (size - least) if size > least else 0.0
        for step in (ROUND, 1):
            found = scaled(model, factor, step)
            if factor > 0 and abs(measure(found) / wanted - 1) <= CLOSE:
                return self.measured(replace(row, model=found, note=f"hidden width x {factor:.2f}"))
        why = "" if _hidden(model) else ": it has no feed-forward layer"
        return replace(row, note=f"not matched{why}, {size / wanted:.2f} x the base's {what}")


def _hidden(model: ModelSpec) -> bool:
    return any(isinstance(part, FeedForward) for part in walk(model))


def scaled(model: Any, factor: float, step: int) -> Any:
    """A model with `factor` times the hidden width in all feed-forward layers; wide ones in multiples of `step`."""

    def width(feedforward: FeedForward) -> FeedForward:
        wanted = (feedforward.d_hidden or 4 * model.d_model) * factor
        return replace(feedforward, d_hidden=max(1, round(wanted / step) * step if wanted >= LARGE else round(wanted)))

    return swap(model, FeedForward, width)


def sequence_length(recipe: Recipe, data: Prepared) -> int:
    """The mean length of a text, over both sides; a window of a stream."""
    if data.objective.stream:
        return int(getattr(recipe.data.batching, "length", 128))
    measured = data.objective.measured
    tokens = sum(data.survey.ids[name] for name in measured)
    return max(1, round(tokens / len(measured) / max(1, sum(table.rows for table in data.train))))
