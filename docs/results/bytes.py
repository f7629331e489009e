"""Train classifiers of film reviews, read as bytes, and write docs/results/bytes.md and bytes.jsonl.

    PYTHONPATH=src python docs/results/bytes.py DATA [--seeds 1] [--steps 3000] [--jobs 4] [--out runs/bytes]
    PYTHONPATH=src python docs/results/bytes.py DATA --quick   # tiny models on a CPU, in the folder of the runs
    PYTHONPATH=src python docs/results/bytes.py --page         # write bytes.md again from bytes.jsonl

DATA contains imdb/train.tsv.gz: class, number, stars and text of 25,000 reviews. The script can be stopped at any time,
by hand or with --max-time. To continue, run it again; finished training runs are not repeated.
"""

import argparse
import gzip
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from regard.ablation.parallel import Resources
from regard.bench.long_models import LongModel, Size, parameters, select
from regard.data.cache import Cache
from regard.data.prepare import prepare
from regard.errors import RegardError
from regard.models.build import build
from regard.models.encoder_only import EncoderOnly, SentenceClassifier
from regard.nn.block import Block
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.linformer import LengthProjectionModule
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.processes import python
from regard.recipe.recipe import PARTS
from regard.runs.request import request_from_options
from regard.tree import to_record, walk

HERE = Path(__file__).parent
MODELS = ("full", "window", "blocks", "big_bird", "linformer", "gated_delta", "hybrid")
# Accuracy on the 25,000 reviews of the test set, trained on all 25,000 of the training set (Tay et al. 2021, "Text").
PUBLISHED = {"full": 64.27, "big_bird": 64.02, "linformer": 53.94}

# The fifth of the reviews that is for validation. In both classes, the reviews of a film have successive numbers. Films
# with reviews of both classes are in the same order in both: the films of pos 10,000 to 12,499 are those of neg 3,050
# to about 4,000, and later reviews of neg are of films with hardly any of pos.
VALID = {"pos": range(10_000, 12_500), "neg": range(3_050, 5_550)}
MARGIN = 30  # the largest number of reviews of a film; so many reviews before and after a validation part are left out


class Review(NamedTuple):
    """A review of the data set."""

    label: str
    number: int
    text: str


@dataclass(frozen=True)
class Work:
    """The size of the models, the length of the texts and the training of all runs."""

    size: Size
    length: int  # bytes that are read of a review
    steps: int
    tokens: int  # bytes per batch, with padding
    learning_rate: float
    warmup: int
    thinned: int = 1  # every review of this many is used


# Each query attends to about 512 bytes in all models with sparse attention: a window of 255 to both sides, 8 blocks of
# 64 in BigBird. As in Long Range Arena: 4 layers of width 256, 4 heads, and the first 4,000 bytes.
WORK = Work(Size(4, 256, 4, 256, 64, 256, 259), 4_000, 3_000, 32_768, 5e-4, 300)
QUICK = Work(Size(2, 32, 2, 32, 16, 32, 259), 256, 150, 2_056, 2e-3, 15, thinned=20)


