"""Numbers, dates, clock times and amounts of money in one language. num2words writes words, and Babel writes digits."""

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
    """An amount of money, in hundredths of a unit of the currency (cents)."""

    hundredths: int
    currency: str

    @property
    def amount(self) -> Decimal:
        """The amount in units of the currency, such as dollars."""
        return Decimal(self.hundredths) / 100


class Language:
    """A language that both num2words and Babel support.

    Dates and clock times are written in digits, because neither package writes them in words. There are no ordinals,
    because ordinals inflect and num2words gets them wrong in many languages.
    """

    # Currencies written in words, without pounds, because num2words gives them the wrong gender in some languages.
    currencies: tuple[str, ...] = ("EUR", "USD")

    def __init__(self, code: str) -> None:
        self.dates = package("babel.dates")
        self.numbers = package("babel.numbers")
        self.locale = package("babel").Locale.parse(code)
        self.converter = _without_giants(package("num2words").CONVERTER_CLASSES[code.removesuffix("_US")])
        self.short_pattern = re.sub("y+", "yyyy", self.dates.get_date_format("short", self.locale).pattern)

    def cardinal(self, number: int) -> str:
        """Return a number in words, such as "twenty-one"."""
        return clean(self.converter.to_cardinal(number))

    def digits(self, number: int) -> str:
        """Return a number in digits, such as "4,711"."""
        return clean(self.numbers.format_decimal(number, locale=self.locale))

    def short_date(self, day: datetime.date) -> str:
        """Return a date in digits with a four-digit year, such as "05.03.2021"."""
        return clean(self.dates.format_date(day, self.short_pattern, locale=self.locale))

    def medium_date(self, day: datetime.date) -> str:
        """Return a date with an abbreviated month, such as "Mar 5, 2021"."""
        return clean(self.dates.format_date(day, "medium", locale=self.locale))

    def long_date(self, day: datetime.date) -> str:
        """Return a date with the full name of the month, such as "March 5, 2021"."""
        return clean(self.dates.format_date(day, "long", locale=self.locale))

    def full_date(self, day: datetime.date) -> str:
        """Return a date with the weekday, such as "Friday, March 5, 2021"."""
        return clean(self.dates.format_date(day, "full", locale=self.locale))

    def spoken_date(self, day: datetime.date) -> str:
        """Return a date in words if this is supported for the language, otherwise as in `long_date`."""
        return self.long_date(day)

    def clock(self, time: datetime.time) -> str:
        """Return a clock time in digits, such as "14:30" or "2:30 PM"."""
        return clean(self.dates.format_time(time, "short", locale=self.locale))

    def spoken_clock(self, time: datetime.time) -> str:
        """Return a clock time in words if this is supported for the language, otherwise in digits."""
        return self.clock(time)

    def money(self, money: Money) -> str:
        """Return an amount in digits, such as "$1,234.56".

        A space is inserted between letters and digits, because CLDR requires this space and Babel omits it.
        """
        text = self.numbers.format_currency(money.amount, money.currency, locale=self.locale)
        return clean(re.sub(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])", " ", text))

    def spoken_money(self, money: Money) -> str:
        """Return an amount in words, such as "twelve dollars, fifty cents". Zero cents are not written."""
        if money.hundredths % 100:
            return clean(self.converter.to_currency(money.amount, currency=money.currency))
        text = self.converter.to_currency(money.amount, currency=money.currency, separator="|")
        return clean(text[: text.index("|")])

    def spoken_currencies(self) -> tuple[str, ...]:
        """Return the currencies that num2words can write in words in this language. There may be none."""
        english = package("num2words.lang_EU").Num2Word_EU.CURRENCY_FORMS
        if getattr(self.converter, "CURRENCY_FORMS", english) is english:
            return ()  # inherited from English: Hungarian text would contain "cents"
        return tuple(currency for currency in self.currencies if self._has_words_for(currency))

    def _name(self, day: datetime.date, field: str) -> str:
        return self.dates.format_date(day, field, locale=self.locale)

    def _has_words_for(self, currency: str) -> bool:
        probes = (100, 101, 250, 2100, 2101, 99_999, 345_678)
        try:
            text = " ".join(self.spoken_money(Money(hundredths, currency)) for hundredths in probes)
        except Exception:  # every converter raises its own errors
            return False
        return not any(character.isdigit() for character in text)


