"""Split a text into the sentences that a translation model reads, and put their translations together again."""

# ruff: noqa: RUF001  # marks of other scripts look like those of ASCII

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

# Words before a period that do not end a sentence, in English, German, French, Spanish, Italian, Dutch, Portuguese.
_ABBREVIATIONS = """
    mr mrs ms dr prof st jr sr vs etc e.g i.e cf no vol pp fig eq sec ch al approx dept est inc ltd corp co gen col capt
    lt sgt rev hon gov sen rep jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun u.s u.k a.m
    p.m z.b d.h u.a bzw usw vgl ca nr str abs art bd evtl ggf hrsg inkl jh kap mio mrd o.ä s.o s.u sog tel u.ä v.a
    z.t zzgl hr fr m mme mlle av p.ex éd env sra srta ud uds pág núm ej sig dott sigg ecc pag dhr mevr bijv blz enz
    exmo exma
"""
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())
CLOSING = "\"'”’»›)\\]}」』）"
OPENING = "\"'“‘„«‹(\\[{¿¡「『（"
# A mark that ends a sentence and white space after it, or a mark of a script without spaces.
# A match begins with the first of several marks; otherwise, the time would grow with the square of their number.
END = re.compile(f"(?:(?<![.!?…؟।])[.!?…؟।]+[{CLOSING}]*(?=\\s)|[。！？｡]+[{CLOSING}]*)\\s*")
NUMBER = re.compile(r"(?:^|\s)\(?\d{1,2}$")  # as in "am 3. Oktober", or at the beginning of an item of a list
NUMBER_LENGTH = 4  # characters at the end of a text in which NUMBER is searched
CLAUSE = re.compile(r"(?<=[,;:，、；：—–])\s*|\s+")
UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f\u0e00-\u0eff]")


@dataclass(frozen=True, slots=True)
class Part:
    """A sentence, or the white space between sentences."""

    text: str
    translated: bool  # True: a sentence


def split(text: str) -> list[Part]:
    """Return the sentences of a text and the white space around them. The texts of all parts together are `text`.

    A line feed ends a sentence. A period does not if an abbreviation, an initial or a number of one or two digits comes
    before it, or if the next word begins with a small letter.
    """
    parts = list[Part]()
    for line in re.split(r"([\r\n]+)", text):
        for sentence in _sentences(line):
            parts += _parts(sentence)
    return parts


def _parts(sentence: str) -> list[Part]:
    """Return the white space before a sentence, the sentence, and the white space after it, without empty parts."""
    body = sentence.strip()
    at = sentence.index(body)
    parts = Part(sentence[:at], False), Part(body, True), Part(sentence[at + len(body) :], False)
    return [part for part in parts if part.text]


def _sentences(line: str) -> Iterator[str]:
    """Yield the sentences of a line, with the white space after each."""
    begin = 0
    for match in END.finditer(line):
        if match.end() < len(line) and _ends(line[begin : match.start()], match.group(), line[match.end() :]):
            yield line[begin : match.end()]
            begin = match.end()
    yield line[begin:]


def _ends(before: str, mark: str, after: str) -> bool:
    """Return whether the sentence `before` ends with `mark`, when `after` follows."""
    if mark[0] in "。！？｡":
        return True
    first = after.lstrip(OPENING.replace("\\", "") + "-–— ")[:1]
    if first.islower():
        return False
    if mark.rstrip() != ".":
        return True
    words = before.rsplit(None, 1)
    word = words[-1].lstrip(OPENING.replace("\\", "")) if words else ""
    initial = len(word) == 1 and word.isalpha() and word.isupper() and word != "I"
    return not (initial or word.lower() in ABBREVIATIONS or NUMBER.search(before[-NUMBER_LENGTH:]))


def fitted(sentence: str, fits: Callable[[str], bool]) -> list[str]:
    """Return a sentence in pieces that fit into the model. The pieces together are the sentence.

    A sentence that does not fit is divided near its middle: after a comma or a similar mark, else at a space, else
    between two characters.
    """
    if len(sentence) < 2 or fits(sentence):
        return [sentence]
    middle = len(sentence) // 2
    places = [match.end() for match in CLAUSE.finditer(sentence) if 0 < match.end() < len(sentence)]
    marks = [at for at in places if not sentence[:at].rstrip()[-1:].isalnum()]
    near = [at for at in marks if 4 * abs(at - middle) < len(sentence)]
    at = min(near or places or [middle], key=lambda place: abs(place - middle))
    return fitted(sentence[:at], fits) + fitted(sentence[at:], fits)


def pieces(text: str, fits: Callable[[str], bool]) -> list[Part]:
    """Return the parts of a text, in which every sentence fits into the model."""
    parts = list[Part]()
    for part in split(text):
        for piece in fitted(part.text, fits) if part.translated else ():
            parts += _parts(piece)
        parts += [] if part.translated else [part]
    return parts


def join(parts: list[Part], translations: Mapping[str, str]) -> str:
    """Return the text with the sentences replaced by their translations.

    Between two sentences of a script without spaces there is no space; their translations get one if they need it.
    """
    text, adjacent = "", False
    for part in parts:
        new = translations[part.text] if part.translated else part.text
        needs_space = adjacent and part.translated and text and new and not text[-1].isspace()
        if needs_space and not (UNSPACED.match(text[-1]) and UNSPACED.match(new[0])):
            text += " "
        text += new
        adjacent = part.translated
    return text
