"""The peers of `regard bench` that `make test-oracles` installs have our parameter count, and their loss falls."""

import pytest
import torch

from regard.bench.peers import PEERS
from regard.bench.peers.base import count
from regard.bench.shapes import SHAPES, padded, sentences
from regard.models.build import build

pytestmark = pytest.mark.oracle
TINY = SHAPES["tiny"]


@pytest.mark.parametrize("name", ["fairseq", "joeynmt"])
def test_peer_has_our_size_and_its_loss_falls(name: str) -> None:
    torch.manual_seed(0)
    ours = build(TINY.spec(0.1), seed=1)
    training_model = next(peer for peer in PEERS if peer.name == name).code().training_model(TINY, 0.1, ours)
    assert count(training_model.model) == count(ours)
    inputs = [training_model.prepare(batch) for batch in padded(sentences(TINY, 100, seed=0), 64, seed=0, most=3)]
    optimizer = torch.optim.AdamW(training_model.model.parameters(), lr=1e-2)
    losses = []
    for n in range(30):
        loss = training_model.loss(inputs[n % 3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.3, abs=3.0)  # log 200, for its initial weights
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
