"""docs/results/aeslc.py: the e-mails as tab-separated text, the changed recipes and the table of scores."""

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

from regard.runs.request import request_from_options

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("aeslc_script", ROOT / "docs" / "results" / "aeslc.py")
assert SPEC is not None
assert SPEC.loader is not None
script: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)


def test_changed_recipes_are_valid_and_emails_are_in_lower_case(tmp_path: Path) -> None:
    (tmp_path / "aeslc").mkdir()
    for part in ("train", "dev"):
        with gzip.open(tmp_path / "aeslc" / f"{part}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write(json.dumps({"body": "Dear all,\n we\tMET.", "subject": "Meeting"}) + "\n")
    files = script.prepared(tmp_path, tmp_path / "out", cased=False)
    assert files["dev"].read_text(encoding="utf-8") == "dear all, we met.\tmeeting\n"
    cased = script.prepared(tmp_path, tmp_path / "out", cased=True)
    assert cased["dev"].read_text(encoding="utf-8") == "Dear all, we MET.\tMeeting\n"
    for variants, changes in script.CHANGES.values():
        request_from_options(
            recipe=script.RECIPE, tsv=files["train"], valid=files["dev"], variants=variants, changes=changes
        )


def test_table_has_the_mean_of_the_seeds() -> None:
    names = (*script.NAMES, *(f"{name}, stemmed" for name in script.NAMES))
    runs = [
        {"name": "recipe", "scores": dict.fromkeys(script.SEARCHES, dict.fromkeys(names, score))}
        for score in (14.0, 16.0)
    ]
    lines = script.table(runs)
    assert lines[0] == "| run | search | seeds | rouge1 | rouge2 | rougeL | rougeL, stemmed |"
    assert lines[2] == "| recipe | beam 5 | 2 | 15.00 ± 1.41 | 15.00 ± 1.41 | 15.00 ± 1.41 | 15.00 ± 1.41 |"
    assert len(lines) == 2 + len(script.SEARCHES)
