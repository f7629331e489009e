import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import SpecError
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.core import Site
from regard.nn.embedding import Sinusoidal
from regard.nn.mask import Context, Mask, View
from regard.nn.position.additive import Injected, Learned

MakeSite = Callable[..., Site]
CPU = torch.device("cpu")


class TestSinusoidal:
    @pytest.mark.parametrize("start", [0, 1])
    @pytest.mark.parametrize("denominator", ["width", "span"])
    @pytest.mark.parametrize("layout", ["interleaved", "halves"])
    @pytest.mark.parametrize("offset", [0, 2])
    def test_by_formula(self, start: Any, denominator: Any, layout: Any, offset: int, site: MakeSite) -> None:
        d, base = 12, 500.0
        spec = Sinusoidal(base, start, denominator, layout, offset)
        y = spec.build(site(), d)(torch.tensor([[0, 3, 7]]), 8)
        for t, position in enumerate((0, 3, 7)):
            for k in range(d // 2):
                share = (k + start) / (d / 2 if denominator == "width" else d / 2 - 1)
                angle = (position + offset) * base**-share
                sine, cosine = (2 * k, 2 * k + 1) if layout == "interleaved" else (k, k + d // 2)
                assert y[0, t, sine].item() == pytest.approx(math.sin(angle), abs=1e-12)
                assert y[0, t, cosine].item() == pytest.approx(math.cos(angle), abs=1e-12)

    def test_the_conventions_in_use(self) -> None:
        """C60, at d = 512: the paper's, the lectures' (k from 1), tensor2tensor's (both ends exact)."""
        ends = {
            (0, "width"): (1.0, 1.037e-4),
            (1, "width"): (0.9647, 1e-4),
            (0, "span"): (1.0, 1e-4),
        }
        for (start, denominator), (first, last) in ends.items():
            w = Sinusoidal(start=start, denominator=denominator).frequencies(512)  # type: ignore[reportArgumentType]
            assert w.shape == (256,)
            assert w[0].item() == pytest.approx(first, abs=1e-4)
            assert w[-1].item() == pytest.approx(last, rel=1e-3)

    def test_the_conventions_differ(self) -> None:
        paper, lectures = Sinusoidal().table(128, 512), Sinusoidal(start=1).table(128, 512)
        assert 1.4 < (paper - lectures).abs().max().item() < 2.0

    def test_layouts_are_a_permutation_of_channels(self) -> None:
        mixed, halves = Sinusoidal().table(9, 8), Sinusoidal(layout="halves").table(9, 8)
        assert torch.equal(mixed[:, 0::2], halves[:, :4])
        assert torch.equal(mixed[:, 1::2], halves[:, 4:])

    def test_a_shift_is_a_rotation(self) -> None:
        """C56: p_{i + k} = R_k p_i, where R_k turns each pair by k w."""
        p, w = Sinusoidal().table(200, 64), Sinusoidal().frequencies(64)
        for k in (1, 5, 50):
            turns = [(math.cos(k * f), math.sin(k * f)) for f in w.tolist()]
            R = torch.block_diag(*[torch.tensor([[cos, sin], [-sin, cos]]) for cos, sin in turns])
            torch.testing.assert_close(R @ R.T, torch.eye(64))
            torch.testing.assert_close(p[k:], p[:-k] @ R.T, rtol=0, atol=1e-10)

    def test_inner_products_depend_on_distance_only_without_projections(self) -> None:
        """C57: p_i . p_j is Toeplitz; after W_q, W_k it is not."""
        p = Sinusoidal().table(60, 64)

        def spread_along_diagonals(gram: torch.Tensor) -> float:
            return max((gram.diagonal(d).max() - gram.diagonal(d).min()).item() for d in range(-59, 60))

        assert spread_along_diagonals(p @ p.T) < 1e-9
        assert spread_along_diagonals((p @ torch.randn(64, 64)) @ (p @ torch.randn(64, 64)).T) > 1e-2

    def test_beyond_the_stored_table(self, site: MakeSite) -> None:
        module = Sinusoidal().build(site(), 12)
        far = module(torch.tensor([[5000]]), 5001)
        expected = [wave(5000 * 10000 ** (-2 * k / 12)) for k in range(6) for wave in (math.sin, math.cos)]
        assert far[0, 0].tolist() == pytest.approx(expected, abs=1e-9)
        assert module.table.shape == (2048, 12)  # no forward pass mutates a module

    def test_only_the_given_positions_are_computed(self, site: MakeSite) -> None:
        """A table up to the last position would have 96 gigabytes."""
        module = Sinusoidal().build(site(), 12)
        assert module(torch.tensor([[10**9]]), 10**9 + 1).shape == (1, 1, 12)

    def test_far_positions_in_float32(self, site: MakeSite) -> None:
        """A float32 product of position and frequency would be off by 1e-4 here."""
        torch.set_default_dtype(torch.float32)
        y = Sinusoidal().build(site(), 12)(torch.tensor([[2000]]), 2048)
        exact = [wave(2000 * 10000 ** (-2 * k / 12)) for k in range(6) for wave in (math.sin, math.cos)]
        assert y.dtype == torch.float32
        assert y[0, 0].tolist() == pytest.approx(exact, abs=1e-7)

    def test_has_no_parameters_and_no_state(self, site: MakeSite) -> None:
        module = Sinusoidal().build(site(), 12)
        assert not list(module.parameters())
        assert not module.state_dict()

    def test_an_odd_width_is_refused(self, site: MakeSite) -> None:
        with pytest.raises(SpecError, match=r"^input\.position\.kind: .* even width, not 7"):
            Sinusoidal().build(site(path="input.position"), 7)


class TestLearned:
    def test_is_a_lookup(self, site: MakeSite) -> None:
        module = Learned(5).build(site(), 6)
        table = module.weight
        assert isinstance(table, nn.Parameter)
        assert table.shape == (5, 6)
        y = module(torch.tensor([[0, 4], [2, 2]]), 5)
        assert torch.equal(y, torch.stack([table[[0, 4]], table[[2, 2]]]))

    def test_a_longer_sequence_is_refused(self, site: MakeSite) -> None:
        """C59."""
        module = Learned(5).build(site(path="input.position"), 6)
        with pytest.raises(SpecError, match=r"^input\.position\.max_len: a sequence of 6 .* the 5 learned positions"):
            module(torch.arange(6)[None], 6)

    def test_at_least_one_position(self) -> None:
        with pytest.raises(SpecError, match=r"^max_len: must be at least 1, not 0"):
            Learned(0)


class TestInjected:
    """C61: q + p_i, k + p_j, v + p_j."""

    def test_adds_the_same_vectors_to_queries_keys_and_values(self, site: MakeSite) -> None:
        terms = Injected(Learned(9)).build(site())(View(Mask(start=2), 3, 5, CPU))
        assert terms.offset is not None
        assert terms.offset.shape == (1, 3, 12)
        assert (terms.bias, terms.rotation, terms.content, terms.context) == (None, None, None, None)

    def test_equals_adding_to_the_input_when_p_is_projected_first(self, site: MakeSite) -> None:
        """With one matrix W for q, k and v: (x + p) W = x W + p W, so a table that holds p W gives the same output."""
        spec = SelfAttention(position=Injected(Learned(6)))
        branch = spec.build(site())
        without_position = SelfAttention().build(site())
        W, p, x = torch.randn(12, 12), torch.randn(6, 12), torch.randn(2, 6, 12)
        with torch.no_grad():
            branch.qkv.weight.copy_(torch.cat((W, W, W)))  # type: ignore[reportCallIssue]
            branch.position.table.weight.copy_(p @ W.T)  # type: ignore[reportCallIssue]
            without_position.load_state_dict(branch.state_dict(), strict=False)
        ctx = Context(View(Mask(causal=True), 6, 6, CPU))
        torch.testing.assert_close(branch(x, ctx), without_position(x + p, ctx), rtol=0, atol=1e-12)
        assert (without_position(x, ctx) - without_position(x + p, ctx)).abs().max() > 1e-2

    def test_keys_and_values_of_unequal_width_are_refused(self, site: MakeSite) -> None:
        with pytest.raises(SpecError, match=r"^decoder\.position\.kind: .* d_head is 4 and d_value 5"):
            Injected().build(site(path="decoder.position", d_value=5))
