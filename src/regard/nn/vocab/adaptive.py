"""Adaptive embeddings and adaptive softmax: ids clustered by frequency, with narrower vectors for rare ids.

Ids must be sorted by decreasing frequency, as in a tokenizer.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.errors import SpecError
from regard.nn.checks import check_count, check_not_negative, check_rate, require
from regard.nn.core import Site
from regard.nn.precision import widen
from regard.nn.vocab.base import CrossEntropyHead, Head, HeadSpec, Scored
from regard.nn.vocab.tables import Embeddings, Factorised, Table, TableSpec


@dataclass(frozen=True, slots=True)
class AdaptiveTable(TableSpec):
    """An embedding table of several clusters, each with its own width and a projection. Baevski and Auli 2019.

    The vector of an id in cluster c is A_c[id] B_c', or A_c[id] in a cluster of width d_model. `parts` are the relative
    sizes of the clusters. The width of cluster c is d_model / divisors[c].
    """

    kind = "adaptive_table"
    parts: tuple[int, ...] = (2500, 6000, 23628)
    divisors: tuple[int, ...] = (1, 3, 12)

    def check(self) -> None:
        for name, numbers in (("parts", self.parts), ("divisors", self.divisors)):
            require(
                len(numbers) >= 2 and min(numbers) >= 1,
                name,
                f"needs a positive number for each of two or more clusters, not {list(numbers)}",
            )
        require(
            len(self.parts) == len(self.divisors),
            "divisors",
            f"needs one divisor for each of {len(self.parts)} clusters, not {len(self.divisors)}",
        )

    def cuts(self, vocab: int) -> list[int]:
        """Return the first id of each cluster, followed by the vocabulary size. Each cluster has at least one id."""
        clusters, total, cuts = len(self.parts), sum(self.parts), [0]
        for c in range(1, clusters + 1):
            end = round(vocab * sum(self.parts[:c]) / total)
            cuts.append(min(max(end, cuts[-1] + 1), vocab - clusters + c))
        return cuts

    def build(self, vocab: int, width: int, site: Site) -> Table:
        site.require(
            vocab >= len(self.parts), "parts", f"{vocab} ids are too few for {len(self.parts)} clusters; choose fewer"
        )
        return AdaptiveTableModule(self, vocab, width, site)


class AdaptiveTableModule(Table):
    def __init__(self, spec: AdaptiveTable, vocab: int, width: int, site: Site) -> None:
        super().__init__()
        self.cuts = spec.cuts(vocab)
        self.clusters = nn.ModuleList()
        for begin, end, divisor in zip(self.cuts, self.cuts[1:], spec.divisors, strict=False):
            narrow = max(1, width // divisor)
            kind = Embeddings() if narrow == width else Factorised(narrow)
            self.clusters.append(kind.build(end - begin, width, site))

    def cluster(self, c: int) -> Table:
        """Return the embedding table of cluster c, whose ids count from 0."""
        return self.clusters[c]  # type: ignore[reportReturnType]

    def within(self, ids: Int[Tensor, "*n"], c: int) -> tuple[Bool[Tensor, "*n"], Int[Tensor, "*n"]]:
        """Return a mask of the ids in cluster c, and their indices in the cluster (0 for other ids).

        Invalid ids are assigned to the first or last cluster, where the embedding raises an error.
        """
        inside = torch.ones_like(ids, dtype=torch.bool) if c == 0 else ids >= self.cuts[c]
        if c < len(self.clusters) - 1:
            inside = inside & (ids < self.cuts[c + 1])
        return inside, torch.where(inside, ids - self.cuts[c], 0)

    def rows(self, c: int, device: torch.device) -> Float[Tensor, "n W"]:
        """Return the embedding vectors of all ids in cluster c."""
        return self.cluster(c)(torch.arange(self.cuts[c + 1] - self.cuts[c], device=device))

    def forward(self, ids: Int[Tensor, "*n"]) -> Float[Tensor, "*n W"]:
        # Each cluster embeds all ids, because tensor shapes that depend on data cost more.
        x = self.cluster(0)(self.within(ids, 0)[1])
        for c in range(1, len(self.clusters)):
            inside, local = self.within(ids, c)
            x = torch.where(inside[..., None], self.cluster(c)(local), x)
        return x

    def readout(self, h: Float[Tensor, "*n W"]) -> tuple[Float[Tensor, "*n R"], Float[Tensor, "V R"]]:
        return h, torch.cat([self.rows(c, h.device) for c in range(len(self.clusters))])

    def logits(self, h: Float[Tensor, "*n W"]) -> Float[Tensor, "*n V"]:
        # For a few vectors h, projecting h costs less than projecting the whole vocabulary.
        return torch.cat([self.cluster(c).logits(h) for c in range(len(self.clusters))], -1)


@dataclass(frozen=True, slots=True)
class AdaptiveSoftmax(HeadSpec):
    """log p(v) for an id v in the first cluster, log p(c) + log p(v | c) in a tail cluster c. Grave et al. 2017.

    The first softmax covers the ids of the first cluster and one entry for each tail cluster. Each tail cluster has a
    softmax over its ids. The loss of a label depends on the first softmax and, if the label is in a tail cluster, on
    the softmax of this cluster. The output vectors come from an adaptive table. Label smoothing and z-loss apply to
    each softmax that the loss depends on.
    """

    kind = "adaptive_softmax"
    tails: int = 2  # number of clusters after the first
    scaled: bool = False  # scale h by d_model^-1/2
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def check(self) -> None:
        check_count("tails", self.tails)
        check_rate("label_smoothing", self.label_smoothing)
        check_not_negative("z_loss", self.z_loss)

    def check_table(self, table: TableSpec, tied: bool) -> None:  # noqa: ARG002
        if not isinstance(table, AdaptiveTable):
            raise SpecError(
                "head", f"an adaptive softmax needs an adaptive table, not {table.kind!r}; change the table too"
            )
        tails = len(table.parts) - 1
        require(
            tails == self.tails, "head.tails", f"is {self.tails}, but the table has {tails} clusters after the first"
        )

    def build(self, vocab: int, site: Site) -> Head:  # noqa: ARG002
        return AdaptiveSoftmaxModule(self, site)


class AdaptiveSoftmaxModule(CrossEntropyHead):
    def __init__(self, spec: AdaptiveSoftmax, site: Site) -> None:
        super().__init__()
        self.tails = site.parameter(spec.tails, site.d_model, role="embedding")
        self.factor = site.d_model**-0.5 if spec.scaled else 1.0
        self.label_smoothing, self.z_loss = spec.label_smoothing, spec.z_loss

    def log_probs(self, h: Float[Tensor, "*n D"], table: Table | None) -> Float[Tensor, "*n V"]:
        assert isinstance(table, AdaptiveTableModule)
        h = h * self.factor
        first = table.cluster(0).logits(h)
        first = widen(torch.cat((first, h @ self.tails.T), -1)).log_softmax(-1)
        ids, *tails = first.split((table.cuts[1], *[1] * len(self.tails)), -1)
        within = (widen(table.cluster(c).logits(h)).log_softmax(-1) for c in range(1, len(table.clusters)))
        return torch.cat((ids, *(tail + inner for tail, inner in zip(tails, within, strict=True))), -1)

    def score(
        self, h: Float[Tensor, "N D"], labels: Int[Tensor, " N"], weights: Float[Tensor, " N"], table: Table | None
    ) -> Scored:
        assert isinstance(table, AdaptiveTableModule)
        h = h * self.factor
        first, tails = labels, []
        for c in range(1, len(table.clusters)):
            inside, local = table.within(labels, c)
            first = torch.where(inside, table.cuts[1] + c - 1, first)
            rows, local, weight = self.members(inside, h, local, weights)
            r, matrix = table.cluster(c).readout(rows)
            tails.append(self.cross_entropy(r, matrix, None, local, weight))
        matrix = torch.cat((table.rows(0, h.device), self.tails))
        objective, nll = zip(self.cross_entropy(h, matrix, None, first, weights), *tails, strict=True)
        return Scored(torch.stack(objective).sum(), torch.stack(nll).sum())

    def members(
        self,
        inside: Bool[Tensor, " N"],
        h: Float[Tensor, "N D"],
        labels: Int[Tensor, " N"],
        weights: Float[Tensor, " N"],
    ) -> tuple[Float[Tensor, "n D"], Int[Tensor, " n"], Float[Tensor, " n"]]:
        """Return h, labels and weights of all tokens, with weight 0 for the tokens outside the cluster."""
        return h, labels, weights * inside
