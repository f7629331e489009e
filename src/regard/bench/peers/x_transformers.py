"""A post-norm encoder-decoder from x-transformers, with the library's flash attention."""

from typing import Any

from torch import Tensor, nn

from regard.bench.peers.base import TrainingModel, columns, library, smoothed
from regard.bench.shapes import LONGEST, Shape


class Translator(nn.Module):
    """An encoder-decoder like the library's XTransformer, but with a tied output layer and PyTorch's fused attention.

    The attention has no biases, and the sinusoids of encoder and decoder each have a learned scale. The model has 0.1 %
    fewer parameters than the other benchmarked models.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        theirs = library("x_transformers")
        sides: dict[str, Any] = {
            "dim": shape.d_model,
            "depth": shape.depth,
            "heads": shape.heads,
            "attn_dim_head": shape.d_model // shape.heads,
            "ff_mult": shape.d_hidden // shape.d_model,
            "ff_custom_activation": nn.ReLU(),
            "pre_norm": False,
            "attn_flash": True,
            "attn_sublayer_dropout": shape.dropout,
            "ff_sublayer_dropout": shape.dropout,
        }
        words: dict[str, Any] = {
            "num_tokens": shape.vocab,
            "max_seq_len": max(LONGEST) + 1,
            "scaled_sinu_pos_emb": True,
            "emb_dropout": shape.dropout,
        }
        self.encoder = theirs.TransformerWrapper(**words, attn_layers=theirs.Encoder(**sides), return_only_embed=True)
        self.decoder = theirs.TransformerWrapper(
            **words,
            attn_layers=theirs.Decoder(**sides, cross_attend=True, cross_attn_sublayer_dropout=shape.dropout),
            tie_embedding=True,
        )
        self.decoder.token_emb = self.encoder.token_emb

    def forward(self, source: Tensor, real: Tensor, read: Tensor) -> Tensor:
        memory = self.encoder(source, mask=real)
        return self.decoder(read, context=memory, context_mask=real)


def training_model(shape: Shape, smoothing: float, ours: nn.Module) -> TrainingModel:  # noqa: ARG001  # it has its own weights
    """Return the encoder-decoder of x-transformers, with torch's cross-entropy as its loss."""
    model = Translator(shape)

    def loss(inputs: tuple[Tensor, ...]) -> Tensor:
        return smoothed(model(*inputs[:3]), inputs[3], smoothing)

    return TrainingModel("x-transformers", model, columns, loss)
