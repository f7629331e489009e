"""HTML markup, wrongly decoded text, and invisible characters."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from regard.doctor.case import Case
from regard.doctor.finding import MOST_LINES, SHOWN, Finding, counted, numbered, quoted, share
from regard.doctor.reading import Examples

MANY = 0.001  # share of the texts above which there is a warning, from three texts on
MANY_TAGS = 0.01
TAG = re.compile(
    r"</?(?:a|b|i|u|p|br|div|span|em|strong|td|tr|li|ul|ol|h[1-6]|img|table|font|sup|sub)\b[^<>]{0,200}/?>", re.I
)
ENTITY = re.compile(
    r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,6}|#x[0-9a-f]{1,6}|[aouAOU]uml|szlig|[aeiou](?:acute|grave|circ));"
)
MOSES = re.compile(r"&(?:apos|quot|amp|lt|gt|#91|#93|#124);")  # written by the Moses tokenizer
# Two characters that Windows-1252 reads in the place of one of UTF-8, and the replacement character.
LATE = "€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"  # noqa: RUF001  # what it reads for the bytes 0x80 to 0x9f
PAIR = re.compile(f"[\u00c2-\u00df][\u0080-\u00bf{LATE}]|[\u00e0-\u00ef][\u0080-\u00bf{LATE}]{{2}}")
# Controls other than the tab; zero-width space, word joiner, byte-order mark, bidirectional controls, private use.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff\ue000-\uf8ff\ufff9-\uffff]"
)
REPLACEMENT = "\ufffd"


def markup(case: Case) -> Iterator[Finding]:
    """Find HTML tags and entities. In tokenized text, the entities that the Moses tokenizer writes are allowed."""
    advice = "remove tags and decode entities (Python: html.unescape), in all text that the model will read, too"
    for text in case.texts:
        for name in case.names:
            has = _has_markup
            if _is_tokenized(text.columns[name]):
                has = _has_markup_beside_moses
            yield from _found(text, name, "markup", "HTML tags or entities", has, MANY_TAGS, advice)


def _has_markup(text: str) -> bool:
    return ("<" in text and TAG.search(text) is not None) or ("&" in text and ENTITY.search(text) is not None)


def _has_markup_beside_moses(text: str) -> bool:
    return ("<" in text or "&" in text) and _has_markup(MOSES.sub("", text))


def _is_tokenized(texts: Sequence[str]) -> bool:
    """Return whether most final full stops are separated by a space, as tokenizers do."""
    stops = [text for text in texts if text.endswith(".")]
    return len(stops) > 0 and sum(text.endswith(" .") for text in stops) > 0.8 * len(stops)


def mojibake(case: Case) -> Iterator[Finding]:
    """Find UTF-8 that was decoded as Windows-1252, such as "Ã¼" in place of "ü", and replacement characters."""
    advice = 'decode the text again; for most lines: text.encode("cp1252").decode("utf-8") in Python'
    for text in case.texts:
        for name in case.names:
            yield from _found(text, name, "wrong decoding", "characters of a wrong decoding", is_mojibake, MANY, advice)


def is_mojibake(text: str) -> bool:
    """Return whether a text contains UTF-8 that was decoded as Windows-1252, or the replacement character."""
    if text.isascii():
        return False
    return REPLACEMENT in text or any(_decodes(match[0]) for match in PAIR.finditer(text))


def _decodes(pair: str) -> bool:
    """Return whether the characters, encoded in Windows-1252 or Latin-1, are the UTF-8 of a letter, mark or symbol."""
    for encoding in ("cp1252", "latin-1"):
        try:
            decoded = pair.encode(encoding).decode("utf-8")
        except (UnicodeEncodeError, UnicodeDecodeError):
            continue
        return len(decoded) == 1 and unicodedata.category(decoded)[0] in "LPS"
    return False


def controls(case: Case) -> Iterator[Finding]:
    """Find control characters and other invisible characters."""
    advice = "remove these characters; some programs end a line at them, which shifts parallel files"
    for text in case.texts:
        for name in case.names:
            column = text.columns[name]
            counts = Counter(
                char
                for each in column
                if not each.isascii() or not each.isprintable()
                for char in CONTROL.findall(each)
            )
            listed = ", ".join(f"U+{ord(char):04X} {count:,} times" for char, count in counts.most_common(SHOWN))
            what = f"control or invisible characters ({listed})"
            yield from _found(text, name, "control characters", what, _has_control, MANY, advice)


def _has_control(text: str) -> bool:
    return (not text.isascii() or not text.isprintable()) and CONTROL.search(text) is not None


def _found(
    text: Examples, name: str, check: str, what: str, has: Callable[[str], bool], many: float, advice: str
) -> Iterator[Finding]:
    found = [i for i, each in enumerate(text.columns[name]) if has(each)]
    if found:
        lines = tuple(map(text.line, found[:MOST_LINES]))
        yield Finding(
            check,
            "warning" if len(found) > max(2, many * text.size) else "note",
            f"{text.name}: {counted(len(found), name, 'has have')} {what} ({share(len(found), text.size)})",
            (numbered(lines), *(f"{text.place(i)}: {quoted(text.columns[name][i])}" for i in found[:SHOWN])),
            advice,
            lines,
        )
