"""Rows of an ablation: each is the base with one modification, optionally resized to equal parameters or compute."""

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

BASE = "base"
ROUND, LARGE = 8, 64  # hidden widths of LARGE or more are multiples of ROUND
CLOSE = 0.01
MATCHES = ("none", "parameters", "compute")


@dataclass(frozen=True)
class Row:
    """One table row: a modified model and its cost, or the reason why the modification does not apply."""

    name: str
    model: ModelSpec | None
    parameters: int = 0
    operations: float = 0.0  # per forward pass over one sequence
    note: str = ""
    left_out: str = ""
    steps: int | None = None  # None: as in the recipe
    about: str = ""


def select_rows(rows: str) -> tuple[list[str], set[str]]:
    """Return the modifications that `rows` selects, and the set of those that `rows` lists by name.

    `rows` is a comma-separated list of names, names of groups, `all`, or `table` (the 52 of Narang et al. 2021).
    """
    words = [word.strip() for word in rows.split(",")]
    names = [name for word in words for name in variants.select([word]) if name != "vanilla"]
    if not names:
        raise SpecError("--rows", "names only the base, which every ablation includes; add a row to compare it with")
    return list(dict.fromkeys(names)), {word for word in words if word in variants.VARIANTS or ":" in word}


class RowBuilder:
    """Builds the table rows of an ablation from the recipe of the base model and the tokenised text."""

    def __init__(self, recipe: Recipe, data: Prepared, match: str, trust_code: bool = False) -> None:
        self.trust_code = trust_code
        self.model, self.match, self.objective = recipe.model, match, data.objective
        self.sizes = {name: data.tokenizers[name].size for name in data.objective.encoded}
        self.joint = len({tokenizer.sha256 for tokenizer in data.tokenizers.values()}) == 1
        window = getattr(recipe.data.batching, "length", None)
        self.longest = window or 0 if data.objective.stream else recipe.data.longest + 2
        self.length = sequence_length(recipe, data)
        self.base = self.with_cost(Row(BASE, self.model))

    def row(self, name: str) -> Row:
        """Return the row of the base model with the modification `name`, resized if `match` requires it."""
        model = self.fitted(variants.apply(name, self.model, self.trust_code), self.model)
        row = self.with_cost(Row(name, model, about=variants.variant(name, self.trust_code).about))
        return row if self.match == "none" else self._matched(row, model)

    def fitted(self, model: ModelSpec, before: ModelSpec) -> ModelSpec:
        """Return `model`, a modification of `before`, with vocabulary and maximum lengths that fit the text.

        Raise an error if a model of this family cannot learn the task.
        """
        fits = fitting.fitted(model, self.objective, self.sizes, self.longest, self.joint)
        model = fit(model, before, fits, self.trust_code)
        check_family(model, self.objective)
        return model

    def rows(self, names: list[str], named: set[str]) -> list[Row]:
        """Return one row per modification.

        If a modification does not apply, its row is marked as left out. If `named` contains the modification, an error
        is raised instead.
        """
        rows = []
        for name in names:
            try:
                rows.append(self.row(name))
            except RegardError as error:
                if name in named:
                    raise SpecError("--rows", f"{name!r} does not apply here: {error}") from None
                rows.append(Row(name, None, left_out=str(error)))
            except Exception as error:  # a bug in one row must not stop the others
                if name in named:
                    raise
                rows.append(Row(name, None, left_out=f"{type(error).__name__}: {error}"))
        if not any(row.model for row in rows):
            raise SpecError("--rows", f"no row applies here: {rows[0].name}: {rows[0].left_out}")
        return rows

    def with_cost(self, row: Row) -> Row:
        """Return the row with the numbers of parameters and operations of the row's model filled in."""
        assert row.model is not None
        total = cost(row.model, self.length)
        return replace(row, parameters=total.parameters, operations=total.flops_per_token * total.length)

    def _matched(self, row: Row, model: ModelSpec) -> Row:
        """Return the row with all hidden widths scaled by one factor, to match the size of the base within 1 %."""
        measure: Callable[[ModelSpec], float] = count
        target, unit = float(self.base.parameters), "parameters"
        if self.match == "compute":
            measure = lambda m: cost(m, self.length).flops_per_token * self.length  # noqa: E731
            target, unit = self.base.operations, "operations"
        size = measure(model)
        if abs(size / target - 1) <= CLOSE:
            return row
        least = measure(scaled(model, 0.0, 1))
        # The size is linear in the hidden width.
        factor = (target - least) / (size - least) if size > least else 0.0
        for step in (ROUND, 1):
            resized = scaled(model, factor, step)
            if factor > 0 and abs(measure(resized) / target - 1) <= CLOSE:
                return self.with_cost(replace(row, model=resized, note=f"hidden width x {factor:.2f}"))
        has_hidden = any(isinstance(part, FeedForward) for part in walk(model))
        reason = "" if has_hidden else ": it has no feed-forward layer"
        return replace(row, note=f"not matched{reason}, {size / target:.2f} x the base's {unit}")


def scaled(model: Any, factor: float, step: int) -> Any:
    """Multiply hidden widths of feed-forward layers by `factor`, and round large widths to multiples of `step`."""

    def scale(feedforward: FeedForward) -> FeedForward:
        width = (feedforward.d_hidden or 4 * model.d_model) * factor
        return replace(feedforward, d_hidden=max(1, round(width / step) * step if width >= LARGE else round(width)))

    return swap(model, FeedForward, scale)


def sequence_length(recipe: Recipe, data: Prepared) -> int:
    """Return the mean number of tokens of a source or target, or for a language model, the length of a window."""
    if data.objective.stream:
        return int(getattr(recipe.data.batching, "length", 128))
    measured = data.objective.measured
    tokens = sum(data.survey.ids[name] for name in measured)
    return max(1, round(tokens / len(measured) / max(1, sum(table.rows for table in data.train))))
