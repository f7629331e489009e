"""Decoding constraints on token ids: a forced prefix, required and banned sequences, no repeated n-grams.

Banned tokens get log p = -inf, and the log-probabilities of the other tokens are not renormalised. The log-probability
of an output is therefore the same as in a single forward pass of the model over the whole output.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from regard.decoding.hypothesis import SpecialTokens
from regard.decoding.required import MOST, Ids, contains
from regard.errors import DataError, SpecError
from regard.nn.checks import check_not_negative, require

if TYPE_CHECKING:
    from regard.data.tokenizer import Tokenizer
    from regard.decoding.constraint import Constraint


@dataclass(frozen=True, slots=True)
class BoundConstraint:
    """A user-defined constraint, and the tokenizer of the outputs."""

    constraint: "Constraint"
    tokenizer: "Tokenizer" = field(compare=False)


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """Constraints on the output of one batch row, as token ids. They do not apply to a prompt.

    A prefix is forced token by token, and its probability counts towards the score. An output may contain the beginning
    of a banned sequence, but not the complete sequence. `no_repeat=n` allows every n-gram once, but n-grams in the
    prefix may repeat. Required sequences may overlap. The constraints in `others` compute banned and forced tokens at
    every step.
    """

    prefix: Ids = ()
    banned: tuple[Ids, ...] = ()
    required: tuple[Ids, ...] = ()
    no_repeat: int = 0  # 0: n-grams may repeat
    others: tuple[BoundConstraint, ...] = ()

    def __post_init__(self) -> None:
        """Convert the sequences to tuples. Raise SpecError for an empty sequence or for contradictory constraints."""
        object.__setattr__(self, "prefix", tuple(self.prefix))
        for name in ("banned", "required"):
            sequences = tuple(dict.fromkeys(tuple(sequence) for sequence in getattr(self, name)))
            require(() not in sequences, name, "a sequence has no ids; leave it out")
            object.__setattr__(self, name, sequences)
        check_not_negative("no_repeat", self.no_repeat)
        n = len(self.required)
        require(n <= MOST, "required", f"at most {MOST} sequences can be required of a row, not {n}")
        for name, sequence in (("prefix", self.prefix), *(("required", each) for each in self.required)):
            for banned in self.banned:
                if contains(sequence, banned):
                    message = f"{list(sequence)} contains {list(banned)}, which is banned; drop one of them"
                    raise SpecError(name, message)
        for sequence in self.required:
            if self.no_repeat and any(token in self.repeats(sequence[:i]) for i, token in enumerate(sequence)):
                message = f"{list(sequence)} repeats an n-gram, which no_repeat={self.no_repeat} bans"
                raise SpecError("required", message)

    def check(self, ends: SpecialTokens) -> None:
        """Raise SpecError if a sequence contains bos, eos or padding. Banning only bos or only padding is allowed."""
        for name, sequences in (("prefix", (self.prefix,)), ("banned", self.banned), ("required", self.required)):
            for sequence in sequences:
                special = {ends.eos, *ends.never}.intersection(sequence)
                if special and not (name == "banned" and len(sequence) == 1):
                    raise SpecError(
                        name, f"{list(sequence)} contains {min(special)}, the id of bos, eos or padding; remove it"
                    )
                if sequence == (ends.eos,):
                    message = f"a row that cannot generate {ends.eos} never ends; set min_len to delay its end"
                    raise SpecError(name, message)

    def used(self) -> list[str]:
        names = [name for name in ("prefix", "banned", "required", "no_repeat") if getattr(self, name)]
        return names + [type(other.constraint).kind for other in self.others]

    @property
    def vectorized(self) -> bool:
        """True if the only constraint is a set of tokens that are banned at every step."""
        return not (self.prefix or self.required or self.follows())

    def highest(self) -> int:
        """Return the highest id in the prefix and in the banned and required sequences, or -1 if all are empty."""
        return max((i for ids in (self.prefix, *self.banned, *self.required) for i in ids), default=-1)

    def follows(self) -> bool:
        """Return whether the banned tokens depend on the output so far."""
        return self.no_repeat > 0 or bool(self.others) or any(len(sequence) > 1 for sequence in self.banned)

    def next_banned(self, output: Ids) -> list[int]:
        """Return the ids that are banned after `output`, except those that are banned at every step."""
        ids = [s[-1] for s in self.banned if len(s) > 1 and output[len(output) - len(s) + 1 :] == s[:-1]]
        return ids + (list(self.repeats(output)) if self.no_repeat else [])

    def repeats(self, output: Ids) -> Iterable[int]:
        """Return the tokens that would repeat an n-gram of `output` if they were appended."""
        n = self.no_repeat - 1
        tail = output[len(output) - n :] if len(output) >= n else None
        return (output[i + n] for i in range(len(output) - n) if output[i : i + n] == tail)


class Bans:
    """Applies the constraints of all batch rows by setting the log-probabilities of banned tokens to -inf."""

    def __init__(
        self,
        rules: Sequence[TokenConstraints],
        least: Sequence[int],
        ends: SpecialTokens,
        beams: int,
        device: torch.device,
    ) -> None:
        """`rules` are the constraints of each row, and `least` is the minimum length of its output in tokens."""
        self.rules, self.least, self.eos, self.beams = rules, least, ends.eos, beams
        always = [{sequence[0] for sequence in each.banned if len(sequence) == 1} for each in rules]
        everywhere = set.intersection(*always)
        never = everywhere | {*ends.never}
        self.columns = torch.tensor(sorted(never), dtype=torch.int64, device=device)
        self.columns_and_eos = torch.tensor(sorted(never | {ends.eos}), dtype=torch.int64, device=device)
        self.own = [sorted(single - everywhere) for single in always]
        self.follows = [each.follows() for each in rules]
        self.highest = max(ends.bos, ends.eos, ends.pad, *(each.highest() for each in rules))

    def apply(
        self, log_probs: Float[Tensor, "B V"], step: int, slots: Sequence[int], outputs: Sequence[Sequence[Ids]]
    ) -> None:
        """Write -inf into `log_probs` for every banned token.

        Each source has a group of rows in `log_probs`, one row per beam. The i-th group belongs to the source with
        index `slots[i]`, and `outputs[i]` are the ids that each beam of the group has generated so far.
        """
        size = log_probs.shape[1]
        if step == 0 and self.highest >= size:
            which = f"id {self.highest}, of a constraint or a special token"
            raise DataError(f"rules: {which}, is not in the vocabulary of {size} tokens")
        too_short = [step < self.least[source] for source in slots]
        log_probs.index_fill_(1, self.columns_and_eos if all(too_short) else self.columns, -torch.inf)
        if all(too_short):
            too_short = [False] * len(slots)
        banned: list[tuple[int, int]] = []
        forced: list[tuple[int, int]] = []
        for slot, source in enumerate(slots):
            rules, rows = self.rules[source], range(slot * self.beams, (slot + 1) * self.beams)
            if step < len(rules.prefix):
                forced += [(row, rules.prefix[step]) for row in rows]
            elif too_short[slot] or self.own[source] or self.follows[source]:
                always = [*self.own[source], self.eos] if too_short[slot] else self.own[source]
                for row, output in zip(rows, outputs[slot], strict=True):
                    now = [*always, *rules.next_banned(output)] if self.follows[source] else always
                    banned += [(row, token) for token in now]
                    for other in rules.others:
                        constraint, tokenizer = other.constraint, other.tokenizer
                        tokens = _known(constraint, constraint.banned(output, tokenizer), size)
                        banned += [(row, token) for token in tokens]
                        if (token := constraint.forced(output, tokenizer)) is not None:
                            forced += [(row, token) for token in _known(constraint, (token,), size)]
        if banned:
            log_probs[index(banned, log_probs)] = -torch.inf
        if forced:
            rows, tokens = index(forced, log_probs)
            kept = log_probs[rows, tokens]
            log_probs[rows] = -torch.inf
            log_probs[rows, tokens] = kept


def _known(constraint: "Constraint", ids: Iterable[int], size: int) -> Iterator[int]:
    """Yield the ids that `constraint` returned; raise DataError for an id outside the vocabulary of `size` tokens."""
    for token in ids:
        if not 0 <= token < size:
            kind = type(constraint).kind
            raise DataError(
                f"decode.constraints: {kind!r} returned the id {token}, but the vocabulary has {size} tokens"
            )
        yield token


def index(pairs: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Convert (row, token) pairs to two index tensors (rows, tokens) on the device of `like`."""
    rows, tokens = torch.tensor(pairs, dtype=torch.int64, device=like.device).unbind(1)
    return rows, tokens
