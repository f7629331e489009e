"""Compare the ladder on Multi30k en-de and write docs/results/ladder.md and ladder.jsonl.

PYTHONPATH=src python docs/results/ladder.py DATA [--seconds 60] [--seeds 3] [--out runs/ladder-multi30k] [--write DIR]

DATA contains multi30k/tok/ (recipes/README.md). The script can be stopped at any time, by hand or with --max-time. To
continue, run it again; finished training runs are not repeated. First, the best learning rate of every model is
searched on val, with equally many runs for each model, so that the test set is used only once.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from regard.ablation.console import AblationConsole
from regard.ablation.experiment import Settings
from regard.ablation.ladder import Ladder, ladder, rates
from regard.ablation.parallel import Resources
from regard.errors import RegardError
from regard.runs.request import request_from_options

HERE = Path(__file__).parent
RECIPE = HERE.parent.parent / "recipes" / "ladder.toml"
RUNGS = "rnn,rnn_attention,convs2s,bytenet"


def page(result: Ladder) -> str:
    """Return ladder.md as text."""
    table = result.markdown().removeprefix("# The ladder\n")
    budget = f"{result.steps:,} steps" if result.seconds is None else f"{result.seconds:g} seconds of training"
    return "\n".join(
        [
            "# The ladder on Multi30k: the Transformer and its predecessors",
            "",
            "Written by `make ladder` (`docs/results/ladder.py`), which continues if it was stopped. English to "
            f"German, test_2016, tokenised BLEU of greedy translations; {budget} per run on "
            f"{', '.join(result.devices) or 'nothing yet'}, {result.seeds} seeds, equal parameters; a learning rate "
            "for each rung, searched on val with equal effort. The number of steps is that of a run alone on the GPU "
            "in this time; where several runs shared the GPU (`--jobs`), they took longer. "
            "[docs/ladder.md](../ladder.md) explains the columns; `ladder.jsonl` has every run.",
            table,
        ]
    )


def lines(folder: Path, result: Ladder) -> list[str]:
    """Return the lines of ladder.jsonl: every training run without its outputs, then the whole ladder."""
    listed = folder / "results.jsonl"
    runs = [json.loads(line) for line in listed.read_bytes().split(b"\n") if line] if listed.exists() else []
    for run in runs:
        run.pop("said", None)
    return [json.dumps(record, ensure_ascii=False) for record in (*runs, {"ladder": result.json()})]


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path, help="folder that contains multi30k/tok/")
    parser.add_argument("--rungs", default=RUNGS)
    parser.add_argument("--seconds", type=float, default=30.0, help="training time of every run in seconds")
    parser.add_argument("--steps", type=int, help="training steps instead of seconds")
    parser.add_argument("--search", type=int, default=300, help="steps of each run of the learning-rate search")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default="runs/ladder-multi30k", help="folder of the training runs")
    parser.add_argument("--write", type=Path, default=HERE, help="folder of ladder.md and ladder.jsonl")
    parser.add_argument("--max-time", type=float, help="time limit in seconds; run the command again to continue")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, help="simultaneous runs; does not change the number of steps")
    parser.add_argument("--set", action="append", default=[], help="edit of the recipe: path=value")
    return parser.parse_args()


def main() -> None:
    """Search for learning rates, train all models, and write both files."""
    options = arguments()
    text = options.data / "multi30k" / "tok"

    def request(held_out: str) -> Any:
        parts = {"source": ("train", "en"), "target": ("train", "de")}
        parts |= {"valid_source": (held_out, "en"), "valid_target": (held_out, "de")}
        files: dict[str, Any] = {
            name: str(text / f"{part}.lc.norm.tok.{language}.gz") for name, (part, language) in parts.items()
        }
        return request_from_options(**files, recipe=RECIPE, changes=options.set)

    console, out = AblationConsole(), Path(options.out)
    how = (Resources(options.device, options.jobs), console.note)
    try:
        factors = rates(request("val"), out / "rates", options.rungs, Settings(steps=options.search), *how)
        print(f"learning rates: {factors}", file=sys.stderr)
        seconds = None if options.steps else options.seconds
        settings = Settings(
            seeds=options.seeds, steps=options.steps, seconds=seconds, max_time=options.max_time, rates=factors
        )
        result = ladder(request("test_2016_flickr"), out / "runs", options.rungs, settings, *how)
    except RegardError as error:
        sys.exit(str(error))
    finally:
        console.close()
    options.write.mkdir(parents=True, exist_ok=True)
    (options.write / "ladder.md").write_text(page(result), encoding="utf-8")
    (options.write / "ladder.jsonl").write_text("\n".join(lines(out / "runs", result)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
