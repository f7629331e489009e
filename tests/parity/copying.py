"""Their weights into our modules, and the few other things that the files of this folder share."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regard.models.base import Decoding, Generator


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
) -> None:
    """Copy weights: `modules` names ours and the one or more of theirs that it fuses, `given` is ready to use.

    Every weight of ours must be given and none of theirs may be left over.
    """
    source, state = theirs.state_dict(), dict(given or {})
    for to, names in modules.items():
        parts = (names,) if isinstance(names, str) else names
        for kind in ("weight", "bias"):
            if f"{parts[0]}.{kind}" in source:
                state[f"{to}.{kind}"] = torch.cat([source[f"{part}.{kind}"] for part in parts])
    ours.load_state_dict(state)
    assert size(ours) == size(theirs)


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
