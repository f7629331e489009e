"""Recipes: settings of model, data, training and decoding, from a preset, a TOML or JSON file, and `--set` edits."""

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from regard.catalogue import PARTS as MODEL_PARTS
from regard.catalogue import edited
from regard.data.batching import Batching, Buckets, Packing, Windows
from regard.data.objectives import Classification, LanguageModelling, Objective, Summarization, Translation
from regard.data.prepare import DataSpec
from regard.data.text import JSONL, TSV, Corpus, Labelled, Lines, ParallelFiles
from regard.data.tokenizer import BPE, Bytes, Characters, Imported, TokenizerSpec, Words
from regard.decoding.beam import Beam
from regard.decoding.constraint import CONSTRAINTS, Constraint
from regard.decoding.length_limit import LengthLimit
from regard.decoding.sample import Sample
from regard.decoding.search import Search
from regard.errors import SpecError, nearest
from regard.models.base import ModelSpec
from regard.planner import adamw
from regard.presets import PRESETS, preset
from regard.training.optim import Adafactor, AdamW, Muon, OptimizerSpec
from regard.training.schedule import Constant, Cosine, InverseSqrt, LinearDecay, Schedule, WarmupStableDecay
from regard.training.spec import TrainSpec
from regard.tree import MAX_DEPTH, Spec, check_plain, edit, get_at, read, to_record
from regard.variants import combine

SLOTS: dict[type[Spec], tuple[type[Spec], ...]] = {
    DataSpec: (DataSpec,),
    Corpus: (JSONL, Labelled, Lines, ParallelFiles, TSV),
    Objective: (Classification, LanguageModelling, Summarization, Translation),
    TokenizerSpec: (BPE, Bytes, Characters, Imported, Words),
    Batching: (Buckets, Packing, Windows),
    TrainSpec: (TrainSpec,),
    OptimizerSpec: (Adafactor, AdamW, Muon),
    Schedule: (Constant, Cosine, InverseSqrt, LinearDecay, WarmupStableDecay),
    Search: (Beam, Sample),
    Constraint: CONSTRAINTS,
}
PARTS: dict[str, type[Spec]] = MODEL_PARTS | {part.kind: part for parts in SLOTS.values() for part in parts}
SECTIONS = ("model", "data", "train", "decode")


@dataclass(frozen=True, slots=True)
class Recipe(Spec):
    """A complete recipe: model, data, training and decoding, with all settings chosen."""

    kind = "recipe"
    model: ModelSpec
    data: DataSpec
    train: TrainSpec
    decode: Search
    length_limit: LengthLimit | None = None  # limit of the length of translations; None in older runs

    def record(self) -> dict[str, Any]:
        """Return the recipe as a JSON object."""
        return to_record(self, PARTS | {part.kind: part for part in (Recipe, LengthLimit)})

    @classmethod
    def of(cls, record: Mapping[str, Any], trust_code: bool = False) -> "Recipe":
        """Return the recipe from a JSON object that `record` returned."""
        return read(record, cls, "", PARTS | {part.kind: part for part in (cls, LengthLimit)}, trust_code)


