"""Every planted fault is found by its check, and by no other; text without faults gives no alarm."""

import random
from pathlib import Path

import pytest

from regard.doctor.corpora import BASES
from regard.doctor.faults import FAULTS, SEVERITIES, Fault, Quality, Trial, quality, trial


def test_there_are_at_least_fourteen_faults_with_names_of_their_own() -> None:
    assert len(FAULTS) >= 14
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("base", BASES)
def test_text_without_faults_gives_no_alarm(base: str, tmp_path: Path) -> None:
    assert trial(tmp_path, base, None, 0.0, seed=11, count=1000).alarms == frozenset()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_found_and_no_other(fault: Fault, tmp_path: Path) -> None:
    base = fault.bases[0]
    found = trial(tmp_path, base, fault, SEVERITIES[1], seed=12, count=1000).alarms
    assert fault.check in found
    assert found <= {fault.check, *fault.also}


def test_a_fault_is_planted_in_the_same_way_for_the_same_seed() -> None:
    corpus = BASES["sentences"](300, 1)
    for fault in FAULTS:
        if "sentences" in fault.bases:
            first, second = (fault.plant(corpus, 0.05, random.Random("x")) for _ in range(2))
            assert first == second
            assert first != corpus, fault.name


def test_recall_and_precision_are_counted_by_check() -> None:
    fault = FAULTS[0]
    other = next(each for each in FAULTS if each.check != fault.check)

    def of(planted: Fault | None, *alarms: str) -> Trial:
        return Trial("sentences", planted, 0.05, 0, frozenset(alarms))

    trials = [of(fault, fault.check), of(fault), of(None), of(None, fault.check), of(other, fault.check, other.check)]
    (first, _) = quality(trials)
    assert first == Quality(fault.name, fault.check, planted=2, found=1, false=2)
    assert first.recall == 0.5
    assert first.precision == pytest.approx(1 / 3)
