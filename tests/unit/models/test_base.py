import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError

from regard.batch import Batch, translation
from regard.catalogue import edited
from regard.errors import DataError, RegardError, SpecError
from regard.models.base import LanguageModel
from regard.models.build import build, count, seeded
from regard.models.decoder_only import DecoderOnly
from regard.models.decoding import last_real, padding_mask
from regard.models.embedding import Tables
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.encoder_only import EncoderOnly
from regard.models.loss import label_weights, real_rows
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.embedding import Tokens
from regard.nn.init import Init, Normal, Xavier
from regard.nn.mask import Mask
from regard.nn.norm import LayerNorm
from regard.nn.position.additive import Learned
from regard.nn.vocab.tables import Embeddings
from regard.tree import swap

Pair = Callable[..., EncoderDecoder]
Decoder = Callable[..., DecoderOnly]
Encoder = Callable[..., EncoderOnly]
Perturbed = Callable[[Any], Any]


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("d_hidden", [10**13, 10**18, 10**30])
def test_model_too_large_for_memory_is_refused(d_hidden: int, device: str | None, pair: Pair) -> None:
    wide = swap(pair(), FeedForward, lambda branch: replace(branch, d_hidden=d_hidden))
    if device == "meta" and d_hidden == 10**13:
        assert count(wide) > 10**13  # it can still be counted
        return
    with pytest.raises(SpecError, match="a model of these sizes is too large for any memory; make its widths"):
        build(wide, device=device)


class TestBuild:
    def test_the_same_seed_gives_the_same_weights(self, pair: Pair) -> None:
        a, b, other = build(pair(), seed=3), build(pair(), seed=3), build(pair(), seed=4)
        assert torch.equal(weights(a), weights(b))
        assert not torch.equal(weights(a), weights(other))

    def test_build_neither_uses_nor_changes_the_global_random_generator(self, pair: Pair) -> None:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first = build(pair())
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(6)
        assert torch.equal(weights(build(pair())), weights(first))

    def test_uninitialised_weights_have_the_same_names_and_shapes(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        initialized = build(pair())

        def fail(self: Init, *_: Any) -> None:
            raise AssertionError("initialised")

        monkeypatch.setattr(Xavier, "draw", fail)
        uninitialized = build(pair(), init=False)
        shapes = {name: tensor.shape for name, tensor in initialized.state_dict().items()}
        assert {name: tensor.shape for name, tensor in uninitialized.state_dict().items()} == shapes
        uninitialized.load_state_dict(initialized.state_dict())
        batch = translation([([3, 4], [5])])
        assert torch.equal(uninitialized.loss(batch).total, initialized.loss(batch).total)

    def test_the_meta_device_allocates_and_initialises_nothing(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Xavier, "draw", None)
        model = build(pair(vocab=10**9), device="meta")
        assert all(parameter.is_meta for parameter in model.parameters())
        assert all(buffer.is_meta for buffer in model.buffers())

    def test_init_of_the_spec_initialises_weights(self, pair: Pair) -> None:
        table = build(pair(vocab=5000, init=Normal(0.3))).tables.get("source")  # type: ignore[reportCallIssue]
        assert table.weight.std().item() == pytest.approx(0.3, rel=0.05)

    def test_spec_of_a_part_is_refused(self) -> None:
        with pytest.raises(SpecError, match="LayerNorm is not the spec of a whole model"):
            inspect.unwrap(build)(LayerNorm())  # past the type checks of tests

    def test_count_equals_the_parameters_of_the_built_model(
        self, pair: Pair, decoder: Decoder, encoder: Encoder
    ) -> None:
        for spec in (pair(), decoder(), encoder()):
            assert count(spec) == weights(build(spec)).numel()

    def test_seeded_restores_the_generator_after_an_error(self) -> None:
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError), seeded(3):
            torch.rand(3).view(7)
        assert torch.equal(torch.get_rng_state(), before)


IDS = torch.tensor([[3, 4, 5], [6, 0, 0]])
SEG = torch.tensor([[1, 1, 1], [1, 0, 0]])


