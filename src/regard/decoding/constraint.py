"""Decoding constraints: what an output must begin with, contain or avoid.

Constraints are listed in a search spec and are applied before each token is chosen. To define a new constraint, write a
subclass of `Constraint` that overrides `banned` or `forced`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from regard.data.tokenizer import Tokenizer
from regard.decoding.constraints import BoundConstraint, Ids, TokenConstraints
from regard.nn.checks import require
from regard.tree import Spec


class Constraint(Spec):
    """Base class of constraints, which determine the tokens that may follow an unfinished output.

    The output is passed as token ids, without the prompt, bos or eos.
    """

    __slots__ = ()
    vectorized: ClassVar[bool] = False  # True: `banned` is the same at every step, so a search on the GPU can apply it

    def banned(self, output: Ids, tokenizer: Tokenizer) -> Iterable[int]:  # noqa: ARG002
        """Return the ids that must not follow `output`. If eos is among them, the output cannot end here."""
        return ()

    def forced(self, output: Ids, tokenizer: Tokenizer) -> int | None:  # noqa: ARG002
        """Return the only id that may follow `output`, or None if any id may follow."""
        return None

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        """Return the constraint expressed in the token ids of a tokenizer."""
        if self.vectorized:
            return TokenConstraints(banned=tuple((token,) for token in self.banned((), tokenizer)))
        return TokenConstraints(others=(BoundConstraint(self, tokenizer),))


@dataclass(frozen=True, slots=True)
class ForcedPrefix(Constraint):
    """Every output begins with `text`, whose probability counts towards the score."""

    kind = "forced_prefix"
    text: str

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        return TokenConstraints(tuple(tokenizer.encode(self.text)))


@dataclass(frozen=True, slots=True)
class BannedWords(Constraint):
    """Words that must not occur in an output, whether at the beginning or after a space."""

    kind = "banned_words"
    words: tuple[str, ...]

    def check(self) -> None:
        check_words("banned", self.words)

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        return TokenConstraints(banned=tuple(ids for word in self.words for ids in spellings(word, tokenizer)))


@dataclass(frozen=True, slots=True)
class RequiredWords(Constraint):
    """Words that every output must contain, tokenized as words after a space. The beam size must be at least 2."""

    kind = "required_words"
    words: tuple[str, ...]

    def check(self) -> None:
        check_words("required", self.words)

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:
        return TokenConstraints(required=tuple(spellings(word, tokenizer)[0] for word in self.words))


@dataclass(frozen=True, slots=True)
class NoRepeatedNgram(Constraint):
    """Every n-gram of tokens may occur only once in an output. If `n` is 0, there is no constraint."""

    kind = "no_repeated_ngram"
    n: int

    def bind(self, tokenizer: Tokenizer) -> TokenConstraints:  # noqa: ARG002
        return TokenConstraints(no_repeat=self.n)


@dataclass(frozen=True, slots=True)
class MinLength(Constraint):
    """The minimum length of an output in tokens, without eos."""

    kind = "min_length"
    tokens: int

    def banned(self, output: Ids, tokenizer: Tokenizer) -> Iterable[int]:
        return (tokenizer.eos,) if len(output) < self.tokens else ()


CONSTRAINTS: tuple[type[Constraint], ...] = (BannedWords, ForcedPrefix, MinLength, NoRepeatedNgram, RequiredWords)


def bind_all(constraints: Iterable[Constraint], tokenizer: Tokenizer) -> TokenConstraints:
    """Express several constraints in the token ids of a tokenizer, combined into one `TokenConstraints`."""
    bound = [constraint.bind(tokenizer) for constraint in constraints]
    prefixes = list(dict.fromkeys(each.prefix for each in bound if each.prefix))
    message = "two prefixes are given, but an output can have only one; leave one of them out"
    require(len(prefixes) < 2, "prefix", message)
    return TokenConstraints(
        prefixes[0] if prefixes else (),
        tuple(ids for each in bound for ids in each.banned),
        tuple(ids for each in bound for ids in each.required),
        min((each.no_repeat for each in bound if each.no_repeat), default=0),
        tuple(other for each in bound for other in each.others),
    )


def check_words(name: str, words: Sequence[str]) -> None:
    """Raise SpecError for the field `name` if a word is blank."""
    require(all(word.strip() for word in words), name, "an empty word constrains nothing; leave it out")


def spellings(word: str, tokenizer: Tokenizer) -> list[Ids]:
    """Return the ids of a word after a space and, if they differ, the ids of the word at the beginning of a text."""
    encoded = [tuple(tokenizer.encode(f" {word}")), tuple(tokenizer.encode(word))]
    return list(dict.fromkeys(ids for ids in encoded if ids))
