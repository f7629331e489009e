"""Build a recipe request (a recipe with open settings) from command options, and check it before any text is read."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from regard import planner
from regard.data.objectives import Objective
from regard.data.text import check_file
from regard.data.tokenizer import Imported
from regard.errors import SpecError, nearest
from regard.evaluation.text_metrics import Bleu
from regard.evaluation.validation import criterion_of
from regard.models.base import Classifier, LanguageModel
from regard.models.build import build
from regard.recipe.recipe import SLOTS, RecipeRequest, model_for, objective_of, read_file, request_from_record
from regard.runs.options import seconds, several
from regard.training.spec import TrainSpec


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
    task: str | None = None,
    recipe: str | Path | None = None,
    preset: str | None = None,
    variants: str | Sequence[str] = (),
    changes: str | Sequence[str] = (),
    start: str | Path | None = None,
    steps: int | None = None,
    time: str | float | None = None,
    trust_code: bool = False,
) -> RecipeRequest:
    """Return the recipe request for the options of `regard train`.

    The training text is given as `source` and `target`, `tsv` or `jsonl` for translation, as `text` for a language
    model, as `labelled` for a classifier, or in a recipe file (`recipe`). `task` is the objective, such as
    "summarization". By default, the objective follows from the format of the training files: for example, pairs are for
    translation. All other options override the settings of the recipe file.
    """
    record = read_file(Path(recipe)) if recipe is not None else {}
    changes, pair = several(changes), _parallel_files(source, target)
    files = {
        "parallel": [pair] if pair else [],
        "tsv": [{"path": path} for path in several(tsv)],
        "jsonl": [{"path": path} for path in several(jsonl)],
        "lines": [{"path": path} for path in several(text)],
        "labelled": [{"path": path} for path in several(labelled)],
    }
    held_out = _parallel_files(valid_source, valid_target) or (None if valid is None else str(valid))
    if valid is not None and not isinstance(held_out, str):
        raise SpecError(
            "--valid", "is a second validation text; give either --valid, or --valid-source and --valid-target"
        )
    record = _with_files(record, files, held_out)
    if task is not None:
        record = _with_task(record, task, changes)
    train = _section(record, "train")
    with suppress(SpecError):  # request_from_record raises the same error
        train = {**objective_of(record, changes, trust_code).train, **train}
    record["train"] = train
    if preset is not None:
        model = record.get("model")
        record["model"] = {**(model if isinstance(model, Mapping) else {}), "preset": preset}
    if start is not None:
        record["start"] = str(start)
    for name, value in {"steps": steps, "time": seconds(time, "--time")}.items():
        if value is not None:
            if any(change.partition("=")[0].strip() == f"train.{name}" for change in changes):
                raise SpecError(f"--{name}", f"sets train.{name}, which is also given; leave one of the two out")
            record["train"] = _section(record, "train") | {name: value}
    return request_from_record(record, changes, several(variants), trust_code)


def _parallel_files(source: str | Path | None, target: str | Path | None) -> dict[str, Any]:
    """Return a dict of the source and target paths (None if missing), or an empty dict if both are missing."""
    if not source and not target:
        return {}
    return {"source": source and str(source), "target": target and str(target)}


def _with_files(
    record: Mapping[str, Any], files: Mapping[str, list[dict[str, Any]]], valid: dict[str, Any] | str | None
) -> dict[str, Any]:
    """Return a copy of a recipe table in which the data section has the text files given on the command line.

    `files` has the training files, keyed by format (`parallel`, `tsv`, ...); `valid` has the validation files.
    """
    kinds = [kind for kind, entries in files.items() if entries]
    record = dict(record)
    if not kinds:
        if "data" not in record:
            raise SpecError("", "no training text is given; give --source and --target, --tsv, --text or --labelled")
        if valid is not None:
            raise SpecError(
                "--valid", "needs training files on the command line; for the files of a recipe, set data.valid"
            )
        return record
    other = {"lines": "language_model", "labelled": "classification"}
    objectives = {other.get(kind, "translation") for kind in kinds}
    if len(objectives) > 1:
        raise SpecError("", f"a run has one objective; files for {' and '.join(sorted(objectives))} cannot be mixed")
    for entry in files["parallel"]:
        if not entry["source"] or not entry["target"]:
            raise SpecError("", "two aligned files are needed; give both --source and --target")
    data = _section(record, "data")
    data["train"] = [{"kind": kind, **entry} for kind in kinds for entry in files[kind]]
    data.setdefault("objective", objectives.pop())
    if isinstance(valid, str):
        data["valid"] = [{"kind": kinds[0], "path": valid}]
    elif valid is not None:
        if not valid["source"] or not valid["target"]:
            raise SpecError("", "validation needs two aligned files; give both --valid-source and --valid-target")
        data["valid"] = [{"kind": "parallel", **valid}]
    record["data"] = data
    return record


def _with_task(record: Mapping[str, Any], task: str, changes: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a recipe table with `task` as its objective."""
    known = [part.kind for part in SLOTS[Objective]]
    if task not in known:
        raise SpecError("--task", f"unknown task {task!r}; {nearest(task, known)}")
    if any(change.partition("=")[0].strip() == "data.objective" for change in changes):
        raise SpecError("--task", "sets data.objective, which is also given; leave one of the two out")
    data = _section(record, "data")
    given = data.get("objective")
    if (given.get("kind") if isinstance(given, Mapping) else given) != task:
        data["objective"] = task
    return {**record, "data": data}


