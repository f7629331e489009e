"""Measure what regard reaches with no option but the files and `--time`, beside what a user would write instead.

    python bench/defaults.py --data FOLDER --texts tatoeba trec --time 5m --seed 1 --threads 2 --out results.jsonl
    python bench/defaults.py --page --out results.jsonl    # write docs/results/defaults.md from what was measured

FOLDER holds X.train and X.test of each text; `--prepare DATA` writes those that are missing (bench/texts.py). Systems
run one after another in processes of their own, each with the same cores and the same seconds. Every result is appended
to --out as a line of JSON as soon as it is there; a table of this call is printed at the end. An empty cache is used
for each run of regard, unless REGARD_CACHE is set, so that nothing is known from the run before.
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
REPEATS, LOOP = 4, 16  # a loop is a text that ends in so many repetitions, which are so many characters long at least


@dataclass(frozen=True)
class Text:
    """The way a text is given to `regard train`, what is measured on its test part, and what else is run on it."""

    option: str  # tsv, labelled, text
    metric: str  # of defaults_page.METRICS
    others: tuple[str, ...]
    tokenize: str = "13a"  # of BLEU
    valid: bool = False  # comes with a validation part, which a user would give


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
USUAL = {  # texts and time of the acceptance, by device
    "cpu": (("tatoeba", "libreoffice", "sigmorphon", "numbers", "trec", "sst2", "tinyshakespeare"), "5m"),
    "cuda": (("multi30k", "europarl", "aeslc", "wikitext", "imdb"), "3m"),
}
NEEDS = {"script": ("transformers", "transformers"), "bag": ("sklearn", "scikit-learn")}  # module, package


@dataclass(frozen=True)
class Job:
    """One text, to be learned by one system."""

    name: str
    train: Path
    valid: Path | None
    test: Path
    budget: float  # seconds
    device: str  # cpu or cuda
    threads: int | None
    seed: int
    work: Path  # an empty folder
    shape: str | None  # of the script; None: by text and device

    @property
    def text(self) -> Text:
        """The description of the text."""
        return TEXTS[self.name]


class FailedRunError(Exception):
    """A command that did not end with exit code 0."""


def ends_in_loop(text: str) -> bool:
    """Return whether a text ends in repetitions of one unit: REPEATS of them or more, LOOP characters or more."""
    text = text.rstrip()
    for length in range(1, len(text) // REPEATS + 1):
        repeats = max(REPEATS, math.ceil(LOOP / length))
        if repeats * length <= len(text) and text.endswith(text[-length:] * repeats):
            return True
    return False


def degenerate(outputs: Sequence[dict[str, Any]]) -> float:
    """Percent of outputs that reach the length limit or end in a loop."""
    return 100 * sum(not output["ended"] or ends_in_loop(output["text"]) for output in outputs) / len(outputs)


def rows(path: Path) -> list[tuple[str, str]]:
    """The two columns of a file."""
    cells = (line.split("\t", 1) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return [(cell[0], cell[1]) for cell in cells]


def scored(text: Text, outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The scores of outputs; that of the text's metric is among them."""
    if text.metric == "accuracy":
        return {"accuracy": metrics.accuracy(outputs, references).value}
    if text.metric == "rougeL":
        kinds = ("rouge1", "rouge2", "rougeL")
        found = metrics.rouge(outputs, references)
        return {kind: score.value for kind, score in zip(kinds, found, strict=True)}
    bleu = metrics.bleu(outputs, references, text.tokenize).value
    return {
        "bleu": bleu,
        "chrf": metrics.chrf(outputs, references).value,
        "exact_match": metrics.exact_match(outputs, references).value,
    }


def likelihood(nll: float, test: str) -> dict[str, float]:
    """Nats a character and perplexity a word of a test text, line feeds counted as characters and as words."""
    lines = test.removesuffix("\n").split("\n")
    words = sum(len(line.split()) + 1 for line in lines)
    characters = sum(len(line) + 1 for line in lines)
    return {"nats_per_character": nll / characters, "perplexity_per_word": math.exp(nll / words)}


def run(command: Sequence[str | Path], job: Job, log: str) -> str:
    """Run a command with the job's device and threads; return its stdout. Its stderr goes into the work folder."""
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
    """Train with the defaults, then translate, classify or evaluate with the defaults."""
    command, model = [sys.executable, "-m", "regard"], job.work / "run"
    options: list[str | Path] = [f"--{job.text.option}", job.train, "--time", f"{job.budget:g}s", "--out", model]
    if job.valid is not None:
        options += ["--valid", job.valid]
    if job.seed != 1:  # which is the default
        options += ["--set", f"train.seed={job.seed}"]
    began = time.perf_counter()
    summary = json.loads(run([*command, "train", *options, "--json"], job, "train.log"))
    trained = time.perf_counter()
    found = {
        "steps": summary["step"],
        "train_seconds": trained - began,
        "parameters": summary["parameters"],
        "baselines": summary.get("baselines"),
        "why": summary["why"],
    }
    if job.text.option == "text":
        report = json.loads(run([*command, "evaluate", model, "--text", job.test, "--json"], job, "evaluate.log"))
        found["nll"] = report["loss"] * report["tokens"]
    else:
        inputs = job.work / "inputs"
        column = 0 if job.text.option == "tsv" else 1
        inputs.write_text("".join(f"{row[column]}\n" for row in rows(job.test)), encoding="utf-8")
        use = "translate" if job.text.option == "tsv" else "classify"
        outputs = json.loads(run([*command, use, model, inputs, "--json"], job, f"{use}.log"))
        if use == "translate":
            found["outputs"] = [{"text": best[0]["text"], "ended": best[0]["ended"]} for best in outputs]
        else:
            found["outputs"] = [{"text": guess["label"], "ended": True} for guess in outputs]
    return found | {"decode_seconds": time.perf_counter() - trained}


