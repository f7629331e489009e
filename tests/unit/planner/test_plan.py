"""The plan of a training run is complete, has reasons, is monotone in text and time, and fits the memory."""

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
from regard.planner.text_size import text_size
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


def planned(objective: Objective, lines: int, hardware: Hardware = CPU, **settings: Any) -> planner.Plan:
    train = TrainSpec(schedule=Cosine(), **settings)
    return planner.plan(
        objective, survey(objective, lines), Windows() if objective.stream else Buckets(), train, hardware
    )


def size(objective: Objective, chosen: planner.Plan) -> int:
    """Return the index of the chosen candidate."""
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
    plan = planner.plan(objective, survey(objective, lines), batching, train, hardware)
    planned_train: Any = plan.train
    numbers = [
        planned_train.steps,
        planned_train.optimizer.learning_rate,
        planned_train.schedule.warmup,
        planned_train.validate_every,
        planned_train.patience,
    ]
    assert all(isinstance(number, int | float) for number in numbers)
    assert plan.batching.tokens >= 1  # type: ignore[attr-defined]
    assert 1 <= planned_train.validate_every <= planned_train.steps
    topics = [sentence.split(":")[0] for sentence in plan.why]
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
def test_more_time_gives_more_training(objective: Objective, _: Batching, hardware: Hardware) -> None:
    for lines in LINES:
        plans = [planned(objective, lines, hardware, time=time) for time in TIMES]
        same_model = [p for p in plans if size(objective, p) == size(objective, plans[0])]
        tokens: list[Any] = [_estimate(p) * p.batching.tokens for p in same_model]  # type: ignore[attr-defined]
        assert all(a <= 1.05 * b for a, b in pairwise(tokens)), (lines, tokens)


def _estimate(chosen: planner.Plan) -> int:
    """Return the estimated number of steps. With a time limit, `train.steps` is only an upper bound."""
    sentence = next(sentence for sentence in chosen.why if sentence.startswith("steps:"))
    return int(sentence.split()[2].strip(",").replace(",", ""))


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(("objective", "_"), OBJECTIVES)
def test_warmup_is_at_most_a_tenth(objective: Objective, _: Batching, time: float) -> None:
    for lines, hardware in product(LINES, (CPU, GPU)):
        train: Any = planned(objective, lines, hardware, time=time).train
        assert 1 <= train.schedule.warmup <= max(1, train.steps // 10)


def test_plan_explains_why_it_uses_less_than_the_given_time() -> None:
    plan = planned(Translation(), 50, GPU, time=3600.0)
    assert any(sentence.startswith("time: less than the 60 min given") for sentence in plan.why)
    assert plan.train.steps < 1000  # type: ignore[operator]


@pytest.mark.parametrize("memory", [2e9, 8e9, 24e9, 80e9])
@pytest.mark.parametrize(("objective", "_"), OBJECTIVES)
def test_plan_fits_the_memory(objective: Objective, _: Batching, memory: float) -> None:
    hardware = nominal("cuda", memory)
    plan = planned(objective, 5_000_000, hardware, time=36_000.0)
    candidate = candidates(objective)[size(objective, plan)]
    tokens: int = plan.batching.tokens  # type: ignore[attr-defined]
    smallest = 4096
    assert tokens <= smallest or bytes_needed(candidate, tokens) <= ROOM * memory


def test_size_counts_both_sides_of_a_pair() -> None:
    """In summarisation, sources are long and targets are short."""
    pairs, summaries = (
        Survey(kept=14_000, ids={"source": 112_000, "target": 112_000}),
        Survey(kept=14_000, ids={"source": 2_100_000, "target": 112_000}),
    )
    train = TrainSpec(schedule=Cosine(), time=3600.0)
    sizes = [
        size(Translation(), planner.plan(Translation(), text, Buckets(), train, GPU)) for text in (pairs, summaries)
    ]
    assert sizes[0] < sizes[1]


def test_more_passes_need_more_dropout() -> None:
    for objective in (Translation(), LanguageModelling()):
        models: list[Any] = [planned(objective, 15_000, CPU, time=time).model for time in (60.0, 300.0, 7200.0)]
        assert all(a.dropout <= b.dropout for a, b in pairwise(models))
        assert models[0].dropout < models[-1].dropout


def test_given_settings_are_kept() -> None:
    train = TrainSpec(
        steps=77,
        optimizer=AdamW(learning_rate=0.5),
        schedule=LinearDecay(warmup=3),
        validate_every=11,
        patience=2,
    )
    plan = planner.plan(Translation(), survey(Translation(), 5000), Buckets(640), train, CPU)
    assert plan.train == train
    assert plan.batching == Buckets(640)


def test_speed_is_not_measured_if_steps_are_given() -> None:
    def refuse(*_: Any) -> float:
        raise AssertionError("nothing may be measured")

    hardware = Hardware("cpu", 16e9, refuse)
    assert planned(Translation(), 5000, hardware, steps=30).train.steps == 30
    given_model = planner.ModelChoice(preset("transformer_tiny"))
    train = TrainSpec(steps=30, schedule=Cosine())
    planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, hardware, given_model)


