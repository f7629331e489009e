"""The gated delta rule in chunks of tokens: matrix products for all chunks at once, and a loop from chunk to chunk."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.fast.operators import operator
from regard.nn.branches.gated_delta import GatedDeltaModule, gated_delta_rule

CHUNK = 64  # tokens


class ChunkedGatedDelta(GatedDeltaModule):
    """The gated delta rule in chunks of 64 tokens (Yang et al. 2024). A single token uses `gated_delta_rule`."""

    @staticmethod
    def rule(
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H T K"],
        v: Float[Tensor, "B H T V"],
        log_decay: Float[Tensor, "B H T"],
        strength: Float[Tensor, "B H T"],
        state: Float[Tensor, "B H K V"],
    ) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H K V"]]:
        whole = gated_delta_rule if q.shape[2] == 1 else chunked_gated_delta_rule
        return whole(q, k, v, log_decay, strength, state)


def chunked_gated_delta_rule(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H T K"],
    v: Float[Tensor, "B H T V"],
    log_decay: Float[Tensor, "B H T"],
    strength: Float[Tensor, "B H T"],
    state: Float[Tensor, "B H K V"],
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H K V"]]:
    """Return what `gated_delta_rule` returns, computed in chunks of `chunk` tokens.

    Let a_i be the decay and b_i the strength of token i. Let S be the state at the beginning of a chunk. Let D_ij
    be the product of the decays of the tokens after j, up to and including i. Let d_i be the product of the decays of
    all tokens of the chunk up to i. Let u_i = b_i * (v_i - a_i * S_(i-1)' k_i) be the correction by token i. The state
    after token i is S_i = d_i * S + sum_(j <= i) D_ij * k_j u_j', and y_i = S_i' q_i. The corrections therefore solve a
    triangular system:

        u_i + b_i * sum_(j < i) D_ij * (k_i' k_j) * u_j = b_i * (v_i - d_i * S' k_i).

    The system is solved for all chunks at once, before S is known, as u = x - z S. Here x is the solution for the right
    side b_i * v_i, and z is the solution for the right side b_i * d_i * k_i. This is the WY representation of Bischof
    and Van Loan 1987 (Yang et al. 2024). With c the last token of a chunk, the state after the chunk is a linear map of
    S, with matrices that are also computed for all chunks at once:

        S_c = (d_c - sum_j D_cj * k_j z_j') S + sum_j D_cj * k_j x_j'.

    So the loop over the chunks, in `chunk_states`, has one matrix product per chunk.
    """
    B, H, T, K = q.shape
    chunk = min(chunk, T)
    padding = -T % chunk
    # Padding has strength 0 and log_decay 0, so it does not change the state. Tensors are (N, B * H, chunk, ...), so
    # that the loop reads contiguous memory.
    q, k, v, gates = (
        F.pad(x.flatten(0, 1), (0, 0, 0, padding)).unflatten(1, (-1, chunk)).transpose(0, 1).contiguous()
        for x in (q, k, v, torch.stack((log_decay, strength), -1))
    )
    log_decay, strength = gates.unbind(-1)

    # A product of decays is the exponential of a sum of `log_decay`. Differences of cumulative sums would lose the
    # digits of weak decays after a strong decay, so each sum is computed from its own terms. A token that clears the
    # state has log_decay = -inf, and 0 * -inf is not a number. So the sums skip such a token, and products across it
    # are set to 0.
    clears = log_decay == -torch.inf
    log_decay, cleared = log_decay.masked_fill(clears, 0.0), clears.cumsum(-1)
    upto = torch.ones(chunk, chunk, dtype=q.dtype, device=q.device).tril()
    sums = upto @ (log_decay[..., None] * upto.tril(-1))  # over the tokens after j, up to and including i
    apart = (upto == 0) | (cleared[..., :, None] != cleared[..., None, :])
    between = sums.masked_fill(apart, -torch.inf).exp()  # D
    since = log_decay.cumsum(-1).masked_fill(cleared > 0, -torch.inf).exp()[..., None]  # d

    weighted = strength[..., None] * k
    system = (weighted @ k.mT) * between  # the solver reads only its part below the diagonal
    right = torch.cat((strength[..., None] * v, weighted * since), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_v, from_state = solved.split_with_sizes((v.shape[-1], K), -1)
    within, q, k = (q @ k.mT) * between, q * since, k * between[..., -1, :, None]

    kept = since[..., -1:, :] * torch.eye(K, dtype=q.dtype, device=q.device)
    states = chunk_states(kept - k.mT @ from_state, k.mT @ from_v, state.flatten(0, 1))
    corrections = from_v - from_state @ states[:-1]
    y = q @ states[:-1] + within @ corrections
    return y.transpose(0, 1).flatten(1, 2)[:, :T].unflatten(0, (B, H)), states[-1].unflatten(0, (B, H))


@operator("regard::chunk_states")
def chunk_states(maps: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """Return S_0 = `state` and S_(n+1) = maps_n S_n + added_n, as a tensor (N + 1, M, K, V). `maps` is (N, M, K, K)."""
    states = state.new_empty(maps.shape[0] + 1, *state.shape)
    states[0] = state
    each = states.unbind()
    for n, (matrix, more) in enumerate(zip(maps.unbind(), added.unbind(), strict=True)):
        torch.baddbmm(more, matrix, each[n], out=each[n + 1])
    return states


@chunk_states.register_fake
def _(maps: Tensor, added: Tensor, state: Tensor) -> Tensor:  # noqa: ARG001
    return state.new_empty(maps.shape[0] + 1, *state.shape)


@operator("regard::chunk_states_backward")
def chunk_states_backward(maps: Tensor, direct: Tensor) -> Tensor:
    """Return the gradients of all states, G_N = direct_N and G_n = direct_n + maps_n' G_(n+1).

    `direct_n` is the part of the gradient of state n that does not flow through later states.
    """
    grads = torch.empty_like(direct, memory_format=torch.contiguous_format)
    grads[-1] = direct[-1]
    each, parts, matrices = grads.unbind(), direct.unbind(), maps.unbind()
    for n in range(len(matrices) - 1, -1, -1):
        torch.baddbmm(parts[n], matrices[n].mT, each[n + 1], out=each[n])
    return grads


@chunk_states_backward.register_fake
def _(maps: Tensor, direct: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(direct, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gradients(ctx: Any, direct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    maps, states = ctx.saved_tensors
    grads = chunk_states_backward(maps, direct)
    return grads[1:] @ states[:-1].mT, grads[1:], grads[0]


chunk_states.register_autograd(_gradients, setup_context=_remember)
