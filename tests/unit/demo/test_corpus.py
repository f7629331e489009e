"""The demo's corpus: pairs are correct, a source has one translation, and training contains no held-out value."""

import datetime
import os
import random
import re
import subprocess
import sys
from collections import Counter

import pytest

from regard.demo import languages
from regard.demo.corpus import Corpus, Example, draw_integer, draw_money, generate, held_out_value
from regard.demo.languages import English, German, Money, clean, load
from regard.errors import SpecError

ENGLISH, GERMAN = English(), German()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return generate(10_000, held_out=800)


@pytest.fixture(scope="module")
def other() -> Corpus:
    return generate(3000, seed=1, held_out=300)


def test_sizes_kinds_and_shares(corpus: Corpus) -> None:
    assert (len(corpus.train), len(corpus.test)) == (10_000, 800)
    for part in (corpus.train, corpus.test):
        kinds = Counter(example.kind for example in part)
        assert set(kinds) == {"integer", "ordinal", "date", "time", "money"}
        assert kinds["integer"] / len(part) == pytest.approx(0.35, abs=0.05)
        spoken = sum(not re.search(r"\d", example.source) for example in part) / len(part)
        # There are few held-out minutes, so the test set cannot contain as many distinct times.
        assert spoken == pytest.approx(2 / 3, abs=0.02 if part is corpus.train else 0.06)


def test_test_pairs_are_distinct_and_cover_every_kind() -> None:
    assert len({example.source for example in generate(1, held_out=1200).test}) == 1200
    for seed in range(3):
        assert len({example.kind for example in generate(1, seed=seed, held_out=5).test}) == 5
    assert len(generate(1, held_out=1).test) == 1


def numbers_in(text: str) -> set[int]:
    """Return the whole numbers in a text that are written in digits, with or without separators."""
    return {int(digits.replace(",", "")) for digits in re.findall(r"\d[\d,]*", text)}


@pytest.mark.parametrize("name", ["corpus", "other"])
def test_training_text_contains_no_form_of_a_held_out_value(name: str, request: pytest.FixtureRequest) -> None:
    corpus: Corpus = request.getfixturevalue(name)
    train = {(example.kind, example.value) for example in corpus.train}
    written = set().union(*(numbers_in(e.source) for e in corpus.train if e.kind in ("integer", "ordinal", "money")))
    spoken = {source for example in corpus.train for source in (example.source, spoken_number(example))}
    amounts = {example.value.split()[0] for example in corpus.train if example.kind == "money"}
    texts = {text for example in corpus.train for text in (example.source, example.target)}
    for example in corpus.test:
        assert (example.kind, example.value) not in train
        assert example.source not in texts
        if example.kind in ("integer", "ordinal"):
            number = int(example.value)
            assert number >= 100
            assert number not in written
            assert not {ENGLISH.cardinal(number), ENGLISH.ordinal(number)} & spoken
            assert not {GERMAN.cardinal(number), GERMAN.ordinal(number)} & texts
        elif example.kind == "money":
            amount = example.value.split()[0]
            assert amount not in amounts, "an amount is held out in every currency"
            if amount.endswith(".00"):
                assert int(amount[:-3]) not in written
                assert ENGLISH.cardinal(int(amount[:-3])) not in spoken


def spoken_number(example: Example) -> str:
    """Return the number in words before the currency."""
    return re.split(r" (?:dollar|euro|pound)s?\b", example.source)[0]


def test_training_text_contains_no_form_of_a_held_out_date_or_time(corpus: Corpus) -> None:
    texts = {text for example in corpus.train for text in (example.source, example.target)}
    forms = {
        "date": (
            ENGLISH.short_date, ENGLISH.medium_date, ENGLISH.long_date, ENGLISH.full_date, ENGLISH.spoken_date,
            ENGLISH.spoken_full_date, GERMAN.short_date, GERMAN.long_date, GERMAN.full_date, GERMAN.spoken_date,
        ),
        "time": (
            ENGLISH.clock, ENGLISH.spoken_clock, ENGLISH.colloquial_clock, GERMAN.clock, GERMAN.spoken_clock,
        ),
    }  # fmt: skip
    parsers = {"date": datetime.date.fromisoformat, "time": datetime.time.fromisoformat}
    checked = Counter()
    for example in corpus.test:
        for form in forms.get(example.kind, ()):
            assert form(parsers[example.kind](example.value)) not in texts
            checked[example.kind] += 1
    assert checked["date"] > 1000
    assert checked["time"] > 300


