"""Beam search in tensors returns the same outputs as beam search on the host."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from regard import fast
from regard.decoding.beam import Beam, search
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits
from regard.decoding.job import Job, prepare
from regard.decoding.search import FREE
from regard.decoding.stopping import STOPPING
from regard.errors import DataError
from regard.fast import attention as kernels
from regard.fast import beam_search as device
from regard.fast.beam_search import decoder_for, find_each, refusal, search_config, search_requests
from regard.fast.beam_state import BeamState, Request
from regard.inference.native import by_length
from regard.models import base, decoding
from regard.models.base import Generator, LanguageModel
from regard.models.baselines.attention_score import AdditiveScore, GeneralScore
from regard.models.baselines.rnn import RecurrentDecoder
from regard.models.build import build
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned
from regard.presets import preset
from regard.testing import tiny
from regard.variants import apply
from tests.unit.decoding.known_models import ENDS, KnownModel, random_log_probs, random_rows, sources, translator

VOCAB = 23
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_cached_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    device.release()
    monkeypatch.setattr(device, "_logged", set())


def make_job(
    models: Generator | Sequence[Generator],
    rows: Sequence[Sequence[int]],
    limits: Any = Limits(max_len=12),
    rules: Any = FREE,
) -> Job:
    for model in [models] if isinstance(models, Generator) else models:
        fast.install(model, "cuda")  # the GPU search is tested here on a CPU
    return prepare(models, sources(*rows), ENDS, limits, rules, None)


def assert_same(
    outputs: Sequence[list[Hypothesis] | None],
    expected: Sequence[list[Hypothesis]],
    unsure: int = 0,
    within: float = 1e-10,
) -> None:
    """Compare token ids, scores and log-probabilities. At most `unsure` sources may be left to the host."""
    assert sum(ranked is None for ranked in outputs) <= unsure
    for ours, theirs in zip(outputs, expected, strict=True):
        if ours is None:
            continue
        assert [(our.ids, our.ended) for our in ours] == [(their.ids, their.ended) for their in theirs]
        for our, their in zip(ours, theirs, strict=True):
            assert our.score == pytest.approx(their.score, abs=within)
            assert our.log_prob == pytest.approx(their.log_prob, abs=within)
            assert our.token_log_probs == pytest.approx(their.token_log_probs, abs=within)


def compare(
    model: Any, rows: Sequence[Sequence[int]], spec: Beam, unsure: int = 0, within: float = 1e-10, **options: Any
) -> None:
    job = make_job(model, rows, **options)
    assert refusal(job, spec) is None
    (outputs,) = find_each([job], spec)
    assert_same(outputs, search(job, spec), unsure, within)


ROWS = random_rows(9, VOCAB, seed=4)


@pytest.mark.parametrize("stopping", STOPPING)
@pytest.mark.parametrize(("beams", "n_best", "normalise", "alpha", "eos"), [
    (2, 1, "mean", 1.0, -1.0), (5, 5, "mean", 0.6, 2.0), (4, 3, "none", 1.0, -1.0), (3, 2, "gnmt", 0.6, 2.0),
])  # fmt: skip
def test_every_stopping_rule(stopping: Any, beams: int, n_best: int, normalise: Any, alpha: float, eos: float) -> None:
    """From models that rarely generate eos, so that outputs are cut, to models that generate it at once."""
    if normalise == "gnmt" and stopping not in {"optimal", "first"}:
        return
    spec = Beam(beams, n_best, normalise, alpha, stopping=stopping)
    compare(translator(VOCAB, eos=eos), ROWS, spec, limits=Limits(max_len=7))


@pytest.mark.parametrize("stopping", ["optimal", "ctranslate2"])
@pytest.mark.parametrize("eos", [-1.0, 2.0])
def test_one_beam_is_greedy_search(stopping: Any, eos: float) -> None:
    model, spec = translator(VOCAB, eos=eos), Beam(1, stopping=stopping)
    limits = [Limits(min_len=n % 3, max_len=4 + n % 3) for n in range(len(ROWS))]
    job = make_job(model, ROWS, limits)
    (outputs,) = find_each([job], spec)
    assert_same(outputs, spec.greedy().find(job))


def test_length_limits_and_banned_tokens_per_row() -> None:
    limits = [Limits(min_len=n % 4, max_len=3 + n) for n in range(len(ROWS))]
    compare(translator(VOCAB), ROWS, Beam(4, 2), limits=limits, rules=TokenConstraints(banned=((5,), (7,))))
    compare(translator(VOCAB, eos=4.0), ROWS, Beam(4, 2), limits=Limits(min_len=6, max_len=6))


def test_length_limits_estimated_from_the_sources() -> None:
    compare(translator(VOCAB, eos=0.0), ROWS[:4], Beam(3), limits=Limits())


def test_a_vocabulary_smaller_than_the_number_of_candidates() -> None:
    """All tokens are candidates, and some beams have no possible continuation."""
    compare(translator(5, eos=0.0), random_rows(4, 5), Beam(5, 3), limits=Limits(max_len=5))
    compare(translator(4, eos=0.0), random_rows(4, 4), Beam(4, 4), limits=Limits(max_len=3))


def test_a_large_vocabulary_is_searched_in_blocks() -> None:
    compare(translator(4000, eos=3.0), random_rows(3, 4000), Beam(4, 2))


def test_an_ensemble_is_searched() -> None:
    compare([translator(VOCAB, seed=5), translator(VOCAB, seed=6)], ROWS, Beam(4, 2))


def test_ties_in_float32_are_detected() -> None:
    compare(translator(VOCAB).float(), ROWS, Beam(5, 2), within=1e-4)


@pytest.mark.parametrize("slots", [2, 8])
def test_new_sources_replace_finished_sources(slots: int) -> None:
    """The outputs do not depend on which source was in a slot before, or on when a source starts."""
    model, spec = translator(VOCAB, eos=2.0), Beam(4, 2)
    rows = random_rows(12, VOCAB, seed=1)
    job = make_job(model, rows)
    outputs = search_requests(job.models, search_config(job, spec), device.requests_of(job), slots, CPU)
    assert_same(outputs, search(job, spec))


@pytest.mark.parametrize(
    "name", ["rotary", "t5_bias", "alibi", "light_conv", "synth_dense", "shaw", "transparent", "multi_query"]
)
def test_variants_are_searched(name: str) -> None:
    """Their cached states are reordered with the beams and reset for the next source."""
    spec = preset("transformer_small", vocab=VOCAB, d_model=16, heads=2, **{"encoder.depth": 2, "decoder.depth": 2})
    model = build(apply(name, spec), seed=2).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    assert isinstance(model, Generator)
    job = make_job(model, ROWS)
    outputs = search_requests(job.models, search_config(job, Beam(3)), device.requests_of(job), 4, CPU)
    assert_same(outputs, search(job, Beam(3)))


@pytest.mark.parametrize("input_feeding", ["none", "context"])
def test_recurrent_models_are_searched(input_feeding: Any) -> None:
    """Their states are overwritten at every step, and the beams of a source start from its encoder states."""
    decoder = RecurrentDecoder(attention=AdditiveScore(), self_attention=GeneralScore(), input_feeding=input_feeding)
    model = build(replace(tiny.recurrent(decoder), vocab=VOCAB), seed=2).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    assert isinstance(model, Generator)
    job = make_job(model, ROWS)
    outputs = search_requests(job.models, search_config(job, Beam(3)), device.requests_of(job), 4, CPU)
    assert_same(outputs, search(job, Beam(3)))


@pytest.mark.parametrize("name", ["convs2s", "bytenet"])
def test_convolutional_models_are_searched(name: str) -> None:
    """Their ring buffers are updated in place, and entries of a previous source are not read."""
    model = build(replace(tiny.families()[name], vocab=VOCAB), seed=2).double().eval()  # type: ignore[reportCallIssue]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert isinstance(model, Generator)
    job = make_job(model, ROWS)
    outputs = search_requests(job.models, search_config(job, Beam(3)), device.requests_of(job), 4, CPU)
    distinct = {hypothesis.ids for ranked in outputs for hypothesis in ranked or ()}
    assert len(distinct) > len(ROWS) // 2  # otherwise the test would be too easy
    assert_same(outputs, search(job, Beam(3)))


def test_jobs_of_similar_width_are_searched_together() -> None:
    model, spec = translator(VOCAB, eos=2.0), Beam(3)
    rows = [*random_rows(10, VOCAB, longest=40, seed=2), *random_rows(5, VOCAB, longest=4, seed=3)]
    jobs = [make_job(model, [rows[i] for i in indices]) for indices in by_length(rows, 4)]
    for job, outputs in zip(jobs, find_each(jobs, spec), strict=True):
        assert_same(outputs, search(job, spec))


def test_a_decoder_is_cached_for_later_batches_of_its_shape() -> None:
    model, spec, rows = translator(VOCAB), Beam(3), ROWS
    decoders = []
    for seed in range(3):
        rows = random_rows(6, VOCAB, seed=seed)
        compare(model, rows, spec)
        decoders.append(decoder(make_job(model, rows), spec))
    assert decoders[0] is decoders[1] is decoders[2]
    with kernels.use("reference"):  # a captured step would keep its kernel
        assert decoder(make_job(model, rows), spec) is not decoders[0]
    assert decoder(make_job(model, rows), spec) is decoders[0]
    assert not device.is_captured(model)
    decoders[0].windows[32].graph = cast(Any, "a graph")
    assert device.is_captured(model)
    assert not device.is_captured(translator(VOCAB))
    decoders[0].windows[32].graph = None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 0.01
    assert decoder(make_job(model, rows), spec) is not decoders[0]
    compare(model, rows, spec)


@torch.inference_mode()
def decoder(job: Job, spec: Beam) -> device.CapturedDecoder:
    return decoder_for(
        device.RequestQueue(job.models, search_config(job, spec), device.requests_of(job), len(job.most), CPU)
    )


def test_a_decoder_is_usable_after_an_interrupted_search(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = translator(VOCAB), Beam(3)
    job = make_job(model, ROWS)
    step, calls = BeamState.step, 0

    def fails(self: BeamState, log_probs: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        step(self, log_probs)

    monkeypatch.setattr(BeamState, "step", fails)
    with pytest.raises(KeyboardInterrupt):
        list(find_each([job], spec))
    compare(model, ROWS, spec)


def test_too_few_learned_positions_are_left_to_the_host() -> None:
    model = translator(VOCAB, eos=-3.0, input=Tokens(position=Learned(11)))
    job = make_job(model, ROWS, Limits(max_len=20))
    (outputs,) = find_each([job], Beam(3))
    assert outputs == [None] * len(ROWS)


def flat(log_probs: Sequence[float] = (0.0,) * VOCAB) -> LanguageModel:
    """Return a model with the same next-token distribution at every position."""
    model = translator(VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.head.get_parameter("bias").copy_(torch.tensor(log_probs))
    return model


def test_unsure_sources_are_searched_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """More outputs have the same score than are stored, so that those with the lowest ids are unknown."""
    spec, job = Beam(4, 2), make_job(flat(), ROWS[:2], Limits(max_len=3))
    monkeypatch.setattr(Beam, "_stays_on_the_device", lambda *_: True)
    expected = search(job, spec)
    (outputs,) = find_each([job], spec)
    assert outputs == [None, None]
    assert_same(spec.find(job), expected)
    assert_same(next(spec.find_each([job])), expected)


@pytest.mark.parametrize("n_best", [1, 2, 3])
def test_outputs_with_equal_scores_rank_by_their_ids(n_best: int) -> None:
    """The outputs (3, 3) and (4,) are equally likely; the former is found later and ranks first."""
    chances = [0.0, 0.0, 0.4, 0.4, 0.16, *(0.04 / 2**n for n in range(1, VOCAB - 4))]
    model = flat((torch.tensor(chances) + 1e-30).log().tolist())
    compare(model, ROWS[:2], Beam(4, n_best, "none"), limits=Limits(min_len=1, max_len=4))
    (outputs,) = find_each([make_job(model, ROWS[:1], Limits(min_len=1, max_len=4))], Beam(4, 3, "none"))
    assert outputs[0] is not None
    assert [hypothesis.ids for hypothesis in outputs[0]] == [(3,), (3, 3), (4,)]


@pytest.mark.parametrize("stopping", ["optimal", "huggingface"])
def test_searches_with_many_ties_stay_on_the_device(stopping: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in half precision, far more tokens than beams are equally likely."""
    model = translator(300, eos=3.0).float()
    logits = model.head.log_probs

    def coarse(h: torch.Tensor, table: Any) -> torch.Tensor:
        return (logits(h, table).exp().clamp(min=1e-6).log() * 2).round() / 2 - 0.01

    monkeypatch.setattr(model.head, "log_probs", coarse)
    compare(model, random_rows(12, 300, seed=3), Beam(5, 1, alpha=0.7, stopping=stopping))


