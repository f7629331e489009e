"""What all families share: Model, Generator, Classifier, Loss, Decoding, tables and sites; build and count."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.batch import Batch, check_padding, readable
from regard.errors import DataError, SpecError
from regard.nn.beams import BeamAncestry
from regard.nn.core import MOST_CHANNELS, MOST_HEADS, Memory, Site, Trace, View, check_count
from regard.nn.init import Init, Uninitialized
from regard.nn.input import Input, InputSpec
from regard.nn.kernels import additive, visible
from regard.nn.linear import Linear
from regard.nn.mask import Mask
from regard.nn.state import Droppable, Refillable, Rows
from regard.nn.vocab.base import Head, HeadSpec
from regard.nn.vocab.tables import Table, TableSpec
from regard.tree import Spec


class Loss(NamedTuple):
    """Summed over the labels of a batch; divide by `tokens` summed over all of a step, never per batch."""

    total: Float[Tensor, ""]  # what is minimised, with smoothing, without aux
    tokens: Float[Tensor, ""]  # how many labels, by weight
    aux: Float[Tensor, ""]  # auxiliary terms of the parts
    nll: Float[Tensor, ""]  # the plain negative log-likelihood


class ModelSpec(Spec):
    """Slot: describes a whole model."""

    __slots__ = ()
    reads_source: ClassVar[bool] = False  # whether it says a target after reading a source
    packs: ClassVar[bool] = True  # whether several texts may stand in one row
    ordered: ClassVar[bool] = False  # whether it depends on the order of its source whatever its parts are
    if TYPE_CHECKING:
        init: Init  # every family has this field: how its weights are drawn

    @abstractmethod
    def build(self, init: Init) -> "Model":
        """The model, its weights drawn by `init`."""


class Model(nn.Module):
    """Abstract: something with a loss."""

    spec: ModelSpec

    @abstractmethod
    def loss(self, batch: Batch) -> Loss:
        """The summed loss of a batch."""


@dataclass(slots=True)
class Decoding:
    """The state of one decoding: how far rows are, what every call remembers, what the decoder sees of the source."""

    rows: Rows
    states: list[Any]
    beams: int = 1
    memory: Memory | None = None
    cross: View | None = None
    prefix: Int[Tensor, " B"] | None = None  # prefix LM: how much of each row everybody sees
    trace: Trace | None = None

    def reorder(self, parent: Int[Tensor, " B"]) -> None:
        """Row i continues row parent[i], a beam of the same source."""
        rows = self.rows.lengths.shape[0]
        if parent.shape != (rows,):
            raise DataError(f"parent: needs one for each of {rows} rows, not {tuple(parent.shape)}")
        if readable(parent) and not torch.equal(parent // self.beams, torch.arange(rows) // self.beams):
            raise DataError("parent: a beam can only continue a beam of its own source")
        self.rows.reorder(parent)
        if self.prefix is not None:
            self.prefix.copy_(self.prefix.index_select(0, parent))
        for state in flat(self.states):
            state.reorder(parent)

    def droppable(self) -> bool:
        """Whether `keep` is possible: every state can forget rows, and shapes may change."""
        return not self.rows.static and all(isinstance(state, Droppable) for state in flat(self.states))

    def keep(self, sources: Int[Tensor, " s"]) -> None:
        """Only these sources go on, each with all its beams and in this order; the others are forgotten."""
        if self.rows.static:
            raise DataError("sources: a static decoding keeps its shapes and cannot drop any; start it anew")
        stuck = next((state for state in flat(self.states) if not isinstance(state, Droppable)), None)
        if stuck is not None:
            raise DataError(f"sources: {type(stuck).__name__} cannot forget rows; let all of them run to the end")
        rows = (sources[:, None] * self.beams + torch.arange(self.beams, device=sources.device)).flatten()
        for state in flat(self.states):
            state.keep(rows, sources)
        self.rows.keep(rows)
        if self.prefix is not None:
            self.prefix = self.prefix.index_select(0, rows)
        if self.memory is not None:
            seg = None if self.memory.seg is None else self.memory.seg.index_select(0, sources)
            self.memory = Memory(tuple(x.index_select(0, sources) for x in self.memory.x), seg)
        if self.cross is not None:
            seen = self.cross.mask.k_seg
            mask = replace(self.cross.mask, k_seg=None if seen is None else seen.index_select(0, sources))
            self.cross = replace(self.cross, mask=mask, lowered={}, shared={})

    def refillable(self) -> bool:
        """Whether `put` is possible: shapes stay the same, and every state can take in another source."""
        return self.rows.static and all(isinstance(state, Refillable) for state in flat(self.states))

    def put(self, fresh: "Decoding", of: Int[Tensor, " n"], at: Int[Tensor, " n"]) -> None:
        """Source at[i] begins anew as source of[i] of `fresh`, a decoding of the same shape that has read nothing.

        All of it is written in place, so that a captured step goes on with the new sources.
        """
        for state, its in zip(flat(self.states), flat(fresh.states), strict=True):
            state.put(its, of, at)
        self.rows.restart((at[:, None] * self.beams + torch.arange(self.beams, device=at.device)).flatten())
        for mine, its in zip(self._of_the_source(), fresh._of_the_source(), strict=True):
            mine.index_copy_(0, at, its.index_select(0, of))
        if self.cross is not None:
            _lower_again(self.cross)

    def _of_the_source(self) -> list[Tensor]:
        """What is known of every source and stays the same from step to step."""
        memory = () if self.memory is None else (*self.memory.x, self.memory.seg)
        mask = () if self.cross is None else (self.cross.mask.k_seg,)
        # A mask's segments may be the memory's own.
        return list({id(tensor): tensor for tensor in (*memory, *mask) if tensor is not None}.values())

    def own_view(self, T: int) -> View:
        """How T new tokens of every row look at what was said so far and at each other."""
        S, device, beams = self.rows.reach(T), self.rows.lengths.device, None
        paths = self.rows.paths
        if paths is not None:
            beams = View(self.rows.shared_mask(T, self.prefix), T * self.beams, S * self.beams, device)
            numbers = paths.added(S) if T == 1 else None
            if numbers is not None:  # a look-up instead of truth values, their opposites and two fillings
                beams.lowered[ADDITIVE, numbers.dtype] = numbers
        return View(self.rows.mask(T, self.prefix), T, S, device, beams=beams)

    def cross_view(self, T: int) -> View | None:
        """How T new tokens of every beam look at the memory; lowered once for all steps of the same T.

        Where `put` could not bring the lowered mask up to date, a captured step lowers it anew every time.
        """
        if self.cross is None or (T * self.beams == self.cross.T and not (self.rows.static and _odd(self.cross))):
            return self.cross
        self.cross = replace(self.cross, T=T * self.beams, lowered={}, shared={})
        return self.cross


ADDITIVE = "additive"  # what a view calls its mask as numbers, of some type: see regard.nn.kernels


def _odd(view: View) -> bool:
    """Whether a view was lowered to something other than its visibility and that as numbers."""
    return bool(view.shared.keys() - {"dense"}) or any(name != ADDITIVE for name, *_ in view.lowered)


def _lower_again(view: View) -> None:
    """What a view was lowered to, made anew where it is: its mask has been written to."""
    fresh = replace(view, lowered={}, shared={})
    for made in (view.shared, view.lowered):
        for key, old in made.items():
            if old is not None and not _odd(view):
                old.copy_(visible(fresh) if key == "dense" else additive(fresh, key[1]))


def flat(states: Iterable[Any]) -> Iterator[Any]:
    """Every state of a decoding: a call has none, one, or a tuple of them."""
    for state in states:
        if isinstance(state, tuple):
            yield from flat(state)
        elif state is not None:
            yield state


class Generator(Model):
    """Abstract: a model that says one token after another. All that search, sampling and serving know."""

    source_first: ClassVar[bool] = False  # a source is read as the beginning of the sequence, and takes up its room

    @abstractmethod
    def start(self, batch: Batch, max_len: int, beams: int = 1, static: bool = False) -> Decoding:
        """Begin a decoding of at most `max_len` read tokens, with `beams` rows for each row of the batch.

        `static` keeps every shape the same from step to step, for CUDA graphs. Room is counted by columns read, so rows
        of unequal prompts use up the longest one's.
        """

    @abstractmethod
    def advance(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        """Read new tokens (those with segment 0 are padding) and return log p of what follows the last real one."""


class LanguageModel(Generator):
    """Abstract: a generator whose last stream goes through a head over a vocabulary table."""

    tables: "Tables"
    head: Head

    @abstractmethod
    def hidden(
        self, batch: Batch, losses: list[Tensor] | None = None, trace: Trace | None = None
    ) -> Float[Tensor, "B T D"]:
        """The last stream for all of the target at once."""

    @abstractmethod
    def step(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B T D"]:
        """Read new tokens, `counts` of them real in each row (None: all); the last stream at each."""

    def log_probs(self, batch: Batch, trace: Trace | None = None) -> Float[Tensor, "B T V"]:
        """log p of every token at every place of the target."""
        return self.head.log_probs(self.hidden(batch, trace=trace), self.tables.get("output"))

    def loss(self, batch: Batch) -> Loss:
        losses: list[Tensor] | None = [] if self.training else None
        h = self.hidden(batch, losses)
        return token_loss(self.head, self.tables.get("output"), h, batch, losses)

    def advance(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, seg: Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "B V"]:
        rows = decoding.rows.lengths.shape[0]
        if ids.dim() != 2 or ids.shape[0] != rows or not ids.shape[1]:
            raise DataError(f"ids: this decoding reads {rows} rows of one or more tokens, not {tuple(ids.shape)}")
        counts = None
        if seg is not None:
            if seg.shape != ids.shape:
                raise DataError(f"seg: {tuple(seg.shape)} does not fit ids of {tuple(ids.shape)}")
            check_padding("seg", seg)
            counts = (seg != 0).sum(1)
            if readable(counts) and bool((counts == 0).any()):
                raise DataError(f"seg: row {int((counts == 0).nonzero()[0])} reads no token")
        return self.head.log_probs(self.consume(ids, decoding, counts), self.tables.get("output"))

    def consume(
        self, ids: Int[Tensor, "B T"], decoding: Decoding, counts: Int[Tensor, " B"] | None
    ) -> Float[Tensor, "B D"]:
        """Read new tokens, `counts` of them real in each row (None: all), and note it; the stream at the last real."""
        decoding.rows.claim(ids.shape[1], counts)
        x = self.step(ids, decoding, counts)
        decoding.rows.advance(ids.shape[1], counts)
        return last_real(x, counts)


def token_loss(
    head: Head, table: "Table | None", h: Float[Tensor, "B T D"], batch: Batch, losses: list[Tensor] | None
) -> Loss:
    """The head's loss over all labels of a batch, and what the parts added."""
    if batch.labels is None or batch.labels.shape != batch.target.shape:
        raise DataError("labels: the loss needs one label per target token")
    h, labels, weights = real_rows(h, batch.labels, label_weights(batch))
    scored = head.score(h, labels, weights, table)
    aux = sum(losses, scored.objective.new_zeros(())) if losses else scored.objective.new_zeros(())
    return Loss(scored.objective, weights.sum(), aux, scored.nll)


