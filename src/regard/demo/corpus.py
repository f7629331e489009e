"""The demo's corpus: numbers, dates, clock times and amounts of money in English and in another language.

num2words writes the values in words, and Babel writes them in digits. Values are divided into training and test values
before they are written, so that the training text contains no form of a held-out value.
"""

import datetime
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from regard.demo.languages import English, German, Language, Money, load
from regard.errors import SpecError

HELD_OUT = 16  # one value in 16
YEARS = range(1900, 2100)
DAYS = (datetime.date(YEARS.stop, 1, 1) - datetime.date(YEARS.start, 1, 1)).days
CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY")
MOST_HELD_OUT = 20_000


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence pair, the value that both sentences express (such as 4711 or 1234.56 USD), and the kind of value."""

    kind: str
    value: str
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training pairs, and test pairs whose values occur in no training pair."""

    train: tuple[Example, ...]
    test: tuple[Example, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random value, and its facts: what a sentence pair reveals about the value, such as the whole dollars."""

    value: Any
    text: str
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write values of one kind in both languages. `share` is the fraction of the corpus in this form."""

    kind: str
    share: float
    draw: Callable[[random.Random], Drawn]
    source: Callable[[Any], str]
    target: Callable[[Any], str]


def generate(count: int, language: str = "de", seed: int = 0, held_out: int = 1000) -> Corpus:
    """Return `count` training pairs and `held_out` distinct test pairs, the same on every machine.

    A larger `count` only appends training pairs.
    """
    if count < 1:
        raise SpecError("count", f"must be at least 1, not {count}")
    if not 1 <= held_out <= MOST_HELD_OUT:
        raise SpecError("held_out", f"must be from 1 to {MOST_HELD_OUT}, not {held_out}")
    forms = _forms(English(), load(language))
    return Corpus(_train(forms, count, seed), _test(forms, held_out, seed))


def _train(forms: Sequence[Form], count: int, seed: int) -> tuple[Example, ...]:
    """Return training pairs that reveal no held-out value. Pairs with small numbers may occur more than once."""
    rng, shares = random.Random(f"train {seed}"), [form.share for form in forms]

    def allowed(drawn: Drawn) -> bool:
        return not any(held_out_value(fact, seed) for fact in drawn.facts)

    return tuple(_example(form, rng, allowed) for _ in range(count) for form in rng.choices(forms, shares))


def _test(forms: Sequence[Form], count: int, seed: int) -> tuple[Example, ...]:
    """Return distinct test pairs: at least one for every kind of value, the others in proportion to `Form.share`."""
    rng, shares = random.Random(f"test {seed}"), [form.share for form in forms]

    def allowed(drawn: Drawn) -> bool:
        return bool(drawn.facts) and held_out_value(drawn.facts[0], seed)

    queue = list({form.kind: form for form in forms}.values())[:count]
    by_source: dict[str, Example] = {}
    while len(by_source) < count:
        form = queue.pop() if queue else rng.choices(forms, shares)[0]
        example = _example(form, rng, allowed)
        by_source.setdefault(example.source, example)
    examples = list(by_source.values())
    rng.shuffle(examples)
    return tuple(examples)


def _example(form: Form, rng: random.Random, allowed: Callable[[Drawn], bool]) -> Example:
    """Return an example for a random value, which is drawn again until `allowed` accepts it."""
    while not allowed(drawn := form.draw(rng)):
        pass
    return Example(form.kind, drawn.text, form.source(drawn.value), form.target(drawn.value))


def held_out_value(fact: str, seed: int) -> bool:
    """Return True if a fact belongs to the test set, as determined by a hash of the fact and the seed."""
    digest = hashlib.blake2b(f"{seed} {fact}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % HELD_OUT == 0


def number_facts(number: int) -> tuple[str, ...]:
    """Return the facts of a number: the number itself, if it can be held out.

    Numbers below 100 and years cannot be held out, because other numbers and dates contain them.
    """
    return () if number < 100 or number in YEARS else (f"number {number}",)


def draw_number(rng: random.Random, digits: int) -> Drawn:
    """Draw a whole number with 1 to `digits` digits. Longer numbers are more frequent."""
    length = max(rng.randint(1, digits), rng.randint(1, digits))
    number = rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)
    return Drawn(number, str(number), number_facts(number))


draw_integer = partial(draw_number, digits=6)


def draw_ordinal(rng: random.Random) -> Drawn:
    """Draw a number for an ordinal, from 1 to 9,999."""
    while not (drawn := draw_number(rng, 4)).value:
        pass
    return drawn


def draw_date(rng: random.Random) -> Drawn:
    """Draw a date in the years 1900 to 2099."""
    day = datetime.date(YEARS.start, 1, 1) + datetime.timedelta(rng.randrange(DAYS))
    return Drawn(day, day.isoformat(), (f"date {day}",))


def draw_short_month(rng: random.Random) -> Drawn:
    """Draw a date in any month except May, whose short and long names are equal."""
    while (drawn := draw_date(rng)).value.month == 5:
        pass
    return drawn


def draw_time(rng: random.Random) -> Drawn:
    """Draw a clock time in hours and minutes."""
    time = datetime.time(rng.randrange(24), rng.randrange(60))
    return Drawn(time, f"{time:%H:%M}", (f"time {time}",))


def draw_money(rng: random.Random, currencies: Sequence[str]) -> Drawn:
    """Draw an amount of money from 1.00 to 9,999.99. Yen and a quarter of the other amounts have no cents."""
    whole = max(1, draw_number(rng, 4).value)
    currency = rng.choice(currencies)
    cents = 0 if currency == "JPY" or rng.random() < 0.25 else rng.randrange(1, 100)
    money = Money(100 * whole + cents, currency)
    # An amount is held out in every currency. An amount without cents reveals only its whole number.
    facts = (*((f"amount {money.hundredths}",) if cents else ()), *number_facts(whole))
    return Drawn(money, f"{money.amount:.2f} {currency}", facts)


def _forms(english: English, other: Language) -> list[Form]:
    """Return all forms that both languages support. In two thirds of the corpus, the English value is in words.

    No two forms produce the same English text, so that a source has one translation.
    """
    currencies = [currency for currency in other.spoken_currencies() if currency in english.spoken_currencies()]
    forms = [
        Form("integer", 0.28, draw_integer, english.cardinal, other.cardinal),
        Form("integer", 0.07, draw_integer, english.digits, other.digits),
        Form("date", 0.05, draw_date, english.spoken_date, other.spoken_date),
        Form("date", 0.05, draw_date, english.spoken_full_date, other.full_date),
        Form("date", 0.03, draw_date, english.full_date, other.full_date),
        Form("date", 0.03, draw_date, english.long_date, other.long_date),
        Form("date", 0.03, draw_short_month, english.medium_date, other.medium_date),
        Form("date", 0.05, draw_date, english.short_date, other.short_date),
        Form("time", 0.06, draw_time, english.spoken_clock, other.spoken_clock),
        Form("time", 0.05, draw_time, english.colloquial_clock, other.clock),
        Form("time", 0.06, draw_time, english.clock, other.clock),
        Form("money", 0.05, partial(draw_money, currencies=CURRENCIES), english.money, other.money),
    ]
    if currencies:
        draw = partial(draw_money, currencies=currencies)
        forms.append(Form("money", 0.12, draw, english.spoken_money, other.spoken_money))
    if isinstance(other, German):
        forms.append(Form("ordinal", 0.05, draw_ordinal, english.ordinal, other.ordinal))
        forms.append(Form("ordinal", 0.02, draw_ordinal, english.ordinal_digits, other.ordinal_digits))
    return forms
