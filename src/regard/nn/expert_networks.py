"""Expert networks: feed-forward networks with stacked weights. Each network processes some of the tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.nn.activation import ACTIVATIONS, Activation
from regard.nn.core import Branch, Role, Site
from regard.nn.trace import Trace


class Slots(NamedTuple):
    """The index of each (token, expert) pair in an array of `rows` x `width` tokens. One expert processes each row."""

    at: Tensor  # (N, K): flat index in the array; rows * width for a dropped pair
    width: int
    rows: int
    owner: Tensor | None  # (rows,): the expert that processes each row; None: expert e processes row e


class ExpertNetworks(Branch):
    """Abstract base class of layers with E experts: feed-forward networks whose weights are stacked, (E, out, in)."""

    used: int  # number of experts per token

    def build_experts(self, experts: int, d_hidden: int, activation: Activation, site: Site) -> None:
        """Initialise the weights of the experts. Subclasses call this in `__init__`, after initialising the router."""
        self.up = _stacked(experts, d_hidden, site.d_model, "up", site)
        self.down = _stacked(experts, site.d_model, d_hidden, "down", site)
        self.activate, self.dropout = ACTIVATIONS[activation], nn.Dropout(site.activation_dropout)
        self.route = f"{site.side}.experts"  # name in a trace

    def trace_route(
        self, trace: Trace, x: Float[Tensor, "B T D"], expert: Int[Tensor, "N K"], gate: Float[Tensor, "N K"]
    ) -> None:
        """Record the chosen experts and their weights in a trace."""
        shape = (*x.shape[:2], 1, expert.shape[1])
        trace.route(self.route, expert.view(shape), gate.view(shape), self.up.shape[0])

    def idle_flops(self, tokens: int) -> int:
        """Return the FLOPs spent on unused elements of the array that `run` computes for `tokens` tokens."""
        (E, hidden, D), K = self.up.shape, self.used
        width, rows = _laid_out(tokens * K, E)
        return (rows * width - tokens * K) * 4 * D * hidden

    def run(self, x: Float[Tensor, "N D"], places: Slots) -> Float[Tensor, "N K D"]:
        """Return the outputs of the K chosen experts for each of N tokens, with 0 for dropped (token, expert) pairs."""
        N, K = places.at.shape
        at = places.at.flatten()
        # An extra element at the end receives the dropped pairs.
        inputs = x.new_zeros(places.rows * places.width + 1, x.shape[1])
        inputs = inputs.index_put((at,), x[:, None].expand(N, K, -1).flatten(0, 1))[:-1]
        up, down = (self.up, self.down) if places.owner is None else (self.up[places.owner], self.down[places.owner])
        hidden = self.activate(inputs.unflatten(0, (places.rows, places.width)) @ up.mT)
        out = (self.dropout(hidden) @ down.mT).flatten(0, 1)
        return F.pad(out, (0, 0, 0, 1)).index_select(0, at).unflatten(0, (N, K))


def _stacked(experts: int, d_out: int, d_in: int, role: Role, site: Site) -> nn.Parameter:
    """Return a stack of one matrix per expert, each initialised with the fan-in and fan-out of a single expert."""
    return nn.Parameter(torch.stack([site.parameter(d_out, d_in, role=role).detach() for _ in range(experts)]))


def _laid_out(choices: int, experts: int) -> tuple[int, int]:
    """Return (width, rows) of an array with room for `choices` (token, expert) pairs, whatever the experts chosen.

    The width is the mean number of tokens per expert, so that at most 2 * `experts` rows are needed.
    """
    width = -(-choices // experts)
    return width, min(choices, choices // width + experts)


def unlimited(expert: Int[Tensor, "N K"], sent: Bool[Tensor, "N K"], experts: int) -> Slots:
    """Place the (token, expert) pairs in an array whose shape depends only on the numbers of pairs and experts.

    Pairs for which `sent` is False are dropped. Each expert processes as many rows as its tokens fill. The weights of
    unused experts are not read.
    """
    (N, K), E = expert.shape, experts
    width, rows = _laid_out(N * K, E)
    chosen = (F.one_hot(expert, E) * sent[..., None]).flatten(0, 1)
    needed = (chosen.sum(0) + width - 1) // width
    end = needed.cumsum(0)
    at = (end - needed)[expert] * width + queue_rank(chosen, 0).unflatten(0, (N, K))
    owner = torch.searchsorted(end, torch.arange(rows, device=at.device), right=True).clamp(max=E - 1)
    return Slots(at.where(sent, rows * width), width, rows, owner)


def queue_rank(queue: Int[Tensor, "*n E"], dim: int) -> Int[Tensor, "*n"]:
    """Return, for each (token, expert) pair, the number of earlier pairs with the same expert along `dim`."""
    return ((queue.cumsum(dim) - queue) * queue).sum(-1)
