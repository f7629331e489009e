"""Measure the doctor: planted faults, degenerate trainings, and false alarms on real text.

python bench/doctor.py faults --seeds 3             # precision and recall of every fault
python bench/doctor.py trainings --seeds 3          # four degenerate trainings and a healthy one
python bench/doctor.py multi30k $REGARD_DATA        # must have neither errors nor warnings
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from regard.doctor import examine_text
from regard.doctor.corpora import BASES
from regard.doctor.degenerate import TRAININGS, examined, named
from regard.doctor.faults import FAULTS, SEVERITIES, Trial, quality, trial


def faults(seeds: int, count: int) -> int:
    """Plant every fault in every base, and print recall and precision. Return 1 for an alarm without a fault."""
    trials = list[Trial]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            trials += [trial(Path(folder), base, None, 0.0, seed, count) for base in BASES]
            for fault in FAULTS:
                for severity in SEVERITIES:
                    trials += [trial(Path(folder), base, fault, severity, seed, count) for base in fault.bases]
    print(f"{'fault':<38}{'found by':<20}{'corpora':>8}{'recall':>8}{'precision':>11}")
    rows = quality(trials)
    for row in rows:
        print(f"{row.fault:<38}{row.check:<20}{row.planted:>8}{row.recall:>8.2f}{row.precision:>11.2f}")
    for each in trials:
        name = "none" if each.fault is None else each.fault.name
        allowed = set() if each.fault is None else {each.fault.check, *each.fault.also}
        missed = each.fault is not None and each.fault.check not in each.alarms
        if missed or each.alarms - allowed:
            extra = ["missed"] if missed else sorted(each.alarms - allowed)
            print(f"- {each.base}, {name}, severity {each.severity:g}, seed {each.seed}: {', '.join(extra)}")
    clean = [bool(each.alarms) for each in trials if each.fault is None]
    print(f"{len(trials)} corpora; alarms in {sum(clean)} of {len(clean)} without a fault")
    return int(any(clean))


def multi30k(data: Path) -> int:
    """Examine Multi30k, raw and tokenized, and print all findings."""
    alarms = 0
    for name, raw in (("raw", "{}.{}.gz"), ("tokenized", "tok/{}.lc.norm.tok.{}.gz")):
        source, target, valid_source, valid_target = (
            data / "multi30k" / raw.format(part, side) for part in ("train", "val") for side in ("en", "de")
        )
        report = examine_text(
            probe=False, source=source, target=target, valid_source=valid_source, valid_target=valid_target
        )
        alarms += len(report.of_level("error")) + len(report.of_level("warning"))
        print(f"{name}: {len(report.of_level('error'))} errors, {len(report.of_level('warning'))} warnings")
        for finding in report.worst_first:
            print(f"  {finding.level:<8}{finding.check}: {finding.message}; {'; '.join(finding.evidence[:1])}")
    return int(alarms > 0)


def trainings(seeds: int) -> int:
    """Train each degenerate model, and print what the doctor finds."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, seeds + 1):
            for training in TRAININGS:
                began = time.perf_counter()
                report = examined(training, Path(folder) / f"{training.name}-{seed}", seed)
                right = named(training, report)
                wrong += not right
                spent = time.perf_counter() - began
                print(f"seed {seed}, {training.name}: {'right' if right else 'WRONG'} ({spent:.0f} s)", flush=True)
                for finding in report.worst_first:
                    print(f"  {finding.level:<8}{finding.check}: {finding.message[:140]}", flush=True)
    print(f"{wrong} of {seeds * len(TRAININGS)} are wrong")
    return int(wrong > 0)


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "trainings", "multi30k"])
    parser.add_argument("data", type=Path, nargs="?", help="the folder of the data sets (REGARD_DATA)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--count", type=int, default=2000, help="number of training examples of a generated corpus")
    options = parser.parse_args()
    if options.what == "multi30k":
        if options.data is None:
            parser.error("multi30k needs the folder of the data sets")
        sys.exit(multi30k(options.data))
    if options.what == "faults":
        sys.exit(faults(options.seeds, options.count))
    sys.exit(trainings(options.seeds))


if __name__ == "__main__":
    main()
