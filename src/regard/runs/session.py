"""A session of training: prepare, choose, train, save; or take up where an earlier session stopped."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import planner
from regard.data.batching import Windows
from regard.data.cache import Cache
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.data.prepare import ROOM, DataSpec, Prepared, opened, prepare
from regard.data.text import check_file
from regard.data.tokenizer import Imported, Tokenizer
from regard.decoding import length_limit
from regard.decoding.beam import Beam
from regard.decoding.length_limit import LengthLimit
from regard.errors import DataError, OutOfMemoryError, SpecError, lacks_memory
from regard.evaluation import baselines, target_text
from regard.evaluation.metrics import bleu_metric
from regard.evaluation.validation import HeldOut, validate
from regard.files import LOCK, TEMPORARY, clear, held
from regard.models.base import Classifier, LanguageModel, Model, ModelSpec
from regard.models.build import build
from regard.planner import fit as fitting
from regard.planner.speed import Hardware, hardware
from regard.planner.threads import quiet
from regard.recipe.recipe import PARTS, Recipe, RecipeRequest, asked, model_for, read_file
from regard.runs.trained_model import TrainedModel, choose_device, load, load_weights, read_recipe, read_tokenizers
from regard.training.checkpoint import FORMAT, RunFolder, read_json, write_json
from regard.training.console import TrainingConsole
from regard.training.log import Log, TensorBoard, environment
from regard.training.spec import TrainSpec
from regard.training.trainer import Metrics, Outcome, Trainer, Watcher, precision
from regard.tree import edit, to_record

OF_ATTENTION = frozenset({"heads", "d_head", "attention_dropout"})  # settings that nothing else reads
LOOKED_AT = 200  # translations that show what fine-tuning does to the text of the run it started from


@dataclass(frozen=True)
class Session:
    """What is said for one session and is no part of the recipe."""

    device: str = "auto"
    max_time: float | None = None  # seconds after which the session saves and stops
    quiet: bool = True
    trust_code: bool = False  # parts named as module:Class may be imported
    cache: bool = True  # prepared data are taken from the cache, and kept there
    began: float = field(default_factory=time.monotonic)  # from when a time budget counts


def train(
    out: str | Path,
    *,
    changes: str | Sequence[str] = (),
    device: str = "auto",
    max_time: float | None = None,
    quiet: bool = True,
    trust_code: bool = False,
    cache: bool = True,
    **files: Any,
) -> TrainedModel:
    """Train on text files into the folder `out`, and return the run.

    `files` are those of `request_from_options`. `changes` are `path=value` edits of the recipe: `train.steps=1000`.
    Text that was prepared before is taken from the `cache` (`regard cache` says where that is).
    """
    wanted = request_from_options(changes=changes, trust_code=trust_code, **files)
    return start_run(wanted, out, Session(device, max_time, quiet, trust_code, cache))[0]


def request_from_options(  # noqa: PLR0913  # the options of the command line
    *,
    source: str | Path | None = None,
    target: str | Path | None = None,
    valid_source: str | Path | None = None,
    valid_target: str | Path | None = None,
    tsv: str | Path | Sequence[str | Path] = (),
    jsonl: str | Path | Sequence[str | Path] = (),
    text: str | Path | Sequence[str | Path] = (),
    labelled: str | Path | Sequence[str | Path] = (),
    valid: str | Path | None = None,
    recipe: str | Path | None = None,
    preset: str | None = None,
    variants: str | Sequence[str] = (),
    changes: str | Sequence[str] = (),
    start: str | Path | None = None,
    time: float | None = None,
    trust_code: bool = False,
) -> RecipeRequest:
    """The recipe of a command line.

    One of: `source` and `target`, `tsv`, `jsonl` (translation), `text` (language model), `labelled` (classifier), or a
    `recipe` file, which the others then override.
    """
    record = read_file(Path(recipe)) if recipe is not None else {}
    files = {
        "parallel": [each for each in (_files_of(source, target),) if each],
        "tsv": [{"path": path} for path in _several(tsv)],
        "jsonl": [{"path": path} for path in _several(jsonl)],
        "lines": [{"path": path} for path in _several(text)],
        "labelled": [{"path": path} for path in _several(labelled)],
    }
    held_out = _files_of(valid_source, valid_target) or (None if valid is None else str(valid))
    if valid is not None and not isinstance(held_out, str):
        raise SpecError("--valid", "one validation text is enough; give it or --valid-source and --valid-target")
    record = with_files(record, files, held_out)
    if preset is not None:
        model = record.get("model")
        record["model"] = {**(model if isinstance(model, Mapping) else {}), "preset": preset}
    if start is not None:
        record["start"] = str(start)
    if time is not None:
        if any(change.partition("=")[0].strip() == "train.time" for change in _several(changes)):
            raise SpecError("--time", "is train.time; give one of the two")
        record["train"] = _table(record, "train") | {"time": time}
    return asked(record, _several(changes), _several(variants), trust_code)


def _files_of(source: str | Path | None, target: str | Path | None) -> dict[str, Any]:
    """The two files of a translation, as far as they are named."""
    if not source and not target:
        return {}
    return {"source": source and str(source), "target": target and str(target)}


def _several(given: str | Path | Sequence[str | Path]) -> list[str]:
    """One path or name, or several: a string is one, and never its characters."""
    return [str(given)] if isinstance(given, str | Path) else [str(each) for each in given]


def with_files(
    record: Mapping[str, Any], files: Mapping[str, list[dict[str, Any]]], valid: dict[str, Any] | str | None
) -> dict[str, Any]:
    """A recipe table with the files of a command line in its data section."""
    kinds = [kind for kind, found in files.items() if found]
    record = dict(record)
    if not kinds:
        if "data" not in record:
            raise SpecError(
                "", "there is nothing to learn from; give --source and --target, --tsv, --text or --labelled"
            )
        if valid is not None:
            raise SpecError("--valid", "comes with the files to learn from; in a recipe it is data.valid")
        return _default_train(record)
    objectives = {"lines": "language_model", "labelled": "classification"}
    wanted = {objectives.get(kind, "translation") for kind in kinds}
    if len(wanted) > 1:
        raise SpecError("", f"one run learns one thing; {' and '.join(sorted(wanted))} files cannot be mixed")
    for entry in files["parallel"]:
        if not entry["source"] or not entry["target"]:
            raise SpecError("", "two aligned files are needed; give both --source and --target")
    data = _table(record, "data")
    data["train"] = [{"kind": kind, **entry} for kind in kinds for entry in files[kind]]
    data.setdefault("objective", wanted.pop())
    if isinstance(valid, str):
        data["valid"] = [{"kind": kinds[0], "path": valid}]
    elif valid is not None:
        if not valid["source"] or not valid["target"]:
            raise SpecError("", "validation needs two aligned files; give both --valid-source and --valid-target")
        data["valid"] = [{"kind": "parallel", **valid}]
    record["data"] = data
    return _default_train(record)


def _default_train(record: dict[str, Any]) -> dict[str, Any]:
    """The training that is usual for the objective, under what the recipe says."""
    objective = _table(record, "data").get("objective", "translation")
    kind = objective.get("kind") if isinstance(objective, Mapping) else objective
    kinds: dict[str, Objective] = {o.kind: o for o in (Translation(), LanguageModelling(), Classification())}
    if not isinstance(kind, str) or kind not in kinds:
        return record  # reading it says what is wrong
    usual = to_record(planner.for_objective(kinds[kind]), PARTS)
    return record | {"train": usual | _table(record, "train")}


def _table(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of a recipe, empty if it is not there."""
    section = record.get(name, {})
    if not isinstance(section, Mapping):
        raise SpecError(name, f"needs a table, not {repr(section)[:40]}")
    return dict(section)


