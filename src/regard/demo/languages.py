"""Numbers, dates, clock times and money in a language: in words by num2words, in digits by Babel."""

import datetime
import re
from copy import copy
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from types import ModuleType
from typing import Any

from regard.errors import SpecError, nearest


@dataclass(frozen=True, slots=True)
class Money:
    """An amount in hundredths of a currency."""

    hundredths: int
    currency: str

    @property
    def amount(self) -> Decimal:
        """In units of the currency."""
        return Decimal(self.hundredths) / 100


class Language:
    """A language that both packages support.

    Dates and clock times are in digits, as the packages have no words for them. There are no ordinals: they inflect,
    and num2words gets them wrong in many languages.
    """

    currencies: tuple[str, ...] = (
        "EUR",
        "USD",
    )  # in words; pounds have the wrong gender in some languages

    def __init__(self, code: str) -> None:
        self.dates = package("babel.dates")
        self.numbers = package("babel.numbers")
        self.locale = package("babel").Locale.parse(code)
        self.converter = _without_giants(package("num2words").CONVERTER_CLASSES[code.removesuffix("_US")])
        self.short_pattern = re.sub("y+", "yyyy", self.dates.get_date_format("short", self.locale).pattern)

    def cardinal(self, number: int) -> str:
        """twenty-one."""
        return clean(self.converter.to_cardinal(number))

    def digits(self, number: int) -> str:
        """4,711."""
        return clean(self.numbers.format_decimal(number, locale=self.locale))

    def short_date(self, day: datetime.date) -> str:
        """05.03.2021, with all digits of the year."""
        return clean(self.dates.format_date(day, self.short_pattern, locale=self.locale))

    def medium_date(self, day: datetime.date) -> str:
        """Mar 5, 2021."""
        return clean(self.dates.format_date(day, "medium", locale=self.locale))

    def long_date(self, day: datetime.date) -> str:
        """March 5, 2021."""
        return clean(self.dates.format_date(day, "long", locale=self.locale))

    def full_date(self, day: datetime.date) -> str:
        """Friday, March 5, 2021."""
        return clean(self.dates.format_date(day, "full", locale=self.locale))

    def spoken_date(self, day: datetime.date) -> str:
        """The day, the month and the year."""
        return self.long_date(day)

    def clock(self, time: datetime.time) -> str:
        """14:30 or 2:30 PM."""
        return clean(self.dates.format_time(time, "short", locale=self.locale))

    def spoken_clock(self, time: datetime.time) -> str:
        """The hour and the minutes."""
        return self.clock(time)

    def money(self, money: Money) -> str:
        """$1,234.56; with a space between letters and digits, which CLDR requires and Babel omits."""
        text = self.numbers.format_currency(money.amount, money.currency, locale=self.locale)
        return clean(re.sub(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])", " ", text))

    def spoken_money(self, money: Money) -> str:
        """Twelve dollars and fifty cents; without "and zero cents"."""
        if money.hundredths % 100:
            return clean(self.converter.to_currency(money.amount, currency=money.currency))
        text = self.converter.to_currency(money.amount, currency=money.currency, separator="|")
        return clean(text[: text.index("|")])

    def spoken_currencies(self) -> tuple[str, ...]:
        """The currencies that num2words has words for in this language; many languages lack some or all."""
        english = package("num2words.lang_EU").Num2Word_EU.CURRENCY_FORMS
        if getattr(self.converter, "CURRENCY_FORMS", english) is english:
            return ()  # inherited from English: Hungarian would have "cents"
        return tuple(currency for currency in self.currencies if self._has_words_for(currency))

    def _has_words_for(self, currency: str) -> bool:
        probes = (100, 101, 250, 2100, 2101, 99_999, 345_678)
        try:
            text = " ".join(self.spoken_money(Money(hundredths, currency)) for hundredths in probes)
        except Exception:  # every converter raises its own errors
            return False
        return not any(character.isdigit() for character in text)


class German(Language):
    """German, checked by hand."""

    currencies = ("EUR", "USD", "GBP")

    def __init__(self) -> None:
        super().__init__("de")

    def cardinal(self, number: int) -> str:
        """einundzwanzig; corrects "einhunderteinstausend", which num2words writes for 101,000."""
        return super().cardinal(number).replace("einstausend", "eintausend")

    def ordinal(self, number: int) -> str:
        """einundzwanzigste, as after "der" and "die"."""
        return clean(self.converter.to_ordinal(number)).replace("einstausend", "eintausend")

    def ordinal_digits(self, number: int) -> str:
        """21. with its full stop."""
        return f"{number}."

    def spoken_date(self, day: datetime.date) -> str:
        """der fuenfte Maerz zweitausendeinundzwanzig."""
        month = self.dates.format_date(day, "MMMM", locale=self.locale)
        return f"der {self.ordinal(day.day)} {month} {clean(self.converter.to_year(day.year))}"

    def clock(self, time: datetime.time) -> str:
        """14:30 Uhr."""
        return f"{super().clock(time)} Uhr"

    def spoken_clock(self, time: datetime.time) -> str:
        """vierzehn Uhr dreissig; one o'clock is "ein Uhr"."""
        hour = "ein" if time.hour == 1 else self.cardinal(time.hour)
        return f"{hour} Uhr {self.cardinal(time.minute)}" if time.minute else f"{hour} Uhr"


