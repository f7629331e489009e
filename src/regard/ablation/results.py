"""Results: one JSON object a run, in its folder and in results.jsonl, found by the hash of what was run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]
DONE, DIVERGED, FAILED = "done", "diverged", "failed"


class Results:
    """All results of a folder by hash. What failed for another reason than its training is tried again."""

    def __init__(self, folder: Path, metric: str = "loss", texts: bool = False) -> None:
        """A run that is done and lacks the metric, or the translations, that are wanted now is not done."""
        self.folder, self.path, self.metric, self.texts = folder, folder / "results.jsonl", metric, texts
        self.found: dict[str, Result] = {}
        self.listed: set[str] = set()
        for result in self._lines():
            self._take(result)
            self.listed.add(result["hash"])
        for path in sorted(folder.glob("runs/*/result.json")):
            result = _read(path.read_bytes())
            if result is not None and not self.finished(result["hash"]):  # killed before it was listed
                self.add(result)

    def _lines(self) -> Iterator[Result]:
        if not self.path.exists():
            return
        whole, end, cut = self.path.read_bytes().rpartition(b"\n")
        if cut:  # a line that was being written when its writer was killed
            os.truncate(self.path, len(whole + end))
        # A line ends at a line feed and nowhere else: translations may hold any other character that ends one.
        for line in whole.split(b"\n"):
            result = _read(line)
            if result is not None:
                yield result

    def _take(self, result: Result) -> None:
        before = self.found.get(result["hash"])
        if before is None or before["status"] == FAILED or not self._measured(before):
            self.found[result["hash"]] = result

    def _measured(self, result: Result) -> bool:
        return result["status"] != DONE or (self.metric in result["scores"] and (not self.texts or "said" in result))

    def add(self, result: Result) -> None:
        """Take a new result, and append it to the list."""
        self._take(result)
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.listed.add(result["hash"])

    def get(self, hash_: str) -> Result | None:
        """The result of a run, if there is one."""
        return self.found.get(hash_)

    def finished(self, hash_: str) -> bool:
        """Whether a run need not be made again."""
        result = self.found.get(hash_)
        return result is not None and result["status"] in (DONE, DIVERGED) and self._measured(result)


NEEDED = {"loss", "scores", "early", "curve", "steps", "steps_per_second", "device"}


def _read(line: bytes) -> Result | None:
    """A result, or None for what is none: a list may come from anywhere."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("hash"), str):
        return None
    if value.get("status") == DONE:
        return value if value.keys() >= NEEDED else None
    return value if value.get("status") in (DIVERGED, FAILED) and "error" in value else None