def check(wanted: RecipeRequest) -> None:
    """Refuse what is wrong with a recipe whatever the text says, before any of it is read."""
    if wanted.train.time is not None and wanted.train.validate_every is not None:
        raise SpecError(
            "train.validate_every", "is not used with a time, which validates by the clock; leave one of the two out"
        )
    check_criterion(wanted.train, wanted.data.objective)
    if wanted.train.bleu_tokenize != TrainSpec().bleu_tokenize:
        try:
            bleu_metric(wanted.train.bleu_tokenize)
        except SpecError as error:
            raise SpecError("train.bleu_tokenize", error.message) from None
    for corpus in (*wanted.data.train, *wanted.data.valid):
        for file in corpus.files():
            check_file(file)
    if isinstance(wanted.data.tokenizer, Imported):
        wanted.data.tokenizer.learn(())
    if wanted.model is not None:
        _, model = model_for(wanted, None, lambda _: {})
        if not isinstance(wanted.data.objective, Classification):  # which may change what a model has at its end
            check_family(model, wanted.data.objective)
    elif wanted.changes or wanted.variants:
        _check_modifications(wanted)


def _check_modifications(wanted: RecipeRequest) -> None:
    """Refuse edits and variants that fit none of the models of which one will be chosen for the text."""
    refusals = []
    for candidate in planner.candidates(wanted.data.objective):
        try:
            model_for(wanted, candidate.spec, lambda _: {})
        except SpecError as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def start_run(
    wanted: RecipeRequest, out: str | Path, session: Session | None = None, beside: Sequence[str] = ()
) -> tuple[TrainedModel, Outcome]:
    """Start a run in a new folder, which may hold nothing but what is named in `beside`."""
    session = session or Session()
    folder = RunFolder(out)
    if not folder.asked.exists():  # nothing, not even a lock, is written to a folder of something else
        _check_free(folder, beside)
    precision(wanted.train, choose_device(session.device))  # what is not there is said before anything is made
    check(wanted)
    view = TrainingConsole(quiet=session.quiet)
    with held(folder.path, lambda: _check_free(folder, beside)):  # now nobody else can start_run there
        try:
            write_json(folder.asked, {"format": FORMAT} | wanted.absolute().record())
            data, recipe = _prepared(folder, session, view)
            trainer = _trainer(folder, recipe, data, session, view)
        except BaseException:  # nothing was trained: leave nothing behind
            clear(folder.path, [LOCK])
            raise
        try:
            return _fit(trainer, folder, session, view)
        except OutOfMemoryError:  # in its first steps it has learned nothing that a folder should be kept for
            if (latest := folder.latest()) is None or latest.step == 0:
                clear(folder.path, [LOCK])
            raise


