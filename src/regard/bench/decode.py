"""A race in decoding: output tokens a second of beam search over ids, every output of one forced length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from regard import fast
from regard.batch import Batch, pad
from regard.bench.contest import Contestant, Row, Tell, UnfairError, check_sizes, race
from regard.bench.peers import Peer, ctranslate2
from regard.bench.peers.base import Ids, Speaker, count
from regard.bench.shapes import BOS, EOS, FIRST, PAD, Shape
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.search import find
from regard.fast.beam_search import captured
from regard.models.base import Generator, LanguageModel, Model
from regard.models.build import build

ENDS = SpecialTokens(BOS, EOS, PAD)


@dataclass(frozen=True)
class Load:
    """What is decoded on a device: settings of (batch, beams), lengths of a source and of every output."""

    settings: tuple[tuple[int, int], ...]
    source: int
    output: int
    dtype: torch.dtype


LOADS = {
    "cpu": Load(((1, 1), (1, 5), (32, 1), (32, 5)), 20, 30, torch.float32),
    "cuda": Load(((1, 5), (64, 5), (512, 5)), 24, 32, torch.bfloat16),
}


@dataclass(frozen=True)
class Setting:
    """The rows of one batch size and number of beams."""

    batch: int
    beams: int
    rows: list[Row]


def decode(
    shape: Shape, load: Load, peers: Sequence[Peer], rounds: int, device: torch.device, tell: Tell
) -> list[Setting]:
    """Ours and theirs with the same weights. All must say what they were asked for: so many ids for every source."""
    torch.manual_seed(0)
    ours = mute(build(shape.spec(smoothing=0.0), seed=1))
    theirs = [speaker for peer in peers for speaker in peer.code().speakers(shape, ours, device, load.dtype)]
    engines = (
        [ctranslate2.engine(shape, ours, "int8")] if device.type == "cpu" and "ctranslate2" in names(peers) else []
    )
    speakers = [our_speaker(ours, device, load.dtype), *engines, *theirs]
    settings = []
    for batch, beams in load.settings:
        tell(f"batch {batch}, beam {beams}")
        contestants = [entered(speaker, shape, load, batch, beams) for speaker in speakers]
        check_sizes(count(ours), contestants)
        settings.append(Setting(batch, beams, race(contestants, rounds, device, tell)))
        if device.type == "cuda" and not captured(ours):
            raise UnfairError("regard: its search was not captured; the logger regard.decoding says why")
    return settings


def mute(model: Model) -> Generator:
    """The model with vectors of 0 for what is not a word: of so many words some are always likelier."""
    assert isinstance(model, LanguageModel)
    with torch.no_grad():
        for table in model.tables.parameters():
            table[:FIRST] = 0.0
    return model


def names(peers: Sequence[Peer]) -> set[str]:
    """Who takes part."""
    return {peer.name for peer in peers}


def our_speaker(ours: Generator, device: torch.device, dtype: torch.dtype) -> Speaker:
    """Beam search as `regard translate` runs it, from ids to ids."""
    ours.to(device, dtype).eval()
    fast.install(ours, fixed=True)  # as a run that is loaded does

    def say(sources: Ids, beams: int, length: int) -> Ids:
        ids, seg = pad(sources)
        batch = Batch(ids, source=ids, source_seg=seg).to(device)
        found = find(ours, batch, Beam(beam_size=beams), ENDS, Limits(length, length))
        return [list(best[0].ids) for best in found]

    return Speaker("regard", count(ours), say)


def entered(speaker: Speaker, shape: Shape, load: Load, batch: int, beams: int) -> Contestant:
    """Somebody who decodes one batch a turn, and is asked whether the outputs are as long as they must be."""

    def turn(number: int) -> int:
        said = speaker.say(sources(shape, load, batch, seed=number), beams, load.output)
        lengths = {len(ids) for ids in said}
        if len(said) != batch or lengths != {load.output}:
            raise UnfairError(
                f"{speaker.title} said {len(said)} outputs of {sorted(lengths)} tokens, not {batch} of {load.output}"
            )
        return batch * load.output

    return Contestant(speaker.title, speaker.parameters, turn)


def sources(shape: Shape, load: Load, batch: int, seed: int) -> Ids:
    """Sources of about the same length: two thirds to four thirds of what is asked for, with their end."""
    rng = np.random.default_rng([seed, batch])
    lengths = rng.integers(2 * load.source // 3, 4 * load.source // 3 + 1, batch).tolist()
    return [[*rng.integers(FIRST, shape.vocab, n - 1).tolist(), EOS] for n in lengths]
