from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from regard import from_record
from regard.batch import Batch
from regard.errors import DataError, SpecError
from regard.models.build import build, count
from regard.models.encoder_only import EncoderOnly, MaskedLM, Pool, Pooled, Pooling, SentenceClassifier, TokenClassifier
from regard.nn.core import Site
from regard.nn.embedding import Sinusoidal
from regard.nn.mask import Context, Mask, View
from regard.nn.stacks.base import StackOut
from regard.testing import tiny
from regard.tree import to_record

Encoder = Callable[..., EncoderOnly]
Perturbed = Callable[[Any], Any]
CPU = torch.device("cpu")
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
SEG = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
LABELS = torch.tensor([[1, 2, 0, 1], [2, 0, 0, 0]])


def encoded(model: Any) -> torch.Tensor:
    """Return the encoder's output; every token attends to every real token."""
    x = model.encoder.tables.get("source")(IDS) * 8**0.5 + Sinusoidal().table(4, 8)
    return model.encoder.stack(x, Context(View(Mask(k_seg=SEG), 4, 4, CPU))).x


def test_masked_lm_matches_the_formula(encoder: Encoder, perturbed: Perturbed) -> None:
    """log softmax(norm(gelu(x W + b)) E' + c), with the input's table."""
    model = perturbed(build(encoder()))
    h = torch.nn.functional.gelu(encoded(model) @ model.transform.weight.T + model.transform.bias)
    h = torch.nn.functional.layer_norm(h, (8,), model.norm.weight, model.norm.bias, eps=1e-12)
    logits = h @ model.encoder.tables.get("source").weight.T + model.head.bias
    torch.testing.assert_close(model.log_probs(Batch(IDS, target_seg=SEG)), logits.log_softmax(-1))


def test_masked_lm_loss_sums_over_weighted_labels(encoder: Encoder, perturbed: Perturbed) -> None:
    model, weights = perturbed(build(encoder())), torch.tensor([[0.0, 1, 0, 1], [1, 0, 0, 0]])
    loss = model.loss(Batch(IDS, LABELS, SEG, weights=weights))
    log_probs = model.log_probs(Batch(IDS, target_seg=SEG))
    torch.testing.assert_close(loss.total, -(log_probs[0, 1, 2] + log_probs[0, 3, 1] + log_probs[1, 0, 2]))
    assert loss.tokens.item() == 3.0


def test_untied_masked_lm_has_its_own_table(encoder: Encoder, perturbed: Perturbed) -> None:
    assert count(encoder(task=MaskedLM(tied=False))) - count(encoder()) == 11 * 8
    model = perturbed(build(encoder(task=MaskedLM(tied=False))))
    assert model.table() is not model.encoder.tables.get("source")


@pytest.mark.parametrize("pooler", [True, False])
@pytest.mark.parametrize("pool", get_args(Pooling))
def test_sentence_classifier_matches_the_formula(
    pool: Pooling, pooler: bool, encoder: Encoder, perturbed: Perturbed
) -> None:
    model = perturbed(build(encoder(task=SentenceClassifier(3, pool, pooler))))
    x = encoded(model)
    rows = {
        "first": x[:, 0],
        "mean": torch.stack((x[0].mean(0), x[1, :2].mean(0))),
        "last": torch.stack((x[0, 3], x[1, 1])),
        "ends": torch.stack((torch.cat((x[0, 0], x[0, 3])), torch.cat((x[1, 0], x[1, 1])))),
        "max": torch.stack((x[0].amax(0), x[1, :2].amax(0))),
        "mean_max": torch.stack([torch.cat((row.mean(0), row.amax(0))) for row in (x[0], x[1, :2])]),
    }[pool]
    if pooler:
        rows = (rows @ model.pool.pooler.weight.T + model.pool.pooler.bias).tanh()
    scores = rows @ model.classes.weight.T + model.classes.bias
    batch = Batch(IDS, torch.tensor([2, 0]), SEG)
    torch.testing.assert_close(model.scores(batch), scores)
    loss = model.loss(batch)
    log_probs = scores.log_softmax(-1)
    torch.testing.assert_close(loss.total, -(log_probs[0, 2] + log_probs[1, 0]))
    assert loss.tokens.item() == 2.0
    assert loss.nll.item() == loss.total.item()


@pytest.mark.parametrize("pool", ["mean", "max", "mean_max"])
def test_pooling_of_rows_without_padding(pool: Pooling, encoder: Encoder, perturbed: Perturbed) -> None:
    model = perturbed(build(encoder(task=SentenceClassifier(3, pool, pooler=False))))
    full = model.scores(Batch(IDS[:1], target_seg=SEG[:1]))
    torch.testing.assert_close(model.scores(Batch(IDS[:1])), full)


