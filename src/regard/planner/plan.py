"""Choose missing settings of a recipe to suit the text, the device and the training time, and give reasons for them.

The numbers come from the experiments in docs/decisions/014-planner.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from regard.data.batching import Batching
from regard.data.objectives import Objective
from regard.data.prepare import Survey
from regard.models.base import ModelSpec
from regard.planner.candidates import LONG, Candidate, candidates, for_length, of_ngrams, with_dropout
from regard.planner.model_size import ROOM, TRAINING, bytes_needed, largest, possible
from regard.planner.speed import Hardware, muon_share
from regard.planner.text_size import TextSize, text_size
from regard.training.optim import AdamW, Muon, OptimizerSpec
from regard.training.spec import TrainSpec

DEFAULT = {"cpu": 15 * 60.0, "mps": 30 * 60.0, "cuda": 30 * 60.0}  # seconds of training if no time is given
MOST_STEPS = 200_000
MANY = 30_000  # a classifier of more short texts than this has more dropout
SMALL = {"cpu": 1024, "mps": 4096, "cuda": 4096}  # minimum number of tokens per batch
GENTLE = 0.1  # learning rate of fine-tuning, relative to training from scratch
TUNING_PASSES = 5.0  # passes through the text in fine-tuning; up to 20 for a text of only a few batches
TUNING_STEPS = 100
VALIDATIONS = 20  # maximum number of validations in a training run
VALIDATION = 0.1  # share of the time for validations
# Early stopping with a time limit: number of validations without improvement, about a quarter of all validations. While
# the learning rate is high, a score may not improve for an eighth of the time, until the rate falls.
PATIENCE = 7
GREEDY = 0.25  # speed of greedy search on a CPU, relative to training
SEARCH_STEP = 6e-3  # seconds of a step of greedy search on a GPU, for a batch of hundreds of texts


@dataclass(frozen=True)
class Plan:
    """The planned model, batching and training settings, with a reason for each choice."""

    model: ModelSpec
    batching: Batching
    train: TrainSpec
    why: list[str]


@dataclass(frozen=True)
class ModelChoice:
    """The user's decisions about the model."""

    model: ModelSpec | None = None  # from a preset or another run; None: the planner chooses it
    trained: bool = False  # True: training continues from the weights of another run
    attention: bool = False  # True: a model that the planner chooses must be a Transformer


