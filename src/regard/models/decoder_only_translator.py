"""Decoder-only sequence-to-sequence model, which reads source and target as one sequence."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.models.base import check_unpacked, own_mask, source_of
from regard.models.decoder_only import DecoderOnly, DecoderOnlyModel
from regard.models.decoding import Decoding
from regard.nn.init import Init
from regard.nn.mask import Context, View
from regard.nn.trace import Trace


@dataclass(frozen=True, slots=True)
class DecoderOnlyTranslator(DecoderOnly):
    """Decoder-only sequence-to-sequence model: the target continues the source in one sequence.

    With `visibility="prefix"`, source tokens attend to all source tokens (Liu et al. 2018, Raffel et al. 2020). With
    "causal", source tokens attend only to earlier tokens (Brown et al. 2020). The loss is computed on target tokens
    only.
    """

    kind = "decoder_only_translator"
    reads_source = True

    def build(self, init: Init) -> "DecoderOnlyTranslatorModel":
        return DecoderOnlyTranslatorModel(self, init)


class DecoderOnlyTranslatorModel(DecoderOnlyModel):
    """Module of `DecoderOnlyTranslator`. Batches have a source and a target, as for an encoder-decoder."""

    source_first = True

    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        source = source_of(batch)
        S, T = source.shape[1], batch.target.shape[1]
        order, whole = joined(batch, source)
        prefix = order < S if self.prefixed else None  # which positions hold source tokens
        mask = replace(own_mask(whole, whole.target_pos, whole.target_seg, causal=True), prefix=prefix)
        x = self.embed("target", whole.target, mask, S + T)
        x = self.decoder(x, Context(View(mask, S + T, S + T, x.device), losses=losses, trace=trace)).x
        place = order.argsort(1)[:, S:]  # which positions hold the target tokens
        return x.gather(1, place[..., None].expand(-1, -1, x.shape[-1]))

    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        check_unpacked(batch)
        source = source_of(batch).repeat_interleave(beams, 0)
        rows = self.new_rows(source.shape[0] // beams, beams, source.device, source.shape[1] + max_len, static)
        nothing = Context(View(own_mask(batch, None, None, causal=True), 1, 1, source.device))
        decoding = Decoding(rows, self.decoder.start(rows, nothing), beams)
        seg = batch.source_seg
        counts = None if seg is None else (seg != 0).sum(1).repeat_interleave(beams, 0)
        self.consume(source, decoding, counts)
        return decoding


def joined(batch: Batch, source: Int[Tensor, "B S"]) -> tuple[Int[Tensor, "B N"], Batch]:
    """Return `order`, and a batch in which source and target of each row are joined into one sequence.

    In the returned batch, each segment is a source followed by its target, and padding is last. The positions of a
    target continue those of its source. `order[b, i]` is the index of joined token i in [source, target] of row b.
    """
    S, T = source.shape[1], batch.target.shape[1]
    sides = ((source, batch.source_seg, batch.source_pos), (batch.target, batch.target_seg, batch.target_pos))
    ids, segments, positions = [], [], []
    for tokens, seg, pos in sides:
        ids.append(tokens)
        segments.append(torch.ones_like(tokens) if seg is None else seg.long())
        count = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        positions.append(count if pos is None else pos.long())
    # The source length of each segment in each row; the positions of its target begin there.
    lengths = torch.zeros(source.shape[0], batch.segments + 1, dtype=torch.int64, device=source.device)
    lengths.scatter_add_(1, segments[0], torch.ones_like(segments[0]))
    positions[1] = positions[1] + lengths.gather(1, segments[1])
    explicit = batch.packed or batch.source_pos is not None or batch.target_pos is not None
    seg = torch.cat(segments, 1)
    side = torch.arange(S + T, device=source.device) >= S
    order = torch.where(seg == 0, 2 * batch.segments + 2, 2 * seg + side).argsort(dim=1, stable=True)
    sequences = Batch(
        torch.cat(ids, 1).gather(1, order),
        target_seg=seg.gather(1, order),
        target_pos=torch.cat(positions, 1).gather(1, order) if explicit else None,
        packed=batch.packed,
        segments=batch.segments,
        longest=None if batch.longest is None else 2 * batch.longest,
    )
    return order, sequences