@pytest.mark.parametrize("pool", ["mean", "max", "mean_max"])
def test_pooling_of_a_row_of_padding_is_zero(pool: Pooling, site: Callable[..., Site]) -> None:
    x = -torch.rand(2, 4, 12).requires_grad_() - 1
    seg = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    pooled = Pool(pool, False, site())(StackOut(x, seg), Batch(IDS))
    assert bool((pooled[0] < 0).all())
    assert bool((pooled[1] == 0).all())
    (gradient,) = torch.autograd.grad(pooled.sum(), x)
    assert bool(gradient.isfinite().all())
    assert bool((gradient[0, 2:] == 0).all())
    assert bool((gradient[1] == 0).all())


def test_label_smoothing_of_a_sentence_classifier_equals_torch(encoder: Encoder, perturbed: Perturbed) -> None:
    model = perturbed(build(encoder(task=SentenceClassifier(3, label_smoothing=0.2))))
    labels = torch.tensor([2, 0])
    batch = Batch(IDS, labels, SEG)
    scores = model.scores(batch)
    plain = F.cross_entropy(scores, labels, reduction="sum")
    smooth = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=0.2)
    assert abs(smooth.item() - plain.item()) > 1e-3
    for training, total in ((True, smooth), (False, plain)):
        loss = model.train(training).loss(batch)
        torch.testing.assert_close(loss.total, total)
        torch.testing.assert_close(loss.nll, plain.detach())
        assert loss.tokens.item() == 2.0
        gradients, expected = (
            torch.autograd.grad(x, model.classes.weight, retain_graph=True) for x in (loss.total, total)
        )
        torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("label_smoothing", [-0.1, 1.0])
def test_label_smoothing_outside_of_its_range_is_refused(label_smoothing: float) -> None:
    with pytest.raises(SpecError, match=r"^label_smoothing: must lie in \[0, 1\), not"):
        SentenceClassifier(3, label_smoothing=label_smoothing)


def test_old_records_without_label_smoothing_are_loaded() -> None:
    spec = tiny.encoder_only(SentenceClassifier(3))
    record = to_record(spec)
    del record["task"]["label_smoothing"]
    assert from_record(record) == spec


def test_token_classifier_matches_the_formula(encoder: Encoder, perturbed: Perturbed) -> None:
    model = perturbed(build(encoder(task=TokenClassifier(3))))
    scores = encoded(model) @ model.classes.weight.T + model.classes.bias
    batch = Batch(IDS, LABELS, SEG)
    torch.testing.assert_close(model.scores(batch), scores)
    loss, log_probs = model.loss(batch), scores.log_softmax(-1)
    expected = -sum(log_probs[b, t, LABELS[b, t]] for b in range(2) for t in range(4) if SEG[b, t])
    torch.testing.assert_close(loss.total, expected)
    assert loss.tokens.item() == 6.0


def test_pooled_matches_the_formula_and_has_no_loss(encoder: Encoder, perturbed: Perturbed) -> None:
    model = perturbed(build(encoder(task=Pooled())))
    expected = (encoded(model)[:, 0] @ model.pool.pooler.weight.T + model.pool.pooler.bias).tanh()
    torch.testing.assert_close(model(Batch(IDS, target_seg=SEG)), expected)
    with pytest.raises(SpecError, match=r"^task\.kind: 'pooled' predicts nothing; choose masked_lm"):
        model.loss(Batch(IDS, LABELS))


@pytest.mark.parametrize(
    ("task", "batch", "message"),
    [
        (SentenceClassifier(3), Batch(IDS, LABELS), "^labels: sentence classification needs one label per row"),
        (SentenceClassifier(3), Batch(IDS), "^labels: sentence classification needs one label per row"),
        (TokenClassifier(3), Batch(IDS, torch.tensor([1, 2])), "^labels: token classification needs one label per tok"),
    ],
)
def test_missing_labels_and_labels_of_wrong_shape_are_refused(
    task: Any, batch: Batch, message: str, encoder: Encoder
) -> None:
    with pytest.raises(DataError, match=message):
        build(encoder(task=task)).loss(batch)


def test_sentence_classifier_refuses_packed_rows(encoder: Encoder, perturbed: Perturbed) -> None:
    model = perturbed(build(encoder(task=SentenceClassifier(3))))
    seg, pos = torch.tensor([[1, 1, 2, 2]] * 2), torch.tensor([[0, 1, 0, 1]] * 2)
    with pytest.raises(DataError, match=r"^packed: a packed row holds several texts"):
        model.scores(Batch(IDS, target_seg=seg, target_pos=pos, packed=True, segments=2))


@pytest.mark.parametrize("task", [SentenceClassifier, TokenClassifier])
def test_fewer_than_two_classes_are_refused(task: Callable[[int], Any]) -> None:
    with pytest.raises(SpecError, match=r"^classes: must be at least 2, not 1"):
        task(1)
