"""A stored loss curve, which only changes that are meant to alter numbers may alter."""

import torch

from regard import build
from regard.testing import tiny
from tests.learning import Learned

CURVE = [
    3.5709302892,
    3.2944638114,
    3.0765456956,
    2.7829758205,
    2.6279449425,
    2.4326739270,
    2.2890404570,
    2.1151588032,
    1.9612360281,
    1.7757941211,
    1.5679541874,
    1.3434223996,
]


def losses() -> list[float]:
    """Twelve steps of SGD with momentum on one batch, in float64, without dropout."""
    spec = tiny.encoder_decoder()
    model = build(spec, seed=7).double().eval()
    batch = tiny.collate(spec, tiny.examples(spec, 6, seed=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    curve = []
    for _ in range(12):
        total, tokens, _, _ = model.loss(batch)
        curve.append((total / tokens).item())
        optimizer.zero_grad()
        (total / tokens).backward()
        optimizer.step()
    return curve


def test_the_curve_is_the_stored_one(learned: Learned) -> None:
    farthest = max(abs(loss - stored) for loss, stored in zip(losses(), CURVE, strict=True))
    learned("largest difference of losses", farthest, below=5e-7, broken=1e-6)  # in float32
    assert CURVE[-1] < CURVE[0] - 0.5
