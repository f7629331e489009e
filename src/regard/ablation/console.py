"""What a person sees of an ablation: a live line for every run on a terminal, a plain line for every finished one."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from regard.ablation.results import DONE


class AblationConsole:
    """Progress on stderr."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console, self.quiet = console or Console(stderr=True, emoji=False), quiet
        self.live: Progress | None = None
        self.all: TaskID | None = None
        self.tasks: dict[str, TaskID] = {}
        self.done, self.runs, self.began = 0, 0, time.monotonic()

    def note(self, event: dict[str, Any]) -> None:
        """Show an event."""
        if not self.quiet:
            getattr(self, f"on_{event['event']}")(event)

    def say(self, sentence: str) -> None:
        """A line above the live ones."""
        if not self.quiet:
            self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def on_say(self, event: dict[str, Any]) -> None:
        """A sentence."""
        self.say(event["sentence"])

    def on_plan(self, event: dict[str, Any]) -> None:
        """How much there is to do; the live lines begin, on a terminal."""
        self.close()
        self.done, self.runs = event["made"], event["runs"]
        made = f", {event['made']} of them made before" if event["made"] else ""
        self.say(f"{event['runs']} {event['what']}{made}")
        if not self.console.is_terminal or event["made"] == event["runs"]:
            return
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=24))
        more = (TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
        self.live = Progress(*columns, *more, console=self.console, transient=True)
        self.all = self.live.add_task(event["what"], total=event["runs"], completed=event["made"], facts="")
        self.live.start()

    def on_begin(self, event: dict[str, Any]) -> None:
        """A run begins."""
        job = event["job"]
        if self.live is not None:
            name = f"{job.row} seed {job.seed}"
            self.tasks[job.hash] = self.live.add_task(name, total=job.recipe.train.steps, facts="")

    def on_step(self, event: dict[str, Any]) -> None:
        """A run is a little further."""
        task = self.tasks.get(event["job"].hash)
        if self.live is not None and task is not None:
            self.live.update(task, completed=event["step"], facts=f"loss {event['loss']:.3f}")

    def on_done(self, event: dict[str, Any]) -> None:
        """A run has ended."""
        job, result = event["job"], event["result"]
        self.done += 1
        task = self.tasks.pop(job.hash, None)
        if self.live is not None and self.all is not None:
            if task is not None:
                self.live.remove_task(task)
            self.live.update(self.all, completed=self.done)
        said = f"loss {result['loss']:.4f}, {result['seconds']:.0f} s" if result["status"] == DONE else result["error"]
        rate = f" rate x {job.factor:g}" if job.factor != 1.0 else ""
        self.say(f"{self.done:>4}/{self.runs} {job.row} seed {job.seed}{rate}: {said}")

    def close(self) -> None:
        """Take the live lines away."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        self.tasks.clear()
