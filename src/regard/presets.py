"""Presets: published models and small versions of them, as functions that return a model spec."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from regard.catalogue import edited
from regard.errors import SpecError, nearest
from regard.models.base import ModelSpec
from regard.models.baselines.attention_score import AdditiveScore, GeneralScore
from regard.models.baselines.bytenet import ByteNet
from regard.models.baselines.convs2s import ConvS2S
from regard.models.baselines.rnn import ConstantState, EncoderState, Recurrent, RecurrentDecoder, RecurrentEncoder
from regard.models.decoder_only import DecoderOnly
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly, Pooled, SentenceClassifier
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.noisy_experts import NoisyTopKExperts
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.embedding import Tokens
from regard.nn.init import GPT2Init, Normal, T5Init, Uniform
from regard.nn.linear import Dense
from regard.nn.no_residual import NoResidual
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.pattern import Blocks
from regard.nn.position.additive import Learned
from regard.nn.position.bias import T5Bias
from regard.nn.position.rotary import Rotary
from regard.nn.recurrent import LSTM
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax
from regard.nn.vocab.tables import Sharing
from regard.tree import swap


def preset(name: str, **overrides: Any) -> ModelSpec:
    """Return a preset by name, with some fields changed: `preset("t5_base", vocab=8000, **{"decoder.depth": 3})`."""
    if not isinstance(name, str) or name not in PRESETS:
        raise SpecError("", f"unknown preset {name!r}; {nearest(str(name), PRESETS)}")
    return edited(PRESETS[name](), overrides) if overrides else PRESETS[name]()


def _transformer(
    depth: int, d_model: int, heads: int, d_hidden: int | None, vocab: int, dropout: float
) -> EncoderDecoder:
    feedforward, head = FeedForward(d_hidden), Softmax(label_smoothing=0.1)
    encoder = Plain((Block((SelfAttention(), feedforward), PostNorm()),), depth)
    decoder = Plain((Block((SelfAttention(), CrossAttention(), feedforward), PostNorm()),), depth)
    return EncoderDecoder(
        vocab=vocab, d_model=d_model, heads=heads, dropout=dropout, encoder=encoder, decoder=decoder, head=head
    )


def _t5_stacks(norm: Norm, feedforward: FeedForward) -> dict[str, Any]:
    """Return T5's fields `encoder` and `decoder`: 12 + 12 pre-norm layers, unscaled attention, T5 position bias."""
    attention, cross, residual = SelfAttention(scale="none"), CrossAttention(scale="none"), PreNorm(norm)
    encoder, decoder = Block((attention, feedforward), residual), Block((attention, cross, feedforward), residual)
    return {"encoder": Plain((encoder,), 12, position=T5Bias()), "decoder": Plain((decoder,), 12, position=T5Bias())}


def transformer_base() -> EncoderDecoder:
    """Vaswani et al. 2017, base: 6 + 6 layers, width 512, 8 heads; 37,000 shared subwords."""
    return _transformer(6, 512, 8, None, 37000, 0.1)


def transformer_big() -> EncoderDecoder:
    """Vaswani et al. 2017, big: 6 + 6 layers, width 1024, 16 heads."""
    return _transformer(6, 1024, 16, None, 37000, 0.3)


def transformer_small() -> EncoderDecoder:
    """A small Transformer for a laptop: 3 + 3 layers, width 256, 4 heads."""
    return _transformer(3, 256, 4, None, 10000, 0.1)


def transformer_tiny() -> EncoderDecoder:
    """Wu et al. 2021: 4 + 4 layers, width 128, 4 heads, hidden width 256; large enough for Multi30k."""
    return _transformer(4, 128, 4, 256, 10000, 0.3)


