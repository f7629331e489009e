"""Activation checkpointing: equal gradients with dropout, no second loss or count, less memory; what it refuses."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard import fast
from regard.errors import SpecError
from regard.models.base import Model, ModelSpec
from regard.models.build import build
from regard.nn.block import Block, BlockModule
from regard.nn.branches.compressed_attention import CompressedAttention
from regard.nn.branches.experts import Switch
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.linformer import Linformer
from regard.nn.branches.noisy_experts import NoisyTopKExperts
from regard.nn.branches.recurrent import Recurrence
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.bridge import Transparent
from regard.nn.mask import Context, Mask, View
from regard.nn.position.base import AtHeads
from regard.nn.position.bias import T5Bias
from regard.nn.position.shaw import Shaw
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import UniversalACT
from regard.nn.trace import Trace
from regard.testing import tiny
from regard.training.activation_checkpointing import checkpoint_blocks, checkpoints_blocks
from regard.training.executor import Update, capture_obstacle
from regard.training.optim import AdamW
from regard.training.spec import TrainSpec
from regard.tree import swap
from tests.unit.training.test_reporting import Recorder, model, spec_of, trainer_of

BLOCK = Block((SelfAttention(), FeedForward(24)))


def stacked(spec: Any, **changes: Any) -> ModelSpec:
    return swap(spec, Plain, lambda stack: replace(stack, **changes))


def with_branch(branch: Any) -> ModelSpec:
    return swap(tiny.decoder_only(), FeedForward, lambda _: branch)


SPECS: dict[str, ModelSpec] = {
    **{name: tiny.families()[name] for name in ("encoder_decoder", "prefix_lm", "sentence_classifier")},
    # The first block caches the bias of all blocks, with its gradient.
    "t5_bias": stacked(tiny.encoder_decoder(), depth=3, position=T5Bias(8, 16)),
    "two position schemes": stacked(
        tiny.decoder_only(),
        pattern=(BLOCK, Block((SelfAttention(heads=2, d_head=4), FeedForward(24)))),
        position=T5Bias(8, 16),
        positions=(AtHeads(2, Shaw(3)),),
    ),
    "own positions": swap(tiny.decoder_only(), SelfAttention, lambda part: replace(part, position=T5Bias(8, 16))),
    "shared blocks": stacked(tiny.decoder_only(), depth=4, unique=2),
    "universal_act": swap(tiny.decoder_only(), Plain, lambda _: UniversalACT(BLOCK, 1, 2, 1)),
    "transparent": replace(tiny.encoder_decoder(), bridge=Transparent()),
    "funnel": replace(tiny.encoder_decoder(), encoder=Funnel((BLOCK,), (1, 2), T5Bias(8, 16))),
    "switch": with_branch(Switch(4, 8)),
    "compressed_attention": swap(tiny.decoder_only(), SelfAttention, lambda _: CompressedAttention()),
    "linformer": swap(tiny.encoder_only(), SelfAttention, lambda _: Linformer(max_len=16, rank=4, sharing="layers")),
    "noisy_top_k_experts": with_branch(NoisyTopKExperts(4, 2, 8)),
    "recurrence": with_branch(Recurrence()),
}


def built(spec: ModelSpec, install: bool, checkpointed: bool) -> Model:
    dropouts = ("dropout", "attention_dropout", "activation_dropout")
    network = build(replace(spec, **dict.fromkeys(dropouts, 0.2)), seed=1).train()  # type: ignore[reportCallIssue]
    if install:
        fast.install(network)
    if checkpointed:
        checkpoint_blocks(network)
    return network


def losses_and_gradients(network: Model, spec: ModelSpec) -> dict[str, Tensor | None]:
    torch.manual_seed(3)
    loss = network.loss(tiny.collate(spec, tiny.examples(spec, 3)))
    (loss.total + loss.aux).backward()
    drawn = torch.rand(3)  # the random numbers of a following module
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return {"total": loss.total.detach(), "aux": loss.aux.detach(), "drawn": drawn, **gradients}


@pytest.mark.parametrize("install", [False, True], ids=["plain", "fast"])
@pytest.mark.parametrize("name", SPECS)
def test_losses_and_gradients_are_equal_to_the_last_bit(name: str, install: bool) -> None:
    usual, checkpointed = (
        losses_and_gradients(built(SPECS[name], install, flag), SPECS[name]) for flag in (False, True)
    )
    for key, value in usual.items():
        other = checkpointed[key]
        assert (value is None) == (other is None), key
        assert value is None or torch.equal(value, other), key  # type: ignore[reportArgumentType]


def test_a_block_is_computed_twice_and_records_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auxiliary losses, counts of routed tokens and attention weights are those of the first computation alone."""
    computed = []
    forward = BlockModule.forward
    monkeypatch.setattr(BlockModule, "forward", lambda self, *args: computed.append(self) or forward(self, *args))
    network: Any = built(with_branch(Switch(4, 8)), install=False, checkpointed=True)
    block, x, losses, trace = network.decoder.blocks[0], torch.randn(1, 6, 16), [], Trace()
    ctx = Context(View(Mask(causal=True), 6, 6, x.device), losses=losses, trace=trace)
    y = block(x.requires_grad_(), ctx)
    assert len(computed) == 1
    (y.sum() + losses[0]).backward(retain_graph=True)
    y.sum().backward()
    assert len(computed) == 3
    assert len(losses) == 1
    assert [len(layers) for layers in trace.weights.values()] == [1]
    counts = block.branches[1].branch.report()
    assert int(counts["routed_tokens"] + counts["dropped_tokens"]) == 6


