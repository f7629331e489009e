"""Associative recall (Arora et al. 2023): predict the value that followed a key d tokens before."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int

from regard import fast
from regard.batch import Batch
from regard.bench.long_models import LongModel, Size, parameters
from regard.bench.race import Report
from regard.errors import RegardError
from regard.models.base import LanguageModel, Model
from regard.models.build import build
from regard.models.encoder_only import MaskedLMModel

KEYS, VALUES = 64, 16
NOISE = KEYS + VALUES  # the token between pairs
TRIES = 20  # random places for a pair before it is left out


@dataclass(frozen=True)
class RecallTask:
    """The recall task: sequences of key-value pairs and noise. When a key occurs again, the model predicts its value.

    In a sequence of `length` tokens, `queries` * `length` keys occur twice. The second occurrence is the query, and its
    distance is the number of tokens since the first occurrence. There are also `distractors` * `length` pairs whose
    keys occur only once. Only a query shows which pairs are distractors, so a model must store all pairs. All keys of a
    sequence differ from each other.
    """

    length: int = 256
    queries: float = 0.1
    distractors: float = 0.1
    distances: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 200)  # in the test
    tokens: int = 8192  # per batch
    steps: int = 1800  # with 600, the gated delta rule has not learned to recall even the last pairs
    test: int = 128  # rows
    learning_rate: float = 3e-3
    size: Size = Size(1, 64, 4, 32, 16, 64, KEYS + VALUES + 1)

    @property
    def stages(self) -> list[int]:
        """Sequence lengths of the training stages, from short to long. All stages have the same number of steps."""
        halves = [self.length // 2**i for i in range(4) if self.length // 2**i >= 32] or [self.length]
        return [*halves[::-1], self.length]


@dataclass(frozen=True)
class Rows:
    """Rows of the task. `values` has the value to predict at each query, and `distances` its distance; 0 elsewhere."""

    ids: Int[np.ndarray, "B T"]
    values: Int[np.ndarray, "B T"]
    distances: Int[np.ndarray, "B T"]

    def batch(self, device: torch.device) -> Batch:
        """Return the rows as a batch in which only queries have a label."""
        weights = torch.from_numpy(self.distances > 0).to(torch.get_default_dtype())
        return Batch(torch.from_numpy(self.ids), torch.from_numpy(self.values), weights=weights).to(device)


def rows(task: RecallTask, count: int, length: int, rng: np.random.Generator, at: Sequence[int] | None = None) -> Rows:
    """Return `count` random rows of `length` tokens.

    The logarithms of the distances are uniform, so that all orders of magnitude are equally frequent. If `at` is given,
    the queries have these distances in turn.
    """
    made = Rows(np.full((count, length), NOISE), *np.zeros((2, count, length), dtype=np.int64))
    for row in range(count):
        _fill(made, row, task, rng, at)
    return made


def _fill(made: Rows, row: int, task: RecallTask, rng: np.random.Generator, at: Sequence[int] | None) -> None:
    ids, length = made.ids[row], made.ids.shape[1]
    keys = iter(rng.permutation(KEYS).tolist())
    queries = max(2, int(task.queries * length))
    for n in range(min(KEYS, queries + int(task.distractors * length))):
        for _ in range(TRIES):
            distance = 1  # the value of a distractor
            if n < queries:
                distance = int(math.exp(rng.uniform(math.log(2.01), math.log(length - 1))))
                distance = distance if at is None else at[n % len(at)]
            place = int(rng.integers(length - distance))
            if all(ids[place + i] == NOISE for i in (0, 1, distance)):
                break
        else:
            continue
        ids[place], ids[place + 1] = next(keys), KEYS + int(rng.integers(VALUES))
        if n < queries:
            query = place + distance
            ids[query] = ids[place]
            made.values[row, query], made.distances[row, query] = ids[place + 1], distance


@dataclass(frozen=True)
class RecallRow:
    """The accuracy of a model by distance, or the reason why it could not be trained."""

    name: str
    title: str
    parameters: int
    accuracy: Mapping[int, float]
    failed: str | None = None


@dataclass(frozen=True)
class RecallReport:
    """The accuracies of all models, and the accuracy of random guessing."""

    length: int
    steps: int
    chance: float
    rows: Sequence[RecallRow]


def recall(
    models: Sequence[LongModel], task: RecallTask, device: torch.device, report: Report, deadline: float = math.inf
) -> RecallReport:
    """Train all models on the same batches, and return their accuracies on the same test sequences by distance.

    The first layer of each model is a convolution over three tokens, which joins each value with the key before it. It
    is followed by one layer of the benchmarked kind (two in the hybrid). There are no position vectors, because
    attention would first learn the most frequent distances with them. After `deadline` (a value of `time.monotonic()`),
    no more models are trained.
    """
    rng = np.random.default_rng(0)
    stages = [task.stages[i * len(task.stages) // task.steps] for i in range(task.steps)]
    data = [rows(task, max(1, task.tokens // length), length, rng).batch(device) for length in stages]
    test = rows(task, task.test, task.length, np.random.default_rng(1), task.distances)
    trained = []
    for model in models:
        late = RecallRow(model.name, model.title, 0, {}, "out of time: --max-time was over")
        row = late if time.monotonic() > deadline else _trained(model, task, data, test, device)
        best = ", ".join(f"{distance}: {value:.2f}" for distance, value in row.accuracy.items())
        report(f"recall, {model.title}: {row.failed or best}")
        trained.append(row)
    return RecallReport(task.length, task.steps, 1 / VALUES, trained)


def _trained(model: LongModel, task: RecallTask, data: Sequence[Batch], test: Rows, device: torch.device) -> RecallRow:
    size = task.size if model.name != "hybrid" else replace(task.size, depth=2)
    row = RecallRow(model.name, model.title, 0, {})
    try:
        built = build(model.spec(size, task.length, joined=True), seed=1).to(device)
        row = replace(row, parameters=parameters(built))
        _train(built, task, data)
        return replace(row, accuracy=_accuracy(built, test, task.distances, device))
    except (RegardError, RuntimeError) as error:  # the other models are trained nevertheless
        return replace(row, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _train(model: Model, task: RecallTask, data: Sequence[Batch]) -> None:
    """Train with AdamW and gradient clipping. The learning rate has a linear warm-up, then a cosine decay to 0."""
    fast.install(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=0.01)
    warm = max(1, len(data) // 10)
    for step, batch in enumerate(data):
        done = (step + 1 - warm) / max(1, len(data) - warm)
        share = (step + 1) / warm if step < warm else 0.5 + 0.5 * math.cos(math.pi * done)
        optimizer.param_groups[0]["lr"] = task.learning_rate * share
        loss = model.loss(batch)
        (loss.total / loss.tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def _accuracy(model: Model, test: Rows, distances: Sequence[int], device: torch.device) -> dict[int, float]:
    assert isinstance(model.eval(), LanguageModel | MaskedLMModel)
    logits = model(Batch(torch.from_numpy(test.ids).to(device)))[..., KEYS : KEYS + VALUES]
    right = (logits.argmax(-1).cpu().numpy() + KEYS) == test.values
    return {distance: float(right[test.distances == distance].mean()) for distance in distances}
