"""The command line. Everything heavy is imported inside the command that needs it: `--help` must not wait for torch."""

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError, SpecError

if TYPE_CHECKING:
    from rich.tree import Tree

    from regard.cost import Cost
    from regard.testing import Report

TRAIN, STUDY, INSIDE = "Train", "Study", "Look inside"  # "Use" and "Ship" come with their first commands

app = typer.Typer(
    name="regard",
    help="The Transformer that people train themselves: train it, change it, prove the change, see inside it, ship it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if os.environ.get("NO_COLOR") else "rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, which typer turns into an exit code that depends on its version."""


def main() -> None:
    """Run the command line. What a user can put right is one sentence on stderr and exit code 2; Ctrl-C is 130."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except RegardError as error:
        _complain(str(error))
        sys.exit(2)
    except Interrupted:
        _complain("interrupted")
        sys.exit(130)


def _interrupt(*_: object) -> None:
    raise Interrupted


def _complain(sentence: str) -> None:
    print(f"regard: {sentence}", file=sys.stderr)


def _version(wanted: bool) -> bool:
    if wanted:
        from regard import __version__

        print(f"regard {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...


@app.command(rich_help_panel=TRAIN)
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 400,
    seed: Annotated[int, typer.Option(help="Another seed, another run.")] = 0,
) -> None:
    """Train a small Transformer in front of you (under a minute) and look at what it attends to.

    It learns to read English number words, "three hundred and seven", and to write them in digits, 307.
    """
    from regard import demo as reader

    reader.run(steps, seed)


@app.command(rich_help_panel=STUDY)
def check(
    part: Annotated[str, typer.Argument(metavar="MODULE:PART", help="Your spec class or instance, or a kind of ours.")],
    law: Annotated[list[str] | None, typer.Option("--law", help="Only this law. May be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Try the laws on a part that you wrote: tiny models are built around it, and each law says kept or broken.

    Exit code 1 if a law is broken. The module is imported, so check only code that you trust.
    """
    from regard.testing import LAWS
    from regard.testing import check as try_laws

    found = _import_part(part)
    report = try_laws(found, law or tuple(LAWS))
    if as_json:
        verdicts = [{"model": v.model, "law": v.law, "outcome": v.outcome, "detail": v.detail} for v in report.verdicts]
        print(json.dumps({"part": report.part, "broken": len(report.broken), "verdicts": verdicts}, indent=2))
    else:
        _print_report(report)
    raise typer.Exit(1 if report.broken else 0)


def _import_part(name: str) -> Any:
    from regard.catalogue import PARTS
    from regard.errors import nearest
    from regard.tree import load

    if ":" in name:
        sys.path.insert(0, "")
        return load(name)
    if name not in PARTS:
        raise SpecError("", f"{name!r} is neither module:Part nor a kind of regard; {nearest(name, PARTS)}")
    return PARTS[name]


def _print_report(report: "Report") -> None:
    from rich.console import Console
    from rich.table import Table

    marks = {"kept": "[green]kept[/]", "broken": "[bold red]BROKEN[/]", "bent": "[yellow]bent[/]"}
    models = list(dict.fromkeys(verdict.model for verdict in report.verdicts))
    table = Table(box=None, pad_edge=False)
    table.add_column("law")
    for model in models:
        table.add_column(model)
    for law in dict.fromkeys(verdict.law for verdict in report.verdicts):
        row = {v.model: marks.get(v.outcome, "-") for v in report.verdicts if v.law == law}
        table.add_row(law, *(row.get(model, "") for model in models))
    console = Console()
    console.print(table)
    refused = {v.model: v.detail for v in report.verdicts if v.outcome == "refused"}
    for model, reason in refused.items():
        console.print(f"- {model} was refused: {reason}", highlight=False, markup=False)
    for verdict in report.broken:
        console.print(f"! {verdict.law} in {verdict.model}: {verdict.detail}", highlight=False, markup=False)
    kept = sum(verdict.outcome == "kept" for verdict in report.verdicts)
    console.print(f"{report.part}: {kept} kept, {len(report.broken)} broken", highlight=False)


@app.command(rich_help_panel=INSIDE)
def show(
    model: Annotated[
        str | None, typer.Argument(metavar="PRESET|RECIPE", help="A preset, or a .toml or .json recipe.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field, such as decoder.depth=3. May be repeated."),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of source and target for the FLOPs.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Let a recipe name parts as module:Class and import them.")
    ] = False,
) -> None:
    """Show a model: its tree, what differs from its base, exact parameters and FLOPs per token by part.

    Without an argument, list the presets.
    """
    if model is None:
        _list_presets(as_json)
        return
    from regard.catalogue import PARTS, to_record
    from regard.cost import cost
    from regard.recipe import load_model
    from regard.tree import diff, plain

    base, spec = load_model(model, change or (), trust_code)
    costs = cost(spec, length)
    changes = [(path, plain(a, PARTS), plain(b, PARTS)) for path, a, b in diff(base, spec)]
    if as_json:
        parts = [
            {"part": p.part, "parameters": p.parameters, "flops_per_token": p.flops_per_token} for p in costs.parts
        ]
        result = {
            "name": model,
            "kind": type(spec).kind,
            "parameters": costs.parameters,
            "flops_per_token": costs.flops_per_token,
            "length": length,
            "parts": parts,
            "changes": [{"path": path, "before": before, "after": after} for path, before, after in changes],
            "model": to_record(spec),
        }
        print(json.dumps(result, indent=2))
        return
    _show(model, to_record(spec), changes, costs)


def _list_presets(as_json: bool) -> None:
    from regard.presets import PRESETS

    lines = {name: (make.__doc__ or "").strip().splitlines()[0] for name, make in PRESETS.items()}
    if as_json:
        print(json.dumps(lines, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, line in lines.items():
        table.add_row(f"[bold]{name}[/]", line)
    console = Console()
    console.print(table)
    console.print("\nregard show NAME shows one of them.", highlight=False)


def _show(name: str, record: dict[str, Any], changes: list[tuple[str, Any, Any]], costs: "Cost") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.tree import Tree

    console = Console()
    tree = Tree(f"[bold]{name}[/]  {record['kind']}", highlight=False)
    _grow(tree, record)
    console.print(tree)
    if changes:
        console.print("\n[bold]Changed[/]")
        for path, before, after in changes:
            console.print(f"  {path}: {_short(before)} -> [bold]{_short(after)}[/]", highlight=False)
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("parameters", justify="right")
    table.add_column("MFLOP a token", justify="right")
    for part in costs.parts:
        table.add_row(part.part, f"{part.parameters:,}", f"{part.flops_per_token / 1e6:,.3f}")
    table.add_row("[bold]all[/]", f"[bold]{costs.parameters:,}[/]", f"[bold]{costs.flops_per_token / 1e6:,.3f}[/]")
    console.print(table, highlight=False)
    console.print(f"\nFLOPs of a forward pass at {costs.length} tokens, two per multiply-add.", highlight=False)


def _short(value: Any) -> str:
    return value["kind"] if isinstance(value, dict) else "none" if value is None else json.dumps(value)


def _grow(tree: "Tree", record: dict[str, Any]) -> None:
    plain = [f"{key} [cyan]{_short(value)}[/]" for key, value in record.items() if _is_leaf(key, value)]
    if plain:
        tree.add("  ".join(plain))
    for key, value in record.items():
        items = value if isinstance(value, list) else [value]
        for i, item in enumerate(items):
            if isinstance(item, dict):
                label = f"{key}\\[{i}]" if isinstance(value, list) else key
                _grow(tree.add(f"{label}  [bold]{item['kind']}[/]"), item)


def _is_leaf(key: str, value: Any) -> bool:
    nested = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return key != "kind" and not nested
