"""Compare the models of Liu et al. 2018 on generated documents; write docs/results/documents.md and documents.json.

    PYTHONPATH=src python docs/results/documents.py                     # on a GPU: at most ten minutes
    PYTHONPATH=src python docs/results/documents.py --quick             # tiny models on a CPU: two minutes
    PYTHONPATH=src python docs/results/documents.py --merge gpu.json    # add a result of --json, and run nothing

The script stops after --max-time (570 seconds if it is not given), and can be stopped by hand. To continue, run it
again; finished models are not trained again. The results of other devices are kept. The script needs no package besides
regard.
"""

import argparse
import gc
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import regard
from regard import fast
from regard.batch import translation
from regard.bench.live_memory import peak_bytes
from regard.bench.race import timed
from regard.bench.report import machine
from regard.catalogue import FeedForward, NoisyTopKExperts, PostNorm, PreNorm, Rotary, SelfAttention
from regard.data.cache import Cache
from regard.data.prepare import prepare
from regard.data.text import TSV
from regard.demo.documents import FactDocuments
from regard.errors import RegardError, lacks_memory
from regard.models.base import ModelSpec
from regard.nn.pattern import Blocks
from regard.recipe.recipe import PARTS
from regard.runs.request import request_from_options
from regard.runs.trained_model import choose_device
from regard.training.checkpoint import RunFolder, write_json
from regard.tree import to_record

