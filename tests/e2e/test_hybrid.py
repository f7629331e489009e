"""The preset `hybrid` (gated delta rule and attention) with the same commands as every other model."""

from pathlib import Path

from .conftest import regard, write

TINY = (
    "--set", "model.d_model=32", "--set", "model.heads=2", "--set", "model.dropout=0.0",
    "--set", "model.decoder.depth=4",  # three gated delta layers and one of attention
    *(word for i in range(4) for word in ("--set", f"model.decoder.pattern[{i}].branches[1].d_hidden=48")),
    "--set", "data.tokenizer=characters", "--set", "data.batching.tokens=512", "--set", "data.batching.length=128",
    "--set", "train.optimizer.learning_rate=1e-2", "--set", "train.steps=40", "--set", "train.validate_every=40",
    "--set", "train.average=1", "--set", "train.decode=1", "--device", "cpu", "--threads", "1",
)  # fmt: skip


def test_hybrid_trains_on_a_text_and_continues_it(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    text = write(tmp_path / "text", ["abcdefgh"] * 150)
    result = regard("train", "--text", text, "--preset", "hybrid", "--out", out, *TINY)
    assert result.returncode == 0, result.stderr
    assert (
        regard("generate", out, "--prompt", "abc", "--beam", "1", "--max-len", "15").stdout == "abcdefgh\nabcdefgh\n\n"
    )
