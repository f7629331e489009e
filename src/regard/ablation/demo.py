"""Default text and models of `ablate` and `ladder`: numbers, dates and times, translated from English to German."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.demo.corpus import generate
from regard.files import replace_text
from regard.recipe.recipe import RecipeRequest, request_from_record

PAIRS, HELD_OUT = 20_000, 400
ABLATION_STEPS, LADDER_STEPS = 400, 1800
SMALL: dict[str, Any] = {
    "d_model": 64,
    "heads": 4,
    "encoder.depth": 2,
    "decoder.depth": 2,
    "encoder.pattern[0].branches[1].d_hidden": 256,
    "decoder.pattern[0].branches[2].d_hidden": 256,
}


def ablation(
    text: Path, base: str | None, variants: Sequence[str], changes: Sequence[str], trust_code: bool = False
) -> RecipeRequest:
    """Return the recipe of an ablation. The default is a small version of the base model of Narang et al. 2021."""
    model = {"preset": "narang_base", **SMALL} if base is None else {"preset": base}
    train = _train(ABLATION_STEPS, 5e-3, ABLATION_STEPS // 8)
    return request_from_record(
        {"model": model, "data": _data(text, 1000), "train": train}, changes, variants, trust_code
    )


def ladder(text: Path, base: str | None, changes: Sequence[str], trust_code: bool = False) -> RecipeRequest:
    """Return the recipe of a ladder. The default Transformer is small enough to train on two CPU cores."""
    small: dict[str, Any] = {"d_model": 64, "dropout": 0.0, "head": {"label_smoothing": 0.0}}
    small |= {"encoder": {"depth": 2}, "decoder": {"depth": 2}}
    full = {"preset": "transformer_tiny", "variants": ["pre_norm", "rotary"], **small}
    data = _data(text, 500) | {"max_len": 40}  # an untrained model generates up to the length limit
    train = _train(LADDER_STEPS, 4e-3, 100)
    record = {"model": full if base is None else base, "data": data, "train": train}
    return request_from_record(record, changes, (), trust_code)


def _data(text: Path, tokens: int) -> dict[str, Any]:
    return {
        "train": [{"kind": "tsv", "path": str(text / "train.tsv")}],
        "valid": [{"kind": "tsv", "path": str(text / "valid.tsv")}],
        "tokenizer": {"kind": "bpe", "vocab": 800},
        "batching": {"kind": "buckets", "tokens": tokens},
    }


def _train(steps: int, learning_rate: float, warmup: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "optimizer": {"kind": "adamw", "learning_rate": learning_rate},
        "schedule": {"kind": "linear", "warmup": warmup},
        "decode": HELD_OUT // 2,
    }


def write(text: Path) -> None:
    """Write the corpus to the folder `text`, unless the folder already contains it."""
    if (text / "valid.tsv").exists():
        return
    corpus = generate(PAIRS, held_out=HELD_OUT)
    text.mkdir(parents=True, exist_ok=True)
    for name, examples in (("train", corpus.train), ("valid", corpus.test)):
        lines = "".join(f"{example.source}\t{example.target}\n" for example in examples)
        replace_text(text / f"{name}.tsv", lines)
