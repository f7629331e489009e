"""The peer of train.py and decode.py: Hugging Face Marian at the small shape, with our weights, and the comparison.

Small is 3 + 3 layers, d 256, 4 heads, hidden 1024, a vocabulary of 10,000 for everything. Sentences are random ids of
log-normal length, 14 on average and at most 150.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch
import transformers
from overhead import VOCAB
from torch import Tensor

import regard
from regard.models.encoder_decoder import EncoderDecoderModel

PAD, BOS, EOS = 0, 1, 2
DEPTH, WIDTH, HEADS, HIDDEN = 3, 256, 4, 1024
hub: Any = transformers  # pyright cannot follow its generated signatures


@dataclass(frozen=True)
class Result:
    """Medians over rounds: tokens per CPU second of each side, and ours / theirs with its interval."""

    what: str
    rounds: int
    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    limit: float

    @property
    def verdict(self) -> str:
        """Whether the interval lies above the limit, below it, or on both sides."""
        return "reached" if self.low >= self.limit else "missed" if self.high < self.limit else "open"


def summarise(what: str, seconds: np.ndarray, tokens: np.ndarray, limit: float) -> Result:
    """The median over rounds of how much faster ours is, and the percentile interval of 2,000 resamples.

    `seconds` is (rounds, 2), ours first; `tokens` is what both made of every round.
    """
    ratios = seconds[:, 1] / seconds[:, 0]
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(0, len(ratios), (2000, len(ratios)))], 1)
    low, high = np.percentile(medians, (2.5, 97.5))
    ours, theirs = np.median(tokens[:, None] / seconds, 0)
    return Result(
        what, len(ratios), float(ours), float(theirs), float(np.median(ratios)), float(low), float(high), limit
    )


def report(results: Iterator[Result], options: argparse.Namespace) -> int:
    """Print every result as it comes, or all as JSON; 1 if one has missed its limit."""
    seen = []
    if not options.json:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"{versions}, 1 thread, {options.rounds} rounds; tokens per CPU second, medians")
        print(f"{'':26}{'regard':>9}{'Marian':>9}{'ratio':>8}{'95 % interval':>17}{'limit':>7}")
    for result in results:
        seen.append(result)
        if not options.json:
            interval = f"{result.low:.3f} .. {result.high:.3f}"
            numbers = f"{result.ours:9.1f}{result.theirs:9.1f}{result.ratio:8.3f}{interval:>17}{result.limit:>7}"
            print(f"{result.what:26}{numbers}  {result.verdict}", flush=True)
    if options.json:
        print(json.dumps([asdict(result) | {"verdict": result.verdict} for result in seen], indent=2))
    return int(any(result.verdict == "missed" for result in seen))


def parser(about: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that both benchmarks have."""
    made = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds, help="at least 10 for a verdict")
    made.add_argument("--json", action="store_true", help="print records instead of a table")
    return made


def pair(smoothing: float, dropout: float) -> tuple[EncoderDecoderModel, Any]:
    """Our model and Marian with the same weights."""
    spec = regard.preset(
        "transformer_small",
        **{"vocab": VOCAB, "dropout": dropout, "head.smoothing": smoothing, "input.position.layout": "halves"},
    )
    ours = cast(EncoderDecoderModel, regard.build(spec, seed=1))
    theirs = marian(dropout)
    # Not strict: they also store positions, which are sinusoids, a bias of the logits, which is 0, and the table again.
    _, unknown = theirs.load_state_dict(renamed(ours), strict=False)
    assert not unknown, unknown
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    return ours, theirs


def marian(dropout: float) -> Any:
    """Hugging Face's encoder-decoder at the same shape."""
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": DEPTH, f"{side}_ffn_dim": HIDDEN, f"{side}_attention_heads": HEADS}
    config = hub.MarianConfig(
        **sides,
        vocab_size=VOCAB,
        d_model=WIDTH,
        max_position_embeddings=256,
        dropout=dropout,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        attn_implementation="sdpa",
    )
    return hub.MarianMTModel(config)


def renamed(ours: EncoderDecoderModel) -> dict[str, Tensor]:
    """Our weights under their names."""
    state = ours.state_dict()
    found = {"model.shared.weight": state["tables.tables.source.weight"]}

    def give(our: str, *names: str) -> None:
        for kind in ("weight", "bias"):
            for name, part in zip(names, state[f"{our}.{kind}"].chunk(len(names)), strict=True):
                found[f"{name}.{kind}"] = part

    for side in ("encoder", "decoder"):
        for i in range(DEPTH):
            our, their = f"{side}.blocks.{i}.branches", f"model.{side}.layers.{i}"
            give(f"{our}.0.branch.qkv", *(f"{their}.self_attn.{x}_proj" for x in "qkv"))
            give(f"{our}.0.branch.output", f"{their}.self_attn.out_proj")
            give(f"{our}.0.norm", f"{their}.self_attn_layer_norm")
            if side == "decoder":
                give(f"{our}.1.branch.query", f"{their}.encoder_attn.q_proj")
                give(f"{our}.1.branch.kv", *(f"{their}.encoder_attn.{x}_proj" for x in "kv"))
                give(f"{our}.1.branch.output", f"{their}.encoder_attn.out_proj")
                give(f"{our}.1.norm", f"{their}.encoder_attn_layer_norm")
            last = 1 if side == "encoder" else 2
            give(f"{our}.{last}.branch.up", f"{their}.fc1")
            give(f"{our}.{last}.branch.down", f"{their}.fc2")
            give(f"{our}.{last}.norm", f"{their}.final_layer_norm")
    return found
