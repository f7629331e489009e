"""fairseq's Transformer and loss."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from regard.batch import Batch
from regard.bench.peers.base import TrainingModel, columns, library
from regard.bench.shapes import BOS, PAD, Shape


def training_model(shape: Shape, smoothing: float, ours: nn.Module) -> TrainingModel:  # noqa: ARG001  # it has its own weights
    """Return fairseq's Transformer with fairseq's `label_smoothed_nll_loss`."""
    transformer = library("fairseq.models.transformer")
    criterion = library("fairseq.criterions.label_smoothed_cross_entropy")
    dictionary = library("fairseq.data.dictionary")
    words = dictionary.Dictionary()  # <s> 0, <pad> 1, </s> 2, <unk> 3
    for n in range(shape.vocab - len(words)):
        words.add_symbol(f"w{n}")
    config = transformer.TransformerConfig()
    for side in (config.encoder, config.decoder):
        side.embed_dim, side.ffn_embed_dim = shape.d_model, shape.d_hidden
        side.attention_heads, side.layers = shape.heads, shape.depth
    config.decoder.input_dim = config.decoder.output_dim = shape.d_model
    config.dropout, config.share_all_embeddings = shape.dropout, True
    config.share_decoder_input_output_embed = True
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = transformer.TransformerModelBase.build_model(config, task)
    pad = words.pad()

    def prepare(batch: Batch) -> tuple[Tensor, ...]:
        assert batch.labels is not None
        source, real, read, labels = columns(batch)
        inputs = [torch.where(ids == PAD, pad, torch.where(ids == BOS, words.bos(), ids)) for ids in (source, read)]
        targets = torch.where(labels < 0, pad, labels)
        return inputs[0], real.sum(1), inputs[1], targets, (labels >= 0).sum()

    def loss(inputs: tuple[Tensor, ...]) -> Tensor:
        source, lengths, read, labels, tokens = inputs
        output = model(source, lengths, read)
        log_probs = model.get_normalized_probs(output, log_probs=True)
        total, _ = criterion.label_smoothed_nll_loss(
            log_probs.flatten(0, 1), labels.flatten(), smoothing, ignore_index=pad
        )
        return total / tokens

    return TrainingModel("fairseq", model, prepare, loss)
