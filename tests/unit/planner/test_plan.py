"""The plan of a run: complete, with reasons, monotone in text and time, within the memory."""

from itertools import pairwise, product
from typing import Any

import pytest

from regard import planner
from regard.data.batching import Batching, Buckets, Windows
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.data.prepare import Survey
from regard.models.base import ModelSpec
from regard.models.build import build, count
from regard.planner.candidates import Candidate, candidates, of_ngrams
from regard.planner.model_size import ROOM, bytes_needed
from regard.planner.speed import Hardware, muon_share, nominal
from regard.planner.text import described
from regard.presets import preset
from regard.recipe.recipe import default_train
from regard.training.budget import SPACING
from regard.training.optim import AdamW, Muon, muon_matrices
from regard.training.schedule import Constant, Cosine, LinearDecay, WarmupStableDecay
from regard.training.spec import TrainSpec
from regard.variants import apply

OBJECTIVES: list[tuple[Objective, Batching]] = [
    (Translation(), Buckets()),
    (LanguageModelling(), Windows()),
    (LanguageModelling("lines"), Buckets()),
    (Classification(("a", "b")), Buckets()),
]
LINES = (50, 500, 5_000, 15_000, 30_000, 100_000, 250_000, 1_000_000, 2_500_000, 5_000_000)
TIMES = (60.0, 300.0, 3600.0, 36_000.0)
CPU, GPU = nominal("cpu"), nominal("cuda", 80e9)


def survey(objective: Objective, lines: int, source: int = 14, target: int = 13) -> Survey:
    ids = {"source": lines * source, "target": lines * target, "text": lines * target, "label": lines}
    return Survey(records=lines, kept=lines, ids={name: ids[name] for name in objective.columns})


def planned(objective: Objective, lines: int, hardware: Hardware = CPU, **settings: Any) -> planner.Chosen:
    train = TrainSpec(schedule=Cosine(), **settings)
    return planner.plan(
        objective, survey(objective, lines), Windows() if objective.stream else Buckets(), train, hardware
    )


def size(objective: Objective, chosen: planner.Chosen) -> int:
    """The number of the candidate that was chosen."""
    shapes = [_shape(candidate.spec) for candidate in candidates(objective)]
    return shapes.index(_shape(chosen.model))


def _shape(spec: Any) -> tuple[int, int]:
    stack = getattr(spec, "decoder", None) or spec.encoder
    return spec.d_model, stack.depth


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize("lines", LINES[::3])
@pytest.mark.parametrize(("objective", "batching"), OBJECTIVES)
def test_plan_is_complete_and_has_reasons(
    objective: Objective, batching: Batching, lines: int, hardware: Hardware
) -> None:
    train = default_train(objective)
    found = planner.plan(objective, survey(objective, lines), batching, train, hardware)
    chosen: Any = found.train
    numbers = [
        chosen.steps,
        chosen.optimizer.learning_rate,
        chosen.schedule.warmup,
        chosen.validate_every,
        chosen.patience,
    ]
    assert all(isinstance(number, int | float) for number in numbers)
    assert found.batching.tokens >= 1  # type: ignore[attr-defined]
    assert 1 <= chosen.validate_every <= chosen.steps
    topics = [sentence.split(":")[0] for sentence in found.why]
    assert {"model", "dropout", "batch size", "steps", "peak learning rate", "warm-up", "validation"} <= {*topics}


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize(("objective", "_"), OBJECTIVES)
def test_more_text_or_time_never_chooses_a_smaller_model(objective: Objective, _: Batching, hardware: Hardware) -> None:
    for time in TIMES:
        sizes = [size(objective, planned(objective, lines, hardware, time=time)) for lines in LINES]
        assert all(a <= b for a, b in pairwise(sizes)), (time, sizes)
    for lines in LINES:
        sizes = [size(objective, planned(objective, lines, hardware, time=time)) for time in TIMES]
        assert all(a <= b for a, b in pairwise(sizes)), (lines, sizes)
    small, large = planned(objective, 50, hardware, time=60.0), planned(objective, 5_000_000, hardware, time=36_000.0)
    assert size(objective, small) == 0 < size(objective, large)