class PeakMemory(TorchDispatchMode):
    """Count the bytes of all tensors that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, weakref.finalize] = {}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.note(each.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = weakref.finalize(storage, self.free, key, storage.nbytes())
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def free(self, key: int, size: int) -> None:
        del self.known[key]
        self.bytes -= size


@pytest.mark.parametrize("install", [False, True], ids=["plain", "fast"])
def test_peak_memory_of_a_step_is_lower(install: bool) -> None:
    """Eight blocks need less than a third of the memory of eight blocks that store their activations."""
    peaks = []
    for checkpointed in (False, True):
        spec = tiny.decoder_only(depth=8)
        network = built(spec, install, checkpointed)
        rows = [replace(tiny.examples(spec, 1)[0], target=(5,) * 64, labels=(5,) * 64, weights=(1.0,) * 64)] * 4
        batch = tiny.collate(spec, rows)
        with PeakMemory() as memory:
            network.loss(batch).total.backward()
        peaks.append(memory.peak)
    assert peaks[1] < peaks[0] / 3, peaks


def test_evaluation_and_decoding_are_unchanged() -> None:
    spec = tiny.decoder_only()
    network: Any = built(spec, install=True, checkpointed=True).eval()
    usual: Any = built(spec, install=True, checkpointed=False).eval()
    batch = tiny.collate(spec, tiny.examples(spec, 2))
    assert torch.equal(network.log_probs(batch), usual.log_probs(batch))
    with torch.no_grad():
        ids = batch.target[:, :3]
        assert torch.equal(*(each.advance(ids, each.start(batch, 5)) for each in (network, usual)))


@pytest.mark.parametrize("plain", [False, True])
def test_training_gives_the_same_weights(tmp_path: Path, plain: bool) -> None:
    weights, recorders = [], (Recorder(), Recorder())
    for flag, recorder in zip((False, True), recorders, strict=True):
        trainer = trainer_of(
            tmp_path / str(flag), spec_of(4, checkpoint_layers=flag), model("switch"), recorder, plain=plain
        )
        trainer.fit()
        assert checkpoints_blocks(trainer.model) == flag
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    usual, checkpointed = ([step["routed_tokens"] for step in recorder.steps] for recorder in recorders)
    assert usual == checkpointed


@pytest.mark.parametrize("name", ["recurrent", "convs2s", "bytenet"])
def test_a_model_without_blocks_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"^train\.checkpoint_layers: has no effect on this model"):
        checkpoint_blocks(build(tiny.families()[name]))


def test_a_compiled_step_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^compile: cannot be combined with checkpoint_layers"):
        TrainSpec(checkpoint_layers=True, compile=True)
    assert TrainSpec(checkpoint_layers=True, compile=False).checkpoint_layers


@pytest.mark.parametrize(
    ("checkpointed", "obstacle"), [(False, type(None)), (True, str)], ids=["usual", "checkpointed"]
)
def test_a_cuda_graph_is_not_captured(checkpointed: bool, obstacle: Callable[..., Any]) -> None:
    network = built(tiny.decoder_only(), install=False, checkpointed=checkpointed)
    optimizer = AdamW(learning_rate=0.01).build(network)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    update = Update(network, network.loss, optimizer, 1.0, torch.device("cpu"), None, scaler, None)
    why = capture_obstacle(update, one_shape=True)
    assert isinstance(why, obstacle)  # type: ignore[reportArgumentType]
    assert why is None or why.endswith("(train.checkpoint_layers)")
