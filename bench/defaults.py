"""Measure the quality of regard's defaults (only files and `--time` are given), compared with competitors.

    python bench/defaults.py --data FOLDER --texts tatoeba trec --time 5m --seed 1 --threads 2 --out results.jsonl
    python bench/defaults.py --page --out results.jsonl    # write docs/results/defaults.md from the results

FOLDER contains X.train and X.test for every text X; `--prepare DATA` writes missing files (bench/texts.py). Systems run
one after another in separate processes, with the same cores and the same training time. Every result is appended to
--out as a JSON line as soon as it is known. At the end, a table of the new results is printed. Every run of regard uses
an empty cache, unless REGARD_CACHE is set, so that runs do not profit from earlier ones.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import defaults_page
import texts
import torch

from regard.errors import RegardError
from regard.evaluation import metrics
from regard.planner.threads import cpu
from regard.runs.options import seconds
from regard.training.log import version

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"
PACKAGES = ("torch", "transformers", "tokenizers", "scikit-learn", "numpy", "sacrebleu", "rouge-score")
MEASURED = (
    *("score", "scores", "steps", "parameters", "wall_seconds", "within_10_percent", "decode_seconds"),
    *("degenerate_percent", "baselines", "choice", "why", "error"),
)
REPEATS, LOOP = 4, 16  # a loop: a text ends in at least 4 repetitions of a string, together at least 16 characters


@dataclass(frozen=True)
class Text:
    """How a text is passed to `regard train`, the metric on its test set, and the other systems to compare."""

    option: str  # tsv, labelled or text
    metric: str  # a key of defaults_page.METRICS
    others: tuple[str, ...]
    tokenize: str = "13a"  # tokenisation for BLEU
    valid: bool = False  # has an official validation set, which users would pass to `regard train`


TEXTS = {
    "tatoeba": Text("tsv", "bleu", ("script",)),
    "libreoffice": Text("tsv", "bleu", ("script",)),
    "sigmorphon": Text("tsv", "exact_match", ("script",)),
    "numbers": Text("tsv", "exact_match", ("script",)),
    "trec": Text("labelled", "accuracy", ("bag",)),
    "sst2": Text("labelled", "accuracy", ("bag",)),
    "tinyshakespeare": Text("text", "nats_per_character", ("ngram",), valid=True),
    "multi30k": Text("tsv", "bleu", ("script",), tokenize="none", valid=True),
    "europarl": Text("tsv", "bleu", ("script",)),
    "aeslc": Text("tsv", "rougeL", ("script",)),
    "wikitext": Text("text", "perplexity_per_word", ("ngram",)),
    "imdb": Text("labelled", "accuracy", ("bag",)),
}
USUAL = {  # default texts and training time, by device
    "cpu": (("tatoeba", "libreoffice", "sigmorphon", "numbers", "trec", "sst2", "tinyshakespeare"), "5m"),
    "cuda": (("multi30k", "europarl", "aeslc", "wikitext", "imdb"), "3m"),
}
NEEDS = {"script": ("transformers", "transformers"), "bag": ("sklearn", "scikit-learn")}  # module, package


@dataclass(frozen=True)
class Job:
    """One training run: one system on one text."""

    name: str
    train: Path
    valid: Path | None
    test: Path
    budget: float  # seconds
    device: str  # cpu or cuda
    threads: int | None
    seed: int
    work: Path  # an empty folder
    shape: str | None  # size of the Hugging Face script; None: depends on text and device

    @property
    def text(self) -> Text:
        """The entry of the text in TEXTS."""
        return TEXTS[self.name]


class FailedRunError(Exception):
    """Raised if a command ends with an exit code other than 0."""


def ends_in_loop(text: str) -> bool:
    """Return True if a text ends in at least REPEATS repetitions of a string, together at least LOOP characters."""
    text = text.rstrip()
    for length in range(1, len(text) // REPEATS + 1):
        repeats = max(REPEATS, math.ceil(LOOP / length))
        if repeats * length <= len(text) and text.endswith(text[-length:] * repeats):
            return True
    return False


def degenerate(outputs: Sequence[dict[str, Any]]) -> float:
    """Return the percentage of outputs that reach the length limit or end in a loop."""
    return 100 * sum(not output["ended"] or ends_in_loop(output["text"]) for output in outputs) / len(outputs)


def rows(path: Path) -> list[tuple[str, str]]:
    """Return the two columns of a tab-separated file as pairs."""
    cells = (line.split("\t", 1) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return [(cell[0], cell[1]) for cell in cells]


def scored(text: Text, outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return scores of the outputs by metric, including the metric of the text."""
    if text.metric == "accuracy":
        return {"accuracy": metrics.accuracy(outputs, references).value}
    if text.metric == "rougeL":
        kinds = ("rouge1", "rouge2", "rougeL")
        rouge = metrics.rouge(outputs, references)
        return {kind: score.value for kind, score in zip(kinds, rouge, strict=True)}
    bleu = metrics.bleu(outputs, references, text.tokenize).value
    return {
        "bleu": bleu,
        "chrf": metrics.chrf(outputs, references).value,
        "exact_match": metrics.exact_match(outputs, references).value,
    }


