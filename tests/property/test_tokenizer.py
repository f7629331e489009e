"""Decoding restores every text, and no text is encoded as a control token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.tokenizer import BPE, Bytes, Characters, Tokenizer, Words, train

CORPUS = [
    "the cat sat on the mat; the cat's 1987 hat",
    "  two  spaces\tand a tab \n</s> <s> <pad> <unk> </s>",
    "ros\u00e9 rose\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 \u4f60\u597d\u4f60\u597d",
    "\U0001f469\u200d\U0001f467 \u05e9\u05dc\u05d5\u05dd",
] * 3
LOSSLESS = {spec.kind: train(spec, CORPUS) for spec in (BPE(), Bytes(), Characters())}
WORDS = train(Words(), CORPUS)

# All of Unicode but surrogates, and the strings that a tokenizer might take for its own.
own = st.sampled_from(["<pad>", "<s>", "</s>", "<unk>", " ", "  ", "\n", "\r\n", "\u2581", "\u0120", "cat", "\u4f60"])
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
texts = st.one_of(anything, st.lists(st.one_of(own, anything), max_size=8).map("".join))


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(max_examples=300)
@given(text=texts)
def test_decoding_restores_the_text(kind: str, text: str) -> None:
    tokenizer = LOSSLESS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 <= token_id < tokenizer.size for token_id in ids)
    assert (not ids) == (not text)
    assert tokenizer.decode([1, *ids, 2, 0, 0]) == text


@settings(max_examples=100)
@given(batch=st.lists(texts, max_size=5))
def test_batches_and_copies_encode_equally(batch: list[str]) -> None:
    for tokenizer in (*LOSSLESS.values(), WORDS):
        ids = [tokenizer.encode(text) for text in batch]
        copy = Tokenizer.from_json(tokenizer.to_json())
        assert tokenizer.encode_batch(batch) == copy.encode_batch(batch) == ids
        assert tokenizer.decode_batch(ids) == [tokenizer.decode(row) for row in ids]


@settings(max_examples=300)
@given(text=texts)
def test_words_decode_with_normalised_spaces_and_unknowns(text: str) -> None:
    ids = WORDS.encode(text)
    assert all(3 <= token_id < WORDS.size for token_id in ids)
    decoded = WORDS.decode(ids)
    assert WORDS.decode(WORDS.encode(decoded)) == decoded
    assert len(decoded.split()) == len([token_id for token_id in ids if token_id != WORDS.encode("\n")[0]])
    assert decoded.count("\n") == text.count("\n")


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_ids_can_be_decoded_and_printed(kind: str, data: st.DataObject) -> None:
    """A model may generate any ids, also ids that are not valid UTF-8."""
    tokenizer = LOSSLESS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=20))
    assert isinstance(tokenizer.decode(ids), str)
    tokens = tokenizer.tokens(ids)
    assert len(tokens) == len(ids)
    assert all(piece.isprintable() and piece and " " not in piece for piece in tokens)


@settings(max_examples=100)
@given(text=texts)
def test_tokens_concatenate_to_the_text(text: str) -> None:
    """Printable characters of the corpus are printed unchanged."""
    tokenizer = LOSSLESS["characters"]
    known = "".join(c for c in text if c in set("".join(CORPUS)) and c.isprintable())
    assert "".join(tokenizer.tokens(tokenizer.encode(known))) == known.replace(" ", "\u2581")
