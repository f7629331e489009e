"""Results of training runs: JSON objects in `results.jsonl` and in the folder of each run, keyed by run hash."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]
DONE, DIVERGED, FAILED = "done", "diverged", "failed"
REQUIRED = {"loss", "scores", "early", "curve", "steps", "steps_per_second", "device"}


class Results:
    """All results of training runs in a folder, keyed by run hash (a digest of everything that affects a result).

    A run must be repeated if it failed for a reason other than divergence, if its result lacks `metric`, or if `texts`
    is set and its result lacks the model's outputs.
    """

    def __init__(self, folder: Path, metric: str = "loss", texts: bool = False) -> None:
        self.path, self.metric, self.texts = folder / "results.jsonl", metric, texts
        self.by_hash: dict[str, Result] = {}
        for result in self._lines():
            self._keep(result)
        for path in sorted(folder.glob("runs/*/result.json")):
            result = _parse(path.read_bytes())
            if result is not None and not self.finished(result["hash"]):  # killed before this result was added
                self.add(result)

    def _lines(self) -> Iterator[Result]:
        if not self.path.exists():
            return
        whole, end, cut = self.path.read_bytes().rpartition(b"\n")
        if cut:  # the process was killed while it wrote this line
            os.truncate(self.path, len(whole + end))
        # Not splitlines: translations may contain other line separators.
        yield from filter(None, map(_parse, whole.split(b"\n")))

    def _keep(self, result: Result) -> None:
        before = self.by_hash.get(result["hash"])
        if before is None or before["status"] == FAILED or not self._measured(before):
            self.by_hash[result["hash"]] = result

    def _measured(self, result: Result) -> bool:
        return measured(result, self.metric, self.texts)

    def add(self, result: Result) -> None:
        """Add a new result and append it to `results.jsonl`."""
        self._keep(result)
        with open(self.path, "a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def get(self, hash_: str) -> Result | None:
        return self.by_hash.get(hash_)

    def finished(self, hash_: str) -> bool:
        """Return True if a training run is finished and does not have to be repeated."""
        result = self.by_hash.get(hash_)
        return result is not None and result["status"] in (DONE, DIVERGED) and self._measured(result)


def measured(result: Result, metric: str, texts: bool) -> bool:
    """Return whether a result has the metric and, if `texts` is set, the outputs. Runs that diverged need neither."""
    return result["status"] != DONE or (metric in result["scores"] and (not texts or "said" in result))


def stored(path: Path, metric: str, texts: bool) -> Result | None:
    """Return the result in a file, or None if there is no result or the training run must be repeated."""
    result = _parse(path.read_bytes()) if path.exists() else None
    return result if result is not None and result["status"] != FAILED and measured(result, metric, texts) else None


def _parse(line: bytes) -> Result | None:
    """Return the result on a line of `results.jsonl`, or None if the line is invalid, for example edited by hand."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("hash"), str):
        return None
    if value.get("status") == DONE:
        return value if value.keys() >= REQUIRED else None
    return value if value.get("status") in (DIVERGED, FAILED) and "error" in value else None