@dataclass(frozen=True)
class RecipeRequest:
    """A recipe as the user writes it. Settings that are not given are chosen later to suit the training text."""

    data: DataSpec
    train: TrainSpec = TrainSpec()
    decode: Search = Beam()
    model: Mapping[str, Any] | None = None  # a table with a preset or a kind; None: chosen to suit the training text
    variants: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)  # edits of the model: path -> value
    start: str | None = None  # folder of the training run to fine-tune
    fixes_rows: bool = False  # True: data.batching specifies how rows are built, not only the tokens per batch
    trust_code: bool = False

    def record(self) -> dict[str, Any]:
        """Return the request as a JSON object, without `trust_code`, because a run folder may come from anyone."""
        sections = {name: to_record(getattr(self, name), PARTS) for name in ("data", "train", "decode")}
        return sections | {
            "model": self.model,
            "variants": list(self.variants),
            "changes": dict(self.changes),
            "start": self.start,
            "fixes_rows": self.fixes_rows,
        }

    @classmethod
    def of(cls, record: Mapping[str, Any], trust_code: bool = False) -> "RecipeRequest":
        """Return the request from a JSON object that `record` returned."""
        _check_record(record)
        return cls(
            data=read(record["data"], DataSpec, "data", PARTS, trust_code),
            train=read(record["train"], TrainSpec, "train", PARTS, trust_code),
            decode=read(record["decode"], Search, "decode", PARTS, trust_code),
            model=record["model"],
            variants=tuple(record["variants"]),
            changes=record["changes"],
            start=record["start"],
            fixes_rows=_fixes_rows(record),
            trust_code=trust_code,
        )

    def absolute(self) -> "RecipeRequest":
        """Return the request with absolute paths, so that the run can be resumed from any working directory."""
        tokenizer = self.data.tokenizer
        if isinstance(tokenizer, Imported):
            tokenizer = replace(tokenizer, path=str(Path(tokenizer.path).absolute()))
        data = replace(
            self.data,
            tokenizer=tokenizer,
            train=tuple(corpus.absolute() for corpus in self.data.train),
            valid=tuple(corpus.absolute() for corpus in self.data.valid),
        )
        return replace(self, data=data, start=None if self.start is None else str(Path(self.start).absolute()))


def _check_record(record: Mapping[str, Any]) -> None:
    """Raise SpecError if the JSON object of a `RecipeRequest` is damaged. Sections are checked when they are read."""
    check_plain(record)
    for name in ("data", "train", "decode", "model", "variants", "changes", "start"):
        if name not in record:
            raise SpecError(name, "is missing; restore the file, or train again")
    for name, expected in (("data", Mapping), ("changes", Mapping), ("model", Mapping | None), ("start", str | None)):
        if not isinstance(record[name], expected):
            raise SpecError(name, f"is {_excerpt(record[name])}; restore the file, or train again")
    _check_variants(record["variants"], "variants")
    if type(_fixes_rows(record)) is not bool:
        raise SpecError("fixes_rows", f"needs true or false, not {_excerpt(_fixes_rows(record))}")


def _fixes_rows(record: Mapping[str, Any]) -> Any:
    """Return `fixes_rows` from the JSON object of a request. Earlier versions stored it as `laid` or not at all."""
    return record.get("fixes_rows", record.get("laid", record["data"].get("batching") is not None))


def _check_variants(names: Any, path: str) -> None:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise SpecError(path, f"needs a list of names, not {_excerpt(names)}")
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise SpecError(path, f"{twice!r} is given twice; leave one of the two out")


def _excerpt(value: Any) -> str:
    return repr(value)[:40]