def test_models_larger_than_a_too_slow_one_are_not_measured() -> None:
    measured: list[int] = []

    def slow(spec: Any, _: Any) -> float:
        measured.append(spec.d_model)
        return 100.0

    planned(Translation(), 5_000_000, Hardware("cpu", 64e9, slow), time=60.0)
    assert measured == [128]


@pytest.mark.parametrize("schedule", [Constant(), Cosine(), LinearDecay(), WarmupStableDecay()])
def test_every_schedule_with_a_warmup_gets_one(schedule: Any) -> None:
    train = TrainSpec(steps=1000, schedule=schedule)
    plan: Any = planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, CPU)
    assert plan.train.schedule.warmup == 100


def test_muon_sets_the_learning_rate_of_all_weights() -> None:
    plan: Any = planned(Translation(), 5000, steps=100, optimizer=Muon())
    assert plan.train.optimizer.learning_rate == plan.train.optimizer.rest.learning_rate == 7e-3


@pytest.mark.parametrize("objective", [Translation(), LanguageModelling()])
def test_muon_is_chosen_only_with_a_planned_model(objective: Objective) -> None:
    assert isinstance(planned(objective, 5000).train.optimizer, Muon)
    assert isinstance(planned(objective, 5000, GPU).train.optimizer, Muon)
    assert isinstance(planned(objective, 5000, optimizer=AdamW()).train.optimizer, AdamW)
    assert "optimizer: Muon" in planned(objective, 5000).why
    for given_model in (
        planner.ModelChoice(preset("transformer_tiny")),
        planner.ModelChoice(preset("transformer_tiny"), trained=True),
    ):
        train = TrainSpec(steps=100, schedule=Cosine())
        plan = planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, CPU, given_model)
        assert isinstance(plan.train.optimizer, AdamW)


def test_muon_share_counts_matrix_products() -> None:
    model = preset("transformer_tiny", d_model=64)
    matrices = [sorted(p.shape[-2:]) for p in muon_matrices(build(model, device="meta")).values()]
    expected = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in matrices) / (6 * count(model) * 1024)
    assert muon_share(model, 1024) == pytest.approx(expected)
    assert muon_share(model, 2048) == pytest.approx(expected / 2)


