"""The gated delta rule: linear attention whose state is a matrix per head, corrected and read at every token."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.nn.attention import cached, merge_heads, repeat_heads, split_heads
from regard.nn.branches.base import BranchSpec
from regard.nn.cache import ConvolutionCache, RecurrentState, Rows
from regard.nn.causal_convolution import KernelExtent, convolve, other_segments, pad_stream
from regard.nn.checks import MOST_CHANNELS, MOST_HEADS, MOST_TAPS, check_count
from regard.nn.core import Branch, Role, Site
from regard.nn.mask import Context, View
from regard.nn.norm import Norm
from regard.nn.precision import full_precision, widen
from regard.nn.rms_norm import RMSNorm

RATES = (0.01, 16.0)  # range of the initial decay rates exp(A) of the heads
STEPS = (0.001, 0.1)  # range of the initial step sizes softplus(c) of the heads
EPSILON = 1e-6  # added to the squared length of a query or key


@dataclass(frozen=True, slots=True)
class GatedDelta(BranchSpec):
    """Gated delta rule (Yang et al. 2024, Gated DeltaNet): linear attention with a matrix S per head as its state.

    The state decays by the factor a_t, predicts v_t from k_t, and is corrected by a fraction b_t of the error:

        S_t = a_t * S_(t-1) + b_t * k_t (v_t - a_t * S_(t-1)' k_t)'
        y_t = norm(S_t' q_t / sqrt(d_head)) * silu(x_t W_z).

    The output is concat_h(y) W_o. q, k and v are silu(conv(x W)), with a causal depthwise convolution of `kernel_size`
    tokens, and q and k are then scaled to length 1. For each head, b_t = sigmoid(x_t W_b) and a_t = exp(-exp(A) *
    softplus(x_t W_a + c)) with learned A and c. If `key_heads` is below `heads`, several heads
    share a query and a key. All details are as in Qwen3-Next.

    Time is linear in the number of tokens, and the decoding state has a constant size. Tokens are processed from left
    to right, even in an encoder. The position scheme of the stack is ignored.
    """

    kind = "gated_delta"
    ordered = True
    heads: int | None = None  # None: as in the model, also for `d_head` and `d_value`
    key_heads: int | None = None  # None: heads
    d_head: int | None = None  # width of a query and a key
    d_value: int | None = None
    kernel_size: int = 4
    norm: Norm = RMSNorm()  # of the output of each head
    bias: bool | None = None  # None: the default of the model's linear layers

    def check(self) -> None:
        for name, most in (
            ("heads", MOST_HEADS),
            ("key_heads", MOST_HEADS),
            ("d_head", MOST_CHANNELS),
            ("d_value", MOST_CHANNELS),
        ):
            check_count(name, getattr(self, name), most)
        check_count("kernel_size", self.kernel_size, MOST_TAPS, least=2)

    def build(self, site: Site) -> Branch:
        heads = self.heads or site.heads
        key_heads = self.key_heads or heads
        site.require(
            heads % key_heads == 0, "key_heads", f"{key_heads} key heads do not divide {heads} heads; choose a divisor"
        )
        widths = {"d_head": self.d_head or site.d_head, "d_value": self.d_value or site.d_value}
        return GatedDeltaModule(self, site.inside("", heads=heads, **widths), key_heads)


def gated_delta_rule(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H T K"],
    v: Float[Tensor, "B H T V"],
    log_decay: Float[Tensor, "B H T"],
    strength: Float[Tensor, "B H T"],
    state: Float[Tensor, "B H K V"],
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H K V"]]:
    """Return y_t = S_t' q_t for every token t, and the last state S_T.

    S_t = a_t * S_(t-1) + b_t * k_t (v_t - a_t * S_(t-1)' k_t)', where a = exp(log_decay), b = `strength`, and S_0 =
    `state`. A `log_decay` of -inf clears the state. A token with log_decay = strength = 0 leaves the state unchanged.
    `regard.fast` computes the same result in chunks of tokens.
    """
    outputs = []
    for t in range(q.shape[2]):
        here = slice(t, t + 1)
        state = log_decay[:, :, here, None].exp() * state
        error = v[:, :, here] - k[:, :, here] @ state
        state = state + k[:, :, here].mT @ (strength[:, :, here, None] * error)
        outputs.append(q[:, :, here] @ state)
    return torch.cat(outputs, 2), state


class GatedDeltaModule(Branch):
    """The gated delta rule. The rows of `input.weight` are those of W_q, W_k, W_v, W_z, W_b and W_a, in this order."""

    rule = staticmethod(gated_delta_rule)  # regard.fast installs a faster implementation here

    def __init__(self, spec: GatedDelta, site: Site, key_heads: int) -> None:
        super().__init__()
        H, G, K, V = site.heads, key_heads, site.d_head, site.d_value
        self.heads, self.key_heads, self.d_head, self.d_value = H, G, K, V
        widths: dict[Role, int] = {"query": G * K, "key": G * K, "value": H * V, "gate": H * V, "other": 2 * H}
        self.input = site.linear(site.d_model, widths, bias=spec.bias)
        self.extent = KernelExtent(spec.kernel_size - 1, 0)  # causal in every stack
        self.filters = site.parameter(2 * G * K + H * V, spec.kernel_size, role="other")
        self.log_rate = nn.Parameter(torch.empty(H).uniform_(*RATES).log())  # A
        steps = torch.empty(H).uniform_(math.log(STEPS[0]), math.log(STEPS[1])).exp()
        self.step_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())  # c, the inverse of softplus
        self.norm = spec.norm.build(site.inside("norm"), V)
        self.output = site.linear(H * V, {"attend_out": site.d_model}, bias=spec.bias)
        with torch.no_grad():  # as in torch's convolutions: with smaller filters, `norm` would divide by its epsilon
            self.filters.uniform_(-(spec.kernel_size**-0.5), spec.kernel_size**-0.5)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        ctx: Context,
        state: tuple[RecurrentState, ConvolutionCache] | None = None,
    ) -> Float[Tensor, "B T D"]:
        recurrent, cache = (None, None) if state is None else state
        H, G, K, V = self.heads, self.key_heads, self.d_head, self.d_value
        qkv, z, b, a = self.input(x).split_with_sizes((2 * G * K + H * V, H * V, H, H), -1)
        q, k, v = F.silu(self.convolution(qkv, ctx.own, cache)).split_with_sizes((G * K, G * K, H * V), -1)
        with full_precision(x.device):  # rounding errors would accumulate in the state
            q, k, v = split_heads(widen(q), G), split_heads(widen(k), G), split_heads(widen(v), H)
            q, k = repeat_heads(unit(q), H) * K**-0.5, repeat_heads(unit(k), H)
            log_decay = -widen(self.log_rate).exp() * F.softplus(widen(a) + widen(self.step_bias))
            log_decay, strength = log_decay.transpose(1, 2), widen(b).sigmoid().transpose(1, 2)
            if recurrent is None:
                starts = text_starts(ctx.own)
                if starts is not None:
                    log_decay = log_decay.masked_fill(starts[:, None], -torch.inf)
                y, _ = self.rule(q, k, v, log_decay, strength, v.new_zeros(v.shape[0], H, K, V))
            else:
                if recurrent.rows.real is not None:  # padding neither decays nor corrects the state
                    padding = recurrent.rows.real[:, None] <= torch.arange(x.shape[1], device=x.device)
                    log_decay, strength = (gate.masked_fill(padding[:, None], 0.0) for gate in (log_decay, strength))
                y, last = self.rule(q, k, v, log_decay, strength, recurrent.parts[0])
                recurrent.write((last,))
            y = self.norm(y.to(self.log_rate.dtype))
        return self.output(merge_heads(y).type_as(z) * F.silu(z))

    def convolution(
        self, x: Float[Tensor, "B T C"], view: View, cache: ConvolutionCache | None
    ) -> Float[Tensor, "B T C"]:
        """Return the causal depthwise convolution of x, separately for each text of a packed batch row."""
        if cache is None:
            return convolve(pad_stream(x, self.extent, view), self.filters.T, other_segments(self.extent, view))
        windows = cache.unfold(x, cache.rows.real).unflatten(-1, (-1, x.shape[2]))
        return (windows * self.filters.T).sum(-2)

    def start(self, rows: Rows, ctx: Context) -> tuple[RecurrentState, ConvolutionCache]:  # noqa: ARG002
        shape = (rows.lengths.shape[0], self.heads, self.d_head, self.d_value)
        zeros = widen(self.log_rate.detach()).new_zeros(shape)
        return RecurrentState(rows, (zeros,)), ConvolutionCache(rows, self.extent.left, self.extent.dilation)


def unit(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T K"]:
    """Return x / sqrt(|x|^2 + EPSILON), which has a length of about 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)


def text_starts(view: View) -> Bool[Tensor, "B T"] | None:
    """Return a mask of the tokens that begin the second or a later text of a row, or None if rows are not packed."""
    seg = view.mask.q_seg
    if not view.mask.packed or seg is None:
        return None
    return cached(view.shared, "text_starts", lambda: F.pad(seg[:, 1:] != seg[:, :-1], (1, 0)))
