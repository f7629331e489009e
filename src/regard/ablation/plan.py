"""A plan: every run of an ablation with its content hash, so that none is made twice."""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.ablation.rows import Row
from regard.aliases import former
from regard.data.prepare import FORMAT as STORE_FORMAT
from regard.data.prepare import DataSpec, Prepared, opened, prepare
from regard.data.text import is_pipe
from regard.data.tokenizer import VERSION as TOKENIZERS_VERSION
from regard.data.tokenizer import Imported
from regard.decoding.beam import Beam
from regard.errors import DataError, SpecError
from regard.recipe.recipe import PARTS, Recipe, RecipeRequest, default_train, parse_change
from regard.training.checkpoint import file_digest
from regard.training.spec import TrainSpec
from regard.tree import to_record, walk

FORMAT = 2  # to be raised when the same description is trained or measured in another way: older results do not count
FACTORS = (0.5, 1.0, 2.0)  # of the base's learning rate, where rates are searched
SEARCH_SEED = 0  # of that search; no verdict rests on it
POINTS = 16  # validations of a run
EARLY = 8  # the early loss is that after one EARLYth of the steps


@dataclass(frozen=True)
class Job:
    """One training: what it is of, and the hash of all that its result depends on."""

    row: str
    seed: int
    recipe: Recipe
    factor: float  # of the base's learning rate
    hash: str


@dataclass(frozen=True)
class Text:
    """The text of an ablation, tokenised once for all runs."""

    folder: Path
    data: Prepared
    fingerprint: str


def tokenised(wanted: RecipeRequest, folder: Path, say: Callable[[str], None] = lambda _: None) -> Text:
    """The token store of a text: an earlier one of the same files, or a new one under `folder`."""
    if wanted.start is not None:
        raise DataError("start: an ablation compares models that are trained from the beginning; leave --from out")
    here = folder / _key(wanted)
    if here.exists():
        data = opened(wanted.data, here)
    else:
        data = prepare(wanted.data, here, wanted.train.seed, None, say)
        for sentence in data.report:
            say(sentence)
    if data.valid is None or not data.valid.rows:
        raise DataError("data.held_out: an ablation compares losses on held-out text, and none is held out")
    return Text(here, data, _fingerprint(here))


def _key(wanted: RecipeRequest) -> str:
    """Names a store by what it is made of: how, and the content of the files, wherever they are."""
    record = to_record(replace(wanted.data, train=wanted.data.train[:1], valid=()), PARTS)
    del record["train"], record["batching"]
    everything = (*wanted.data.train, *wanted.data.valid)
    paths = [path for corpus in everything for path in corpus.files()]
    tokenizer = wanted.data.tokenizer
    imported = [tokenizer.path] if isinstance(tokenizer, Imported) else []
    if imported:
        record["tokenizer"] = Imported.kind
    for path in filter(is_pipe, [*paths, *imported]):
        raise DataError(f"{path}: is a pipe, and the same command must find the same text later; write it to a file")
    files = []
    for path in (*paths, *imported):
        try:
            files.append(file_digest(Path(path)))
        except OSError as error:
            if path in imported:
                raise DataError(f"data.tokenizer.path: cannot read {path}; name the file of a tokenizer") from None
            for corpus in everything:
                next(iter(corpus.records()))  # may say more about what is wrong
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); restore it") from None
    made_by = [STORE_FORMAT, TOKENIZERS_VERSION]
    corpora = [_corpus(corpus) for corpus in everything]
    return digest([record, files, corpora, len(wanted.data.train), wanted.train.seed, made_by])


def _corpus(corpus: Any) -> dict[str, Any]:
    return {name: value for name, value in to_record(corpus, PARTS).items() if name not in corpus.paths}


def _fingerprint(folder: Path) -> str:
    """The digest of all tokens, tokenizers and held-out texts of a store."""
    manifests = sorted(folder.glob("*/manifest.json"))
    files = [*sorted(folder.glob("tokenizer.*.json")), folder / "valid.jsonl", folder / "labels.json"]
    tables = [(path.parent.name, json.loads(path.read_text(encoding="utf-8"))) for path in manifests]
    return digest([tables, [file_digest(path) for path in files]])


