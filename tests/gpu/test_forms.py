"""Both forms of a model compute the same on a GPU: output, gradient and step-by-step decoding, for every family."""

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
from regard.testing import tiny

pytestmark = pytest.mark.gpu
FAMILIES = tiny.families()
GENERATING = [name for name, spec in FAMILIES.items() if isinstance(build(spec, "meta"), LanguageModel)]


def forms(family: str) -> tuple[Model, Model]:
    """A model in its readable and in its fast form, in float32 and without dropout."""
    plain = build(FAMILIES[family], "cuda", seed=1).float().eval()
    quick = copy.deepcopy(plain)
    fast.install(quick)
    return plain, quick


def gradients(model: Model, batch: Batch, dtype: torch.dtype | None) -> list[Tensor]:
    """The loss per token, and the gradient of every weight."""
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model.loss(batch)
    total = loss.total / loss.tokens + loss.aux
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(total, learned, allow_unused=True)
    return [total.detach(), *(torch.zeros(()) if each is None else each.float() for each in found)]


def batches(spec: ModelSpec) -> Iterator[Batch]:
    """A padded batch, and a packed one where the family does not refuse it."""
    yield tiny.collate(spec, tiny.examples(spec, 4), device="cuda")
    with suppress(DataError, SpecError):
        yield tiny.collate(spec, tiny.examples(spec, 4), packed=True, device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_readable_form(family: str) -> None:
    plain, quick = forms(family)
    for batch in batches(FAMILIES[family]):
        with suppress(DataError, SpecError):  # a model that takes no packed rows says so in its loss
            expected = gradients(plain, batch, None)
            for mine, its in zip(gradients(quick, batch, None), expected, strict=True):
                assert mine.shape == its.shape
                assert (mine - its).norm() <= 1e-3 * its.norm() + 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_rounding_errors_are_of_the_size_of_those_in_the_readable_form(family: str) -> None:
    plain, quick = forms(family)
    for batch in batches(FAMILIES[family]):
        with suppress(DataError, SpecError):
            exact = gradients(plain, batch, None)
            rounded, mine = (gradients(model, batch, torch.bfloat16) for model in (plain, quick))
            # All gradients together: a single bias depends on which side of 0 a rounded activation lies.
            expected, its, own = (torch.cat([each.flatten().cpu() for each in form]) for form in (exact, rounded, mine))
            error = (its - expected).norm()
            assert (own - expected).norm() <= 3 * error + 0.2 * expected.norm() + 1e-4


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", GENERATING)
@torch.no_grad()
def test_beams_that_share_a_cache_decode_as_the_readable_form(family: str, static: bool) -> None:
    spec, (plain, quick) = FAMILIES[family], forms(family)
    batch = tiny.collate(spec, tiny.examples(spec, 3), device="cuda")
    rng, steps = torch.Generator().manual_seed(5), []
    parents = [torch.arange(9) // 3 * 3 + torch.randint(0, 3, (9,), generator=rng) for _ in range(3)]
    tokens = [batch.target[:, :1].repeat_interleave(3, 0), *torch.randint(3, tiny.VOCAB, (2, 9, 1), generator=rng)]
    for model in (plain, quick):
        assert isinstance(model, LanguageModel)
        decoding, found = model.start(batch, 6, beams=3, static=static), []
        for ids, parent in zip(tokens, parents, strict=True):
            found.append(model.advance(ids.cuda(), decoding))
            decoding.reorder(parent.cuda())
        steps.append(torch.stack(found))
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-3, atol=1e-3)


def test_remove_restores_the_readable_form() -> None:
    plain, quick = forms("encoder_decoder")
    fast.remove(quick)
    assert [type(module) for module in quick.modules()] == [type(module) for module in plain.modules()]
    assert not any(isinstance(module, nn.Module) and "device_search" in vars(module) for module in quick.modules())
