"""Encode sources in groups of similar length, because on a CPU, padding costs as much as real tokens."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from regard.batch import Batch
from regard.models.base import refuse
from regard.models.decoding import Decoding
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.memory import Memory

TOGETHER = 8  # number of sources encoded together; larger groups have more padding


class LengthGroupedEncoder(EncoderDecoderModel):
    """Encoder-decoder that encodes the sources of a batch in groups of similar length."""

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        if static or batch.packed:  # a static decoding session keeps the width of the batch
            return super().start(batch, max_len, beams, static)
        return self.decode_from(self.encode_by_length(batch), max_len, beams, static)

    def encode_by_length(self, batch: Batch) -> Memory:
        """Return the memory (encoder output) of all sources.

        Sources are encoded in groups of similar length if this saves an eighth of the tokens, including padding.
        """
        source, seg = batch.source, batch.source_seg
        if source is None or seg is None or not source.is_cpu or batch.source_pos is not None:
            return self.encode(batch)
        refuse(batch, "prefix", "types")
        order = (seg != 0).sum(1).argsort(stable=True)
        groups = [(group, max(1, int((seg[group] != 0).sum(1).max()))) for group in order.split(TOGETHER)]
        if 8 * sum(len(group) * width for group, width in groups) > 7 * source.numel():
            return self.encode(batch)
        parts = [
            Batch(batch.target[group, :1], source=source[group, :width], source_seg=seg[group, :width])
            for group, width in groups
        ]
        return concatenate([self.encode(part) for part in parts], order.argsort())


def concatenate(parts: list[Memory], order: Int[Tensor, " B"]) -> Memory:
    """Join the memories (encoder outputs) of several groups, padded to equal length, and reorder them by `order`."""
    S = max(part.x[0].shape[1] for part in parts)

    def joined(tensors: Iterable[Tensor]) -> Tensor:
        padded = [F.pad(each, (0, 0) * (each.dim() - 2) + (0, S - each.shape[1])) for each in tensors]
        return torch.cat(padded).index_select(0, order)

    layers = zip(*(part.x for part in parts), strict=True)
    seg = (torch.ones(p.x[0].shape[:2], dtype=torch.int64) if p.seg is None else p.seg for p in parts)
    return Memory(tuple(map(joined, layers)), joined(seg))