class English(Language):
    """The source language: American formats, and several ways to put a value into words."""

    currencies = ("EUR", "USD", "GBP")

    def __init__(self) -> None:
        super().__init__("en_US")
        forms = self.converter.CURRENCY_FORMS
        self.converter.CURRENCY_FORMS = {**forms, "EUR": (("euro", "euros"), ("cent", "cents"))}

    def ordinal(self, number: int) -> str:
        """twenty-first."""
        return clean(self.converter.to_ordinal(number))

    def ordinal_digits(self, number: int) -> str:
        """21st."""
        return self.converter.to_ordinal_num(number)

    def short_date(self, day: datetime.date) -> str:
        """03/05/2021."""
        return f"{day:%m/%d/%Y}"

    def spoken_date(self, day: datetime.date) -> str:
        """The fifth of March, twenty twenty-one."""
        return f"the {self.ordinal(day.day)} of {self._name(day, 'MMMM')}, {self.converter.to_year(day.year)}"

    def spoken_full_date(self, day: datetime.date) -> str:
        """Friday, March fifth, twenty twenty-one."""
        start = f"{self._name(day, 'EEEE')}, {self._name(day, 'MMMM')}"
        return f"{start} {self.ordinal(day.day)}, {self.converter.to_year(day.year)}"

    def _name(self, day: datetime.date, field: str) -> str:
        return self.dates.format_date(day, field, locale=self.locale)

    def spoken_clock(self, time: datetime.time) -> str:
        """two thirty p.m."""
        minutes = "oh " * (0 < time.minute < 10) + self.cardinal(time.minute) if time.minute else ""
        return clean(f"{self._hour(time.hour)} {minutes} {'a.m.' if time.hour < 12 else 'p.m.'}")

    def colloquial_clock(self, time: datetime.time) -> str:
        """Half past two in the afternoon."""
        if not time.minute and time.hour % 12 == 0:
            return "noon" if time.hour else "midnight"
        return f"{self._colloquial_minutes(time)} {_part_of_day(time.hour)}"

    def _colloquial_minutes(self, time: datetime.time) -> str:
        if not time.minute:
            return f"{self._hour(time.hour)} o'clock"
        if time.minute <= 30:
            return f"{self._minutes(time.minute)} past {self._hour(time.hour)}"
        return f"{self._minutes(60 - time.minute)} to {self._hour(time.hour + 1)}"

    def _minutes(self, minutes: int) -> str:
        if minutes in (15, 30):
            return "quarter" if minutes == 15 else "half"
        unit = "" if minutes % 5 == 0 else " minute" if minutes == 1 else " minutes"
        return self.cardinal(minutes) + unit

    def _hour(self, hour: int) -> str:
        return self.cardinal((hour - 1) % 12 + 1)

    def spoken_money(self, money: Money) -> str:
        """Twelve dollars and fifty cents."""
        if not money.hundredths % 100:
            return super().spoken_money(money)
        return clean(self.converter.to_currency(money.amount, currency=money.currency, separator=" and"))


def _part_of_day(hour: int) -> str:
    """The part of the day, which tells apart the two hours of each name."""
    if hour == 0 or hour >= 21:
        return "at night"
    if hour < 12:
        return "in the morning"
    return "in the afternoon" if hour < 18 else "in the evening"


def load(code: str) -> Language:
    """The language of a code such as `fr` or `pt_BR`."""
    if code == "de":
        return German()
    spoken = package("num2words").CONVERTER_CLASSES
    written = set(package("babel.localedata").locale_identifiers())
    known = {name for name in spoken if name in written and not name.startswith("en")}
    if code not in known:
        raise SpecError("language", f"num2words and Babel do not both know {code!r}; {nearest(code, known)}")
    language = Language(code)
    try:
        for number in (0, 7, 21, 101, 1000, 21_000, 999_999):
            language.cardinal(number)
    except Exception:  # every converter raises its own errors
        raise SpecError("language", f"num2words cannot count in {code!r}; choose another language") from None
    return language


def _without_giants(converter: Any) -> Any:
    """A copy without names above a million, for speed: num2words tries every name from 10^600 downwards."""
    converter = copy(converter)
    if hasattr(converter, "cards"):
        cards = converter.cards
        converter.cards = type(cards)((value, word) for value, word in cards.items() if value <= 10**6)
    return converter


def clean(text: str) -> str:
    """Replace every sequence of white space, of which CLDR uses many kinds, by one space."""
    return " ".join(text.split())


def package(name: str) -> ModuleType:
    """A module of the extra `demo`."""
    try:
        return import_module(name)
    except ImportError:
        raise SpecError("", "the demo's corpus needs babel and num2words: pip install 'regard[demo]'") from None