def test_training_covers_all_small_numbers_months_and_hours(corpus: Corpus) -> None:
    values = {example.value for example in corpus.train if example.kind in ("integer", "ordinal")}
    assert len({str(number) for number in range(100)} & values) > 95
    times = {example.value for example in corpus.train if example.kind == "time"}
    assert len(times) > 900


def test_a_source_has_one_translation(corpus: Corpus) -> None:
    known: dict[str, str] = {}
    for example in (*corpus.train, *corpus.test):
        assert known.setdefault(example.source, example.target) == example.target, example
    assert any(example.source.startswith("May ") for example in corpus.train)


def test_every_minute_has_its_own_words() -> None:
    minutes = [datetime.time(hour, minute) for hour in range(24) for minute in range(60)]
    for form in (ENGLISH.clock, ENGLISH.spoken_clock, ENGLISH.colloquial_clock, GERMAN.clock, GERMAN.spoken_clock):
        assert len({form(minute) for minute in minutes}) == 1440


def test_corpus_is_the_same_in_every_process(corpus: Corpus) -> None:
    code = (
        "from regard.demo.corpus import generate; import hashlib\n"
        "corpus = generate(300, 'de', seed=3, held_out=50)\n"
        "print(hashlib.sha256(repr(corpus).encode()).hexdigest())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(runs) == 1
    assert generate(500, held_out=800) == Corpus(corpus.train[:500], corpus.test), (
        "a larger corpus begins with the pairs of a smaller one"
    )
    assert generate(100, seed=1).train != generate(100).train


GERMAN_ONES = [
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf",
    "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
]  # fmt: skip
GERMAN_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def german(number: int, last: bool = True) -> str:
    """Return a number in German words: ones before tens, and "ein" instead of "eins" before other words."""
    if number >= 1000:
        return german(number // 1000, False) + "tausend" + (german(number % 1000, last) if number % 1000 else "")
    if number >= 100:
        return german(number // 100, False) + "hundert" + (german(number % 100, last) if number % 100 else "")
    if number < 20:
        return GERMAN_ONES[number] if last or number != 1 else "ein"
    one, ten = number % 10, GERMAN_TENS[number // 10 - 2]
    return f"{german(one, False)}und{ten}" if one else ten


def test_german_numbers_by_the_rules_of_german() -> None:
    rng = random.Random(0)
    for number in [*range(2100), 101_000, 201_001, 999_999, *(rng.randrange(1_000_000) for _ in range(2000))]:
        assert GERMAN.cardinal(number) == german(number)


def test_german_ordinals() -> None:
    irregular = {"eins": "erste", "drei": "dritte", "sieben": "siebte", "acht": "achte"}
    for number in range(1, 10_000):
        last = number % 100
        words = german(number)
        if 0 < last < 20:
            ending = german(last)
            expected = words.removesuffix(ending) + irregular.get(ending, ending + "te")  # codespell:ignore te
        else:
            expected = words + "ste"
        expected = {"einhundertste": "hundertste", "eintausendste": "tausendste"}.get(expected, expected)
        assert GERMAN.ordinal(number) == expected


DAY = datetime.date(2021, 3, 5)


@pytest.mark.parametrize(
    ("source", "target", "english", "german"),
    [
        (ENGLISH.cardinal, GERMAN.cardinal, "twenty-one", "einundzwanzig"),
        (ENGLISH.ordinal, GERMAN.ordinal, "twenty-first", "einundzwanzigste"),
        (ENGLISH.ordinal_digits, GERMAN.ordinal_digits, "21st", "21."),
        (ENGLISH.digits, GERMAN.digits, "21", "21"),
    ],
)
def test_number_in_every_form(source: object, target: object, english: str, german: str) -> None:
    assert callable(source)
    assert callable(target)
    assert (source(21), target(21)) == (english, german)


def test_digits_are_grouped() -> None:
    assert (ENGLISH.digits(123_456), GERMAN.digits(123_456)) == ("123,456", "123.456")
    assert load("fr").digits(123_456) == "123 456"


def test_dates() -> None:
    assert (ENGLISH.short_date(DAY), GERMAN.short_date(DAY)) == ("03/05/2021", "05.03.2021")
    assert (ENGLISH.medium_date(DAY), GERMAN.medium_date(DAY)) == ("Mar 5, 2021", "05.03.2021")
    assert (ENGLISH.long_date(DAY), GERMAN.long_date(DAY)) == ("March 5, 2021", "5. März 2021")
    assert (ENGLISH.full_date(DAY), GERMAN.full_date(DAY)) == ("Friday, March 5, 2021", "Freitag, 5. März 2021")
    assert ENGLISH.spoken_date(DAY) == "the fifth of March, twenty twenty-one"
    assert GERMAN.spoken_date(DAY) == "der fünfte März zweitausendeinundzwanzig"
    assert GERMAN.spoken_date(DAY.replace(1901, 5, 1)) == "der erste Mai neunzehnhunderteins"
    assert ENGLISH.spoken_full_date(DAY) == "Friday, March fifth, twenty twenty-one"
    assert load("es").short_date(DAY) == "5/3/2021", "all four digits of the year, where Babel has two"
    assert load("fr").spoken_date(DAY) == "5 mars 2021"


@pytest.mark.parametrize(
    ("time", "clock", "spoken", "colloquial", "german", "german_words"),
    [
        ("14:30", "2:30 PM", "two thirty p.m.", "half past two in the afternoon", "14:30 Uhr", "vierzehn Uhr dreißig"),
        ("00:00", "12:00 AM", "twelve a.m.", "midnight", "00:00 Uhr", "null Uhr"),
        ("12:00", "12:00 PM", "twelve p.m.", "noon", "12:00 Uhr", "zwölf Uhr"),
        ("01:01", "1:01 AM", "one oh one a.m.", "one minute past one in the morning", "01:01 Uhr", "ein Uhr eins"),
        ("21:45", "9:45 PM", "nine forty-five p.m.", "quarter to ten at night", "21:45 Uhr",
         "einundzwanzig Uhr fünfundvierzig"),
        ("00:15", "12:15 AM", "twelve fifteen a.m.", "quarter past twelve at night", "00:15 Uhr", "null Uhr fünfzehn"),
        ("12:37", "12:37 PM", "twelve thirty-seven p.m.", "twenty-three minutes to one in the afternoon",
         "12:37 Uhr", "zwölf Uhr siebenunddreißig"),
        ("20:05", "8:05 PM", "eight oh five p.m.", "five past eight in the evening", "20:05 Uhr", "zwanzig Uhr fünf"),
        ("07:00", "7:00 AM", "seven a.m.", "seven o'clock in the morning", "07:00 Uhr", "sieben Uhr"),
    ],
)  # fmt: skip
def test_times(time: str, clock: str, spoken: str, colloquial: str, german: str, german_words: str) -> None:
    value = datetime.time.fromisoformat(time)
    assert (ENGLISH.clock(value), ENGLISH.spoken_clock(value)) == (clock, spoken)
    assert ENGLISH.colloquial_clock(value) == colloquial
    assert (GERMAN.clock(value), GERMAN.spoken_clock(value)) == (german, german_words)
    assert load("it").clock(value) == load("it").spoken_clock(value) == time


@pytest.mark.parametrize(
    ("money", "written", "german", "spoken", "german_words"),
    [
        (Money(123_456, "EUR"), "€1,234.56", "1.234,56 €",
         "one thousand, two hundred and thirty-four euros and fifty-six cents",
         "eintausendzweihundertvierunddreißig Euro und sechsundfünfzig Cent"),
        (Money(101, "USD"), "$1.01", "1,01 $", "one dollar and one cent", "ein Dollar und ein Cent"),
        (Money(10_100, "GBP"), "£101.00", "101,00 £", "one hundred and one pounds sterling", "einhundertein Pfund"),
        (Money(201, "GBP"), "£2.01", "2,01 £", "two pounds sterling and one penny", "zwei Pfund und ein Penny"),
        (Money(100, "EUR"), "€1.00", "1,00 €", "one euro", "ein Euro"),
    ],
)  # fmt: skip
def test_money(money: Money, written: str, german: str, spoken: str, german_words: str) -> None:
    assert (ENGLISH.money(money), GERMAN.money(money)) == (written, german)
    assert (ENGLISH.spoken_money(money), GERMAN.spoken_money(money)) == (spoken, german_words)


def test_money_in_currencies_without_words() -> None:
    assert (ENGLISH.money(Money(123_450, "CHF")), GERMAN.money(Money(123_450, "CHF"))) == (
        "CHF 1,234.50",
        "1.234,50 CHF",
    )
    assert (ENGLISH.money(Money(123_400, "JPY")), GERMAN.money(Money(123_400, "JPY"))) == ("¥1,234", "1.234 ¥")
    drawn = [draw_money(random.Random(seed), ["JPY"]) for seed in range(50)]
    assert all(money.value.hundredths % 100 == 0 for money in drawn)


def test_facts_of_a_value() -> None:
    draws = [draw_integer(random.Random(seed)) for seed in range(3000)]
    for drawn in draws:
        free = drawn.value < 100 or 1900 <= drawn.value < 2100
        assert drawn.facts == (() if free else (f"number {drawn.value}",))
        assert drawn.value < 1_000_000
    assert {len(drawn.text) for drawn in draws} == {1, 2, 3, 4, 5, 6}
    for drawn in (draw_money(random.Random(seed), ["EUR"]) for seed in range(500)):
        whole, cents = divmod(drawn.value.hundredths, 100)
        assert 1 <= whole < 10_000
        expected = [f"amount {drawn.value.hundredths}"] if cents else []
        if whole >= 100 and not 1900 <= whole < 2100:
            expected.append(f"number {whole}")
        assert drawn.facts == tuple(expected)
    assert sum(held_out_value(f"number {n}", 0) for n in range(16_000)) == pytest.approx(1000, abs=100)


@pytest.mark.parametrize("language", ["fr", "es", "it", "nl", "pl", "ru", "tr", "pt_BR", "ja", "ar", "hu"])
def test_other_languages(language: str) -> None:
    corpus = generate(1500, language, held_out=100)
    assert {example.kind for example in corpus.test} == {"integer", "date", "time", "money"}
    known: dict[str, str] = {}
    for example in (*corpus.train, *corpus.test):
        assert known.setdefault(example.source, example.target) == example.target, example
        assert example.target == clean(example.target) != ""
        spoken = example.kind == "integer" and not re.search(r"\d", example.source)
        assert not (spoken and re.search(r"\d", example.target)), example
    values = {(example.kind, example.value) for example in corpus.train}
    assert not values & {(example.kind, example.value) for example in corpus.test}


def test_faster_converters_agree_with_num2words() -> None:
    from num2words import num2words

    for language in ("fr", "nl", "da", "fi"):
        spoken = load(language)
        for number in (0, 1, 16, 21, 71, 80, 99, 100, 101, 1000, 1999, 21_000, 80_000, 100_001, 999_999):
            assert spoken.cardinal(number) == clean(num2words(number, lang=language))
    for number in (101, 12_345, 999_999):
        assert ENGLISH.cardinal(number) == num2words(number)


def test_currencies_without_words_in_a_language_are_left_out() -> None:
    assert load("hu").spoken_currencies() == ()
    assert load("tr").spoken_currencies() == ()
    assert load("fr").spoken_currencies() == ("EUR", "USD")
    assert GERMAN.spoken_currencies() == ENGLISH.spoken_currencies() == ("EUR", "USD", "GBP")


@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        ("de_", "num2words and Babel do not both support 'de_'; did you mean 'de'?"),
        ("en", "num2words and Babel do not both support 'en'; "),
        ("kz", "num2words and Babel do not both support 'kz'; "),
        ("???", "known names: 'am', 'ar', 'az'"),
        ("am", "num2words cannot write numbers in 'am'; choose another language"),
    ],
)
def test_unknown_language_is_refused(language: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=r"^language: ") as caught:
        generate(1, language)
    assert sentence in str(caught.value)


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(SpecError, match="count: must be at least 1, not 0"):
        generate(0)
    for size in (0, 20_001):
        with pytest.raises(SpecError, match=f"held_out: must be from 1 to 20000, not {size}"):
            generate(1, held_out=size)


def test_missing_extra_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(languages, "import_module", absent)
    with pytest.raises(SpecError) as caught:
        generate(1)
    assert str(caught.value) == "the demo's corpus needs babel and num2words: pip install 'regard[demo]'"