def _section(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of one section of a recipe table, or an empty dict if the recipe does not have this section."""
    section = record.get(name, {})
    if not isinstance(section, Mapping):
        raise SpecError(name, f"needs a table, not {repr(section)[:40]}")
    return dict(section)


def check_request(request: RecipeRequest) -> None:
    """Check the settings, files and model of a recipe request, and raise an error before any training text is read."""
    if request.train.time is not None and request.train.validate_every is not None:
        raise SpecError(
            "train.validate_every",
            "has no effect with a time limit, which schedules validations; leave one of the two out",
        )
    criterion_of(request.train, request.data.objective, request.trust_code)
    if request.train.bleu_tokenize != TrainSpec().bleu_tokenize:
        try:
            assert Bleu(request.train.bleu_tokenize).scorer
        except SpecError as error:
            raise SpecError("train.bleu_tokenize", error.message) from None
    for corpus in (*request.data.train, *request.data.valid):
        for file in corpus.files():
            check_file(file)
    if isinstance(request.data.tokenizer, Imported):
        request.data.tokenizer.learn(())
    if request.model is not None:
        _, model = model_for(request, None, lambda _: {})
        if not request.data.objective.labelled:  # fitting may still replace the task of the model
            check_family(model, request.data.objective)
    elif request.changes or request.variants:
        _check_modifications(request)


def _check_modifications(request: RecipeRequest) -> None:
    """Raise an error if the edits and variants of a request fit none of the models that the planner can choose."""
    refusals = []
    for candidate in planner.candidates(request.data.objective):
        try:
            model_for(request, candidate.spec, lambda _: {})
            return
        except SpecError as error:
            refusals.append(error)
    raise refusals[0]


def check_family(model: Any, objective: Objective) -> None:
    """Raise an error if the model cannot be trained for the objective, such as a language model for classification."""
    built = build(model, device="meta")
    generates = isinstance(built, LanguageModel)
    fits = {
        "sequence_to_sequence": generates and model.reads_source,
        "language_model": generates and not model.reads_source,
        "classifier": isinstance(built, Classifier),
    }
    if not fits[objective.model]:
        raise SpecError(
            "model", f"a model of kind {type(model).kind!r} cannot learn {objective.kind!r}; choose another"
        )
