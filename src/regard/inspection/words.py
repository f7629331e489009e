"""The words of a tokenized text, and attention between words instead of subwords."""

import re
import unicodedata
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.data.scripts import HAN, KANA, OTHERS
from regard.data.tokenizer import SPACE, Tokenizer

UNSPACED = re.compile(f"[{HAN}{KANA}{OTHERS}]")
FRAGMENT = re.compile(r"\\x([0-9a-f]{2})")  # a byte of a character that is divided between tokens
APOSTROPHES = "'\u2019"


def word_indices(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return the index of the word of every token, from 0. The subwords of a word have the same index.

    A control token, a run of punctuation, and a token of a script without spaces (such as Chinese) are words of their
    own. An apostrophe between letters is part of the word.
    """
    words, word, last = [], -1, ""
    for i, token in zip(ids, tokenizer.tokens(ids), strict=True):
        own = i in {tokenizer.pad, tokenizer.bos, tokenizer.eos}
        text = token.replace(SPACE, " ")
        if not words or own or not last or _begins(tokenizer, i, text, last):
            word += 1
        words.append(word)
        last = "" if own else text
    return words


def _begins(tokenizer: Tokenizer, token_id: int, text: str, last: str) -> bool:
    """Return whether a token begins a new word after a token with the text `last`."""
    if tokenizer.starts_word(token_id) or last.endswith("\\n"):
        return True
    if last.isspace():
        return False
    fragment = FRAGMENT.match(text)
    if fragment:  # 80 to bf continue a character; from e2 on, a character has three bytes or more, as Chinese has
        return int(fragment[1], 16) >= 0xE2
    if FRAGMENT.search(last) and not UNSPACED.search(text):
        return False
    if UNSPACED.search(text[:1]) or UNSPACED.search(last[-1:]):
        return True
    return _is_letter(text[:1]) != _is_letter(last[-1:])


def _is_letter(character: str) -> bool:
    """Return whether a character is part of words: a letter, mark, digit or apostrophe."""
    return character in APOSTROPHES or unicodedata.category(character or " ")[0] in "LMN"


def by_words(
    weights: Float[Tensor, "*n T S"], rows: Sequence[int] | None, columns: Sequence[int] | None
) -> Float[Tensor, "*n W V"]:
    """Return attention between words: the sum over the subwords of a key, and the mean over those of a query.

    `rows` and `columns` are the word indices of the queries and keys. None leaves an axis as it is.
    """
    if columns is not None:
        index = torch.tensor(columns, device=weights.device)
        grouped = weights.new_zeros(*weights.shape[:-1], columns[-1] + 1)
        weights = grouped.index_add(-1, index, weights)
    if rows is not None:
        index = torch.tensor(rows, device=weights.device)
        grouped = weights.new_zeros(*weights.shape[:-2], rows[-1] + 1, weights.shape[-1])
        counts = torch.bincount(index).to(weights.dtype)
        weights = grouped.index_add(-2, index, weights) / counts[:, None]
    return weights


def joined(tokens: Sequence[str], words: Sequence[int]) -> list[str]:
    """Return the text of every word: its tokens, joined, without the space before it."""
    texts = [""] * (words[-1] + 1 if words else 0)
    for token, word in zip(tokens, words, strict=True):
        texts[word] += token
    return [text if text == SPACE else text.removeprefix(SPACE) for text in texts]
