"""Settings that are chosen from the text: tokenizer, length limit, number of held-out examples."""

import numpy as np
import pytest

from regard.data.choices import choose_limit, choose_tokenizer, held_out
from regard.data.objectives import Classification, LanguageModelling, Objective, Summarization, Translation
from regard.data.token_store import Table
from regard.data.tokenizer import BPE, Bytes, Characters, Tokenizer, train


@pytest.mark.parametrize(
    ("records", "expected"), [(2, 1), (50, 5), (1_000, 100), (5_452, 500), (15_000, 500), (40_000, 800), (10**7, 1000)]
)
def test_held_out_set_has_a_floor_and_a_ceiling(records: int, expected: int) -> None:
    assert held_out(records) == expected


WORDS = [("go V;PST", "went"), ("see V;PST", "saw"), ("be V;PST", "was"), ("do V;PST", "did"), ("eat V;3", "eats")]
LABELS = [(f"sentence number {n}", "good" if n % 2 else "bad") for n in range(40)]
SENTENCES = [("Guten Tag", "Good day to you"), ("Danke", "Thank you very much"), ("Ja", "Yes")]
CHINESE = [(f"sentence {n}", "我們明天" + chr(0x4E00 + n) + "去公園") for n in range(40)]


@pytest.mark.parametrize(
    ("objective", "sample", "expected"),
    [
        (Translation(), WORDS, Characters),
        (Translation(), LABELS, BPE),
        (Translation(), SENTENCES, BPE),
        (Translation(), CHINESE, BPE),  # a sentence without spaces is no word
        (LanguageModelling(), [("one",), ("two",)], BPE),
    ],
)
def test_spelling_tasks_use_characters(objective: Objective, sample: list[tuple[str, ...]], expected: type) -> None:
    choice = choose_tokenizer(objective, sample)
    assert isinstance(choice.tokenizer, expected)
    assert choice.why.startswith("tokenizer: ")


BYTES = train(Bytes(), [])


def tokenizers(objective: Objective) -> dict[str, Tokenizer]:
    return dict.fromkeys(objective.encoded, BYTES)


@pytest.mark.parametrize(
    ("source", "target", "room", "max_len", "long"),
    [
        (40, 40, 1024, 256, "drop"),
        (300, 280, 1024, 320, "drop"),
        (3000, 2800, 1024, 1024, "drop"),
        (3000, 2800, 512, 512, "drop"),
        (400, 20, 1024, 448, "cut"),
        (3000, 20, 1024, 512, "cut"),  # the beginning matters most
        (3000, 20, 300, 300, "cut"),
    ],
)
def test_long_sources_are_cut_for_summaries_alone(source: int, target: int, room: int, max_len: int, long: str) -> None:
    sample = [("s" * source, "t" * target)] * 10
    limit = choose_limit(Translation(), sample, tokenizers(Translation()), room)
    assert (limit.max_len, limit.long) == (max_len, long)
    assert f"{limit.max_len} tokens" in limit.why


def test_texts_of_a_classifier_are_cut() -> None:
    objective = Classification(("a", "b"))
    limit = choose_limit(objective, [("a", "t" * 2000)] * 5, tokenizers(objective), 1024)
    assert (limit.max_len, limit.long) == (1024, "cut")


def test_streams_get_the_smallest_limit() -> None:
    assert choose_limit(LanguageModelling(), [("t" * 2000,)], tokenizers(LanguageModelling()), 1024).max_len == 256


@pytest.mark.parametrize("cuts", [False, True])
def test_a_cut_source_keeps_its_beginning_and_its_end_token(cuts: bool) -> None:
    end = BYTES.eos
    table = Table.of(
        source=[[5, 6, end], [5, 6, 7, 8, 9, end], [9, 8, 7, 6, end], [5, end]],
        target=[[1, 4, 2], [1, 4, 2], [1, 4, 4, 4, 4, 4, 2], [1, 4, 2]],
    )
    limited = Translation().limit(table, 3, cut=cuts)
    kept = [True, cuts, False, True]
    assert limited.kept.tolist() == kept
    sources = [limited.table["source"][row].tolist() for row in range(limited.table.rows)]
    assert sources == [[5, 6, end], *([[5, 6, 7, end]] if cuts else []), [5, end]]
    assert limited.cut == int(cuts)
    assert np.array_equal(limited.table["target"].lengths, [3] * sum(kept))


def test_long_documents_are_cut_even_if_their_summaries_are_not_short() -> None:
    sample = [("d" * 600, "s" * 500)] * 5
    for objective, long in ((Summarization(), "cut"), (Translation(), "drop")):
        limit = choose_limit(objective, sample, tokenizers(objective), 1024)
        assert (limit.long, limit.max_len) == (long, 512 if long == "cut" else 640)
    limit = choose_limit(Summarization(), sample, tokenizers(Summarization()), 1024, "extract")
    assert limit.max_len == 512
    effect = (
        "longer sources are truncated after their paragraphs are ranked by tf-idf for the words of the first paragraph"
    )
    assert limit.why.endswith(effect)