def test_plan_mentions_only_what_happens() -> None:
    settings = (Translation(), survey(Translation(), 5000), Buckets(), TrainSpec(steps=100, schedule=Cosine()), CPU)
    topics = {sentence.split(":")[0] for sentence in planner.plan(*settings, validates=False).why}
    assert {"validation", "early stopping"}.isdisjoint(topics)
    (reason,) = [sentence for sentence in planner.plan(*settings).why if sentence.startswith("validation")]
    assert "about" not in reason  # nothing was measured
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
def test_learning_rate_falls_with_the_width(width: int, rate: float) -> None:
    given_model = planner.ModelChoice(preset("transformer_base", d_model=width))
    train = TrainSpec(steps=100, schedule=Cosine())
    plan = planner.plan(Translation(), survey(Translation(), 5000), Buckets(), train, CPU, given_model)
    assert plan.train.optimizer is not None
    assert plan.train.optimizer.learning_rate == pytest.approx(rate)


def test_fine_tuning_has_few_passes_and_a_low_learning_rate() -> None:
    base = preset("transformer_tiny")
    scratch, tuned = planner.ModelChoice(base), planner.ModelChoice(base, trained=True)
    text = survey(Translation(), 30_000)
    train = TrainSpec(schedule=Cosine())
    plans: list[Any] = [
        planner.plan(Translation(), text, Buckets(), train, GPU, given_model).train for given_model in (scratch, tuned)
    ]
    epoch = text_size(Translation(), text, Buckets()).epoch
    assert plans[1].optimizer.learning_rate == pytest.approx(0.1 * plans[0].optimizer.learning_rate)
    tokens: Any = planner.plan(Translation(), text, Buckets(), train, GPU, tuned).batching
    assert 3 <= plans[1].steps * tokens.tokens / epoch <= 7
    few = planner.plan(Translation(), survey(Translation(), 200), Buckets(), train, CPU, tuned)
    assert few.train.steps <= 20 * 4  # type: ignore[operator]  # a few batches make an epoch


def test_validation_takes_a_tenth_of_the_time() -> None:
    """Validation is less frequent if targets are long, because decoding them takes longer."""
    intervals = []
    for target in (10, 1000):
        text = survey(Translation(), 300_000 // target, target, target)
        plan = planner.plan(Translation(), text, Buckets(), TrainSpec(schedule=Cosine(), time=300.0), CPU)
        assert plan.train.validate_every is not None
        intervals.append(plan.train.validate_every / _estimate(plan))
    assert 1 / 21 < intervals[0] <= intervals[1] < 0.21


def test_default_time_is_stated() -> None:
    why = planned(Translation(), 1_000_000, CPU).why
    assert any(sentence.startswith("time: 15 min") and "--time" in sentence for sentence in why)
    assert not any(sentence.startswith("time:") for sentence in planned(Translation(), 1_000_000, CPU, time=60.0).why)


def test_candidates_are_sorted_by_size() -> None:
    for objective, _ in OBJECTIVES:
        transformers: list[Candidate] = [c for c in candidates(objective) if not of_ngrams(c.spec)]
        assert all(a.blocks < b.blocks for a, b in pairwise(transformers))


def test_a_classifier_with_modified_parts_is_a_transformer() -> None:
    """A convolution over n-grams has neither attention nor a feed-forward layer to modify."""
    objective = Classification(("a", "b"))
    plain = planned(objective, 5000, steps=100)
    train = TrainSpec(schedule=Cosine(), steps=100)
    settings = (objective, survey(objective, 5000), Buckets(), train, CPU)
    assert of_ngrams(plain.model)
    assert not of_ngrams(planner.plan(*settings, planner.ModelChoice(attention=True)).model)

    def swiglu(spec: ModelSpec) -> ModelSpec:
        return apply("swiglu", spec)

    assert not of_ngrams(planner.plan(*settings, finished=swiglu).model)


def test_early_stopping_with_a_time_limit_waits_for_a_quarter_of_the_validations() -> None:
    """Validations are at least the share `SPACING` of the time apart."""
    for objective in (Translation(), LanguageModelling()):
        patience = planned(objective, 15_000, CPU, time=900.0).train.patience
        assert patience is not None
        assert 0.2 <= patience * SPACING <= 0.35