def t5_base() -> EncoderDecoder:
    """Raffel et al. 2020, base (v1.0): pre-RMSNorm, no biases, unscaled attention, a position bias shared by layers."""
    return EncoderDecoder(
        vocab=32128,
        d_model=768,
        heads=12,
        attention_dropout=0.1,
        activation_dropout=0.1,
        input=Tokens(scaled=False, position=None),
        head=Softmax(scaled=True),
        linear=Dense(bias=False),
        init=T5Init(),
        **_t5_stacks(RMSNorm(), FeedForward(3072)),
    )


def narang_base() -> EncoderDecoder:
    """The baseline of Narang et al. 2021: T5 base with LayerNorm and feed-forward biases; 223,043,328 parameters."""
    parts = _t5_stacks(LayerNorm(eps=1e-6), FeedForward(3072, bias=True))
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return replace(t5_base(), **rates, **parts, head=Softmax(scaled=True, z_loss=1e-4))


def narang_small() -> EncoderDecoder:
    """A small `narang_base` for ablations: 6 + 6 layers, width 256, 6 heads of 64, hidden width 1152, dropout 0.1."""
    small = edited(narang_base(), {"vocab": 10000, "d_model": 256, "heads": 6, "d_head": 64, "dropout": 0.1})
    small = swap(small, FeedForward, lambda branch: replace(branch, d_hidden=1152))
    return swap(small, Plain, lambda stack: replace(stack, depth=6))


def bert_base() -> EncoderOnly:
    """BERT base uncased with pooler, Devlin et al. 2019. Set `task` to train it: masked_lm, sentence_classifier, ..."""
    norm = LayerNorm(eps=1e-12)
    block = Block((SelfAttention(), FeedForward(3072, "gelu")), PostNorm(norm))
    return EncoderOnly(
        task=Pooled(),
        vocab=30522,
        d_model=768,
        heads=12,
        attention_dropout=0.1,
        input=Tokens(scaled=False, position=Learned(512), norm=norm, types=2),
        encoder=Plain((block,), 12),
        init=Normal(0.02),
    )


def gpt2_small() -> DecoderOnly:
    """GPT-2 small, Radford et al. 2019: 12 layers, width 768, 12 heads, 124M parameters."""
    block = Block((SelfAttention(), FeedForward(3072, "gelu_tanh")), PreNorm())
    return DecoderOnly(
        vocab=50257,
        d_model=768,
        heads=12,
        attention_dropout=0.1,
        input=Tokens(scaled=False, position=Learned(1024)),
        decoder=Plain((block,), 12),
        init=GPT2Init(),
    )


def hybrid() -> DecoderOnly:
    """A language model for long texts: 12 layers of width 768, of which every fourth has attention.

    The layers are those of Qwen3-Next at the size of GPT-2 small: three `gated_delta` layers, whose state has the same
    size for a text of any length, then one layer of full attention with query-key norm and rotary positions. Norms are
    RMS norms, and feed-forward layers are SwiGLU. Differs from Qwen3-Next: no output gate in attention, all channels of
    a head are rotated, as many key-value heads as query heads, and no experts.
    """
    feedforward, residual = FeedForward(2048, "swish", gated=True), PreNorm(RMSNorm())
    delta = Block((GatedDelta(d_value=128), feedforward), residual)
    attention = Block((SelfAttention(query_key_norm=RMSNorm()), feedforward), residual)
    return DecoderOnly(
        d_model=768,
        heads=12,
        input=Tokens(scaled=False, position=None),
        decoder=Plain((delta, delta, delta, attention), 12, position=Rotary()),
        linear=Dense(bias=False),
        init=GPT2Init(),
    )


def sahai() -> EncoderDecoder:
    """The block of the CS 182 lecture notes: attention without W_o, a residual connection, an RMS norm and an MLP.

    The MLP has no residual connection. In the decoder, self-attention has a residual connection without a norm, so that
    there is one norm per block, after cross-attention.
    """
    attention, cross = SelfAttention(output=False, bias=False), CrossAttention(output=False, bias=False)
    norm = PostNorm(RMSNorm())
    encoder = Block((attention, FeedForward()), (norm, NoResidual()))
    decoder = Block((attention, cross, FeedForward()), (PostNorm(NoNorm()), norm, NoResidual()))
    return EncoderDecoder(vocab=10000, d_model=256, heads=4, encoder=Plain((encoder,), 3), decoder=Plain((decoder,), 3))


