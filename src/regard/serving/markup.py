"""Translate the text of an HTML document, and keep its tags, attributes, comments, scripts and styles as they are."""

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from regard.errors import DataError
from regard.serving.sentences import Part, join, pieces

# Elements within a sentence. All others, and <br>, end the sentence.
_INLINE = """
    a abbr acronym b bdi bdo big cite data del dfn em font i img ins label mark q s small span strike strong sub sup
    time tt u wbr
"""
_UNTRANSLATED = "script style code kbd samp pre svg math textarea template noscript iframe object"
_VOID = "area base br col embed hr img input link meta param source track wbr"
INLINE, UNTRANSLATED, VOID = (frozenset(names.split()) for names in (_INLINE, _UNTRANSLATED, _VOID))
OPAQUE = frozenset({"", "code", "kbd", "samp", "svg", "math"})  # untranslated elements and comments within a sentence
SPACE = re.compile(r"\s+")
MARGIN = re.compile(r"(?:\s|&(?:nbsp|ensp|emsp|thinsp|#160|#[xX]0*[aA]0);)+")  # white space, also as an entity
UNCLOSED = 100  # maximum number of tags and comments without an end
Fits = Callable[[str], bool]


class Token(NamedTuple):
    """A piece of a document, as it is written there."""

    kind: Literal["text", "start", "end", "other"]
    raw: str
    name: str = ""  # of a tag
    translated: bool = True  # False: the attributes of a start tag exclude its content from translation


class Tokenizer(HTMLParser):
    """Divides a document into tokens, whose raw texts together are the document."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.marks: list[tuple[tuple[int, int], Token]] = []  # position (line, column) and token without its raw text
        self.unclosed = 0

    def closed(self, end: int) -> int:
        """Return the end of a tag or comment, or -1 if it has none; raise DataError if too many have none.

        The parent class searches the rest of the document for each end: without this limit, the time would grow with
        the square of the length of a document such as `<a <a <a`.
        """
        self.unclosed += end < 0
        if self.unclosed > UNCLOSED:
            what = f"the HTML has more than {UNCLOSED} tags or comments without an end"
            raise DataError(f"{what}, the last one in line {self.getpos()[0]}; write &lt; for the character <")
        return end

    def parse_starttag(self, i: int) -> int:
        return self.closed(super().parse_starttag(i))

    def parse_endtag(self, i: int) -> int:
        return self.closed(super().parse_endtag(i))

    def parse_comment(self, i: int, report: bool = True) -> int:
        return self.closed(super().parse_comment(i, report))

    def parse_pi(self, i: int) -> int:
        return self.closed(super().parse_pi(i))

    def mark(self, kind: Literal["text", "start", "end", "other"], name: str = "", translated: bool = True) -> None:
        """Store the kind of the token that begins here."""
        self.marks.append((self.getpos(), Token(kind, "", name, translated)))

    def parse_html_declaration(self, i: int) -> int:
        """Parse `<!...`. Parse `<![...` as a comment, because the parent class raises an error for most of these."""
        bogus = self.rawdata.startswith("<![", i)
        return self.closed(self.parse_bogus_comment(i) if bogus else super().parse_html_declaration(i))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        excluded = (given.get("translate") or "").lower() == "no" or "notranslate" in (given.get("class") or "").split()
        self.mark("start", tag, tag not in UNTRANSLATED and not excluded)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            self.handle_starttag(tag, attrs)
        else:
            self.mark("other")

    def handle_endtag(self, tag: str) -> None:
        self.mark("end", tag)

    def handle_data(self, data: str) -> None:  # noqa: ARG002
        self.mark("text")

    def handle_entityref(self, name: str) -> None:  # noqa: ARG002
        self.mark("text")

    def handle_charref(self, name: str) -> None:  # noqa: ARG002
        self.mark("text")

    def handle_comment(self, data: str) -> None:  # noqa: ARG002
        self.mark("other")

    def handle_decl(self, decl: str) -> None:  # noqa: ARG002
        self.mark("other")

    def handle_pi(self, data: str) -> None:  # noqa: ARG002
        self.mark("other")

    def unknown_decl(self, data: str) -> None:  # noqa: ARG002
        self.mark("other")


def tokenize(document: str) -> list[Token]:
    """Return the tokens of a document. Adjacent texts are one token."""
    parser = Tokenizer()
    parser.feed(document)
    parser.close()
    lines = [0, *accumulate(len(line) + 1 for line in document.split("\n"))]
    begins = [lines[line - 1] + column for (line, column), _ in parser.marks]
    ends = [*begins, len(document)]
    tokens = [Token("other", document[: ends[0]])] if ends[0] else list[Token]()  # what the parser leaves out
    for (_, token), begin, end in zip(parser.marks, begins, ends[1:], strict=True):
        raw = document[begin:end]
        if tokens and token.kind == tokens[-1].kind == "text":
            tokens[-1] = Token("text", tokens[-1].raw + raw)
        elif raw:
            tokens.append(token._replace(raw=raw))
    return tokens


def _hidden(tokens: Sequence[Token]) -> Iterator[Token]:
    """Yield the tokens, with each untranslated element and its content replaced by one token of the kind `other`."""
    name, depth, raw = "", 0, ""
    for token in tokens:
        if depth:
            raw += token.raw
            depth += (token.kind == "start") - (token.kind == "end") if token.name == name else 0
            if not depth:
                yield Token("other", raw, name)
        elif token.kind == "start" and not token.translated and token.name not in VOID:
            name, depth, raw = token.name, 1, token.raw
        else:
            yield token
    if depth:
        yield Token("other", raw, name)


def _plain(raw: str) -> str:
    """Return the text of a token, with single spaces as white space."""
    return SPACE.sub(" ", html.unescape(raw)).replace("\0", "")


@dataclass
class Unit:
    """Inline text of a document, with the tags in it: the tokens between two boundaries of block elements."""

    tokens: list[Token] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The texts that are not blank."""
        return [_plain(token.raw) for token in self.tokens if token.kind == "text" and not MARGIN.fullmatch(token.raw)]

    def parts(self, fits: Fits) -> Iterator[Part]:
        """Yield the sentences whose translations are needed: those of the whole unit, and those of each text."""
        whole = "".join(_plain(token.raw) for token in self.tokens if token.kind == "text")
        for text in {whole, *self.texts} if self.texts else ():
            yield from (part for part in pieces(text.strip(), fits) if part.translated)

    def render(self, translations: Mapping[str, str], fits: Fits) -> str:
        """Return the unit with its texts translated, as HTML."""

        def translate(text: str) -> str:
            return join(pieces(text.strip(), fits), translations)

        texts = self.texts
        if not texts:
            return "".join(token.raw for token in self.tokens)
        placed = self._placed(translate) if len(texts) > 1 else None
        return placed if placed is not None else "".join(self._each(translate))

    def _each(self, translate: Callable[[str], str]) -> Iterator[str]:
        """Yield the tokens, with every text translated by itself."""
        for token in self.tokens:
            if token.kind != "text" or MARGIN.fullmatch(token.raw):
                yield token.raw
                continue
            before, after = _margins(token.raw)
            yield before + html.escape(translate(_plain(token.raw)), quote=False) + after

    def _placed(self, translate: Callable[[str], str]) -> str | None:
        """Translate the text of the unit as a whole, and put each pair of tags around the translation of its own text.

        Return None if an element contains more than one text, or if the translation of its text does not occur in the
        whole translation exactly once.
        """
        elements = self._elements()
        if elements is None:
            return None
        whole = translate("".join(_plain(token.raw) for token in self.tokens if token.kind == "text"))
        places: list[tuple[int, int, str, str]] = []
        for before, text, after in elements:
            own = translate(_plain(text))
            found = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(own)}(?!\w)", whole, re.IGNORECASE)]
            if not own or len(found) != 1:
                return None
            places.append((*found[0], before, after))
        places.sort()
        if any(end > begin for (_, end, *_), (begin, *_) in pairwise(places)):
            return None
        texts = [token.raw for token in self.tokens if token.kind == "text"]
        result, at = _margins(texts[0])[0], 0
        for begin, end, before, after in places:
            result += html.escape(whole[at:begin], quote=False) + before
            result += html.escape(whole[begin:end], quote=False) + after
            at = end
        return result + html.escape(whole[at:], quote=False) + _margins(texts[-1])[1]

    def _elements(self) -> list[tuple[str, str, str]] | None:
        """Return the elements as (start tags, text, end tags), or None if one of them contains more than one text."""
        elements = list[tuple[str, str, str]]()
        opened = list[Token]()
        text, closed = None, list[Token]()
        for token in self.tokens:
            if token.kind == "start" and token.name not in VOID and text is None:
                opened.append(token)
            elif token.kind == "text" and opened and text is None:
                text = token.raw
            elif token.kind == "end" and text is not None and opened[-1 - len(closed)].name == token.name:
                closed.append(token)
                if len(closed) == len(opened):
                    elements.append(("".join(t.raw for t in opened), text, "".join(t.raw for t in closed)))
                    opened, text, closed = [], None, []
            elif token.kind != "text" or opened:
                return None
        return None if opened else elements