class TestLabels:
    def test_default_label_weight_is_1_for_real_tokens(self) -> None:
        assert label_weights(Batch(IDS, IDS)).tolist() == [[1, 1, 1], [1, 1, 1]]
        assert label_weights(Batch(IDS, IDS, SEG)).tolist() == [[1, 1, 1], [1, 0, 0]]
        weights = torch.rand(2, 3)
        assert label_weights(Batch(IDS, IDS, SEG, weights=weights)) is weights

    def test_tokens_without_weight_are_removed(self) -> None:
        h, w = torch.randn(2, 3, 4), torch.tensor([[0.5, 0.0, 1.0], [2.0, 0.0, 0.0]])
        rows, labels, label_weight = real_rows(h, IDS, w)
        assert torch.equal(rows, torch.stack((h[0, 0], h[0, 2], h[1, 0])))
        assert (labels.tolist(), label_weight.tolist()) == ([3, 5, 6], [0.5, 1.0, 2.0])

    def test_last_real_returns_the_last_real_token(self) -> None:
        x = torch.randn(2, 3, 4)
        assert torch.equal(last_real(x, None), x[:, 2])
        assert torch.equal(last_real(x, torch.tensor([3, 1])), torch.stack((x[0, 2], x[1, 0])))
        assert torch.equal(last_real(x, torch.tensor([2, 0])), torch.stack((x[0, 1], x[1, 0])))

    @pytest.mark.parametrize("labels", [None, torch.tensor([1, 2])])
    def test_the_loss_needs_a_label_per_token(self, labels: Any, decoder: Decoder) -> None:
        with pytest.raises(DataError, match=r"^labels: the loss needs one label per target token"):
            build(decoder()).loss(Batch(IDS, labels))

    def test_loss_sums_weighted_tokens(self, decoder: Decoder, perturbed: Callable[[Any], LanguageModel]) -> None:
        model, w = perturbed(build(decoder())), torch.tensor([[0.5, 0.0, 1.0], [2.0, 0.0, 0.0]])
        labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
        loss = model.loss(Batch(IDS, labels, SEG, weights=w))
        log_probs = model.log_probs(Batch(IDS, labels, SEG))
        expected = -sum(w[b, t] * log_probs[b, t, labels[b, t]] for b in range(2) for t in range(3))
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(loss.total, expected)
        torch.testing.assert_close(loss.nll, expected)
        assert (loss.tokens.item(), loss.aux.item()) == (3.5, 0.0)

    def test_smoothing_is_for_training_only(self, decoder: Decoder) -> None:
        model, batch = build(edited(decoder(), {"head.label_smoothing": 0.3})), Batch(IDS, IDS, SEG)
        training = model.train().loss(batch)
        evaluating = model.eval().loss(batch)
        assert training.total.item() != pytest.approx(training.nll.item())
        assert evaluating.total.item() == evaluating.nll.item() == pytest.approx(training.nll.item())


class TestTables:
    def test_each_table_is_stored_once_under_its_owner(self, site: Any) -> None:
        uses = {"source": ("source", 7, 4), "target": ("source", 7, 4), "output": ("output", 7, 4)}
        tables = Tables(Embeddings(), site(), uses)
        assert tables.get("target") is tables.get("source")
        assert tables.get("output") is not tables.get("source")
        assert [name for name, _ in tables.named_parameters()] == ["tables.source.weight", "tables.output.weight"]
        assert tables.get("nothing") is None

    @pytest.mark.parametrize("other", [("source", 8, 4), ("source", 7, 5)])
    def test_tables_of_unequal_size_cannot_be_shared(self, other: tuple[str, int, int], site: Any) -> None:
        with pytest.raises(SpecError, match=r"^sharing: the target table is . x . and the source table 7 x 4"):
            Tables(Embeddings(), site(), {"source": ("source", 7, 4), "target": other})


def test_a_memory_without_padding_needs_no_mask() -> None:
    assert padding_mask(None) == padding_mask(torch.ones(2, 3, dtype=torch.int64)) == Mask()
    assert padding_mask(SEG).k_seg is SEG


DECODING = {"ids": torch.tensor([[3], [4]]), "source": torch.tensor([[3, 4], [5, 6]])}


def decode(spec: Any, steps: int, max_len: int, static: bool = False, seg: torch.Tensor | None = None) -> None:
    model = build(spec).eval()
    assert isinstance(model, LanguageModel)
    source = DECODING["source"] if isinstance(spec, EncoderDecoder) else None
    decoding = model.start(Batch(DECODING["ids"], source=source), max_len, static=static)
    ids = DECODING["ids"] if seg is None else DECODING["ids"].expand_as(seg)
    for _ in range(steps):
        model.advance(ids, decoding, seg)


CONCAT = Tokens(join="concat", position_width=2)

