"""Vocabulary tables (embedding matrices) and input modules of a model, which source and target may share."""

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import require_data
from regard.errors import SpecError
from regard.nn.checks import require
from regard.nn.core import Site
from regard.nn.input import Input, InputSpec
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.tables import Table, TableSpec

Side = Literal["source", "target"]


class Tables(nn.Module):
    """The vocabulary tables (embedding matrices) of a model. A table with several uses is stored once."""

    def __init__(
        self,
        spec: TableSpec,
        site: Site,
        uses: dict[str, tuple[str, int, int]],
        head: HeadSpec | None = None,
        output: TableSpec | None = None,
        field: str = "sharing",
    ) -> None:
        """Build the tables from `spec`.

        `uses` maps each use ("source", "target" or "output") to a tuple: the use that owns the table, the vocabulary
        size and the width. A use with its own table is its own owner. `output` is the spec of the output table if the
        output has its own table; the default is `spec`. `field` is the spec field that sets sharing, for error
        messages.
        """
        super().__init__()
        self.owner = {use: owner for use, (owner, _, _) in uses.items()}
        self.tables = nn.ModuleDict()
        own = "output" in uses and uses["output"][0] == "output"
        ownless = f"the output has no table of its own; leave it out or change {field}"
        require(output is None or own, "output_table", ownless)
        if head is not None and "output" in uses:
            head.check_table(output or spec, not own)
        for use, (owner, vocab, width) in uses.items():
            if use == owner:
                table, path = (output, "output_table") if output and use == "output" else (spec, "table")
                self.tables[use] = table.build(vocab, width, site.inside(path))
            elif uses[owner][1:] != (vocab, width):
                sizes = (
                    f"the {use} table is {vocab} x {width} and the {owner} table {uses[owner][1]} x {uses[owner][2]}"
                )
                raise SpecError(field, f"{sizes}; they cannot be shared")

    def get(self, use: str) -> Table | None:
        """Return the table for "source", "target" or "output", or None if this input or head needs no table."""
        return self.tables[self.owner[use]] if use in self.owner else None  # type: ignore[reportReturnType]


class Inputs(nn.Module):
    """The input modules of a model, which compute embeddings. Source and target have one each or share one."""

    def __init__(self, spec: InputSpec, sites: dict[Side, Site], shared: bool) -> None:
        super().__init__()
        sides = list(sites)
        shared = shared and spec.of(sides[0]) == spec.of(sides[-1])
        self.owner: dict[Side, Side] = {side: sides[0] if shared else side for side in sides}
        self.forms = {side: value_form(spec.of(side).vector_channels) for side in sides}
        self.inputs = nn.ModuleDict()
        for side in dict.fromkeys(self.owner.values()):
            self.inputs[side] = spec.of(side).build(sites[side].inside("input"))

    def get(self, side: Side) -> Input:
        """Return the input module of the source or the target."""
        return self.inputs[self.owner[side]]  # type: ignore[reportReturnType]

    def embed(
        self,
        side: Side,
        values: Int[Tensor, "B T"] | Float[Tensor, "B T C"],
        table: Table | None,
        positions: Int[Tensor, "b T"],
        bound: int,
        types: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Embed the source or the target, as input of the first layer. All `positions` are below `bound`."""
        channels, form = self.forms[side]
        fits = values.shape[2:] == channels
        require_data(fits, f"{side}: this model reads {form}, not {tuple(values.shape)} of {values.dtype}")
        return self.get(side)(values, table, positions, bound, types)


def value_form(channels: int) -> tuple[tuple[int, ...], str]:
    """Return the shape and a description of an input value. With 0 `channels`, it is a token id, otherwise a vector."""
    return ((channels,), f"vectors (B, T, {channels})") if channels else ((), "token ids (B, T)")


def check_input(spec: InputSpec) -> None:
    """Check the input spec of a model with a decoder: a decoder reads neither vectors nor several token types."""
    require(spec.token_types == 0, "input.types", "only an encoder reads several types of tokens; set it to 0")
    remedy = "give vectors to the source, with 'by_side'"
    require(spec.of("target").vector_channels == 0, "input", f"a decoder reads the tokens it predicts; {remedy}")
