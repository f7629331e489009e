"""Decoding constraint slot: what an output must begin with, contain or avoid; part of a search record.

A search applies the constraints of a row before each of its tokens. A user's constraint overrides `banned` or `forced`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from regard.data.tokenizer import Tokenizer
from regard.decoding.constraints import BoundConstraint, Ids, TokenConstraints
from regard.errors import SpecError
from regard.tree import Spec


class Constraint(Spec):
    """Slot: the tokens that may follow what a row has generated so far (ids without a prompt, bos or eos)."""

    __slots__ = ()
    vectorized: ClassVar[bool] = False  # `banned` is the same at every step, so any search on the GPU can apply it

    def banned(self, output: Ids, tokenizer: Tokenizer) -> Iterable[int]:  # noqa: ARG002
        """Return the ids that must not follow `output`; that of eos keeps a row from ending."""
        return ()

    def forced(self, output: Ids, tokenizer: Tokenizer) -> int | None:  # noqa: ARG002
        """Return the only id that may follow `output`; None: any."""
        return None

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        """Return the constraint on the ids of a tokenizer."""
        if self.vectorized:
            return TokenConstraints(banned=tuple((token,) for token in self.banned((), tokenizer)))
        return TokenConstraints(others=(BoundConstraint(self, tokenizer),))


@dataclass(frozen=True, slots=True)
class ForcedPrefix(Constraint):
    """The text that every output begins with; its probability counts."""

    kind = "forced_prefix"
    text: str

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        return TokenConstraints(tuple(tokenizer.encode(self.text)))


@dataclass(frozen=True, slots=True)
class BannedWords(Constraint):
    """Words that no output contains, at its beginning or after a space."""

    kind = "banned_words"
    words: tuple[str, ...]

    def check(self) -> None:
        check_words("banned", self.words)

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        return TokenConstraints(banned=tuple(ids for word in self.words for ids in spellings(word, tokenizer)))


@dataclass(frozen=True, slots=True)
class RequiredWords(Constraint):
    """Words that every output contains, as they are tokenized after a space; needs a beam of at least 2."""

    kind = "required_words"
    words: tuple[str, ...]

    def check(self) -> None:
        check_words("required", self.words)

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        return TokenConstraints(required=tuple(spellings(word, tokenizer)[0] for word in self.words))


@dataclass(frozen=True, slots=True)
class NoRepeatedNgram(Constraint):
    """Every n-gram of tokens at most once; 0: n-grams may repeat."""

    kind = "no_repeated_ngram"
    n: int

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:  # noqa: ARG002
        return TokenConstraints(no_repeat=self.n)


@dataclass(frozen=True, slots=True)
class MinLength(Constraint):
    """At least this many tokens before eos."""

    kind = "min_length"
    tokens: int

    def banned(self, output: Ids, tokenizer: Tokenizer) -> Iterable[int]:
        return (tokenizer.eos,) if len(output) < self.tokens else ()


CONSTRAINTS: tuple[type[Constraint], ...] = (BannedWords, ForcedPrefix, MinLength, NoRepeatedNgram, RequiredWords)


def bind_all(constraints: Iterable[Constraint], tokenizer: Tokenizer) -> TokenConstraints:
    """Return several constraints as one: all of them hold."""
    bound = [constraint.bind(tokenizer) for constraint in constraints]
    prefixes = list(dict.fromkeys(each.prefix for each in bound if each.prefix))
    if len(prefixes) > 1:
        raise SpecError("prefix", "two prefixes are forced, and an output has one beginning; leave one of them out")
    return TokenConstraints(
        prefixes[0] if prefixes else (),
        tuple(ids for each in bound for ids in each.banned),
        tuple(ids for each in bound for ids in each.required),
        min((each.no_repeat for each in bound if each.no_repeat), default=0),
        tuple(other for each in bound for other in each.others),
    )


def check_words(name: str, words: Sequence[str]) -> None:
    """Refuse an empty word."""
    if not all(word.strip() for word in words):
        raise SpecError(name, "an empty word constrains nothing; leave it out")


def spellings(word: str, tokenizer: Tokenizer) -> list[Ids]:
    """Return the ids of a word after a space, and at the beginning of a text, where they differ."""
    encoded = [tuple(tokenizer.encode(f" {word}")), tuple(tokenizer.encode(word))]
    return list(dict.fromkeys(ids for ids in encoded if ids))
