"""CTranslate2 with our weights, in float32 and in int8: its own `translate_batch`, and our engine around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from regard.bench.peers.base import Ids, Speaker, count, library
from regard.bench.shapes import BOS, EOS, FIRST, LONGEST, PAD, Shape
from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.inference.ctranslate2 import CTranslate2
from regard.inference.ctranslate2_export import Vocabulary, written
from regard.models.base import Model

STORED = ("float32", "int8")
UNKNOWN = FIRST - 1


def words(shape: Shape) -> list[str]:
    """A word for every id."""
    return [f"w{n}" for n in range(shape.vocab)]


@contextmanager
def exported(shape: Shape, ours: Model, stored: str) -> Iterator[Path]:
    """A folder with our weights in their form, for as long as they are read."""
    known = Vocabulary(words(shape), BOS, EOS, UNKNOWN)
    theirs = written(ours, known, known, max(LONGEST))
    theirs.optimize(quantization=stored)
    with TemporaryDirectory() as folder:
        theirs.save(folder)
        yield Path(folder)


def speakers(shape: Shape, ours: Model, device: torch.device, dtype: torch.dtype) -> list[Speaker]:  # noqa: ARG001
    """Its translator. On a CPU alone: what is compared on a GPU is PyTorch."""
    return [_raw(shape, ours, stored) for stored in STORED] if device.type == "cpu" else []


def _raw(shape: Shape, ours: Model, stored: str) -> Speaker:
    known = words(shape)
    ids = {word: n for n, word in enumerate(known)}
    with exported(shape, ours, stored) as folder:
        translator = library("ctranslate2").Translator(
            str(folder), compute_type=stored, inter_threads=1, intra_threads=torch.get_num_threads()
        )

    def say(sources: Ids, beams: int, length: int) -> Ids:
        texts = [[known[n] for n in source] for source in sources]
        found = translator.translate_batch(
            texts, beam_size=beams, max_decoding_length=length, min_decoding_length=length
        )
        return [[ids[word] for word in one.hypotheses[0]] for one in found]

    return Speaker(f"ctranslate2 {stored}", count(ours), say)


def engine(shape: Shape, ours: Model, stored: str) -> Speaker:
    """The engine of `regard translate`, from ids to ids. It forces no length: the weights must not say the end."""
    known = words(shape)
    with exported(shape, ours, stored) as folder:
        found = CTranslate2(
            folder, (known, known), SpecialTokens(BOS, EOS, PAD), max(LONGEST), stored, torch.get_num_threads()
        )

    def say(sources: Ids, beams: int, length: int) -> Ids:
        search, limits = Beam(beam_size=beams, stopping="ctranslate2"), Limits(max_len=length)
        said = found.find(sources, search, len(sources), limits, TokenConstraints(), range(len(sources)))
        return [list(best[0].ids) for best in said]

    return Speaker(f"regard (ctranslate2 {stored})", count(ours), say)
