"""Decoder-only sequence-to-sequence model, which reads source and target as one sequence."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.batch import Batch
from regard.errors import DataError, SpecError
from regard.models.base import check_unpacked, own_mask, source_of
from regard.models.decoder_only import DecoderOnly, DecoderOnlyModel
from regard.models.decoding import Decoding
from regard.models.loss import Loss, label_weights, token_loss
from regard.nn.init import Init
from regard.nn.mask import Context, View
from regard.nn.trace import Trace


@dataclass(frozen=True, slots=True)
class DecoderOnlyTranslator(DecoderOnly):
    """Decoder-only sequence-to-sequence model: the target continues the source in one sequence.

    With `input_attention="full"`, source tokens attend to all source tokens (Raffel et al. 2020; the option
    `prepend_inputs_full_attention` of Tensor2Tensor). With "causal", source tokens attend only to earlier tokens
    (Liu et al. 2018, Brown et al. 2020).

    The training loss is the mean over the target tokens. With `loss_on="all"`, it is the mean over all tokens of the
    joined sequence s1 .. sm eos bos t1 .. tn eos after the first, as Liu et al. 2018 train the Transformer decoder.
    Validation and scores are always computed on the target tokens only.
    """

    kind = "decoder_only_translator"
    reads_source = True
    loss_on: Literal["target", "all"] = "target"

    def check(self) -> None:
        DecoderOnly.check(self)
        if self.loss_on == "all" and self.input_attention == "full":
            raise SpecError(
                "loss_on",
                "with input_attention='full', every source token attends to the next one, so that its prediction would "
                "be a copy; use loss_on='target', or input_attention='causal'",
            )

    def build(self, init: Init) -> "DecoderOnlyTranslatorModel":
        return DecoderOnlyTranslatorModel(self, init)


class DecoderOnlyTranslatorModel(DecoderOnlyModel):
    """Module of `DecoderOnlyTranslator`. Batches have a source and a target, as for an encoder-decoder."""

    source_first = True

    def __init__(self, spec: DecoderOnlyTranslator, init: Init) -> None:
        super().__init__(spec, init)
        self.predicts_source = spec.loss_on == "all"

    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        S = source_of(batch).shape[1]
        x, order, _ = self.joined_hidden(batch, losses, trace)
        place = order.argsort(1)[:, S:]  # which positions hold the target tokens
        return x.gather(1, place[..., None].expand(-1, -1, x.shape[-1]))

    def loss(self, batch: Batch) -> Loss:
        if not (self.predicts_source and self.training):
            return super().loss(batch)
        losses: list[Tensor] = []
        x, order, whole = self.joined_hidden(batch, losses)
        return token_loss(self.head, self.tables.get("output"), x, labelled(batch, order, whole), losses)

    def joined_hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> tuple[Float[Tensor, "B N D"], Int[Tensor, "B N"], Batch]:
        """Return (hidden states of the joined sequences, order, batch), with `order` and `batch` from `joined`."""
        source = source_of(batch)
        S, T = source.shape[1], batch.target.shape[1]
        order, whole = joined(batch, source)
        prefix = order < S if self.prefixed else None  # which positions hold source tokens
        mask = replace(own_mask(whole, whole.target_pos, whole.target_seg, causal=True), prefix=prefix)
        x = self.embed("target", whole.target, mask, S + T)
        return self.decoder(x, Context(View(mask, S + T, S + T, x.device), losses=losses, trace=trace)).x, order, whole

    def start(
        self, batch: Batch, max_len: int, beams: int = 1, static: bool = False, prefill_chunk: int | None = None
    ) -> Decoding:
        check_unpacked(batch)
        source = source_of(batch).repeat_interleave(beams, 0)
        rows = self.new_rows(source.shape[0] // beams, beams, source.device, source.shape[1] + max_len, static)
        nothing = Context(View(own_mask(batch, None, None, causal=True), 1, 1, source.device))
        decoding = Decoding(rows, self.decoder.start(rows, nothing), beams, prefill_chunk=prefill_chunk)
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


def labelled(batch: Batch, order: Int[Tensor, "B N"], whole: Batch) -> Batch:
    """Return `whole`, the joined sequences of a batch, with a label at every source and target token.

    The label of a source token is the next token, which is bos after the last source token. The labels of target tokens
    are those of `batch`. `order` and `whole` are as `joined` returns them.
    """
    assert batch.source is not None
    if batch.labels is None or batch.labels.shape != batch.target.shape:
        raise DataError("labels: the loss needs one label per target token")
    S = batch.source.shape[1]
    real = torch.ones_like(batch.source) if batch.source_seg is None else (batch.source_seg != 0)
    target_weights = label_weights(batch)
    weights = torch.cat([real.to(target_weights.dtype), target_weights], 1).gather(1, order)
    labels = torch.cat([torch.zeros_like(batch.source), batch.labels], 1).gather(1, order)
    # A source token is never in the last column, because a target token follows it.
    return replace(whole, labels=torch.where(order < S, whole.target.roll(-1, 1), labels), weights=weights)
