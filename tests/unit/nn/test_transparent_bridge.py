"""Transparent attention: every decoder block attends to its own mixture of the encoder layers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.batch import Batch, pad
from regard.errors import SpecError
from regard.models.build import build, count
from regard.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from regard.nn.bridge import Last, Transparent, TransparentNormed
from regard.nn.core import Site
from regard.nn.mask import Context, Mask, View
from regard.nn.memory import Memory
from regard.nn.norm import LayerNorm
from regard.nn.residual import PreNorm, Residual
from regard.nn.rms_norm import RMSNorm
from regard.nn.stacks.base import StackOut
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.testing import tiny
from regard.tree import swap
from regard.variants import apply

MakeSite = Callable[..., Site]
ENCODER, DECODER = 3, 2  # different, so that confusing the axes is an error


def hidden_states(layers: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 4, 12) for _ in range(layers))


@pytest.mark.parametrize("norm", [None, LayerNorm(), RMSNorm()])
def test_by_formula(norm: Any, site: MakeSite) -> None:
    """z_j = sum_i S_ij h_i, S = softmax over the layers i."""
    bridge = Transparent() if norm is None else TransparentNormed(norm)
    module: Any = bridge.build(4, 2, site())
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    h, seg = hidden_states(4), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    memory = module(StackOut(h[-1], seg, h))
    assert memory.seg is seg
    assert len(memory.x) == 2
    W = module.weight
    for j in range(2):
        total = sum(W[i, j].exp() for i in range(4))
        z = torch.zeros(2, 4, 12)
        for i in range(4):
            x = h[i]
            if norm is not None:
                x = x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x
                x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * module.norms[i].weight
                x = x + module.norms[i].bias if isinstance(norm, LayerNorm) else x
            z = z + W[i, j].exp() / total * x
        torch.testing.assert_close(memory.x[j], z, rtol=0, atol=1e-12)


def test_parameters_and_initial_weights(site: MakeSite) -> None:
    bridge: Any = Transparent().build(400, 100, site())
    assert [tuple(p.shape) for p in bridge.parameters()] == [(400, 100)]
    assert abs(bridge.weight.std().item() - 400**-0.5) < 1e-3
    normed = TransparentNormed().build(4, 2, site())
    assert sum(p.numel() for p in normed.parameters()) == 4 * 2 + 4 * 2 * 12
    assert Transparent.needs_layers
    assert TransparentNormed.needs_layers


def test_dropout_is_on_the_weights_and_in_training_only(site: MakeSite) -> None:
    module, h = Transparent().build(40, 2, site(dropout=0.5)), hidden_states(40)
    out = StackOut(h[-1], None, h)
    assert not torch.equal(module(out).x[0], module(out).x[0])
    module.eval()
    assert torch.equal(module(out).x[0], module(out).x[0])
    module.train()
    with torch.no_grad():
        module.weight.zero_()  # type: ignore[reportCallIssue, reportAttributeAccessIssue]
    torch.testing.assert_close(module(out).x[0], torch.stack(h).mean(0))


def test_encoder_layers_of_different_lengths_are_refused(site: MakeSite) -> None:
    module, h = Transparent().build(4, 2, site(path="bridge")), hidden_states(4)
    for x, layers in ((h[-1], ()), (h[-1], h[1:]), (torch.randn(2, 2, 12), h)):
        with pytest.raises(SpecError, match="the layers of this encoder have different lengths") as raised:
            module(StackOut(x, None, layers))
        assert raised.value.path == "bridge.kind"


def small(bridge: Any, **changes: Any) -> EncoderDecoder:
    model = replace(tiny.encoder_decoder(), bridge=bridge, dropout=0.0)
    model = swap(model, Residual, lambda _: PreNorm())
    assert isinstance(model.encoder, Plain)
    assert isinstance(model.decoder, Plain)
    encoder, decoder = replace(model.encoder, depth=ENCODER), replace(model.decoder, depth=DECODER, **changes)
    return replace(model, encoder=encoder, decoder=decoder)


def randomised(spec: EncoderDecoder) -> EncoderDecoderModel:
    model = build(spec, seed=1).double().eval()
    assert isinstance(model, EncoderDecoderModel)
    for parameter in model.parameters():
        nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    return model


def batch_of() -> Batch:
    source, source_seg = pad([[5, 6, 7, 8], [9, 4], [3, 3, 3]])
    target, target_seg = pad([[1, 5, 6], [1, 7, 8], [1, 2, 9]])
    return Batch(target, target, target_seg, source, source_seg)


def by_hand(model: EncoderDecoderModel, batch: Batch) -> Tensor:
    """Return the log-probabilities of the model, with every decoder block applied to its own memory."""
    assert batch.source is not None
    T, N = batch.target.shape[1], batch.source.shape[1]
    mask = Mask(q_seg=batch.source_seg, k_seg=batch.source_seg)
    encoder, decoder, bridge = model.encoder, model.decoder, model.bridge
    x = model.embed("source", batch.source, mask, N)
    h = [x]
    for block in encoder.blocks:  # type: ignore[reportArgumentType, reportGeneralTypeIssues]
        h.append(block(h[-1], Context(View(mask, N, N, x.device))))
    h[-1] = encoder.end(h[-1])  # type: ignore[reportCallIssue]
    y = model.embed("target", batch.target, Mask(causal=True), T)
    cross = View(Mask(k_seg=batch.source_seg), T, N, x.device)
    for j in range(DECODER):
        shares = bridge.weight[:, j].exp() / bridge.weight[:, j].exp().sum()  # type: ignore[reportIndexIssue]
        z = sum(shares[i] * h[i] for i in range(ENCODER + 1))
        block = decoder.blocks[j % len(decoder.blocks)]  # type: ignore[reportArgumentType, reportIndexIssue]
        y = block(y, Context(View(Mask(causal=True), T, T, x.device), cross, Memory((z,))))  # type: ignore[reportCallIssue]
    return model.head.log_probs(decoder.end(y), model.tables.get("output"))  # type: ignore[reportCallIssue]


@pytest.mark.parametrize("unique", [None, 1])
def test_every_decoder_block_attends_to_its_own_memory(unique: int | None) -> None:
    """Each decoder layer has its own memory, even if all layers share one block."""
    model, batch = randomised(small(Transparent(), unique=unique)), batch_of()
    torch.testing.assert_close(model.log_probs(batch), by_hand(model, batch), rtol=0, atol=1e-12)
    memory = model.encode(batch)
    assert len(memory.x) == DECODER
    assert (memory.x[0] - memory.x[1]).abs().max() > 1e-3


def test_weight_on_the_last_layer_equals_the_last_bridge() -> None:
    transparent, batch = randomised(small(Transparent())), batch_of()
    ordinary = build(small(Last())).double().eval()
    shared = {key: value for key, value in transparent.state_dict().items() if not key.startswith("bridge.")}
    ordinary.load_state_dict(shared)
    with torch.no_grad():
        transparent.bridge.weight[-1] += 200.0  # type: ignore[reportIndexIssue, reportOperatorIssue]
    assert isinstance(ordinary, EncoderDecoderModel)
    torch.testing.assert_close(transparent.log_probs(batch), ordinary.log_probs(batch), rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bridge", [Transparent(), TransparentNormed()])
def test_decoding_equals_the_full_pass_and_can_drop_sources(bridge: Any, static: bool) -> None:
    model, batch = randomised(small(bridge)), batch_of()
    full = model.log_probs(batch)
    with torch.no_grad():
        decoding = model.start(batch, 5, beams=2, static=static)
        outputs = model.advance(batch.target[:, :2].repeat_interleave(2, 0), decoding)
        torch.testing.assert_close(outputs, full[:, 1].repeat_interleave(2, 0), rtol=0, atol=1e-12)
        if static:
            kept = torch.tensor([0, 1, 2])
        else:
            assert decoding.droppable()
            kept = torch.tensor([2, 0])
            decoding.keep(kept)
        outputs = model.advance(batch.target[kept, 2:].repeat_interleave(2, 0), decoding)
        torch.testing.assert_close(outputs, full[kept, 2].repeat_interleave(2, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("base", ["narang_base", "t5_base", "transformer_small", "transformer_tiny"])
def test_one_weight_for_each_layer_and_block(base: str) -> None:
    spec: Any = preset(base)
    depths = (spec.encoder.depth + 1) * spec.decoder.depth
    assert count(apply("transparent", spec)) - count(spec) == depths
    normed: Any = apply("transparent_normed", spec)
    assert normed.bridge.norm == spec.encoder.pattern[0].residual.norm
    assert count(normed) > count(spec) + depths


@pytest.mark.parametrize("name", ["transparent", "transparent_normed"])
def test_unsuitable_bases_are_refused(name: str) -> None:
    for base in ("gpt2_small", "bert_base"):
        with pytest.raises(SpecError, match="only an encoder-decoder has a bridge"):
            apply(name, preset(base))
    with pytest.raises(SpecError, match="needs layers of equal length, which 'funnel' does not have"):
        apply(name, apply("funnel", preset("narang_base")))


def test_sahai_has_a_norm_to_copy() -> None:
    changed: Any = apply("transparent_normed", preset("sahai"))
    assert changed.bridge.norm == RMSNorm()