def lstm_lm() -> DecoderOnly:
    """Zaremba et al. 2014, medium: a language model with 2 LSTM layers of width 650 and untied embeddings.

    Differs from the paper: every batch begins with an empty state, and the forget bias starts at 1.
    """
    return DecoderOnly(
        vocab=10000,
        d_model=650,
        heads=1,
        dropout=0.5,
        tied=False,
        input=Tokens(scaled=False, position=None),
        decoder=Plain((Block((Recurrence(),), NoResidual()),), 2),
        head=Softmax(bias=True),
        init=Uniform(0.05),
    )


def lstm_classifier() -> EncoderOnly:
    """A bidirectional LSTM, 128 units per direction, that classifies a text from the last state of each direction."""
    return EncoderOnly(
        task=SentenceClassifier(2, pool="ends", pooler=False),
        vocab=10000,
        d_model=256,
        heads=1,
        dropout=0.3,
        input=Tokens(position=None),
        encoder=Plain((Block((Recurrence(bidirectional=True),), NoResidual()),), 1),
    )


def rnn() -> Recurrent:
    """A bidirectional LSTM encoder-decoder: 2 + 2 layers, width 256; the decoder reads only the last encoder state."""
    return Recurrent(
        vocab=10000,
        d_model=256,
        encoder=RecurrentEncoder(d_hidden=128),
        decoder=RecurrentDecoder(),
        head=Softmax(label_smoothing=0.1),
    )


def rnn_attention() -> Recurrent:
    """`rnn` with attention to the source (Bahdanau et al. 2015) and the "general" score of Luong et al. 2015."""
    return replace(rnn(), decoder=RecurrentDecoder(attention=GeneralScore()))


def gnmt() -> Recurrent:
    """Wu et al. 2016, GNMT: 8 + 8 LSTM layers, width 1024, residual from layer 3, normalised additive attention.

    From the paper: sizes, residual connections, a bidirectional first encoder layer, and attention queries from the
    bottom decoder layer. The context vector is an input of all higher decoder layers.

    From NVIDIA's code, which differs from the paper or adds details: dropout 0.2, weights from U(-0.1, 0.1), no forget
    bias, label smoothing 0.1, one embedding table for both languages, and an untied softmax. The query is the state
    after the current token instead of before it, so that a layer processes all tokens in one call.

    Differs from both: one bias per gate instead of two. The paper's beam search has `alpha=0.2, coverage=0.2`.
    """
    cell = LSTM(forget_bias=0.0)
    return Recurrent(
        vocab=32000,
        d_model=1024,
        sharing=Sharing(input_output=False),
        input=Tokens(scaled=False, position=None),
        encoder=RecurrentEncoder(cell, 8, direction="first_both", residual_from=3),
        decoder=RecurrentDecoder(
            cell,
            8,
            residual_from=3,
            initial_state=ConstantState(),
            attention=AdditiveScore(normalised=True),
            query="bottom",
        ),
        head=Softmax(bias=True, label_smoothing=0.1),
        init=Uniform(),
    )


def lstm_attention() -> Recurrent:
    """Tensor2Tensor's `lstm_attention`, the baseline of Liu et al. 2018: 2 + 2 LSTM layers, width 128, additive score.

    The encoder reads the source backwards, and its last states initialise the decoder. The output of each decoder step
    is an input of the next step. Differs from Tensor2Tensor: a learned linear map from the last encoder states to the
    first decoder states, and a tanh of the decoder's output.
    """
    return Recurrent(
        vocab=32768,
        d_model=128,
        encoder=RecurrentEncoder(direction="backwards"),
        decoder=RecurrentDecoder(
            initial_state=EncoderState("linear"), attention=AdditiveScore(), input_feeding="output"
        ),
    )


