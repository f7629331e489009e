"""torch's adaptive softmax with clusters of 16, 8 and 4 channels."""

import pytest
import torch
from torch import nn

from regard import EncoderDecoder
from regard.models.build import site_of
from regard.nn.init import Normal
from regard.nn.vocab.adaptive import AdaptiveSoftmax, AdaptiveTable
from regard.weights import Input, copy_from, rows, transpose

from .copying import close, randomise

pytestmark = pytest.mark.usefixtures("float64")
D, V, N = 16, 40, 30
SIZES = (6, 10, 24)


def test_adaptive_softmax() -> None:
    theirs = nn.AdaptiveLogSoftmaxWithLoss(D, V, [6, 16], div_value=2.0, head_bias=False)
    randomise(theirs)
    spec = EncoderDecoder(d_model=D, heads=4)
    site = site_of(spec, Normal(), "decoder", causal=True, depths=(1, 1), branches=5)
    head, table = AdaptiveSoftmax(tails=2).build(V, site), AdaptiveTable(SIZES, (1, 2, 4)).build(V, D, site)
    copy_from(head, {"tails": rows("head.weight", SIZES[0])}, theirs, unused=("head.*", "tail.*"))
    mapping: dict[str, Input] = {"clusters.0.weight": rows("head.weight", 0, SIZES[0])}
    for tail in (0, 1):
        mapping[f"clusters.{tail + 1}.weight"] = f"tail.{tail}.1.weight"
        mapping[f"clusters.{tail + 1}.projection"] = transpose(f"tail.{tail}.0.weight")
    copy_from(table, mapping, theirs)

    generator = torch.Generator().manual_seed(3)
    h = torch.randn(N, D, generator=generator).requires_grad_()
    labels = torch.randint(V, (N,), generator=generator)
    close(head.log_probs(h, table), theirs.log_prob(h))
    scored, expected = head.score(h, labels, torch.ones(N), table), theirs(h, labels)
    close(scored.objective, N * expected.loss)
    close(scored.nll, -expected.output.sum())
    our_h, our_tails, our_first, our_tail = torch.autograd.grad(
        scored.objective,
        [
            h,
            head.get_parameter("tails"),
            table.get_parameter("clusters.0.weight"),
            table.get_parameter("clusters.2.projection"),
        ],
    )
    their_h, their_head, their_tail = torch.autograd.grad(
        N * expected.loss, [h, theirs.get_parameter("head.weight"), theirs.get_parameter("tail.1.0.weight")]
    )
    close(our_h, their_h)
    close(torch.cat((our_first, our_tails)), their_head)
    close(our_tail, their_tail.T)
