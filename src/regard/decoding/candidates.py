"""Rank the candidates for the next token in beam search on the GPU, without a transfer to the CPU.

Candidates are ordered as in `regard.decoding.rank`, but by a single number, where higher is better. For k beams and a
vocabulary of V tokens, the number is round(score / 1e-5) * (k V) - (token * k + beam). float64 represents this integer
exactly if the log-probability is above -9e10 / (k V). For 5 beams and 50,000 tokens, this bound is -360,000.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.decoding.rank import NEVER, TIE, block_width


class Onward(NamedTuple):
    """For every source, the k best candidates except eos, best first. Unused entries have `total` = NEVER (-inf)."""

    place: Int[Tensor, "s k"]  # beam * V + token
    value: Float[Tensor, "s k"]  # log p of the token
    total: Float[Tensor, "s k"]  # log p of the hypothesis including the token
    rank: Float[Tensor, "s k"]  # higher is better


class Candidates:
    """Computes the candidates for the next token: `ends` for eos, `onward` for other ids except those in `never`."""

    def __init__(self, beams: int, vocab: int, never: tuple[int, ...], eos: int, device: torch.device) -> None:
        k, V = self.beams, self.vocab = beams, vocab
        self.eos, self.eos_banned = eos, eos in never
        self.never = torch.tensor(sorted({*never, eos}), dtype=torch.int64, device=device)
        self.width = block_width(V)
        self.blocks = -(-V // self.width)
        beam = torch.arange(k, device=device)[:, None]
        first = torch.arange(self.blocks, device=device) * self.width
        token = (first[:, None] + torch.arange(self.width, device=device))[None]  # (1, blocks, width)
        # Indices beyond the vocabulary are filled with eos, which is never chosen as a continuation.
        token = torch.where(token < V, token, eos)
        self.places = (beam[:, :, None] * V + token).flatten(0, 1)  # (k * blocks, width)
        self.ties = -(token * k + beam[:, :, None]).flatten(0, 1).double()
        self.block_ties = -(first * k + beam).double()  # (k, blocks): the ties of the first token in each block
        self.eos_ties = -(eos * k + beam[:, 0]).double()  # (k)
        self.unit = torch.tensor(TIE, dtype=torch.float64, device=device)  # division by a number would be inexact
        # Without ties, the k best candidates are in the k best blocks. If blocks of several beams have the same tokens
        # and equal maxima, the blocks are ranked by beam, although the first token with this maximum should decide. So
        # up to k - 1 blocks may rank too high.
        self.examined = min(2 * k - 1, k * self.blocks)

    def ranks(self, total: Float[Tensor, "..."], ties: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the rank of every candidate (higher is better). A total of NaN ranks highest, and NEVER lowest."""
        return torch.add(ties, (total / self.unit).round_(), alpha=self.beams * self.vocab)

    def ends(self, log_probs: Float[Tensor, "s k V"]) -> Float[Tensor, "s k"]:
        """Return log p of eos for each beam, or NEVER (-inf) if eos is in `never`."""
        last = log_probs[:, :, self.eos].to(torch.float64, copy=True)  # a copy: `onward` overwrites log_probs
        return torch.full_like(last, NEVER) if self.eos_banned else last

    def onward(self, log_probs: Float[Tensor, "s k V"], totals: Float[Tensor, "s k"]) -> Onward:
        """Return the k best candidates except eos for every source, where k is the number of beams per source.

        In `log_probs`, the entries of eos and of the ids in `never` are overwritten with NEVER (-inf).
        """
        k, V, width = self.beams, self.vocab, self.width
        log_probs.index_fill_(2, self.never, NEVER)
        whole = V // width
        maxima = log_probs[:, :, : whole * width].unflatten(2, (whole, width)).amax(-1)
        if whole < self.blocks:
            maxima = torch.cat((maxima, log_probs[:, :, whole * width :].amax(-1, keepdim=True)), -1)
        # An upper bound of the ranks in a block: the rank of its maximum, as if this were at the first token.
        best = self.ranks(maxima + totals[:, :, None], self.block_ties).flatten(1)
        block = best.topk(self.examined).indices
        chosen, of = block.flatten(), block // self.blocks
        places = self.places.index_select(0, chosen).view(*block.shape[:1], -1)
        ties = self.ties.index_select(0, chosen).view(*block.shape, width)
        own = log_probs.flatten(1).gather(1, places)
        total = own.view_as(ties) + totals.gather(1, of)[:, :, None]
        rank, at = self.ranks(total, ties).flatten(1).topk(k)
        return Onward(places.gather(1, at), own.gather(1, at), total.flatten(1).gather(1, at), rank)
