import pytest

pytest.importorskip("fastapi")
import torch

from regard.runs.inspect import Attention
from regard.serving.errors import RequestError
from regard.serving.routes import aligned

TOKENS = {"encoder": ("one", "red", "house", "</s>"), "decoder": ("<s>", "ein", "rotes", "Haus")}


def layer(*sources: int) -> torch.Tensor:
    """Return the weights of two heads that agree on one source token for each step of the decoder."""
    return torch.eye(4)[list(sources)].expand(2, -1, -1)


@pytest.mark.parametrize(
    ("layers", "links"),
    [
        ([layer(0, 1, 2, 3)], [0, 1, 2]),
        ([layer(2, 2, 2, 3), layer(0, 1, 2, 3)], [0, 1, 2]),
        ([layer(2, 2, 2, 3), layer(0, 1, 2, 3), layer(1, 0, 0, 0)], [0, 1, 2]),
        ([layer(1, 1, 1, 1)] * 4 + [layer(0, 0, 2, 3), layer(1, 1, 1, 1)], [0, 0, 2]),
    ],
)
def test_alignment_is_that_of_the_layer_that_the_command_align_uses(
    layers: list[torch.Tensor], links: list[int]
) -> None:
    result = aligned(Attention(TOKENS, {"decoder.cross": layers}))
    assert result.pairs == [(source, target) for target, source in enumerate(links)]
    assert (result.source, result.target) == (["one", "red", "house"], ["ein", "rotes", "Haus"])


def test_end_token_of_the_source_is_no_link() -> None:
    weights = torch.tensor([[[0.3, 0.1, 0.0, 0.6]] * 4])
    assert aligned(Attention(TOKENS, {"decoder.cross": [weights]})).pairs == [(0, 0), (0, 1), (0, 2)]


def test_model_without_cross_attention_has_no_alignment() -> None:
    with pytest.raises(RequestError, match="no cross-attention"):
        aligned(Attention(TOKENS, {}))
