"""Helpers for parity tests: copy weights, compare tensors, and decode greedily."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regard.models.base import Generator
from regard.models.decoding import Decoding
from regard.weights import Input, cat, copy_from, transpose


def randomise(module: nn.Module, scale: float = 0.2, seed: int = 0) -> None:
    """Add noise to every parameter, so that no bias is zero and no gain is one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=scale)


def size(module: nn.Module) -> int:
    """Return the number of trainable parameters; shared parameters are counted once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def copy_all(ours: nn.Module, theirs: nn.Module, mapping: Mapping[str, Input], extra: int = 0) -> None:
    """Copy all trainable weights. Both modules must have the same number, except that `theirs` has `extra` more."""
    frozen = [name for name, parameter in theirs.named_parameters() if not parameter.requires_grad]
    copy_from(ours, mapping, theirs, unused=frozen)
    assert size(ours) + extra == size(theirs)


def t5(gated: bool = False) -> dict[str, Input]:
    """Return the mapping for both stacks of Hugging Face's T5, without the embedding tables."""
    mapping: dict[str, Input] = {}
    for side, last in (("encoder", 1), ("decoder", 2)):
        our, their = f"{side}.blocks.*.branches", f"{side}.block.*.layer"
        mapping |= {
            f"{side}.position": transpose(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"),
            f"{side}.end": f"{side}.final_layer_norm",
            f"{our}.*.norm": f"{their}.*.layer_norm",
            f"{our}.0.branch.qkv": cat(*(f"{their}.0.SelfAttention.{x}" for x in "qkv")),
            f"{our}.0.branch.output": f"{their}.0.SelfAttention.o",
            f"{our}.{last}.branch.down": f"{their}.{last}.DenseReluDense.wo",
        }
        dense = f"{their}.{last}.DenseReluDense.wi"
        mapping |= (
            {f"{our}.{last}.branch.gate": f"{dense}_0", f"{our}.{last}.branch.up": f"{dense}_1"}
            if gated
            else {f"{our}.{last}.branch.up": dense}
        )
    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return mapping | {
        f"decoder.blocks.*.branches.1.branch.{name}": f"decoder.block.*.layer.1.EncDecAttention.{x}"
        for name, x in names.items()
    }


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-9, real: Tensor | None = None) -> None:
    """Assert that tensors are equal up to `tolerance` (relative for numbers above 1), only where `real` is not 0."""
    if real is not None:
        ours, theirs = ours[real != 0], theirs[real != 0]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def greedy(
    model: Generator,
    decoding: Decoding,
    read: Tensor,
    steps: int,
    seg: Tensor | None = None,
    eos: int | None = None,
    pad: int = 0,
) -> tuple[Tensor, Tensor]:
    """Decode greedily without repeating a token, and return ids (B, T), with `pad` after `eos`, and log p (B, T, V).

    Without this constraint, a model with random weights would repeat one token forever.
    """
    outputs, scores = [], []
    done = torch.zeros(read.shape[0], dtype=torch.bool)
    old: Tensor | None = None
    with torch.no_grad():
        for _ in range(steps):
            log_probs = model.advance(read, decoding, seg)
            old = torch.zeros(log_probs.shape, dtype=torch.bool) if old is None else old
            for row in range(read.shape[0]):
                old[row, read[row] if seg is None else read[row][seg[row] != 0]] = True
            ids = log_probs.masked_fill(old, -torch.inf).argmax(-1).masked_fill(done, pad)
            outputs.append(ids)
            scores.append(log_probs)
            done = done | (ids == eos) if eos is not None else done
            read, seg = ids[:, None], None
    return torch.stack(outputs, 1), torch.stack(scores, 1)
