"""Measure the margins between the results of training tests and their thresholds, on different arithmetic.

Training amplifies rounding errors, which depend on the instruction set of the CPU, the libraries and the number of
threads. Every test with a threshold on a trained model (marker `learns`, tests/learning.py) is run with every
instruction set of this CPU, with MKL's portable arithmetic, with one and two threads, and with several seeds. The table
contains the median and the worst value of each quantity, the factor between the worst value and the threshold, and the
value of a model without the tested component. The exit code is 1 if a test fails or a factor is below 3.

    python bench/margins.py --jobs 16 --seeds 5
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
MARGIN = 3.0
ARITHMETIC: dict[str, dict[str, str]] = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "best": {},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
}
THREADS = (1, 2)


@dataclass(frozen=True)
class Setting:
    """The arithmetic, the number of threads and the seed with which the tests are run."""

    arithmetic: str
    threads: int
    seed: int

    def __str__(self) -> str:
        return f"{self.arithmetic}, {self.threads} threads, seed {self.seed}"

    def environment(self, record: Path) -> dict[str, str]:
        chosen = {name: value for name, value in os.environ.items() if name not in {"ATEN_CPU_CAPABILITY", "MKL_CBWR"}}
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"REGARD_MARGINS": str(record), "REGARD_SEED_OFFSET": str(self.seed), "PYTHONPATH": paths}
        return chosen | ARITHMETIC[self.arithmetic] | threads | own


@dataclass(frozen=True)
class Outcome:
    """The measurements of all tests in one setting, and the tests that failed."""

    setting: Setting
    lines: list[dict[str, Any]]
    failed: list[str]


def files() -> list[str]:
    """Return the test files that train models. Other test files may need packages that are not installed."""
    folders = (ROOT / "tests" / name for name in ("unit", "e2e"))
    paths = (path for folder in folders for path in sorted(folder.rglob("test_*.py")))
    return [str(path) for path in paths if re.search(r"\bLearned\b|mark\.learns", path.read_text(encoding="utf-8"))]


def measure(setting: Setting, words: Sequence[str], folder: Path) -> Outcome:
    """Run the tests once in the given setting."""
    name = re.sub(r"\W+", "-", str(setting))
    record = folder / f"{name}.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-m", "learns and not gpu", f"--basetemp={folder / name}", *words],
        cwd=ROOT, env=setting.environment(record), capture_output=True, text=True, check=False,
    )  # fmt: skip
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or not record.exists():
        sys.exit(f"the tests could not be run ({setting}):\n{run.stdout}{run.stderr}")
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").split("\n") if line]
    return Outcome(setting, lines, failed)


def factor(line: dict[str, Any]) -> float:
    """Return the factor by which the value could be worse without crossing the threshold."""
    better, worse = (line["value"], line["threshold"])[:: 1 if line["below"] else -1]
    return worse / better if better > 0 else float("inf")


def report(outcomes: list[Outcome]) -> bool:
    """Print the table. Return True if all margins are wide enough and no test failed."""
    by_threshold: dict[tuple[str, str], list[tuple[float, dict[str, Any], Setting]]] = defaultdict(list)
    for outcome in outcomes:
        for line in outcome.lines:
            name = line["test"].removeprefix("tests/").split("[")[0]
            by_threshold[name, line["quantity"]].append((factor(line), line, outcome.setting))
    print("| test | quantity | threshold | median | worst | margin | without the part | worst in |")
    print("|---|---|---|---|---|---|---|---|")
    wide = True
    for (name, quantity), measured in sorted(by_threshold.items()):
        margin, worst, where = min(measured, key=lambda entry: entry[0])
        wide = wide and margin >= MARGIN
        sign = "<" if worst["below"] else ">"
        middle = median(line["value"] for _, line, _ in measured)
        numbers = f"{sign} {worst['threshold']:g} | {middle:.3g} | {worst['value']:.3g} | {margin:.1f}"
        case = "".join(re.findall(r"\[.*\]$", worst["test"]))
        print(f"| {name} | {quantity} | {numbers} | {worst['broken']:g} | {where} {case} |")
    failures = [(test, outcome.setting) for outcome in outcomes for test in outcome.failed]
    for test, setting in failures:
        print(f"failed: {test} ({setting})")
    print(f"{len(outcomes)} runs of {len(by_threshold)} thresholds; margins below {MARGIN:g} or failures: "
          f"{'none' if wide and not failures else 'see above'}")  # fmt: skip
    return wide and not failures


def main() -> None:
    """Run the tests in all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="number of simultaneous settings")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds per setting")
    parser.add_argument("--arithmetic", nargs="+", choices=ARITHMETIC, default=[*ARITHMETIC], help="instruction sets")
    parser.add_argument("--threads", type=int, nargs="+", default=[*THREADS], help="numbers of threads")
    parser.add_argument("tests", nargs="*", help="test files or node ids (default: all tests that train models)")
    options = parser.parse_args()
    settings = [Setting(*values) for values in product(options.arithmetic, options.threads, range(options.seeds))]
    words = options.tests or files()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda setting: measure(setting, words, Path(folder)), settings):
            outcomes.append(outcome)
            print(f"{len(outcomes)}/{len(settings)} {outcome.setting}: {len(outcome.failed)} failed", file=sys.stderr)
    sys.exit(0 if report(outcomes) else 1)


if __name__ == "__main__":
    main()
