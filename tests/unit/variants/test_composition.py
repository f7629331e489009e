"""Combined rows of the table: any two build, train and decode together, or the error names both."""

import os
import random
from dataclasses import replace
from functools import cache
from itertools import combinations, islice
from typing import Any

import pytest
import torch

from regard.batch import translation
from regard.errors import SpecError
from regard.models.base import Generator, ModelSpec
from regard.models.build import build, count
from regard.nn.branches.feedforward import FeedForward
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.tree import swap
from regard.variants import VARIANTS, combine
from tests.learning import Learned

PAIRS = [([5, 6, 7, 8], [8, 9, 4]), ([4, 6], [5, 6, 7]), ([9, 8, 7], [3, 3])]
ROWS = [name for name, variant in VARIANTS.items() if variant.row is not None and name != "vanilla"]


def base() -> ModelSpec:
    """Return the base of the table with small sizes that all rows can divide."""
    spec: Any = preset("narang_base")
    spec = swap(spec, Plain, lambda stack: replace(stack, depth=6))
    spec = swap(spec, FeedForward, lambda branch: replace(branch, d_hidden=24))
    return replace(spec, vocab=20, d_model=24, heads=6, d_head=4)


ALL = [pair for first, other in combinations(ROWS, 2) for pair in ((first, other), (other, first))]
# All 2,550 ordered pairs take a minute and a half: REGARD_PAIRS=2550.
SAMPLED = random.Random(4).sample(ALL, int(os.environ.get("REGARD_PAIRS", "60")))


@cache
def refusal(pair: tuple[str, str]) -> str | None:
    """Return the error message of a pair of rows, or None if they can be combined."""
    try:
        count(combine(pair, base()))
    except SpecError as error:
        return str(error)
    return None


@pytest.mark.parametrize("number", range(20))
def test_two_rows_train_and_decode_together(number: int, learned: Learned) -> None:
    """Pairs that cannot be combined are skipped."""
    pair = next(islice((pair for pair in SAMPLED if refusal(pair) is None), number, None))
    model = build(combine(pair, base()), seed=learned.seeds(1)[0])
    assert isinstance(model, Generator)
    batch = translation(PAIRS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model.loss(batch)
        (loss.total / loss.tokens + loss.aux).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.total.item())
    learned("share of the loss removed", 1 - losses[-1] / losses[0], above=0.02, broken=0.0)
    model.eval()
    with torch.no_grad():
        decoding = model.start(batch, 4)
        log_probs = model.advance(batch.target[:, :1], decoding)
        torch.testing.assert_close(log_probs, model.log_probs(batch)[:, 0], rtol=0, atol=1e-4)  # type: ignore[operator]
        for _ in range(3):
            log_probs = model.advance(log_probs.argmax(-1, keepdim=True), decoding)
        assert log_probs.isfinite().all()


def test_pairs_that_cannot_be_combined_are_refused_by_name() -> None:
    refused = {pair: sentence for pair in SAMPLED if (sentence := refusal(pair)) is not None}
    assert 0 < len(refused) < len(SAMPLED) / 2
    for (first, other), sentence in refused.items():
        assert repr(first) in sentence, sentence
        assert repr(other) in sentence, sentence


def test_a_variant_that_undoes_another_is_refused() -> None:
    with pytest.raises(SpecError, match="'swiglu' undoes 'gelu'; choose one of the two"):
        combine(("gelu", "swiglu"), base())
    with pytest.raises(SpecError, match="'sinusoidal' undoes 'rotary'"):
        combine(("rotary", "swiglu", "sinusoidal"), base())


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (
            ("switch", "block_sharing"),
            "'block_sharing' cannot be applied after 'switch': the layers of",
        ),
        (
            ("product_key_memory", "layers_24"),
            "'layers_24' cannot be applied after 'product_key_memory': the layers",
        ),
        (("light_conv", "rotary"), "'rotary' cannot be applied after 'light_conv': encoder: has no attention"),
        (
            ("sliding_window", "light_conv"),
            "'light_conv' cannot be applied after 'sliding_window': .*no branch of this stack attends",
        ),
        (("synth_dense_plus", "query_key_norm"), "'synthesizer' has no queries and keys"),
        (("universal", "rezero"), r"'rezero' removes a part that 'universal' added \(gated_recurrent\)"),
        (("block_sharing_decoder", "decoder_only"), "encoder and decoder must be equal except for cross-attention"),
        (("evolved", "funnel"), "a funnel halves the sequence after self-attention"),
        (("swiglu", "gelu"), "'gelu' undoes 'swiglu'"),
    ],
    ids=lambda value: " + ".join(value) if isinstance(value, tuple) else "",
)
def test_pairs_with_a_partial_effect_are_refused(pair: tuple[str, str], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        combine(pair, base())


def test_tying_an_untied_softmax_restores_its_scale() -> None:
    model: Any = combine(("block_sharing_encoder", "tied_decoder"), base())
    assert (model.sharing.input_output, model.head.scaled) == (True, True)


def test_weighted_attention_with_fixup_learns() -> None:
    model = build(combine(("weighted", "fixup"), base()), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(3):
        loss = model.loss(translation(PAIRS))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    moving = [p.grad is not None and bool(p.grad.any()) for name, p in model.named_parameters() if ".blocks." in name]
    assert sum(moving) > len(moving) / 2