# Invalid uses, and the field that the error must name.
REFUSED: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "heads do not divide the width": (lambda pair, *_: pair(heads=3), "heads"),
    "heads of a layer do not divide": (
        lambda pair, *_: build(edited(pair(), {"decoder.pattern[0].branches[1].heads": 3})),
        "decoder.pattern[0].branches[1].heads",
    ),
    "key-value heads do not divide": (
        lambda pair, *_: build(edited(pair(), {"encoder.pattern[0].branches[0].kv_heads": 3})),
        "encoder.pattern[0].branches[0].kv_heads",
    ),
    "tied tables of unequal width": (lambda pair, *_: build(pair(input=CONCAT)), "sharing"),
    "tied tables of unequal width, decoder-only": (lambda _, decoder, __: build(decoder(input=CONCAT)), "tied"),
    "tied tables of unequal width, encoder-only": (lambda _, __, encoder: build(encoder(input=CONCAT)), "task.tied"),
    "tied tables of unequal vocabulary": (lambda pair, *_: build(pair(target_vocab=12)), "sharing"),
    "too long for learned positions": (
        lambda pair, *_: build(pair(input=Tokens(position=Learned(3)))).loss(translation([([3, 4], [5, 6, 7])])),
        "input.position.max_len",
    ),
    "too long a source for learned positions": (
        lambda pair, *_: build(pair(input=Tokens(position=Learned(3)))).loss(translation([([3, 4, 5, 6], [5])])),
        "input.position.max_len",
    ),
    "too long for learned positions, decoding": (
        lambda _, decoder, __: decode(decoder(input=Tokens(position=Learned(3))), 4, 9),
        "input.position.max_len",
    ),
    "too many steps": (lambda _, decoder, __: decode(decoder(), 4, 3), "max_len"),
    "too many steps of an encoder-decoder": (lambda pair, *_: decode(pair(), 4, 3), "max_len"),
    "too many static steps": (lambda _, decoder, __: decode(decoder(), 4, 3, static=True), "max_len"),
    "strict in an encoder": (lambda pair, *_: build(edited(pair(), {"encoder.strict": True})), "encoder.strict"),
    "strict in an encoder-only": (
        lambda _, __, encoder: build(edited(encoder(), {"encoder.strict": True})),
        "encoder.strict",
    ),
    "cross-attention in an encoder": (
        lambda pair, *_: build(edited(pair(), {"encoder.pattern[0].branches[0]": CrossAttention()})),
        "encoder.pattern[0].branches[0].kind",
    ),
    "cross-attention in a decoder-only": (
        lambda _, decoder, __: build(edited(decoder(), {"decoder.pattern[0].branches[1]": CrossAttention()})),
        "decoder.pattern[0].branches[1].kind",
    ),
    "cross-attention in an encoder-only": (
        lambda _, __, encoder: build(edited(encoder(), {"encoder.pattern[0].branches[1]": CrossAttention()})),
        "encoder.pattern[0].branches[1].kind",
    ),
    "a shared bias and other heads": (
        lambda pair, *_: build(
            edited(pair(), {"decoder.position": "t5_bias", "decoder.pattern[0].branches[0].heads": 4})
        ),
        "decoder.pattern[0].branches[0].heads",
    ),
    "sinusoids of odd width": (lambda pair, *_: build(pair(d_model=9, heads=3)), "input.position.kind"),
    "rotary of odd width": (
        lambda pair, *_: build(edited(pair(d_model=6), {"encoder.position": "rotary"})),
        "encoder.position.kind",
    ),
    "more position than width": (
        lambda pair, *_: build(pair(input=replace(CONCAT, position_width=8))),
        "input.position_width",
    ),
    "no vocabulary": (lambda pair, *_: pair(vocab=0), "vocab"),
    "no target vocabulary": (lambda pair, *_: pair(target_vocab=0), "target_vocab"),
    "no width": (lambda _, decoder, __: decoder(d_model=0), "d_model"),
    "certain dropout": (lambda _, __, encoder: encoder(attention_dropout=1.0), "attention_dropout"),
    "negative dropout": (lambda pair, *_: pair(dropout=-0.1), "dropout"),
    "left padding": (
        lambda *_: Batch(IDS, target_seg=torch.tensor([[0, 1, 1], [1, 1, 1]])),
        "target_seg",
    ),
    "left padding in a decoding": (
        lambda _, decoder, __: decode(decoder(), 1, 9, seg=torch.tensor([[0, 1], [1, 1]])),
        "seg",
    ),
    "no source": (lambda pair, *_: build(pair()).loss(Batch(IDS, IDS)), "source"),
    "a prefix that would be ignored": (
        lambda _, decoder, __: build(decoder()).loss(Batch(IDS, IDS, prefix=IDS > 3)),
        "prefix",
    ),
    "a prefix that is missing": (
        lambda _, decoder, __: build(decoder(input_attention="full")).loss(Batch(IDS, IDS)),
        "prefix",
    ),
    "a prefix for an encoder": (
        lambda _, __, encoder: build(encoder()).loss(Batch(IDS, IDS, prefix=IDS > 3)),
        "prefix",
    ),
    "a prefix for an encoder-decoder": (
        lambda pair, *_: build(pair()).loss(Batch(IDS, IDS, source=IDS, prefix=IDS > 3)),
        "prefix",
    ),
    "types for an encoder-decoder": (
        lambda pair, *_: build(pair()).loss(Batch(IDS, IDS, source=IDS, types=IDS)),
        "types",
    ),
    "types for an input that has none": (
        lambda _, decoder, __: build(decoder()).loss(Batch(IDS, IDS, types=IDS * 0)),
        "types",
    ),
    "packed sources in a decoding": (
        lambda pair, *_: build(pair()).start(translation([([3], [4]), ([5], [6])], packed=True), 4),  # type: ignore[reportCallIssue]
        "packed",
    ),
}


