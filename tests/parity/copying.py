"""Their weights into our modules, and the few other things that the files of this folder share."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regard.models.base import Generator
from regard.models.decoding import Decoding


def randomise(module: nn.Module, scale: float = 0.2, seed: int = 0) -> None:
    """Move every weight away from where it starts, so that no bias is zero and no gain is one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=scale)


def size(module: nn.Module) -> int:
    """How many numbers it learns; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def load(
    ours: nn.Module,
    theirs: nn.Module,
    modules: Mapping[str, str | tuple[str, ...]],
    given: Mapping[str, Tensor] | None = None,
    extra: int = 0,
) -> None:
    """Copy weights: `modules` names ours and the one or more of theirs that it fuses, `given` is ready to use.

    Every weight of ours must be given and none of theirs may be left over, but for `extra` numbers.
    """
    source, state = theirs.state_dict(), dict(given or {})
    for to, names in modules.items():
        parts = (names,) if isinstance(names, str) else names
        for kind in ("weight", "bias"):
            if f"{parts[0]}.{kind}" in source:
                state[f"{to}.{kind}"] = torch.cat([source[f"{part}.{kind}"] for part in parts])
    ours.load_state_dict(state)
    assert size(ours) + extra == size(theirs)


def t5_names(
    theirs: nn.Module, blocks: Mapping[str, int]
) -> tuple[dict[str, str | tuple[str, ...]], dict[str, Tensor]]:
    """For `load`: where the first `blocks` of each stack of Hugging Face's T5 go, and its tables of positions."""
    names: dict[str, str | tuple[str, ...]] = {}
    state, given = theirs.state_dict(), {}
    for side, depth in blocks.items():
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        given[f"{side}.position.weight"] = state[bias].T
        names[f"{side}.end"] = f"{side}.final_layer_norm"
        last = 1 if side == "encoder" else 2
        for i in range(depth):
            our, their = f"{side}.blocks.{i}.branches", f"{side}.block.{i}.layer"
            names |= {f"{our}.{n}.norm": f"{their}.{n}.layer_norm" for n in range(last + 1)}
            names[f"{our}.0.branch.qkv"] = tuple(f"{their}.0.SelfAttention.{x}" for x in "qkv")
            names[f"{our}.0.branch.output"] = f"{their}.0.SelfAttention.o"
            if side == "decoder":
                names[f"{our}.1.branch.query"] = f"{their}.1.EncDecAttention.q"
                names[f"{our}.1.branch.kv"] = tuple(f"{their}.1.EncDecAttention.{x}" for x in "kv")
                names[f"{our}.1.branch.output"] = f"{their}.1.EncDecAttention.o"
            dense = f"{their}.{last}.DenseReluDense"
            if f"{dense}.wi_0.weight" in state:
                names[f"{our}.{last}.branch.gate_up"] = (f"{dense}.wi_0", f"{dense}.wi_1")
            else:
                names[f"{our}.{last}.branch.up"] = f"{dense}.wi"
            names[f"{our}.{last}.branch.down"] = f"{dense}.wo"
    return names, given


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-9, real: Tensor | None = None) -> None:
    """Equal up to `tolerance`, relative to numbers above one; only where `real` is not 0."""
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
    """The likeliest token that the row has not read yet, `pad` after `eos`: ids (B, T) and log p (B, T, V).

    Models with random weights like to repeat one token for ever; without repetition every step sees something new.
    """
    said, scores = [], []
    done = torch.zeros(read.shape[0], dtype=torch.bool)
    old: Tensor | None = None
    with torch.no_grad():
        for _ in range(steps):
            log_probs = model.advance(read, decoding, seg)
            old = torch.zeros(log_probs.shape, dtype=torch.bool) if old is None else old
            for row in range(read.shape[0]):
                old[row, read[row] if seg is None else read[row][seg[row] != 0]] = True
            ids = log_probs.masked_fill(old, -torch.inf).argmax(-1).masked_fill(done, pad)
            said.append(ids)
            scores.append(log_probs)
            done = done | (ids == eos) if eos is not None else done
            read, seg = ids[:, None], None
    return torch.stack(said, 1), torch.stack(scores, 1)