def _check_free(folder: RunFolder, beside: Sequence[str]) -> None:
    """Refuse a folder that holds something."""
    free = not folder.path.exists() or (
        folder.path.is_dir()
        and all(path.name in (LOCK, *beside) or TEMPORARY.fullmatch(path.name) for path in folder.path.iterdir())
    )
    if not free:
        hint = "regard resume goes on with it; " if folder.asked.exists() else ""
        raise DataError(f"{folder.path} exists; {hint}choose another folder to train into")


def resume(
    path: str | Path,
    device: str = "auto",
    max_time: float | None = None,
    quiet: bool = True,
    trust_code: bool = False,
) -> TrainedModel:
    """Go on with a run exactly where it stopped, and return it."""
    return resume_run(path, Session(device, max_time, quiet, trust_code))[0]


def resume_run(path: str | Path, session: Session | None = None) -> tuple[TrainedModel, Outcome]:
    """Go on where a run stopped; one that was stopped before its first checkpoint starts over."""
    session = session or Session()
    folder = RunFolder(path)
    if not folder.asked.exists() and not folder.recipe.exists():
        raise DataError(f"{folder.path} is no run; regard train makes one")
    view = TrainingConsole(quiet=session.quiet)
    if not folder.final.exists():
        with held(folder.path, writes=folder.writes):
            if not folder.final.exists():  # another process may have finished it a moment ago
                data, recipe = _prepared(folder, replace(session, cache=False), view)
                trainer = _trainer(folder, recipe, data, session, view)
                trainer.resume()
                return _fit(trainer, folder, session, view)
    run = load(folder.path, session.device, trust_code=session.trust_code)
    view.say(f"{folder.path} is finished; regard train --from {folder.path} goes on with other text")
    return run, Outcome(True, "it was finished", run.step)


