"""Plain and fast modules have equal outputs, gradients and decoding steps on a GPU, for every model family."""

import copy
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from regard import fast
from regard.batch import Batch
from regard.errors import DataError, SpecError
from regard.models.base import LanguageModel, Model, ModelSpec
from regard.models.build import build
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.gated_delta import GatedDelta
from regard.nn.branches.self_attention import SelfAttention
from regard.testing import tiny
from regard.tree import swap

pytestmark = pytest.mark.gpu
COMPRESSED = CompressedAttention(2)
DELTA = GatedDelta(4, key_heads=2, d_head=8, d_value=4)
FAMILIES = {
    **tiny.families(),
    "compressed attention": swap(tiny.encoder_decoder(), SelfAttention, lambda _: COMPRESSED),
    "compressed attention with a prefix": swap(tiny.prefix_lm(), SelfAttention, lambda _: COMPRESSED),
    "gated delta rule": swap(tiny.decoder_only(), SelfAttention, lambda _: DELTA),
}
GENERATING = [name for name, spec in FAMILIES.items() if isinstance(build(spec, "meta"), LanguageModel)]


def plain_and_fast(family: str) -> tuple[Model, Model]:
    """Return (model with plain modules, copy with fast modules), in float32 and without dropout."""
    plain = build(FAMILIES[family], "cuda", seed=1).float().eval()
    optimized = copy.deepcopy(plain)
    fast.install(optimized)
    return plain, optimized


def gradients(model: Model, batch: Batch, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the loss per token and the gradient of every weight."""
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model.loss(batch)
    total = loss.total / loss.tokens + loss.aux
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(total, learned, allow_unused=True)
    return [total.detach(), *(torch.zeros(()) if grad is None else grad.float() for grad in grads)]


def batches(spec: ModelSpec) -> Iterator[Batch]:
    """Yield a padded batch and, if the model family supports it, a packed batch."""
    yield tiny.collate(spec, tiny.examples(spec, 4), device="cuda")
    with suppress(DataError, SpecError):
        yield tiny.collate(spec, tiny.examples(spec, 4), packed=True, device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_modules_have_the_outputs_and_gradients_of_plain_modules(family: str) -> None:
    plain, optimized = plain_and_fast(family)
    for batch in batches(FAMILIES[family]):
        with suppress(DataError, SpecError):  # models without support for packed rows raise an error in `loss`
            expected = gradients(plain, batch, None)
            for actual, reference in zip(gradients(optimized, batch, None), expected, strict=True):
                assert actual.shape == reference.shape
                assert (actual - reference).norm() <= 1e-3 * reference.norm() + 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_modules_have_bfloat16_rounding_errors_like_plain_modules(family: str) -> None:
    plain, optimized = plain_and_fast(family)
    for batch in batches(FAMILIES[family]):
        with suppress(DataError, SpecError):
            exact = gradients(plain, batch, None)
            rounded, optimized_rounded = (gradients(model, batch, torch.bfloat16) for model in (plain, optimized))
            # All gradients together: a single bias depends on which side of 0 a rounded activation lies.
            exact_vector, plain_vector, optimized_vector = (
                torch.cat([tensor.flatten().cpu() for tensor in each_model])
                for each_model in (exact, rounded, optimized_rounded)
            )
            error = (plain_vector - exact_vector).norm()
            assert (optimized_vector - exact_vector).norm() <= 3 * error + 0.2 * exact_vector.norm() + 1e-4


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", GENERATING)
@torch.no_grad()
def test_beams_that_share_a_cache_decode_as_with_plain_modules(family: str, static: bool) -> None:
    spec, (plain, optimized) = FAMILIES[family], plain_and_fast(family)
    batch = tiny.collate(spec, tiny.examples(spec, 3), device="cuda")
    rng, steps = torch.Generator().manual_seed(5), []
    parents = [torch.arange(9) // 3 * 3 + torch.randint(0, 3, (9,), generator=rng) for _ in range(3)]
    tokens = [batch.target[:, :1].repeat_interleave(3, 0), *torch.randint(3, tiny.VOCAB, (2, 9, 1), generator=rng)]
    for model in (plain, optimized):
        assert isinstance(model, LanguageModel)
        decoding, log_probs = model.start(batch, 6, beams=3, static=static), []
        for ids, parent in zip(tokens, parents, strict=True):
            log_probs.append(model.advance(ids.cuda(), decoding))
            decoding.reorder(parent.cuda())
        steps.append(torch.stack(log_probs))
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-3, atol=1e-3)


def test_remove_restores_the_plain_modules() -> None:
    plain, optimized = plain_and_fast("encoder_decoder")
    fast.remove(optimized)
    assert [type(module) for module in optimized.modules()] == [type(module) for module in plain.modules()]
    assert not any(isinstance(module, nn.Module) and "device_search" in vars(module) for module in optimized.modules())
