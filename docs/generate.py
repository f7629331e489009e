"""Write docs/catalogue.md from the code: parts by section, presets, variants and laws. `--check` only compares."""

import sys
from dataclasses import MISSING, fields
from pathlib import Path

from regard import catalogue as model_parts
from regard import count
from regard.presets import PRESETS, preset
from regard.recipe import recipe
from regard.testing import LAWS
from regard.tree import Spec, hints
from regard.variants import described, select

PAGE = Path(__file__).with_name("catalogue.md")
# A gloss for each heading that does not explain itself.
GLOSSES = {
    "Table": "embedding and output tables",
    "Sharing": "weight tying of the tables",
    "Input": "from token ids to vectors",
    "Additive": "position vectors added to the embedding",
    "Block": "branches with residual connections",
    "Branch": "sublayer of a block",
    "Cell": "recurrent cell",
    "Start": "initial state of a recurrent layer",
    "InitialState": "initial state of a recurrent decoder",
    "AttentionScore": "attention scores of a recurrent decoder",
    "Scores": "attention scores of Synthesizers",
    "Residual": "how a branch is combined with its input",
    "Position": "position scheme in attention",
    "AtHeads": "position scheme for layers whose number of heads differs from the model's",
    "AttentionPattern": "which keys a query attends to",
    "Bridge": "connection from encoder to decoder",
    "Head": "output layer and loss",
    "Linear": "projection layers",
    "Init": "weight initialisation",
}


def default(value: object) -> str:
    """Return the default value of a field, formatted as in JSON."""
    if value is MISSING:
        return "required"
    if isinstance(value, Spec):
        return value.kind
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def catalogue() -> str:
    """Return docs/catalogue.md as text."""
    lines = [
        "# Catalogue of parts",
        "",
        "Generated from the code by `make docs`; do not edit.",
        "",
        "Recipes and `--set` name a part (a layer, an optimizer, ...) by its kind. The last column lists the fields of "
        "the part with their defaults; `...` stands for a list of parts.",
        "",
    ]
    for slot, parts in (model_parts.SLOTS | recipe.SLOTS).items():
        lines += [_heading(slot.__name__.removesuffix("Spec")), "", "| kind | description | fields |", "|---|---|---|"]
        for part in parts:
            first = (part.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            first = " ".join(first.split())
            settings = [f"`{f.name}` {_composite(f.default)}" for f in fields(part)]  # type: ignore[reportArgumentType]
            lines.append(f"| `{part.kind}` | {first} | {', '.join(settings)} |")
        lines.append("")
    lines += ["## Presets", "", "| name | description | parameters |", "|---|---|--:|"]
    for name, make in PRESETS.items():
        first = (make.__doc__ or "").strip().splitlines()[0]
        lines.append(f"| `{name}` | {first} | {count(make()):,} |")
    lines += [
        "",
        "## Variants",
        "",
        "Use a variant with `regard train --variant NAME`; compare several with `regard ablate --rows NAME,NAME`.",
        "",
    ]
    lines += [
        "`row` is the row of the table of Narang et al. 2021, as it was run there (exceptions: "
        "[decision 008](decisions/008-rows-of-the-table.md)). `parameters` are those of `narang_base` with the "
        "variant. `bends` names the laws (see below) that do not hold for the variant, with the reason.",
        "",
    ]
    lines += [
        "| row | name | group | description | paper | parameters | changes | bends |",
        "|--:|---|---|---|---|--:|---|---|",
    ]
    base = preset("narang_base")
    for name in select():
        row = described(name, base)
        cells = [
            "" if row["row"] is None else str(row["row"]),
            f"`{name}`",
            row["group"],
            row["about"],
            row["paper"],
            "-" if row["parameters"] is None else f"{row['parameters']:,}",
            ", ".join(dict.fromkeys(f"`{change['path'].split('.pattern')[0]}`" for change in row["changes"])),
            "; ".join(f"{law}: {why}" for law, why in row["bends"].items()),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Laws: properties that every part must have (checked by `regard check`)"]
    lines += ["", "| law | statement |", "|---|---|"]
    lines += [f"| {law.name} | {' '.join(law.statement.split())} |" for law in LAWS.values()]
    return "\n".join(lines) + "\n"


def _heading(name: str) -> str:
    """Return the heading of a section, with an explanation in parentheses if GLOSSES contains one."""
    return f"## {name} ({GLOSSES[name]})" if name in GLOSSES else f"## {name}"


def _composite(value: object) -> str:
    """Return the default value of a field as text, or `...` for a part that contains a list of parts (too long)."""
    values = [getattr(value, name) for name in hints(type(value))] if isinstance(value, Spec) else []
    return "..." if any(isinstance(item, tuple) for item in values) else default(value)


def main() -> None:
    """Write docs/catalogue.md, or with `--check`, exit with an error if the file is out of date."""
    page = catalogue()
    if "--check" in sys.argv:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            raise SystemExit("docs/catalogue.md is out of date; run: make docs")
        return
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
