"""What a person sees of training, on a terminal and in a file."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regard.training.console import TrainingConsole

START = {"event": "start", "step": 0, "time": 0.0, "steps": 200}
STEP = {"event": "step", "step": 50, "time": 5.0, "loss": 2.6543, "nll": 2.3456, "tokens_per_second": 12345.6}
VALID = {"event": "valid", "step": 100, "time": 65.0, "best": 100, "loss": 1.23456, "bleu": 31.4159, "chrf": 50.0}
END = {"event": "end", "step": 200, "time": 130.0, "finished": True, "why": "all 200 steps done"}


def told(*events: dict[str, Any], terminal: bool = False, quiet: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None, legacy_windows=False)
    view = TrainingConsole(console, quiet)
    view.titles = {"loss": "loss", "bleu": "BLEU", "chrf": "chrF", "accuracy": "accuracy"}
    for event in events:
        view.note(event)
    view.close()
    return file.getvalue()


def test_a_file_gets_a_line_for_what_matters() -> None:
    again = VALID | {"step": 150, "time": 3725.4, "best": 100, "bleu": 9.5}
    lines = told(START, STEP, VALID, {"event": "save", "step": 100}, again, END).splitlines()
    assert lines == [
        "step     100      1:05  validation loss 1.235  BLEU 31.42  chrF 50.00  (best so far)",
        "step     150   1:02:05  validation loss 1.235  BLEU 9.500  chrF 50.00",
        "done at step 200: all 200 steps done",
    ]


def test_going_on_and_stopping_are_said() -> None:
    stop = END | {"finished": False, "step": 1234, "why": "interrupted; regard resume runs/[a] goes on"}
    assert told(START | {"step": 1000}, stop).splitlines() == [
        "going on from step 1,000",
        "stopped at step 1,234: interrupted; regard resume runs/[a] goes on",
    ]


def test_a_mean_of_checkpoints_is_said() -> None:
    final: dict[str, Any] = {"event": "final", "step": 200, "time": 1.0, "steps": [1000, 150], "kept": [1000, 150]}
    final |= {"loss": 0.5, "accuracy": 97.0}
    line = "mean of 2 checkpoints: validation loss 0.500  accuracy 97.00"
    assert told(final) == f"{line}\n"
    assert told(final | {"kept": [1000]}) == f"{line}; ranks behind step 1,000, which is used instead\n"


def test_degenerate_outputs_are_warned_about_once_while_training() -> None:
    bad = VALID | {"unfinished": 50.0, "repeating": 20.0}
    early, last = bad | {"step": 99}, bad | {"step": 200}
    lines = told(START, early, bad, bad | {"step": 150}, last, END).splitlines()
    assert [line.startswith("warning: the model has not learned to stop: 50 %") for line in lines] == [
        *(False, False, True, False, False, False)
    ]
    assert told(START, early, VALID, last, END).count("warning") == 0  # the session warns at the end


def test_a_terminal_shows_progress_and_takes_it_away() -> None:
    file = io.StringIO()
    view = TrainingConsole(Console(file=file, force_terminal=True, width=100, color_system=None, legacy_windows=False))
    view.note(START)
    assert view.live is not None
    view.note(STEP | {"memory_gb": 1.26})
    view.live.refresh()
    shown = file.getvalue()
    assert "50/200" in shown
    assert "training loss 2.346  12,346 tokens/s  1.3 GB" in shown
    view.note(VALID)
    view.note(END)
    assert view.live is None
    assert "done at step 200" in file.getvalue()


def test_a_long_line_is_not_broken() -> None:
    sentence = "warning: " + "a long sentence " * 20
    file = io.StringIO()
    TrainingConsole(Console(file=file, width=40)).say(sentence)
    assert file.getvalue() == sentence + "\n"


def test_quiet_is_quiet() -> None:
    assert told(START, STEP, VALID, END, quiet=True) == ""
    assert told(START, STEP, VALID, END, terminal=True, quiet=True) == ""


def test_it_all_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    TrainingConsole().say("a sentence")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "a sentence\n")


def test_events_without_a_picture_are_passed_over() -> None:
    assert told({"event": "save", "step": 3}, {"event": "something new", "step": 4}) == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_line_that_cannot_be_written_stops_nothing() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    TrainingConsole(Console(file=full)).note(VALID)
    with suppress(OSError):
        full.close()