def test_unsupported_searches_are_refused() -> None:
    model = translator(VOCAB)
    job = make_job(model, ROWS)
    assert refusal(job, Beam(3)) is None
    for spec in (Beam(4, groups=2, diversity=0.5), Beam(3, coverage=0.1)):
        assert refusal(job, spec) is not None
    for rules in (
        TokenConstraints(prefix=(4,)),
        TokenConstraints(required=((4,),)),
        TokenConstraints(no_repeat=2),
        TokenConstraints(banned=((4, 5),)),
    ):
        assert refusal(make_job(model, ROWS, rules=rules), Beam(3)) is not None
    each = [TokenConstraints(banned=((3 + n,),)) for n in range(len(ROWS))]
    assert refusal(make_job(model, ROWS, rules=each), Beam(3)) is not None


def test_a_state_that_cannot_be_refilled_is_left_to_the_host() -> None:
    job = make_job(KnownModel(random_log_probs(7)), ROWS)
    (outputs,) = find_each([job], Beam(3))
    assert outputs == [None] * len(ROWS)


def test_weights_with_nan_are_left_to_the_host() -> None:
    model = translator(VOCAB)
    with torch.no_grad():
        model.head.get_parameter("bias")[9] = torch.nan
    job = make_job(model, ROWS[:2])
    (outputs,) = find_each([job], Beam(3))
    assert outputs == [None, None]
    with pytest.raises(DataError, match="a log-probability is NaN"):
        Beam(3).find(job)