def competitor(system: str, job: Job) -> dict[str, Any]:
    """Run bench/competitors/SYSTEM.py."""
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
    """Run one system, and measure it."""
    record: dict[str, Any] = dict.fromkeys(MEASURED)
    module, package = NEEDS.get(system, ("regard", "regard"))
    if find_spec(module) is None:
        return record | {"error": f"not installed: {package}"}
    try:
        found = regard(job) if system == "regard" else competitor(system, job)
    except FailedRunError as error:
        return record | {"error": str(error)}
    if "nll" in found:
        scores = likelihood(found["nll"], job.test.read_text(encoding="utf-8"))
    else:
        references = [row[1 if job.text.option == "tsv" else 0] for row in rows(job.test)]
        scores = scored(job.text, [output["text"] for output in found["outputs"]], references)
        if job.text.option == "tsv":
            record["degenerate_percent"] = degenerate(found["outputs"])
    record |= {name: found[name] for name in record if name in found}
    record |= {"score": scores[job.text.metric], "scores": scores, "wall_seconds": found["train_seconds"]}
    if system in ("regard", "script"):  # the others take as long as they take
        record["within_10_percent"] = abs(found["train_seconds"] / job.budget - 1) <= 0.1
    return record


def facts(device: str, commit: str | None) -> dict[str, Any]:
    """Return commit, processor and versions that results were measured with."""
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
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of X.train and X.test")
    parser.add_argument("--prepare", type=Path, metavar="DATA", help="write missing texts from these data sets")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, metavar="TEXT", help=f"of {', '.join(TEXTS)}")
    parser.add_argument("--systems", nargs="+", choices=defaults_page.SYSTEMS, default=list(defaults_page.SYSTEMS))
    parser.add_argument("--time", nargs="+", help="time budgets: 90s, 5m, 1h")
    parser.add_argument("--seed", nargs="+", type=int, default=[1])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, help="cores of each system; all that there are if not given")
    parser.add_argument("--part", choices=("test", "valid"), default="test", help="valid: to choose settings")
    parser.add_argument("--shape", choices=("small", "medium", "base"), help="size of the Hugging Face script")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep runs, outputs and logs in this new folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "defaults.jsonl", help="where results are appended")
    parser.add_argument("--commit", help="the commit, where there is no git")
    parser.add_argument(
        "--page", action="store_true", help="measure nothing; write docs/results/defaults.md from --out"
    )
    given = parser.parse_args()
    if given.page:
        return given
    if given.data is None:
        parser.error("--data is missing; name the folder of X.train and X.test")
    if given.device == "auto":
        given.device = "cuda" if torch.cuda.is_available() else "cpu"
    given.texts, usual = given.texts or USUAL[given.device][0], USUAL[given.device][1]
    try:
        given.budgets = [seconds(text, "--time") for text in given.time or [usual]]
    except RegardError as error:
        parser.error(str(error))
    for name in given.texts:
        if given.prepare is not None:
            texts.prepare(given.prepare, given.data, name)
        for part in ("train", given.part):
            if not (given.data / f"{name}.{part}").exists():
                parser.error(f"{given.data / f'{name}.{part}'} is missing; --prepare DATA writes it")
        if TEXTS[name].metric == "rougeL" and find_spec("rouge_score") is None:
            parser.error(f"{name} is measured by ROUGE, which needs rouge-score: pip install 'regard[metrics]'")
    return given


def measure(given: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Run every system on every text; append each result to the file of results."""
    cores = sorted(os.sched_getaffinity(0))
    if given.threads is not None:
        if given.threads > len(cores):
            sys.exit(f"--threads {given.threads}: this process may use {len(cores)} cores; give at most as many")
        os.sched_setaffinity(0, cores[: given.threads])  # inherited by every system, however it counts threads
    about, found = facts(given.device, given.commit), []
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name, budget, seed in ((n, b, s) for n in given.texts for b in given.budgets for s in given.seed):
        counted = () if seed == given.seed[0] else ("bag", "ngram")  # which do not depend on the seed
        for system in ("regard", *TEXTS[name].others):
            if system not in given.systems or system in counted:
                continue
            folder = work / f"{name}-{system}-{budget:g}s-{seed}"
            folder.mkdir()
            valid = given.data / f"{name}.valid" if TEXTS[name].valid else None
            train, test = given.data / f"{name}.train", given.data / f"{name}.{given.part}"
            job = Job(name, train, valid, test, budget, given.device, given.threads, seed, folder, given.shape)
            record: dict[str, Any] = {
                "text": name,
                "part": given.part,
                "system": system,
                "metric": job.text.metric,
                "device": given.device,
                "threads": given.threads or len(cores),
                "time": budget,
                "seed": seed,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "load": os.getloadavg()[0],  # of the machine, before
            }
            record |= result(system, job) | about
            with open(given.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            found.append(record)
            shown = record["error"] or f"{record['score']:.3f} in {record['wall_seconds']:.0f} s"
            print(f"{name}, {defaults_page.clock(budget)}, seed {seed}, {system}: {shown}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure and print the table, or write the page."""
    given = arguments()
    if given.page:
        if not given.out.exists():
            sys.exit(f"{given.out}: there is no such file of results; measure first")
        results = [json.loads(line) for line in given.out.read_text(encoding="utf-8").splitlines()]
        (RESULTS / "defaults.md").write_text(defaults_page.page(results), encoding="utf-8")
        return
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=False)
        results = measure(given, given.keep)
    else:
        with tempfile.TemporaryDirectory() as work:
            results = measure(given, Path(work))
    print("\n".join(defaults_page.table(results)))


if __name__ == "__main__":
    main()
