"""What a person sees of training: a live line on a terminal, a few plain lines elsewhere. All of it goes to stderr."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from regard.training import degenerate
from regard.training.executor import description
from regard.training.trainer import Event


class TrainingConsole:
    """Progress with loss, speed, memory and time left; a line for every validation."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, emoji=False)
        self.quiet = quiet
        self.titles: Mapping[str, str] = {"loss": "loss"}  # of the metrics that a validation prints
        self.live: Progress | None = None
        self.task: TaskID | None = None
        self.steps = 0
        self.warned = False

    def say(self, sentence: str) -> None:
        """A line above the live one. One that cannot be written, as into a full disk, stops no training."""
        if not self.quiet:
            with suppress(OSError):
                self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def note(self, event: Event) -> None:
        """Show an event."""
        if self.quiet:
            return
        getattr(self, f"on_{event['event']}", lambda _: None)(event)
        if self.live is not None and self.task is not None:
            self.live.update(self.task, completed=event["step"])

    def on_start(self, event: Event) -> None:
        """Begin the live line, on a terminal."""
        self.steps = event["steps"]
        if event["step"]:
            self.say(f"going on from step {event['step']:,}")
        if not self.console.is_terminal:
            return
        self.live = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            transient=True,
        )
        self.task = self.live.add_task("training", total=event["steps"], facts="")
        self.live.start()

    def on_executor(self, event: Event) -> None:
        """How steps are run, where there is more than one way."""
        self.say(description(event))

    def on_step(self, event: Event) -> None:
        """Refresh the facts of the live line."""
        # Without label smoothing and auxiliary losses, so that it compares with the validation loss.
        facts = [f"training loss {event['nll']:.3f}", f"{event['tokens_per_second']:,.0f} tokens/s"]
        if "memory_gb" in event:
            facts.append(f"{event['memory_gb']:.1f} GB")
        if "mfu" in event:
            facts.append(f"MFU {event['mfu']:.0%}")
        dropped = event.get("dropped_tokens", 0)
        if sent := event.get("routed_tokens", 0) + dropped:
            facts.append(f"{dropped / sent:.1%} dropped")
        self.steps = event.get("steps", self.steps)  # a time budget estimates them again and again
        if self.live is not None and self.task is not None:
            self.live.update(self.task, facts="  ".join(facts), total=self.steps)

    def on_valid(self, event: Event) -> None:
        """A line that stays."""
        best = "  (best so far)" if event["best"] == event["step"] else ""
        time = _time(event.get("clock", event["time"]))
        self.say(f"step {event['step']:>7,}  {time:>8}  {self.validation(event)}{best}")
        # In the first half of the steps this is usual, and the end of training has a warning of its own.
        if not self.warned and self.steps / 2 <= event["step"] < self.steps:
            self.warn(event)

    def warn(self, metrics: Mapping[str, Any]) -> None:
        """Print what is wrong with the outputs of a model by its validation metrics."""
        for sentence in degenerate.warnings(metrics):
            self.say(f"warning: {sentence}")
            self.warned = True

    def on_final(self, event: Event) -> None:
        """What the mean of several checkpoints is worth."""
        steps, kept = event["steps"], event["kept"]
        behind = "" if kept == steps else f"; ranks behind step {kept[0]:,}, which is used instead"
        self.say(f"mean of {len(steps)} checkpoints: {self.validation(event)}{behind}")

    def on_end(self, event: Event) -> None:
        """The last line."""
        self.close()
        self.say(f"{'done' if event['finished'] else 'stopped'} at step {event['step']:,}: {event['why']}")

    def validation(self, event: Event) -> str:
        """Return the metrics of a validation."""
        values = [f"{title} {_number(event[name])}" for name, title in self.titles.items() if name in event]
        return f"validation {'  '.join(values)}"

    def close(self) -> None:
        """Take the live line away."""
        if self.live is not None:
            self.live.stop()
            self.live = None


def _number(value: Any) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
