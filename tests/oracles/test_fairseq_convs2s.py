"""ConvS2S equals fairseq's FConvModel with the same weights: outputs, gradients and decoding steps."""

import math
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.fconv import FConvDecoder, FConvEncoder, FConvModel
from torch import Tensor

from regard.batch import Batch
from regard.models.baselines.convs2s import ConvS2S
from regard.models.build import build
from regard.nn.embedding import Tokens
from regard.nn.position.additive import Learned
from regard.nn.trace import Trace
from regard.nn.vocab.tables import Sharing
from regard.weights import copy_from

pytestmark = pytest.mark.oracle

PAD, E, OUT, LENGTH = 1, 10, 8, 30
ENCODER, DECODER = ((6, 3), (9, 4), (9, 1)), ((7, 3), (7, 2), (9, 1))


def fairseq_model(shared: bool) -> tuple[Any, int]:
    words = Dictionary()
    for i in range(17):
        words.add_symbol(f"word{i}")
    # fairseq counts positions from the padding index on.
    encoder = FConvEncoder(words, E, None, LENGTH + PAD + 1, ENCODER, dropout=0.0)
    out = E if shared else OUT
    decoder = FConvDecoder(
        words, E, None, out, LENGTH + PAD + 1, DECODER, attention=True, dropout=0.0, share_embed=shared
    )
    model = FConvModel(encoder, decoder).double().eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5)
        if "embed" in name:
            with torch.no_grad():
                parameter[PAD] = 0.0
    return model, len(words)


def projection(theirs: Any) -> dict[str, Tensor]:
    """Return length, direction and bias of a layer; fairseq's convolutions have the shape (taps, inputs, outputs)."""
    g, v = theirs.weight_g, theirs.weight_v
    if v.dim() == 3:
        v = v.permute(2, 0, 1).flatten(1)
    return {"rows.length": g.flatten(), "rows.direction": v, "bias": theirs.bias}


def copied(theirs: Any, shared: bool) -> dict[str, Tensor]:
    """Return fairseq's weights under our names."""
    state: dict[str, Tensor] = {}

    def put(name: str, tensors: dict[str, Tensor]) -> None:
        state.update({f"{name}.{kind}": tensor for kind, tensor in tensors.items()})

    for ours, name, side in (("source", "encoder", theirs.encoder), ("target", "decoder", theirs.decoder)):
        state[f"tables.tables.{ours}.weight"] = side.embed_tokens.weight
        state[f"inputs.inputs.{ours}.position.weight"] = side.embed_positions.weight[PAD + 1 :]
        put(f"{name}.enter", projection(side.fc1))
        put(f"{name}.leave", projection(side.fc2))
        for i, (convolution, match) in enumerate(zip(side.convolutions, side.projections, strict=True)):
            put(f"{name}.blocks.{i}.convolution", projection(convolution))
            if match is not None:
                put(f"{name}.blocks.{i}.match", projection(match))
    for i, attention in enumerate(theirs.decoder.attention):
        put(f"decoder.blocks.{i}.attention.query", projection(attention.in_projection))
        put(f"decoder.blocks.{i}.attention.output", projection(attention.out_projection))
    last = theirs.decoder.fc3
    state["head.bias"] = last.bias
    if not shared:
        state["tables.tables.output.rows.length"] = last.weight_g.flatten()
        state["tables.tables.output.rows.direction"] = last.weight_v
    return state


def ours_of(theirs: Any, vocab: int, shared: bool) -> Any:
    spec = ConvS2S(
        vocab=vocab,
        d_model=E,
        d_out=None if shared else OUT,
        encoder=ENCODER,
        decoder=DECODER,
        dropout=0.0,
        input=Tokens(scaled=False, position=Learned(LENGTH)),
    )
    if shared:
        spec = ConvS2S(
            **{name: getattr(spec, name) for name in ("vocab", "d_model", "encoder", "decoder", "dropout", "input")},
            sharing=Sharing(source_target=False),
            output_table=None,
        )
    model: Any = build(spec).double().eval()
    copy_from(model, copied(theirs, shared))
    return model