@pytest.mark.parametrize(("use", "path"), REFUSED.values(), ids=list(REFUSED))
def test_invalid_use_is_refused_in_one_line_that_names_the_field(
    use: Callable[[Any, Any, Any], Any], path: str, pair: Pair, decoder: Decoder, encoder: Encoder
) -> None:
    with pytest.raises(RegardError) as raised:
        use(pair, decoder, encoder)
    assert isinstance(raised.value, SpecError | DataError)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


LONG = torch.tensor([[3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3]])


def test_padding_stays_hidden_whatever_its_position_or_prefix(
    pair: Pair, decoder: Decoder, perturbed: Perturbed
) -> None:
    """`pack` writes position 0 at padding, and a prefix may be marked beyond the end of a row."""
    seg, pos = torch.tensor([[1, 1, 1, 0, 0, 0]] * 2), torch.tensor([[0, 1, 2, 0, 0, 0]] * 2)
    other = LONG.clone()
    other[:, 3:] = 7
    model = perturbed(build(pair()))
    log_probs = [model.log_probs(Batch(ids, target_seg=seg, target_pos=pos, source=LONG)) for ids in (LONG, other)]
    torch.testing.assert_close(log_probs[0][:, :3], log_probs[1][:, :3])
    model = perturbed(build(decoder(input_attention="full")))
    log_probs = [
        model.log_probs(Batch(ids, target_seg=seg, prefix=torch.ones_like(seg).bool())) for ids in (LONG, other)
    ]
    torch.testing.assert_close(log_probs[0][:, :3], log_probs[1][:, :3])


def test_decoding_refuses_tensors_of_wrong_shape(pair: Pair) -> None:
    model: Any = build(pair()).eval()
    decoding = model.start(Batch(LONG, source=LONG), 8, beams=2)
    ids = torch.full((4, 1), 3)
    for wrong in (ids[:1], ids[:, :0], torch.full((6, 1), 3)):
        with pytest.raises(DataError, match=r"^ids: this decoding session reads 4 rows"):
            model.advance(wrong, decoding)
    with pytest.raises((DataError, TypeCheckError), match="seg"):
        model.advance(ids, decoding, torch.ones(4, 2, dtype=torch.int64))
    with pytest.raises(DataError, match=r"^seg: row 1 has no token"):
        model.advance(ids, decoding, torch.tensor([[1], [0], [1], [1]]))
    with pytest.raises(DataError, match=r"^parent: needs one index per row \(4\)"):
        decoding.reorder(torch.tensor([0]))
    with pytest.raises(DataError, match=r"^parent: a beam can only continue a beam of its own source"):
        decoding.reorder(torch.tensor([0, 2, 2, 3]))
    with pytest.raises(SpecError, match=r"^beams: must be at least 1"):
        model.start(Batch(LONG, source=LONG), 8, beams=0)


def test_invalid_labels_are_refused_unless_their_weight_is_0(decoder: Decoder) -> None:
    model = build(decoder()).eval()
    labels, weights = LONG.clone(), torch.ones(LONG.shape)
    labels[:, 2:], weights[:, 2:] = -100, 0.0
    assert model.loss(Batch(LONG, labels, weights=weights)).tokens == 4
    with pytest.raises(DataError, match=r"^labels: a negative label has a weight"):
        model.loss(Batch(LONG, labels))
