"""`regard.ablate`, the Python function that corresponds to the command `regard ablate`."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from regard.ablation import demo
from regard.ablation.console import AblationConsole
from regard.ablation.experiment import Settings, run_ablation
from regard.ablation.parallel import Resources
from regard.ablation.plan import check_changes
from regard.ablation.report import Report
from regard.cluster.schedulers import cluster_from_options
from regard.recipe.recipe import RecipeRequest
from regard.runs.options import Paths, seconds, several
from regard.runs.request import check_request, request_from_options


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
    cluster: str | None = None,
    partition: str | None = None,
    cluster_options: str | Sequence[str] = (),
    quiet: bool = True,
    trust_code: bool = False,
) -> Report:
    """Train a base model and modifications of this model on the same text, and return a table that compares them.

    The results are written to the folder `out`. Training runs that this folder already contains are not repeated.

    Args:
        out: Folder for the ablation, new or existing.
        recipe: Recipe file for the base. The other options override the recipe.
        source: File with the source text of a translation task; requires `target`.
        target: File with the target text.
        valid_source: File with the source text for validation; requires `valid_target`.
        valid_target: File with the target text for validation.
        tsv: Files with tab-separated source and target.
        jsonl: JSON Lines files with source and target.
        text: Text files for a language model.
        labelled: Files with labelled text for a classifier. If no text is given at all, the demo corpus is used.
        valid: Validation file in the same format as the training text.
        rows: Modifications to compare: `all`, `table` (the 52 of Narang et al. 2021), a group, or names. A name
            `module:function` refers to your own function.
        base: Preset for the base. If None, it is chosen according to the corpus.
        variants: Modifications applied to the base model, and so to all models.
        changes: Edits to the base's recipe, such as `model.d_model=64`.
        seeds: Number of runs per modification. The base has three times as many.
        steps: Training steps per run.
        time: Training time of the base, instead of `steps`, in seconds or as "20s" or "5m". All models are trained
            for the number of steps that the base takes in this time.
        match: `parameters` or `compute` scales the hidden widths of every modified model until it has as many
            parameters or operations as the base; `none` changes no width.
        metric: Metric to report in addition to the loss. If None, it is the default metric of the task.
        search_rates: First search for the best learning rate of every model, with equally many runs for each.
        jobs: Number of simultaneous runs. Default: one per GPU. Without a GPU: one per CPU core, at most 16. On Slurm:
            64.
        device: `auto`, `cpu` or `cuda`.
        threads: CPU threads per run.
        max_time: Time limit. Runs that would end later are not started; call the function again to continue.
        cluster: `slurm` trains every model in a job of a cluster, `local` in a job of submitit's local executor.
        partition: Partition of Slurm.
        cluster_options: Options of sbatch for every job, such as "time=120".
        quiet: Do not print progress.
        trust_code: Allow the import of your own code, to which a name such as `mine:cosine` refers.
    """
    names = rows if isinstance(rows, str) else ",".join(rows)
    settings = Settings(names, seeds, steps, seconds(time, "--time"), match, search_rates, metric, seconds(max_time))
    settings.check()
    machine = Resources(device, jobs, threads, trust_code, cluster_from_options(cluster, partition, cluster_options))
    folder, edits = Path(out), several(changes)
    files: dict[str, Any] = {"source": source, "target": target, "tsv": tsv, "jsonl": jsonl, "text": text}
    files |= {"valid_source": valid_source, "valid_target": valid_target, "labelled": labelled, "valid": valid}
    files = {name: value for name, value in (files | {"recipe": recipe}).items() if value}
    if files:
        request = request_from_options(
            **files, preset=base, variants=several(variants), changes=edits, trust_code=trust_code
        )
        check_request(request)
    else:
        request = demo.ablation(folder / "text", base, several(variants), edits, trust_code)
    check_changes(edits, request, steps is not None or time is not None)

    def ready() -> RecipeRequest:
        if not files:
            demo.write(folder / "text")
        return request

    with closing(AblationConsole(quiet=quiet)) as console:
        return run_ablation(ready, folder, settings, machine, console.note)
