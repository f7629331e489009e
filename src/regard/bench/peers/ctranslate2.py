"""CTranslate2 with regard's weights, in float32 and int8, called directly (`translate_batch`) or by regard's engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from regard.bench.peers.base import DecodingModel, Ids, count, library
from regard.bench.shapes import BOS, EOS, FIRST, LONGEST, PAD, Shape
from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.inference.ctranslate2 import CTranslate2
from regard.inference.ctranslate2_export import Vocabulary, written
from regard.models.base import Model

STORED = ("float32", "int8")
UNKNOWN = FIRST - 1


def vocabulary(shape: Shape) -> list[str]:
    """Return a token string for every id."""
    return [f"w{n}" for n in range(shape.vocab)]


@contextmanager
def exported(shape: Shape, ours: Model, stored: str) -> Iterator[Path]:
    """Yield a temporary folder that contains the weights of `ours` in CTranslate2's format."""
    tokens = Vocabulary(vocabulary(shape), BOS, EOS, UNKNOWN)
    spec = written(ours, tokens, tokens, max(LONGEST))
    spec.optimize(quantization=stored)
    with TemporaryDirectory() as folder:
        spec.save(folder)
        yield Path(folder)


def decoding_models(shape: Shape, ours: Model, device: torch.device, dtype: torch.dtype) -> list[DecodingModel]:  # noqa: ARG001
    """Return CTranslate2's translators for a CPU. On a GPU, only PyTorch models are compared, so the list is empty."""
    return [_raw(shape, ours, stored) for stored in STORED] if device.type == "cpu" else []


def _raw(shape: Shape, ours: Model, stored: str) -> DecodingModel:
    tokens = vocabulary(shape)
    ids = {token: n for n, token in enumerate(tokens)}
    with exported(shape, ours, stored) as folder:
        translator = library("ctranslate2").Translator(
            str(folder), compute_type=stored, inter_threads=1, intra_threads=torch.get_num_threads()
        )

    def search(sources: Ids, beams: int, length: int) -> Ids:
        texts = [[tokens[n] for n in source] for source in sources]
        results = translator.translate_batch(
            texts, beam_size=beams, max_decoding_length=length, min_decoding_length=length
        )
        return [[ids[token] for token in result.hypotheses[0]] for result in results]

    return DecodingModel(f"ctranslate2 {stored}", count(ours), search)


def engine(shape: Shape, ours: Model, stored: str) -> DecodingModel:
    """Return the CTranslate2 engine of `regard translate` as a model to benchmark. Inputs and outputs are token ids.

    The engine cannot force an output length, so the weights of `ours` must make the end token impossible.
    """
    tokens = vocabulary(shape)
    with exported(shape, ours, stored) as folder:
        translator = CTranslate2(
            folder, (tokens, tokens), SpecialTokens(BOS, EOS, PAD), max(LONGEST), stored, torch.get_num_threads()
        )

    def search(sources: Ids, beams: int, length: int) -> Ids:
        beam, limits = Beam(beam_size=beams, stopping="ctranslate2"), Limits(max_len=length)
        outputs = translator.find(sources, beam, len(sources), limits, TokenConstraints(), range(len(sources)))
        return [list(best[0].ids) for best in outputs]

    return DecodingModel(f"regard (ctranslate2 {stored})", count(ours), search)