def request_from_record(
    record: Mapping[str, Any], changes: Iterable[str] = (), variants: Sequence[str] = (), trust_code: bool = False
) -> RecipeRequest:
    """Return the request for a recipe table, `--set` edits and variants.

    If the model is not chosen yet, edits of the model are stored in the request.
    """
    for key in record:
        if key not in (*SECTIONS, "start"):
            raise SpecError(str(key), f"unknown key {key!r} in a recipe; {nearest(str(key), SECTIONS)}")
    check_plain(record)
    if "data" not in record:
        raise SpecError("data", "is missing; a recipe needs the text to learn from")
    if not isinstance(record["data"], Mapping):
        raise SpecError("data", f"needs a table, not {_excerpt(record['data'])}")
    if not isinstance(record.get("start"), str | None):
        raise SpecError("start", f"needs the folder of a run, not {_excerpt(record['start'])}")
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for change in changes:
        path, value = parse_change(change)
        section, _, rest = path.partition(".")
        if path in SECTIONS:
            raise SpecError(path, "is a whole section; set a field of it, such as train.steps=1000")
        if section not in SECTIONS:
            section, rest = "model", path
        if rest in sections[section]:
            raise SpecError("--set", f"{path} is set twice; leave one of the two out")
        sections[section][rest] = value
    model = _model_table(record["model"], "model") if "model" in record else None
    if model is not None and not {"preset", "kind"} & model.keys():  # edits of a model that is chosen later
        variants = (*model.pop("variants", ()), *variants)
        sections["model"] = _flat(model) | sections["model"]
        model = None
    _check_variants([*(model or {}).get("variants", ()), *variants], "variants")
    if record.get("start") is not None:
        _check_start(record, sections, variants)
    data: DataSpec = _section(record["data"], DataSpec, "data", sections["data"], trust_code)
    train = record.get("train", {})
    edits_optimizer = any(path.startswith("optimizer.") for path in sections["train"])
    if edits_optimizer and isinstance(train, Mapping) and train.get("optimizer") is None:
        train = {**train, "optimizer": to_record(adamw(data.objective), PARTS)}  # so that edits of its fields apply
    request = RecipeRequest(
        data=data,
        train=_section(train, TrainSpec, "train", sections["train"], trust_code),
        decode=_section(record.get("decode", data.objective.search), Search, "decode", sections["decode"], trust_code),
        model=model,
        variants=tuple(variants),
        changes=sections["model"],
        start=record.get("start"),
        fixes_rows=record["data"].get("batching") is not None
        or any(path.startswith("batching") and path != "batching.tokens" for path in sections["data"]),
        trust_code=trust_code,
    )
    if request.model is not None:
        model_for(request, None, lambda _: {})  # raises errors in the model section before the corpus is read
    return request


def default_train(objective: Objective) -> TrainSpec:
    """Return the default training settings for an objective. The planner chooses open settings later."""
    return read({"kind": TrainSpec.kind, **objective.train}, TrainSpec, "train", PARTS)


def objective_of(record: Mapping[str, Any], changes: Iterable[str], trust_code: bool = False) -> Objective:
    """Return the objective that a recipe table and `--set` edits specify."""
    data = record.get("data")
    kind = data.get("objective", Translation.kind) if isinstance(data, Mapping) else Translation.kind
    for path, value in map(parse_change, changes):
        kind = value if path == "data.objective" else kind
    return read(kind, Objective, "data.objective", PARTS, trust_code)


def _check_start(record: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], variants: Sequence[str]) -> None:
    """Raise SpecError for settings that fine-tuning (`--from`) would ignore, such as settings of the model."""
    start = record["start"]
    if "model" in record or sections["model"] or variants:
        raise SpecError("model", f"--from uses the model of {start} unchanged; leave out all changes to it")
    named = [path.partition(".")[0] for path in (*record["data"], *sections["data"])]
    for name in ("tokenizer", "joint"):
        if name in named:
            raise SpecError(f"data.{name}", f"--from uses the tokenizer of {start} unchanged; leave it out")


def _section(record: Any, expected: type[Any], name: str, changes: Mapping[str, Any], trust_code: bool) -> Any:
    if isinstance(record, Mapping) and "kind" not in record:
        record = {"kind": next(part.kind for part in PARTS.values() if issubclass(part, expected)), **record}
    spec = read(record, expected, name, PARTS, trust_code)
    try:
        if isinstance(spec, DataSpec):
            changes = _with_defaults(spec, changes, trust_code)
        return edit(spec, changes, PARTS, trust_code) if changes else spec
    except SpecError as error:
        raise error.inside(name) from None


def _with_defaults(spec: DataSpec, changes: Mapping[str, Any], trust_code: bool) -> dict[str, Any]:
    """Return edits of a data spec. If a missing tokenizer or batching is edited, its default is set first."""
    defaults: dict[str, Any] = {}
    if spec.tokenizer is None and any(path.startswith("tokenizer.") for path in changes):
        defaults["tokenizer"] = BPE()
    if spec.batching is None and any(path.startswith("batching.") for path in changes):
        objective = spec.objective
        if "objective" in changes:
            objective = read(changes["objective"], Objective, "objective", PARTS, trust_code)
        edits = {path.removeprefix("objective."): value for path, value in changes.items() if "objective." in path}
        objective = edit(objective, edits, PARTS, trust_code)
        defaults["batching"] = Windows() if objective.stream else Buckets()
    return {**defaults, **changes}


