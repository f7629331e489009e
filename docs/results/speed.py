"""Write docs/results/speed.md and speed.json: all benchmarks of `regard bench` on a device.

    python docs/results/speed.py                          # run the benchmarks on this machine, then write
    python docs/results/speed.py --merge a.json b.json    # add results of another machine: regard bench ... --json

The results of other devices are kept.
"""

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RACES = {
    "cpu": (("train", "small"), ("train", "base"), ("decode", "base")),
    "cuda": (("train", "base"), ("train", "big"), ("decode", "base")),
}
TITLES = {"cuda": "On a GPU", "cpu": "On a CPU"}
Race = dict[str, Any]


def raced(task: str, shape: str, device: str, rounds: int) -> Race:
    """Run one benchmark in a process of its own, and return the result."""
    words = ["bench", task, "--shape", shape, "--device", device, "--rounds", str(rounds), "--json"]
    print("regard", *words, file=sys.stderr, flush=True)
    result = subprocess.run([sys.executable, "-m", "regard", *words], stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(result.stdout)


def merged(old: list[Race], new: list[Race]) -> list[Race]:
    """Return the newest result for each device, task and model size, in the order of the page."""
    kinds = [(device, *race) for device in TITLES for race in RACES[device]]
    newest = {(race["device"], race["task"], race["shape"]): race for race in (*old, *new)}
    return [
        newest[kind] for kind in sorted(newest, key=lambda kind: kinds.index(kind) if kind in kinds else len(kinds))
    ]


def page(races: list[Race]) -> str:
    """Return speed.md as text."""
    lines = [
        "# Speed compared with other libraries",
        "",
        "Written by `make speed`, which runs all races of `regard bench` for its device. The ratio is to the fastest",
        "peer of the same race, computed round by round: its median and the 95 % interval of 2,000 resamples.",
    ]
    for device, title in TITLES.items():
        here = [race for race in races if race["device"] == device]
        if here:
            lines += ["", f"## {title}"]
        for race in here:
            lines += ["", *section(race)]
    return "\n".join(lines) + "\n"


def section(race: Race) -> list[str]:
    """Return the lines of the section about one benchmark."""
    machine = race["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores, threads used: {machine['threads']}"
    memory = any(row["memory_gb"] is not None for row in race["rows"])
    lines = [
        f"### `regard bench {race['task']} --shape {race['shape']}`",
        "",
        f"{race['unit'][0].upper()}{race['unit'][1:]}; {race['rounds']} rounds on {race['date']}. {where}. {versions}.",
        *([f"Not installed there: {', '.join(race['missing'])}."] if race["missing"] else []),
        "",
        f"| | tokens/s | ratio | 95 % interval | parameters |{' peak GB |' if memory else ''}",
        f"|---|--:|--:|--:|--:|{'--:|' if memory else ''}",
    ]
    for row in race["rows"]:
        name = f"**{row['name']}**" if row["name"].startswith("regard") else row["name"]
        ratio, interval = "", ""
        if row["ratio"] is not None:
            ratio, interval = f"{row['ratio']:.2f}", f"{row['low']:.2f} .. {row['high']:.2f}"
        peak = f" {row['memory_gb']:.1f} |" if row["memory_gb"] is not None else " |" if memory else ""
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {ratio} | {interval} | {row['parameters']:,} |{peak}"
        )
    ours = [row for row in race["rows"] if row["name"].startswith("regard") and row["against"]]
    if ours:
        peers = list(ours[0]["against"])
        lines += ["", f"| ratio to | {' | '.join(peers)} |", f"|---|{'--:|' * len(peers)}"]
        lines += [
            f"| {row['name']} | {' | '.join(f'{ratio:.2f}' for ratio in row['against'].values())} |" for row in ours
        ]
    return lines


def main() -> None:
    """Run the benchmarks or merge results, then write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("auto", *RACES), default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if options.merge:
        new = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
    else:
        new = [raced(task, shape, device, options.rounds) for task, shape in RACES[device]]
    today = datetime.now(UTC).date().isoformat()
    new = [{"date": today} | race for race in new]
    kept = HERE / "speed.json"
    old = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else []
    races = merged(old, new)
    kept.write_text(json.dumps(races, indent=1) + "\n", encoding="utf-8")
    (HERE / "speed.md").write_text(page(races), encoding="utf-8")


if __name__ == "__main__":
    main()