class German(Language):
    """German, with the output of num2words and Babel checked and corrected by hand."""

    currencies = ("EUR", "USD", "GBP")

    def __init__(self) -> None:
        super().__init__("de")

    def cardinal(self, number: int) -> str:
        """Return a number in words, such as "einundzwanzig".

        The word that num2words writes for 101,000, "einhunderteinstausend", is corrected.
        """
        return super().cardinal(number).replace("einstausend", "eintausend")

    def ordinal(self, number: int) -> str:
        """Return an ordinal in words, such as "einundzwanzigste", in the form that follows "der" or "die"."""
        return clean(self.converter.to_ordinal(number)).replace("einstausend", "eintausend")

    def ordinal_digits(self, number: int) -> str:
        """Return an ordinal in digits, such as "21." (German ordinals end in a full stop)."""
        return f"{number}."

    def spoken_date(self, day: datetime.date) -> str:
        """Return a date in words, such as "der dritte April zweitausendeinundzwanzig"."""
        return f"der {self.ordinal(day.day)} {self._name(day, 'MMMM')} {clean(self.converter.to_year(day.year))}"

    def clock(self, time: datetime.time) -> str:
        """Return a clock time in digits, such as "14:30 Uhr"."""
        return f"{super().clock(time)} Uhr"

    def spoken_clock(self, time: datetime.time) -> str:
        """Return a clock time in words, such as "vierzehn Uhr zehn". The hour 1 is "ein", not "eins"."""
        hour = "ein" if time.hour == 1 else self.cardinal(time.hour)
        return f"{hour} Uhr {self.cardinal(time.minute)}" if time.minute else f"{hour} Uhr"


class English(Language):
    """English, the source language, in American formats, with several ways to write a value in words."""

    currencies = ("EUR", "USD", "GBP")

    def __init__(self) -> None:
        super().__init__("en_US")
        forms = self.converter.CURRENCY_FORMS
        self.converter.CURRENCY_FORMS = {**forms, "EUR": (("euro", "euros"), ("cent", "cents"))}

    def ordinal(self, number: int) -> str:
        """Return an ordinal in words, such as "twenty-first"."""
        return clean(self.converter.to_ordinal(number))

    def ordinal_digits(self, number: int) -> str:
        """Return an ordinal in digits, such as "21st"."""
        return self.converter.to_ordinal_num(number)

    def short_date(self, day: datetime.date) -> str:
        """Return a date in digits, such as "03/05/2021" for March 5."""
        return f"{day:%m/%d/%Y}"

    def spoken_date(self, day: datetime.date) -> str:
        """Return a date in words, such as "the fifth of March, twenty twenty-one"."""
        return f"the {self.ordinal(day.day)} of {self._name(day, 'MMMM')}, {self.converter.to_year(day.year)}"

    def spoken_full_date(self, day: datetime.date) -> str:
        """Return a date in words with the weekday, such as "Friday, March fifth, twenty twenty-one"."""
        start = f"{self._name(day, 'EEEE')}, {self._name(day, 'MMMM')}"
        return f"{start} {self.ordinal(day.day)}, {self.converter.to_year(day.year)}"

    def spoken_clock(self, time: datetime.time) -> str:
        """Return a clock time in words, such as "two thirty p.m."."""
        minutes = "oh " * (0 < time.minute < 10) + self.cardinal(time.minute) if time.minute else ""
        return clean(f"{self._hour(time.hour)} {minutes} {'a.m.' if time.hour < 12 else 'p.m.'}")

    def colloquial_clock(self, time: datetime.time) -> str:
        """Return a clock time in colloquial words, such as "half past two in the afternoon"."""
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
        """Return an amount in words, such as "twelve dollars and fifty cents"."""
        if not money.hundredths % 100:
            return super().spoken_money(money)
        return clean(self.converter.to_currency(money.amount, currency=money.currency, separator=" and"))


def _part_of_day(hour: int) -> str:
    """Return the part of the day, which distinguishes, for example, 2:00 from 14:00."""
    if hour == 0 or hour >= 21:
        return "at night"
    if hour < 12:
        return "in the morning"
    return "in the afternoon" if hour < 18 else "in the evening"


def load(code: str) -> Language:
    """Return the language with a code such as `fr` or `pt_BR`."""
    if code == "de":
        return German()
    spoken = package("num2words").CONVERTER_CLASSES
    written = set(package("babel.localedata").locale_identifiers())
    known = {name for name in spoken if name in written and not name.startswith("en")}
    if code not in known:
        raise SpecError("language", f"num2words and Babel do not both support {code!r}; {nearest(code, known)}")
    language = Language(code)
    try:
        for number in (0, 7, 21, 101, 1000, 21_000, 999_999):
            language.cardinal(number)
    except Exception:  # every converter raises its own errors
        raise SpecError("language", f"num2words cannot write numbers in {code!r}; choose another language") from None
    return language


def _without_giants(converter: Any) -> Any:
    """Return a copy of the converter without number names above a million.

    The copy is faster, because num2words tries every number name from 10^600 downwards.
    """
    converter = copy(converter)
    if hasattr(converter, "cards"):
        cards = converter.cards
        converter.cards = type(cards)((value, word) for value, word in cards.items() if value <= 10**6)
    return converter


def clean(text: str) -> str:
    """Replace every sequence of white space by one space, because CLDR uses many different space characters."""
    return " ".join(text.split())


def package(name: str) -> ModuleType:
    """Import and return a module that the optional extra `demo` installs."""
    try:
        return import_module(name)
    except ImportError:
        raise SpecError("", "the demo's corpus needs babel and num2words: pip install 'regard[demo]'") from None
