"""Sampling from the model's distribution."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.decoding.autoregressive import AutoregressiveLoop, Path
from regard.decoding.constraint import Constraint
from regard.decoding.hypothesis import Hypothesis, Piece
from regard.decoding.job import Job
from regard.decoding.rank import NEVER, order
from regard.decoding.search import Finished, Search
from regard.errors import DataError
from regard.nn.checks import check_count, require


@dataclass(frozen=True, slots=True)
class Sample(Search):
    """Sampling: every token is drawn from the model's distribution, with temperature, top-k, top-p and min-p.

    The distribution is changed in this order. Log-probabilities are divided by `temperature`. Then only the `top_k`
    likeliest tokens are kept (0 keeps all; Fan et al. 2018). Of these, the likeliest tokens that together have the
    probability `top_p` are kept (Holtzman et al. 2020). Last, tokens that are less than `min_p` times as likely as the
    likeliest token are excluded (Nguyen et al. 2024). Each source gets `n_best` samples, ranked by their
    log-probability under the unchanged model.

    The random number for a token depends only on the seed, the index of the source or prompt in the whole input, the
    index of the sample and the index of the token. The samples are therefore the same for every batch size.
    """

    kind = "sample"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n_best: int = 1
    seed: int = 0
    constraints: tuple[Constraint, ...] = ()
    prefill_chunk: int | None = None  # a decoder-only model processes its input in pieces of this many tokens

    def check(self) -> None:
        message = f"must be above 0, not {self.temperature}; for the most probable tokens, use beam size 1"
        require(self.temperature > 0.0, "temperature", message)
        require(self.top_k >= 0, "top_k", f"must be at least 0, not {self.top_k}; 0 keeps all tokens")
        require(0.0 < self.top_p <= 1.0, "top_p", f"must lie in (0, 1], not {self.top_p}")
        require(0.0 <= self.min_p <= 1.0, "min_p", f"must lie in [0, 1], not {self.min_p}")
        check_count("n_best", self.n_best)
        check_count("prefill_chunk", self.prefill_chunk)
        require(0 <= self.seed < 2**64, "seed", f"must lie between 0 and 2^64 - 1, not {self.seed}")

    def find(self, job: Job) -> list[list[Hypothesis]]:
        return [_ranked(row) for row in self._loop(job).find(job)]

    def find_by_row(self, job: Job) -> Iterator[Finished]:
        for finished in self._loop(job).find_by_row(job):
            yield [(row, _ranked(hypotheses)) for row, hypotheses in finished]

    def stream(self, job: Job) -> Iterator[list[Piece]]:
        require(self.n_best == 1, "n_best", f"only one sample per row can be streamed, not {self.n_best}; set it to 1")
        return self._loop(job).stream(job)

    def _loop(self, job: Job) -> AutoregressiveLoop:
        return AutoregressiveLoop(self.n_best, Draw(self, max(job.most) + 1), score=lambda log_prob, length: log_prob)  # noqa: ARG005

    def warped(self, log_probs: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Return the logits of the sampling distribution. Tokens excluded by top-k, top-p or min-p get -inf."""
        x = log_probs / self.temperature
        if self.top_k:
            x = x.masked_fill(x < x.topk(min(self.top_k, x.shape[-1])).values[:, -1:], -torch.inf)
        if self.top_p < 1.0:
            ascending, at = x.sort()
            cut = ascending.softmax(-1).cumsum(-1) <= 1.0 - self.top_p
            cut[:, -1] = False
            x = x.masked_fill(cut.scatter(1, at, cut), -torch.inf)
        if self.min_p:
            probs = x.softmax(-1)
            x = x.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)
        return x


class Draw:
    """Samples tokens by inverting the cumulative distribution at one uniform random number per token."""

    def __init__(self, spec: Sample, steps: int) -> None:
        self.spec, self.steps = spec, steps
        self.numbers: dict[tuple[int, int], np.ndarray] = {}

    def number(self, path: Path, step: int) -> float:
        """Return the uniform random number for one output at a decoding step."""
        key = (path.number, path.sample)
        if key not in self.numbers:
            self.numbers[key] = uniform(self.spec.seed, *key, self.steps)
        return float(self.numbers[key][step])

    def __call__(
        self, log_probs: Float[Tensor, "B V"], paths: Sequence[Path], step: int
    ) -> list[tuple[int, float] | None]:
        """Sample a token for every output. Return (token, log p under the model), or None if all tokens are banned."""
        u = torch.tensor([self.number(path, step) for path in paths], dtype=torch.float64, device=log_probs.device)
        cumulative = self.spec.warped(log_probs).double().softmax(-1).cumsum_(-1)
        # u * total < total, however the product is rounded, so the search finds a token with a probability above 0.
        ids = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
        ids.clamp_(max=log_probs.shape[1] - 1)  # needed for a row in which every token is banned
        own, top = log_probs.gather(1, ids)[:, 0], log_probs.amax(-1)
        picked: list[tuple[int, float] | None] = []
        for token, log_prob, highest in torch.stack((ids[:, 0].double(), own.double(), top.double()), 1).tolist():
            if math.isnan(highest):
                raise DataError("models: a log-probability is NaN; use weights without NaN or infinity")
            picked.append(None if highest == NEVER else (int(token), log_prob))
        return picked


def _ranked(samples: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(samples, key=lambda each: order(each.score, each.ids))


def uniform(seed: int, row: int, sample: int, steps: int) -> np.ndarray:
    """Return `steps` uniform random numbers in [0, 1) for one sample of a row. A larger `steps` only adds numbers."""
    philox = np.random.Philox(key=np.array([seed, row], np.uint64), counter=np.array([0, sample, 0, 0], np.uint64))
    return np.random.Generator(philox).random(steps)
