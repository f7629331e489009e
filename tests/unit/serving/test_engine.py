"""The runner of batches: results equal those of the engine, also where later requests join a running search."""

from collections.abc import Iterator
from typing import Any

import pytest

from regard import fast
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.sample import Sample
from regard.decoding.search import FREE, Search
from regard.fast import beam_search as device
from regard.inference.native import Native
from regard.runs.trained_model import TrainedModel
from regard.serving.engine import BatchRunner, SharedEngine
from regard.serving.scheduler import Scheduler
from regard.serving.ticket import Decode, Row, Ticket
from tests.unit.decoding.known_models import ENDS, random_rows, translator

CPU = device.torch.device("cpu")
ROWS = random_rows(12, 23, seed=1)


@pytest.fixture
def engine() -> Native:
    return Native([translator(23, eos=2.0)], ENDS, CPU)


def scheduler_of(engine: Native, places: int = 8) -> Scheduler:
    return Scheduler(BatchRunner(object.__new__(TrainedModel), engine, places), places)


@pytest.fixture
def on_device(engine: Native, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the search of a GPU, here on a CPU."""
    device.release()
    for model in engine.models:
        fast.install(model, "cuda")
    monkeypatch.setattr(
        device.DeviceSearch, "accepts", staticmethod(lambda job, spec: device.refusal(job, spec) is None)
    )
    yield
    device.release()


def same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> bool:
    return [[each.ids for each in row] for row in found] == [[each.ids for each in row] for row in expected]


@pytest.mark.parametrize("search", [Beam(3, 2), Beam(1), Sample(n_best=2, seed=4)], ids=["beam", "greedy", "sample"])
def test_shared_engine_returns_the_hypotheses_of_its_engine(engine: Native, search: Search) -> None:
    scheduler, numbers, limits = scheduler_of(engine), range(len(ROWS)), Limits(max_len=15)
    found = SharedEngine(scheduler, Ticket(), engine).find(ROWS, search, 32, limits, FREE, numbers)
    assert same(found, engine.find(ROWS, search, 32, limits, FREE, numbers))
    scheduler.close()


def test_streamed_tokens_are_those_of_the_output(engine: Native) -> None:
    scheduler, limits = scheduler_of(engine), Limits(max_len=15)
    shared = SharedEngine(scheduler, Ticket(), engine)
    pieces = [piece for step in shared.stream(ROWS[0], Beam(1), limits, FREE, 0, True) for piece in step]
    ((expected,),) = engine.find(ROWS[:1], Beam(1), 1, limits, FREE, [0])
    assert tuple(i for piece in pieces for i in piece.ids) == expected.ids
    assert pieces[-1].hypothesis == expected
    scheduler.close()


@pytest.mark.usefixtures("on_device")
def test_rows_that_wait_join_the_search_on_a_gpu(engine: Native) -> None:
    places, search = 3, Beam(3, 2)
    expected = engine.find(ROWS, search, 12, Limits(max_len=15), FREE, range(12))
    longest = max(range(12), key=lambda i: len(ROWS[i]))
    order = [longest, *(i for i in range(12) if i != longest)]
    ticket = Ticket()
    rows = [Row(ticket, i, Decode(ROWS[i], search, Limits(max_len=15), FREE, i, True)) for i in order]
    first, waiting, joined = rows[:2], rows[2:], list[int]()

    def more(number: int, fits: Any) -> list[Row]:
        added = [waiting.pop(0) for _ in range(min(number, len(waiting)))]
        assert all(fits(row) for row in added)
        joined.append(len(added))
        return added

    for _ in BatchRunner(object.__new__(TrainedModel), engine, places)(first, more):
        pass
    assert same(ticket.results(12), expected)
    assert sum(joined) == 10
    assert max(joined) <= places


@pytest.mark.usefixtures("on_device")
def test_search_on_a_gpu_answers_many_requests(engine: Native) -> None:
    scheduler, search, limits = scheduler_of(engine, places=4), Beam(3), Limits(max_len=15)
    expected = engine.find(ROWS, search, 12, limits, FREE, range(12))
    tickets = [Ticket() for _ in ROWS]
    for i, (ids, ticket) in enumerate(zip(ROWS, tickets, strict=True)):
        scheduler.submit([Row(ticket, 0, Decode(ids, search, limits, FREE, i, True))])
    assert same([ticket.results(1)[0] for ticket in tickets], expected)
    scheduler.close()
