"""Long sequences on a GPU: sparse kernels equal the reference, and ring caches and training steps are captured."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import fast
from regard.batch import Batch, pad
from regard.bench.live_memory import peak_bytes
from regard.decoding.beam import Beam, search
from regard.decoding.hypothesis import Limits, SpecialTokens
from regard.decoding.job import Job, prepare
from regard.decoding.sample import Sample
from regard.decoding.search import FREE, find
from regard.fast import attention as kernels
from regard.fast import beam_search as device_search
from regard.fast.gated_delta import chunked_gated_delta_rule
from regard.models.base import Generator, LanguageModel, Model, ModelSpec
from regard.models.build import build
from regard.models.decoder_only import DecoderOnly
from regard.nn.big_bird import CausalBigBird
from regard.nn.block import Block
from regard.nn.branches.base import BranchSpec
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.gated_delta import GatedDelta, gated_delta_rule
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.mask import Mask, View
from regard.nn.pattern import AttentionPattern, Blocks, Sinks, Window
from regard.nn.position.rotary import Rotary
from regard.nn.residual import PreNorm
from regard.nn.stacks.plain import Plain
from regard.presets import preset
from regard.training.activation_checkpointing import checkpoint_blocks
from regard.training.executor import Eager, StepExecutor, StepScalars, Update, choose_executor
from regard.training.optim import AdamW
from regard.tree import replace_at
from tests.unit.fast.sparse_masks import T, masks

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
ENDS = SpecialTokens(1, 2, 0)
MASKS = dict(masks())
# FlexAttention is compiled for each mask, for seconds: so only for one mask of each kind.
COMPILED = (
    "window, packed, causal",
    "dilated window, plain",
    "blocks and neighbours, packed, causal",
    "sinks, padded, causal",
    "window and global tokens, plain",
    "big bird, padded",
    "causal big bird, plain, causal",
    "prefix kept, prefix, causal",
)


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)
    device_search.release()


def on_gpu(mask: Mask) -> Mask:
    tensors = {name: getattr(mask, name) for name in ("q_pos", "k_pos", "q_seg", "k_seg", "prefix")}
    return replace(mask, **{name: x.to(DEVICE) for name, x in tensors.items() if x is not None})


def output_and_gradients(kernel: str, mask: Mask, dtype: torch.dtype) -> list[Tensor] | None:
    """Return the output and the gradients of q, k and v in float64, or None if the kernel refuses the mask."""
    rng = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 4, T, 16, generator=rng) for _ in range(4)]
    # Rounded to bfloat16 first, so that all precisions compute with the same numbers.
    q, k, v, weights = (x.to(DEVICE, torch.bfloat16).to(dtype) for x in drawn)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    view = View(mask, T, T, DEVICE)
    if kernels.refusal(kernel, kernels.Call(q, k, v, view, 0.25, 0.0)) is not None:
        return None
    with kernels.use(kernel):
        y = kernels.attend(q, k, v, view, scale=0.25)
    if mask.q_seg is not None:
        weights = weights * (mask.q_seg != 0)[:, None, :, None]  # nothing reads the output of padding
    found = [y * (weights != 0), *torch.autograd.grad((y * weights).sum(), leaves)]
    return [x.detach().double() for x in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_sparse_kernels_equal_the_reference(name: str, dtype: torch.dtype) -> None:
    """In float32 to a millionth, and gradients, which are sums over many keys, to ten of them; in bfloat16 to 2 %."""
    mask = on_gpu(MASKS[name])
    expected = output_and_gradients("reference", mask, torch.float64)
    assert expected is not None
    tolerances = (1e-6, 1e-5, 1e-5, 1e-5) if dtype == torch.float32 else (0.02,) * 4
    compiled = name in COMPILED and (dtype == torch.bfloat16 or "sinks" in name)
    for kernel in ("sdpa", "varlen", "chunked", *(["flex"] if compiled else [])):
        actual = output_and_gradients(kernel, mask, dtype)
        assert actual is not None or kernel == "varlen"
        for ours, theirs, tolerance in zip(actual or [], expected, tolerances, strict=False):
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max(), kernel


def language_model(
    layer: BranchSpec,
    pattern: AttentionPattern | None = None,
    depth: int = 2,
    rotary: bool = True,
    dropout: float = 0.0,
) -> ModelSpec:
    position = Rotary() if rotary else None
    stack = Plain((Block((layer, FeedForward(64)), PreNorm()),), depth, position=position, attention_pattern=pattern)
    spec = DecoderOnly(vocab=50, d_model=64, heads=4, dropout=dropout, decoder=stack)
    return replace_at(spec, "input.position", None) if rotary else spec


def decisive(model: Model) -> LanguageModel:
    """Return the fast form of a model, with larger weights, so that outputs differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    fast.install(model.eval())
    assert isinstance(model, LanguageModel)
    return model