def test_an_id_beyond_the_vocabulary_is_refused() -> None:
    job = make_job(translator(VOCAB), ROWS, rules=TokenConstraints(banned=((VOCAB,),)))
    with pytest.raises(DataError, match=f"id {VOCAB}"):
        list(find_each([job], Beam(3)))


def test_windows_do_not_change_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that outgrows its window continues in a larger window."""
    monkeypatch.setattr(device, "WINDOW", 3)
    model = translator(VOCAB, eos=0.5)
    compare(model, ROWS, Beam(3, 2), limits=Limits(max_len=14))
    job = make_job(model, ROWS, Limits(max_len=14))
    outputs = search_requests(job.models, search_config(job, Beam(3, 2)), device.requests_of(job), 2, CPU)
    assert_same(outputs, search(job, Beam(3, 2)))


@pytest.mark.parametrize(("stopping", "extra"), [("optimal", 1), ("ctranslate2", 0)])
def test_no_superfluous_steps(stopping: Any, extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host checks every few steps which sources are done, and knows an upper bound of the steps."""
    step, count = BeamState.step, 0

    def counted(self: BeamState, log_probs: torch.Tensor) -> None:
        nonlocal count
        count += 1
        step(self, log_probs)

    monkeypatch.setattr(BeamState, "step", counted)
    compare(translator(VOCAB, eos=-50.0), ROWS, Beam(3, stopping=stopping), limits=Limits(max_len=9))
    assert count == 9 + extra
    count, limits = 0, [Limits(max_len=3 + n) for n in range(len(ROWS))]
    compare(translator(VOCAB, eos=-50.0), ROWS, Beam(3, stopping=stopping), limits=limits)
    assert count == limits[-1].most(None) + extra


