"""The training runs of an ablation, each identified by a hash of everything that its result depends on."""

import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from regard.files import file_digest
from regard.recipe.recipe import PARTS, Recipe, RecipeRequest, default_train, parse_change
from regard.training.spec import TrainSpec
from regard.tree import to_record, walk

FORMAT = 2  # part of every hash; increment it when training or measurement changes, to invalidate older results
# Settings that versions after the first with this FORMAT added, one table per version, oldest first: the kind of a spec
# -> field -> the value with which every run trains as before. A hash leaves out fields with these values, so that the
# runs that an older version stored are found. Add a table here with every field that a spec gets.
ADDED: Sequence[Mapping[str, Mapping[str, Any]]] = (
    {"self_attention": {"attention_pattern": None}},
    {"self_attention": {"tied": "none"}, "decoder_only_translator": {"loss_on": "target"}},
    {"train": {"checkpoint_layers": False}},
    {"train": {"keep_state": 1, "max_skipped": 5, "parallel": "replicate"}, "alibi": {"slopes": None}},
)
HELD_OUT = ("valid.jsonl", "labels.json")  # files of tokenised text
FACTORS = (0.5, 1.0, 2.0)  # factors of the base's learning rate that a search tries
SEARCH_SEED = 0  # seed for the search; verdicts use other seeds
POINTS = 16  # validations per run
EARLY = 8  # the early loss is measured after 1 / EARLY of the steps
Rates = Mapping[str, float]  # row -> factor of the base's learning rate


@dataclass(frozen=True)
class Job:
    """One training run, and the hash of everything that its result depends on."""

    row: str
    seed: int
    recipe: Recipe
    factor: float  # relative to the base's learning rate
    hash: str
    former_hashes: tuple[str, ...] = ()  # of the same run in earlier versions


@dataclass(frozen=True)
class Text:
    """The text of an ablation, tokenised once for all runs."""

    folder: Path
    data: Prepared
    fingerprint: str
    former_fingerprints: tuple[str, ...] = ()  # of the same text in earlier versions


def tokenised(request: RecipeRequest, folder: Path, report: Callable[[str], None] = lambda _: None) -> Text:
    """Return the tokenised text. The result is stored under `folder`, so that a text is tokenised only once."""
    if request.start is not None:
        raise DataError("start: an ablation trains all models from random weights; leave --from out")
    store = folder / _key(request)
    if store.exists():
        data = opened(request.data, store)
    else:
        data = prepare(request.data, store, request.train.seed, None, report)
        for sentence in data.report:
            report(sentence)
    if data.valid is None or not data.valid.rows:
        raise DataError("data.held_out: is 0, but an ablation compares losses on held-out text; leave it out")
    fingerprint = _fingerprint(store)
    same = (other for other in sorted(folder.iterdir()) if _is_whole(other) and _fingerprint(other) == fingerprint)
    return Text(store, data, fingerprint, tuple(dict.fromkeys(map(_former_fingerprint, same))))


def _key(request: RecipeRequest) -> str:
    """Return the folder name of tokenised text: a digest of the data settings and file contents, but not of paths."""
    spec = request.data
    record = to_record(replace(spec, train=spec.train[:1], valid=()), PARTS)
    del record["train"], record["batching"]
    corpora = (*spec.train, *spec.valid)
    paths = [path for corpus in corpora for path in corpus.files()]
    imported = [spec.tokenizer.path] if isinstance(spec.tokenizer, Imported) else []
    if imported:
        record["tokenizer"] = Imported.kind
    for path in filter(is_pipe, [*paths, *imported]):
        raise DataError(f"{path}: is a pipe, which the same command cannot read again later; write the text to a file")
    files = []
    for path in (*paths, *imported):
        try:
            files.append(file_digest(Path(path)))
        except OSError as error:
            if path in imported:
                raise DataError(f"data.tokenizer.path: cannot read {path}; name the file of a tokenizer") from None
            for corpus in corpora:
                next(iter(corpus.records()))  # may raise a more precise error
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); restore it") from None
    versions = [STORE_FORMAT, TOKENIZERS_VERSION]
    formats = [
        {name: value for name, value in to_record(corpus, PARTS).items() if name not in corpus.paths}
        for corpus in corpora
    ]
    return digest([record, files, formats, len(spec.train), request.train.seed, versions])


