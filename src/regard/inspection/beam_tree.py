"""The tree of all hypotheses that a beam search considers."""

from collections.abc import Sequence
from dataclasses import dataclass

from regard.decoding.expansion import Choice
from regard.decoding.rank import Candidate


@dataclass(frozen=True, slots=True)
class BeamNode:
    """A hypothesis: the hypothesis at index `parent` of the tree, extended by one token."""

    parent: int | None  # None: the root, which has no tokens
    length: int  # number of tokens, including eos
    token: int
    log_prob: float  # log p of the last token
    total: float  # log p of the whole hypothesis
    ended: bool  # True: the last token is eos


class BeamTree:
    """Observer of `regard.decoding.beam.search` that records the ancestry of every beam of one batch row.

    `nodes[0]` is the root. A node without children that has not ended was dropped, or was live when the search stopped.
    """

    def __init__(self, eos: int, limit: int, row: int = 0) -> None:
        """`limit` is the maximum number of tokens without eos."""
        self.eos, self.limit, self.row = eos, limit, row
        self.nodes = [BeamNode(None, 0, -1, 0.0, 0.0, False)]
        self._live: Sequence[int] | None = None  # for every beam, the index of its node

    def __call__(self, row: int, choice: Choice) -> None:
        if row != self.row:
            return
        live = self._live or [0] * len(choice.onward)
        for each in choice.first:
            if each.token == self.eos:
                self._add(live[each.beam], each, ended=True)
        parents = [None if each is None else live[each.beam] for each in choice.onward]
        if any(parent is not None and self.nodes[parent].length == self.limit for parent in parents):
            return  # at the limit, a hypothesis can only end
        self._live = [
            0 if each is None or parent is None else self._add(parent, each, ended=False)
            for each, parent in zip(choice.onward, parents, strict=True)
        ]

    def _add(self, parent: int, candidate: Candidate, ended: bool) -> int:
        length = self.nodes[parent].length + 1
        self.nodes.append(BeamNode(parent, length, candidate.token, candidate.log_prob, candidate.total, ended))
        return len(self.nodes) - 1

    def path(self, ids: Sequence[int], ended: bool) -> list[int]:
        """Return the indices of the nodes from the root to a hypothesis, or [] if the tree does not contain it."""
        tokens = [*ids, self.eos] if ended else list(ids)
        children: dict[tuple[int, int], int] = {
            (node.parent, node.token): i for i, node in enumerate(self.nodes) if node.parent is not None
        }
        path = [0]
        for token in tokens:
            if (path[-1], token) not in children:
                return []
            path.append(children[path[-1], token])
        return path

    def tokens(self, node: int) -> list[int]:
        """Return the tokens of the hypothesis at a node."""
        at, ids = self.nodes[node], list[int]()
        while at.parent is not None:
            ids.append(at.token)
            at = self.nodes[at.parent]
        return ids[::-1]
