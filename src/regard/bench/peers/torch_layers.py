"""The encoder and decoder layers of torch.nn.Transformer, with an embedding table and sinusoidal positions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.batch import Batch
from regard.bench.peers.base import TrainingModel, columns, smoothed
from regard.bench.shapes import LONGEST, Shape
from regard.nn.embedding import Sinusoidal


class Translator(nn.Module):
    """An encoder-decoder of torch's layers with embeddings, sinusoidal positions and a tied output layer.

    The layers are post-norm, so the last layer of a stack is not followed by another norm.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(shape.vocab, shape.d_model) * shape.d_model**-0.5)
        self.factor, self.dropout = math.sqrt(shape.d_model), shape.dropout
        self.register_buffer("waves", Sinusoidal().table(max(LONGEST) + 1, shape.d_model).float())
        sizes = (shape.d_model, shape.heads, shape.d_hidden, shape.dropout)
        encoder = nn.TransformerEncoderLayer(*sizes, batch_first=True)
        decoder = nn.TransformerDecoderLayer(*sizes, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, shape.depth, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, shape.depth)
        for layer in (*self.encoder.layers, *self.decoder.layers):
            # Only residual dropout, as in the other models.
            layer.dropout.p = layer.self_attn.dropout = 0.0  # type: ignore[reportAttributeAccessIssue]
        for layer in self.decoder.layers:
            layer.multihead_attn.dropout = 0.0  # type: ignore[reportAttributeAccessIssue]

    def forward(self, source: Tensor, hidden: Tensor, read: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source), src_key_padding_mask=hidden)
        future = nn.Transformer.generate_square_subsequent_mask(read.shape[1], device=read.device, dtype=torch.bool)
        x = self.decoder(self.embed(read), memory, tgt_mask=future, memory_key_padding_mask=hidden, tgt_is_causal=True)
        return x @ self.table.T

    def embed(self, ids: Tensor) -> Tensor:
        """Return the sum of scaled embeddings and positions, with dropout."""
        x = F.embedding(ids, self.table) * self.factor + self.get_buffer("waves")[: ids.shape[1]]
        return F.dropout(x, self.dropout, self.training)


def training_model(shape: Shape, smoothing: float, ours: nn.Module) -> TrainingModel:  # noqa: ARG001  # it has its own weights
    """Return the encoder-decoder of torch's layers, with torch's cross-entropy as its loss."""
    model = Translator(shape)

    def prepare(batch: Batch) -> tuple[Tensor, ...]:
        source, real, read, labels = columns(batch)
        return source, ~real, read, labels

    def loss(inputs: tuple[Tensor, ...]) -> Tensor:
        return smoothed(model(*inputs[:3]), inputs[3], smoothing)

    return TrainingModel("torch.nn.Transformer", model, prepare, loss)
