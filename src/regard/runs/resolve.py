"""Resolve a recipe request: choose the missing settings to suit the prepared data, the device and the time budget."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard import planner
from regard.data.batching import Windows
from regard.data.objectives import Objective
from regard.data.prepare import DataSpec, Prepared
from regard.data.tokenizer import tokenizer_files
from regard.decoding import length_limit
from regard.decoding.length_limit import LengthLimit
from regard.errors import DataError, SpecError
from regard.evaluation import target_text
from regard.evaluation.text_metrics import Chrf, RougeL
from regard.models.base import ModelSpec
from regard.planner import fit as fitting
from regard.planner.speed import Hardware
from regard.recipe.recipe import PARTS, Recipe, RecipeRequest, model_for
from regard.runs.request import check_family
from regard.runs.trained_model import TrainedModel
from regard.training.spec import TrainSpec
from regard.tree import edit

ATTENTION_SETTINGS = frozenset({"heads", "d_head", "attention_dropout"})  # used only by attention


def resolve(  # noqa: PLR0913  # ablations pass all of them
    request: RecipeRequest,
    data: Prepared,
    device: torch.device,
    report: Callable[[str], None],
    parent: TrainedModel | None = None,
    *,
    packs: bool = True,
    attention: bool = False,
    hardware: Hardware | None = None,
    elapsed: float = 0.0,
) -> Recipe:
    """Return the complete recipe for a request, and call `report` with each chosen setting and the reason for it.

    `parent` is the trained model from which fine-tuning starts. `packs` allows several texts per batch row (packing).
    `attention` restricts the choice of a model to Transformers, so that parts of attention can be modified. If
    `hardware` is None, a typical device of this type is assumed. `elapsed` is the used part of the time budget, in
    seconds.
    """
    objective, vocabulary = data.objective, {name: data.tokenizers[name].size for name in data.objective.encoded}
    joint = len(tokenizer_files(data.tokenizers)) == 1
    if parent is not None and (request.model is not None or request.changes or request.variants):
        raise SpecError("model", f"--from uses the model of {parent.path} unchanged; leave out all changes to it")
    batching = request.data.batches
    if isinstance(batching, Windows) and not request.fixes_rows:
        # The model of the parent may have no positions for longer windows.
        former = None if parent is None else parent.recipe.data.batching
        length = former.length if isinstance(former, Windows) else _window_length(device, data.survey.ids["target"])
        batching = replace(batching, length=length)
    longest = getattr(batching, "length", 0) if objective.stream else data.spec.longest + 2

    def fits(model: ModelSpec) -> Mapping[str, Any]:
        return fitting.fitted(model, objective, vocabulary, longest, joint)

    def finished(base: ModelSpec) -> ModelSpec:
        return model_for(request, base, fits)[1]

    known = _known_model(request, parent, objective, fits)
    attention = attention or not ATTENTION_SETTINGS.isdisjoint(request.changes)
    plan = planner.plan(
        objective,
        data.survey,
        batching,
        request.train,
        hardware or planner.nominal(device.type),
        planner.ModelChoice(known, trained=parent is not None, attention=attention),
        finished if known is None else lambda _: known,
        elapsed=elapsed,
        longest=longest,
        validates=data.valid is not None,
    )
    model, reasons, batching = known, plan.why, plan.batching
    if model is None:
        model = finished(plan.model)
    else:
        reasons = [f"model: {'as given' if parent is None else f'that of {parent.path}'}", *reasons]
    check_family(model, objective)
    if packs and device.type == "cuda" and not request.fixes_rows and fitting.packs(model, objective):
        rows = fitting.packed(batching, longest_packed(data))
        budget = getattr(request.data.batching, "tokens", None)
        if budget is None or budget == rows.tokens:  # keep a budget that the recipe gives
            batching = rows
            reasons.append(f"rows: texts packed into rows of {rows.length} tokens, so that all batches have one shape")
    spec = replace(data.spec, train=request.data.train, valid=request.data.valid, batching=batching)
    train = choose_metric(plan.train, data, reasons)
    limit = _length_limit(data, parent, reasons)
    for name, tokenizer in tokenizer_files(data.tokenizers).items():
        side = name.removeprefix("tokenizer.").removesuffix(".json")
        report(f"{'vocabulary' if side == 'json' else f'vocabulary of the {side}'}: {tokenizer.why}")
    for reason in reasons:
        report(reason)
    return Recipe(model, spec, train, request.decode, limit)


def _length_limit(data: Prepared, parent: TrainedModel | None, reasons: list[str]) -> LengthLimit | None:
    """Return the length limit of translations, given the training text and the parent run, or None for other tasks."""
    if data.objective.model != "sequence_to_sequence":
        return None
    limit = length_limit.of_tables(data.train)
    if parent is not None:
        limit = length_limit.widest([limit, parent.recipe.length_limit])
    if limit is not None:
        reasons.append(f"length limit of a translation: {limit}")
    return limit


def _window_length(device: torch.device, tokens: int) -> int:
    """Return the window length for a language model on a stream of text: longer on a GPU, shorter for a short text."""
    length = 128 if device.type == "cpu" else 512 if tokens >= 1_000_000 else 256
    return max(16, min(length, tokens // 8))


def longest_packed(data: Prepared) -> int:
    """Return the maximum number of tokens that one source or target text takes in a packed batch row."""
    unread, names = data.objective.unread, data.objective.measured
    tables = [table for table in data.train if table.rows]
    return max(int(table[name].lengths.max()) - unread.get(name, 0) for table in tables for name in names)


def _known_model(
    request: RecipeRequest,
    parent: TrainedModel | None,
    objective: Objective,
    fits: Callable[[ModelSpec], Mapping[str, Any]],
) -> ModelSpec | None:
    """Return the model of the parent run, or else that of the request, or None if the planner must choose a model."""
    if parent is None:
        return None if request.model is None else model_for(request, None, fits)[1]
    model = parent.recipe.model
    if objective.labelled and objective != parent.objective:
        model = edit(model, {"task.classes": len(objective.labels)}, PARTS)
    return model


def choose_metric(train: TrainSpec, data: Prepared, reasons: list[str]) -> TrainSpec:
    """Return the training settings with a checkpoint metric and a BLEU tokenizer that suit the targets.

    The reason for the metric is appended to `reasons`.
    """
    if data.objective.model != "sequence_to_sequence" or not data.valid_texts:
        return train  # the objective determines the metric, and nothing is decoded
    choice = target_text.choose([data.objective.pair(record)[1] for record in data.valid_texts], train.bleu_tokenize)
    train = replace(train, bleu_tokenize=choice.tokenize)
    if train.criterion == "auto" and train.decode:
        criterion, reason = choice.criterion, choice.reason
        if data.objective.summarizes:
            criterion, reason = "rougeL", f"{RougeL.title}, the usual metric of summaries"
            if not RougeL.installed():
                missing = f"{RougeL.title} needs rouge-score: pip install 'regard[metrics]'"
                criterion, reason = "chrf", f"{Chrf.title}, because {missing}"
        train = replace(train, criterion=criterion)
        reasons.append(f"best checkpoint: by {reason}")
    return train


def labels_after(parent: TrainedModel, data: DataSpec, report: Callable[[str], None]) -> tuple[str, ...]:
    """Return the labels of the parent classifier in their order, followed by the new labels for fine-tuning."""
    known, given = parent.objective.labels, data.objective.labels
    if given and given[: len(known)] != known:
        raise SpecError(
            "data.objective.labels", f"--from keeps the classes of {parent.path}; leave it out, or begin with {known}"
        )
    for file in [file for corpus in data.train for file in corpus.files()]:
        if Path(file).exists() and not Path(file).is_file():
            raise DataError(f"{file}: can be read only once, but labels are read before the text; write it into a file")
    labels = {record[0] for corpus in data.train for record in corpus.records()}
    new = given[len(known) :] if given else tuple(sorted(labels - {*known}))
    missing = [label for label in known if label not in labels]
    if new:
        report(f"labels: {len(new)} new, untrained so far: {', '.join(new)}")
    if missing:
        report(f"labels: {len(missing)} of {parent.path} do not occur in this text, and are kept: {', '.join(missing)}")
    return (*known, *new)
