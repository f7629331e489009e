"""The hypotheses of a row do not depend on the other rows of the batch, in float32 too."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Limits
from regard.decoding.sample import Sample
from regard.decoding.search import Search, find
from regard.models.base import LanguageModel

from .known_models import ENDS, prompts, random_rows, sources, translator, writer

SEARCHES: list[Search] = [
    Beam(4, 3),
    Beam(1),
    Beam(4, 4, groups=2, diversity=0.7),
    Beam(3, 2, "gnmt", 0.6, coverage=0.3),
    Beam(4, 2, stopping="ctranslate2"),
    Beam(4, 2, stopping="huggingface"),
    Sample(temperature=1.4, top_p=0.95, n_best=2),
]
ROWS = random_rows(64, 23, seed=3)
RULES = [
    (
        TokenConstraints(),
        TokenConstraints(no_repeat=2),
        TokenConstraints(prefix=(9, 4)),
        TokenConstraints(banned=((7,), (15, 6))),
    )[i % 4]
    for i in range(64)
]


@pytest.fixture(autouse=True)
def single() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(torch.float64)


@cache
def model(translates: bool) -> LanguageModel:
    return (translator() if translates else writer()).float()


@pytest.mark.parametrize(
    ("translates", "search"),
    [(True, search) for search in SEARCHES] + [(False, SEARCHES[0]), (False, SEARCHES[1]), (False, SEARCHES[-1])],
)
def test_hypotheses_do_not_depend_on_the_batch(translates: bool, search: Search) -> None:
    make = sources if translates else prompts

    def run(numbers: list[int]) -> dict[int, list[tuple[tuple[int, ...], bool]]]:
        results = find(
            model(translates),
            make(*[ROWS[i] for i in numbers]),
            search,
            ENDS,
            [Limits(i % 3, 4 + i % 4) for i in numbers],
            [RULES[i] for i in numbers],
            numbers,
        )
        return {i: [(h.ids, h.ended) for h in row] for i, row in zip(numbers, results, strict=True)}

    whole = run(list(range(64)))
    order = torch.randperm(64).tolist()
    assert run(order) == whole
    for numbers in (order[:7], order[20:27], order[40:41], order[50:51]):
        assert run(numbers) == {i: whole[i] for i in numbers}