def texts(vocab: int) -> tuple[Batch, Tensor, Tensor]:
    """Return two padded pairs as (our batch, fairseq's source, fairseq's target)."""
    rng = torch.Generator().manual_seed(1)
    source, target = (torch.randint(4, vocab, (2, n), generator=rng) for n in (7, 6))
    source[1, 4:], target[0, 5:] = PAD, PAD
    segments = ((ids != PAD).long() for ids in (target, source))
    target_seg, source_seg = segments
    return Batch(target, target.roll(-1, 1), target_seg, source, source_seg), source, target


@pytest.mark.parametrize("shared", [False, True], ids=["own output table", "shared with the input"])
def test_the_model_equals_fairseq(shared: bool) -> None:
    theirs, vocab = fairseq_model(shared)
    ours = ours_of(theirs, vocab, shared)
    batch, source, target = texts(vocab)
    trace, real = Trace(), target != PAD
    logits, attention = theirs(source, (source != PAD).sum(1), target)
    expected = logits.log_softmax(-1)
    actual = ours.log_probs(batch, trace=trace)
    # With padding, fairseq computes attention scores in float32.
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-5)
    weights = torch.stack(trace.weights["decoder.cross"]).mean(0)[:, 0]
    torch.testing.assert_close(weights[real], attention[real], rtol=0, atol=1e-6)


def test_outputs_and_gradients_without_padding_equal_fairseq() -> None:
    """fairseq scales the gradients of the encoder by 1 / (2 * number of attentions), as we do."""
    theirs, vocab = fairseq_model(False)
    ours = ours_of(theirs, vocab, False)
    batch, _, _ = texts(vocab)
    assert batch.source is not None
    ids, target = batch.source.masked_fill(batch.source == PAD, 5), batch.target.masked_fill(batch.target == PAD, 6)
    whole = Batch(target, target, source=ids)
    expected = theirs(ids, torch.tensor([7, 7]), target)[0].log_softmax(-1)
    actual = ours.log_probs(whole)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    for model, log_probs in ((theirs, expected), (ours, actual)):
        model.zero_grad()
        log_probs.gather(-1, target[..., None]).sum().backward()
    gradients = copied(_Gradients(theirs), False)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9, msg=name)


class _Gradients:
    """A view of a module in which parameters are replaced by their gradients."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.grad if isinstance(value, torch.nn.Parameter) else value if value is None else _Gradients(value)

    def __iter__(self) -> Any:
        return iter(None if part is None else _Gradients(part) for part in self.module)

    def __len__(self) -> int:
        return len(self.module)


def test_decoding_steps_equal_fairseq() -> None:
    theirs, vocab = fairseq_model(False)
    ours = ours_of(theirs, vocab, False)
    batch, source, target = texts(vocab)
    parent = torch.tensor([0, 1])
    with torch.no_grad():
        encoded = theirs.encoder(source, (source != PAD).sum(1))
        state: dict[str, Any] = {}
        decoding = ours.start(batch, 8)
        for t in range(1, 5):
            logits, _ = theirs.decoder(target[:, :t], encoded, state)
            actual = ours.advance(target[:, t - 1 : t], decoding)
            torch.testing.assert_close(actual, logits[:, -1].log_softmax(-1), rtol=0, atol=1e-5)
            theirs.decoder.reorder_incremental_state(state, parent)
            decoding.reorder(parent)


def test_initial_weights_have_the_standard_deviations_of_fairseq() -> None:
    """Both models are newly initialised."""
    words = Dictionary()
    for i in range(300):
        words.add_symbol(f"word{i}")
    layers, p = ((96, 3), (64, 3)), 0.3
    encoder = FConvEncoder(words, 80, None, 500, layers, dropout=p)
    decoder = FConvDecoder(words, 80, None, 72, 500, layers, attention=True, dropout=p)
    theirs = copied(FConvModel(encoder, decoder), False)
    ours = build(ConvS2S(vocab=len(words), d_model=80, d_out=72, encoder=layers, decoder=layers, dropout=p))
    for name, parameter in ours.named_parameters():
        if parameter.dim() == 2:
            assert math.isclose(parameter.std().item(), theirs[name].std().item(), rel_tol=0.05), name