def _prepared(folder: RunFolder, session: Session, view: TrainingConsole) -> tuple[Prepared, Recipe]:
    """Data and resolved recipe, as an earlier session left them or made now."""
    if folder.recipe.exists():
        recipe = read_recipe(folder, session.trust_code)
        read_tokenizers(folder, recipe.data.objective)  # what is lost is said now, and not once all is learned
        data = opened(recipe.data, folder.data)
        # Runs of before the metric was chosen from the text have none in their recipe.
        return data, replace(recipe, train=choose_metric(recipe.train, data, []))
    wanted = _wanted(folder, session.trust_code)
    parent = load(wanted.start, "cpu", trust_code=session.trust_code) if wanted.start is not None else None
    tokenizers = parent.tokenizers if parent is not None else None
    if parent is not None and parent.objective.kind != wanted.data.objective.kind:
        raise DataError(f"{parent.path} was trained for {parent.objective.kind}, not {wanted.data.objective.kind}")
    if parent is not None and isinstance(wanted.data.objective, Classification):
        objective = replace(wanted.data.objective, labels=labels_after(parent, wanted.data, view.say))
        wanted = replace(wanted, data=replace(wanted.data, objective=objective))
    if parent is not None:  # its model has positions for texts of its own length
        known = parent.recipe.data
        kept = {"tokenizer": known.tokenizer, "max_len": wanted.data.max_len or known.max_len}
        wanted = replace(wanted, data=replace(wanted.data, **kept, long=wanted.data.long or known.long))
    cache, device = Cache.usual() if session.cache else None, choose_device(session.device)
    room = ROOM if device.type == "cuda" else ROOM // 2
    data = prepare(wanted.data, folder.data, wanted.train.seed, tokenizers, view.say, cache, room)
    for sentence in data.report:
        view.say(sentence)
    elapsed = time.monotonic() - session.began
    recipe = resolve(wanted, data, device, view.say, parent, hardware=hardware(device, keep=quiet()), elapsed=elapsed)
    for name, tokenizer in _files(data.tokenizers).items():
        tokenizer.save(folder.path / name)
    write_json(folder.recipe, {"format": FORMAT} | recipe.record())
    return data, recipe


def labels_after(parent: TrainedModel, data: DataSpec, say: Callable[[str], None]) -> tuple[str, ...]:
    """The labels of a classifier in the order in which it knows them, then those that are new in the training text."""
    assert isinstance(parent.objective, Classification)
    assert isinstance(data.objective, Classification)
    known, given = parent.objective.labels, data.objective.labels
    if given and given[: len(known)] != known:
        raise SpecError(
            "data.objective.labels",
            f"--from keeps the classes of {parent.path}; leave it out, or start_run with {known}",
        )
    once = [
        file for corpus in data.train for file in corpus.files() if Path(file).exists() and not Path(file).is_file()
    ]
    if once:
        raise DataError(f"{once[0]}: can be read only once, but labels are read before the text; write it into a file")
    found = {record[0] for corpus in data.train for record in corpus.records()}
    new = given[len(known) :] if given else tuple(sorted(found - {*known}))
    missing = [label for label in known if label not in found]
    if new:
        say(f"labels: {len(new)} new, which nothing is known of yet: {', '.join(new)}")
    if missing:
        say(f"labels: {len(missing)} of {parent.path} do not occur in this text, and are kept: {', '.join(missing)}")
    return (*known, *new)


def _wanted(folder: RunFolder, trust_code: bool) -> RecipeRequest:
    record = read_json(folder.asked)
    record.pop("format", None)
    try:
        return RecipeRequest.of(record, trust_code)
    except SpecError as error:
        raise DataError(f"{folder.asked}: {error}") from None


def _files(tokenizers: dict[str, Tokenizer]) -> dict[str, Tokenizer]:
    """The tokenizers by file: one, or one for each side."""
    if len({tokenizer.sha256 for tokenizer in tokenizers.values()}) == 1:
        return {"tokenizer.json": next(iter(tokenizers.values()))}
    return {f"tokenizer.{name}.json": tokenizer for name, tokenizer in tokenizers.items()}


