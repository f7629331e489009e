"""The output of training on a terminal and in a file."""

import io
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regard.training.console import Sample, TrainingConsole, time_left

START = {"event": "start", "step": 0, "time": 0.0, "steps": 200}
STEP = {"event": "step", "step": 50, "time": 5.0, "loss": 2.6543, "nll": 2.3456, "tokens_per_second": 12345.6}
VALID = {"event": "valid", "step": 100, "time": 65.0, "best": 100, "loss": 1.23456, "bleu": 31.4159, "chrf": 50.0}
END = {"event": "end", "step": 200, "time": 130.0, "finished": True, "why": "all 200 steps done"}


def printed(*events: dict[str, Any], terminal: bool = False, quiet: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None, legacy_windows=False)
    view = TrainingConsole(console, quiet)
    view.titles = {"loss": "loss", "bleu": "BLEU", "chrf": "chrF", "accuracy": "accuracy"}
    for event in events:
        view.note(event)
    view.close()
    return file.getvalue()


def test_a_file_gets_one_line_per_validation() -> None:
    again = VALID | {"step": 150, "time": 3725.4, "best": 100, "bleu": 9.5}
    lines = printed(START, STEP, VALID, {"event": "save", "step": 100}, again, END).splitlines()
    assert lines == [
        "Step     100     1:05  validation loss 1.235  BLEU 31.42  (best so far)",
        "Step     150  1:02:05  validation loss 1.235  BLEU 9.500  chrF 50.00",
        "Finished at step 200: all 200 steps done",
    ]


def test_resuming_and_stopping_are_printed() -> None:
    stop = END | {"finished": False, "step": 1234, "why": "interrupted. Continue: regard resume runs/[a]"}
    assert printed(START | {"step": 1000}, stop).splitlines() == [
        "Resuming at step 1,000",
        "Stopped at step 1,234: interrupted. Continue: regard resume runs/[a]",
    ]


def test_a_mean_of_checkpoints_is_printed() -> None:
    final: dict[str, Any] = {"event": "final", "step": 200, "time": 1.0, "steps": [1000, 150], "kept": [1000, 150]}
    final |= {"loss": 0.5, "accuracy": 97.0}
    line = "Mean of 2 checkpoints: validation loss 0.500  accuracy 97.00"
    assert printed(final) == f"{line}\n"
    assert printed(final | {"kept": [1000]}) == f"{line}; ranks behind step 1,000, which is used instead\n"


def test_degenerate_outputs_cause_one_warning_during_training() -> None:
    bad = VALID | {"unfinished": 50.0, "repeating": 20.0}
    early, last = bad | {"step": 99}, bad | {"step": 200}
    lines = printed(START, early, bad, bad | {"step": 150}, last, END).splitlines()
    assert [line.startswith("warning: the model has not learned to stop: 50 %") for line in lines] == [
        *(False, False, True, False, False, False)
    ]
    assert printed(START, early, VALID, last, END).count("warning") == 0  # the session warns at the end


def test_a_terminal_shows_a_live_line_and_removes_it() -> None:
    file = io.StringIO()
    view = TrainingConsole(Console(file=file, force_terminal=True, width=100, color_system=None, legacy_windows=False))
    view.note(START)
    assert view.live is not None
    view.note(STEP | {"memory_gb": 1.26})
    view.live.refresh()
    output = file.getvalue()
    assert "50/200" in output
    assert "loss 2.346  12,346 tokens/s  1.3 GB" in output
    view.note(VALID)
    view.note(END)
    assert view.live is None
    assert "Finished at step 200" in file.getvalue()


def test_a_long_line_in_a_file_is_not_broken() -> None:
    sentence = "warning: " + "a long sentence " * 20
    file = io.StringIO()
    TrainingConsole(Console(file=file, width=40)).report(sentence)
    assert file.getvalue() == sentence + "\n"


def test_quiet_prints_nothing() -> None:
    assert printed(START, STEP, VALID, END, quiet=True) == ""
    assert printed(START, STEP, VALID, END, terminal=True, quiet=True) == ""


def test_all_output_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    TrainingConsole().report("a sentence")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "A sentence\n")


def test_other_events_are_ignored() -> None:
    assert printed({"event": "save", "step": 3}, {"event": "something new", "step": 4}) == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_line_that_cannot_be_written_does_not_stop_training() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    TrainingConsole(Console(file=full)).note(VALID)
    with suppress(OSError):
        full.close()


def test_a_validation_prints_a_sample_cut_to_the_width() -> None:
    file = io.StringIO()
    view = TrainingConsole(Console(file=file, width=200))
    view.show(Sample("ein  Satz", "word " * 40, "one\nsentence"))
    view.note(VALID)
    view.note(VALID)
    _, source, output, reference, last = file.getvalue().splitlines()
    assert source == "  source:    ein Satz"
    assert output.startswith("  output:    word word")
    assert output.endswith("...")
    assert len(output) == 80
    assert reference == "  reference: one sentence"
    assert last.startswith("Step")


def test_lines_fit_a_terminal_of_80_columns() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None, legacy_windows=False)
    view = TrainingConsole(console)
    view.titles = {"loss": "loss", "exact_match": "exact", "bleu": "BLEU", "chrf": "chrF"}
    view.note(VALID | {"exact_match": 97.5, "step": 100_000, "best": 100_000, "time": 36_000.0})
    view.report("warning: " + "a long sentence " * 20)
    lines = file.getvalue().splitlines()
    assert lines[0] == "Step 100,000  10:00:00  validation loss 1.235  exact 97.50  (best so far)"
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert {*" ".join(lines[1:]).split()} == {"warning:", "a", "long", "sentence"}  # broken between words


def test_a_path_is_not_capitalised() -> None:
    file = io.StringIO()
    view = TrainingConsole(Console(file=file))
    for sentence in ("runs/mine is new", "tokenizer.json is new", "warm-up: 5 steps"):
        view.report(sentence)
    assert file.getvalue() == "runs/mine is new\ntokenizer.json is new\nWarm-up: 5 steps\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.4, "3 s left"), (98.0, "98 s left"), (1320.0, "22 min left"), (7100.0, "118 min left"), (9000.0, "2.5 h left")],
)
def test_remaining_time_is_in_a_suitable_unit(seconds: float, text: str) -> None:
    assert time_left(seconds) == text
