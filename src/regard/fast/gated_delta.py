"""The gated delta rule in chunks of tokens: matrix products within a chunk, and a loop over the chunks."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from regard.nn.branches.gated_delta import GatedDeltaModule, gated_delta_rule

CHUNK = 64  # tokens


class ChunkedGatedDelta(GatedDeltaModule):
    """The gated delta rule in chunks of 64 tokens (Yang et al. 2024). `gated_delta_rule` computes a single token."""

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

    As there, a_i is the decay and b_i the strength of token i. Let S be the state at the beginning of a chunk. Let D_ij
    be the product of the decays of the tokens after j, up to and including i. Let d_i be the product of the decays of
    all tokens of the chunk up to i. Let u_i = b_i * (v_i - a_i * S_(i-1)' k_i) be the correction by token i. The state
    after token i is S_i = d_i * S + sum_(j <= i) D_ij * k_j u_j', and y_i = S_i' q_i. The corrections therefore solve a
    triangular system:

        u_i + b_i * sum_(j < i) D_ij * (k_i' k_j) * u_j = b_i * (v_i - d_i * S' k_i).

    The system is solved for all chunks at once, before S is known, as u = x - z S. Here x is the solution for the right
    side b_i * v_i, and z is the solution for the right side b_i * d_i * k_i. This is the WY representation of Bischof
    and Van Loan 1987 (Yang et al. 2024).
    """
    T = q.shape[2]
    chunk = min(chunk, T)
    padding = -T % chunk
    # Padding has strength 0 and log_decay 0, so it does not change the state.
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    log_decay, strength = (F.pad(x, (0, padding)).unflatten(2, (-1, chunk)) for x in (log_decay, strength))

    # A product of decays is the exponential of a difference between two sums of `log_decay`. A token that clears the
    # state has log_decay = -inf, and the difference could be inf - inf. So the sums skip the token, and the products
    # across it are set to 0.
    clears = log_decay == -torch.inf
    total, cleared = log_decay.masked_fill(clears, 0.0).cumsum(-1), clears.cumsum(-1)
    place = torch.arange(chunk, device=q.device)
    apart = (place[:, None] < place) | (cleared[..., :, None] != cleared[..., None, :])
    between = (total[..., :, None] - total[..., None, :]).masked_fill(apart, -torch.inf).exp()  # D
    since = total.masked_fill(cleared > 0, -torch.inf).exp()[..., None]  # d
    until = between[..., -1, :, None]  # decay after each token up to the end of the chunk

    weighted = strength[..., None] * k
    system = (weighted @ k.mT) * between  # the solver reads only its part below the diagonal
    right = torch.cat((strength[..., None] * v, weighted * since), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_v, from_state = solved.split_with_sizes((v.shape[-1], k.shape[-1]), -1)
    within, q, k = (q @ k.mT) * between, q * since, k * until

    outputs = []
    for n in range(q.shape[2]):
        correction = from_v[:, :, n] - from_state[:, :, n] @ state
        outputs.append(q[:, :, n] @ state + within[:, :, n] @ correction)
        state = since[:, :, n, -1:] * state + k[:, :, n].mT @ correction
    return torch.cat(outputs, 2)[:, :, :T], state
