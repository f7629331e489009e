"""Climbs the ladder on Multi30k en-de and writes docs/results/ladder.md and ladder.jsonl.

PYTHONPATH=src python docs/results/ladder.py DATA [--seconds 60] [--seeds 3] [--out runs/ladder-multi30k] [--write DIR]

DATA holds multi30k/tok/ (recipes/README.md). Runs that are done are never repeated: stopped at any time, by hand or by
--max-time, the same command goes on, and the page has what is there. The learning rate of every rung is searched first,
on val and with the same effort, so that the test set is met once.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from regard.ablation.console import AblationConsole
from regard.ablation.experiment import Settings
from regard.ablation.ladder import Ladder, ladder, rates
from regard.ablation.runner import Resources
from regard.errors import RegardError
from regard.runs.request import request_from_options

HERE = Path(__file__).parent
RECIPE = HERE.parent.parent / "recipes" / "ladder.toml"
RUNGS = "rnn,rnn_attention,convs2s,bytenet"


def page(found: Ladder) -> str:
    """The page."""
    table = found.markdown().removeprefix("# The ladder\n")
    budget = f"{found.steps:,} steps" if found.seconds is None else f"{found.seconds:g} seconds of training"
    return "\n".join(
        [
            "# The ladder on Multi30k",
            "",
            "Written by `python docs/results/ladder.py`; the command that made it, and that completes it, is "
            f"`make ladder`. English to German, test_2016, tokenised BLEU of greedy translations; {budget} a run on "
            f"{', '.join(found.devices) or 'nothing yet'}, {found.seeds} seeds, equal parameters; a learning rate for "
            "each rung, searched on val with the same effort. A run's steps are what its rung makes in that time when "
            "it has the GPU for itself; where several runs shared it (`--jobs`), the clock said more. What the columns "
            "mean and how to read them: [docs/ladder.md](../ladder.md); every run: `ladder.jsonl`.",
            table,
        ]
    )


def lines(folder: Path, found: Ladder) -> list[str]:
    """Every run as a line of JSON, without what it said; then the ladder itself."""
    listed = folder / "results.jsonl"
    runs = [json.loads(line) for line in listed.read_bytes().split(b"\n") if line] if listed.exists() else []
    for run in runs:
        run.pop("said", None)
    return [json.dumps(record, ensure_ascii=False) for record in (*runs, {"ladder": found.json()})]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path, help="the folder that holds multi30k/tok/")
    parser.add_argument("--rungs", default=RUNGS)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, every run")
    parser.add_argument("--steps", type=int, help="instead of seconds")
    parser.add_argument("--search", type=int, default=300, help="steps of each run that looks for a rate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="runs/ladder-multi30k", help="the folder of the runs")
    parser.add_argument("--write", type=Path, default=HERE, help="where ladder.md and ladder.jsonl go")
    parser.add_argument("--max-time", type=float, help="seconds after which no run is begun")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, help="runs at once; their steps are what one alone makes in its seconds")
    parser.add_argument("--set", action="append", default=[], help="a change of the recipe, path=value")
    return parser.parse_args()


def main() -> None:
    """Search rates, climb, then write."""
    given = arguments()
    text = given.data / "multi30k" / "tok"

    def wanted(held_out: str) -> Any:
        parts = {"source": ("train", "en"), "target": ("train", "de")}
        parts |= {"valid_source": (held_out, "en"), "valid_target": (held_out, "de")}
        files: dict[str, Any] = {
            name: str(text / f"{part}.lc.norm.tok.{language}.gz") for name, (part, language) in parts.items()
        }
        return request_from_options(**files, recipe=RECIPE, changes=given.set)

    view, out = AblationConsole(), Path(given.out)
    how = (Resources(given.device, given.jobs), view.note)
    try:
        factors = rates(wanted("val"), out / "rates", given.rungs, Settings(steps=given.search), *how)
        print(f"rates: {factors}", file=sys.stderr)
        seconds = None if given.steps else given.seconds
        settings = Settings(
            seeds=given.seeds, steps=given.steps, seconds=seconds, max_time=given.max_time, rates=factors
        )
        found = ladder(wanted("test_2016_flickr"), out / "runs", given.rungs, settings, *how)
    except RegardError as error:
        sys.exit(str(error))
    finally:
        view.close()
    given.write.mkdir(parents=True, exist_ok=True)
    (given.write / "ladder.md").write_text(page(found), encoding="utf-8")
    (given.write / "ladder.jsonl").write_text("\n".join(lines(out / "runs", found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
