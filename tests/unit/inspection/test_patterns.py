"""Patterns of attention heads, against naive loops."""

import math

import pytest
import torch
from torch import Tensor

from regard.batch import Batch, translation
from regard.errors import DataError
from regard.inspection.patterns import antecedent_score, distance_profile, entropy, head_patterns, span_attention
from regard.inspection.record import attention
from regard.models.decoder_only import DecoderOnly
from regard.models.decoder_only_translator import DecoderOnlyTranslator
from regard.testing import laws, tiny
from regard.tree import hints


def weights(B: int = 2, H: int = 3, T: int = 5, S: int = 5) -> Tensor:
    return torch.rand(B, H, T, S, generator=torch.Generator().manual_seed(1)).softmax(-1)


def test_entropy_of_uniform_and_of_certain_attention() -> None:
    assert entropy(torch.full((1, 1, 1, 8), 1 / 8)).item() == pytest.approx(math.log(8))
    assert entropy(torch.eye(3)[None, None]).abs().max() == 0.0


def test_distance_profile_is_the_mean_attention_at_each_offset() -> None:
    w = weights()
    profile = distance_profile(w, 6)
    assert profile.shape == (3, 13)
    for offset in range(-6, 7):
        for h in range(3):
            values = [float(w[b, h, i, i + offset]) for b in range(2) for i in range(5) if 0 <= i + offset < 5]
            expected = sum(values) / len(values) if values else 0.0
            assert float(profile[h, offset + 6]) == pytest.approx(expected)


def naive(w: Tensor, ids: list[int], ends: set[int]) -> dict[str, list[float]]:
    """Return the patterns of the heads of one text."""
    H, T, S = w.shape
    found: dict[str, list[float]] = {}
    for h in range(H):
        rows = w[h].tolist()
        mean: dict[str, list[float]] = {
            "entropy": [-sum(p * math.log(p) for p in row if p > 0) for row in rows],
            "distance": [sum(p * abs(i - j) for j, p in enumerate(row)) for i, row in enumerate(rows)],
            "previous": [rows[i][i - 1] for i in range(1, T)],
            "next": [rows[i][i + 1] for i in range(T - 1)],
            "current": [rows[i][i] for i in range(T)],
            "delimiter": [sum(p for j, p in enumerate(row) if ids[j] in ends) for row in rows],
            "same_token": [],
        }
        for i in range(T):
            others = [j for j in range(S) if j != i and ids[j] == ids[i] and rows[i][j] > 0]
            if others:
                mean["same_token"].append(sum(rows[i][j] for j in others))
        for name, values in mean.items():
            found.setdefault(name, []).append(sum(values) / max(1, len(values)))
    return found


@pytest.mark.parametrize("name", ["encoder_decoder", "decoder_only", "masked_lm"])
def test_patterns_are_the_means_over_queries(name: str) -> None:
    spec = tiny.families()[name]
    model = laws.Subject(spec).own_model()
    ids = [5, 6, 5, 7, 5, 2]
    batch = Batch(torch.tensor([ids])) if name != "encoder_decoder" else translation([(ids[:-1], [5, 6, 8])])
    ends = {2, 6}
    for kind, layers in attention(model, batch).items():
        keys = batch.source if kind.startswith("encoder") or kind.endswith("cross") else batch.target
        keys = keys if keys is not None and name == "encoder_decoder" else batch.target
        found = head_patterns(model, [batch], ends)[kind]
        for layer, w in zip(found, layers, strict=True):
            expected = naive(w[0], keys[0].tolist(), ends) if w.shape[2] == w.shape[3] else None
            if kind.endswith("cross") or expected is None:
                assert layer.previous is layer.next is layer.current is layer.distance is layer.same_token is None
                assert layer.delimiter is not None
                continue
            for pattern, values in expected.items():
                assert getattr(layer, pattern).tolist() == pytest.approx(values), (kind, pattern)


def test_patterns_of_several_texts_are_means_over_all_queries() -> None:
    model = laws.Subject(tiny.decoder_only()).own_model()
    texts = [Batch(torch.tensor([[5, 6, 7]])), Batch(torch.tensor([[8, 9, 5, 6, 7, 8]]))]
    both = head_patterns(model, texts)["decoder.self"][0].entropy
    first, second = (head_patterns(model, [text])["decoder.self"][0].entropy for text in texts)
    assert both.tolist() == pytest.approx(((3 * first + 6 * second) / 9).tolist())
    with pytest.raises(DataError, match="batches of one row"):
        head_patterns(model, [Batch(torch.tensor([[5, 6], [5, 6]]))])


def test_attention_to_spans_is_summed_over_keys_and_averaged_over_queries() -> None:
    w = weights()[0]
    spans = span_attention(w, [3, 4], [[0, 1], [2]])
    for h in range(3):
        assert float(spans[h, 0]) == pytest.approx(sum(float(w[h, i, j]) for i in (3, 4) for j in (0, 1)) / 2)
        assert float(spans[h, 1]) == pytest.approx(sum(float(w[h, i, 2]) for i in (3, 4)) / 2)
    for wrong in ([], [5], [-1]):
        with pytest.raises(DataError, match="not a span of positions"):
            span_attention(w, wrong, [[0]])


def test_antecedent_score_is_the_share_of_the_antecedent() -> None:
    w = torch.zeros(2, 4, 4)
    w[0, 3] = torch.tensor([0.3, 0.3, 0.2, 0.2])  # 0.3 per token of the antecedent, 0.2 of the distractor
    w[1, 3, 3] = 1.0  # neither
    assert antecedent_score(w, [3], [0, 1], [2]).tolist() == pytest.approx([0.6, 0.5])


def test_the_keys_of_a_decoder_only_translator_are_source_and_target() -> None:
    spec = DecoderOnlyTranslator(**{name: getattr(tiny.decoder_only(), name) for name in hints(DecoderOnly)})
    model = laws.Subject(spec).own_model()
    batch = translation([([5, 6, 7], [8, 9])])  # reads 5 6 7 eos bos 8 9
    (w,) = attention(model, batch)["decoder.self"][:1]
    found = head_patterns(model, [batch], {5, 9})["decoder.self"][0]
    assert found.delimiter is not None
    assert found.delimiter.tolist() == pytest.approx(w[0][:, :, [0, 6]].sum(-1).mean(-1).tolist())