def transformer_ed() -> EncoderDecoder:
    """Liu et al. 2018, Transformer-ED: Tensor2Tensor's `transformer_base_v1`, for sources of up to 500 tokens."""
    return _transformer(6, 512, 8, None, 32768, 0.1)


def transformer_d() -> DecoderOnlyTranslator:
    """Liu et al. 2018, Transformer-D: the decoder of `transformer_ed` reads source and target as one sequence.

    The paper uses it for sources of up to 4,000 tokens, and trains it to predict the tokens of the source as well.
    """
    block = Block((SelfAttention(), FeedForward()), PostNorm())
    head = Softmax(label_smoothing=0.1)
    return DecoderOnlyTranslator(vocab=32768, decoder=Plain((block,), 6), head=head, loss_on="all")


def transformer_dmca() -> DecoderOnlyTranslator:
    """Liu et al. 2018, Transformer-DMCA, for sources of up to 11,000 tokens: width 1024, 8 heads.

    Of the five layers, the first, third and last have attention within blocks of 256 tokens; the second and fourth have
    memory-compressed attention. Sizes and norms are those of Tensor2Tensor's `transformer_moe_prepend_8k`. That model
    differs in three ways: its feed-forward layers are two separable convolutions, its local attention also covers the
    preceding block, and its compression is one convolution before the projections.
    """
    return _dmca(FeedForward(2048))


def transformer_dmca_moe() -> DecoderOnlyTranslator:
    """`transformer_dmca` with a mixture of 256 experts (Shazeer et al. 2017) in the middle layer, 2 per token."""
    return _dmca(NoisyTopKExperts(256, 2, 2048))


def _dmca(middle: BranchSpec) -> DecoderOnlyTranslator:
    local, compressed, feedforward = (
        SelfAttention(attention_pattern=Blocks(256)),
        CompressedAttention(),
        FeedForward(2048),
    )
    branches = ((local, feedforward), (compressed, feedforward), (local, middle), (compressed, feedforward))
    pattern = tuple(Block(pair, PreNorm()) for pair in (*branches, branches[0]))
    return DecoderOnlyTranslator(vocab=32768, d_model=1024, heads=8, decoder=Plain(pattern, 5), loss_on="all")


def convs2s() -> ConvS2S:
    """Gehring et al. 2017 with the sizes of fairseq's IWSLT model: 4 + 3 layers of width 256, kernel size 3."""
    return ConvS2S(dropout=0.2, head=Softmax(bias=True, label_smoothing=0.1))


def convs2s_wmt() -> ConvS2S:
    """Gehring et al. 2017 for WMT en-de: 15 + 15 layers of widths 512, 1024 and 2048; 40,000 shared subwords."""
    layers = ((512, 3),) * 9 + ((1024, 3),) * 4 + ((2048, 1),) * 2
    return replace(convs2s(), vocab=40000, d_model=768, d_out=512, encoder=layers, decoder=layers)


def bytenet() -> ByteNet:
    """Kalchbrenner et al. 2016: 30 + 30 blocks of width 800 over characters."""
    return ByteNet(dropout=0.0)


def bytenet_small() -> ByteNet:
    """A small version of `bytenet` for a laptop: 10 + 10 blocks of width 256."""
    return ByteNet(d_model=256, encoder_blocks=10, decoder_blocks=10)


_ALL = (
    bert_base, bytenet, bytenet_small, convs2s, convs2s_wmt, gnmt, gpt2_small, hybrid, lstm_attention, lstm_classifier,
    lstm_lm, narang_base, narang_small, rnn, rnn_attention, sahai, t5_base, transformer_base, transformer_big,
    transformer_d, transformer_dmca, transformer_dmca_moe, transformer_ed, transformer_small, transformer_tiny,
)  # fmt: skip
PRESETS: dict[str, Callable[[], ModelSpec]] = {function.__name__: function for function in _ALL}
