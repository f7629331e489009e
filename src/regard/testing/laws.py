"""The laws of a Transformer. Each is a function that raises `LawBroken` if the tested model breaks the law.

The first paragraph of a function's docstring is the statement of its law. Most laws run models in float64. Noise is
added to every weight, because weights initialised to zero or one could hide a fault.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from regard import fast
from regard.batch import Batch
from regard.catalogue import PARTS
from regard.errors import DataError, KernelError, SpecError
from regard.fast import attention as kernels
from regard.models.base import Classifier, LanguageModel, Model, ModelSpec
from regard.models.build import build, count
from regard.models.encoder_only import EncoderOnly, Pooled
from regard.models.hidden_states import recorded_states
from regard.nn.trace import Trace
from regard.testing import tiny
from regard.testing.recorded import OrderedTrace, by_entry, stepwise, used_weights
from regard.tree import Spec, edit, leaves, read, to_record

TOLERANCE = 1e-9


class LawBroken(AssertionError):  # noqa: N818  # reads better than with a suffix
    """Raised if a model breaks a law; the message contains an example."""


class NotApplicable(Exception):  # noqa: N818  # not an error
    """Raised if a law does not apply to a model, or if the model refuses the input of the law."""


@dataclass(frozen=True)
class Subject:
    """A tiny model to test, built once and shared by all laws. A law that changes the model calls `own_model`."""

    spec: ModelSpec
    extra: Mapping[str, type] = field(default_factory=dict)  # spec classes that are not in the catalogue, by kind
    built: dict[torch.dtype, tuple[Model, tuple[Any, ...]]] = field(default_factory=dict)  # each with its `_condition`

    def model(self, dtype: torch.dtype = torch.float64) -> Model:
        """Return the shared model in evaluation mode, with noise added to every weight. A law must not change it."""
        model, before = self.built.get(dtype, (None, ()))
        if model is None or _condition(model) != before:
            model = self.own_model(dtype)
            self.built[dtype] = model, _condition(model)
        return model

    def own_model(self, dtype: torch.dtype = torch.float64) -> Model:
        """Return a new model with noise added to every weight. A law may change this model."""
        if isinstance(self.spec, EncoderOnly) and isinstance(self.spec.task, Pooled):
            raise NotApplicable("a pooled encoder has no outputs without a task")
        model = build(self.spec, seed=1).to(dtype)
        rng = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64).to(dtype))
        return model.eval()

    def generator(self) -> LanguageModel:
        """Return the shared model. Raise `NotApplicable` if this model does not generate text."""
        model = self.model()
        if not isinstance(model, LanguageModel):
            raise NotApplicable("this model does not generate text")
        return model

    def examples(self, number: int, seed: int = 0) -> list[tiny.Example]:
        """Return `number` random examples for the model."""
        return tiny.examples(self.spec, number, seed)

    def collate(self, rows: list[tiny.Example], **options: Any) -> Batch:
        """Return a batch of examples."""
        return tiny.collate(self.spec, rows, **options)


def _condition(model: Model) -> tuple[Any, ...]:
    """Return what a law could change in a model: training modes, hooks, gradients, and versions of tensors."""
    modules = [(module.training, len(module._forward_hooks), len(module._buffers)) for module in model.modules()]
    learned = [(id(p), p._version, p.grad is None, p.requires_grad) for p in model.parameters()]
    return (*modules, *learned, *((id(buffer), buffer._version) for buffer in model.buffers()))


def answers(model: Model, batch: Batch, trace: Trace | None = None) -> Tensor:
    """Return the outputs of a model: log-probabilities per token, or class scores."""
    with torch.no_grad():
        if isinstance(model, Classifier):
            return model.scores(batch, trace=trace)
        return model.log_probs(batch, trace=trace)  # type: ignore[reportCallIssue]


def close(a: Tensor, b: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise `LawBroken` if a and b differ by more than `tolerance`; `what` names them in the message."""
    if a.shape != b.shape:
        raise LawBroken(f"{what}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise LawBroken(f"{what}: NaN or infinity")
    gap = (a - b).abs().max().item() if a.numel() else 0.0
    if gap > tolerance:
        raise LawBroken(f"{what}: differs by {gap:.3g}")


def causality(subject: Subject) -> None:
    """Changing the target token at position t does not change the outputs before position t."""
    model = subject.generator()
    example = subject.examples(1)[0]
    before = answers(model, subject.collate([example]))
    first = example.prefix if tiny.prefixed_by(subject.spec) else 1
    for t in range(first, len(example.target)):
        changed = list(example.target)
        changed[t] = 3 + (changed[t] - 2) % (tiny.VOCAB - 3)
        after = answers(model, subject.collate([replace(example, target=tuple(changed))]))
        close(before[:, :t], after[:, :t], f"token {t} changed, outputs before it")
        if torch.equal(before[:, t:], after[:, t:]):
            raise LawBroken(f"token {t} changed, but no output from position {t} on")


def padding(subject: Subject) -> None:
    """Adding padding changes neither the outputs at real tokens nor the loss."""
    model, rows = subject.model(), subject.examples(3)
    tight, loose = subject.collate(rows), subject.collate(rows, extra=3)
    a, b = answers(model, tight), answers(model, loose)
    close(_real(a, tight), _real(b, loose), "outputs with three more columns of padding")
    close(loss(model, tight), loss(model, loose), "loss with three more columns of padding")


def _real(outputs: Tensor, batch: Batch) -> Tensor:
    """Return the outputs at tokens that are not padding; return all outputs of a model with one output per row."""
    if outputs.shape[:2] != batch.target.shape[:2]:
        return outputs
    assert batch.target_seg is not None
    return outputs[batch.target_seg != 0]


def loss(model: Model, batch: Batch) -> Tensor:
    """Return the tensor (summed loss, number of tokens, auxiliary loss), without gradients."""
    with torch.no_grad():
        total, tokens, aux, _ = model.loss(batch)
    return torch.stack((total, tokens.to(total), aux.to(total)))


def packing(subject: Subject) -> None:
    """Examples packed into one row have the same outputs as in separate rows."""
    model, rows = subject.model(), subject.examples(3)
    apart = subject.collate(rows)
    alone = answers(model, apart)
    try:
        together = subject.collate(rows, packed=True, extra=2)
        packed = answers(model, together)
    except (DataError, SpecError) as refusal:
        raise NotApplicable(f"refused: {refusal}") from None
    close(_real(alone, apart), _real(packed, together), "packed outputs")
    close(loss(model, apart), loss(model, together), "packed loss")


def steps(subject: Subject) -> None:
    """Decoding in steps of 2, 1 and 1 tokens gives the outputs of one pass over all 4, also with static shapes."""
    model, rows = subject.generator(), [replace(row, target=row.target[:4]) for row in subject.examples(2)]
    rows = [replace(row, labels=row.labels[:4], weights=row.weights[:4]) for row in rows]
    batch = subject.collate(rows)
    whole = answers(model, batch)
    prompt = batch.target[:, :2]
    for static in (False, True):
        name = "static steps" if static else "steps"
        with torch.no_grad():
            decoding = model.start(batch, 6, static=static)
            close(model.advance(prompt, decoding), whole[:, 1], f"{name}: the first two tokens at once")
            for t in (2, 3):
                close(model.advance(batch.target[:, t : t + 1], decoding), whole[:, t], f"{name}: token {t} alone")


def ragged(subject: Subject) -> None:
    """Decoding is correct for a batch of prompts with different lengths."""
    model, rows = subject.generator(), subject.examples(3)
    prefixed = tiny.prefixed_by(subject.spec)
    lengths = [2, 2, 2] if prefixed else [3, 1, 2]
    width = max(lengths)
    batch = subject.collate(rows)
    prompt, seg = batch.target[:, :width].clone(), torch.zeros(3, width, dtype=torch.int64)
    for i, length in enumerate(lengths):
        seg[i, :length] = 1
        prompt[i, length:] = 0
    whole = answers(model, batch)
    for static in (False, True):
        with torch.no_grad():
            decoding = model.start(batch, width + 2, static=static)
            log_probs = model.advance(prompt, decoding, seg)
            for more in range(2):
                for i, length in enumerate(lengths):
                    name = f"row {i} after {length + more} tokens{', static' if static else ''}"
                    close(log_probs[i], whole[i, length - 1 + more], name)
                following = torch.stack([batch.target[i, length + more] for i, length in enumerate(lengths)])
                log_probs = model.advance(following[:, None], decoding)


def beams(subject: Subject) -> None:
    """After beams are reordered, the score of every beam equals the score of its tokens in one parallel pass."""
    model, rows = subject.generator(), subject.examples(2)
    batch, width = subject.collate(rows), 3
    for static in (False, True):
        rng = torch.Generator().manual_seed(5)
        text = torch.stack([torch.tensor(row.target[:2]) for row in rows]).repeat_interleave(width, 0)
        scores = torch.zeros(2 * width, dtype=torch.float64)
        first = torch.tensor([0] * width + [width] * width)
        with torch.no_grad():
            decoding = model.start(batch, 6, beams=width, static=static)
            log_probs = model.advance(text, decoding)
            for _ in range(3):
                chosen = torch.randint(3, tiny.VOCAB, (2 * width,), generator=rng)
                parent = torch.randint(0, width, (2 * width,), generator=rng) + first
                scores = scores[parent] + log_probs[parent, chosen]
                text = torch.cat((text[parent], chosen[:, None]), 1)
                decoding.reorder(parent)
                log_probs = model.advance(chosen[:, None], decoding)
        for i in range(2 * width):
            ids = tuple(text[i].tolist())
            row = replace(rows[i // width], target=ids[:-1], labels=ids[1:], weights=(1.0,) * 4, prefix=2)
            whole = answers(model, subject.collate([row]))[0]
            score = whole[torch.arange(1, 4), text[i, 2:]].sum()
            close(scores[i], score, f"beam {i} of source {i // width}{', static' if static else ''}")


def batch_law(subject: Subject) -> None:
    """The output for a row does not depend on the other rows of the batch."""
    model, rows = subject.model(), subject.examples(4)
    together = answers(model, subject.collate(rows))
    for i, row in enumerate(rows):
        alone = answers(model, subject.collate([row]))[0]
        mine = together[i][: alone.shape[0]] if alone.dim() == 2 else together[i]
        close(mine, alone, f"row {i} in a batch and alone")


def positions(subject: Subject) -> None:
    """Outputs depend on the order of tokens (in a decoder, on positions) if and only if a part declares that they do.

    If no part of an encoder depends on order, permuting the tokens permutes the outputs, up to 1e-10. A decoder depends
    on order through its causal mask; if no part of a decoder depends on positions, the outputs do not change when
    positions are twice as far apart.
    """
    model, streams = subject.model(), tiny.streams(subject.spec)
    if not streams:
        raise NotApplicable("no part of this model could depend on the order of its input")
    for stream, parts in streams.items():
        causal = stream == "target" and isinstance(model, LanguageModel)
        must, may = tiny.order(parts, causal)
        try:
            what, gap = (_stretched if causal else _shuffled)(subject, model, stream)
        except (DataError, SpecError) as refusal:
            raise NotApplicable(f"refused: {refusal}") from None
        if must and gap < CHANGED:
            raise LawBroken(
                f"{what} changes nothing: the model contains {must!r} but ignores it (an attention branch must "
                "apply all of view.terms, or refuse the stack's position when it is built)"
            )
        if not must and not may and gap > SAME:
            raise LawBroken(
                f"{what} changes the outputs by {gap:.3g}, but no part declares that order matters (a branch, stack or "
                "model that depends on order must declare ordered = True)"
            )


DISTINCT = (5, 11, 17, 23, 8, 14, 20)
SHUFFLED = (0, 2, 4, 1, 5, 3, 6)  # the ends, which a classifier may read, stay in place
SAME, CHANGED = 1e-10, 1e-12  # without residuals, a token may change the output by as little as 1e-9


def _shuffled(subject: Subject, model: Model, stream: str) -> tuple[str, float]:
    """Shuffle the tokens. Return a description, and the largest difference from the shuffled old outputs."""
    rows = [_row(subject, stream, ids) for ids in (DISTINCT, tuple(DISTINCT[i] for i in SHUFFLED))]
    before, after = (answers(model, subject.collate([row])) for row in rows)
    if stream == "target" and before.dim() == 3:
        before = before[:, list(SHUFFLED)]
    return f"a {stream} in another order", _gap(before, after)


def _stretched(subject: Subject, model: Model, stream: str) -> tuple[str, float]:
    """Double the positions. Return a description, and the largest difference from the outputs before."""
    batch = subject.collate([_row(subject, stream, DISTINCT)])
    pos = 2 * torch.arange(len(DISTINCT))
    wide = replace(batch, target_pos=pos.expand_as(batch.target), longest=2 * len(DISTINCT))
    return f"a {stream} at positions 0, 2, 4, ...", _gap(answers(model, batch), answers(model, wide))


def _row(subject: Subject, stream: str, ids: tuple[int, ...]) -> tiny.Example:
    row = subject.examples(1)[0]
    if stream == "source":
        return replace(row, source=ids)
    return replace(row, target=ids, labels=(row.labels * 2)[: len(ids)], weights=(1.0,) * len(ids))


def _gap(a: Tensor, b: Tensor) -> float:
    close(a, b, "outputs", float("inf"))  # checks shapes, and that both are finite
    return (a - b).abs().max().item()


def inspection(subject: Subject) -> None:
    """Recording changes no bit of the outputs, and recorded weights equal the weights that attention uses.

    This holds in one pass, in decoding step by step, and with fused kernels. Weights sum to one or zero. All layers
    with attention or experts, and the hidden states of all layers, are recorded.
    """
    model, batch = subject.model(), subject.collate(subject.examples(3))
    trace, used = _recorded(model, batch)
    used = by_entry(used, len(trace.entries))
    if len(used) != len(trace.entries):
        raise LawBroken(f"{len(used)} uses of attention weights have {len(trace.entries)} entries in the trace")
    for (name, weights), real in zip(trace.entries, used, strict=True):
        close(weights, real, f"{name}: recorded weights and those of the reference kernel", RECORDED)
        sums = weights.sum(-1)
        wrong = (sums - 1).abs().minimum(sums.abs()).max().item()
        if wrong > RECORDED or bool((weights < 0).any()):
            raise LawBroken(f"{name}: weights are not a distribution (off by {wrong:.3g})")
    quick = subject.own_model()
    fast.install(quick)
    _recorded(quick, batch)
    alone = subject.collate(subject.examples(1))  # in a batch, the weights of padded queries may differ
    plain, fused = (_recorded(each, alone)[0] for each in (model, quick))
    for (name, weights), (_, real) in zip(fused.entries, plain.entries, strict=True):
        close(weights, real, f"{name}: recorded weights of the fast form", RECORDED)
    if isinstance(model, LanguageModel):
        _recorded_steps(model, alone, plain)


RECORDED = 1e-6


def _recorded(model: Model, batch: Batch) -> tuple[OrderedTrace, list[Tensor]]:
    """Check that recording changes no output and leaves nothing out. Return the trace and the weights used."""
    calls = {"name": 0, "route": 0}

    def counted(module: nn.Module, *_: Any) -> None:
        for kind in calls:
            calls[kind] += isinstance(getattr(module, kind, None), str)

    plain, trace = answers(model, batch), OrderedTrace()
    hooks = [module.register_forward_hook(counted) for module in model.modules()]
    try:
        with recorded_states(model) as states, used_weights() as used:
            traced = answers(model, batch, trace)
    finally:
        for hook in hooks:
            hook.remove()
    if not torch.equal(plain, traced):
        raise LawBroken("outputs differ when a trace is present")
    if len(trace.entries) != calls["name"]:
        raise LawBroken(f"{calls['name']} calls of named branches have {len(trace.entries)} entries in the trace")
    routes = [route for recorded in trace.routes.values() for route in recorded]
    if len(routes) != calls["route"]:
        raise LawBroken(f"{calls['route']} calls of layers with experts have {len(routes)} entries in the trace")
    for chosen, weights, total in routes:
        if not bool(((chosen >= 0) & (chosen < total)).all()) or bool(
            (weights < 0).any() | (weights.sum(-1) > 1 + RECORDED).any()
        ):
            raise LawBroken("the recorded experts or their weights are out of range")
    for side, layers in states.items():
        if not all(bool(torch.isfinite(layer.norm(dim=-1)).all()) for layer in layers):
            raise LawBroken(f"the norms of the hidden states of the {side} are not finite")
    if not states:
        raise LawBroken("no hidden states are recorded")
    return trace, used


def _recorded_steps(model: LanguageModel, batch: Batch, whole: OrderedTrace) -> None:
    """Check that weights recorded in decoding steps of 2, 1 and 1 tokens equal those of one pass, in the same rows."""
    numbers = {name: len(layers) for name, layers in whole.weights.items()}
    for name, layers in stepwise(model, batch, (2, 1, 1), numbers).items():
        for layer, steps in enumerate(layers):
            real = whole.weights[name][layer]
            first = real.shape[2] - batch.target.shape[1]  # a decoder-only translator reads the source before
            rows, S = real[:, :, first : first + 4], max(real.shape[3], steps.shape[3])
            a, b = (torch.nn.functional.pad(x, (0, S - x.shape[3])) for x in (steps, rows))
            close(a, b, f"{name}, layer {layer}: weights recorded in decoding", RECORDED)


def records(subject: Subject) -> None:
    """A model spec saved as JSON loads unchanged, and the error for a misspelt key suggests the right key."""
    parts = {**PARTS, **subject.extra}
    record = to_record(subject.spec)
    if read(record, ModelSpec, "", parts) != subject.spec:
        raise LawBroken("the model built from the record differs from the original")
    tried: set[tuple[str, str]] = set()
    for path, value in leaves(subject.spec):
        holder, _, name = path.rpartition(".")
        node: Any = record
        for step in holder.replace("[", ".[").split(".") if holder else ():
            node = node[int(step[1:-1])] if step.startswith("[") else node[step]
        if name == "kind" or "[" in name or isinstance(value, tuple) or (node["kind"], name) in tried:
            continue
        tried.add((node["kind"], name))
        node[name + "x"] = node.pop(name)
        try:
            read(node, Spec, holder, parts)
        except SpecError as error:
            if error.path != f"{path}x" or name not in str(error):
                raise LawBroken(f"misspelt {path}: the error does not suggest it: {error}") from None
        else:
            raise LawBroken(f"misspelt {path} was accepted")
        node[name] = node.pop(name + "x")


def parameters(subject: Subject) -> None:
    """Every parameter receives a gradient, and the parameter count on the meta device is exact."""
    model = subject.own_model().train()
    total, _, aux, _ = model.loss(subject.collate(subject.examples(3)))
    (total + aux).backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not bool(torch.isfinite(p.grad).all())]
    if dead:
        raise LawBroken(f"no gradient reaches {', '.join(dead)}")
    built = sum(p.numel() for p in model.parameters())
    if built != count(subject.spec):
        raise LawBroken(f"{built} parameters built, {count(subject.spec)} counted")


def storage(subject: Subject) -> None:
    """No tensor is stored twice, and a model that is saved and loaded has bit-equal outputs."""
    model = subject.model()
    tensors = model.state_dict()
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        other = names.setdefault(tensor.data_ptr(), name)
        if other != name and tensor.numel():
            raise LawBroken(f"{name} and {other} share memory")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file(tensors, path)
        loaded = build(subject.spec, init=False).double()
        loaded.load_state_dict(load_file(path))
    batch = subject.collate(subject.examples(2))
    if not torch.equal(answers(model, batch), answers(loaded.eval(), batch)):
        raise LawBroken("the outputs of a saved and loaded model differ")


def kernels_law(subject: Subject) -> None:
    """Every attention kernel (sdpa, chunked, flex) equals the reference kernel up to rounding, or refuses the input."""
    model, rows = subject.own_model(torch.float32), subject.examples(2)
    fast.install(model)
    for packed in (False, True):
        try:
            batch = subject.collate(rows, packed=packed)
        except DataError:
            continue
        outputs: dict[str, Tensor] = {}
        # Building a block mask for flex is slow on a CPU, and a packed mask tests everything that a padded mask tests.
        for name in ("reference", "sdpa", "chunked", "flex") if packed else ("reference", "sdpa", "chunked"):
            try:
                with kernels.use(name):
                    outputs[name] = answers(model, batch)
            except (KernelError, DataError, SpecError):
                continue
        for name, output in outputs.items():
            reference = _real(outputs["reference"], batch)
            tolerance = 2e-5 * max(1.0, reference.abs().max().item())
            what = f"{name} against reference{' (packed)' if packed else ''}"
            close(_real(output, batch), reference, what, tolerance)


def fast_law(subject: Subject) -> None:
    """With the fused kernels of `regard.fast`, a model has the same outputs, gradients and beam search steps."""
    plain, quick, rows = subject.own_model(), subject.own_model(), subject.examples(2)
    fast.install(quick)
    for packed in (False, True):
        try:
            batch = subject.collate(rows, packed=packed)
            expected = answers(plain, batch)
        except DataError:
            continue
        note = " (packed)" if packed else ""
        close(_real(answers(quick, batch), batch), _real(expected, batch), f"fast output{note}")
        for model in (plain, quick):
            model.zero_grad()
            total, _, auxiliary, _ = model.loss(batch)
            (total + auxiliary).backward()
        for (name, mine), its in zip(plain.named_parameters(), quick.parameters(), strict=True):
            if mine.grad is not None and its.grad is not None:
                close(its.grad, mine.grad, f"fast gradient of {name}{note}", 1e-8)
            elif (mine.grad is None) != (its.grad is None):
                raise LawBroken(f"fast gradient of {name}{note}: exists in one form only")
    if isinstance(plain, LanguageModel) and isinstance(quick, LanguageModel):
        batch = subject.collate(rows)
        for static in (False, True):
            decoded = [_beam_steps(model, batch, static) for model in (plain, quick)]
            for step, (mine, its) in enumerate(zip(*decoded, strict=True)):
                close(its, mine, f"fast decoding, step {step}{', static' if static else ''}")
    fast.remove(quick)
    if [type(module) for module in quick.modules()] != [type(module) for module in plain.modules()]:
        raise LawBroken("fast.remove leaves modules of the fast form behind")


def _beam_steps(model: LanguageModel, batch: Batch, static: bool) -> list[Tensor]:
    """Return the log-probabilities of three decoding steps; after each, the three beams are reordered at random."""
    rng, width, steps = torch.Generator().manual_seed(5), 3, []
    rows = batch.target.shape[0] * width
    ids = batch.target[:, :2].repeat_interleave(width, 0)
    with torch.no_grad():
        decoding = model.start(batch, 6, beams=width, static=static)
        for _ in range(3):
            steps.append(model.advance(ids, decoding))
            parent = torch.arange(rows) // width * width + torch.randint(0, width, (rows,), generator=rng)
            decoding.reorder(parent)
            ids = torch.randint(3, tiny.VOCAB, (rows, 1), generator=rng)
    return steps


def compile_law(subject: Subject) -> None:
    """`torch.compile` captures the loss as one graph, and the compiled loss and gradients are equal up to rounding."""
    model = subject.own_model(torch.float32)
    fast.install(model)  # as in training
    batch = subject.collate(subject.examples(2))
    torch.compiler.reset()
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    try:
        traced = compiled(batch)
    except Exception as error:
        raise LawBroken(f"does not trace as one graph: {str(error).splitlines()[0]}") from error
    eager = model.loss(batch)
    close(traced.total.detach(), eager.total.detach(), "compiled loss", 1e-4)
    learned = [p for p in model.parameters() if p.requires_grad]
    a = torch.autograd.grad(traced.total, learned, allow_unused=True)
    b = torch.autograd.grad(eager.total, learned, allow_unused=True)
    for mine, plain in zip(a, b, strict=True):
        if (mine is None) != (plain is None):
            raise LawBroken("a parameter has a gradient in one of the two forms only")
        if mine is not None and plain is not None:
            close(mine, plain, "compiled gradient", 1e-3)


def build_law(subject: Subject) -> None:
    """A model with other depths, widths or numbers of heads builds, or raises an error with the path of a field."""
    spec = subject.spec
    for path, values in _sizes(spec).items():
        for value in values:
            try:
                model = build(edit(spec, {path: value}), device="meta")
                sum(p.numel() for p in model.parameters())
            except SpecError as refusal:
                if not refusal.path:
                    raise LawBroken(f"{path}={value} is refused without a path: {refusal}") from None
            except Exception as error:
                raise LawBroken(f"{path}={value} fails with {type(error).__name__}: {error}") from error


def _sizes(spec: ModelSpec) -> dict[str, tuple[Any, ...]]:
    sizes: dict[str, tuple[Any, ...]] = {"d_model": (12, 20), "heads": (2, 3), "d_head": (3,)}
    for side in ("encoder", "decoder"):
        stack = getattr(spec, side, None)
        if is_dataclass(stack) and any(f.name == "depth" for f in fields(stack)):
            sizes[f"{side}.depth"] = (1, 3)
    return sizes


@dataclass(frozen=True)
class Law:
    """A law: its name, and the function that tests it on the model of a `Subject`."""

    name: str
    hold: Callable[[Subject], None]

    @property
    def statement(self) -> str:
        """The statement of the law, which is the first paragraph of the docstring of `hold`."""
        return (self.hold.__doc__ or "").strip().partition("\n\n")[0]


_LAWS = (
    causality, padding, packing, steps, ragged, beams, batch_law, positions, inspection, records, parameters, storage,
    kernels_law, fast_law, compile_law, build_law,
)  # fmt: skip
LAWS = {law.name: law for law in (Law(test.__name__.removesuffix("_law"), test) for test in _LAWS)}
