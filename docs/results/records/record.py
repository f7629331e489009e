"""The 60-second translator: trains recipes/record.toml on Multi30k en-de; notes how long it took and how good it is.

python docs/results/records/record.py FOLDER [--seeds 1 2 3] [--name NAME] [--set PATH=VALUE ...]

FOLDER holds train, val and test_2016_flickr of the official tokenised text (`*.en`, `*.de`, also `.gz`). What is noted
goes to NAME beside this file: a line of records.jsonl, the recipe as it was run, and the log of every seed.
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
MARK = 300.0  # seconds of Hugging Face Marian with the Transformer-Tiny recipe on the same GPU, to 41.4 BLEU


def found(folder: Path, part: str, language: str) -> str:
    """The file of one part and language, whatever the rest of its name."""
    fitting = sorted(path for path in folder.glob(f"{part}*.{language}*") if path.suffix in {f".{language}", ".gz"})
    if not fitting:
        sys.exit(f"record: there is no {part}*.{language} in {folder}; give the folder multi30k/tok")
    return str(fitting[0])


def regard(*arguments: str) -> str:
    """What a command says on stdout."""
    return subprocess.run(
        [sys.executable, "-m", "regard", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def trained(folder: Path, run: Path, seed: int, changes: list[str]) -> dict[str, Any]:
    """One run: seconds of training by its own log and of the whole command, and BLEU of both texts."""
    sides = {"--source": "train", "--valid-source": "val"}
    files = [value for option, part in sides.items() for value in (option, found(folder, part, "en"))]
    files += [v for o, part in sides.items() for v in (o.replace("source", "target"), found(folder, part, "de"))]
    settings = [value for change in (f"train.seed={seed}", *changes) for value in ("--set", change)]
    began = time.perf_counter()
    regard("train", str(RECIPE), *files, "--out", str(run), *settings)
    whole = time.perf_counter() - began
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    scores = {}
    for part in ("val", "test_2016_flickr"):
        name = part if list(folder.glob(f"{part}*")) else "test"
        files = ["--source", found(folder, name, "en"), "--reference", found(folder, name, "de")]
        scored = json.loads(regard("evaluate", str(run), *files, "--tokenize", "none", "--beam", "5", "--json"))
        scores[part] = {key: scored[key] for key in ("bleu", "chrf", "perplexity", "signature")}
    program = [event for event in log if event["event"] == "executor"]
    return {"seed": seed, "seconds": log[-1]["time"], "whole": whole, "program": program, **scores}


def main() -> None:
    """Train the seeds, one after the other, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--name", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="PATH=VALUE")
    parser.add_argument("--into", type=Path, default=HERE)
    given = parser.parse_args()
    into: Path = given.into / given.name
    into.mkdir(parents=True, exist_ok=True)
    (into / "recipe.toml").write_text(RECIPE.read_text())
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in given.seeds:
            run = Path(scratch) / f"seed{seed}"
            rows.append(trained(given.folder, run, seed, given.changes))
            (into / f"log-{seed}.jsonl").write_text((run / "log.jsonl").read_text())
            machine = json.loads((run / "environment.json").read_text())
            del machine["command"]  # it has the paths of this machine
            (into / "environment.json").write_text(json.dumps(machine, indent=2) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    seconds = statistics.mean(row["seconds"] for row in rows)
    test = statistics.mean(row["test_2016_flickr"]["bleu"] for row in rows)
    record = {"name": given.name, "changes": given.changes, "seconds": seconds, "ratio": MARK / seconds, "test": test}
    with (given.into / "records.jsonl").open("a") as file:
        file.write(json.dumps(record | {"rows": rows}) + "\n")
    print(f"{seconds:.1f} s of training, {MARK / seconds:.1f} times the mark; test BLEU {test:.2f}")


if __name__ == "__main__":
    main()
