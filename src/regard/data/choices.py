"""Choose the tokenizer, the length limit and the size of the held-out set for a text."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from regard.data.objectives import Objective, Record
from regard.data.scripts import HAN, KANA, OTHERS
from regard.data.tokenizer import BPE, Characters, Tokenizer, TokenizerSpec, Words

Long = Literal["cut", "drop"]

SMALLEST_LIMIT = 256  # tokens of a source or target
WHOLE = 0.99  # share of the texts within the limit, if `room` allows it
SUMMARY = 0.5  # targets with less than this share of the source tokens are summaries, whose sources may be cut
BEGINNING = 512  # maximum number of tokens from a source that is summarised
EXAMINED = 4000  # training examples
ONE_WORD = 0.6  # minimum share of one-word targets for characters, as in inflection or transliteration
DISTINCT = 0.3  # minimum share of distinct targets for characters; targets with a smaller share are labels
SEPARATE = 0.02  # maximum share of words that end in punctuation (abbreviations), if punctuation is separate from words
REPEATED = 0.8  # minimum share of words that occur at least twice, in a text for which words are chosen as tokens
LONGEST_WORD = 60  # maximum mean number of characters in one-word targets; longer ones are unspaced sentences

_UNSPACED = re.compile(f"[{HAN}{KANA}{OTHERS}]")
_PUNCTUATED = re.compile(r"\w[.,;:!?)\]\"]+$")


@dataclass(frozen=True)
class Choice:
    """A tokenizer, and a sentence with the reason for choosing it."""

    tokenizer: TokenizerSpec
    why: str


def held_out(records: int) -> int:
    """Return the number of training examples to hold out for validation.

    This is 2 % of `records`, but at least 500 (or a tenth of `records`, if that is less) and at most 1,000.
    """
    return max(1, min(1000, max(round(0.02 * records), min(500, records // 10))))


def choose_tokenizer(objective: Objective, sample: Sequence[Record]) -> Choice:
    """Return the tokenizer for an objective and a sample of its text.

    The default is byte-pair encoding. Words may be chosen for a classifier, and characters for targets of one word.
    """
    if objective.model == "classifier":
        return _for_classes([record[objective.input_text] for record in _spread(sample)])
    if objective.model == "language_model":
        return Choice(BPE(), "tokenizer: byte-pair encoding")
    targets = [record[objective.output_text] for record in _spread(sample)]
    single = sum(len(target.split()) == 1 for target in targets) / max(1, len(targets))
    distinct = len(set(targets)) / max(1, len(targets))
    characters = sum(map(len, targets)) / max(1, len(targets))
    unspaced = sum(len(_UNSPACED.findall(target)) for target in targets)
    spaced = unspaced <= 0.5 * sum(map(len, targets))
    if single >= ONE_WORD and distinct >= DISTINCT and characters <= LONGEST_WORD and spaced:
        return Choice(Characters(), f"tokenizer: characters, because {single:.0%} of the targets are a single word")
    return Choice(BPE(), "tokenizer: byte-pair encoding")


def _for_classes(texts: Sequence[str]) -> Choice:
    """Return words as the tokenizer for a classifier if they suit the texts, else byte-pair encoding.

    Words are chosen if white space separates them from punctuation and most of them occur at least twice. On 4,452
    questions from TREC, words are 1.4 points of accuracy better than byte-pair encoding.
    """
    words = [word for text in texts for word in text.split()]
    counts = Counter(words)
    repeated = sum(count for count in counts.values() if count > 1) / max(1, len(words))
    attached = sum(_PUNCTUATED.search(word) is not None for word in words) / max(1, len(words))
    if attached <= SEPARATE and repeated >= REPEATED:
        return Choice(Words(), "tokenizer: words, because the text separates them from punctuation")
    why = f"only {repeated:.0%} of the words occur twice"
    if attached > SEPARATE:
        why = f"punctuation is attached to {attached:.0%} of the words"
    return Choice(BPE(), f"tokenizer: byte-pair encoding, because {why}")


@dataclass(frozen=True)
class Limit:
    """A length limit in tokens. Depending on `long`, longer sources are cut or their pairs are dropped."""

    max_len: int
    long: Long
    why: str


def choose_limit(
    objective: Objective,
    sample: Sequence[Record],
    tokenizers: dict[str, Tokenizer],
    room: int,
    long: Long | None = None,
) -> Limit:
    """Return a length limit between 256 and `room` tokens, and the treatment of longer texts.

    The limit covers 99 % of the texts, or as many as `room` permits. `long` is the treatment of longer texts, "cut" or
    "drop"; with None it is chosen here. If targets are much shorter than sources, as in summaries, long sources are
    cut, because the beginning matters most. Otherwise a pair with a long source or target is dropped, because a
    truncated source would no longer match its target.
    """
    if objective.model == "language_model":
        return Limit(SMALLEST_LIMIT, "drop", "")
    examined = _spread(sample)
    lengths = {
        name: np.asarray([len(ids) for ids in tokenizers[name].encode_batch([r[text] for r in examined])] or [0])
        for name, text in objective.encoded.items()
    } or {name: objective.table(examined, tokenizers)[name].lengths for name in objective.measured}
    classes = objective.model == "classifier"
    summaries = not classes and bool(lengths["target"].sum() < SUMMARY * lengths["source"].sum())
    if long is None:
        long = "cut" if classes or summaries else "drop"
    summaries &= long == "cut"
    room = max(SMALLEST_LIMIT, min(room, BEGINNING) if summaries else room)
    most = max(int(np.quantile(counts, WHOLE)) for counts in lengths.values())
    max_len = min(max(SMALLEST_LIMIT, -(-most // 64) * 64), room)
    share = float(np.mean(np.maximum.reduce(list(lengths.values())) <= max_len))
    effect = "longer sources are cut there" if long == "cut" else "pairs with a longer side are left out"
    if classes:
        effect = "longer texts are cut there"
    return Limit(max_len, long, f"length limit: {max_len} tokens hold {share:.1%}; {effect}")


def _spread(sample: Sequence[Record]) -> Sequence[Record]:
    """Return at most `EXAMINED` training examples, evenly spread over the sample."""
    return sample[:: max(1, -(-len(sample) // EXAMINED))]