def plan(  # noqa: PLR0913  # the inputs of a plan
    objective: Objective,
    survey: Survey,
    batching: Batching,
    train: TrainSpec,
    hardware: Hardware,
    given: ModelChoice = ModelChoice(),
    finished: Callable[[ModelSpec], ModelSpec] = lambda spec: spec,
    *,
    elapsed: float = 0.0,
    longest: int = 0,
    validates: bool = True,
) -> Plan:
    """Choose model, batching and training settings. Settings that the user has given are not changed.

    `finished` maps a candidate model to the complete model, with vocabulary sizes and the user's modifications.
    `elapsed` is the time already used, in seconds. `longest` is the number of tokens of the longest example, which must
    fit into a batch. `validates` is true if there is validation text.
    """
    text = text_size(objective, survey, batching)
    time = DEFAULT[hardware.kind] if train.time is None else max(0.1 * train.time, train.time - elapsed)
    why: list[str] = []
    if given.model is not None:
        width = getattr(given.model, "d_model", 512)
        like = [c for c in candidates(objective) if c.width <= width] or candidates(objective)[:1]
        candidate = replace(like[-1], spec=given.model, width=width, name="as given")
        unmeasured = train.steps is not None and train.time is None
        speed = None if unmeasured else hardware.speed(finished(given.model), text.lengths)
    else:
        known = possible(candidates(objective), finished, given.attention)
        candidate, speed = largest(known, text, time, hardware, train, finished)
        whole, names = finished(candidate.spec), ("d_model", "heads", "encoder", "decoder")
        unchanged = all(getattr(whole, name, None) == getattr(candidate.spec, name, None) for name in names)
        edited = "" if unchanged else ", changed as given"
        within = "" if speed is None else f", {_duration(time)} on {hardware.kind}"
        why.append(f"model: {candidate.name}{edited} ({text.total:,} tokens of text{within})")
        candidate = replace(candidate, width=getattr(whole, "d_model", candidate.width))
    optimizer, named = train.optimizer, []
    if optimizer is None:
        optimizer = _optimizer(objective, candidate, hardware, given)
        named = [f"optimizer: {type(optimizer).__name__}"]
    elif optimizer.learning_rate is None or given.model is None:
        named = [f"optimizer: {type(optimizer).__name__} (as given)"]
    if speed is not None and isinstance(optimizer, Muon):
        tokens = getattr(batching, "tokens", None) or _smallest(text, candidate, hardware)
        speed /= 1 + muon_share(finished(candidate.spec), tokens)
    budget = TrainingBudget(text, candidate, hardware, time, speed, given.trained)
    batching, tokens = _batches(batching, budget, train, longest, why)
    why += named
    epoch = max(1.0, text.epoch / tokens / train.accumulate)  # in steps
    given_steps = train.steps
    train = _training(replace(train, optimizer=optimizer), objective, budget, tokens, why, validates)
    spec = candidate.spec
    if given.model is None:
        passes = (MOST_STEPS if given_steps is None else given_steps) / epoch
        if given_steps is None or budget.speed is not None:
            passes = min(passes, budget.labels / text.labels)
        dropout = _dropout(objective, passes, text)
        if getattr(finished(with_dropout(spec, dropout)), "dropout", dropout) == dropout:
            reason = "" if objective.labelled else f" ({_passes(passes)} through the text)"
            why.insert(1, f"dropout: {dropout:g}{reason}")
        length = max(text.lengths)
        suited = for_length(spec, length)
        if suited != spec and _pooled(finished(suited)) == _pooled(suited):
            why.insert(2, f"pooling: mean and maximum, word dropout 0.5 (texts of {length} tokens)")
        spec = with_dropout(suited, dropout)
    return Plan(spec, batching, train, why)


@dataclass(frozen=True)
class TrainingBudget:
    """A model, its text and the training time. `speed` is in target tokens per second, or None if steps are given."""

    text: TextSize
    candidate: Candidate
    hardware: Hardware
    time: float
    speed: float | None
    trained: bool

    @property
    def labels(self) -> float:
        """Number of target tokens to train on, limited by the time and the number of useful passes through the text."""
        most = _most_passes(self.candidate, self.text, self.trained) * self.text.labels
        return most if self.speed is None else min(most, self.speed * self.time * TRAINING)


def _batches(
    batching: Batching, budget: TrainingBudget, train: TrainSpec, longest: int, why: list[str]
) -> tuple[Batching, int]:
    """Return the batching and the number of tokens per batch, such that a few thousand steps fit in the time budget."""
    if (given := getattr(batching, "tokens", None)) is not None:
        return batching, given
    small = _smallest(budget.text, budget.candidate, budget.hardware)
    steps = 2500 if small <= 2048 else 5000
    ideal = budget.labels / max(1, budget.text.labels) * budget.text.epoch / steps / train.accumulate
    tokens = int(min(budget.candidate.tokens, max(small, 2 ** round(math.log2(max(2.0, ideal))))))
    while tokens > small and bytes_needed(budget.candidate, tokens) > ROOM * budget.hardware.memory:
        tokens //= 2
    tokens = max(tokens, getattr(batching, "length", 0), longest)
    why.append(f"batch size: {tokens:,} tokens")
    return replace(batching, tokens=tokens), tokens  # type: ignore[reportCallIssue]  # every batching has it


def _smallest(text: TextSize, candidate: Candidate, hardware: Hardware) -> int:
    """Return the smallest useful batch size, in tokens.

    It is small for n-gram convolutions, because even a small batch of short texts has a hundred labels, and larger
    batches would leave too few steps. It is larger for language models, because their gradients are noisier than those
    of translation models.
    """
    small = SMALL["cpu" if of_ngrams(candidate.spec) else hardware.kind]
    return max(small, 2048) if text.lengths[0] == 0 else small


