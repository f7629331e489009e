"""Joey NMT's Transformer and loss."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from regard.batch import Batch
from regard.bench.peers.base import TrainingModel, columns, library
from regard.bench.shapes import BOS, EOS, PAD, Shape

SPECIALS = {"unk": 0, "pad": 1, "bos": 2, "eos": 3}


def training_model(shape: Shape, smoothing: float, ours: nn.Module) -> TrainingModel:  # noqa: ARG001  # it has its own weights
    """Return the model from a Joey NMT configuration, with Joey NMT's `XentLoss`."""
    model = library("joeynmt.model").build_model(_config(shape), *[_words(shape.vocab)] * 2)
    model.loss_function = ("crossentropy", smoothing)
    # Only residual dropout, as in the other models. Joey NMT's configuration has one rate for all kinds of dropout.
    for layer in (*model.encoder.layers, *model.decoder.layers):
        for name, part in layer.named_children():
            if name.endswith("_att"):
                part.dropout.p = 0.0
        layer.feed_forward.pwff_layer[2].p = 0.0
    theirs = {PAD: SPECIALS["pad"], BOS: SPECIALS["bos"], EOS: SPECIALS["eos"]}

    def converted(ids: Tensor) -> Tensor:
        """Return ids with regard's special tokens replaced by Joey NMT's."""
        result = ids.clone()
        for our, their in theirs.items():
            result[ids == our] = their
        return result

    def prepare(batch: Batch) -> dict[str, Tensor]:
        source, real, read, labels = columns(batch)
        targets = torch.where(labels < 0, SPECIALS["pad"], converted(labels.clamp(min=0)))
        return {
            "src": converted(source),
            "src_mask": real[:, None],
            "src_length": real.sum(1),
            "trg_input": converted(read),
            "trg": targets,
            "trg_mask": (labels >= 0)[:, None],
            "tokens": (labels >= 0).sum(),
        }

    def loss(inputs: dict[str, Tensor]) -> Tensor:
        return model(return_type="loss", **inputs)[0] / inputs["tokens"]

    return TrainingModel("joeynmt", model, prepare, loss)


def _words(vocab: int) -> Any:
    tags: dict[str, Any] = {f"{name}_token": f"<{name}>" for name in SPECIALS}
    tags |= {f"{name}_id": number for name, number in SPECIALS.items()}
    settings = SimpleNamespace(**tags, sep_token=None, sep_id=None, lang_tags=[])
    words = library("joeynmt.vocabulary").Vocabulary([], settings)
    # add_tokens would take quadratic time.
    for n in range(len(words), vocab):
        words._stoi[f"w{n}"] = n
        words._itos.append(f"w{n}")
    return words


def _config(shape: Shape) -> dict[str, Any]:
    side = {
        "type": "transformer",
        "num_layers": shape.depth,
        "num_heads": shape.heads,
        "hidden_size": shape.d_model,
        "ff_size": shape.d_hidden,
        "dropout": shape.dropout,
        "layer_norm": "post",
        "embeddings": {"embedding_dim": shape.d_model, "scale": True, "dropout": shape.dropout},
    }
    return {
        "encoder": side,
        "decoder": side,
        "tied_embeddings": True,
        "tied_softmax": True,
        "initializer": "xavier_uniform",
    }