def _fingerprint(folder: Path) -> str:
    """Return a digest of all tokens, tokenizers and held-out texts in a folder of tokenised text."""
    tokenizers = [json.loads(path.read_text(encoding="utf-8")) for path in _tokenizers(folder)]
    for tokenizer in tokenizers:
        del tokenizer["model"]["regard"]["why"]  # a sentence, whose words change from version to version
    return digest([_tables(folder), tokenizers, [file_digest(folder / name) for name in HELD_OUT]])


def _former_fingerprint(folder: Path) -> str:
    """Return the digest by which earlier versions identified the tokenised text in a folder."""
    files = [*_tokenizers(folder), *(folder / name for name in HELD_OUT)]
    return digest([_tables(folder), [file_digest(path) for path in files]])


def _tables(folder: Path) -> list[tuple[str, Any]]:
    """Return the names of the token tables in a folder of tokenised text, and their manifests."""
    manifests = sorted(folder.glob("*/manifest.json"))
    return [(path.parent.name, json.loads(path.read_text(encoding="utf-8"))) for path in manifests]


def _tokenizers(folder: Path) -> list[Path]:
    return sorted(folder.glob("tokenizer.*.json"))


def _is_whole(folder: Path) -> bool:
    """Return whether a folder contains tokenised text, and not the remains of a command that was killed."""
    return not folder.name.startswith(".") and all((folder / name).exists() for name in HELD_OUT)


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# Training settings whose values are the same for all runs, whatever the recipe specifies; see `training`.
FIXED = (
    "time",
    "validate_every",
    "save_every",
    "log_every",
    "keep",
    "keep_state",
    "choose",
    "average",
    "criterion",
    "patience",
    "parallel",
)
REASON = (
    f"every run trains for all its steps in one process, is validated {POINTS} times and compared by its last weights"
)


def check_changes(changes: Iterable[str], request: RecipeRequest, steps: bool) -> None:
    """Raise an error for `--set` options without effect. `steps` is true if another option sets the number of steps."""
    for path in (parse_change(change)[0] for change in changes):
        section, _, field = path.partition(".")
        if section == "decode":
            raise SpecError(path, "is not used here: all runs are measured by greedy search; leave it out")
        if section == "train" and field in FIXED:
            raise SpecError(path, f"is not used here: {REASON}; leave it out")
        if path == "train.steps" and steps:
            raise SpecError(path, "sets the number of steps, and so does another option; give one of them")
        if path == "train.seed" and not request.data.split_by_source:
            raise SpecError(path, "is not used here: runs have the seeds 1, 2, ... (--seeds); leave it out")


def unused(request: RecipeRequest) -> str:
    """Return a sentence that lists the settings of the recipe that an ablation ignores, or an empty string."""
    train, defaults = request.train, (TrainSpec(), default_train(request.data.objective))
    names = [f"train.{name}" for name in FIXED if getattr(train, name) not in [getattr(d, name) for d in defaults]]
    names += ["train.seed"] * (train.seed != TrainSpec().seed and not request.data.split_by_source)
    names += ["decode"] * (request.decode != Beam())
    return f"not used from the recipe: {', '.join(names)}; {REASON}, with greedy translations" if names else ""