HERE = Path(__file__).parent
TITLES = {"cuda": "On a GPU", "cpu": "On a CPU, with tiny models"}
NOTES = {
    "cuda": "Cells with - were not trained: the time on the GPU, shared with other trainings, was over.",
    "cpu": "So few steps only check the program: with recipes/facts.toml, Transformer-ED finds all facts in 2,500.",
}
Result = dict[str, Any]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The task, the sizes of the models, and how they are trained."""

    task: FactDocuments
    lengths: tuple[int, ...]  # values of data.max_len
    d_model: int
    heads: int
    depth: int  # layers of Transformer-D; half as many in the encoder and in the decoder of Transformer-ED
    block: int  # tokens in a block of the local attention of Transformer-DMCA
    experts: int
    steps: int
    tokens: int  # per batch
    learning_rate: float
    corpus: int  # most tokens of training documents
    test: int  # documents in the validation set and in the test set
    recurrent: int  # the greatest length at which the LSTM is trained
    most: int  # the greatest length of a training step
    limit: float  # seconds that a training step may take


FULL = Settings(
    FactDocuments(1023, 10, 16, 16, "doubling"),
    (64, 256, 1024, 4096), 256, 4, 6, 64, 16, 3000, 16_384, 1e-3, 24_000_000, 200, 256, 2**20, 5.0,
)  # fmt: skip
QUICK = Settings(
    FactDocuments(15, 4, 16, 16, "doubling"),
    (32, 64), 64, 4, 4, 16, 4, 400, 512, 2e-3, 500_000, 100, 64, 2048, 0.25,
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """A model of the comparison, with its name in the tables."""

    preset: str
    title: str


MODELS = (
    Compared("lstm_attention", "LSTM with attention"),
    Compared("transformer_ed", "Transformer-ED"),
    Compared("transformer_d", "Transformer-D"),
    Compared("transformer_dmca", "Transformer-DMCA"),
    Compared("transformer_dmca_moe", "Transformer-DMCA, experts"),
)


def spec_of(preset: str, settings: Settings) -> ModelSpec:
    """Return a preset in the sizes of the comparison, without dropout and label smoothing.

    There are no sinusoids in the input: attention would learn the places of the first paragraphs instead of finding
    them by content. Self-attention has rotary positions. Norms are pre-norms. Local attention also covers the preceding
    block, as in the code of the paper, so that no paragraph is divided between blocks. The loss is that of the summary
    alone: the other words are random.
    """
    changes: dict[str, Any] = {"d_model": settings.d_model, "dropout": 0.0, "head.label_smoothing": 0.0}
    if preset != "lstm_attention":
        changes["heads"] = settings.heads
    if preset.startswith("transformer_d"):
        changes["loss_on"] = "target"
    depths = {"transformer_ed": ("encoder", "decoder"), "transformer_d": ("decoder",)}.get(preset, ())
    changes |= {f"{stack}.depth": settings.depth // len(depths) for stack in depths}
    spec = regard.preset(preset, **changes)
    if preset != "lstm_attention":
        spec = regard.replace_at(spec, "input.position", None)
    spec = regard.swap(spec, SelfAttention, lambda part: replace(part, position=Rotary()))
    spec = regard.swap(spec, FeedForward, lambda part: replace(part, d_hidden=4 * settings.d_model))
    spec = regard.swap(spec, NoisyTopKExperts, lambda part: replace(part, experts=settings.experts, d_hidden=None))
    spec = regard.swap(spec, Blocks, lambda _: Blocks(settings.block, neighbours=1))
    return regard.swap(spec, PostNorm, lambda part: PreNorm(part.norm))


def recipe_of(preset: str, length: int, settings: Settings) -> dict[str, Any]:
    """Return the recipe of a training run."""
    tokens = settings.tokens
    data = {"tokenizer": "words", "max_len": length, "long": "cut", "batching": {"kind": "buckets", "tokens": tokens}}
    train = {
        "steps": settings.steps,
        "optimizer": {"kind": "adamw", "learning_rate": settings.learning_rate, "betas": [0.9, 0.98]},
        "schedule": {"kind": "cosine", "warmup": settings.steps // 20, "floor": 0.02},
        "validate_every": math.ceil(settings.steps / 5),
        "criterion": "loss",
        "decode": 0,
        "patience": 0,
        "compile": False,
    }
    model = to_record(spec_of(preset, settings), PARTS)
    sized = {name: value for name, value in model.items() if not name.endswith("vocab")}  # that of the tokenizer
    return {"model": sized, "data": data, "train": train}


def documents(folder: Path, length: int, settings: Settings) -> dict[str, Any]:
    """Write the documents for a length, unless they are written already, and return the options that train on them.

    The prepared text is stored in the cache, from which the trainings at this length take it.
    """
    place, recipe = folder / f"documents-{length}", folder / f"documents-{length}.json"
    if not place.exists():
        needed = settings.steps * settings.tokens // length
        count = max(1, min(needed, settings.corpus // length))
        settings.task.write(place, count, settings.test, settings.test, words=length)
    train, valid = str(place / "train.tsv"), str(place / "valid.tsv")
    if not recipe.exists():
        write_json(recipe, recipe_of("transformer_ed", length, settings))
        request = request_from_options(recipe=recipe, task="summarization", tsv=train, valid=valid)
        prepare(request.data, folder / f"prepared-{length}", request.train.seed, cache=Cache.default())
    return {"task": "summarization", "tsv": train, "valid": valid}


def trained(folder: Path, preset: str, length: int, settings: Settings, device: str, seconds: float) -> Result | None:
    """Train a model, or continue its training, and return its row of the tables, or None if the time is too short."""
    data, out = documents(folder, length, settings), folder / f"{preset}-{length}"
    began = time.monotonic()
    if RunFolder(out).request.exists():
        run = regard.resume(out, device, seconds)
    else:
        recipe = folder / f"{preset}-{length}.json"
        write_json(recipe, recipe_of(preset, length, settings))
        run = regard.train(out, recipe=recipe, device=device, max_time=seconds, **data)
    if not run.finished:
        return None
    steps = [json.loads(line) for line in run.path.joinpath("log.jsonl").read_text(encoding="utf-8").splitlines()]
    place = folder / f"documents-{length}"
    scores = run.score(list(TSV(str(place / "valid.tsv")).records()))
    test = list(TSV(str(place / "test.tsv")).records())
    outputs = run.translate([source for source, _ in test], beam=1)
    return {
        "model": preset,
        "length": length,
        "parameters": run.parameters,
        "perplexity": math.exp(-sum(score.log_prob for score in scores) / sum(score.tokens for score in scores)),
        "rougeL": rouge_l(outputs, [target for _, target in test]),
        "training_seconds": max(event["time"] for event in steps if event["event"] == "step"),
        "seconds": time.monotonic() - began,
    }


def rouge_l(outputs: Sequence[str], references: Sequence[str]) -> float:
    """Return ROUGE-L in percent: the F-score of the longest common subsequence of words, averaged over the texts."""
    return 100 * sum(map(_overlap, outputs, references)) / len(references)


def _overlap(output: str, reference: str) -> float:
    words, expected = output.split(), reference.split()
    lengths = [0] * (len(expected) + 1)
    for word in words:
        before, lengths = lengths, [0]
        for i, other in enumerate(expected):
            lengths.append(before[i] + 1 if word == other else max(before[i + 1], lengths[i]))
    return 2 * lengths[-1] / (len(words) + len(expected)) if lengths[-1] else 0.0


def measured(preset: str, settings: Settings, device: torch.device) -> Result:
    """Return time and peak memory of a training step on one document, at lengths that double until it does not fit.

    A step is a forward and a backward pass, with its second run measured. It fits if memory suffices, and if it takes
    less than `settings.limit` seconds; the step after that would take at least twice as long.
    """
    vocab = settings.task.attributes + settings.task.entities + settings.task.values + 5
    model = regard.build(replace(spec_of(preset, settings), vocab=vocab), seed=1).to(device).train()  # type: ignore[call-arg]
    fast.install(model, device)
    rows, length, why = [], settings.lengths[0], ""
    while not why:
        try:
            step = training_step(model, length, vocab, settings, device)
            peak_bytes(step, device)
            peak, seconds = timed(lambda step=step: peak_bytes(step, device), device)
            rows.append({"length": length, "bytes": peak, "seconds": seconds})
        except Exception as error:  # whatever it is, the shorter lengths are shown
            why = "memory" if lacks_memory(error) else f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
            break
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if length >= settings.most:
            why = "cap"
        elif 2 * rows[-1]["seconds"] > settings.limit:
            why = "time"
        length *= 2
    return {"model": preset, "rows": rows, "limit": why}


def training_step(model: Any, length: int, vocab: int, settings: Settings, device: torch.device) -> Callable[[], None]:
    """Return a function that computes the loss of one document of `length` tokens, and the gradients."""
    rng = torch.Generator().manual_seed(length)
    source, target = (torch.randint(4, vocab, (n,), generator=rng).tolist() for n in (length, settings.task.labels - 1))
    batch = translation([(source, target)]).to(device)

    def step() -> None:
        on_gpu = device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss = model.loss(batch)
            (loss.total / loss.tokens).backward()
        model.zero_grad(set_to_none=True)

    return step


class Comparison:
    """Runs what is missing in a folder: documents, trainings and measurements. Each result is a JSON file."""

    def __init__(self, options: argparse.Namespace, settings: Settings, report: Report) -> None:
        self.options, self.settings, self.report = options, settings, report
        self.folder: Path = options.out
        self.ends = time.monotonic() + options.max_time
        self.device = choose_device(options.device)
        self.apart = options.jobs > 1  # whether each job has a process of its own
        self.folder.mkdir(parents=True, exist_ok=True)
        chosen, known = self.folder / "settings.json", json.loads(json.dumps(asdict(settings)))
        if chosen.exists() and json.loads(chosen.read_text(encoding="utf-8")) != known:
            raise RegardError(f"{self.folder} has results of other settings; choose another folder with --out")
        write_json(chosen, known)

    def runs(self) -> list[tuple[str, int]]:
        """Return the trainings of the comparison: pairs of a preset and a length."""
        return [
            (model.preset, length)
            for length in self.settings.lengths
            for model in MODELS
            if model.preset != "lstm_attention" or length <= self.settings.recurrent
        ]

    def train(self) -> None:
        """Train the models that are not trained yet, several at a time."""
        left = [run for run in self.runs() if self._read(*run) is None]
        with ThreadPoolExecutor(self.options.jobs) as pool:
            ready = {length: pool.submit(self._call, "", length) for length in dict.fromkeys(n for _, n in left)}
            started = list[Future[None]]()
            try:
                for preset, length in left:  # the documents of a length are written before its models are submitted
                    ready[length].result()
                    started.append(pool.submit(self._call, preset, length))
                for future in as_completed(started):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def measure(self) -> None:
        """Measure time and memory of the training steps of all models, one at a time."""
        self.apart = self.apart or self.device.type == "cuda"  # memory that a model leaves behind would count
        for model in MODELS:
            if self._read(model.preset, 0) is None:
                self._call(model.preset, 0)

    def _call(self, preset: str, length: int) -> None:
        """Do one job, as `run_one` does it, unless the time is used up."""
        if (seconds := self.ends - time.monotonic()) <= 0:
            return
        if self.apart:
            words = ["--quick"] if self.options.quick else []
            words += ["--out", str(self.folder), "--device", self.options.device, "--max-time", f"{seconds:.0f}"]
            words += ["--one", preset, str(length)]
            if subprocess.run([sys.executable, __file__, *words], check=False).returncode:
                self.report(f"{preset or 'the documents'} failed (L = {length:,}); the reason is above")
                return
        else:
            run_one(preset, length, self.folder, self.settings, self.options.device, seconds)
        if preset:
            result = self._read(preset, length)
            self.report(f"{preset}, L = {length:,}: the time is up" if result is None else json.dumps(result))

    @property
    def complete(self) -> bool:
        """Whether everything is trained and measured."""
        return all(self._read(*job) for job in [*self.runs(), *((model.preset, 0) for model in MODELS)])

    def _read(self, preset: str, length: int) -> Result | None:
        path = result_file(self.folder, preset, length)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def result(self) -> Result:
        """Return everything that is measured so far as a JSON object."""
        settings = self.settings
        rows = [row for run in self.runs() if (row := self._read(*run)) is not None]
        steps = [row for model in MODELS if (row := self._read(model.preset, 0)) is not None]
        optimum = {str(n): settings.task.optimal_perplexity(n) for n in settings.lengths}
        facts = {"device": self.device.type, "date": datetime.now(UTC).date().isoformat(), "jobs": self.options.jobs}
        facts |= {"machine": machine(self.device), "settings": asdict(settings), "optimum": optimum}
        return facts | {"guess": settings.task.optimal_perplexity(1), "rows": rows, "steps": steps}


def result_file(folder: Path, preset: str, length: int) -> Path:
    """Return the name of the file with the result of a training run, or of the measurement of a model (length 0)."""
    return folder / (f"{preset}-{length}-result.json" if length else f"{preset}-steps.json")


def run_one(preset: str, length: int, folder: Path, settings: Settings, device: str, seconds: float) -> None:
    """Do one job: write documents (no preset), measure a model (length 0), or train a model."""
    if not preset:
        documents(folder, length, settings)
        return
    if length:
        result = trained(folder, preset, length, settings, device, seconds)
    else:
        result = measured(preset, settings, choose_device(device))
    if result is not None:
        write_json(result_file(folder, preset, length), result)


def merged(old: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """Return the newest result for each device, in the order of the page."""
    newest = {result["device"]: result for result in (*old, *new)}
    return [newest[device] for device in TITLES if device in newest]


def page(results: Sequence[Result]) -> str:
    """Return documents.md as text."""
    lines = [
        "# Models of long documents",
        "",
        "Written by `make documents` (`docs/results/documents.py`), which continues if it was stopped. The models of",
        "Liu et al. 2018 summarize generated documents of facts ([summarization.md](../summarization.md)), of which",
        "they read the first L tokens. One fact about the title is in the first paragraph, one in the next two, one in",
        "the next four, and so on: a model that reads twice as many tokens can find one more fact. So the best",
        "possible perplexity is known for every L.",
        "",
        "All models have the same width, batches, steps and learning rate, and no dropout. Norms are pre-norms.",
        "Positions are rotary in self-attention, and memory-compressed attention has none: with sinusoids in the",
        "input, models learn the places of the first paragraphs instead of finding them by content. The paper trains",
        "Transformer-D and -DMCA to predict the document, too; here the loss is that of the summary alone, because the",
        "words of documents are random.",
        "",
        "A query of memory-compressed attention does not see the tokens of its own group, and local attention does not",
        "reach the document from the summary. So two of the five layers of Transformer-DMCA find facts, after a local",
        "layer has joined each value with its entity. Blocks are smaller than the 256 tokens of the paper, so that the",
        "shorter documents have several, and local attention also covers the preceding block, as in the code of the",
        "paper, so that no fact is divided between blocks.",
    ]
    for result in results:
        lines += ["", *section(result)]
    return "\n".join(lines) + "\n"


def section(result: Result) -> list[str]:
    """Return the lines of the section about one device."""
    facts, about, settings = result["machine"], result["settings"]["task"], result["settings"]
    where = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
    lengths = settings["lengths"]
    rows = {(row["model"], row["length"]): row for row in result["rows"]}

    def table(title: str, cell: Callable[[Result], str], first: Sequence[tuple[str, Sequence[str]]] = ()) -> list[str]:
        cells = [
            (model.title, [cell(rows[model.preset, n]) if (model.preset, n) in rows else "-" for n in lengths])
            for model in MODELS
        ]
        return ["", f"**{title}**", "", *markdown(["L", *(f"{n:,}" for n in lengths)], [*first, *cells])]

    optimum = [result["optimum"][str(n)] for n in lengths]
    best = ("the best possible", [f"{value:.3f}" for value in optimum])
    guess = ("a model that finds no fact", [f"{result['guess']:.3f}"] * len(lengths))

    def found(row: Result) -> str:
        known = math.log(result["guess"]) - math.log(result["optimum"][str(row["length"])])
        return f"{100 * (math.log(result['guess']) - math.log(row['perplexity'])) / known:.0f}"

    return [
        f"## {TITLES[result['device']]}",
        "",
        f"{where}, torch {facts['versions']['torch']}, {result['date']}. "
        f"Documents of {about['paragraphs']:,} paragraphs with {about['attributes']} facts about the title, "
        f"{about['entities']} entities and {about['values']} values. "
        f"Width {settings['d_model']}, {settings['heads']} heads, blocks of {settings['block']} tokens, "
        f"{settings['experts']} experts; {settings['steps']:,} steps with batches of {settings['tokens']:,} tokens, "
        f"{result['jobs']} {'trainings' if result['jobs'] > 1 else 'training'} at a time. "
        f"The LSTM is trained up to L = {settings['recurrent']:,}. {NOTES.get(result['device'], '')}".rstrip(),
        *table("Perplexity of the summaries", lambda row: f"{row['perplexity']:.3f}", [best, guess]),
        *table("Facts found, in percent of those that can be found", found),
        *table("ROUGE-L of greedy summaries of other documents", lambda row: f"{row['rougeL']:.1f}"),
        *table("Seconds of the training, beside the others", lambda row: f"{row['training_seconds']:.0f}"),
        *step_tables(result),
    ]


def step_tables(result: Result) -> list[str]:
    """Return the lines about training steps on a single document."""
    measured, rows = {row["model"]: row for row in result["steps"]}, result["rows"]
    if not measured:
        return []
    parameters = {row["model"]: f"{row['parameters']:,}" for row in rows}
    settings = result["settings"]
    lengths = sorted({row["length"] for each in measured.values() for row in each["rows"]})
    shown = [n for n in lengths if n in settings["lengths"] or n == lengths[-1]]
    why = {
        "memory": "memory",
        "time": f"time: twice the length would take over {settings['limit']:g} s",
        "cap": "not tried further",
    }
    cells = []
    for model in MODELS:
        if model.preset not in measured:
            continue
        each = measured[model.preset]
        known = {row["length"]: f"{row['bytes'] / 1e6:,.0f}" for row in each["rows"]}
        longest = f"{each['rows'][-1]['length']:,}" if each["rows"] else "none"
        row = [
            parameters.get(model.preset, "-"),
            *(known.get(n, "-") for n in shown),
            longest,
            why.get(each["limit"], each["limit"].partition(". ")[0]),
        ]
        cells.append((model.title, row))
    heading = ["", "parameters", *(f"{n:,}" for n in shown), "longest L", "limited by"]
    title = "Peak memory in MB of a training step on one document of L tokens, and the longest L that fits"
    return ["", f"**{title}**", "", *markdown(heading, cells)]


def markdown(heading: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the lines of a table."""
    rule = "|---|" + "--:|" * (len(heading) - 1)
    return [f"| {' | '.join(heading)} |", rule, *(f"| {' | '.join((name, *cells))} |" for name, cells in rows)]


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--out", type=Path, help="folder of the training runs")
    parser.add_argument("--write", type=Path, default=HERE, help="folder of documents.md and documents.json")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, help="simultaneous trainings; default: 6 on a GPU, 1 on a CPU")
    parser.add_argument("--max-time", type=float, default=570.0, help="time limit in seconds; run again to continue")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result into this file, and nothing else")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="use these results, and run nothing")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "L"), help="do one job of the comparison")
    options = parser.parse_args()
    options.out = options.out or Path("runs/documents-quick" if options.quick else "runs/documents")
    options.jobs = options.jobs or (6 if choose_device(options.device).type == "cuda" else 1)
    return options


def compared(options: argparse.Namespace) -> Result:
    """Run what is missing, and return the result."""
    settings = QUICK if options.quick else FULL
    comparison = Comparison(options, settings, lambda line: print(line, file=sys.stderr, flush=True))
    comparison.measure()  # first, while nothing else is on the device
    comparison.train()
    if not comparison.complete:
        comparison.report("some results are missing: run the command again to continue")
    return comparison.result()


def main() -> None:
    """Run the comparison or merge results, then write the files."""
    options = arguments()
    if options.one:
        preset, length = options.one
        settings = QUICK if options.quick else FULL
        run_one(preset, int(length), options.out, settings, options.device, options.max_time)
        return
    try:
        new = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge or ()] or [compared(options)]
    except RegardError as error:
        sys.exit(str(error))
    if options.json:
        options.json.write_text(json.dumps(new[0], indent=1) + "\n", encoding="utf-8")
        return
    kept = options.write / "documents.json"
    results = merged(json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else [], new)
    options.write.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.write / "documents.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
