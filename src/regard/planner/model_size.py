"""Choose the size of a model: the largest candidate that the text, the time and the memory allow.

The model has at most `TEXT` parameters per token of the text. It is also small enough that training can process at
least `SEEN` tokens per parameter in the given time. A longer text or more time therefore never gives a smaller model.
The numbers come from the experiments in docs/decisions/014-planner.md.
"""

from collections.abc import Callable

from regard.errors import SpecError
from regard.models.base import ModelSpec
from regard.planner.candidates import Candidate, of_ngrams
from regard.planner.speed import Hardware
from regard.planner.text_size import TextSize
from regard.training.spec import TrainSpec

TEXT = 5.5  # maximum number of parameters in the blocks per token of the text
SEEN = 8.0  # minimum number of training tokens per parameter in the blocks
TRAINING = 0.85  # share of the time for training steps; the rest is for reading, validation and saving
ROOM = 0.6  # share of the memory that a training step may use


def largest(
    known: list[Candidate],
    text: TextSize,
    time: float,
    hardware: Hardware,
    train: TrainSpec,
    finished: Callable[[ModelSpec], ModelSpec],
) -> tuple[Candidate, float | None]:
    """Return the largest candidate that text, time and memory allow, and its speed.

    The speed is in target tokens per second, or None if the user has set the number of steps. The speed of larger
    candidates is not measured. `finished` maps the model of a candidate to the complete model, with the user's
    modifications.
    """
    best = known[0]
    if train.steps is not None and train.time is None:  # the user has set the number of steps, so time is no limit
        fitting = [c for c in known if c.blocks <= TEXT * text.total and _fits(c, hardware)]
        return (fitting[-1] if fitting else best), None
    speed = hardware.speed(finished(best.spec), text.lengths)
    for candidate in known[1:]:
        if candidate.blocks > TEXT * text.total or not _fits(candidate, hardware):
            break
        # A larger model is slower, so do not measure it if it would be too slow at the speed of the previous one.
        if _seen(text, speed * time) < SEEN * candidate.blocks:
            break
        candidate_speed = hardware.speed(finished(candidate.spec), text.lengths)
        if _seen(text, candidate_speed * time) < SEEN * candidate.blocks:
            break
        best, speed = candidate, candidate_speed
    return best, speed


def possible(known: list[Candidate], finished: Callable[[ModelSpec], ModelSpec], attention: bool) -> list[Candidate]:
    """Return the candidates to which the user's modifications apply; raise SpecError if there are none.

    For classification, only n-gram convolutions are returned if there are any. If `attention` is true, only
    Transformers are returned.
    """
    accepted, errors = list[Candidate](), list[SpecError]()
    for candidate in known:
        if attention and of_ngrams(candidate.spec):
            continue
        try:
            finished(candidate.spec)
            accepted.append(candidate)
        except SpecError as error:
            errors.append(error)
    if not accepted:
        raise errors[0]
    return [candidate for candidate in accepted if of_ngrams(candidate.spec)] or accepted


def _seen(text: TextSize, labels: float) -> float:
    """Return the number of source and target tokens that training processes, given `labels` target tokens."""
    return TRAINING * labels * text.total / max(1, text.labels)


def _fits(candidate: Candidate, hardware: Hardware) -> bool:
    """Return whether a model, its gradients, its optimizer state and a small batch fit into the memory."""
    return bytes_needed(candidate, 1024) <= ROOM * hardware.memory


def bytes_needed(candidate: Candidate, tokens: int, vocab: int = 32_000) -> float:
    """Return the bytes needed to train on `tokens` tokens: weights, gradients, AdamW's moments, activations, logits."""
    weights = 16.0 * (candidate.blocks + vocab * candidate.width)
    depth = max(1, round(candidate.blocks / (12 * candidate.width**2)))
    return weights + tokens * (4.0 * 40 * depth * candidate.width + 12.0 * vocab)
