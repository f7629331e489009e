"""Recurrent cells that process a whole sequence in one of torch's fused kernels: cuDNN, oneDNN, or a loop in C++."""

import warnings
from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.nn.linear import Projection
from regard.nn.precision import full_precision
from regard.nn.recurrent import CellModule, ElmanModule, GRUModule, LSTMModule, State

CLOSED = 1e4  # added to or subtracted from a gate's logit, so that its sigmoid is exactly 1 or 0 in any precision

# cuDNN requires one contiguous block of weights. Here each weight is a separate parameter, so torch copies the weights
# in every call, which takes as long as reading them.
warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)


class FusedCell(CellModule):
    """Abstract base class of recurrent cells that process several tokens in one kernel."""

    def forward(
        self, x: Float[Tensor, "B T I"], state: State, lengths: Int[Tensor, " B"] | None = None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        if x.shape[1] == 1 or not (isinstance(self.input, Projection) and isinstance(self.hidden, Projection)):
            return super().forward(x, state, lengths)
        maps = (self.input, self.hidden)
        biases = [m.weight.new_zeros(m.weight.shape[0]) if m.bias is None else m.bias for m in maps]
        weights = [*(m.weight for m in maps), *biases]
        precise = weights[0].dtype
        with full_precision(x.device):  # cuDNN has no bfloat16 here
            y, last = self.fused(x.to(precise), tuple(part.to(precise) for part in state), weights, lengths)
        return y.to(x.dtype), last

    @abstractmethod
    def fused(
        self, x: Float[Tensor, "B T I"], state: State, weights: list[Tensor], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        """Return h after every token, and the final state. `weights` are W_x, W_h and their biases."""


class FusedElman(FusedCell, ElmanModule):
    """An Elman cell computed by `torch.rnn_tanh` or `torch.rnn_relu`."""

    def fused(
        self, x: Float[Tensor, "B T I"], state: State, weights: list[Tensor], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        kernel = torch.rnn_tanh if self.activate is torch.tanh else torch.rnn_relu
        y, _ = kernel(x, state[0][None], weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
        return y, (last_real(y, lengths),)


class FusedGRU(FusedCell, GRUModule):
    """A GRU cell computed by `torch.gru`."""

    def fused(
        self, x: Float[Tensor, "B T I"], state: State, weights: list[Tensor], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        y, _ = torch.gru(x, state[0][None], weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
        return y, (last_real(y, lengths),)


class FusedLSTM(FusedCell, LSTMModule):
    """An LSTM cell computed by `torch.lstm`."""

    def fused(
        self, x: Float[Tensor, "B T I"], state: State, weights: list[Tensor], lengths: Int[Tensor, " B"] | None
    ) -> tuple[Float[Tensor, "B T H"], State]:
        if lengths is not None:
            # The kernel returns c only after the last column. An additional input channel is 1 at padding. There, it
            # closes the input gate and opens the forget gate, so that c does not change.
            padding = lengths[:, None] <= torch.arange(x.shape[1], device=x.device)
            x = torch.cat((x, padding[:, :, None].to(x.dtype)), -1)
            gates = x.new_tensor([-CLOSED, CLOSED, 0.0, 0.0]).repeat_interleave(self.d_hidden)
            weights = [torch.cat((weights[0], gates[:, None]), 1), *weights[1:]]
        h, c = state
        y, _, last = torch.lstm(x, (h[None], c[None]), weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
        return y, (last_real(y, lengths), last[0])


def last_real(y: Float[Tensor, "B T H"], lengths: Int[Tensor, " B"] | None) -> Float[Tensor, "B H"]:
    """Return the output y of each row at its last real token. `lengths` are the row lengths without padding."""
    if lengths is None:
        return y[:, -1]
    return y.gather(1, (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, y.shape[2])).squeeze(1)
