import html
import re
import string
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import DataError
from regard.serving.markup import UNCLOSED, Document, PlainText, Tokenizer, tokenize


def always(_: str) -> bool:
    return True


def translated(document: str, **translations: str) -> str:
    read = Document.read(document, always)
    return read.render({text: translations.get(text, text) for text in read.sentences()})


def upper(document: str) -> str:
    read = Document.read(document, always)
    return read.render({text: text.upper() for text in read.sentences()})


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("<p>one</p>\n<p>two</p>", "<p>ONE</p>\n<p>TWO</p>"),
        ('<p class="one" title="two">one</p>', '<p class="one" title="two">ONE</p>'),
        ("one<br/>two<hr>three", "ONE<br/>TWO<hr>THREE"),
        ("<script>a = '<b>';</script>one<style>p{}</style>", "<script>a = '<b>';</script>ONE<style>p{}</style>"),
        ("<!-- one --><!DOCTYPE html>one", "<!-- one --><!DOCTYPE html>ONE"),
        ("<p>one <code>two</code> three</p>", "<p>ONE <code>two</code> THREE</p>"),
        ('<p translate="no">one <p>two</p></p>three', '<p translate="no">one <p>two</p></p>THREE'),
        ('<span class="notranslate">one</span> two', '<span class="notranslate">one</span> TWO'),
        ("<p>a &lt; b &amp; c</p>", "<p>A &lt; B &amp; C</p>"),
        ("<p>\n  one\n  two\n</p>", "<p>\n  ONE TWO\n</p>"),
        ("<p>one <img src='one.png'> two</p>", "<p>ONE <img src='one.png'> TWO</p>"),
        ("a < b", "A &lt; B"),
        ("<p>one</p>&nbsp;<p>two</p>", "<p>ONE</p>&nbsp;<p>TWO</p>"),
        ("<td>&#160;&#xA0;</td>", "<td>&#160;&#xA0;</td>"),
        ("<b>one <i>two</i> three&nbsp;</b> four", "<b>ONE <i>TWO</i> THREE&nbsp;</b> FOUR"),
        ("one<![endif]-->two<![x]>three", "ONE<![endif]-->TWO<![x]>THREE"),
        ("<p>one</p><![<b>two</b>", "<p>ONE</p><![<b>TWO</b>"),
        ("<p>one", "<p>ONE"),
        ("<script>one", "<script>one"),
        ("", ""),
    ],
)  # fmt: skip
def test_tags_stay_and_text_is_translated(document: str, expected: str) -> None:
    assert upper(document) == expected


def test_sentence_with_an_inline_tag_is_translated_as_a_whole() -> None:
    result = translated("<p>the <b>red</b> house</p>", **{"the red house": "la maison rouge", "red": "rouge"})
    assert result == "<p>la maison <b>rouge</b></p>"


def test_nested_tags_around_one_text_stay_together() -> None:
    document = '<p><a href="/x"><i>red</i></a> house</p>'
    assert translated(document, **{"red house": "Haus rot", "red": "rot"}) == '<p>Haus <a href="/x"><i>rot</i></a></p>'


@pytest.mark.parametrize("whole", ["rot und rot", "purpur"])
def test_text_of_a_tag_that_is_not_found_once_is_translated_by_itself(whole: str) -> None:
    result = translated("<p>a <b>red</b> b</p>", **{"a red b": whole, "red": "rot", "a": "ein", "b": "be"})
    assert result == "<p>ein <b>rot</b> be</p>"


def test_translation_with_signs_of_html_is_escaped() -> None:
    assert translated("<p>one</p>", one="<script>&") == "<p>&lt;script&gt;&amp;</p>"


def tags(document: str) -> list[str]:
    return re.findall(r"</?\w[^>]*>", document)


pieces = st.sampled_from(
    ["<p>", "</p>", "<b>", "</b>", "<i>", "</i>", "<br>", "<a href='x'>", "</a>", "one ", "two. Three", " ", "&amp;",
     "&nbsp;", "\n", "<!-- c -->", "<code>x</code>", "<img src=y>", "<ul><li>", "</li></ul>", "é"]
)  # fmt: skip


@given(st.lists(pieces, max_size=14).map("".join))
def test_translation_keeps_all_tags_and_words(document: str) -> None:
    same = translated(document)
    assert sorted(tags(same)) == sorted(tags(document))
    words = re.sub(r"<[^>]*>", " ", html.unescape(document)).split()
    assert sorted(re.sub(r"<[^>]*>", " ", html.unescape(same)).split()) == sorted(words)


@given(st.text(st.sampled_from("<>!-/&;=\"' \nabp1?[]") | st.characters(exclude_categories=["Cs"]), max_size=50))
def test_tokens_together_are_the_document(document: str) -> None:
    assert "".join(token.raw for token in tokenize(document)) == document
    Document.read(document, always).render({text: text for text in Document.read(document, always).sentences()})


@given(st.text(alphabet="<![]->/?&;#ab =\"'" + string.whitespace, max_size=40))
def test_malformed_markup_is_a_document(document: str) -> None:
    assert "".join(token.raw for token in tokenize(document)) == document
    upper(document)


UNCLOSED_SIGNS = ["<a ", "<a\n", "<a/", "<a b=", '<a b="', "</a ", "<!--", "<!", "<![", "<?"]


@pytest.mark.parametrize("sign", UNCLOSED_SIGNS)
def test_time_for_unclosed_tags_does_not_grow_with_the_square_of_their_number(sign: str) -> None:
    begin = time.perf_counter()
    with suppress(DataError):  # later versions of Python read them as one comment
        tokenize(sign * (50_000 // len(sign)))
    assert time.perf_counter() - begin < 5


def test_too_many_unclosed_tags_are_refused_with_their_line() -> None:
    parser = Tokenizer()
    assert [parser.closed(end) for end in [7, *[-1] * UNCLOSED, 8]] == [7, *[-1] * UNCLOSED, 8]
    with pytest.raises(DataError, match=r"more than 100 tags or comments without an end, .* in line 1; write &lt; for"):
        parser.closed(-1)


@pytest.mark.parametrize("sign", [*UNCLOSED_SIGNS, "<b>x</b> ", "&#", "&amp;", "x<"])
def test_few_unclosed_tags_and_many_closed_ones_are_read(sign: str) -> None:
    few, closed = sign * (UNCLOSED // 2), f"{sign}-->" * 2 * UNCLOSED
    assert "".join(token.raw for token in tokenize(few)) == few
    assert "".join(token.raw for token in tokenize(closed)) == closed


def test_plain_text_is_not_read_as_html() -> None:
    text = PlainText.read("<b>one</b> & two", always)
    assert text.render({sentence: sentence for sentence in text.sentences()}) == "<b>one</b> & two"
