"""Rows 40 to 46 of Narang et al. 2021: Synthesizers, whose attention scores replace q.k or are added to it."""

from dataclasses import replace
from typing import Any, Literal

from regard.errors import SpecError
from regard.nn.branches.self_attention import SelfAttention
from regard.nn.branches.synthesizer import (
    DenseScores,
    FactorisedScores,
    RandomScores,
    Scores,
    Synthesizer,
    TwoLayerScores,
    check_position,
)
from regard.nn.norm import NoNorm
from regard.nn.position.base import AtHeads
from regard.nn.stacks.base import StackSpec
from regard.nn.stacks.funnel import Funnel
from regard.nn.stacks.plain import Plain
from regard.nn.stacks.universal import Universal, UniversalACT
from regard.tree import swap, walk
from regard.variants.base import Edit, Variant

Mix = Literal["alone", "plus", "alpha"]
TAY = "Tay et al. 2021"


def as_run(scores: Scores, mix: Mix) -> Edit:
    """Return a function that replaces self-attention by a Synthesizer as in the code of Narang et al. 2021.

    The Synthesizer has 2/3 as many heads, each twice as wide: 8 x 128 instead of 12 x 64. The stack's position biases
    get the same number of heads.
    """

    def edit(m: Any) -> Any:
        def with_fewer_heads(stack: StackSpec) -> StackSpec:
            attentions = any(isinstance(part, SelfAttention) for part in walk(stack))
            if not attentions or not isinstance(stack, Funnel | Plain | Universal | UniversalACT):
                return stack
            others = stack.positions if stack.position is None else (AtHeads(m.heads, stack.position), *stack.positions)
            for other in others:
                check_position(other.position)
            return replace(stack, position=None, positions=tuple(AtHeads(fewer(o.heads), o.position) for o in others))

        def synthesized(attention: SelfAttention) -> Synthesizer:
            d_head = attention.d_head or (m.d_model // attention.heads if attention.heads else m.d_head)
            return replace(
                _synthesizer(attention, scores, mix),
                heads=fewer(attention.heads or m.heads),
                d_head=2 * (d_head or m.d_model // m.heads),
            )

        return swap(swap(m, StackSpec, with_fewer_heads), SelfAttention, synthesized)

    return edit


def fewer(heads: int) -> int:
    """Return two thirds of the number of heads, rounded, but at least one."""
    return max(1, round(heads * 2 / 3))


def of_paper(scores: Scores) -> Edit:
    """Return a function that replaces self-attention by a Synthesizer with equally many heads (Tay et al. 2021)."""
    return lambda m: swap(m, SelfAttention, lambda attention: _synthesizer(attention, scores, "alone"))


def _synthesizer(attention: SelfAttention, scores: Scores, mix: Mix) -> Synthesizer:
    if attention.kv_heads or attention.d_value or not attention.output or attention.query_key_norm != NoNorm():
        raise SpecError(
            "",
            "a synthesizer has no shared key-value heads, separate value width or query-key norm, and always has W_o; "
            "choose a base whose attention has the default settings",
        )
    return Synthesizer(
        scores,
        mix,
        heads=attention.heads,
        d_head=attention.d_head,
        scale=attention.scale,
        bias=attention.bias,
        position=attention.position,
    )


VARIANTS = {
    "synth_dense": Variant(
        as_run(DenseScores(), "alone"), "attention", "scores from a linear map of the query to positions", TAY
    ),
    "synth_dense_plus": Variant(
        as_run(DenseScores(), "plus"), "attention", "scores from a linear map of the query, added to q.k", TAY
    ),
    "synth_dense_plus_alpha": Variant(
        as_run(DenseScores(), "alpha"),
        "attention",
        "learned mixture of q.k and scores from a linear map of the query",
        TAY,
    ),
    "synth_factorised": Variant(
        as_run(FactorisedScores(), "alone"), "attention", "learned scores of rank 16, independent of the tokens", TAY
    ),
    "synth_random": Variant(as_run(RandomScores(), "alone"), "attention", "a learned score per pair of positions", TAY),
    "synth_random_plus": Variant(
        as_run(RandomScores(), "plus"), "attention", "a learned score per pair of positions, added to q.k", TAY
    ),
    "synth_random_plus_alpha": Variant(
        as_run(RandomScores(), "alpha"),
        "attention",
        "learned mixture of q.k and a learned score per pair of positions",
        TAY,
    ),
    "synth_dense_tay": Variant(
        of_paper(TwoLayerScores()), "attention", "scores from two layers per head, as in the paper", TAY
    ),
}