def likelihood(nll: float, test: str) -> dict[str, float]:
    """Return nats per character and perplexity per word. A line feed counts as a character and as a word."""
    lines = test.removesuffix("\n").split("\n")
    words = sum(len(line.split()) + 1 for line in lines)
    characters = sum(len(line) + 1 for line in lines)
    return {"nats_per_character": nll / characters, "perplexity_per_word": math.exp(nll / words)}


def run(command: Sequence[str | Path], job: Job, log: str) -> str:
    """Run a command on the job's device, and return its stdout. Its stderr is written to the file `log`."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    }
    environment = {"REGARD_CACHE": str(job.work / "cache"), "TRANSFORMERS_VERBOSITY": "error"} | environment
    if job.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with open(job.work / log, "w", encoding="utf-8") as errors:
        done = subprocess.run(
            list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    if done.returncode:
        lines = (job.work / log).read_text(encoding="utf-8").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        raise FailedRunError(f"failed ({done.returncode}): {last.strip()}")
    return done.stdout


def regard(job: Job) -> dict[str, Any]:
    """Train regard with its defaults, then translate, classify or evaluate the test set. Return the measurements."""
    command, model = [sys.executable, "-m", "regard"], job.work / "run"
    options: list[str | Path] = [f"--{job.text.option}", job.train, "--time", f"{job.budget:g}s", "--out", model]
    if job.valid is not None:
        options += ["--valid", job.valid]
    if job.seed != 1:  # 1 is the default
        options += ["--set", f"train.seed={job.seed}"]
    began = time.perf_counter()
    summary = json.loads(run([*command, "train", *options, "--json"], job, "train.log"))
    trained = time.perf_counter()
    measured = {
        "steps": summary["step"],
        "train_seconds": trained - began,
        "parameters": summary["parameters"],
        "baselines": summary.get("baselines"),
        "why": summary["why"],
    }
    if job.text.option == "text":
        report = json.loads(run([*command, "evaluate", model, "--text", job.test, "--json"], job, "evaluate.log"))
        measured["nll"] = report["loss"] * report["tokens"]
    else:
        inputs = job.work / "inputs"
        column = 0 if job.text.option == "tsv" else 1
        inputs.write_text("".join(f"{row[column]}\n" for row in rows(job.test)), encoding="utf-8")
        use = "translate" if job.text.option == "tsv" else "classify"
        outputs = json.loads(run([*command, use, model, inputs, "--json"], job, f"{use}.log"))
        if use == "translate":
            measured["outputs"] = [{"text": best[0]["text"], "ended": best[0]["ended"]} for best in outputs]
        else:
            measured["outputs"] = [{"text": guess["label"], "ended": True} for guess in outputs]
    return measured | {"decode_seconds": time.perf_counter() - trained}


def competitor(system: str, job: Job) -> dict[str, Any]:
    """Run bench/competitors/SYSTEM.py and return its measurements."""
    out = job.work / "found.json"
    options: list[str | Path] = [job.train, job.test, "--out", out]
    if system == "script":
        shape = job.shape or ("small" if job.device == "cpu" else "base" if job.name == "europarl" else "medium")
        options += ["--time", f"{job.budget:g}", "--device", job.device, "--seed", str(job.seed), "--shape", shape]
        options += ["--threads", str(job.threads)] if job.threads else []
    elif system == "bag":
        options += ["--seed", str(job.seed)]
    else:
        options += ["--unit", "characters" if job.text.metric == "nats_per_character" else "words"]
    run([sys.executable, HERE / "competitors" / f"{system}.py", *options], job, "log")
    return json.loads(out.read_text(encoding="utf-8"))


def result(system: str, job: Job) -> dict[str, Any]:
    """Run one system, and return its scores and times, or the error."""
    record: dict[str, Any] = dict.fromkeys(MEASURED)
    module, package = NEEDS.get(system, ("regard", "regard"))
    if find_spec(module) is None:
        return record | {"error": f"not installed: {package}"}
    try:
        measured = regard(job) if system == "regard" else competitor(system, job)
    except FailedRunError as error:
        return record | {"error": str(error)}
    if "nll" in measured:
        scores = likelihood(measured["nll"], job.test.read_text(encoding="utf-8"))
    else:
        references = [row[1 if job.text.option == "tsv" else 0] for row in rows(job.test)]
        scores = scored(job.text, [output["text"] for output in measured["outputs"]], references)
        if job.text.option == "tsv":
            record["degenerate_percent"] = degenerate(measured["outputs"])
    record |= {name: measured[name] for name in record if name in measured}
    record |= {"score": scores[job.text.metric], "scores": scores, "wall_seconds": measured["train_seconds"]}
    if system in ("regard", "script"):  # the other systems have no time limit
        record["within_10_percent"] = abs(measured["train_seconds"] / job.budget - 1) <= 0.1
    return record


def facts(device: str, commit: str | None) -> dict[str, Any]:
    """Return the commit, the hardware and the package versions, which are stored with every result."""
    try:
        git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
        commit = commit or subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "commit": commit,
        "cpu": cpu(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "versions": {"Python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    }


def arguments() -> argparse.Namespace:
    """Return the parsed and checked command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with X.train and X.test for every text X")
    parser.add_argument("--prepare", type=Path, metavar="DATA", help="write missing texts from the data sets in DATA")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, metavar="TEXT", help=f"some of {', '.join(TEXTS)}")
    parser.add_argument("--systems", nargs="+", choices=defaults_page.SYSTEMS, default=list(defaults_page.SYSTEMS))
    parser.add_argument("--time", nargs="+", help="training times, such as 90s, 5m or 1h")
    parser.add_argument("--seed", nargs="+", type=int, default=[1])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="number of CPU cores; default: all")
    parser.add_argument("--part", choices=("test", "valid"), default="test", help="valid is for the choice of settings")
    parser.add_argument("--shape", choices=("small", "medium", "base"), help="size of the Hugging Face script")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep runs, outputs and logs in this new folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "defaults.jsonl", help="file to append results to")
    parser.add_argument("--commit", help="commit to store, if git is not available")
    parser.add_argument(
        "--page", action="store_true", help="only write docs/results/defaults.md, from the results in --out"
    )
    options = parser.parse_args()
    if options.page:
        return options
    if options.data is None:
        parser.error("--data is missing; give the folder with X.train and X.test")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.texts, usual = options.texts or USUAL[options.device][0], USUAL[options.device][1]
    try:
        options.budgets = [seconds(text, "--time") for text in options.time or [usual]]
    except RegardError as error:
        parser.error(str(error))
    for name in options.texts:
        if options.prepare is not None:
            texts.prepare(options.prepare, options.data, name)
        for part in ("train", options.part):
            if not (options.data / f"{name}.{part}").exists():
                parser.error(f"{options.data / f'{name}.{part}'} is missing; write it with --prepare DATA")
        if TEXTS[name].metric == "rougeL" and find_spec("rouge_score") is None:
            parser.error(f"{name} is measured by ROUGE, which needs rouge-score: pip install 'regard[metrics]'")
    return options


