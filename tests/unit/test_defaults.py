"""What is chosen: everything that was not said, nothing that was, and a reason for each choice."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from regard import defaults
from regard.catalogue import edited
from regard.data.batching import Batching, Buckets, Packing, Windows
from regard.data.objectives import Classification, LanguageModelling, Objective, Translation
from regard.data.prepare import Survey
from regard.models.base import ModelSpec, build, count
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import SentenceClassifier
from regard.presets import preset
from regard.training.optim import Adafactor, AdamW, Muon
from regard.training.schedule import Constant, Cosine, InverseSqrt, LinearDecay, WarmupStableDecay
from regard.training.spec import TrainSpec
from regard.variants import apply

OBJECTIVES: list[tuple[Objective, Batching, str]] = [
    (Translation(), Buckets(), "target"),
    (Translation(), Packing(length=128), "target"),
    (LanguageModelling(), Windows(), "target"),
    (LanguageModelling("lines"), Buckets(), "target"),
    (Classification(("a", "b")), Buckets(), "text"),
]


NOTHING_SAID = TrainSpec()


def survey(column: str, ids: int) -> Survey:
    return Survey(records=100, kept=100, ids={"source": 7, column: ids})


def chosen(
    objective: Objective,
    batching: Batching,
    column: str,
    ids: int,
    train: TrainSpec = NOTHING_SAID,
    on_cpu: bool = True,
) -> defaults.Chosen:
    return defaults.choose(objective, survey(column, ids), batching, train, on_cpu)


@pytest.mark.parametrize(("objective", "batching", "column"), OBJECTIVES)
@pytest.mark.parametrize("ids", [1, 700_000, 900_000_000])
def test_nothing_is_left_open(objective: Objective, batching: Batching, column: str, ids: int) -> None:
    found = chosen(objective, batching, column, ids, defaults.for_objective(objective))
    train: Any = found.train
    for value in (
        *(train.steps, train.optimizer.rate, train.schedule.warmup, train.validate_every, train.patience),
        found.batching.tokens,  # type: ignore[attr-defined]
    ):
        assert isinstance(value, int | float)
    assert 1 <= train.validate_every <= train.steps
    assert 1 <= train.schedule.warmup <= train.steps
    build(found.model, device="meta")
    for word in ("model:", "batches:", "steps:", "rate:", "warm-up:", "validation:", "early stop:"):
        assert sum(sentence.startswith(word) for sentence in found.why) == 1


@pytest.mark.parametrize(("objective", "batching", "column"), OBJECTIVES)
def test_larger_corpora_get_larger_models(objective: Objective, batching: Batching, column: str) -> None:
    found = [chosen(objective, batching, column, ids) for ids in (10_000, 10**6, 10**8, 10**12)]
    sizes = [count(one.model) for one in found]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    tokens = [one.batching.tokens for one in found]  # type: ignore[attr-defined]
    assert tokens == sorted(tokens)
    rates: list[Any] = [one.train.optimizer.rate for one in found]
    assert rates[-1] < rates[0]


def test_the_size_is_that_of_what_is_to_be_said() -> None:
    long_sources = Survey(ids={"source": 10**9, "target": 1000})
    found = defaults.choose(Translation(), long_sources, Buckets(), TrainSpec(), True)
    smallest = defaults.translation_sizes()[0]
    assert found.model == smallest.spec
    assert found.why[0] == f"model: {smallest.name}, for 1,000 tokens to learn from"


@pytest.mark.parametrize(
    ("objective", "sizes", "column"),
    [
        (Translation(), defaults.translation_sizes(), "target"),
        (LanguageModelling("lines"), defaults.language_model_sizes(), "target"),
        (Classification(("a", "b")), defaults.classification_sizes(), "text"),
    ],
)
def test_sizes_end_where_they_say(objective: Objective, sizes: list[defaults.Size], column: str) -> None:
    for size, larger in pairwise(sizes):
        assert chosen(objective, Buckets(), column, int(size.labels)).model == size.spec
        assert chosen(objective, Buckets(), column, int(size.labels) + 1).model == larger.spec
    assert sizes[-1].labels == float("inf")
    assert len({size.name for size in sizes}) == len(sizes)


GIVEN: list[tuple[str, Any]] = [
    ("steps", 77),
    ("optimizer", AdamW(rate=0.123, decay=0.5)),
    ("optimizer", Adafactor(rate=0.123)),
    ("optimizer", Muon(rate=0.02, rest=AdamW(rate=0.003))),
    ("schedule", InverseSqrt(0)),
    ("schedule", Constant(3)),
    ("schedule", WarmupStableDecay(5, decay=0.3)),
    ("validate_every", 5),
    ("patience", 0),
    ("patience", 3),
    ("save_every", 9),
    ("average", 4),
    ("clip", 0.5),
]


@pytest.mark.parametrize(("name", "value"), GIVEN)
def test_what_is_given_is_kept(name: str, value: Any) -> None:
    given = TrainSpec(**{name: value})
    found = chosen(Translation(), Buckets(), "target", 10**6, given).train
    assert getattr(found, name) == value
    open_fields = {"steps", "optimizer", "schedule", "validate_every", "patience"} - {name}
    for field in TrainSpec.__slots__:
        if field not in open_fields:
            assert getattr(found, field) == getattr(given, field), field
    assert None not in (found.steps, found.optimizer.rate, found.validate_every, found.patience)


@pytest.mark.parametrize("batching", [Buckets(500), Packing(500, 100), Windows(500, 50)])
def test_given_batches_are_kept(batching: Batching) -> None:
    objective = LanguageModelling() if isinstance(batching, Windows) else Translation()
    found = chosen(objective, batching, "target", 10**6)
    assert found.batching == batching
    assert not any(sentence.startswith("batches:") for sentence in found.why)


def test_batches_hold_at_least_a_row() -> None:
    found = chosen(LanguageModelling(), Windows(length=100_000), "target", 1000)
    assert found.batching == Windows(100_000, 100_000)


def test_settings_of_an_optimizer_are_kept_when_its_rate_is_chosen() -> None:
    given = TrainSpec(optimizer=AdamW(betas=(0.5, 0.6), decay=0.2), schedule=LinearDecay(floor=0.3))
    found = chosen(Translation(), Buckets(), "target", 10**6, given).train
    assert replace(found.optimizer, rate=None) == given.optimizer  # type: ignore[type-var]
    assert replace(found.schedule, warmup=None) == given.schedule  # type: ignore[type-var]


def test_the_rest_of_muon_has_the_rate_of_muon() -> None:
    for rate in (None, 0.02):
        found: Any = chosen(Translation(), Buckets(), "target", 10**6, TrainSpec(optimizer=Muon(rate=rate))).train
        assert found.optimizer.rest.rate == found.optimizer.rate == (rate or 5e-3)


def test_steps_follow_from_epochs() -> None:
    # 700,000 labels in batches of 4096, 70 times: 12,000 steps and a few; half as many with two batches a step.
    found = chosen(Translation(), Buckets(), "target", 700_000).train
    assert found.steps == 70 * 171
    assert found.validate_every == max(70 * 171 // 40, 171)
    halved = chosen(Translation(), Buckets(), "target", 700_000, TrainSpec(accumulate=2)).train
    assert halved.steps == 70 * 85
    few = chosen(Translation(), Buckets(), "target", 700_000, TrainSpec(steps=8)).train
    assert (few.steps, few.validate_every) == (8, 8)
    assert few.schedule == InverseSqrt(2)


def test_a_large_model_on_a_cpu_is_warned_of() -> None:
    for on_cpu, ids, warned in ((True, 10**8, True), (False, 10**8, False), (True, 10**5, False)):
        found = chosen(Translation(), Buckets(), "target", ids, on_cpu=on_cpu)
        assert any(sentence.startswith("warning:") for sentence in found.why) == warned


def test_the_usual_training_of_an_objective() -> None:
    assert defaults.for_objective(Translation()).schedule == InverseSqrt()
    assert defaults.for_objective(Translation()).average == 5
    for objective in (LanguageModelling(), Classification()):
        assert defaults.for_objective(objective).schedule == Cosine(floor=0.1)


def test_evaluation_is_padded() -> None:
    assert defaults.padded(Packing(700, 70)) == Buckets(700)


# -- a model that fits its data


def fitted(model: ModelSpec, objective: Objective, vocabulary: dict[str, int], **settings: Any) -> Any:
    return edited(model, defaults.fitted(model, objective, vocabulary, settings.pop("longest", 40), **settings))


def test_one_tokenizer_is_one_table() -> None:
    found = fitted(preset("transformer_tiny"), Translation(), {"source": 333, "target": 333})
    assert (found.vocab, found.target_vocab, found.sharing.source_target) == (333, None, True)


@pytest.mark.parametrize(("source", "target"), [(300, 400), (400, 300), (300, 300)])
def test_two_tokenizers_are_two_tables(source: int, target: int) -> None:
    found = fitted(preset("transformer_tiny"), Translation(), {"source": source, "target": target}, joint=False)
    assert (found.vocab, found.target_vocab or found.vocab, found.sharing.source_target) == (source, target, False)
    assert isinstance(found, EncoderDecoder)
    tables: Any = build(found, device="meta")
    assert tables.tables.get("source").weight.shape == (source, 128)
    assert tables.tables.get("target").weight.shape == (target, 128)
    assert tables.tables.get("output") is tables.tables.get("target")


def test_sizes_that_differ_are_two_tables_whatever_is_said() -> None:
    found = fitted(preset("transformer_tiny"), Translation(), {"source": 300, "target": 400})
    assert not found.sharing.source_target


def test_a_classifier_has_as_many_classes_as_labels() -> None:
    objective = Classification(("a", "b", "c"))
    chosen_model = chosen(objective, Buckets(), "text", 1000).model
    found = fitted(chosen_model, objective, {"text": 99})
    assert (found.vocab, found.task) == (99, SentenceClassifier(3, pool="mean", pooler=False))
    bert = fitted(preset("bert_base"), objective, {"text": 99})
    assert bert.task == SentenceClassifier(3)


def test_learned_positions_are_as_many_as_the_longest_text() -> None:
    assert fitted(preset("gpt2_small"), LanguageModelling(), {"target": 99}, longest=64).input.position.max_len == 64
    assert "input.position.max_len" not in defaults.fitted(
        preset("transformer_tiny"), Translation(), {"source": 9, "target": 9}, 64
    )


@pytest.mark.parametrize(
    ("width", "rate"), [(48, 5e-3), (128, 5e-3), (256, 2e-3), (512, 7e-4), (1024, 5e-4), (4096, 5e-4)]
)
def test_a_model_that_is_given_gets_the_rate_of_its_width(width: int, rate: float) -> None:
    small = survey("target", 1000)

    def found(given: defaults.Given) -> float | None:
        return defaults.choose(Translation(), small, Buckets(), TrainSpec(), True, given).train.optimizer.rate

    assert found(defaults.Given(width)) == rate
    assert found(defaults.Given(width, trained=True)) == pytest.approx(0.2 * rate)
    assert found(defaults.Given()) == 3e-3  # that of the model which is chosen


@pytest.mark.parametrize(
    ("labels", "width", "on_cpu", "tokens"),
    [
        (7_000_000, 512, False, 16384),  # Europarl's 250,000 pairs with base: as base is trained elsewhere
        (7_000_000, 512, True, 8192),  # a CPU would take minutes for a step
        (7_000_000, 1024, False, 32768),
        (7_000_000, 128, False, 8192),  # what suits the text
        (1_000_000, 512, False, 9216),  # 100 batches of an epoch are left
        (400_000, 512, False, 4096),
        (50_000_000, 256, False, 16384),
    ],
)
def test_a_model_that_is_given_gets_the_batches_of_its_width(
    labels: int, width: int, on_cpu: bool, tokens: int
) -> None:
    text = survey("target", labels)
    found = defaults.choose(Translation(), text, Buckets(), TrainSpec(), on_cpu, defaults.Given(width))
    assert found.batching == Buckets(tokens)
    assert f"batches: {tokens:,} tokens" in found.why
    asked = defaults.choose(Translation(), text, Buckets(512), TrainSpec(), on_cpu, defaults.Given(width))
    assert asked.batching == Buckets(512)


def test_a_model_that_is_given_is_not_warned_of() -> None:
    large = survey("target", 10**8)
    assert any("GPU" in why for why in defaults.choose(Translation(), large, Buckets(), TrainSpec(), True).why)
    given = defaults.choose(Translation(), large, Buckets(), TrainSpec(), True, defaults.Given(128))
    assert not any("GPU" in why for why in given.why)


def test_rows_are_packed_where_texts_may_share_one() -> None:
    base = preset("transformer_base")
    assert defaults.packs(base, Translation())
    assert defaults.packs(base, LanguageModelling("lines"))
    assert not defaults.packs(base, LanguageModelling())
    assert not defaults.packs(base, Classification())
    assert not defaults.packs(apply("funnel", base), Translation())
    assert not defaults.packs(preset("lstm_lm"), LanguageModelling("lines"))


@pytest.mark.parametrize(("longest", "length"), [(20, 128), (128, 128), (129, 136), (250, 256)])
def test_packed_rows_hold_the_longest_text(longest: int, length: int) -> None:
    assert defaults.packed(Buckets(4096), longest) == Packing(4096, length)
    assert defaults.packed(Buckets(100), longest) == Packing(length, length)