def training(train: TrainSpec, steps_override: int | None) -> TrainSpec:
    """Return the training settings for every run: fixed numbers of steps and validations, and no early stopping."""
    steps = steps_override or train.steps
    assert steps is not None, "resolved before planning"
    return replace(
        train,
        steps=steps,
        time=None,
        schedule=train.schedule if steps_override is None else _shortened(train.schedule, steps),
        validate_every=max(1, steps // POINTS),
        save_every=None,
        log_every=max(1, steps // POINTS),
        choose="last",
        average=1,
        keep=1,
        keep_state=1,
        parallel="replicate",
        criterion="loss",
        patience=0,
    )


def _shortened(schedule: Any, steps: int) -> Any:
    """Return the schedule with its learning-rate warm-up limited to a quarter of the steps."""
    warmup = getattr(schedule, "warmup", None)
    return schedule if warmup is None or warmup <= steps // 4 else replace(schedule, warmup=max(1, steps // 4))


def early_step(train: TrainSpec) -> int:
    """Return the step at which the early loss is measured: the validation closest to 1 / EARLY of the steps."""
    assert train.steps
    assert train.validate_every
    every = train.validate_every
    return min(train.steps, max(1, round(train.steps / EARLY / every)) * every)


def job(row: Row, seed: int, recipe: Recipe, text: Text, factor: float = 1.0) -> Job:
    """Return a training run: the base's recipe with the row's model, the seed, and the learning rate times `factor`."""
    assert row.model is not None
    train = recipe.train if row.steps is None else training(recipe.train, row.steps)
    if factor != 1.0:
        assert train.optimizer is not None, "resolved before planning"
        train = replace(train, optimizer=train.optimizer.scaled(factor))
    recipe = replace(recipe, model=row.model, train=replace(train, seed=seed))
    current, *former_hashes = run_hashes(recipe, text.fingerprint, *text.former_fingerprints)
    return Job(row.name, seed, recipe, factor, current, tuple(former_hashes))


def run_hashes(recipe: Recipe, *fingerprints: str) -> list[str]:
    """Return a hash of everything that a result depends on: model, training, seed, batches, tokens and user code.

    File paths do not affect the hash. User code is included as the contents of its source files. After the hash follow
    those by which earlier versions stored the same run, because they included settings that the hash leaves out, or had
    other fingerprints of the text, which follow the present one in `fingerprints`.
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
    hashes = []
    for version in range(len(ADDED) + 1):
        parts = [_without(part, ADDED[version:]) for part in (record["model"], record["train"], rest)]
        described = former(parts)  # a renamed setting changes no result
        hashes += [digest([FORMAT, *described, each, *([code] if code else [])]) for each in fingerprints]
    return list(dict.fromkeys(hashes))


def _without(record: Any, added: Sequence[Mapping[str, Mapping[str, Any]]]) -> Any:
    """Return a JSON value without the fields in `added` that have the value given there."""
    if isinstance(record, list):
        return [_without(item, added) for item in record]
    if not isinstance(record, Mapping):
        return record
    left_out = [(name, value) for table in added for name, value in table.get(record.get("kind", ""), {}).items()]
    return {name: _without(value, added) for name, value in record.items() if (name, value) not in left_out}


def _code(recipe: Recipe) -> list[str]:
    """Return the digests of the source files that define the user's own layers, optimizers and other classes."""
    modules = {type(part).__module__ for part in walk(recipe)}
    files = {inspect.getsourcefile(sys.modules[name]) for name in modules if name.partition(".")[0] != "regard"}
    return sorted(file_digest(Path(file)) for file in files if file is not None)


def searches(rows: Iterable[Row], recipe: Recipe, text: Text) -> list[Job]:
    """Return the training runs of the learning-rate search: every row with every factor in FACTORS."""
    return [job(row, SEARCH_SEED, recipe, text, factor) for row in rows for factor in FACTORS]


def runs(
    base: Row, rows: Iterable[Row], seeds: int, recipe: Recipe, text: Text, rates: Rates, base_seeds: int | None = None
) -> list[Job]:
    """Return the training runs to compare: seeds 1 .. n for every row, by default three times as many for the base."""
    seeds_by_row = [(base, base_seeds or 3 * seeds), *((row, seeds) for row in rows)]
    return [
        job(row, seed, recipe, text, rates.get(row.name, 1.0))
        for row, count in seeds_by_row
        for seed in range(1, count + 1)
    ]
