"""Train recipes/aeslc.toml and changes of it with several seeds; print ROUGE on the development set.

    PYTHONPATH=src python docs/results/aeslc.py $REGARD_DATA                             # the recipe, three seeds
    PYTHONPATH=src python docs/results/aeslc.py $REGARD_DATA --try all --seeds 1 --jobs 4  # each change, one seed

A run takes about three minutes on a GPU. Finished runs are not trained again, so the script can be stopped at any time.
Scores are those of rouge-score: of words in any script, as `regard evaluate` prints them, and of English words with the
Porter stemmer, as published scores are usually computed. Checkpoints are chosen on the development set, too.
"""

import argparse
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import regard
from regard.data.text import TSV
from regard.evaluation.metrics import rouge
from regard.training.checkpoint import RunFolder, write_json

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "aeslc.toml"
# Changes of the recipe: modifications by name, then edits
CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "recipe": ((), ()),
    "subwords_4000": ((), ("data.tokenizer.vocab=4000",)),
    "word_dropout": ((), ("model.input.word_dropout=0.1",)),
    "dropout_0.2": ((), ("model.dropout=0.2",)),
    "dropout_0.1": ((), ("model.dropout=0.1",)),
    "base": ((), ("model.d_model=512", "model.heads=8", "model.dropout=0.1", "train.optimizer.learning_rate=7e-4")),
    "packed": ((), ("data.batching=packing", "data.batching.tokens=8192", "data.batching.length=264")),
    "half_the_steps": ((), ("train.steps=3000", "train.schedule.warmup=300")),
    "average": ((), ("train.average=5",)),
    "first_128_tokens": ((), ("data.max_len=128",)),
    "extract": ((), ("data.long=extract", "data.max_len=128")),
    "decoder_only": (("decoder_only",), ()),
    "loss_on_all": (("decoder_only",), ("model.loss_on=all",)),
    "prefix_lm": (("prefix_lm",), ()),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "beam 5": {},
    "greedy": {"beam": 1},
    "beam 5, sum": {"changes": "normalise=none"},
}
NAMES = ("rouge1", "rouge2", "rougeL")


def prepared(data: Path, folder: Path, cased: bool) -> dict[str, Path]:
    """Write the e-mails as tab-separated text, one on each line, in lower case unless `cased`; return the files."""
    files = {}
    for part in ("train", "dev"):
        files[part] = folder / f"{part}.{'cased' if cased else 'lower'}.tsv"
        if not files[part].exists():
            folder.mkdir(parents=True, exist_ok=True)
            with gzip.open(data / "aeslc" / f"{part}.jsonl.gz", "rt", encoding="utf-8") as lines:
                records = [json.loads(line) for line in lines]
            pairs = [[" ".join(record[name].split()) for name in ("body", "subject")] for record in records]
            text = "".join(f"{body}\t{subject}\n" for body, subject in pairs)
            files[part].write_text(text if cased else text.lower(), encoding="utf-8")
    return files


def run_one(name: str, seed: int, options: argparse.Namespace) -> None:
    """Train a changed recipe with one seed, and write its scores."""
    files, out = prepared(options.data, options.out, options.cased), options.out / f"{name}-{seed}"
    variants, changes = CHANGES[name]
    began = time.monotonic()
    if RunFolder(out).request.exists():
        run = regard.resume(out, options.device)
    else:
        run = regard.train(
            out,
            recipe=RECIPE,
            tsv=files["train"],
            valid=files["dev"],
            variants=list(variants),
            changes=[*changes, *options.set, f"train.seed={seed}"],
            device=options.device,
        )
    seconds = time.monotonic() - began
    pairs = list(TSV(str(files["dev"])).records())[: options.texts]
    references = [subject for _, subject in pairs]
    scores = {}
    for search, how in SEARCHES.items():
        outputs = run.translate([body for body, _ in pairs], **how)
        plain, stemmed = rouge(outputs, references, "unicode"), rouge(outputs, references, stem=True)
        named = zip((*NAMES, *(f"{name}, stemmed" for name in NAMES)), (*plain, *stemmed), strict=True)
        scores[search] = {name: score.value for name, score in named}
    result = {"name": name, "seed": seed, "seconds": seconds, "step": run.step, "scores": scores}
    write_json(result_file(options.out, name, seed), result)


def result_file(folder: Path, name: str, seed: int) -> Path:
    """Return the name of the file with the scores of a run."""
    return folder / f"{name}-{seed}.json"


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: mean and standard deviation of the scores over the seeds."""
    columns = (*NAMES, "rougeL, stemmed")
    lines = [f"| run | search | seeds | {' | '.join(columns)} |", f"|---|---|--:|{'--:|' * len(columns)}"]
    for name in dict.fromkeys(result["name"] for result in results):
        runs = [result["scores"] for result in results if result["name"] == name]
        for search in SEARCHES:
            cells = []
            for column in columns:
                values = [scores[search][column] for scores in runs]
                cells.append(f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else ""))
            lines.append(f"| {name} | {search} | {len(runs)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Train what is missing, several runs at a time, then print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder that contains aeslc/")
    parser.add_argument("--try", dest="names", default="recipe", help=f"{', '.join(CHANGES)}, or all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="simultaneous runs")
    parser.add_argument("--out", type=Path, default=Path("runs/aeslc-sweep"), help="folder of the training runs")
    parser.add_argument("--cased", action="store_true", help="keep upper case; use another --out")
    parser.add_argument("--texts", type=int, help="evaluate only so many e-mails")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], help="edit of the recipe: path=value")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help="train a single run")
    options = parser.parse_args()
    if options.one:
        run_one(options.one[0], int(options.one[1]), options)
        return
    names = list(CHANGES) if options.names == "all" else options.names.split(",")
    if unknown := [name for name in names if name not in CHANGES]:
        sys.exit(f"--try: unknown name {unknown[0]!r}; choose from {', '.join(CHANGES)}")
    prepared(options.data, options.out, options.cased)
    jobs = [(name, seed) for seed in range(1, options.seeds + 1) for name in names]

    def start(job: tuple[str, int]) -> None:
        if not result_file(options.out, *job).exists():
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--one", job[0], str(job[1])], check=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(start, jobs))
    results = [json.loads(result_file(options.out, *job).read_text(encoding="utf-8")) for job in jobs]
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