def reviews(path: Path) -> list[Review]:
    """Read the reviews of the data set."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        rows = (line.rstrip("\n").split("\t") for line in lines)
        return [Review(label, int(number), text) for label, number, _, text in rows]


def split(corpus: Sequence[Review]) -> tuple[list[Review], list[Review]]:
    """Divide reviews into training and validation, such that no film is in both as far as the numbers allow it."""
    valid = [review for review in corpus if review.number in VALID[review.label]]
    texts = {review.text for review in valid}
    return [review for review in corpus if not _is_near(review) and review.text not in texts], valid


def _is_near(review: Review) -> bool:
    """Return whether a review is in the validation part, or may be of the first or of the last film there."""
    part = VALID[review.label]
    return part.start - MARGIN <= review.number < part.stop + MARGIN


def write_split(data: Path, folder: Path, work: Work) -> dict[str, Any]:
    """Write train.tsv and valid.tsv with columns for class and text. Return facts about the split."""
    corpus = reviews(data / "imdb" / "train.tsv.gz")
    parts = dict(zip(("train", "valid"), split(corpus), strict=True))
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"reviews": len(corpus)}
    for name, part in parts.items():
        used = part[:: work.thinned]
        lines = "".join(f"{review.label}\t{review.text}\n" for review in used)
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8", newline="\n")
        lengths = [len(review.text.encode()) for review in used]
        facts[name] = {
            "reviews": len(used),
            "positive": sum(review.label == "pos" for review in used),
            "bytes": sum(min(length, work.length) for length in lengths),
            "truncated": sum(length > work.length for length in lengths),
            "sha256": hashlib.sha256(lines.encode()).hexdigest(),
        }
    return facts


def classifier(model: LongModel, work: Work) -> EncoderOnly:
    """Return the classifier with the layers of `model`. All have as many parameters as that with full attention.

    The hidden width of the feed-forward layers is chosen accordingly. The matrices of a Linformer that mix positions
    are not counted, because their number grows with the length.
    """
    hidden = 4 * work.size.d_model
    full, own = (_parameters(_classifier(each, work, hidden)) for each in (*select(["full"]), model))
    layers = 2 * work.size.d_model * work.size.depth
    return _classifier(model, work, max(8, hidden + 8 * round((full - own) / layers / 8)))


def _classifier(model: LongModel, work: Work, hidden: int) -> EncoderOnly:
    layers = model.mixers(work.size, work.length + 2)
    blocks = tuple(Block((layer, FeedForward(hidden)), PreNorm()) for layer in layers)
    return EncoderOnly(
        SentenceClassifier(2, pool="mean", pooler=False),
        vocab=work.size.vocab,
        d_model=work.size.d_model,
        heads=work.size.heads,
        dropout=0.1,
        encoder=Plain(blocks, len(blocks)),
    )


def _parameters(spec: EncoderOnly) -> int:
    built = build(spec, device="meta")
    mixtures = [part for part in built.modules() if isinstance(part, LengthProjectionModule)]
    return parameters(built) - sum(parameter.numel() for part in mixtures for parameter in part.parameters())


def recipe(spec: EncoderOnly, work: Work, seed: int) -> dict[str, Any]:
    """Return the recipe of a training run as a JSON object."""
    model = to_record(spec, PARTS)
    del model["vocab"]  # the size of the tokenizer
    optimizer = {"kind": "adamw", "learning_rate": work.learning_rate, "betas": [0.9, 0.99], "weight_decay": 0.1}
    return {
        "model": model,
        "data": {
            "objective": "classification",
            "tokenizer": "bytes",
            "max_len": work.length,
            "batching": {"kind": "buckets", "tokens": work.tokens},
        },
        "train": {
            "steps": work.steps,
            "seed": seed,
            "optimizer": optimizer,
            "schedule": {"kind": "cosine", "warmup": work.warmup, "floor": 0.0},
            "validate_every": -(-work.steps // 2),
            "choose": "last",
            "patience": 0,
            "keep": 1,
        },
    }


@dataclass(frozen=True)
class Job:
    """A training run: a model with one seed. The folder of the run is named after everything that it depends on."""

    name: str
    title: str
    seed: int
    parameters: int
    hidden: int
    recipe: dict[str, Any]
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def command(self, texts: Path, device: str, left: float | None) -> list[str]:
        """Return the command that starts or continues the training. `left` is a time limit in seconds."""
        if (self.run / "request.json").exists():
            words = ["resume", str(self.run)]
        else:
            files = ("--labelled", str(texts / "train.tsv"), "--valid", str(texts / "valid.tsv"))
            words = ["train", str(self.folder / "recipe.json"), *files, "--out", str(self.run)]
        limit = [] if left is None else ["--max-time", f"{max(1.0, left):.0f}s"]
        return [*python("regard"), *words, "--device", device, *limit, "--quiet"]

    @property
    def finished(self) -> bool:
        """True if the training run has done all of its steps."""
        return any(event["event"] == "end" and event["finished"] for event in self._events())

    def outcome(self) -> dict[str, Any] | None:
        """Return the result of the last validation so far, or None if there was none yet."""
        events = self._events()
        valid = [event for event in events if event["event"] == "valid"]
        if not valid:
            return None
        steps = [event for event in events if event["event"] == "step"]
        machine = json.loads((self.run / "environment.json").read_bytes())
        trivial = json.loads((self.run / "baselines.json").read_bytes())["baselines"]
        return {
            **{name: getattr(self, name) for name in ("name", "title", "seed", "parameters", "hidden")},
            "hash": self.folder.name.rpartition("-")[2],
            "step": valid[-1]["step"],
            "accuracy": valid[-1]["accuracy"],
            "loss": valid[-1]["loss"],
            "training_loss": steps[-1]["loss"],
            "curve": [[event["step"], event["accuracy"], event["loss"]] for event in valid],
            "seconds": events[-1]["time"],
            "memory_gb": max((event["memory_gb"] for event in steps if "memory_gb" in event), default=None),
            "device": machine["device"],
            "torch": machine["packages"]["torch"],
            "baselines": {each["name"]: each["metrics"]["accuracy"] for each in trivial},
        }

    def _events(self) -> list[dict[str, Any]]:
        log = self.run / "log.jsonl"
        return [json.loads(line) for line in log.read_bytes().split(b"\n") if line] if log.exists() else []


def jobs(names: Sequence[str], work: Work, seeds: int, facts: Mapping[str, Any], out: Path) -> list[Job]:
    """Return the training runs, with all models of a seed before those of the next."""
    listed = []
    for seed in range(1, seeds + 1):
        for model in (select([name])[0] for name in names):
            spec = classifier(model, work)
            made = recipe(spec, work, seed)
            content = json.dumps([made, facts["train"]["sha256"], facts["valid"]["sha256"]], sort_keys=True)
            folder = out / f"{model.name}-{seed}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
            hidden = next(part.d_hidden for part in walk(spec) if isinstance(part, FeedForward))
            count = parameters(build(spec, device="meta"))
            listed.append(Job(model.name, model.title, seed, count, hidden or 0, made, folder))
    return listed


def train(listed: Sequence[Job], texts: Path, machine: Resources, deadline: float | None) -> list[str]:
    """Train the jobs, each in a process of its own, and return one sentence for each job that failed."""
    slots: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    available = machine.slots()
    for slot in available:
        slots.put(slot)

    def run(job: Job) -> str | None:
        left = None if deadline is None else deadline - time.monotonic()
        if job.finished or (left is not None and left <= 0):
            return None
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "recipe.json").write_text(json.dumps(job.recipe, indent=1), encoding="utf-8")
        slot = slots.get()
        try:
            words = job.command(texts, machine.device, left)
            ended = subprocess.run(words, env=os.environ | slot, stderr=subprocess.PIPE, text=True, check=False)
        finally:
            slots.put(slot)
        result = job.outcome() if job.finished else None
        if result is not None:
            print(f"{job.title}, seed {job.seed}: {result['accuracy']:.1f} %", file=sys.stderr, flush=True)
        lines = ended.stderr.strip().splitlines()
        return f"{job.title}, seed {job.seed}: {lines[-1] if lines else 'failed'}" if ended.returncode else None

    with ThreadPoolExecutor(len(available)) as pool:
        try:
            return [sentence for sentence in pool.map(run, listed) if sentence is not None]
        except KeyboardInterrupt:  # the processes are interrupted too, and save
            pool.shutdown(cancel_futures=True)
            sys.exit("stopped; run the command again to continue")


def prepare_once(job: Job, texts: Path) -> None:
    """Tokenize the texts and store them in the cache of regard, from which all runs take them."""
    cache = Cache.default()
    if cache is None or job.run.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipe.json").write_text(json.dumps(job.recipe), encoding="utf-8")
        recipe_file, labelled = Path(folder) / "recipe.json", texts / "train.tsv"
        request = request_from_options(recipe=recipe_file, labelled=labelled, valid=texts / "valid.tsv")
        prepare(request.data, Path(folder) / "data", request.train.seed, None, lambda _: None, cache)


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """Return bytes.md as text, from the lines of bytes.jsonl: the training runs, then the settings."""
    *runs, last = records
    work, facts = last["work"], last["split"]
    size, train_part, valid_part = work["size"], facts["train"], facts["valid"]
    devices = sorted({f"{run['device']}, torch {run['torch']}" for run in runs})
    bag = [run["baselines"]["bag of words"] for run in runs if "bag of words" in run["baselines"]]
    thinned = "" if work["thinned"] == 1 else f", one of every {work['thinned']} reviews of each part"
    epochs = work["steps"] * work["tokens"] / max(1, train_part["bytes"])
    truncated = f"{train_part['truncated']:,} reviews for training, {valid_part['truncated']:,} for validation"
    counts = [f"{part['reviews']:,} reviews ({part['positive']:,} positive)" for part in (train_part, valid_part)]
    lines = [
        "# Film reviews as bytes",
        "",
        "Written by `make bytes` (`docs/results/bytes.py`), which continues if it was stopped; `bytes.jsonl` has every "
        "run. The models read the bytes of a film review and predict whether it is positive, as in the task Text of "
        "Long Range Arena (Tay et al. 2021). They differ only in the layer that mixes the bytes of a text.",
        "",
        f"- **Models**: {size['depth']} layers, width {size['d_model']}, {size['heads']} heads, pre-norm, mean over "
        "the bytes, linear classifier. The hidden width of the feed-forward layers is such that all have as many "
        f"parameters; the matrices of the Linformer ({size['rank']} x {work['length'] + 2:,}, shared by all layers) "
        f"are additional. A window reaches {size['window'] - 1} bytes to both sides. Block-local attention has blocks "
        f"of {size['window']}, BigBird blocks of {size['block']} (3 neighbouring, 3 random, first and last). The delta "
        "rule reads from left to right; the hybrid has full attention in its last layer.",
        f"- **Texts**: the first {work['length']:,} bytes of a review, as in Long Range Arena; the rest is cut off "
        f"({truncated}). Shorter texts are padded; padding is neither attended to nor pooled.",
        f"- **Split**: of IMDB's training set of {facts['reviews']:,} reviews, a fifth is for validation: pos "
        f"{_span('pos')} and neg {_span('neg')}. The reviews of a film have successive numbers, and films with reviews "
        "of both classes are in the same order in both, so these two ranges have the same films. The "
        f"{MARGIN} reviews before and after each range are left out, because a film has at most {MARGIN} reviews of a "
        "class, and so are training texts that equal a validation text. Training: "
        f"{counts[0]}; validation: {counts[1]}{thinned}. IMDB's test set is not used.",
        f"- **Training**: `regard train`, {work['steps']:,} steps of at most {work['tokens']:,} bytes (about "
        f"{epochs:.1f} passes), the same batches for all; AdamW, peak learning rate {work['learning_rate']:g} for all, "
        f"warm-up of {work['warmup']} steps, cosine, dropout 0.1; the weights of the last step. On "
        f"{'; '.join(devices) or 'nothing yet'}. Runs shared the device (`--jobs`), so seconds compare only roughly.",
        "",
        "| layer | parameters | steps | accuracy, % | validation loss | training loss | seconds | published test "
        "accuracy, % |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
        *_rows(runs, last["models"]),
        "",
        "Mean of the seeds, ± their standard deviation. A run with fewer steps was stopped, and its training loss and "
        "seconds are those of its last step. The number of validation reviews alone gives an accuracy a "
        f"standard error of up to {50 / max(1, valid_part['reviews']) ** 0.5:.1f} points. Losses are in nats per "
        "review. Published (Tay et al. 2021): trained on all 25,000 reviews, measured on the test set, with learning "
        "rates and numbers of steps of their own; for context, not a comparison.",
    ]
    if bag:
        lines += ["", f"A bag of words has an accuracy of {statistics.mean(bag):.1f} %."]
    return "\n".join(lines) + "\n"


def _span(label: str) -> str:
    return f"{VALID[label].start:,} to {VALID[label].stop - 1:,}"


def _rows(runs: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for model in models:
        own = [run for run in runs if run["name"] == model["name"]]
        published = f"{PUBLISHED[model['name']]:.2f}" if model["name"] in PUBLISHED else ""
        cells = ["not run yet", "", "", "", "", ""]
        if own:
            steps = sorted({run["step"] for run in own})
            cells = [
                f"{own[0]['parameters']:,}",
                " and ".join(f"{step:,}" for step in steps),
                _mean([run["accuracy"] for run in own], 1),
                _mean([run["loss"] for run in own], 3),
                _mean([run["training_loss"] for run in own], 3),
                f"{statistics.mean(run['seconds'] for run in own):,.0f}",
            ]
        yield "| " + " | ".join([model["title"], *cells, published]) + " |"


def _mean(values: Sequence[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def write(records: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write bytes.jsonl and bytes.md."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bytes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (folder / "bytes.md").write_text(page(records), encoding="utf-8")


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder that contains imdb/train.tsv.gz")
    parser.add_argument("--models", default=",".join(MODELS), help="names of `regard bench length`, such as full,lstm")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, help="training steps of every run")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--out", type=Path, default=Path("runs/bytes"), help="folder of the training runs")
    parser.add_argument("--write", type=Path, help="folder of bytes.md and bytes.jsonl; default: docs/results")
    parser.add_argument("--max-time", type=float, help="time limit in seconds; run the command again to continue")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, help="simultaneous runs")
    parser.add_argument("--quick", action="store_true", help="tiny models, few reviews of 256 bytes, few steps")
    parser.add_argument("--page", action="store_true", help="write the page from saved results, and train nothing")
    options = parser.parse_args()
    if options.data is None and not options.page:
        parser.error("give the folder that contains imdb/train.tsv.gz")
    return options


def main() -> None:
    """Split the reviews, train all models, and write both files."""
    options = arguments()
    folder: Path = options.write or (options.out / "quick" if options.quick else HERE)
    if options.page:
        lines = (folder / "bytes.jsonl").read_bytes().split(b"\n")
        (folder / "bytes.md").write_text(page([json.loads(line) for line in lines if line]), encoding="utf-8")
        return
    deadline = None if options.max_time is None else time.monotonic() + options.max_time
    given = {"steps": options.steps, "learning_rate": options.learning_rate}
    work = replace(QUICK if options.quick else WORK, **{name: value for name, value in given.items() if value})
    texts = options.out / ("quick" if options.quick else "texts")
    try:
        names = [model.name for model in select(options.models.split(","))]
        facts = write_split(options.data, texts, work)
        listed = jobs(names, work, options.seeds, facts, options.out)
        prepare_once(listed[0], texts)
        failures = train(listed, texts, Resources(options.device, options.jobs), deadline)
    except (OSError, RegardError) as error:
        sys.exit(str(error))
    results = [result for result in (job.outcome() for job in listed) if result is not None]
    models = [{"name": job.name, "title": job.title} for job in listed if job.seed == 1]
    write([*results, {"work": asdict(work), "split": facts, "models": models}], folder)
    done = sum(job.finished for job in listed)
    print(f"{done} of {len(listed)} runs are finished: {folder / 'bytes.md'}", file=sys.stderr)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