def resolve(  # noqa: PLR0913  # what ablations choose differently
    wanted: RecipeRequest,
    data: Prepared,
    device: torch.device,
    say: Callable[[str], None],
    parent: TrainedModel | None = None,
    *,
    packs: bool = True,
    attention: bool = False,
    hardware: Hardware | None = None,
    elapsed: float = 0.0,
) -> Recipe:
    """Complete a recipe with what is chosen for it, and print each choice with its reason.

    `packs` allows packed rows where they are best; `attention` asks for a Transformer, whose parts can be modified.
    Without `hardware` nothing is measured, and the plan is that for a usual device of the same kind. `elapsed` seconds
    of a given time are over.
    """
    objective, vocabulary = data.objective, {name: data.tokenizers[name].size for name in data.objective.encoded}
    joint = len(_files(data.tokenizers)) == 1
    if parent is not None and (wanted.model is not None or wanted.changes or wanted.variants):
        raise SpecError("model", f"--from takes the model of {parent.path} as it is; change nothing about it")
    batching = wanted.data.batches
    if isinstance(batching, Windows) and not wanted.laid:
        before = None if parent is None else parent.recipe.data.batching  # whose model may have no more positions
        length = before.length if isinstance(before, Windows) else _window(device, data.survey.ids["target"])
        batching = replace(batching, length=length)
    longest = getattr(batching, "length", 0) if objective.stream else data.spec.longest + 2

    def fits(model: ModelSpec) -> Mapping[str, Any]:
        return fitting.fitted(model, objective, vocabulary, longest, joint)

    def finished(base: ModelSpec) -> ModelSpec:
        return model_for(wanted, base, fits)[1]

    known = _known_model(wanted, parent, objective, fits)
    attention = attention or not OF_ATTENTION.isdisjoint(wanted.changes)
    given = planner.Given(known, trained=parent is not None, attention=attention)
    facts = hardware or planner.nominal(device.type)
    whole = finished if known is None else lambda _: known
    chosen = planner.plan(
        objective,
        data.survey,
        batching,
        wanted.train,
        facts,
        given,
        whole,
        elapsed=elapsed,
        longest=longest,
        validates=data.valid is not None,
    )
    why = chosen.why
    if known is None:
        model = finished(chosen.model)
    else:
        model = known
        why = [f"model: {'that of ' + str(parent.path) if parent is not None else 'as given'}", *why]
    check_family(model, data.objective)
    batching = chosen.batching
    if packs and device.type == "cuda" and not wanted.laid and fitting.packs(model, data.objective):
        rows = fitting.packed(batching, longest_laid(data))
        budget = getattr(wanted.data.batching, "tokens", None)
        if budget is None or budget == rows.tokens:  # one that is given is kept
            batching = rows
            why.append(f"rows: texts packed into rows of {rows.length}, so that a GPU sees one shape")
    spec = replace(data.spec, train=wanted.data.train, valid=wanted.data.valid, batching=batching)
    train = choose_metric(chosen.train, data, why)
    limit = _length_limit(data, parent, why)
    for name, tokenizer in _files(data.tokenizers).items():
        say(f"{name}: {tokenizer.why}")
    for sentence in why:
        say(sentence)
    return Recipe(model, spec, train, wanted.decode, limit)


def _length_limit(data: Prepared, parent: TrainedModel | None, why: list[str]) -> LengthLimit | None:
    """The limit on outputs by the training text; that of a fine-tuned model also allows what its parent allowed."""
    if not isinstance(data.objective, Translation):
        return None
    limit = length_limit.of_tables(data.train)
    if parent is not None:
        limit = length_limit.widest([limit, parent.recipe.length_limit])
    if limit is not None:
        why.append(f"length limit of a translation: {limit}")
    return limit


