"""Write docs/results/length.md and length.png from length.json: `regard bench length` on each device.

    python docs/results/length.py                   # run the benchmark on this machine, then write
    python docs/results/length.py --part recall     # only associative recall; --part costs: only time and memory
    python docs/results/length.py --json gpu.json   # run it, and write only this file: no matplotlib is needed
    python docs/results/length.py --merge gpu.json  # add such results, or those of regard bench length --json

The results of other devices and of the other part are kept. Other options are passed to `regard bench length`.
"""

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard.bench.length_plot import plot
from regard.bench.length_tables import markdown, tables

HERE = Path(__file__).parent
PARTS = {"all": ["--recall"], "costs": [], "recall": ["--recall-only"]}
LIMITS = {"cuda": ["--max-time", "8m"], "cpu": []}  # a GPU may be lent for ten minutes
TITLES = {"cuda": "On a GPU", "cpu": "On a CPU"}
Result = dict[str, Any]


def measured(device: str, part: str, more: list[str]) -> Result:
    """Run the benchmark in a process of its own, and return the result."""
    words = ["bench", "length", "--device", device, "--json", *PARTS[part], *LIMITS[device], *more]
    print("regard", *words, file=sys.stderr, flush=True)
    result = subprocess.run([sys.executable, "-m", "regard", *words], stdout=subprocess.PIPE, check=True, text=True)
    return dated(json.loads(result.stdout))


def dated(result: Result) -> Result:
    """Return the result with the date of today for each part that has none."""
    today = datetime.now(UTC).date().isoformat()
    result = {"date": today} | result
    return result | {"recall": result["recall"] and {"date": result["date"]} | result["recall"]}


def merged(old: list[Result], new: list[Result]) -> list[Result]:
    """Return the newest result of each part for each device, in the order of the page.

    The parts are time and memory, which are the rows of a result and what describes them, and associative recall. Rows
    of models and lengths that a newer result does not have are kept, if their batches have as many sequences.
    """
    newest: dict[str, Result] = {}
    for result in (*old, *new):
        before = newest.get(result["device"], result)
        costs, recall = (
            with_rows_of(before, result) if result["rows"] else before,
            result if result["recall"] else before,
        )
        newest[result["device"]] = costs | {name: recall[name] for name in ("recall", "accuracy")}
    return [newest[device] for device in TITLES if device in newest]


def with_rows_of(before: Result, result: Result) -> Result:
    """Return a result with the rows and exponents of an earlier one that it does not have."""
    known = {(row["name"], row["length"]): row for row in before["rows"] if row["batch_rows"] == result["batch_rows"]}
    rows = known | {(row["name"], row["length"]): row for row in result["rows"]}
    names = list(dict.fromkeys(name for name, _ in [*known, *rows]))
    listed = [rows[key] for key in sorted(rows, key=lambda key: (names.index(key[0]), key[1]))]
    return result | {"rows": listed, "exponents": before["exponents"] | result["exponents"]}


def picture(result: Result) -> str:
    """Return the name of the picture of a result."""
    return f"length-{result['device']}.png"


def page(results: list[Result]) -> str:
    """Return length.md as text."""
    lines = [
        "# What long sequences cost",
        "",
        "Written by `make length`, which runs `regard bench length --recall`. The models differ only in the layer that",
        "mixes the tokens of a sequence. The hidden width of their feed-forward layers is chosen so that all have as",
        "many parameters. An exponent b means that time or memory grows as length^b. The layers are explained in",
        "[attention.md](../attention.md), and the measurements in [results.md](../results.md#long-sequences).",
    ]
    recall = [
        "",
        "**Associative recall.** A row has keys, each followed by its value. Some keys occur again, and the model",
        "predicts their values. Accuracy at distance d is the accuracy for keys that occurred d tokens before. Tiny",
        "models with a convolution over three tokens and one layer of the kind are trained on the same batches for the",
        "same number of steps. A state of fixed size cannot keep all pairs, and a window does not reach early ones.",
    ]
    if any(result["recall"] for result in results):
        lines += recall
    for result in results:
        lines += ["", *section(result)]
    return "\n".join(lines) + "\n"


def section(result: Result) -> list[str]:
    """Return the lines of the section about one device."""
    machine = result["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores, threads used: {machine['threads']}"
    title = TITLES[result["device"]]
    costs = ["time and memory by length"] if result["rows"] else []
    shown = ", and ".join([*costs, *(["accuracy by distance"] if result["recall"] else [])])
    text = []
    if costs:
        text.append(
            f"{result['unit'][0].upper()}{result['unit'][1:]}; up to {result['rounds']} rounds on {result['date']}. "
            f"Depth {result['size']['depth']}, width {result['size']['d_model']}, "
            f"windows and blocks of {result['size']['window']} tokens."
        )
    if result["recall"]:
        elsewhere = result["recall"].get("elsewhere")  # models that were trained on another device
        trained = f" ({elsewhere})" if elsewhere else ""
        text.append(f"Recall: {result['recall']['steps']:,} training steps on {result['recall']['date']}{trained}.")
    text.append(f"{where}, torch {machine['versions']['torch']}.")
    lines = [f"## {title}", "", " ".join(text), "", f"![{title}: {shown}]({picture(result)})"]
    for heading, cells in tables(result):
        lines += ["", f"**{heading}**", "", *markdown(cells)]
    rows = [*result["rows"], *(result["recall"]["rows"] if result["recall"] else [])]
    failed: dict[str, list[str]] = {}  # reason -> models
    for row in rows:
        if row["failed"] and row["title"] not in failed.setdefault(row["failed"], []):
            failed[row["failed"]].append(row["title"])
    sentences = [f"- {', '.join(titles)}: {reason}." for reason, titles in failed.items()]
    return [*lines, *(["", *sentences] if sentences else [])]


def write(results: list[Result], folder: Path) -> None:
    """Write the page, its data and its pictures."""
    (folder / "length.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "length.md").write_text(page(results), encoding="utf-8")
    for result in results:
        if find_spec("matplotlib") is None:
            print(f"{picture(result)} needs matplotlib; run this script again where it is installed", file=sys.stderr)
        else:
            plot(result, folder / picture(result))


def main() -> None:
    """Run the benchmark or merge results, then write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", *TITLES), default="auto")
    parser.add_argument("--part", choices=PARTS, default="all", help="what to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result into this file, and nothing else")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="use these results, and run nothing")
    options, more = parser.parse_known_args()  # the others are options of regard bench length
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if options.merge:
        new = [dated(json.loads(path.read_text(encoding="utf-8"))) for path in options.merge]
    else:
        new = [measured(device, options.part, more)]
    if options.json:
        options.json.write_text(json.dumps(new[0], indent=1) + "\n", encoding="utf-8")
        return
    kept = HERE / "length.json"
    old = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    write(merged(old, new), HERE)


if __name__ == "__main__":
    main()
