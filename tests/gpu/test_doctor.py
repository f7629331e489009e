"""The doctor's probe on a GPU: it finds that the worst batch does not fit before training runs out of memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.doctor.probe import probe
from regard.errors import OutOfMemoryError
from regard.runs.request import request_from_options
from regard.runs.train import train

LONG = 5000  # words of the planted line
SETTINGS = ("data.tokenizer.vocab=270", "data.max_len=16000", "data.held_out=0", "data.batching=buckets")


@pytest.fixture
def text(tmp_path: Path) -> dict[str, Any]:
    pairs = [(f"one two {i}", f"eins zwei {i}") for i in range(2000)]
    pairs[700] = (" ".join(["one"] * LONG), " ".join(["eins"] * LONG))
    for name, side in (("en", 0), ("de", 1)):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    return {"source": tmp_path / "en", "target": tmp_path / "de"}


@pytest.mark.gpu
def test_training_with_the_largest_budget_of_the_probe_has_enough_memory(text: dict[str, Any], tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 6e9 / total))  # a small GPU, so that the limit is near
    try:
        request = request_from_options(
            source=text["source"], target=text["target"], preset="transformer_base", steps=3, changes=SETTINGS
        )
        found = probe(request, "cuda")
        assert found.longest > LONG
        if found.largest is None:
            assert not found.fits
            with pytest.raises(OutOfMemoryError):
                train(tmp_path / "run", **text, preset="transformer_base", steps=3, changes=SETTINGS, device="cuda")
            return
        changes = [*SETTINGS, f"data.batching.tokens={found.largest}"]
        train(tmp_path / "run", **text, preset="transformer_base", steps=3, changes=changes, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
