"""The command `ladder`: compare the Transformer with its predecessors, and with Transformers that lack one part."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.ablate import WIDE
from regard.cli.base import STUDY, AsJson, Quiet, RecipeFile, console, print_json
from regard.cli.options import OnCluster, PairFiles, Runs, command, experiment_option, given
from regard.errors import SpecError

if TYPE_CHECKING:
    from regard.ablation.ladder import Ladder
    from regard.recipe.recipe import RecipeRequest


@command(STUDY)
def ladder(
    files: PairFiles,
    runs: Runs,
    cluster: OnCluster,
    recipe: RecipeFile = None,
    quick: Annotated[
        bool,
        experiment_option(
            "--quick", help="Train every model for 25 seconds with each of 2 seeds: under 10 minutes on 2 CPU cores."
        ),
    ] = False,
    rungs: Annotated[
        str,
        experiment_option(
            "--rungs",
            metavar="RUNGS",
            help="Models to compare: all, or names separated by commas, such as rnn,convs2s. The full Transformer is "
            "always included.",
        ),
    ] = "all",
    seeds: Annotated[
        int | None,
        experiment_option(metavar="N", help="Number of seeds per model. Default: 3, or 2 with --quick."),
    ] = None,
    seconds: Annotated[
        float | None, experiment_option(metavar="S", help="Instead of --steps: training time per model, in seconds.")
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Folder for the results. An interrupted ladder is continued.")
    ] = "runs/ladder",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare the Transformer with its predecessors, at equal cost.

    The models of the ladder are RNNs, convolutional models, Transformers without one part, and the full Transformer.
    All have the same number of parameters, and are trained on the same batches for the same number of steps or the same
    time. The table shows, for each model, its translation quality (also by source length), its training speed, and its
    path length (the number of operations that must run one after another). Without training text, a demo corpus of
    English numbers and dates with German translations is used. To continue after an interruption, run the same command
    again. The results are written to ladder.html, ladder.md, ladder.json and results.jsonl in the folder given by
    --out.
    """
    from regard.ablation import demo
    from regard.ablation.console import AblationConsole
    from regard.ablation.experiment import Settings
    from regard.ablation.ladder import QUICK_SECONDS, QUICK_SEEDS, select_rungs
    from regard.ablation.ladder import ladder as train_ladder
    from regard.ablation.parallel import Resources
    from regard.ablation.plan import check_changes
    from regard.cluster.schedulers import cluster_from_options
    from regard.runs.options import seconds as parse_time
    from regard.runs.request import check_request, request_from_options

    if seconds is not None and seconds <= 0:
        raise SpecError("--seconds", f"must be more than 0, not {seconds:g}")
    if runs.steps is not None and seconds is not None:
        raise SpecError(
            "--seconds", "sets the training time of every rung, and --steps its number of steps; give one of them"
        )
    if quick and runs.steps is None and seconds is None:
        seconds = QUICK_SECONDS
    seeds = seeds if seeds is not None else QUICK_SEEDS if quick else 3
    settings = Settings(
        "all", seeds, runs.steps, seconds, "none", runs.search_rates, runs.metric, parse_time(runs.max_time)
    )
    settings.check()
    machine = Resources(runs.device, runs.jobs, runs.threads, runs.trust_code, cluster_from_options(**given(cluster)))
    select_rungs(rungs)
    folder, changes = Path(out), runs.changes or ()
    options: dict[str, Any] = files.keywords() | ({} if recipe is None else {"recipe": recipe})
    if options:
        request = request_from_options(**options, preset=runs.base, changes=changes, trust_code=runs.trust_code)
        check_request(request)
    else:
        request = demo.ladder(folder / "text", runs.base, changes, runs.trust_code)
    check_changes(changes, request, runs.steps is not None or seconds is not None)

    def ready() -> "RecipeRequest":
        if not options:
            demo.write(folder / "text")
        return request

    with closing(AblationConsole(quiet=quiet or as_json)) as progress:
        result = train_ladder(ready, folder, rungs, settings, machine, progress.note)
    if as_json:
        print_json(result.json())
    elif not quiet:
        _show(result, folder)


def _show(result: "Ladder", folder: Path) -> None:
    screen = console()
    if not screen.is_terminal:
        screen = console(width=WIDE)
    screen.print(result.table(narrow=screen.width < WIDE))
    screen.print(f"\n{result.title}", markup=False)
    screen.print(result.plot(), markup=False)
    screen.print(f"\n{result.title} by source length", markup=False)
    screen.print(result.length_table())
    for sentence in result.sentences():
        screen.print(sentence, markup=False)
    if (folder / "ladder.html").exists():
        screen.print(f"Plots: {folder / 'ladder.html'}", markup=False, soft_wrap=True)
