"""Beam search on a GPU: a captured step of model and search finds what the search on the host finds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from regard import fast
from regard.batch import Batch, pad
from regard.decoding.beam import Beam, search
from regard.decoding.hypothesis import Hypothesis, Limits, SpecialTokens
from regard.decoding.job import Job, prepare
from regard.decoding.search import FREE
from regard.fast import beam_search as device
from regard.inference.native import Native
from regard.models.base import Generator
from regard.models.build import build
from regard.presets import preset
from regard.variants import apply

pytestmark = pytest.mark.gpu
ENDS = SpecialTokens(1, 2, 0)
SMALL: dict[str, Any] = {"vocab": 300, "d_model": 64, "heads": 4, "encoder.depth": 2, "decoder.depth": 2}


@pytest.fixture(autouse=True)
def exact() -> None:
    torch.set_default_dtype(torch.float32)
    device.release()


def model(*variants: str, seed: int = 1) -> Generator:
    spec: Any = preset("transformer_small", **SMALL, dropout=0.0)
    for name in variants:
        spec = apply(name, spec)
    made = build(spec, "cuda", seed=seed).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.7)  # so that it says different things
    assert isinstance(made, Generator)
    fast.install(made)
    return made


def rows(count: int, longest: int = 30, seed: int = 0, shortest: int = 2) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest, (count,), generator=rng).tolist()
    return [torch.randint(3, 300, (n,), generator=rng).tolist() for n in lengths]


def job(models: Any, sources: Sequence[Sequence[int]], limits: Limits = Limits()) -> Job:
    ids, seg = pad(sources)
    return prepare(models, Batch(ids, source=ids, source_seg=seg).to("cuda"), ENDS, limits, FREE, None)


def same(found: Sequence[list[Hypothesis]], expected: Sequence[list[Hypothesis]]) -> None:
    """One source in fifty may differ, by less than rounding in batches of other shapes makes."""
    differ = 0
    for mine, its in zip(found, expected, strict=True):
        differ += [one.ids for one in mine] != [one.ids for one in its]
        assert [one.score for one in mine] == pytest.approx([one.score for one in its], abs=1e-4)
    assert differ <= 1 + len(found) // 50


@pytest.mark.parametrize("size", [1, 64])
def test_a_captured_search_equals_that_of_the_host(size: int) -> None:
    made, spec = model(), Beam(5, 2)
    for seed in range(4):  # the decoder is kept; its encoder is captured in the third search and replayed in the fourth
        asked = job(made, rows(size, seed=seed, shortest=20))  # of one width, so that there is one decoder
        assert spec._stays_on_the_device(asked)
        (found,) = device.find_each([asked], spec)
        assert sum(one is None for one in found) <= 1 + size // 20
        same(spec.find(asked), search(asked, spec))
    (decoders,) = device._decoders.values()
    for decoder in decoders.values():
        assert decoder.encoder.graph is not None
        assert any(step.graph is not None for step in decoder.windows.values())
        assert all(step.stream is not None for step in decoder.windows.values())


def test_waiting_sources_replace_finished_ones() -> None:
    made, spec, sources = model(), Beam(4), rows(150, seed=5)
    engine = Native([made], ENDS, torch.device("cuda"))
    found = engine.find(sources, spec, 16, Limits(), FREE, range(len(sources)))
    same(found, search(job(made, sources), spec))


def test_greedy_search_is_captured_too() -> None:
    asked, spec = job(model(), rows(30)), Beam(1)
    same(spec.find(asked), spec.greedy().find(asked))


def test_an_ensemble_is_captured_too() -> None:
    asked, spec = job([model(seed=1), model(seed=2)], rows(20)), Beam(3)
    same(spec.find(asked), search(asked, spec))


@pytest.mark.parametrize(
    "name",
    ["rotary", "t5_bias", "light_conv", "dynamic_conv", "synth_dense", "universal", "switch", "transparent", "funnel"],
)
def test_modified_models_are_captured_or_stepped(name: str) -> None:
    asked, spec = job(model(name), rows(12), Limits(max_len=40)), Beam(3)
    same(spec.find(asked), search(asked, spec))


def test_half_precision_searches_every_source() -> None:
    """Its rounding depends on shapes, so that texts may differ; that all of them are found is what can be asked."""
    made = model().to(torch.bfloat16)
    found = Beam(5).find(job(made, rows(64)))
    assert all(len(best) == 1 for best in found)


def test_memory_is_released() -> None:
    made = model()
    Beam(5).find(job(made, rows(64)))
    before = torch.cuda.memory_allocated()
    device.release()
    assert torch.cuda.memory_allocated() < before
