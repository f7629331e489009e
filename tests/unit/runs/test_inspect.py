import torch

from regard.runs.inspect import Attention


def test_mixtures_of_tokens_are_numbered() -> None:
    """The keys of a Linformer are not the tokens of the text, even if there are as many."""
    tokens = {"encoder": ("left", "right")}
    weights = {"encoder.self": [torch.eye(2)[None]], "encoder.mixtures": [torch.rand(1, 2, 3), torch.eye(2)[None]]}
    attention = Attention(tokens, weights)
    assert attention.draw("encoder.self").splitlines()[0].split() == ["left", "right"]
    assert attention.draw("encoder.mixtures").splitlines()[0].split() == ["1", "2"]
    assert attention.draw("encoder.mixtures", layer=0).splitlines()[0].split() == ["1", "2", "3"]