@pytest.mark.parametrize("hardware", [CPU, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize(("objective", "_"), OBJECTIVES)
def test_more_time_is_more_training(objective: Objective, _: Batching, hardware: Hardware) -> None:
    for lines in LINES:
        plans = [planned(objective, lines, hardware, time=time) for time in TIMES]
        of_one_model = [p for p in plans if size(objective, p) == size(objective, plans[0])]
        steps: list[Any] = [_estimate(p) * p.batching.tokens for p in of_one_model]  # type: ignore[attr-defined]
        assert all(a <= 1.05 * b for a, b in pairwise(steps)), (lines, steps)


def _estimate(chosen: planner.Chosen) -> int:
    """The steps that a plan expects; those of the recipe are a bound, where there is a time."""
    sentence = next(sentence for sentence in chosen.why if sentence.startswith("steps:"))
    return int(sentence.split()[2].strip(",").replace(",", ""))


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(("objective", "_"), OBJECTIVES)
def test_warmup_is_at_most_a_tenth(objective: Objective, _: Batching, time: float) -> None:
    for lines, hardware in product(LINES, (CPU, GPU)):
        train: Any = planned(objective, lines, hardware, time=time).train
        assert 1 <= train.schedule.warmup <= max(1, train.steps // 10)


def test_a_time_that_the_text_is_not_worth_is_stated() -> None:
    found = planned(Translation(), 50, GPU, time=3600.0)
    assert any(sentence.startswith("time: less than the 60 min given") for sentence in found.why)
    assert found.train.steps < 1000  # type: ignore[operator]


@pytest.mark.parametrize("memory", [2e9, 8e9, 24e9, 80e9])
@pytest.mark.parametrize(("objective", "_"), OBJECTIVES)
def test_plan_fits_the_memory(objective: Objective, _: Batching, memory: float) -> None:
    hardware = nominal("cuda", memory)
    found = planned(objective, 5_000_000, hardware, time=36_000.0)
    candidate = candidates(objective)[size(objective, found)]
    tokens: int = found.batching.tokens  # type: ignore[attr-defined]
    smallest = 4096
    assert tokens <= smallest or bytes_needed(candidate, tokens) <= ROOM * memory


def test_size_counts_both_sides_of_a_pair() -> None:
    """A summariser's source is long and its target short."""
    pairs, summaries = (
        Survey(kept=14_000, ids={"source": 112_000, "target": 112_000}),
        Survey(kept=14_000, ids={"source": 2_100_000, "target": 112_000}),
    )
    time = TrainSpec(schedule=Cosine(), time=3600.0)
    sizes = [
        size(Translation(), planner.plan(Translation(), text, Buckets(), time, GPU)) for text in (pairs, summaries)
    ]
    assert sizes[0] < sizes[1]


def test_more_passes_need_more_dropout() -> None:
    for objective in (Translation(), LanguageModelling()):
        found: list[Any] = [planned(objective, 15_000, CPU, time=time).model for time in (60.0, 300.0, 7200.0)]
        assert all(a.dropout <= b.dropout for a, b in pairwise(found))
        assert found[0].dropout < found[-1].dropout


def test_what_is_given_is_kept() -> None:
    given = TrainSpec(
        steps=77,
        optimizer=AdamW(learning_rate=0.5),
        schedule=LinearDecay(warmup=3),
        validate_every=11,
        patience=2,
    )
    found = planner.plan(Translation(), survey(Translation(), 5000), Buckets(640), given, CPU)
    assert found.train == given
    assert found.batching == Buckets(640)


def test_given_steps_need_no_measurement() -> None:
    def refuse(*_: Any) -> float:
        raise AssertionError("nothing may be measured")

    hardware = Hardware("cpu", 16e9, refuse)
    assert planned(Translation(), 5000, hardware, steps=30).train.steps == 30
    given = planner.Given(preset("transformer_tiny"))
    train = TrainSpec(steps=30, schedule=Cosine())
    planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, hardware, given)


def test_larger_models_are_not_even_measured() -> None:
    measured: list[int] = []

    def slow(spec: Any, _: Any) -> float:
        measured.append(spec.d_model)
        return 100.0

    planned(Translation(), 5_000_000, Hardware("cpu", 64e9, slow), time=60.0)
    assert measured == [128]


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), LinearDecay(), WarmupStableDecay()])
def test_every_schedule_with_a_warmup_gets_one(schedule: Any) -> None:
    train = TrainSpec(steps=1000, schedule=schedule)
    found: Any = planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, CPU)
    assert found.train.schedule.warmup == 100


def test_muon_gets_the_rate_for_both_of_its_parts() -> None:
    found: Any = planned(Translation(), 5000, steps=100, optimizer=Muon())
    assert found.train.optimizer.learning_rate == found.train.optimizer.rest.learning_rate == 7e-3


@pytest.mark.parametrize("objective", [Translation(), LanguageModelling()])
def test_muon_is_chosen_for_a_model_that_is_chosen(objective: Objective) -> None:
    assert isinstance(planned(objective, 5000).train.optimizer, Muon)
    assert isinstance(planned(objective, 5000, GPU).train.optimizer, Muon)
    assert isinstance(planned(objective, 5000, optimizer=AdamW()).train.optimizer, AdamW)
    assert "optimizer: Muon" in planned(objective, 5000).why
    for given in (planner.Given(preset("transformer_tiny")), planner.Given(preset("transformer_tiny"), trained=True)):
        train = TrainSpec(steps=100, schedule=Cosine())
        found = planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, CPU, given)
        assert isinstance(found.train.optimizer, AdamW)


