"""Models with known next-token distributions, searches written from their definitions, and tiny real models."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.batch import Batch, pad
from regard.decoding.hypothesis import SpecialTokens
from regard.models.base import Generator, LanguageModel
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.models.decoding import Decoding
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.cache import Rows
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Sharing

PAD, BOS, EOS = 0, 1, 2
ENDS = SpecialTokens(BOS, EOS, PAD)
NextLogProbs = Callable[[tuple[int, ...], tuple[int, ...]], list[float]]


class Texts:
    """A decoding state that contains all tokens that every row has read."""

    def __init__(self, rows: int) -> None:
        self.read: list[tuple[int, ...]] = [()] * rows

    def reorder(self, parent: Tensor) -> None:
        self.read = [self.read[i] for i in parent.tolist()]

    def keep(self, rows: Tensor, sources: Tensor) -> None:
        self.read = [self.read[i] for i in rows.tolist()]


class Stubborn(Texts):
    """A decoding state that cannot drop rows."""

    keep = None  # type: ignore[reportAssignmentType]


class KnownModel(Generator):
    """A model whose log-probabilities of the next token are `next_log_probs(source, output so far)`."""

    def __init__(self, next_log_probs: NextLogProbs, state: type[Texts] = Texts) -> None:
        super().__init__()
        self.next_log_probs, self.state = next_log_probs, state
        self.widths: list[int] = []  # the number of rows in each step
        self.eval()

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        rows = batch.target.shape[0] * beams
        sources = texts(batch.target, batch.target_seg)
        if batch.source is not None:
            sources = texts(batch.source, batch.source_seg)
        state = self.state(rows)
        state.read = [sources[row // beams] for row in range(rows)]
        self.prompted = batch.source is None
        output = self.state(rows)
        return Decoding(Rows(torch.zeros(rows, dtype=torch.int64), max_len), [state, (output, None)], beams)

    def advance(self, ids: Tensor, decoding: Decoding, seg: Tensor | None = None) -> Tensor:
        source, (output, _) = decoding.states
        first = decoding.rows.bound == 0
        decoding.rows.claim(ids.shape[1])
        decoding.rows.advance(ids.shape[1], None if seg is None else (seg != 0).sum(1))
        if not first:  # the first step reads bos or the prompt
            output.read = [(*text, *new) for text, new in zip(output.read, ids.tolist(), strict=True)]
        self.widths.append(ids.shape[0])
        return torch.tensor([self.next_log_probs(a, b) for a, b in zip(source.read, output.read, strict=True)])


def texts(ids: Tensor, seg: Tensor | None) -> list[tuple[int, ...]]:
    real = torch.ones_like(ids) if seg is None else seg
    return [tuple(row[: int(n)]) for row, n in zip(ids.tolist(), (real != 0).sum(1), strict=True)]


def random_log_probs(vocab: int, seed: int = 0, sharp: float = 1.5, eos: float = 0.0) -> NextLogProbs:
    """Return a function with a random but fixed distribution after every output; `eos` is added to the logit of eos."""

    def next_log_probs(source: tuple[int, ...], output: tuple[int, ...]) -> list[float]:
        digest = hashlib.blake2b(repr((seed, source, output)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        logits = torch.randn(vocab, generator=generator, dtype=torch.float64) * sharp
        logits[EOS] += eos
        return logits.log_softmax(0).tolist()

    return next_log_probs


def sources(*rows: Sequence[int]) -> Batch:
    """Return a batch of sources to translate, with a target that must not be read."""
    ids, seg = pad(rows)
    return Batch(torch.full((len(rows), 3), 9), source=ids, source_seg=seg)


def prompts(*rows: Sequence[int]) -> Batch:
    ids, seg = pad(rows)
    return Batch(ids, target_seg=seg)


def all_outputs(
    next_log_probs: NextLogProbs, source: tuple[int, ...], vocab: int, limit: int, least: int = 0
) -> Iterator[Any]:
    """Yield every possible output as (ids, log-probabilities including that of eos)."""
    tokens = [token for token in range(vocab) if token not in (PAD, BOS, EOS)]
    for n in range(least, limit + 1):
        for ids in itertools.product(tokens, repeat=n):
            yield ids, [next_log_probs(source, ids[:i])[token] for i, token in enumerate((*ids, EOS))]


def normalised(kind: str, alpha: float, log_prob: float, length: int) -> float:
    """Return the score by the formula of each normalisation."""
    if kind == "none":
        return log_prob
    return log_prob / length**alpha if kind == "mean" else log_prob / ((5 + length) / 6) ** alpha


def simple_beam(
    next_log_probs: NextLogProbs,
    source: tuple[int, ...],
    vocab: int,
    beams: int,
    limit: int,
    score: Callable[[float, int], float],
    enough: int | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """Beam search by definition, to the length limit or until `enough` hypotheses have ended.

    Return (ids, score) of each hypothesis, those that ended first.
    """
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], float]] = []
    for step in range(limit + 1):
        extended = []
        for ids, total in live:
            log_probs = next_log_probs(source, ids)
            extended += [(total + log_probs[t], t, ids) for t in range(vocab) if t not in (PAD, BOS)]
        extended.sort(reverse=True)
        ended += [(ids, score(total, step + 1)) for total, t, ids in extended[:beams] if t == EOS]
        if step == limit:
            break
        live = [((*ids, t), total) for total, t, ids in extended if t != EOS][:beams]
        if enough is not None and len(ended) >= enough:
            break
    ended.sort(key=lambda item: -item[1])
    if enough is not None and len(ended) >= enough:
        return ended
    done = {ids for ids, _ in ended}
    cut = [(ids, score(total, len(ids))) for ids, total in live if ids not in done]
    return ended + sorted(cut, key=lambda item: -item[1])


SIZES: dict[str, Any] = {"d_model": 16, "heads": 2, "dropout": 0.0}


def translator(vocab: int = 23, seed: int = 5, eos: float = 1.0, **changes: Any) -> LanguageModel:
    """Return a tiny encoder-decoder with random weights, whose outputs differ and sometimes end with eos."""
    spec = EncoderDecoder(
        vocab=vocab,
        **SIZES,
        sharing=Sharing(input_output=False),
        encoder=Plain((Block((SelfAttention(), FeedForward(24)), PreNorm()),), 2),
        decoder=Plain((Block((SelfAttention(), CrossAttention(), FeedForward(24)), PreNorm()),), 2),
        head=Softmax(bias=True),
        **changes,
    )
    return disturbed(spec, seed, eos)


def writer(vocab: int = 23, seed: int = 0, eos: float = 1.0, room: int | None = None, **changes: Any) -> LanguageModel:
    """Return a tiny decoder-only model; `room` is the number of learned positions (None: sinusoids)."""
    layout = Tokens() if room is None else Tokens(position=Learned(room))
    stack = Plain((Block((SelfAttention(), FeedForward(24)), PreNorm()),), 2)
    spec = DecoderOnly(
        vocab=vocab, **SIZES, input=layout, decoder=stack, tied=False, head=Softmax(bias=True), **changes
    )
    return disturbed(spec, seed, eos)


def disturbed(spec: Any, seed: int, eos: float) -> LanguageModel:
    model = build(spec, seed=seed)
    assert isinstance(model, LanguageModel)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=scale)
        model.head.get_parameter("bias")[EOS] += eos
    return model.eval()


def read_back(
    model: LanguageModel, ids: Sequence[int], ended: bool, source: Any = None, prompt: Any = None
) -> list[float]:
    """Return log p of every token of an output from one forward pass, and of eos if the output ended."""
    tokens = [*ids, EOS] if ended else [*ids]
    start = [BOS] if prompt is None else [*prompt]
    target = torch.tensor([[*start, *tokens]])[:, :-1]
    batch = Batch(target, source=None if source is None else torch.tensor([list(source)]))
    with torch.no_grad():
        log_probs = model.log_probs(batch)[0, len(start) - 1 :]
    return [float(log_probs[i, token]) for i, token in enumerate(tokens)]


def random_rows(count: int, vocab: int, longest: int = 9, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