class Classifier(Model):
    """Abstract: a model that names classes."""

    @abstractmethod
    def scores(self, batch: Batch) -> Float[Tensor, "B C"] | Float[Tensor, "B T C"]:
        """Unnormalised log-probabilities of the classes."""


@runtime_checkable
class Sizes(Protocol):
    """The fields that every family has."""

    @property
    def d_model(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def d_head(self) -> int | None: ...
    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def activation_dropout(self) -> float: ...
    @property
    def linear(self) -> Linear: ...


def check_sizes(spec: Sizes) -> None:
    """Refuse sizes that no family could build."""
    for name, most in (("d_model", MOST_CHANNELS), ("heads", MOST_HEADS), ("d_head", MOST_CHANNELS)):
        size = getattr(spec, name)
        if size is not None:
            check_count(name, size, most)
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        rate = getattr(spec, name)
        if not 0.0 <= rate < 1.0:
            raise SpecError(name, f"must lie in [0, 1), not {rate}")
    if spec.d_head is None and spec.d_model % spec.heads:
        raise SpecError(
            "heads", f"{spec.heads} heads do not divide d_model {spec.d_model}; choose a divisor or set d_head"
        )


def check_vocab(name: str, vocab: int | None) -> None:
    """Refuse a vocabulary that could not hold a token, or that no memory could."""
    if vocab is not None and not 1 <= vocab <= 2**31:
        raise SpecError(name, f"must lie between 1 and 2^31, not {vocab}")


def site_of(
    spec: Sizes,
    init: Init,
    side: Literal["encoder", "decoder"],
    *,
    causal: bool,
    depths: tuple[int, int],
    branches: int,
) -> Site:
    """The site of one side of a model, before its stack narrows it to a layer."""
    d_head = spec.d_head or spec.d_model // spec.heads
    return Site(
        d_model=spec.d_model,
        heads=spec.heads,
        d_head=d_head,
        d_value=d_head,
        side=side,
        causal=causal,
        layer=0,
        depth=depths[0] if side == "encoder" else depths[1],
        encoder_depth=depths[0],
        decoder_depth=depths[1],
        branches=branches,
        dropout=spec.dropout,
        attention_dropout=spec.attention_dropout,
        activation_dropout=spec.activation_dropout,
        linear_=spec.linear,
        init_=init,
    )


class Tables(nn.Module):
    """The vocabulary tables of a model. Each is stored once, under the first of its uses."""

    def __init__(
        self,
        spec: TableSpec,
        site: Site,
        uses: dict[str, tuple[str, int, int]],
        head: HeadSpec | None = None,
        output: TableSpec | None = None,
        field: str = "sharing",
    ) -> None:
        """`uses` maps a use to (the use that owns its table, vocabulary, width); `field` is where sharing is said.

        `output` describes the table of the output where it has its own; None: like the others.
        """
        super().__init__()
        self.owner = {use: owner for use, (owner, _, _) in uses.items()}
        self.tables = nn.ModuleDict()
        own = "output" in uses and uses["output"][0] == "output"
        if output is not None and not own:
            raise SpecError("output_table", f"the output has no table of its own; leave it out or change {field}")
        if head is not None and "output" in uses:
            head.check_table(output or spec, not own)
        for use, (owner, vocab, width) in uses.items():
            if use == owner:
                described, where = (output, "output_table") if output and use == "output" else (spec, "table")
                self.tables[use] = described.build(vocab, width, site.inside(where))
            elif uses[owner][1:] != (vocab, width):
                there = f"{uses[owner][1]} x {uses[owner][2]}"
                raise SpecError(
                    field, f"the {use} table is {vocab} x {width} and the {owner} table {there}; they cannot be one"
                )

    def get(self, use: str) -> Table | None:
        """The table for `source`, `target` or `output`; None if the head brings its own."""
        return self.tables[self.owner[use]] if use in self.owner else None  # type: ignore[reportReturnType]


class Inputs(nn.Module):
    """The input modules of a model. Source and target have one each, or share it."""

    def __init__(self, spec: InputSpec, sites: dict[str, Site], shared: bool) -> None:
        super().__init__()
        first = next(iter(sites))
        self.owner = dict.fromkeys(sites, first) if shared else {use: use for use in sites}
        self.inputs = nn.ModuleDict(
            {o: spec.build(sites[o].inside("input")) for o in dict.fromkeys(self.owner.values())}
        )

    def get(self, use: str) -> Input:
        """The input of `source` or `target`."""
        return self.inputs[self.owner[use]]  # type: ignore[reportReturnType]


def refuse(batch: Batch, *names: str) -> None:
    """Refuse fields of a batch that a family would ignore."""
    for name in names:
        given = getattr(batch, name)
        if given is not None and given is not False:
            raise DataError(f"{name}: this model would ignore it; leave it out of the batch")


def check_types(spec: InputSpec) -> None:
    """Refuse an input that tells kinds of tokens apart where only one kind is read."""
    if spec.kinds:
        raise SpecError("input.types", "only an encoder reads several kinds of tokens; set it to 0")


def own_mask(
    batch: Batch, pos: Int[Tensor, "B T"] | None, seg: Int[Tensor, "B T"] | None, causal: bool = False
) -> Mask:
    """What the tokens of one side of a batch see of each other."""
    return Mask(
        causal=causal,
        q_pos=pos,
        k_pos=pos,
        q_seg=seg,
        k_seg=seg,
        packed=batch.packed,
        segments=batch.segments,
        longest=batch.longest,
    )


def label_weights(batch: Batch) -> Float[Tensor, "B T"]:
    """The weight of every label: the given one, or 1 for real tokens."""
    if batch.weights is not None:
        return batch.weights
    if batch.target_seg is None:
        return torch.ones(batch.target.shape, device=batch.target.device)
    return (batch.target_seg != 0).to(torch.get_default_dtype())


def real_rows(
    h: Float[Tensor, "B T D"], labels: Int[Tensor, "B T"], weights: Float[Tensor, "B T"]
) -> tuple[Float[Tensor, "N D"], Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Hidden states, labels and weights as flat rows.

    On a CPU, rows without weight are left out before the softmax; elsewhere the changing shape would cost more.
    """
    h, labels, weights = h.flatten(0, 1), labels.flatten(), weights.flatten()
    if h.device.type == "cpu" and not torch.compiler.is_compiling():
        keep = weights.nonzero().squeeze(-1)
        if keep.numel() < weights.numel():
            h, labels, weights = h[keep], labels[keep], weights[keep]
        if bool((labels < 0).any()):
            raise DataError("labels: a negative label has a weight; give it weight 0")
        return h, labels, weights
    return h, labels.masked_fill(weights == 0, 0), weights


def last_real(x: Float[Tensor, "B T D"], counts: Int[Tensor, " B"] | None) -> Float[Tensor, "B D"]:
    """The stream at the last real token of every row."""
    if counts is None:
        return x[:, -1]
    return x[torch.arange(x.shape[0], device=x.device), (counts - 1).clamp(min=0)]


def decoding_rows(sources: int, beams: int, device: torch.device, max_len: int, static: bool) -> Rows:
    """Rows that have read nothing yet."""
    for name, number in (("beams", beams), ("max_len", max_len)):
        if number < 1:
            raise SpecError(name, f"must be at least 1, not {number}")
    lengths = torch.zeros(sources * beams, dtype=torch.int64, device=device)
    paths = BeamAncestry(sources * beams, beams, max_len, device, static) if beams > 1 else None
    return Rows(lengths, max_len, uniform=not static, static=static, paths=paths)


def padding_mask(seg: Int[Tensor, "B S"] | None, static: bool = False) -> Mask:
    """What a decoding sees of its memory. A memory without padding needs no mask at all, unless others may follow."""
    if seg is None or (not static and bool((seg != 0).all())):
        return Mask()
    return Mask(k_seg=seg)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` inside, and leave the global generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def build(spec: ModelSpec, device: torch.device | str | None = None, seed: int = 0, init: bool = True) -> Model:
    """The model that `spec` describes. The same seed gives the same weights on every device.

    `device="meta"` allocates nothing, to count and to check. `init=False` leaves the weights undrawn, to load others.
    """
    if not isinstance(spec, ModelSpec):
        raise SpecError(
            "", f"{type(spec).__name__} is not the description of a whole model; build a preset or a family"
        )
    if isinstance(spec.init, Uninitialized):
        raise SpecError("init", "'undrawn' leaves weights unset; say build(spec, init=False) to load others")
    draw = spec.init if init else Uninitialized()
    if device is not None and torch.device(device).type == "meta":
        with torch.device("meta"), _memory_error_in_words():
            return spec.build(Uninitialized())
    with seeded(seed), _memory_error_in_words():  # drawn on the CPU: devices have generators of their own
        model = spec.build(draw)
    return model if device is None else model.to(device)


@contextmanager
def _memory_error_in_words() -> Iterator[None]:
    """A weight that no memory could hold, or whose size no machine could count, as one sentence."""
    try:
        yield
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        about = str(error).lower()
        if isinstance(error, RuntimeError | TypeError) and "allocate memory" not in about and "overflow" not in about:
            raise
        raise SpecError(
            "", "a model of these sizes fits into no memory; make its widths, tables or depth smaller"
        ) from None


def count(spec: ModelSpec) -> int:
    """The exact number of parameters."""
    return sum(parameter.numel() for parameter in build(spec, device="meta").parameters())
