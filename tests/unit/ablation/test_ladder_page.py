"""docs/results/ladder.py: the page and the JSON lines that it writes."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from regard.ablation.ladder import RUNGS, Ladder, select_rungs
from regard.recipe.recipe import load_model

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("ladder_script", ROOT / "docs" / "results" / "ladder.py")
assert SPEC is not None
assert SPEC.loader is not None
script: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_page_states_the_settings_of_the_runs(tmp_path: Path) -> None:
    ladder = Ladder([], [], "bleu", 3, None, 60.0, 14, ["NVIDIA H200"], complete=True)
    page = script.page(ladder)
    assert page.startswith("# The ladder on Multi30k: the Transformer and its predecessors\n")
    assert "60 seconds of training per run on NVIDIA H200, 3 seeds" in page
    assert page.count("# The ladder") == 1
    (tmp_path / "results.jsonl").write_text('{"hash": "a", "status": "done", "said": ["x"]}\n')
    run, whole = map(json.loads, script.lines(tmp_path, ladder))
    assert run == {"hash": "a", "status": "done"}
    assert whole["ladder"]["seeds"] == 3


def test_the_rungs_and_the_recipe_exist() -> None:
    assert select_rungs(script.RUNGS)[0] == list(RUNGS[:4])
    assert load_model(str(script.RECIPE))[1].kind == "encoder_decoder"