RINGS: Mapping[str, AttentionPattern] = {"window": Window(8), "sinks": Sinks(6, 2), "blocks": Blocks(5, 1)}


@pytest.mark.parametrize("pattern", RINGS)
@torch.no_grad()
def test_generation_with_a_ring_cache_continues_as_the_mask_does(pattern: str) -> None:
    """Every token is the likeliest under the whole sequence and the mask; in captured search and in sampling."""
    model = decisive(build(language_model(SelfAttention(), RINGS[pattern]), DEVICE, seed=1))
    prompts = [[5, 9, 11, 4], [7, 3, 8, 8, 10, 12, 9, 30, 31, 32, 33, 34], [6]]
    limits = Limits(max_len=40, min_len=40)
    for spec in (Beam(1), Sample(top_k=1), Beam(1, prefill_chunk=5)):
        ids, seg = pad(prompts)
        batch = Batch(ids, target_seg=seg).to(DEVICE)
        for prompt, (hypothesis, *_) in zip(prompts, find([model], batch, spec, ENDS, limits), strict=True):
            written = [*prompt, *hypothesis.ids]
            logits = model.logits(Batch(torch.tensor([written], device=DEVICE)))[0, len(prompt) - 1 : -1].float()
            logits[:, list({ENDS.bos, ENDS.eos, ENDS.pad})] = -torch.inf
            chosen = logits.gather(1, torch.tensor(hypothesis.ids, device=DEVICE)[:, None])[:, 0]
            assert len(hypothesis.ids) == 40
            assert (logits.amax(1) - chosen).max() < 1e-3  # equal up to rounding


@pytest.mark.parametrize("pattern", RINGS)
def test_captured_beam_search_with_a_ring_cache_equals_the_search_on_the_host(pattern: str) -> None:
    spec: Any = preset("transformer_small", vocab=300, d_model=64, heads=4, dropout=0.0)
    spec = replace_at(replace_at(spec, "encoder.depth", 2), "decoder.depth", 2)
    spec = replace_at(spec, "decoder.attention_pattern", RINGS[pattern])
    translator = decisive_translator(spec)
    rng = torch.Generator().manual_seed(0)
    sources = [torch.randint(3, 300, (12,), generator=rng).tolist() for _ in range(20)]
    differ = 0
    for beams in (Beam(1), Beam(4)):
        job = job_of(translator, sources)
        assert beams._stays_on_the_device(job)
        for _ in range(2):  # the step is captured after the first search
            beams.find(job_of(translator, sources))
        outputs = beams.find(job)
        expected = beams.greedy().find(job) if beams.beam_size == 1 else search(job, beams)
        for ours, theirs in zip(outputs, expected, strict=True):
            differ += [each.ids for each in ours] != [each.ids for each in theirs]
            assert [each.score for each in ours] == pytest.approx([each.score for each in theirs], abs=1e-3)
    assert differ <= 2  # rounding depends on the shape of the batch
    steps = [
        step
        for decoders in device_search._decoders.values()
        for decoder in decoders.values()
        for step in decoder.windows.values()
    ]
    assert steps
    assert all(step.stream is not None for step in steps)  # None: it could not be captured