def model_for(
    recipe: RecipeRequest, chosen: ModelSpec | None, fitted: Callable[[ModelSpec], Mapping[str, Any]]
) -> tuple[ModelSpec, ModelSpec]:
    """Return the base model (`chosen`, or from the request), and the model after all modifications.

    `fitted` returns the edits of a model that the data require, such as the vocabulary size.
    """
    for name in ("vocab", "target_vocab"):
        if name in recipe.changes or name in (recipe.model or {}):
            raise SpecError(f"model.{name}", "is the size of the tokenizer; set data.tokenizer.vocab to choose it")
    if chosen is None:
        return model_of(recipe.model, "model", recipe.trust_code, recipe.variants, recipe.changes, fitted)
    try:
        return chosen, _modified(chosen, recipe.variants, recipe.changes, recipe.trust_code, fitted)
    except SpecError as error:
        raise error.inside("model") from None


def load_model(name: str, changes: Sequence[str] = (), trust_code: bool = False) -> tuple[ModelSpec, ModelSpec]:
    """Return the base model of a preset or a recipe file, and the model after all modifications.

    `changes` are `path=value` edits of the model. A path may begin with `model.`, as in edits of a whole recipe.
    """
    edits = parse_changes(changes, "model")
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        if name and name not in PRESETS and path.exists():
            raise SpecError("", f"{name} is not a recipe; use a file whose name ends in .toml or .json")
        spec = preset(name)
        return spec, edited(spec, edits, trust_code)
    record, known = read_file(path), (*SECTIONS, "start")
    for key in record:
        if key not in known:
            raise SpecError(key, f"unknown key {key!r} in {name}; {nearest(key, known)}")
    if "model" not in record:
        raise SpecError("model", f'is missing in {name}; write model = {{ preset = "transformer_base" }}')
    return model_of(record["model"], "model", trust_code, changes=edits)


def model_of(
    record: Any,
    path: str,
    trust_code: bool = False,
    variants: Sequence[str] = (),
    changes: Mapping[str, Any] = MappingProxyType({}),
    fitted: Callable[[ModelSpec], Mapping[str, Any]] = lambda _: {},
) -> tuple[ModelSpec, ModelSpec]:
    """Return the base model of the `model` table of a recipe, and the model after all modifications.

    The table has a preset with edits, or a complete model. `variants` and `changes` are applied after the variants and
    edits in the table. `fitted` is as in `model_for`.
    """
    table = _model_table(record, path)
    variants, name = (*table.pop("variants", ()), *variants), table.pop("preset", None)
    try:
        base = read(table, ModelSpec, "", PARTS, trust_code) if name is None else preset(name)
        edits = dict(changes) if name is None else _flat(table) | dict(changes)
        return base, _modified(base, variants, edits, trust_code, fitted)
    except SpecError as error:
        raise error.inside(path) from None


DEPTHS = ("encoder.depth", "decoder.depth")


def _modified(
    spec: ModelSpec,
    variants: Sequence[str],
    changes: Mapping[str, Any],
    trust_code: bool,
    fitted: Callable[[ModelSpec], Mapping[str, Any]],
) -> ModelSpec:
    """Apply edits of model sizes, then edits that the data require, then variants, then all other edits.

    Sizes come first because variants use them. A variant or edit that contradicts the data raises SpecError.
    """
    sizes = {path: value for path, value in changes.items() if isinstance(value, int | float)}
    sizes = {path: value for path, value in sizes.items() if "." not in path or path in DEPTHS}
    sized = edited(spec, sizes, trust_code)
    suited = edited(sized, fitted(sized), trust_code)
    model = combine(variants, suited, trust_code)
    model = edited(model, {path: value for path, value in changes.items() if path not in sizes}, trust_code)
    fits = fitted(model)
    for path, value in fits.items():
        if path in changes and changes[path] != value:
            raise SpecError(path, f"is {changes[path]!r} here, but the data need {value!r}; leave it out")
    return fit(model, suited, fits, trust_code)


