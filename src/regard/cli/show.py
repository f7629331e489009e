"""The command `show`: print a model, or the recipe and the scores of a training run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.base import INSIDE, TrustCode, app, console, print_json
from regard.errors import SpecError

if TYPE_CHECKING:
    from rich.tree import Tree

    from regard.models.cost import Cost


@app.command(rich_help_panel=INSIDE)
def show(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|RECIPE|RUN",
            help="The name of a preset, a .toml or .json recipe, or the folder of a training run.",
        ),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field, such as decoder.depth=3. Repeatable."),
    ] = None,
    length: Annotated[
        int, typer.Option(min=1, help="Length of source and target, in tokens, for which FLOPs are counted.")
    ] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Print a model, its changes, and the parameters and FLOPs of each part.

    A model is printed as a tree of parts, with the changes that --set or the
    recipe makes to the preset. Without an argument, list the presets. For a
    training run, print its recipe, its scores and the SHA-256 of its weights.
    """
    if model is None:
        _list_presets(as_json)
        return
    if Path(model).is_dir():
        _show_run(model, change or [], as_json, trust_code)
        return
    from regard.catalogue import PARTS, to_record
    from regard.models.cost import cost
    from regard.recipe.recipe import load_model
    from regard.tree import diff, plain

    base, spec = load_model(model, change or (), trust_code)
    costs = cost(spec, length)
    changes = [(path, plain(a, PARTS), plain(b, PARTS)) for path, a, b in diff(base, spec)]
    if as_json:
        edits = [{"path": path, "before": before, "after": after} for path, before, after in changes]
        result = {"name": model, "kind": type(spec).kind} | asdict(costs) | {"changes": edits, "model": to_record(spec)}
        print(json.dumps(result, indent=2))
        return
    _show(model, to_record(spec), changes, costs)


def _show_run(path: str, changes: list[str], as_json: bool, trust_code: bool) -> None:
    """Print the recipe, the number of parameters, the step, the scores and the SHA-256 of the weights of a run."""
    if changes:
        raise SpecError("--set", "does not apply to a training run; train a new one with the change")
    from regard.evaluation import baselines
    from regard.runs.trained_model import load
    from regard.training.checkpoint import RunFolder

    run = load(path, "cpu", trust_code=trust_code)
    trivial = baselines.stored(RunFolder(run.path))
    facts = {
        "run": str(run.path),
        "finished": run.finished,
        "step": run.step,
        "parameters": run.parameters,
        "scores": run.scores,
        "weights_sha256": run.weights_sha256,
    }
    if as_json:
        print_json(facts | {"baselines": [asdict(baseline) for baseline in trivial], "recipe": run.recipe.record()})
        return
    if trivial:
        facts["baselines"] = baselines.sentence(trivial, run.recipe.train.criterion)
    from rich.text import Text
    from rich.tree import Tree

    screen = console()
    tree = Tree(Text(path, "bold"), highlight=False)
    _grow(tree, run.recipe.record())
    screen.print(tree)
    for name, value in facts.items():
        text = "  ".join(f"{k} {v:.4f}" for k, v in value.items()) if isinstance(value, dict) else value
        fact = f"{text:,}" if type(text) is int else text
        screen.print(f"{name:<16} {fact}", markup=False, soft_wrap=True)


def _list_presets(as_json: bool) -> None:
    from regard.presets import PRESETS

    lines = {name: (make.__doc__ or "").strip().splitlines()[0] for name, make in PRESETS.items()}
    if as_json:
        print(json.dumps(lines, indent=2))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, line in lines.items():
        table.add_row(Text(name, "bold"), Text(line))
    console().print(table)
    console().print("\nregard show NAME prints one of them.")


def _show(name: str, record: dict[str, Any], changes: list[tuple[str, Any, Any]], costs: "Cost") -> None:
    from rich.table import Table
    from rich.text import Text
    from rich.tree import Tree

    screen = console()
    tree = Tree(Text.assemble((name, "bold"), f"  {record['kind']}"), highlight=False)
    _grow(tree, record)
    screen.print(tree)
    if changes:
        screen.print("\n[bold]Changes[/]")
        for path, before, after in changes:
            screen.print(Text.assemble(f"  {path}: {_short(before)} -> ", (_short(after), "bold")))
    screen.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("parameters", justify="right")
    table.add_column("MFLOPs per token", justify="right")
    for part in costs.parts:
        table.add_row(Text(part.part), f"{part.parameters:,}", f"{part.flops_per_token / 1e6:,.3f}")
    table.add_row("[bold]all[/]", f"[bold]{costs.parameters:,}[/]", f"[bold]{costs.flops_per_token / 1e6:,.3f}[/]")
    screen.print(table)
    screen.print(f"\nFLOPs are those of a forward pass at {costs.length} tokens; a multiply-add counts as two.")


def _short(value: Any) -> str:
    return value["kind"] if isinstance(value, dict) else "none" if value is None else json.dumps(value)


def _grow(tree: "Tree", record: dict[str, Any]) -> None:
    from rich.text import Text

    plain = [Text.assemble(key, " ", (_short(value), "cyan")) for key, value in record.items() if _is_leaf(key, value)]
    if plain:
        tree.add(Text("  ").join(plain))
    for key, value in record.items():
        items = value if isinstance(value, list) else [value]
        for i, item in enumerate(items):
            if isinstance(item, dict):
                label = f"{key}[{i}]" if isinstance(value, list) else key
                # As Text, because markup would interpret `[/x]`.
                _grow(tree.add(Text.assemble(label, "  ", (item["kind"], "bold"))), item)


def _is_leaf(key: str, value: Any) -> bool:
    nested = isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict))
    return key != "kind" and not nested
