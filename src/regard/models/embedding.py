"""The vocabulary tables and the inputs of a model, each stored once however many sides share it."""

from torch import nn

from regard.errors import SpecError
from regard.nn.core import Site
from regard.nn.input import Input, InputSpec
from regard.nn.vocab.base import HeadSpec
from regard.nn.vocab.tables import Table, TableSpec


class Tables(nn.Module):
    """The vocabulary tables of a model. Each is stored once, under the first of its uses."""

    def __init__(
        self,
        spec: TableSpec,
        site: Site,
        uses: dict[str, tuple[str, int, int]],
        head: HeadSpec | None = None,
        output: TableSpec | None = None,
        field: str = "sharing",
    ) -> None:
        """`uses` maps a use to (the use that owns its table, vocabulary, width); `field` is where sharing is said.

        `output` describes the table of the output where it has its own; None: like the others.
        """
        super().__init__()
        self.owner = {use: owner for use, (owner, _, _) in uses.items()}
        self.tables = nn.ModuleDict()
        own = "output" in uses and uses["output"][0] == "output"
        if output is not None and not own:
            raise SpecError("output_table", f"the output has no table of its own; leave it out or change {field}")
        if head is not None and "output" in uses:
            head.check_table(output or spec, not own)
        for use, (owner, vocab, width) in uses.items():
            if use == owner:
                described, where = (output, "output_table") if output and use == "output" else (spec, "table")
                self.tables[use] = described.build(vocab, width, site.inside(where))
            elif uses[owner][1:] != (vocab, width):
                there = f"{uses[owner][1]} x {uses[owner][2]}"
                raise SpecError(
                    field, f"the {use} table is {vocab} x {width} and the {owner} table {there}; they cannot be one"
                )

    def get(self, use: str) -> Table | None:
        """The table for `source`, `target` or `output`; None if the head brings its own."""
        return self.tables[self.owner[use]] if use in self.owner else None  # type: ignore[reportReturnType]


class Inputs(nn.Module):
    """The input modules of a model. Source and target have one each, or share it."""

    def __init__(self, spec: InputSpec, sites: dict[str, Site], shared: bool) -> None:
        super().__init__()
        first = next(iter(sites))
        self.owner = dict.fromkeys(sites, first) if shared else {use: use for use in sites}
        self.inputs = nn.ModuleDict(
            {o: spec.build(sites[o].inside("input")) for o in dict.fromkeys(self.owner.values())}
        )

    def get(self, use: str) -> Input:
        """The input of `source` or `target`."""
        return self.inputs[self.owner[use]]  # type: ignore[reportReturnType]


def check_types(spec: InputSpec) -> None:
    """Refuse an input that tells kinds of tokens apart where only one kind is read."""
    if spec.kinds:
        raise SpecError("input.types", "only an encoder reads several kinds of tokens; set it to 0")
