"""The extractive stage: paragraphs of a document are ranked by tf-idf against its title."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from regard.data.extraction import best_first, paragraphs, scores, sentences, shortened
from regard.data.objectives import Summarization, Translation
from regard.data.scripts import words
from regard.data.tokenizer import Words, train

TITLE = "red fox"
PARAGRAPHS = ["a blue bird sings", "the fox is red , the fox is quick", "red paint and red wine", "a fox in a box"]


def by_formula(title: str, documents: Sequence[str]) -> list[float]:
    """Sum over the distinct title words of (count in the document) * log(documents / documents with the word)."""
    expected = []
    for document in documents:
        total = 0.0
        for word in sorted(set(title.split())):
            containing = sum(word in other.split() for other in documents)
            total += document.split().count(word) * math.log(len(documents) / containing) if containing else 0.0
        expected.append(total)
    return expected


def test_scores_equal_the_formula() -> None:
    assert scores(TITLE, PARAGRAPHS) == pytest.approx(by_formula(TITLE, PARAGRAPHS))
    assert scores(TITLE, PARAGRAPHS)[0] == 0
    assert scores(f"{TITLE} red absent", PARAGRAPHS) == pytest.approx(by_formula(TITLE, PARAGRAPHS))


def test_a_word_of_every_paragraph_and_an_absent_word_have_no_weight() -> None:
    assert scores("the unicorn", ["the cat", "the the dog"]) == [0, 0]


def test_upper_case_and_punctuation_do_not_matter() -> None:
    assert scores("Red?", ["RED!", "blue", "(red), red"]) == pytest.approx([math.log(1.5), 0, 2 * math.log(1.5)])


def test_in_scripts_without_spaces_every_character_is_a_word() -> None:
    assert scores("東京", ["東京は大きい", "大阪も大きい"]) == pytest.approx([2 * math.log(2), 0])


def test_words_include_their_combining_marks() -> None:
    hindi = "\u0939\u093f\u0928\u094d\u0926\u0940"  # the word Hindi, with two vowel signs and a virama
    assert words(f"{hindi} caf\u00e9 Cafe\u0301!") == [hindi, "caf\u00e9", "caf\u00e9"]
    thai = ["\u0e2a", "\u0e27\u0e31", "\u0e2a", "\u0e14\u0e35"]
    assert words("".join(thai)) == thai
    assert words("東京・A1_b \u0301 …") == ["東", "京", "a1_b"]


def test_paragraphs_are_lines_or_the_sentences_of_a_single_line() -> None:
    assert paragraphs("one. two\n\n  three four  \n") == ["one. two", "three four"]
    assert paragraphs('He said: "go!" She went. "Where?" 3.5 km (or so.) there') == [
        'He said: "go!"',
        "She went.",
        '"Where?"',
        "3.5 km (or so.)",
        "there",
    ]
    assert sentences("\u0915 \u0916\u0964 \u0917\u0964") == ["\u0915 \u0916\u0964", "\u0917\u0964"]  # danda, in Hindi
    assert sentences("\u0627\u061f \u0628\u06d4 \u062a") == ["\u0627\u061f", "\u0628\u06d4", "\u062a"]  # Arabic, Urdu
    assert sentences("行った。どこ？「家。」") == ["行った。", "どこ？", "「家。」"]  # noqa: RUF001
    assert paragraphs(" \n ") == []


def test_best_paragraphs_follow_the_title_and_equal_ones_keep_their_order() -> None:
    fox, paint, box, bird = PARAGRAPHS[1], PARAGRAPHS[2], PARAGRAPHS[3], PARAGRAPHS[0]
    document = "\n".join([TITLE, bird, fox, "neither", paint, box])
    # log(5/2) is the weight of both words: the fox paragraph has three of them, paint two, box one.
    assert best_first(document).split("\n") == [TITLE, fox, paint, box, bird, "neither"]
    assert best_first("A cat. One dog. Two cats and a cat. A bird") == "A cat. Two cats and a cat. A bird One dog."
    assert best_first("") == ""


@pytest.mark.parametrize("long", ["extract", "cut", "drop"])
def test_only_long_sources_are_reordered_and_no_source_exceeds_the_limit(long: Any) -> None:
    long_one = "fox\n" + "\n".join(["a b c d", "the fox sat", "e f g h"])
    short = "fox\nx y\nfox z"
    records = [(long_one, "s"), (short, "s")]
    tokenizer = train(Words(), [text for record in records * 2 for text in record])
    for objective in (Summarization(), Translation()):
        limited = shortened(objective, records, dict.fromkeys(("source", "target"), tokenizer), 9, long)
        texts = [tokenizer.decode(row.tolist()[:-1]) for row in limited.table["source"]]
        expected = {
            "extract": "fox\nthe fox sat\na b c",
            "cut": "fox\na b c d\nthe fox",
        }
        assert texts == ([] if long == "drop" else [expected[long]]) + [short]
        assert limited.kept.tolist() == [long != "drop", True]
        assert limited.cut == (long != "drop")
        assert max(limited.table["source"].lengths) <= 9 + 1


def test_scores_equal_scikit_learn() -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text")
    rng, words = random.Random(4), [*"abcdefgh", "ab", "über"]
    documents = [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(30)]
    title, vectorizer = "a über c a", text.CountVectorizer(token_pattern=r"\w+")
    counts = vectorizer.fit_transform(documents)
    idf = text.TfidfTransformer(norm=None, smooth_idf=False).fit(counts).idf_ - 1  # scikit-learn adds 1
    in_title = vectorizer.transform([title]).toarray()[0] > 0
    assert scores(title, documents) == pytest.approx((counts.toarray() * idf * in_title).sum(1))