def digest(value: Any) -> str:
    """16 hexadecimal digits for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# What every run does alike, whatever a recipe says: see `training`.
FIXED = ("time", "validate_every", "save_every", "log_every", "keep", "choose", "average", "criterion", "patience")
ALIKE = f"every run makes all its steps, is measured at {POINTS} points and judged by its last weights"


def check_changes(changes: Iterable[str], wanted: RecipeRequest, steps: bool) -> None:
    """Refuse `--set` edits that would change nothing; `steps`: whether another option says how many are made."""
    for path in (parse_change(change)[0] for change in changes):
        section, _, field = path.partition(".")
        if section == "decode":
            raise SpecError(path, "is not used here: translations are greedy, so that all runs are measured alike")
        if section == "train" and field in FIXED:
            raise SpecError(path, f"is not used here: {ALIKE}; leave it out")
        if path == "train.steps" and steps:
            raise SpecError(path, "says how many steps are made, and so does another option; give one of them")
        if path == "train.seed" and not wanted.data.split_by_source:
            raise SpecError(path, "is not used here: runs have the seeds 1, 2, ... (--seeds); leave it out")


def unused(wanted: RecipeRequest) -> str:
    """List the settings of a recipe that an ablation does not use, in a sentence; empty if there are none."""
    usual = (TrainSpec(), default_train(wanted.data.objective))
    said = [f"train.{name}" for name in FIXED if getattr(wanted.train, name) not in [getattr(u, name) for u in usual]]
    said += ["train.seed"] * (wanted.train.seed != TrainSpec().seed and not wanted.data.split_by_source)
    said += ["decode"] * (wanted.decode != Beam())
    return f"of the recipe {', '.join(said)} is not used: {ALIKE}; translations are greedy" if said else ""


def training(train: TrainSpec, given: int | None) -> TrainSpec:
    """How every run is trained: all its steps (those given, if any), measured at fixed points, judged by its end."""
    steps = given or train.steps
    assert steps is not None, "resolved before planning"
    return replace(
        train,
        steps=steps,
        time=None,
        schedule=train.schedule if given is None else _shortened(train.schedule, given),
        validate_every=max(1, steps // POINTS),
        save_every=None,
        log_every=max(1, steps // POINTS),
        choose="last",
        average=1,
        keep=1,
        criterion="loss",
        patience=0,
    )


def _shortened(schedule: Any, steps: int) -> Any:
    """A schedule for fewer steps than it was written for: at most a quarter of them warm up."""
    warmup = getattr(schedule, "warmup", None)
    return schedule if warmup is None or warmup <= steps // 4 else replace(schedule, warmup=max(1, steps // 4))


def early_step(train: TrainSpec) -> int:
    """Where the early loss is taken: the validation next to one EARLYth of the steps."""
    assert train.steps
    assert train.validate_every
    every = train.validate_every
    return min(train.steps, max(1, round(train.steps / EARLY / every)) * every)


def job(row: Row, seed: int, recipe: Recipe, text: Text, factor: float = 1.0) -> Job:
    """A run of a row: the base's recipe with another model, seed and learning rate."""
    assert row.model is not None
    train = recipe.train if row.steps is None else training(recipe.train, row.steps)
    if factor != 1.0:
        assert train.optimizer is not None, "resolved before planning"
        train = replace(train, optimizer=train.optimizer.scaled(factor))
    train = replace(train, seed=seed)
    whole = replace(recipe, model=row.model, train=train)
    return Job(row.name, seed, whole, factor, run_hash(whole, text.fingerprint))


def run_hash(recipe: Recipe, fingerprint: str) -> str:
    """The digest of what a result depends on: model, training and seed, batches, tokens; not where they are.

    A part of one's own code counts by the file that it is in.
    """
    record = recipe.record()
    data: DataSpec = recipe.data
    rest = {
        "objective": record["data"]["objective"],
        "batching": record["data"]["batching"],
        "weights": [corpus.weight for corpus in data.train],
        "max_len": data.longest,
        "long": data.long,
    }
    code = _code(recipe)
    described = former([record["model"], record["train"], rest])  # a renamed setting changes no result
    return digest([FORMAT, *described, fingerprint, *([code] if code else [])])


def _code(recipe: Recipe) -> list[str]:
    """The digests of files that hold parts which are not regard's."""
    modules = {type(part).__module__ for part in walk(recipe)}
    files = {inspect.getsourcefile(sys.modules[name]) for name in modules if name.partition(".")[0] != "regard"}
    return sorted(file_digest(Path(file)) for file in files if file is not None)


def searches(rows: Iterable[Row], recipe: Recipe, text: Text) -> list[Job]:
    """The runs that look for the learning rate of every row, the same number for each."""
    return [job(row, SEARCH_SEED, recipe, text, factor) for row in rows for factor in FACTORS]


def runs(
    base: Row,
    rows: Iterable[Row],
    seeds: int,
    recipe: Recipe,
    text: Text,
    rates: dict[str, float],
    base_seeds: int | None = None,
) -> list[Job]:
    """The runs that verdicts rest on: seeds 1 .. n of every row, and three times as many of the base if not said."""
    many = base_seeds or 3 * seeds
    found = [job(base, seed, recipe, text, rates.get(base.name, 1.0)) for seed in range(1, many + 1)]
    for row in rows:
        found += [job(row, seed, recipe, text, rates.get(row.name, 1.0)) for seed in range(1, seeds + 1)]
    return found