def _optimizer(objective: Objective, candidate: Candidate, hardware: Hardware, given: ModelChoice) -> OptimizerSpec:
    """Return Muon if the planner chooses a translation or language model for cpu or cuda. Otherwise, return AdamW."""
    transformer = not objective.labelled and not of_ngrams(candidate.spec)
    if transformer and given.model is None and hardware.kind in ("cpu", "cuda"):
        return muon(objective)
    return adamw(objective)


def _pooled(spec: ModelSpec) -> tuple[str | None, float | None]:
    """Return the pooling and the word dropout of a model. Each is None if the model does not have the setting."""
    task, tokens = getattr(spec, "task", None), getattr(spec, "input", None)
    return getattr(task, "pool", None), getattr(tokens, "word_dropout", None)


def _training(
    train: TrainSpec, objective: Objective, budget: TrainingBudget, tokens: int, why: list[str], validates: bool
) -> TrainSpec:
    changes: dict[str, Any] = {}
    epoch = max(1.0, budget.text.epoch / tokens / train.accumulate)
    steps = train.steps
    if steps is None:
        passes = budget.labels / max(1, budget.text.labels)
        steps = _steps(passes, epoch)
        passes = min(passes, steps / epoch) if steps == MOST_STEPS else passes
        # With a time limit, the trainer determines how many steps fit, up to the number of useful steps.
        most = _most_passes(budget.candidate, budget.text, budget.trained)
        changes["steps"] = steps if train.time is None else _steps(most, epoch)
        assert budget.speed is not None
        seconds = passes * budget.text.labels / budget.speed / TRAINING
        why.append(f"steps: about {steps:,} ({_passes(passes)} through the text, {_duration(seconds)})")
        if seconds < 0.9 * budget.time and train.time is not None:
            limit = f"a plan has at most {MOST_STEPS:,} steps"
            if steps < MOST_STEPS:
                limit = f"more than {most:.0f} passes through this text hardly help"
            why.append(f"time: less than the {_duration(train.time)} given, because {limit}")
        elif seconds >= 0.99 * budget.time and train.time is None:
            why.append(f"time: {_duration(budget.time)}, the default on {budget.hardware.kind}; --time changes it")
    optimizer = train.optimizer
    assert optimizer is not None
    if optimizer.learning_rate is None:
        rate = _rate(objective, budget.candidate, optimizer) * (GENTLE if budget.trained else 1.0)
        optimizer = replace(optimizer, learning_rate=rate)  # type: ignore[reportCallIssue]
        why.append(f"peak learning rate: {rate:g} (d_model {budget.candidate.width})")
    if isinstance(optimizer, Muon) and optimizer.rest.learning_rate is None:
        optimizer = replace(optimizer, rest=replace(optimizer.rest, learning_rate=optimizer.learning_rate))
    changes["optimizer"] = optimizer
    if getattr(train.schedule, "warmup", 0) is None:
        warmup = max(1, min(steps // 10, max(100, steps // 25)))
        changes["schedule"] = replace(train.schedule, warmup=warmup)  # type: ignore[reportCallIssue]
        why.append(f"warm-up: {warmup:,} steps")
    count = VALIDATIONS
    if train.validate_every is None:
        each = _validation(budget, objective, train.decode)
        if budget.speed:
            training = steps * tokens * train.accumulate / budget.text.epoch * budget.text.labels / budget.speed
            count = max(5, min(VALIDATIONS, round(VALIDATION * training / each)))
        changes["validate_every"] = max(1, round(steps / count))
        if train.time is None and validates:
            duration = f", about {_duration(each)} each" if budget.speed and each >= 1 else ""
            why.append(f"validation: every {changes['validate_every']:,} steps{duration}")
    if train.patience is None:
        changes["patience"] = PATIENCE if train.time is not None else max(3, count // 4)
        if validates:
            why.append(f"early stopping: after {changes['patience']} validations without improvement")
    return replace(train, **changes)


def _steps(passes: float, epoch: float) -> int:
    return int(min(MOST_STEPS, max(20, round(passes * epoch))))


def _validation(budget: TrainingBudget, objective: Objective, decode: int) -> float:
    """Estimate the seconds of a validation, which computes the validation loss and decodes some texts."""
    speed = budget.speed or 1e4
    records = min(1000.0, 0.1 * budget.text.records + 1)
    loss = records * max(budget.text.lengths) / (3 * speed)
    if objective.model != "sequence_to_sequence":
        return loss
    target = 1.5 * budget.text.lengths[1] + 5
    if budget.hardware.kind == "cpu":
        return loss + min(decode, records) * target / (GREEDY * speed)
    return loss + math.ceil(decode / 256) * 2 * target * SEARCH_STEP


def _most_passes(candidate: Candidate, text: TextSize, trained: bool) -> float:
    """Return the number of passes through a text after which more passes hardly help.

    For translation, this number is 300 for a few lines, 80 for a million tokens, and at least 8. For a language model,
    it is 32 for a million tokens, because the model predicts all tokens and memorises the text sooner. For convolutions
    over n-grams, which learn faster, it is 12 for 5,000 texts, 3 for 50,000, and at least 2. For long texts, it is 2.5
    times higher, because word dropout removes half of the words. For fine-tuning (`trained`), it is 5 to 20.
    """
    if trained:
        batches = max(1.0, text.epoch / 1024)
        return min(20.0, max(TUNING_PASSES, TUNING_STEPS / batches))
    if of_ngrams(candidate.spec):
        more = 2.5 if max(text.lengths) > LONG else 1.0
        return more * min(30.0, max(2.0, 12 * (5000 / text.records) ** 0.6))
    usual = 80 if text.lengths[0] else 32
    return min(300.0, max(8.0, usual * (1e6 / max(1, text.total)) ** (1 / 3)))


def _rate(objective: Objective, candidate: Candidate, optimizer: OptimizerSpec) -> float:
    """Return the peak learning rate, which falls with the model width and is higher for Muon than for AdamW."""
    width = candidate.width
    if objective.model == "classifier":
        return round(min(2e-3, (0.384 if of_ngrams(candidate.spec) else 0.128) / width), 6)
    if isinstance(optimizer, Muon):
        most = 7e-3 if objective.model == "sequence_to_sequence" else 1e-2
    else:
        most = 3e-3 if objective.model == "sequence_to_sequence" else 4e-3
    return round(min(most, most * 128 / width), 6)


def suggested_rate(objective: Objective, model: ModelSpec, optimizer: OptimizerSpec) -> float:
    """Return the peak learning rate that the planner would choose for a given model and optimizer."""
    candidate = candidates(objective)[0]
    return _rate(objective, replace(candidate, spec=model, width=getattr(model, "d_model", candidate.width)), optimizer)


def _dropout(objective: Objective, passes: float, text: TextSize) -> float:
    """Return the dropout rate. It grows with the number of passes, because text that is read once is not memorised.

    A classifier has a dropout rate of 0.3. With many short texts, it trains for more steps and has a rate of 0.5, as in
    Kim 2014.
    """
    if objective.model == "classifier":
        return 0.5 if text.records >= MANY and max(text.lengths) <= LONG else 0.3
    if objective.model == "language_model":
        return round(min(0.35, 0.22 * math.log10(max(1.0, passes))), 2)
    return round(min(0.3, max(0.05, 0.07 * math.log10(max(1.0, passes)) ** 2)), 2)


def _passes(passes: float) -> str:
    if passes < 0.05:
        return "less than a tenth of a pass"
    return f"{passes:.1f} passes" if passes < 9.5 else f"{passes:.0f} passes"


def _duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours, such as "5 min"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def adamw(objective: Objective) -> AdamW:
    """Return AdamW with the default settings for an objective."""
    return AdamW(**objective.optimizers.get("adamw", {}))


def muon(objective: Objective) -> Muon:
    """Return Muon with the default settings for an objective."""
    return Muon(**{"weight_decay": 0.0, **objective.optimizers.get("muon", {})})
