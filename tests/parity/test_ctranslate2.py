"""CTranslate2, an engine in C++: our weights written into its models, in float32, the widest it has."""

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import torch
from ctranslate2.specs import TransformerSpec
from ctranslate2.specs.common_spec import Activation
from torch import nn

from regard import EncoderDecoder, build
from regard.batch import Batch, pad, translation
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.heads import Softmax

from .copying import close, greedy, randomise

V, D, H, DEPTHS, BOS, EOS = 40, 24, 4, (2, 3), 1, 2
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, V))]
SOURCES = [[9, 4, 31, 6, 22], [17], [5, 5, 38]]
TARGETS = [[8, 30], [12, 4, 4, 27, 39, 6], [33]]


def model(first: bool, activation: Any) -> EncoderDecoderModel:
    residual = PreNorm() if first else PostNorm()
    feedforward = FeedForward(40, activation)
    spec = EncoderDecoder(
        vocab=V,
        d_model=D,
        heads=H,
        encoder=Plain((Block((SelfAttention(), feedforward), residual),), DEPTHS[0]),
        decoder=Plain((Block((SelfAttention(), CrossAttention(), feedforward), residual),), DEPTHS[1]),
        head=Softmax(bias=True),
    )
    ours = build(spec)
    assert isinstance(ours, EncoderDecoderModel)
    randomise(ours)
    return ours.eval()


def engine(ours: EncoderDecoderModel, first: bool, activation: Any, folder: Path) -> Any:
    """Their model with our weights. They fuse projections as we do."""
    state = {name: weight.detach().numpy() for name, weight in ours.named_parameters()}
    theirs: Any = TransformerSpec.from_config(
        DEPTHS, H, pre_norm=first, activation={"relu": Activation.RELU, "gelu": Activation.GELU}[activation]
    )

    def linear(to: Any, name: str) -> None:
        to.weight, to.bias = state.pop(f"{name}.weight"), state.pop(f"{name}.bias")

    def norm(to: Any, name: str) -> None:
        to.gamma, to.beta = state.pop(f"{name}.weight"), state.pop(f"{name}.bias")

    table = state.pop("tables.tables.source.weight")
    for name, stack in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        (stack.embeddings[0] if name == "encoder" else stack.embeddings).weight = table
        stack.scale_embeddings = True
        stack.position_encodings.encodings = positions(ours)
        for i, layer in enumerate(stack.layer):
            at = f"{name}.blocks.{i}.branches"
            linear(layer.self_attention.linear[0], f"{at}.0.branch.qkv")
            linear(layer.self_attention.linear[1], f"{at}.0.branch.output")
            norm(layer.self_attention.layer_norm, f"{at}.0.norm")
            last = 1
            if name == "decoder":
                for n, part in enumerate(("query", "kv", "output")):
                    linear(layer.attention.linear[n], f"{at}.1.branch.{part}")
                norm(layer.attention.layer_norm, f"{at}.1.norm")
                last = 2
            linear(layer.ffn.linear_0, f"{at}.{last}.branch.up")
            linear(layer.ffn.linear_1, f"{at}.{last}.branch.down")
            norm(layer.ffn.layer_norm, f"{at}.{last}.norm")
        if first:
            norm(stack.layer_norm, f"{name}.end")
    theirs.decoder.projection.weight, theirs.decoder.projection.bias = table, state.pop("head.bias")
    assert not state, "every weight of ours must have found its place"
    theirs.register_source_vocabulary(WORDS)
    theirs.register_target_vocabulary(WORDS)
    theirs.config.add_source_bos = theirs.config.add_source_eos = False
    theirs.config.decoder_start_token = WORDS[BOS]
    theirs.validate()
    theirs.save(str(folder))
    return ctranslate2.Translator(str(folder), compute_type="float32", inter_threads=1, intra_threads=1)


def positions(ours: nn.Module) -> np.ndarray:
    """Our sinusoids: theirs, which they would make themselves, are of another convention."""
    return ours.get_buffer("inputs.inputs.source.position.table").numpy()[:100]


def words(ids: list[int]) -> list[str]:
    return [WORDS[i] for i in ids]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("first", [False, True])
def test_scores(first: bool, activation: str, tmp_path: Path) -> None:
    ours = model(first, activation)
    theirs = engine(ours, first, activation, tmp_path)
    expected = theirs.score_batch([words(row) for row in SOURCES], [words(row) for row in TARGETS])
    batch = translation(list(zip(SOURCES, TARGETS, strict=True)), BOS, EOS)
    assert batch.labels is not None
    log_probs = ours.log_probs(batch).gather(-1, batch.labels[..., None]).squeeze(-1)
    for row, score in enumerate(expected):
        close(log_probs[row, : len(score.log_probs)], torch.tensor(score.log_probs), 1e-5)
        assert len(score.log_probs) == len(TARGETS[row]) + 1


@pytest.mark.parametrize("first", [False, True])
def test_greedy_translations(first: bool, tmp_path: Path) -> None:
    ours = model(first, "relu")
    theirs = engine(ours, first, "relu", tmp_path)
    options = {"beam_size": 1, "max_decoding_length": 8, "no_repeat_ngram_size": 1, "suppress_sequences": [["<s>"]]}
    expected = theirs.translate_batch([words(row) for row in SOURCES], return_end_token=True, **options)
    source, seg = pad(SOURCES)
    first_read = torch.full((len(SOURCES), 1), BOS)
    ids, _ = greedy(ours, ours.start(Batch(first_read, source=source, source_seg=seg), 8), first_read, 8, eos=EOS)
    for row, translated in enumerate(expected):
        said = translated.hypotheses[0]
        assert words(ids[row].tolist())[: len(said)] == said
