"""CTranslate2 with our weights, in float32, the highest precision that it supports."""

from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch

from regard import EncoderDecoder, build
from regard.batch import Batch, pad, translation
from regard.inference.ctranslate2_export import Vocabulary, written
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.block import Block
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.residual import PostNorm, PreNorm
from regard.nn.stacks.plain import Plain
from regard.nn.vocab.softmax import Softmax

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


def engine(ours: EncoderDecoderModel, folder: Path) -> Any:
    """Return their model with our weights, as `regard export` writes it."""
    vocabulary = Vocabulary(WORDS, BOS, EOS, WORDS.index("<unk>"))
    written(ours, vocabulary, vocabulary, 100).save(str(folder))
    return ctranslate2.Translator(str(folder), compute_type="float32", inter_threads=1, intra_threads=1)


def words(ids: list[int]) -> list[str]:
    return [WORDS[i] for i in ids]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("first", [False, True])
def test_scores(first: bool, activation: str, tmp_path: Path) -> None:
    ours = model(first, activation)
    theirs = engine(ours, tmp_path)
    expected = theirs.score_batch([words(row) for row in SOURCES], [words(row) for row in TARGETS])
    batch = translation(list(zip(SOURCES, TARGETS, strict=True)), BOS, EOS, source_end=())
    assert batch.labels is not None
    log_probs = ours.log_probs(batch).gather(-1, batch.labels[..., None]).squeeze(-1)
    for row, score in enumerate(expected):
        close(log_probs[row, : len(score.log_probs)], torch.tensor(score.log_probs), 1e-5)
        assert len(score.log_probs) == len(TARGETS[row]) + 1


@pytest.mark.parametrize("first", [False, True])
def test_greedy_translations(first: bool, tmp_path: Path) -> None:
    ours = model(first, "relu")
    theirs = engine(ours, tmp_path)
    options = {"beam_size": 1, "max_decoding_length": 8, "no_repeat_ngram_size": 1, "suppress_sequences": [["<s>"]]}
    expected = theirs.translate_batch([words(row) for row in SOURCES], return_end_token=True, **options)
    source, seg = pad(SOURCES)
    first_read = torch.full((len(SOURCES), 1), BOS)
    ids, _ = greedy(ours, ours.start(Batch(first_read, source=source, source_seg=seg), 8), first_read, 8, eos=EOS)
    for row, translated in enumerate(expected):
        output = translated.hypotheses[0]
        assert words(ids[row].tolist())[: len(output)] == output
