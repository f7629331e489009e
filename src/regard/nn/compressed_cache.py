"""Decoding state of memory-compressed attention: one compressed key and value for each group of tokens."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.nn.cache import Rewritten, Rows

Compress = Callable[[Float[Tensor, "B N c W"], Bool[Tensor, "b N c"] | None], Float[Tensor, "B N W"]]


class CompressedCache(Rewritten):
    """Cache of compressed keys and values. It grows by one entry per `stride` tokens.

    Group g of a batch row has the tokens at positions g * stride, ..., g * stride + stride - 1. `carry` stores the keys
    and values of the tokens in the last, incomplete group, with the token at position p at index p mod `stride`. Batch
    rows may have different lengths. Entries of incomplete groups are undefined, and are overwritten later.

    With a sink, entry 0 is `null` or, if `null` is None, the key and value of the first token.
    """

    def __init__(
        self, rows: Rows, stride: int, compress: Compress, sink: bool, null: Float[Tensor, " W"] | None
    ) -> None:
        self.rows, self.stride, self.compress, self.null = rows, stride, compress, null
        self.sinks = int(sink)
        self.entries: Tensor | None = None  # (B, sinks + max_len / stride, W)
        self.carry: Tensor | None = None  # (B, stride - 1, W)

    def append(self, kv: Float[Tensor, "B T W"]) -> Float[Tensor, "B S W"]:
        """Process the keys and values of T new tokens, and return the sink and the entries of all complete groups."""
        if self.entries is None or self.carry is None:
            B, _, W = kv.shape
            self.entries = kv.new_zeros(B, self.sinks - (-self.rows.max_len // self.stride), W)
            self.carry = kv.new_zeros(B, self.stride - 1, W)
            if self.null is not None:
                self.entries[:, 0] = self.null
        if self.rows.uniform and not self.rows.static and self.rows.real is None:
            self._append_uniform(self.entries, self.carry, kv)
        else:
            self._append_ragged(self.entries, self.carry, kv)
        return self.entries[:, : self.sinks + self.rows.reach(kv.shape[1]) // self.stride]

    def _append_uniform(
        self, entries: Float[Tensor, "B N W"], carry: Float[Tensor, "B c W"], kv: Float[Tensor, "B T W"]
    ) -> None:
        """Process new tokens of batch rows with equal lengths. Only complete groups are compressed."""
        group, begun = divmod(self.rows.bound, self.stride)
        if self.sinks and self.null is None and self.rows.bound == 0:
            entries[:, 0] = kv[:, 0]
        stream = torch.cat((carry[:, :begun], kv), 1)
        n = stream.shape[1] // self.stride
        if n:
            at = self.sinks + group
            whole = stream[:, : n * self.stride].unflatten(1, (n, self.stride))
            entries[:, at : at + n] = self.compress(whole, None)
        rest = stream[:, n * self.stride :]
        carry[:, : rest.shape[1]] = rest

    def _append_ragged(
        self, entries: Float[Tensor, "B N W"], carry: Float[Tensor, "B c W"], kv: Float[Tensor, "B T W"]
    ) -> None:
        """Process new tokens of batch rows with different lengths, without a device sync.

        All rows have the same number of groups, so some groups are incomplete or contain padding. The causal mask hides
        the entry of a group until the group is completed by tokens that are not padding.
        """
        (B, T, _), c, first = kv.shape, self.stride, self.rows.lengths[:, None]
        row, begun = torch.arange(B, device=kv.device)[:, None], first % c
        if self.sinks and self.null is None:
            entries[:, 0] = torch.where(first == 0, kv[:, 0], entries[:, 0])
        stored = torch.cat((carry, kv), 1)

        def stream(index: Int[Tensor, "#B n"]) -> Float[Tensor, "B n W"]:
            """Return the tokens with these indices, counted from the first token of the incomplete group."""
            at = torch.where(index < begun, index, index - begun + c - 1)
            return stored[row, at.clamp(max=c + T - 2)]

        n = (c - 1 + T) // c
        whole = stream(torch.arange(n * c, device=kv.device)[None]).unflatten(1, (n, c))
        entries[row, self.sinks + first // c + torch.arange(n, device=kv.device)] = self.compress(whole, None)
        real = T if self.rows.real is None else self.rows.real[:, None]  # padding must not overwrite real tokens
        done = (begun + real) // c * c
        carry.copy_(stream(done + torch.arange(c - 1, device=kv.device)))

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        if self.entries is None or self.carry is None:
            return
        live = self._live()
        self.entries[:, :live] = self.entries[:, :live].index_select(0, parent)  # in place, for CUDA graphs
        self.carry.copy_(self.carry.index_select(0, parent))

    def keep(self, rows: Int[Tensor, " n"], sources: Int[Tensor, " s"]) -> None:  # noqa: ARG002
        """Move the batch rows with the indices `rows` to the front of the cache, and drop all other rows."""
        if self.entries is None or self.carry is None:
            return
        n, live = rows.shape[0], self._live()
        self.entries[:n, :live] = self.entries[:, :live].index_select(0, rows)
        self.entries, self.carry = self.entries[:n], self.carry.index_select(0, rows)

    def _live(self) -> int:
        """Return the number of entries that attention may read: the sink and all complete groups."""
        return self.sinks + self.rows.reach(0) // self.stride
