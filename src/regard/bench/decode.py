"""The decoding benchmark: output tokens per second of beam search. All outputs are forced to the same length."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from regard import fast
from regard.batch import Batch, pad
from regard.bench.peers import Peer, ctranslate2
from regard.bench.peers.base import DecodingModel, Ids, count
from regard.bench.race import Contestant, Report, Row, UnfairError, check_sizes, race
from regard.bench.shapes import BOS, EOS, FIRST, PAD, Shape
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.search import find
from regard.fast.beam_search import is_captured
from regard.models.base import Generator, LanguageModel, Model
from regard.models.build import build

SPECIAL = SpecialTokens(BOS, EOS, PAD)


@dataclass(frozen=True)
class Workload:
    """The decoding work on one device: pairs (batch size, beam size), the mean source length, and the output length."""

    settings: tuple[tuple[int, int], ...]
    source: int
    output: int
    dtype: torch.dtype


WORKLOADS = {
    "cpu": Workload(((1, 1), (1, 5), (32, 1), (32, 5)), 20, 30, torch.float32),
    "cuda": Workload(((1, 5), (64, 5), (512, 5)), 24, 32, torch.bfloat16),
}


def decode(
    shape: Shape, workload: Workload, peers: Sequence[Peer], rounds: int, device: torch.device, report: Report
) -> list[Row]:
    """Benchmark regard and the peers with equal weights, and return table rows for every batch and beam size."""
    torch.manual_seed(0)
    ours = without_special_tokens(build(shape.spec(smoothing=0.0), seed=1))
    theirs = [model for peer in peers for model in peer.code().decoding_models(shape, ours, device, workload.dtype)]
    engines = []
    if device.type == "cpu" and any(peer.name == "ctranslate2" for peer in peers):
        engines = [ctranslate2.engine(shape, ours, "int8")]
    models = [our_model(ours, device, workload.dtype), *engines, *theirs]
    rows = []
    for batch, beams in workload.settings:
        report(f"batch {batch}, beam {beams}")
        contestants = [contestant(model, shape, workload, batch, beams) for model in models]
        check_sizes(count(ours), contestants)
        results = race(contestants, rounds, device, report)
        rows += [replace(row, name=f"{row.name} {batch}:{beams}") for row in results]
        if device.type == "cuda" and not is_captured(ours):
            raise UnfairError("regard: its search was not captured; the logger regard.decoding has the reason")
    return rows


def without_special_tokens(model: Model) -> Generator:
    """Set the embeddings of special tokens to 0, so that beam search never chooses one, and return the model."""
    assert isinstance(model, LanguageModel)
    with torch.no_grad():
        for table in model.tables.parameters():
            table[:FIRST] = 0.0
    return model


def our_model(ours: Generator, device: torch.device, dtype: torch.dtype) -> DecodingModel:
    """Return the beam search of `regard translate` as a model to benchmark, from token ids to token ids."""
    ours.to(device, dtype).eval()
    fast.install(ours, fixed=True)  # as regard.load does

    def search(sources: Ids, beams: int, length: int) -> Ids:
        ids, seg = pad(sources)
        batch = Batch(ids, source=ids, source_seg=seg).to(device)
        outputs = find(ours, batch, Beam(beam_size=beams), SPECIAL, Limits(length, length))
        return [list(best[0].ids) for best in outputs]

    return DecodingModel("regard", count(ours), search)


def contestant(model: DecodingModel, shape: Shape, workload: Workload, batch: int, beams: int) -> Contestant:
    """Return a contestant that decodes one batch per round, and raises an error if an output has the wrong length."""

    def turn(number: int) -> int:
        outputs = model.search(sources(shape, workload, batch, seed=number), beams, workload.output)
        lengths = {len(ids) for ids in outputs}
        if len(outputs) != batch or lengths != {workload.output}:
            raise UnfairError(
                f"{model.title} returned {len(outputs)} outputs of {sorted(lengths)} tokens, "
                f"not {batch} of {workload.output}"
            )
        return batch * workload.output

    return Contestant(model.title, model.parameters, turn)


def sources(shape: Shape, workload: Workload, batch: int, seed: int) -> Ids:
    """Return random source sentences of 2/3 to 4/3 of the workload's mean length, including an end token."""
    rng = np.random.default_rng([seed, batch])
    lengths = rng.integers(2 * workload.source // 3, 4 * workload.source // 3 + 1, batch).tolist()
    return [[*rng.integers(FIRST, shape.vocab, n - 1).tolist(), EOS] for n in lengths]