def decisive_translator(spec: Any) -> Generator:
    model = build(spec, DEVICE, seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    fast.install(model)
    assert isinstance(model, Generator)
    return model


def job_of(model: Generator, sources: list[list[int]]) -> Job:
    ids, seg = pad(sources)
    batch = Batch(ids, source=ids, source_seg=seg).to(DEVICE)
    return prepare([model], batch, ENDS, Limits(max_len=40, min_len=30), FREE, None)


@pytest.mark.parametrize("length", [64, 300])
def test_chunked_delta_rule_equals_the_rule_token_by_token(length: int) -> None:
    """In float32, as autocast computes it, against float64; some tokens clear the state."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 16, generator=rng, dtype=torch.float64).to(DEVICE) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    log_decay, strength = (torch.rand(2, 3, length, generator=rng, dtype=torch.float64).to(DEVICE) for _ in range(2))
    log_decay = (-0.2 * log_decay).masked_fill(torch.arange(length, device=DEVICE) == 40, -torch.inf)
    state = torch.randn(2, 3, 16, 16, generator=rng, dtype=torch.float64).to(DEVICE)
    results = []
    for rule, dtype in ((chunked_gated_delta_rule, torch.float32), (gated_delta_rule, torch.float64)):
        inputs: Any = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, log_decay, strength, state)]
        y, last = rule(*inputs)
        loss = (y * torch.linspace(-1, 1, length, device=DEVICE, dtype=dtype)[:, None]).sum() + last.sum()
        results.append([y, last, *torch.autograd.grad(loss, inputs)])
    for ours, theirs in zip(*results, strict=True):
        finite = theirs.isfinite()
        assert (ours.double() - theirs)[finite].abs().max() < 1e-4 * theirs[finite].abs().max()


def loss_and_gradients(model: Model, batch: Batch, dtype: torch.dtype | None) -> Tensor:
    with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model.loss(batch)
    total = loss.total / loss.tokens
    grads = torch.autograd.grad(total, list(model.parameters()))
    return torch.cat([total.detach().reshape(1).double(), *(grad.flatten().double() for grad in grads)])


@pytest.mark.parametrize("layer", [GatedDelta(), CompressedAttention(), SelfAttention(attention_pattern=Window(512))])
def test_layers_for_long_sequences_train_in_bfloat16_as_in_float64(layer: BranchSpec) -> None:
    """The fast form is not further from float64 than the plain form, up to a factor."""
    spec = language_model(layer, rotary=False)
    ids = torch.randint(3, 50, (2, 1501), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    batch = Batch(ids[:, :-1], ids[:, 1:])
    plain = build(spec, DEVICE, seed=1).train()
    exact = copy.deepcopy(plain).double()
    quick = copy.deepcopy(plain)
    fast.install(quick)
    torch.set_default_dtype(torch.float64)
    expected = loss_and_gradients(exact, batch, None)
    torch.set_default_dtype(torch.float32)
    ours, theirs = (loss_and_gradients(model, batch, torch.bfloat16) for model in (quick, plain))
    assert abs(ours[0] - expected[0]) < 0.01
    assert (ours - expected).norm() <= 2 * (theirs - expected).norm() + 0.02 * expected.norm()


def update_of(model: Model) -> Update:
    optimizer = AdamW(1e-3).build(model)
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    return Update(model, model.loss, optimizer, 1.0, DEVICE, torch.bfloat16, scaler, None)


def losses(executor: StepExecutor, length: int, steps: int = 8) -> list[float]:
    found = []
    for seed in range(steps):
        ids = torch.randint(3, 50, (1, length + 1), generator=torch.Generator().manual_seed(seed % 2))
        batch = Batch(ids[:, :-1], ids[:, 1:])
        scalars = StepScalars(float(length), 0.0, [1.0])
        found.append(float(executor.run([batch], scalars, seed).loss) / length)
    return found


@pytest.mark.parametrize("pattern", [Window(512), Blocks(256), CausalBigBird(64)])
def test_a_training_step_of_8192_tokens_is_captured(pattern: AttentionPattern) -> None:
    """As one CUDA graph, with the losses of eager steps; the first steps are eager."""
    events: list[dict[str, Any]] = []
    found = []
    for captured in (True, False):
        model = build(language_model(SelfAttention(attention_pattern=pattern), dropout=0.1), DEVICE, seed=1).train()
        fast.install(model)
        update = update_of(model)
        executor = Eager(update)
        if captured:
            executor = choose_executor(
                update, True, False, lambda _: 0.0, lambda event, **values: events.append({"event": event} | values)
            )
        found.append(losses(executor, 8192))
    assert [event["executor"] for event in events] == ["graph"], events
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0][-1] < found[0][0]


def test_activation_checkpointing_has_the_gradients_of_stored_activations_and_needs_less_memory() -> None:
    ids = torch.randint(3, 50, (1, 8193), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    batch, peaks = Batch(ids[:, :-1], ids[:, 1:]), []
    results: list[Tensor] = []
    spec = language_model(SelfAttention(attention_pattern=Window(512)), depth=4, dropout=0.2)
    for checkpointed in (False, True):
        model = build(spec, DEVICE, seed=1).train()
        fast.install(model)
        if checkpointed:
            checkpoint_blocks(model)

        def step(model: Model = model) -> None:
            torch.manual_seed(3)
            results.append(loss_and_gradients(model, batch, torch.bfloat16))

        step()
        peaks.append(peak_bytes(step, DEVICE))
    _, stored, _, computed_again = results
    assert (stored - computed_again).norm() < 1e-2 * stored.norm()  # sums of gradients have no fixed order
    assert peaks[1] < 0.6 * peaks[0]