def fit(model: ModelSpec, before: ModelSpec, fits: Mapping[str, Any], trust_code: bool = False) -> ModelSpec:
    """Return `model` with the edits `fits` that the data require; `before` is the model before variants were applied.

    Raise SpecError if a variant has set one of these fields to another value. The length of a position table
    (`max_len`) is an exception: the length that the data require replaces it without an error.
    """
    for path, value in fits.items():
        current, original = get_at(model, path), None
        with suppress(SpecError):  # `before` may have no such path
            original = get_at(before, path)
        if not path.endswith("max_len") and current not in (value, original):
            raise SpecError(path, f"a variant makes it {current!r}, but the data need {value!r}; leave it out")
    return edited(model, fits, trust_code)


def _model_table(record: Any, path: str) -> dict[str, Any]:
    """Return the `model` table of a recipe, which may be given as the name of a preset or of a kind of model."""
    if isinstance(record, str):
        return {"preset" if record in PRESETS else "kind": record}
    if not isinstance(record, Mapping):
        raise SpecError(path, f"needs a table with a kind or a preset, not {_excerpt(record)}")
    if not isinstance(record.get("preset", ""), str):
        raise SpecError(f"{path}.preset", f"needs the name of a preset, not {_excerpt(record['preset'])}")
    _check_variants(record.get("variants", ()), f"{path}.variants")
    return dict(record)


def _flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested table: {"decoder": {"depth": 3}} -> {"decoder.depth": 3}. Tables with a `kind` are kept."""
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, Mapping) and value and "kind" not in value:
            flat |= _flat(value, path)
        else:
            flat[path] = value
    return flat


def read_file(path: Path) -> dict[str, Any]:
    """Read a TOML or JSON file and return its top-level table."""
    try:
        text = path.read_text(encoding="utf-8")
        record = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        raise SpecError("", f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SpecError("", f"{path} is not valid {path.suffix[1:].upper()}: {error}") from None
    except RecursionError:
        raise SpecError("", f"{path} is nested more than {MAX_DEPTH} levels deep; no part needs that") from None
    if not isinstance(record, dict):
        raise SpecError("", f"{path} must hold a table, not a {type(record).__name__}")
    try:
        check_plain(record)
    except SpecError as error:
        raise SpecError("", f"{path}: {error}") from None
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the key-value pairs of a JSON object as a dict; raise ValueError for a repeated key, as TOML does."""
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is repeated")
    return table


def parse_changes(changes: Iterable[str], section: str) -> dict[str, Any]:
    """Return `path=value` edits of a section as a dict (path -> value). Paths may begin with the section name."""
    edits: dict[str, Any] = {}
    for change in changes:
        path, value = parse_change(change)
        path = path.removeprefix(f"{section}.")
        if path in edits:
            raise SpecError("--set", f"{path} is set twice; leave one of the two out")
        edits[path] = value
    return edits


def parse_change(change: str) -> tuple[str, Any]:
    """Return the path and the value of a `path=value` edit. A value that is neither `none` nor TOML is a string."""
    path, equals, text = change.partition("=")
    path, text = path.strip(), text.strip()
    if not equals or not path or not text:
        raise SpecError("--set", f"{change!r} is not path=value, such as decoder.depth=3")
    if text in ("none", "null", "None"):
        return path, None
    try:
        table = tomllib.loads(f"value = {text}")
        value = table["value"] if len(table) == 1 else text  # after a line feed, TOML would read another key
    except ValueError:  # also raised for a number with too many digits
        value = text
    except RecursionError:
        raise SpecError(path, f"is nested more than {MAX_DEPTH} levels deep; no part needs that") from None
    check_plain(value, path)
    return path, value