def _window(device: torch.device, tokens: int) -> int:
    """The length of the windows of a stream: a GPU reads long ones for nothing, and a CPU learns more from short ones.

    A short text has several of them.
    """
    wanted = 128 if device.type == "cpu" else 512 if tokens >= 1_000_000 else 256
    return max(16, min(wanted, tokens // 8))


def longest_laid(data: Prepared) -> int:
    """The longest example, on its longer side, as it is laid into a row."""
    objective = data.objective
    return max(
        int(table[name].lengths.max()) - objective.unread.get(name, 0)
        for table in data.train
        for name in objective.measured
        if table.rows
    )


def _known_model(
    wanted: RecipeRequest,
    parent: TrainedModel | None,
    objective: Objective,
    fits: Callable[[ModelSpec], Mapping[str, Any]],
) -> ModelSpec | None:
    """The model, where it is that of another run or given by a preset or a recipe; None: it is to be chosen."""
    if parent is None:
        return None if wanted.model is None else model_for(wanted, None, fits)[1]
    model = parent.recipe.model
    if isinstance(objective, Classification) and objective != parent.objective:
        model = edit(model, {"task.classes": len(objective.labels)}, PARTS)
    return model


def check_family(model: Any, objective: Objective) -> None:
    """Refuse a model that cannot learn the objective."""
    built = build(model, device="meta")
    fits = {
        Translation: isinstance(built, LanguageModel) and model.reads_source,
        LanguageModelling: isinstance(built, LanguageModel) and not model.reads_source,
        Classification: isinstance(built, Classifier),
    }
    if not fits[type(objective)]:
        raise SpecError(
            "model", f"a model of kind {type(model).kind!r} cannot learn {objective.kind!r}; choose another"
        )


def _trainer(folder: RunFolder, recipe: Recipe, data: Prepared, session: Session, view: TrainingConsole) -> Trainer:
    device = choose_device(session.device)
    wanted = _wanted(folder, session.trust_code)
    model = build(recipe.model, device, seed=recipe.train.seed)
    if wanted.start is not None and folder.latest() is None:
        parent = load(wanted.start, session.device, trust_code=session.trust_code)
        load_weights(model, _grown(parent.model.state_dict(), model.state_dict()), parent.path)
    assert recipe.data.batching is not None
    examples = Examples(data.train, data.weights, data.objective)
    stream = BatchLoader(examples, recipe.data.batching, recipe.train.seed)
    stream.plan(0)  # what cannot be batched is said before anything else
    criterion = check_criterion(recipe.train, data.objective)
    latest = folder.latest()
    step = latest.step if latest else 0
    watchers: list[Watcher] = [Log(folder.log, step), view]
    if TensorBoard.installed():
        watchers.append(TensorBoard(folder.path / "tensorboard", step))
    else:
        view.say("no TensorBoard events: pip install 'regard[log]' adds them")
    write_json(folder.path / "environment.json", environment(device))
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    view.say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}{threads}")
    flops = _flops(recipe, data) if device.type == "cuda" else None
    measure = _measure(recipe, data, criterion)
    trainer = Trainer(
        model,
        recipe.train,
        stream,
        folder,
        measure,
        watchers,
        criterion,
        flops_per_token=flops,
        began=session.began,
        trained=wanted.start is not None,
    )
    baselines.report(folder, data, recipe.train, trainer.tell, view.say)
    return trainer


def _grown(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with rows added where `initial` has more of them, as it has for new classes: the initial ones."""
    return {
        name: torch.cat([tensor, initial[name][len(tensor) :]])
        if name in initial and initial[name].shape != tensor.shape and initial[name].shape[1:] == tensor.shape[1:]
        else tensor
        for name, tensor in weights.items()
    }


def _flops(recipe: Recipe, data: Prepared) -> float:
    """FLOPs of a forward pass for each label, in texts of the usual length."""
    from regard.models.cost import cost  # noqa: PLC0415  # torch's counter takes a second and a half to import

    column = data.objective.measured[-1]
    usual = data.survey.ids[column] // max(1, data.survey.kept)
    if isinstance(recipe.data.batching, Windows):
        usual = recipe.data.batching.length
    usual = max(1, usual)
    per_token = cost(recipe.model, usual).flops_per_token
    return per_token * usual if isinstance(data.objective, Classification) else per_token


def choose_metric(train: TrainSpec, data: Prepared, why: list[str]) -> TrainSpec:
    """Choose the metric that ranks checkpoints, and the tokenizer of BLEU, by what the target text is."""
    if not isinstance(data.objective, Translation) or not data.valid_texts:
        return train  # the metric is that of the objective, and nothing is decoded
    choice = target_text.choose([record[1] for record in data.valid_texts], train.bleu_tokenize)
    train = replace(train, bleu_tokenize=choice.tokenize)
    if train.criterion == "auto" and train.decode:
        train = replace(train, criterion=choice.criterion)
        why.append(f"best checkpoint: by {choice.reason}")
    return train


def check_criterion(train: TrainSpec, objective: Objective) -> str:
    """The metric that ranks checkpoints; one that is not measured is refused."""
    criterion = train.criterion
    if criterion == "auto":
        return "accuracy" if isinstance(objective, Classification) else "loss"
    known = {"loss"} | {Translation: {"bleu", "chrf", "exact_match"}, Classification: {"accuracy"}}.get(
        type(objective), set()
    )
    if criterion not in known:
        raise SpecError("train.criterion", f"{criterion!r} is not measured for {objective.kind}")
    if criterion not in ("loss", "accuracy") and not train.decode:
        raise SpecError("train.criterion", f"{criterion!r} needs translations; set train.decode above 0")
    return criterion


def _measure(recipe: Recipe, data: Prepared, criterion: str) -> Callable[[Model], Metrics] | None:
    if data.valid is None or not data.valid.rows:
        return None
    batching = recipe.data.batching
    assert batching is not None
    if batching.packed:
        batching = fitting.padded(batching)
    held_out = HeldOut(
        data.objective,
        data.valid,
        data.valid_texts,
        data.tokenizers,
        batching,
        data.valid_survey.bytes,
        recipe.data.longest,
        recipe.length_limit,
    )
    train = recipe.train
    return lambda model: validate(
        model, held_out, Beam(beam_size=1), train.decode, train.bleu_tokenize, criterion=criterion
    )


def _fit(trainer: Trainer, folder: RunFolder, session: Session, view: TrainingConsole) -> tuple[TrainedModel, Outcome]:
    deadline = None if session.max_time is None else time.monotonic() + session.max_time
    try:
        with _signals() as caught:

            def stop() -> str | None:
                if caught:
                    return f"{caught[0]}; regard resume {folder.path} goes on"
                if deadline is not None and time.monotonic() > deadline:
                    return f"time limit reached; continue with regard resume {folder.path}"
                return None

            outcome = trainer.fit(stop)
    finally:
        view.close()
    if not outcome.finished and (warning := inside_warmup(trainer.spec, outcome.step)):
        view.say(warning)
    if not folder.steps():
        raise DataError(f"{folder.path} has no checkpoint")
    run = load(folder.path, session.device, trust_code=session.trust_code)
    if outcome.finished:
        baselines.compare(folder, run.scores, trainer.criterion, view.say)
        if (change := _change_on_parent(folder, run, session)) is not None:
            trainer.tell("parent", **change)
            view.say(described_change(change, trainer.criterion))
    view.warn(run.scores)
    return run, outcome


def _change_on_parent(folder: RunFolder, run: TrainedModel, session: Session) -> dict[str, Any] | None:
    """Metrics of a fine-tuned run on the validation text of the run it started from, before and after; None if lost.

    At most `LOOKED_AT` records are translated.
    """
    start = _wanted(folder, session.trust_code).start
    if start is None:
        return None
    try:
        parent = load(start, session.device, trust_code=session.trust_code)
        data = opened(parent.recipe.data, RunFolder(parent.path).data)
    except DataError:  # it was moved or cleared since
        return None
    train = replace(parent.recipe.train, decode=min(LOOKED_AT, parent.recipe.train.decode))
    recipe, criterion = replace(parent.recipe, train=train), check_criterion(train, data.objective)
    # A classifier may have got new classes.
    before, after = (_measure(recipe, replace(data, objective=r.objective), criterion) for r in (parent, run))
    if before is None or after is None:
        return None
    try:
        with torch.no_grad():
            return {"parent": str(parent.path), "before": before(parent.model), "after": after(run.model)}
    except (MemoryError, RuntimeError) as error:  # the run itself is done
        if not lacks_memory(error):
            raise
        return None


def described_change(change: Mapping[str, Any], criterion: str) -> str:
    """Describe how fine-tuning changed the metrics on the validation text of the first run."""
    names = [
        name for name in dict.fromkeys((criterion, "loss")) if name in change["before"] and name in change["after"]
    ]
    values = ", ".join(f"{name} {change['before'][name]:.3g} before, {change['after'][name]:.3g} now" for name in names)
    return f"validation text of {change['parent']}: {values}"


def inside_warmup(train: TrainSpec, step: int) -> str | None:
    """A warning, where training stopped while its learning rate was still rising."""
    warmup = getattr(train.schedule, "warmup", None) or 0
    if step >= warmup:
        return None
    return (
        f"warning: training stopped inside the learning-rate warm-up (step {step:,} of {warmup:,}), so the model has "
        "hardly begun to learn; --time plans the whole schedule for the time there is"
    )


@contextmanager
def _signals() -> Iterator[list[str]]:
    """The first Ctrl-C or SIGTERM is noted, to stop after the step; the second is as ever."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: Any) -> None:
        caught.append("interrupted" if number == signal.SIGINT else "asked to end")
        signal.signal(number, before[number])

    try:
        for number in before:
            signal.signal(number, note)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
