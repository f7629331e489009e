"""Beam search on a GPU, captured as CUDA graphs, returns the same outputs as beam search on the host."""

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
def float32() -> None:
    torch.set_default_dtype(torch.float32)
    device.release()


def model(*variants: str, seed: int = 1) -> Generator:
    spec: Any = preset("transformer_small", **SMALL, dropout=0.0)
    for name in variants:
        spec = apply(name, spec)
    built = build(spec, "cuda", seed=seed).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(1.7)  # so that outputs differ
    assert isinstance(built, Generator)
    fast.install(built)
    return built


def rows(count: int, longest: int = 30, seed: int = 0, shortest: int = 2) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest, (count,), generator=rng).tolist()
    return [torch.randint(3, 300, (n,), generator=rng).tolist() for n in lengths]


def job(models: Any, sources: Sequence[Sequence[int]], limits: Limits = Limits()) -> Job:
    ids, seg = pad(sources)
    return prepare(models, Batch(ids, source=ids, source_seg=seg).to("cuda"), ENDS, limits, FREE, None)


def assert_same(outputs: Sequence[list[Hypothesis]], expected: Sequence[list[Hypothesis]]) -> None:
    """Up to one source in fifty may have other outputs, because rounding depends on the shape of the batch."""
    differ = 0
    for ours, theirs in zip(outputs, expected, strict=True):
        differ += [our.ids for our in ours] != [their.ids for their in theirs]
        assert [our.score for our in ours] == pytest.approx([their.score for their in theirs], abs=1e-4)
    assert differ <= 1 + len(outputs) // 50


@pytest.mark.parametrize("size", [1, 64])
def test_a_captured_search_equals_the_search_on_the_host(size: int) -> None:
    translator, spec = model(), Beam(5, 2)
    for seed in range(4):  # the decoder is cached; its encoder is captured in the third search and then replayed
        batch_job = job(translator, rows(size, seed=seed, shortest=20))  # of equal width, so that there is one decoder
        assert spec._stays_on_the_device(batch_job)
        (outputs,) = device.find_each([batch_job], spec)
        assert sum(ranked is None for ranked in outputs) <= 1 + size // 20
        assert_same(spec.find(batch_job), search(batch_job, spec))
    (decoders,) = device._decoders.values()
    for decoder in decoders.values():
        assert decoder.encoder.graph is not None
        assert any(step.graph is not None for step in decoder.windows.values())
        assert all(step.stream is not None for step in decoder.windows.values())


def test_new_sources_replace_finished_sources() -> None:
    translator, spec, sources = model(), Beam(4), rows(150, seed=5)
    engine = Native([translator], ENDS, torch.device("cuda"))
    outputs = engine.find(sources, spec, 16, Limits(), FREE, range(len(sources)))
    assert_same(outputs, search(job(translator, sources), spec))


def test_greedy_search_is_captured_too() -> None:
    batch_job, spec = job(model(), rows(30)), Beam(1)
    assert_same(spec.find(batch_job), spec.greedy().find(batch_job))


def test_an_ensemble_is_captured_too() -> None:
    batch_job, spec = job([model(seed=1), model(seed=2)], rows(20)), Beam(3)
    assert_same(spec.find(batch_job), search(batch_job, spec))


@pytest.mark.parametrize(
    "name",
    ["rotary", "t5_bias", "light_conv", "dynamic_conv", "synth_dense", "universal", "switch", "transparent", "funnel"],
)
def test_variants_are_captured_or_run_step_by_step(name: str) -> None:
    batch_job, spec = job(model(name), rows(12), Limits(max_len=40)), Beam(3)
    assert_same(spec.find(batch_job), search(batch_job, spec))


def test_half_precision_finds_an_output_for_every_source() -> None:
    """Outputs may differ, because rounding depends on shapes, but every source has an output."""
    translator = model().to(torch.bfloat16)
    outputs = Beam(5).find(job(translator, rows(64)))
    assert all(len(ranked) == 1 for ranked in outputs)


def test_memory_is_released() -> None:
    translator = model()
    Beam(5).find(job(translator, rows(64)))
    before = torch.cuda.memory_allocated()
    device.release()
    assert torch.cuda.memory_allocated() < before