class Operations(TorchDispatchMode):
    """Records the names of operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or func.overloadpacket.__name__.startswith(("empty", "_unsafe_view", "detach"))):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_runs_few_operations_and_creates_no_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a step on a GPU depends on the number of operations; constants are created beforehand."""
    step, operations = device.CapturedDecoder._step, []

    def watched(self: device.CapturedDecoder, models: Any) -> None:
        with Operations() as counted:
            step(self, models)
        operations.append(counted.names)

    monkeypatch.setattr(device.CapturedDecoder, "_step", watched)
    # Without inference mode, compound operations are recorded as their parts. On a GPU, no values are read for checks.
    monkeypatch.setattr(device, "search_requests", device.search_requests.__wrapped__)  # type: ignore[reportFunctionMemberAccess]
    for module in (base, decoding):
        monkeypatch.setattr(module, "readable", lambda _: False)
    with torch.no_grad():
        compare(translator(VOCAB), ROWS, Beam(4))
    assert not {"arange", "zeros", "full", "scalar_tensor", "zeros_like", "eye"} & {*operations[3]}
    assert len(operations[3]) <= 118  # 70 of the search, 16 of each of two blocks


def test_requests_are_the_rows_of_the_job() -> None:
    job = make_job(translator(VOCAB), [[5, 6], [7]], [Limits(1, 4), Limits(0, 9)])
    assert device.requests_of(job) == [Request((5, 6), 1, 4), Request((7,), 0, 9)]


