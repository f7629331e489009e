"""`regard.ablate`: the command `regard ablate` as a function."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.ablation import demo
from regard.ablation.console import AblationConsole
from regard.ablation.experiment import Settings, run_ablation
from regard.ablation.parallel import Resources
from regard.ablation.plan import check_changes
from regard.ablation.report import Report
from regard.recipe.recipe import RecipeRequest
from regard.runs.options import seconds, several
from regard.runs.request import check_request, request_from_options

Paths = str | Path | Sequence[str | Path]


def ablate(  # noqa: PLR0913  # the options of the command line
    out: str | Path,
    *,
    recipe: str | Path | None = None,
    source: str | Path | None = None,
    target: str | Path | None = None,
    valid_source: str | Path | None = None,
    valid_target: str | Path | None = None,
    tsv: Paths = (),
    jsonl: Paths = (),
    text: Paths = (),
    labelled: Paths = (),
    valid: str | Path | None = None,
    rows: str | Sequence[str] = "all",
    base: str | None = None,
    variants: str | Sequence[str] = (),
    changes: str | Sequence[str] = (),
    seeds: int = 3,
    steps: int | None = None,
    time: str | float | None = None,
    match: str = "none",
    metric: str | None = None,
    search_rates: bool = False,
    jobs: int | None = None,
    device: str = "auto",
    threads: int | None = None,
    max_time: str | float | None = None,
    quiet: bool = True,
    trust_code: bool = False,
) -> Report:
    """Train modifications of a base model on the same text and return a table of what each is worth.

    The results are written to the folder `out`; runs that are finished there are not repeated.

    Args:
        out: Folder of this ablation, new or existing.
        recipe: Recipe file of the base; the other options override it.
        source: Source text of a translation task, with `target`.
        target: Target text.
        valid_source: Held-out source text, with `valid_target`.
        valid_target: Held-out target text.
        tsv: Tab-separated source and target.
        jsonl: JSON lines with source and target.
        text: Text of a language model.
        labelled: Labelled text of a classifier. Without any text, the demo corpus is used.
        valid: Held-out text of the same kind as the training text.
        rows: `all`, `table` (the 52 rows of Narang et al. 2021), a group, or names; `module:function` is your own.
        base: Preset of the base; chosen from the corpus if None.
        variants: Modifications that the base has already.
        changes: Edits of the base's recipe, such as `model.d_model=64`.
        seeds: Runs of every row; the base has three times as many.
        steps: Training steps of every run.
        time: Instead of `steps`: training time of the base, in seconds or as "20s", "5m"; all rows get its steps.
        match: Resize the hidden width of every row to the base's `parameters` or `compute`, or `none`.
        metric: Metric in addition to the loss; the default one of the task if None.
        search_rates: First search the learning rate of every row, with the same effort for each.
        jobs: Simultaneous runs; one for each GPU, or for each core, if None.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads of each run.
        max_time: Start no run that would end after this time; call the function again to continue.
        quiet: Print no progress.
        trust_code: Import the user's own code that a name such as `mine:cosine` refers to.
    """
    names = rows if isinstance(rows, str) else ",".join(rows)
    budget = (seconds(time, "--time"), match, search_rates, metric, seconds(max_time))
    settings = Settings(names, seeds, steps, *budget)
    settings.check()
    folder, edits = Path(out), several(changes)
    files: dict[str, Any] = {
        "source": source,
        "target": target,
        "valid_source": valid_source,
        "valid_target": valid_target,
    }
    files |= {"tsv": tsv, "jsonl": jsonl, "text": text, "labelled": labelled, "valid": valid, "recipe": recipe}
    files = {name: value for name, value in files.items() if value}
    if files:
        request = request_from_options(
            **files, preset=base, variants=several(variants), changes=edits, trust_code=trust_code
        )
        check_request(request)
    else:
        request = demo.ablation(folder / "text", base, several(variants), edits, trust_code)
    check_changes(edits, request, steps is not None or time is not None)
    console = AblationConsole(quiet=quiet)

    def ready() -> RecipeRequest:
        if not files:
            demo.write(folder / "text")
        return request

    try:
        return run_ablation(ready, folder, settings, Resources(device, jobs, threads, trust_code), console.note)
    finally:
        console.close()
