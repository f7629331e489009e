"""Print the progress of training to stderr: a live progress line on a terminal, and a line for every validation."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from regard.training import degenerate
from regard.training.executor import description
from regard.training.trainer import Event

WIDTH = 80  # columns of a validation line if there is no terminal


class Sample(NamedTuple):
    """The source, the model output and the reference of one validation example."""

    source: str
    output: str
    reference: str


class TimeLeft(ProgressColumn):
    """A progress column with the estimated remaining time, such as "22 min left"."""

    def render(self, task: Task) -> Text:
        return Text("" if task.time_remaining is None else time_left(float(task.time_remaining)))


class TrainingConsole:
    """Prints a live progress line (loss, speed, memory, time left), and metrics and a sample for each validation."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, emoji=False)
        self.quiet = quiet
        self.live: Progress | None = None
        self.steps = 0
        self.warned = False
        self.titles: Mapping[str, str] = {"loss": "loss"}  # headings of metrics by name, most important first
        self.sample: Sample | None = None  # printed with the next validation

    @property
    def width(self) -> int:
        return self.console.width if self.console.is_terminal else WIDTH

    def show(self, sample: Sample) -> None:
        """Set the sample output to print with the next validation."""
        self.sample = sample

    def report(self, sentence: str) -> None:
        """Print a sentence above the progress line; ignore errors of writing, for example to a full disk."""
        if re.match(r"(?!warning)[a-z][a-z-]*\b(?![./\\_])", sentence):  # it does not start with a path
            sentence = sentence[0].upper() + sentence[1:]
        if not self.quiet:
            with suppress(OSError):
                self.console.print(sentence, highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def note(self, event: Event) -> None:
        if self.quiet:
            return
        getattr(self, f"on_{event['event']}", lambda _: None)(event)
        if self.live is not None:
            self.live.update(self.live.task_ids[0], completed=event["step"])

    def on_start(self, event: Event) -> None:
        """Start the progress line if the output is a terminal."""
        self.steps = event["steps"]
        if event["step"]:
            self.report(f"Resuming at step {event['step']:,}")
        if not self.console.is_terminal:
            return
        columns = (TextColumn("Step"), MofNCompleteColumn(), BarColumn(bar_width=10))
        facts = TextColumn("{task.fields[facts]}")
        self.live = Progress(*columns, facts, TimeLeft(), console=self.console, transient=True)
        self.live.add_task("training", total=event["steps"], facts="")
        self.live.start()

    def on_damaged(self, event: Event) -> None:
        """Print why a checkpoint cannot be used, and what is used instead."""
        self.report(f"warning: {event['problem']}")

    def on_skipped(self, event: Event) -> None:
        """Print that a step changed nothing, because its loss or gradient is not finite."""
        where = f"; its batch is in {event['file']}" if event["file"] else ""
        self.report(f"warning: {event['problem']} at step {event['step']:,}, which is skipped{where}")

    def on_split(self, event: Event) -> None:
        """Print that memory ran out in a step, and in how many parts its batches are computed from now on."""
        self.report(
            f"warning: memory ran out at step {event['step']:,}; batches of {event['rows']} rows ({event['shape']}) "
            f"are computed in {event['parts']} parts, with the same gradient"
        )

    def on_executor(self, event: Event) -> None:
        self.report(description(event))

    def on_step(self, event: Event) -> None:
        """Update the progress line with the metrics of recent steps."""
        # `nll` is without label smoothing and auxiliary losses, so that it is comparable with the validation loss.
        facts = [f"loss {event['nll']:.3f}", f"{event['tokens_per_second']:,.0f} tokens/s"]
        if "memory_gb" in event:
            facts.append(f"{event['memory_gb']:.1f} GB")
        if "mfu" in event:
            facts.append(f"MFU {event['mfu']:.0%}")
        dropped = event.get("dropped_tokens", 0)
        if tokens := event.get("routed_tokens", 0) + dropped:
            facts.append(f"{dropped / tokens:.1%} dropped")
        self.steps = event.get("steps", self.steps)  # a time budget updates the estimate
        if self.live is not None:
            self.live.update(self.live.task_ids[0], facts="  ".join(facts), total=self.steps)

    def on_valid(self, event: Event) -> None:
        """Print the metrics of a validation and a sample output."""
        best = "  (best so far)" if event["best"] == event["step"] else ""
        time = _time(event.get("clock", event["time"]))
        start = f"Step {event['step']:>7,}  {time:>7}  validation "
        self.report(start + self.validation(event, self.width - len(start) - len(best)) + best)
        if self.sample is not None:
            for name, text in self.sample._asdict().items():
                line = f"  {name + ':':<10} {' '.join(text.split())}"
                self.report(line if len(line) <= self.width else f"{line[: self.width - 3]}...")
            self.sample = None
        # Degenerate outputs are usual in the first half of the steps, and the end of training has its own warning.
        if not self.warned and self.steps / 2 <= event["step"] < self.steps:
            self.warn(event)

    def validation(self, event: Event, width: int = WIDTH) -> str:
        """Return the metrics as text, in the order of `titles`.

        If the text is longer than `width` characters, the last metrics are left out, but at least two are kept.
        """
        values = [f"{title} {_number(event[name])}" for name, title in self.titles.items() if name in event]
        while len(values) > 2 and len("  ".join(values)) > width:
            values.pop()
        return "  ".join(values)

    def warn(self, metrics: Mapping[str, Any]) -> None:
        """Print a warning if the validation metrics show degenerate outputs."""
        for sentence in degenerate.warnings(metrics):
            self.report(f"warning: {sentence}")
            self.warned = True

    def on_final(self, event: Event) -> None:
        """Print the validation metrics of weights averaged over several checkpoints."""
        steps, kept = event["steps"], event["kept"]
        behind = "" if kept == steps else f"; ranks behind step {kept[0]:,}, which is used instead"
        self.report(f"mean of {len(steps)} checkpoints: validation {self.validation(event)}{behind}")

    def on_end(self, event: Event) -> None:
        self.close()
        self.report(f"{'finished' if event['finished'] else 'stopped'} at step {event['step']:,}: {event['why']}")

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None


def _number(value: Any) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def time_left(seconds: float) -> str:
    """Return the remaining time as text, in seconds, minutes or hours, such as "22 min left"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 7170 else f"{seconds / 3600:.1f} h left"