def measure(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Run every system on every text, append every result to the results file, and return the results."""
    cores = sorted(os.sched_getaffinity(0))
    if options.threads is not None:
        if options.threads > len(cores):
            sys.exit(f"--threads {options.threads}: this process may use {len(cores)} cores; give at most as many")
        os.sched_setaffinity(0, cores[: options.threads])  # inherited by the processes of all systems
    about, results = facts(options.device, options.commit), []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name, budget, seed in ((n, b, s) for n in options.texts for b in options.budgets for s in options.seed):
        done_before = () if seed == options.seed[0] else ("bag", "ngram")  # these two do not depend on the seed
        for system in ("regard", *TEXTS[name].others):
            if system not in options.systems or system in done_before:
                continue
            folder = work / f"{name}-{system}-{budget:g}s-{seed}"
            folder.mkdir()
            valid = options.data / f"{name}.valid" if TEXTS[name].valid else None
            train, test = options.data / f"{name}.train", options.data / f"{name}.{options.part}"
            job = Job(name, train, valid, test, budget, options.device, options.threads, seed, folder, options.shape)
            record: dict[str, Any] = {
                "text": name,
                "part": options.part,
                "system": system,
                "metric": job.text.metric,
                "device": options.device,
                "threads": options.threads or len(cores),
                "time": budget,
                "seed": seed,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "load": os.getloadavg()[0],  # load of the machine before the run
            }
            record |= result(system, job) | about
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            results.append(record)
            outcome = record["error"] or f"{record['score']:.3f} in {record['wall_seconds']:.0f} s"
            print(
                f"{name}, {defaults_page.clock(budget)}, seed {seed}, {system}: {outcome}", file=sys.stderr, flush=True
            )
    return results


def main() -> None:
    """Run the systems and print a table, or write the page from existing results."""
    options = arguments()
    if options.page:
        if not options.out.exists():
            sys.exit(f"{options.out}: there is no such file; run the script without --page first")
        results = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
        (RESULTS / "defaults.md").write_text(defaults_page.page(results), encoding="utf-8")
        return
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=False)
        results = measure(options, options.keep)
    else:
        with tempfile.TemporaryDirectory() as work:
            results = measure(options, Path(work))
    print("\n".join(defaults_page.table(results)))


if __name__ == "__main__":
    main()
