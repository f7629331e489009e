"""Variants that remove a part: exactly the named part, and nothing else."""

from typing import Any

import pytest
import torch

from regard.batch import translation
from regard.errors import SpecError
from regard.models.build import build, count
from regard.nn.branches.cross_attention import CrossAttention
from regard.nn.branches.feedforward import FeedForward
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.no_residual import NoResidual
from regard.nn.norm import LayerNorm, NoNorm, Norm
from regard.nn.residual import Residual
from regard.presets import preset
from regard.tree import diff, swap, walk
from regard.variants import apply

BASE: Any = preset("transformer_tiny", vocab=20, d_model=16, heads=4, **{"encoder.depth": 1, "decoder.depth": 1})
BATCH = translation([([5, 6, 7, 8], [8, 9, 4]), ([4, 6], [5, 6])])


def same_weights(spec: Any, other: Any) -> tuple[Any, Any]:
    """Build two models in evaluation mode, and copy the weights of the first to the second."""
    first, second = build(spec, seed=1).double().eval(), build(other, seed=2).double().eval()
    second.load_state_dict(first.state_dict())
    return first, second


def test_no_scaling_equals_larger_queries() -> None:
    plain, scaled = same_weights(apply("no_scaling", BASE), BASE)
    with torch.no_grad():
        for name, parameter in scaled.named_parameters():
            if ".qkv." in name:
                parameter[:16].mul_(2.0)  # sqrt(d_head); queries are the first third
            elif ".query." in name:
                parameter.mul_(2.0)
    with torch.no_grad():
        torch.testing.assert_close(plain.log_probs(BATCH), scaled.log_probs(BATCH), rtol=0, atol=1e-9)


def test_one_head_has_as_many_weights_as_all_heads() -> None:
    changed: Any = apply("one_head", BASE)
    assert (changed.heads, changed.d_head) == (1, None)
    assert count(changed) == count(BASE)
    single, several = same_weights(changed, BASE)
    assert not torch.allclose(single.log_probs(BATCH), several.log_probs(BATCH))
    wide: Any = apply("one_head", preset("narang_small"))
    assert (wide.heads, wide.d_head) == (1, 6 * 64)
    own = swap(BASE, SelfAttention, lambda _: SelfAttention(heads=2, d_head=6))
    assert {(part.heads, part.d_head) for part in walk(apply("one_head", own)) if isinstance(part, SelfAttention)} == {
        (1, 12)
    }
    grouped = swap(BASE, CrossAttention, lambda _: CrossAttention(kv_heads=2))
    with pytest.raises(SpecError, match="cannot be combined with one head"):
        apply("one_head", grouped)
    with pytest.raises(SpecError, match="has no heads to merge"):
        apply("one_head", apply("synth_dense", BASE))


@pytest.mark.parametrize("norm", ["pre_norm", "post_norm"])
def test_no_residual_removes_residual_connections(norm: str) -> None:
    base = apply("pre_norm", BASE) if norm == "pre_norm" else BASE
    changed = apply("no_residual", base)
    assert {rule for rule in walk(changed) if isinstance(rule, Residual)} == {NoResidual(LayerNorm())}
    # Without residual connections, zero sublayers make all hidden states equal, and so all predictions.
    model: Any = build(changed, seed=1).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".branches." in name and ".branch." in name:
                parameter.zero_()
        log_probs = model.log_probs(BATCH)[0]
    torch.testing.assert_close(log_probs[0], log_probs[1])


def test_no_norm_removes_all_norms() -> None:
    changed = apply("no_norm", apply("query_key_norm", BASE))
    assert {part for part in walk(changed) if isinstance(part, Norm)} == {NoNorm()}
    assert count(apply("no_norm", BASE)) == count(BASE) - 5 * 2 * 16


def test_no_feed_forward_leaves_only_attention() -> None:
    changed = apply("no_feed_forward", BASE)
    assert not [part for part in walk(changed) if isinstance(part, FeedForward)]
    assert len([part for part in walk(changed) if isinstance(part, SelfAttention | CrossAttention)]) == 3
    assert count(changed) == count(BASE) - 2 * (2 * 16 * 256 + 256 + 16 + 2 * 16)
    uneven = apply("no_feed_forward", preset("sahai"))  # the residual rule of the feed-forward is removed, too
    assert build(uneven, "meta") is not None
    with pytest.raises(SpecError, match="is part of another layer"):
        apply("no_feed_forward", apply("parallel", BASE))


def test_each_variant_changes_one_part() -> None:
    paths = {name: {path for path, _, _ in diff(BASE, apply(name, BASE))} for name in ("no_scaling", "one_head")}
    assert all(path.endswith(".scale") for path in paths["no_scaling"])
    assert len(paths["no_scaling"]) == 3
    assert paths["one_head"] == {"heads"}
