"""How fast we decode: beam search with five beams against `generate(num_beams=5)` of Hugging Face Marian.

Both have the same weights, translate the same padded batches of sources and must say exactly 20 tokens, so that the
work is the same however well either would know when to stop. Before anything is timed, both must find the same texts.

A round is one batch of 32 sources, or eight times a batch of one, by each side in alternating order, in CPU seconds of
one thread. "find" is `regard.decoding.search.find`, "text" the text level above it: tokenizing, sorting, joining the
pieces again. The exit code is 1 if an interval lies below its limit.

    python bench/decode.py --rounds 10
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from marian import BOS, EOS, PAD, Result, pair, parser, report, summarise
from overhead import SHAPES, VOCAB, interleave, sentences
from torch import Tensor

from regard.batch import Batch, pad
from regard.data.tokenizer import Words, train
from regard.decoding.api import Texts
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Ends, Limits
from regard.decoding.search import find
from regard.models.encoder_decoder import EncoderDecoderModel

LIMIT = 1.1
LENGTH = 20
SEARCH, LIMITS, ENDS = Beam(beams=5), Limits(LENGTH, LENGTH), Ends(BOS, EOS, PAD)
SIZES = {32: 1, 1: 8}  # sources of a batch, and batches of a round
Ids = list[list[int]]


def word(number: int) -> str:
    """The word of an id."""
    return f"w{number}"


def our_ids(model: EncoderDecoderModel, sources: Ids, search: Beam = SEARCH) -> Ids:
    """What we say."""
    ids, seg = pad(sources)
    found = find(model, Batch(ids, source=ids, source_seg=seg), search, ENDS, LIMITS)
    return [list(best[0].ids) for best in found]


def their_ids(theirs: Any, sources: Ids, **options: Any) -> Ids:
    """What Marian says."""
    ids, seg = pad(sources)
    lengths = {"min_new_tokens": LENGTH, "max_new_tokens": LENGTH}
    said: Tensor = theirs.generate(
        ids, attention_mask=seg, num_beams=SEARCH.beams, do_sample=False, **lengths, **options
    )
    return said[:, 1:].tolist()


def check(ours: EncoderDecoderModel, theirs: Any, sources: Ids) -> None:
    """Refuse to compare what does not find the same. We never say bos or padding, which they must be told."""
    found = our_ids(ours, sources, replace(SEARCH, stopping="huggingface"))
    assert found == their_ids(theirs, sources, suppress_tokens=[PAD, BOS])
    assert all(len(ids) == LENGTH for ids in (*found, *our_ids(ours, sources), *their_ids(theirs, sources)))


def measure(sides: list[Callable[[Ids], Any]], rounds: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """CPU seconds of every round and side, and its output tokens."""
    batches, warm_up = SIZES[size], 2
    drawn = [[*source, EOS] for source, _ in sentences(SHAPES["small"], (warm_up + rounds) * batches * size, seed=size)]

    def timed(side: Callable[[Ids], Any], i: int) -> float:
        some = drawn[i * batches * size : (i + 1) * batches * size]
        began = time.process_time()
        for at in range(0, len(some), size):
            side(some[at : at + size])
        return time.process_time() - began

    seconds = interleave([lambda i, side=side: timed(side, i) for side in sides], rounds, warm_up)
    return seconds, np.full(rounds, size * batches * LENGTH)


def main() -> int:
    """Measure, print, and answer 1 if a limit is missed."""
    options = parser(__doc__, rounds=20).parse_args()
    torch.set_num_threads(1)
    ours, theirs = pair(smoothing=0.0, dropout=0.1)
    ours, theirs = ours.eval(), theirs.eval()
    check(ours, theirs, [[*source, EOS] for source, _ in sentences(SHAPES["small"], 32, seed=7)])
    tokenizer = train(Words(VOCAB), [" ".join(map(word, range(VOCAB)))] * 2)
    texts = Texts([ours], tokenizer, tokenizer, 150, torch.device("cpu"))

    def text(sources: Ids) -> Any:
        return list(texts.translate([" ".join(map(word, ids[:-1])) for ids in sources], SEARCH, len(sources), LIMITS))

    def results() -> Iterator[Result]:
        for size in SIZES:
            seconds, tokens = measure(
                [lambda ids: our_ids(ours, ids), lambda ids: their_ids(theirs, ids), text], options.rounds, size
            )
            yield summarise(f"beam 5, batch {size}, find", seconds[:, :2], tokens, LIMIT)
            yield summarise(f"beam 5, batch {size}, text", seconds[:, [2, 1]], tokens, LIMIT)

    return report(results(), options)


if __name__ == "__main__":
    sys.exit(main())