class Graph:
    """Replaces a captured step where there is no GPU: a replay runs the function."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.replay = step


def simulate_capture(monkeypatch: pytest.MonkeyPatch, warning: str | None = None) -> list[str]:
    """Run decoders as on a GPU. Return the list of events: tests and captures of steps and encoders."""
    events: list[str] = []

    def initialize(self: device.CapturedDecoder, *arguments: Any) -> None:
        original(self, *arguments)
        self.pool = cast(Any, "pool")
        self.stream = self.encoder.stream = Mock(spec=torch.cuda.Stream, device=CPU)

    def watched(step: Callable[[], object]) -> tuple[object, str | None]:
        result = step()
        events.append("tested" if result is None else "encoder tested")
        return result, warning

    def capture(step: Callable[[], object], _stream: Any, pool: Any) -> Graph:
        events.append(f"captured into {pool}" if pool else "encoder captured")
        return Graph(step)

    original = device.CapturedDecoder.__init__
    monkeypatch.setattr(device.CapturedDecoder, "__init__", initialize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Mock(spec=torch.cuda.Stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(device.graphs, "watched", watched)
    monkeypatch.setattr(device.graphs, "capture", capture)
    return events


def test_every_window_is_tested_once_and_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events = simulate_capture(monkeypatch)
    monkeypatch.setattr(device, "WINDOW", 5)
    model = translator(VOCAB, eos=-2.0)
    compare(model, ROWS, Beam(3, 2), limits=Limits(max_len=14))
    steps = ["tested", "captured into pool"] * 3
    assert events == steps
    compare(model, random_rows(9, VOCAB, seed=8), Beam(3, 2), limits=Limits(max_len=14))  # the same decoder
    assert [event for event in events if "encoder" not in event] == steps


def test_the_encoder_is_tested_once_and_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events = simulate_capture(monkeypatch)
    model = translator(VOCAB, eos=2.0)
    for seed in range(5):
        compare(model, random_rows(9, VOCAB, seed=seed), Beam(3, 2))
    assert [event for event in events if "encoder" in event] == ["encoder tested", "encoder captured"]


def test_the_encoder_of_a_large_batch_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    events = simulate_capture(monkeypatch)
    monkeypatch.setattr(device, "LAUNCH_BOUND", 9 * 16 - 1)  # sources of up to 16 tokens are padded to 16
    model = translator(VOCAB, eos=2.0)
    for seed in range(4):
        compare(model, random_rows(9, VOCAB, seed=seed), Beam(3, 2))
    assert not any("encoder" in event for event in events)


def test_a_step_that_waits_for_the_device_is_never_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "regard.decoding")
    events = simulate_capture(monkeypatch, warning="it waits for the host")
    compare(translator(VOCAB), ROWS, Beam(3, 2))
    assert events == ["tested"]
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["it waits for the host"]


def test_requests_that_arrive_later_take_free_slots() -> None:
    model, spec = translator(VOCAB, eos=2.0), Beam(4, 2)
    rows = random_rows(14, VOCAB, seed=1)
    job = make_job(model, rows)
    later, order = device.requests_of(job), list(range(3))
    first = max(range(14), key=lambda row: len(later[row].ids))
    order[0] = first  # the longest source, which determines the width
    order = list(dict.fromkeys([*order, *range(3)]))[:3]
    arriving = [row for row in range(14) if row not in order]

    def more(number: int, takes: Callable[[Request], bool]) -> list[Request]:
        added = [arriving.pop(0) for _ in range(min(number, 2, len(arriving)))]
        assert all(takes(later[row]) for row in added)
        order.extend(added)
        return [later[row] for row in added]

    config = search_config(job, spec)
    outputs: dict[int, list[Hypothesis] | None] = {}
    begin = [later[row] for row in order]
    for finished in device.search_continuously(job.models, config, begin, 4, CPU, more):
        assert not torch.is_inference_mode_enabled()
        outputs |= {order[number]: result for number, result in finished}
    assert_same([outputs[row] for row in range(14)], search(job, spec))


def test_slot_of_a_cancelled_request_is_free_for_the_next() -> None:
    model, spec = translator(VOCAB, eos=2.0), Beam(3)
    rows = random_rows(6, VOCAB, seed=2)
    job = make_job(model, rows, limits=Limits(max_len=40))
    cancelled = {1, 2}
    found = device.search_continuously(
        job.models, search_config(job, spec), device.requests_of(job), 2, CPU, cancelled=cancelled.__contains__
    )
    outputs = {number: result for finished in found for number, result in finished}
    assert {0, 3, 4, 5} <= outputs.keys()
    expected = search(job, spec)
    assert_same([outputs[row] for row in (0, 3, 4, 5)], [expected[row] for row in (0, 3, 4, 5)])


def test_two_searches_at_the_same_time_have_decoders_of_their_own() -> None:
    model, spec = translator(VOCAB, eos=2.0), Beam(3)
    jobs = [make_job(model, random_rows(5, VOCAB, seed=seed)) for seed in (3, 3)]
    running = [
        device.search_continuously(job.models, search_config(job, spec), device.requests_of(job), 2, CPU)
        for job in jobs
    ]
    outputs: list[dict[int, list[Hypothesis] | None]] = [{}, {}]
    for steps in zip(*running, strict=True):  # one step of each in turn
        for output, finished in zip(outputs, steps, strict=True):
            output |= dict(finished)
    for job, output in zip(jobs, outputs, strict=True):
        assert_same([output[row] for row in range(5)], search(job, spec))