def _margins(raw: str) -> tuple[str, str]:
    """Return the white space before and after a text."""
    runs = list(MARGIN.finditer(raw))
    before = runs[0].group() if runs and runs[0].start() == 0 else ""
    return before, runs[-1].group() if runs and runs[-1].end() == len(raw) else ""


@dataclass(frozen=True)
class Document:
    """An HTML document, divided into units that are translated and tokens that are not."""

    parts: list[Unit | str]
    fits: Fits

    @classmethod
    def read(cls, document: str, fits: Fits) -> "Document":
        """Divide a document. `fits` returns whether a sentence is short enough for the model."""
        parts: list[Unit | str] = []
        for token in _hidden(tokenize(document)):
            opaque = token.kind == "other" and token.name in OPAQUE
            inline = opaque or token.kind == "text" or token.name in INLINE
            if not inline:
                parts.append(token.raw)
                continue
            if not parts or isinstance(parts[-1], str):
                parts.append(Unit())
            unit = parts[-1]
            assert isinstance(unit, Unit)
            unit.tokens.append(token)
        return cls(parts, fits)

    def sentences(self) -> list[str]:
        """Return the sentences to translate."""
        units = (part for part in self.parts if isinstance(part, Unit))
        return list(dict.fromkeys(part.text for unit in units for part in unit.parts(self.fits)))

    def render(self, translations: Mapping[str, str]) -> str:
        """Return the document with all sentences replaced by their translations."""
        return "".join(part if isinstance(part, str) else part.render(translations, self.fits) for part in self.parts)


@dataclass(frozen=True)
class PlainText:
    """A plain text with the interface of `Document`."""

    parts: list[Part]

    @classmethod
    def read(cls, text: str, fits: Fits) -> "PlainText":
        """Divide a text into sentences. `fits` returns whether a sentence is short enough for the model."""
        return cls(pieces(text, fits))

    def sentences(self) -> list[str]:
        """Return the sentences to translate."""
        return list(dict.fromkeys(part.text for part in self.parts if part.translated))

    def render(self, translations: Mapping[str, str]) -> str:
        """Return the text with all sentences replaced by their translations."""
        return join(self.parts, translations)
