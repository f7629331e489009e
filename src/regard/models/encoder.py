"""A regard encoder as an ordinary `nn.Module`, for use in other PyTorch code."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.batch import check_padding, readable
from regard.errors import DataError, SpecError
from regard.models.base import Model, ModelSpec
from regard.models.build import build
from regard.models.embedding import value_form
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.models.encoder_only import EncoderBody
from regard.nn.mask import Context, Mask, View


@runtime_checkable
class Trained(Protocol):
    """Interface of trained models: an object with the attribute `model`, such as the result of `regard.load`."""

    @property
    def model(self) -> Model: ...


class Encoder(nn.Module):
    """The encoder of a model, which maps token ids (B, T), or vectors, to hidden states (B, T, D).

    `source` is the spec of an encoder-decoder or encoder-only model (for example `regard.preset("bert_base")`), a model
    built from such a spec, or a trained model (for example `regard.load("runs/mine")`). From a spec, new weights are
    initialised with `seed`. Otherwise, the encoder shares the weights of the model and does not copy them.

    With `embed=False`, the encoder has no vocabulary table, position embeddings or dropout before the first block, and
    reads vectors (B, T, d_model), like `torch.nn.TransformerEncoder`. With `embed=True`, an encoder whose input spec is
    `Vectors` reads vectors (B, T, channels), with the `channels` of this spec.
    """

    def __init__(self, source: ModelSpec | Model | Trained, embed: bool = True, seed: int = 0) -> None:
        super().__init__()
        if isinstance(source, ModelSpec):
            model = build(source, seed=seed)
        else:
            model = source.model if isinstance(source, Trained) else source
        if not isinstance(model, Model):
            sources = "a spec, a model or a trained run"
            raise SpecError("", f"an encoder is made from {sources}, not {type(source).__name__}")
        spec: Any = model.spec
        body = model if isinstance(model, EncoderDecoderModel) else getattr(model, "encoder", None)
        if not isinstance(body, EncoderDecoderModel | EncoderBody):
            raise SpecError("", f"{spec.kind!r} has no encoder for this; use encoder_only or encoder_decoder")
        if spec.encoder.shortens:
            raise SpecError("encoder", f"{spec.encoder.kind!r} returns fewer vectors than it reads; use 'plain'")
        self.table = body.tables.get("source") if embed else None
        self.input = body.inputs.get("source") if embed else None
        self.stack = body.encoder if isinstance(body, EncoderDecoderModel) else body.stack
        self.shape, self.form = body.inputs.forms["source"] if embed else value_form(spec.d_model)
        self.d_model: int = spec.d_model

    def forward(
        self, x: Int[Tensor, "B T"] | Float[Tensor, "B T C"], padding_mask: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Return the hidden states after the last block.

        `padding_mask` is True at padding, which must be at the end of a row. Padding does not influence other
        positions. The hidden states at padding have no meaning.
        """
        if x.shape[2:] != self.shape or x.is_floating_point() != bool(self.shape):
            raise DataError(f"x: this encoder reads {self.form}, not {tuple(x.shape)} of {x.dtype}")
        T, seg = x.shape[1], None
        if padding_mask is not None:
            if padding_mask.shape != x.shape[:2] or padding_mask.dtype != torch.bool:
                form = f"{tuple(padding_mask.shape)} of {padding_mask.dtype}"
                raise DataError(f"padding_mask: must be bool of shape {tuple(x.shape[:2])}, not {form}")
            seg = (~padding_mask).long()
            check_padding("padding_mask", seg)
            if readable(seg) and bool(padding_mask[:, 0].any()):
                row = int(padding_mask[:, 0].nonzero()[0])
                raise DataError(f"padding_mask: row {row} has only padding; leave the row out")
        mask = Mask(q_seg=seg, k_seg=seg)
        if self.input is not None:
            positions = mask.positions(T, T, x.device)[0]
            x = self.input(x, self.table, positions, mask.bound(T))
        return self.stack(x, Context(View(mask, T, T, x.device))).x
