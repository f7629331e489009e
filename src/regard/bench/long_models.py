"""The models of the length benchmark, which differ only in the layer that mixes the tokens of a sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from regard.errors import SpecError, nearest
from regard.models.base import Model, ModelSpec
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.models.encoder_only import EncoderOnly, MaskedLM
from regard.nn.big_bird import BigBird, CausalBigBird
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.convolution import SharedLightConv
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.linformer import LengthProjectionModule, Linformer
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.input import InputSpec
from regard.nn.pattern import AttentionPattern, Blocks, Window
from regard.nn.recurrent import LSTM, Elman
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain

JOIN = SharedLightConv(3)  # each output depends on a token and on the two before it, or on one neighbour on each side


@dataclass(frozen=True)
class Size:
    """The size of all models, and the number of keys that a query attends to in sparse attention."""

    depth: int
    d_model: int
    heads: int
    window: int  # of a sliding window; also the size of blocks in block-local attention
    block: int  # tokens in a block of BigBird
    rank: int  # mixtures in a Linformer
    vocab: int = 256


@dataclass(frozen=True)
class LongModel:
    """A model of the benchmark. `mixers(size, length)` returns the layers that mix tokens."""

    name: str
    title: str
    mixers: Callable[[Size, int], Sequence[BranchSpec]]
    encoder: bool = False

    def spec(self, size: Size, length: int, joined: bool = False) -> ModelSpec:
        """Return the model for sequences of up to `length` tokens: a causal language model, or an encoder.

        The hidden width of the feed-forward layers is chosen such that all models have about as many parameters as the
        model with full attention. If `joined`, the first layer is a convolution over neighbouring tokens, and there are
        no position vectors.
        """
        hidden = 4 * size.d_model
        model = self._spec(size, length, joined, hidden)
        layers = 2 * size.d_model * len(self._layers(size, length, joined))
        difference = _parameters(FULL._spec(size, length, joined, hidden)) - _parameters(model)
        return self._spec(size, length, joined, max(8, hidden + 8 * round(difference / layers / 8)))

    def attention_only(self) -> "LongModel":
        """Return the model with only its attention layers."""
        return replace(
            self, mixers=lambda size, length: [layer for layer in self.mixers(size, length) if layer.attends]
        )

    def _layers(self, size: Size, length: int, joined: bool) -> list[BranchSpec]:
        return [*([JOIN] if joined else []), *self.mixers(size, length)]

    def _spec(self, size: Size, length: int, joined: bool, hidden: int) -> ModelSpec:
        layers = self._layers(size, length, joined)
        stack = Plain(tuple(Block((layer, FeedForward(hidden)), PreNorm()) for layer in layers), len(layers))
        text: InputSpec = Tokens(position=None) if joined else Tokens()
        if self.encoder:
            return EncoderOnly(
                MaskedLM(),
                vocab=size.vocab,
                d_model=size.d_model,
                heads=size.heads,
                dropout=0.0,
                input=text,
                encoder=stack,
            )
        return DecoderOnly(
            vocab=size.vocab, d_model=size.d_model, heads=size.heads, dropout=0.0, input=text, decoder=stack
        )


def _parameters(spec: ModelSpec) -> int:
    """Return the number of parameters, without the length projections of a Linformer, which grow with the length."""
    return sum(
        parameter.numel()
        for module in build(spec, device="meta").modules()
        if not isinstance(module, LengthProjectionModule)
        for parameter in module.parameters(recurse=False)
    )


def parameters(model: Model) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _repeated(layer: BranchSpec) -> Callable[[Size, int], Sequence[BranchSpec]]:
    return lambda size, _: [layer] * size.depth


def _attention(pattern: Callable[[Size], AttentionPattern]) -> Callable[[Size, int], Sequence[BranchSpec]]:
    return lambda size, _: [SelfAttention(attention_pattern=pattern(size))] * size.depth


def _linformer(size: Size, length: int) -> Sequence[BranchSpec]:
    return [Linformer(max_len=length, rank=min(size.rank, length), sharing="layers")] * size.depth


def _hybrid(size: Size, _: int) -> Sequence[BranchSpec]:
    """Return `depth` - 1 layers of the delta rule, then one of full attention: three to one at a depth of 4."""
    return [GatedDelta()] * (size.depth - 1) + [SelfAttention()]


FULL = LongModel("full", "full attention", _repeated(SelfAttention()))
MODELS = (
    LongModel("elman", "Elman RNN", _repeated(Recurrence(Elman()))),
    LongModel("lstm", "LSTM", _repeated(Recurrence(LSTM()))),
    LongModel("convolution", "convolution", _repeated(SharedLightConv(7))),
    FULL,
    LongModel("window", "sliding window", _attention(lambda size: Window(size.window))),
    LongModel("blocks", "block-local attention", _attention(lambda size: Blocks(size.window))),
    LongModel("causal_big_bird", "BigBird, causal", _attention(lambda size: CausalBigBird(size.block))),
    LongModel("big_bird", "BigBird, encoder", _attention(lambda size: BigBird(size.block)), encoder=True),
    LongModel("linformer", "Linformer, encoder", _linformer, encoder=True),
    LongModel("compressed", "memory-compressed attention", _repeated(CompressedAttention())),
    LongModel("gated_delta", "gated delta rule", _repeated(GatedDelta())),
    LongModel("hybrid", "delta rule and full attention", _hybrid),
)


def select(names: Sequence[str] | None) -> tuple[LongModel, ...]:
    """Return the models with these names, in the order of `MODELS`; all models if `names` is None."""
    known = [model.name for model in MODELS]
    for name in names or ():
        if name not in known:
            raise SpecError("--models", f"unknown model {name!r}; {nearest(name, known)}")
    return tuple(model for model in MODELS if names is None or model.name in names)


def smaller(size: Size) -> Size:
    """Return the narrowest size with the same attention masks, to count visible pairs quickly."""
    return replace(size, d_model=2 * size.heads, vocab=8)
