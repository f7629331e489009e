"""The 60-second translator: train recipes/record.toml on Multi30k en-de, and store training time and scores.

python docs/results/records/record.py FOLDER [--seeds 1 2 3] [--name NAME] [--set PATH=VALUE ...]

FOLDER contains train, val and test_2016_flickr of the official tokenised text (`*.en`, `*.de`, also `.gz`). The recipe
and the log of every seed are written to the folder NAME beside this file, and one line is added to records.jsonl.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECIPE = HERE.parent.parent.parent / "recipes" / "record.toml"
REFERENCE = 300.0  # seconds of Hugging Face Marian with the Transformer-Tiny recipe on the same GPU, to 41.4 BLEU


def path_of(folder: Path, part: str, language: str) -> str:
    """Return the path of the file with one part of the data (such as `train`) in one language."""
    paths = sorted(path for path in folder.glob(f"{part}*.{language}*") if path.suffix in {f".{language}", ".gz"})
    if not paths:
        sys.exit(f"record: there is no {part}*.{language} in {folder}; give the folder multi30k/tok")
    return str(paths[0])


def regard(*arguments: str) -> str:
    """Run the command `regard` with arguments, and return its stdout."""
    return subprocess.run(
        [sys.executable, "-m", "regard", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def train(folder: Path, run: Path, seed: int, changes: list[str]) -> dict[str, Any]:
    """Train with one seed. Return the training time, the time of the whole command, and the scores on val and test."""
    sides = {"--source": "train", "--valid-source": "val"}
    files = [value for option, part in sides.items() for value in (option, path_of(folder, part, "en"))]
    files += [v for o, part in sides.items() for v in (o.replace("source", "target"), path_of(folder, part, "de"))]
    settings = [value for change in (f"train.seed={seed}", *changes) for value in ("--set", change)]
    began = time.perf_counter()
    regard("train", str(RECIPE), *files, "--out", str(run), *settings)
    whole = time.perf_counter() - began
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    scores = {}
    for part in ("val", "test_2016_flickr"):
        name = part if list(folder.glob(f"{part}*")) else "test"
        files = ["--source", path_of(folder, name, "en"), "--reference", path_of(folder, name, "de")]
        scored = json.loads(regard("evaluate", str(run), *files, "--tokenize", "none", "--beam", "5", "--json"))
        scores[part] = {key: scored[key] for key in ("bleu", "chrf", "perplexity", "signature")}
    program = [event for event in log if event["event"] == "executor"]
    return {"seed": seed, "seconds": log[-1]["time"], "whole": whole, "program": program, **scores}


def main() -> None:
    """Train with every seed, one after the other, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--name", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="PATH=VALUE")
    parser.add_argument("--into", type=Path, default=HERE)
    options = parser.parse_args()
    into: Path = options.into / options.name
    into.mkdir(parents=True, exist_ok=True)
    (into / "recipe.toml").write_text(RECIPE.read_text())
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in options.seeds:
            run = Path(scratch) / f"seed{seed}"
            rows.append(train(options.folder, run, seed, options.changes))
            (into / f"log-{seed}.jsonl").write_text((run / "log.jsonl").read_text())
            machine = json.loads((run / "environment.json").read_text())
            del machine["command"]  # contains paths of this machine
            (into / "environment.json").write_text(json.dumps(machine, indent=2) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    seconds = statistics.mean(row["seconds"] for row in rows)
    test = statistics.mean(row["test_2016_flickr"]["bleu"] for row in rows)
    record = {
        "name": options.name,
        "changes": options.changes,
        "seconds": seconds,
        "ratio": REFERENCE / seconds,
        "test": test,
    }
    with (options.into / "records.jsonl").open("a") as file:
        file.write(json.dumps(record | {"rows": rows}) + "\n")
    print(f"{seconds:.1f} s of training, {REFERENCE / seconds:.1f} times the reference; test BLEU {test:.2f}")


if __name__ == "__main__":
    main()
