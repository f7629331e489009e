"""Progress of an ablation: one progress bar per run on a terminal, and one printed line per finished run."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from regard.ablation.results import DONE


class AblationConsole:
    """Prints the progress of an ablation to stderr. The method `on_x` handles events of the type x."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console, self.quiet = console or Console(stderr=True, emoji=False), quiet
        self.live: Progress | None = None
        self.all: TaskID | None = None
        self.tasks: dict[str, TaskID] = {}
        self.done, self.runs = 0, 0

    def note(self, event: dict[str, Any]) -> None:
        """Print an event or update the progress bars, unless `quiet` is set."""
        if not self.quiet:
            getattr(self, f"on_{event['event']}")(event)

    def print(self, sentence: str) -> None:
        """Print a line above the progress bars."""
        self.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    def on_message(self, event: dict[str, Any]) -> None:
        self.print(event["text"])

    def on_plan(self, event: dict[str, Any]) -> None:
        self.close()
        self.done, self.runs = event["finished"], event["runs"]
        self.print(f"{self.runs} {event['what']}" + (f", {self.done} of them finished before" if self.done else ""))
        if self.console.is_terminal and self.done < self.runs:
            columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=24))
            more = (TextColumn("{task.fields[facts]}"), TimeRemainingColumn())
            self.live = Progress(*columns, *more, console=self.console, transient=True)
            self.all = self.live.add_task(event["what"], total=self.runs, completed=self.done, facts="")
            self.live.start()

    def on_begin(self, event: dict[str, Any]) -> None:
        job = event["job"]
        if self.live is not None:
            name = f"{job.row} seed {job.seed}"
            self.tasks[job.hash] = self.live.add_task(name, total=job.recipe.train.steps, facts="")

    def on_step(self, event: dict[str, Any]) -> None:
        task = self.tasks.get(event["job"].hash)
        if self.live is not None and task is not None:
            self.live.update(task, completed=event["step"], facts=f"loss {event['loss']:.3f}")

    def on_done(self, event: dict[str, Any]) -> None:
        job, result = event["job"], event["result"]
        self.done += 1
        task = self.tasks.pop(job.hash, None)
        if self.live is not None and self.all is not None:
            if task is not None:
                self.live.remove_task(task)
            self.live.update(self.all, completed=self.done)
        done = result["status"] == DONE
        outcome = f"loss {result['loss']:.4f}, {result['seconds']:.0f} s" if done else result["error"]
        factor = f" learning rate x {job.factor:g}" if job.factor != 1.0 else ""
        self.print(f"{self.done:>4}/{self.runs} {job.row} seed {job.seed}{factor}: {outcome}")

    def close(self) -> None:
        """Remove the progress bars."""
        if self.live is not None:
            self.live.stop()
            self.live = None
        self.tasks.clear()