def test_muon_costs_what_its_products_cost() -> None:
    model = preset("transformer_tiny", d_model=64)
    matrices = [sorted(p.shape[-2:]) for p in muon_matrices(build(model, device="meta")).values()]
    wanted = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in matrices) / (6 * count(model) * 1024)
    assert muon_share(model, 1024) == pytest.approx(wanted)
    assert muon_share(model, 2048) == pytest.approx(wanted / 2)


def test_what_does_not_happen_is_not_announced() -> None:
    settings = (Translation(), survey(Translation(), 5000), Buckets(), TrainSpec(steps=100, schedule=Cosine()), CPU)
    silent = {sentence.split(":")[0] for sentence in planner.plan(*settings, validates=False).why}
    assert {"validation", "early stopping"}.isdisjoint(silent)
    (said,) = [sentence for sentence in planner.plan(*settings).why if sentence.startswith("validation")]
    assert "about" not in said  # nothing was measured
    assert "optimizer: AdamW (as given)" in planned(Translation(), 5000, optimizer=AdamW(learning_rate=1e-3)).why


def test_classifiers_are_trained_with_adamw() -> None:
    assert isinstance(planned(Classification(("a", "b")), 5000).train.optimizer, AdamW)


def test_language_models_make_fewer_passes_than_translators() -> None:
    steps = [
        planned(objective, 80_000, GPU, time=36_000.0).train.steps or 0
        for objective in (LanguageModelling(), Translation())
    ]
    assert 0 < steps[0] < steps[1]


@pytest.mark.parametrize(("width", "rate"), [(64, 3e-3), (128, 3e-3), (256, 1.5e-3), (512, 7.5e-4), (1024, 3.75e-4)])
def test_wider_models_learn_more_slowly(width: int, rate: float) -> None:
    given = planner.Given(preset("transformer_base", d_model=width))
    train = TrainSpec(steps=100, schedule=Cosine())
    found = planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, CPU, given)
    assert found.train.optimizer is not None
    assert found.train.optimizer.learning_rate == pytest.approx(rate)


def test_fine_tuning_is_short_and_gentle() -> None:
    base = preset("transformer_tiny")
    scratch, tuned = planner.Given(base), planner.Given(base, trained=True)
    text = survey(Translation(), 30_000)
    train = TrainSpec(schedule=Cosine())
    plans: list[Any] = [
        planner.plan(Translation(), text, Buckets(), train, GPU, given).train for given in (scratch, tuned)
    ]
    epoch = described(Translation(), text, Buckets()).epoch
    assert plans[1].optimizer.learning_rate == pytest.approx(0.1 * plans[0].optimizer.learning_rate)
    tokens: Any = planner.plan(Translation(), text, Buckets(), train, GPU, tuned).batching
    assert 3 <= plans[1].steps * tokens.tokens / epoch <= 7
    few = planner.plan(Translation(), survey(Translation(), 200), Buckets(), train, CPU, tuned)
    assert few.train.steps <= 20 * 4  # type: ignore[operator]  # a few batches make an epoch


def test_validation_takes_a_tenth_of_the_time() -> None:
    """Long targets take long to decode: they are validated less often."""
    every = []
    for target in (10, 1000):
        text = survey(Translation(), 300_000 // target, target, target)
        found = planner.plan(Translation(), text, Buckets(), TrainSpec(schedule=Cosine(), time=300.0), CPU)
        assert found.train.validate_every is not None
        every.append(found.train.validate_every / _estimate(found))
    assert 1 / 21 < every[0] <= every[1] < 0.21


def test_default_time_is_stated() -> None:
    why = planned(Translation(), 1_000_000, CPU).why
    assert any(sentence.startswith("time: 15 min") and "--time" in sentence for sentence in why)
    assert not any(sentence.startswith("time:") for sentence in planned(Translation(), 1_000_000, CPU, time=60.0).why)


def test_candidates_grow() -> None:
    for objective, _ in OBJECTIVES:
        known: list[Candidate] = [c for c in candidates(objective) if not of_ngrams(c.spec)]
        assert all(a.blocks < b.blocks for a, b in pairwise(known))


def test_a_modified_classifier_is_a_transformer() -> None:
    """A convolution over n-grams has no attention to change."""
    objective = Classification(("a", "b"))
    plain = planned(objective, 5000, steps=100)
    train = TrainSpec(schedule=Cosine(), steps=100)
    settings = (objective, survey(objective, 5000), Buckets(), train, CPU)
    assert of_ngrams(plain.model)
    assert not of_ngrams(planner.plan(*settings, planner.Given(attention=True)).model)

    def swiglu(spec: ModelSpec) -> ModelSpec:
        return apply("swiglu", spec)

    assert not of_ngrams(planner.plan(*settings, finished=swiglu).model)


def test_a_timed_run_waits_for_a_quarter_of_its_validations() -> None:
    """They lie at least `SPACING` of the time apart."""
    for objective in (Translation(), LanguageModelling()):
        patience = planned(objective, 15_000, CPU, time=900.0).train.patience
        assert patience is not None
        assert 0.2 <= patience * SPACING <= 0.35
