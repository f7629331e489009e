"""Python functions for the commands that use a model: `translate`, `generate`, `classify`, `score` and `evaluate`.

The first argument is a run folder or a `TrainedModel`. `translate` and `generate` also take a list of these, which they
use as an ensemble. The keyword arguments are the options of the command.
"""

# pyright: reportOverlappingOverload=false
# A string is one text, though it is also an iterable of strings.

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from regard.cluster.schedulers import cluster_from_options
from regard.errors import DataError, SpecError
from regard.inference.text import Output, Prediction, TextScore, Warn
from regard.runs.decode import BATCH, text_decoder
from regard.runs.evaluate import evaluate as evaluate_options
from regard.runs.options import (
    DecodingOptions,
    EvaluationOptions,
    LoadOptions,
    TranslationOptions,
    accepts,
    cpu_threads,
    search_from_options,
)
from regard.runs.shards import Shards, check_options, node_task
from regard.runs.trained_model import TrainedModel, load
from regard.runs.workers import Workers, task_of

Run = str | Path | TrainedModel
Runs = Run | Sequence[Run]


class _Translation(TranslationOptions, LoadOptions, total=False):
    threads: int | None  # CPU threads
    workers: int | None  # worker processes with one CPU thread each; with `cluster`, simultaneous jobs
    cluster: str | None  # "slurm" or "local": translate shards of the texts in jobs of a cluster
    partition: str | None  # partition of Slurm
    cluster_options: str | Sequence[str]  # options of sbatch for every job, such as "time=120"
    work: str | Path | None  # with `cluster`: the folder for finished shards, which all nodes share
    shard_lines: int | None  # with `cluster`: texts per job


class _Generation(DecodingOptions, LoadOptions, total=False):
    threads: int | None


class _Classification(LoadOptions, total=False):
    batch_size: int
    threads: int | None
    warn: Warn


def load_runs(
    runs: Runs,
    *,
    average: int | None = None,
    device: str = "auto",
    plain: bool = False,
    trust_code: bool = False,
    mapped: bool = False,
) -> list[TrainedModel]:
    """Return a list of trained models: each run folder is loaded, and a `TrainedModel` is used as it is.

    The options apply to the loading of folders. Giving an option is an error if there is no folder to load.
    """
    listed = [runs] if isinstance(runs, str | Path | TrainedModel) else list(runs)
    if not listed:
        raise DataError("no run is given; give the folder of a run, or a TrainedModel")
    options = {"average": average is not None, "device": device != "auto", "plain": plain, "trust_code": trust_code}
    for name, is_given in options.items():
        if is_given and all(isinstance(run, TrainedModel) for run in listed):
            raise SpecError(name, "the model is already loaded; pass this option to regard.load")
    return [
        run if isinstance(run, TrainedModel) else load(run, device, average, None, trust_code, mapped, plain)
        for run in listed
    ]


def load_one(run: Runs, command: str, **options: Unpack[LoadOptions]) -> TrainedModel:
    """Return the trained model for a command that takes one model; raise an error for an ensemble."""
    loaded = load_runs(run, **options)
    if len(loaded) > 1:
        raise DataError(f"{command} takes one run, not an ensemble of {len(loaded)}")
    return loaded[0]


@overload
def translate(run: Runs, texts: str, *, n_best: None = None, **options: Unpack[_Translation]) -> str: ...
@overload
def translate(run: Runs, texts: str, *, n_best: int, **options: Unpack[_Translation]) -> list[str]: ...
@overload
def translate(
    run: Runs, texts: Iterable[str], *, n_best: None = None, **options: Unpack[_Translation]
) -> list[str]: ...
@overload
def translate(run: Runs, texts: Iterable[str], *, n_best: int, **options: Unpack[_Translation]) -> list[list[str]]: ...
@accepts(_Translation, text_decoder, search_from_options, load_runs)
def translate(  # noqa: PLR0913  # the options of the command line
    run: Runs,
    texts: str | Iterable[str],
    *,
    n_best: int | None = None,
    threads: int | None = None,
    workers: int | None = None,
    cluster: str | None = None,
    partition: str | None = None,
    cluster_options: str | Sequence[str] = (),
    work: str | Path | None = None,
    shard_lines: int | None = None,
    **options: Any,
) -> Any:
    """Translate one text (a string) or several texts, and return a string or a list of strings.

    With `n_best`, each translation is replaced by a list of the n best translations.

        regard.translate("runs/mine", "How are you?", beam=8)
        regard.translate(["runs/a", "runs/b"], lines, batch_size=64)        # an ensemble

    The options are described in `regard.runs.options`. By default, the search settings of the recipe are used. With
    `cluster`, shards of `shard_lines` texts are translated by jobs of a cluster, and finished shards are kept in the
    folder `work` until all texts are translated.
    """
    on_cluster = cluster_from_options(cluster, partition, cluster_options)
    loading, decoding = _split(options)
    check_options(on_cluster, decoding.get("engine", "native"), work, shard_lines)
    if on_cluster is not None and work is None:
        raise SpecError("work", "is missing; with a cluster, name a folder for finished shards")
    device = loading.get("device", "auto")
    processes = workers is not None and decoding.get("engine", "native") == "native" and on_cluster is None
    if processes or (on_cluster is not None and isinstance(run, str | Path)):
        loading["device"] = "cpu"
    runs = load_runs(run, mapped=processes, **loading)
    for each in runs:
        each.check_command("translate")
    with cpu_threads(threads):
        decoder = text_decoder(runs, n_best=n_best, best=True, threads=workers or threads, **decoding)
        listed = [texts] if isinstance(texts, str) else texts
        if on_cluster is not None:
            task = node_task(task_of(decoder, [str(each.path) for each in runs], loading), device, threads)
            warn = decoding.get("warn", lambda _: None)
            with Shards(on_cluster, Path(work or ""), task, workers, shard_lines, warn) as shards:
                outputs = list(shards.translate(listed, warn))
        elif processes:
            task = task_of(decoder, [str(each.path) for each in runs], loading)
            with Workers(workers or 1, task) as several:
                outputs = list(several.translate(listed, decoding.get("warn", lambda _: None)))
        else:
            outputs = list(decoder.outputs(listed))
    results: list[Any] = [[o.text for o in best] if n_best is not None else best[0].text for best in outputs]
    return results[0] if isinstance(texts, str) else results


@overload
def generate(run: Runs, prompts: str, *, n_best: int | None = None, **options: Unpack[_Generation]) -> list[Output]: ...
@overload
def generate(
    run: Runs, prompts: Iterable[str], *, n_best: int | None = None, **options: Unpack[_Generation]
) -> list[list[Output]]: ...
@accepts(_Generation, text_decoder, search_from_options, load_runs)
def generate(
    run: Runs, prompts: str | Iterable[str], *, n_best: int | None = None, threads: int | None = None, **options: Any
) -> list[Output] | list[list[Output]]:
    """Continue one prompt or several prompts, and return the n best continuations of each, with their scores.

        regard.generate("runs/novel", "Once upon a time", temperature=0.8, top_p=0.9, max_len=50)[0].text

    Continuations are sampled, unless `beam` or the recipe selects beam search. The options are described in
    `regard.runs.options`.
    """
    loading, decoding = _split(options)
    runs = load_runs(run, **loading)
    for each in runs:
        each.check_command("generate")
    with cpu_threads(threads):
        decoder = text_decoder(runs, n_best=n_best, **decoding)
        outputs = list(decoder.outputs([prompts] if isinstance(prompts, str) else prompts))
    return outputs[0] if isinstance(prompts, str) else outputs


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for loading a run, and all other options."""
    loading = {name: value for name, value in options.items() if name in LoadOptions.__annotations__}
    return loading, {name: value for name, value in options.items() if name not in loading}


@overload
def classify(run: Runs, texts: str, **options: Unpack[_Classification]) -> Prediction: ...
@overload
def classify(run: Runs, texts: Sequence[str], **options: Unpack[_Classification]) -> list[Prediction]: ...
@accepts(LoadOptions, load_runs)
def classify(
    run: Runs,
    texts: str | Sequence[str],
    *,
    batch_size: int = BATCH,
    threads: int | None = None,
    warn: Warn = lambda _: None,
    **options: Unpack[LoadOptions],
) -> Prediction | list[Prediction]:
    """Predict the class of one text or of several texts. A prediction includes the probability of every class."""
    with cpu_threads(threads):
        return load_one(run, "classify", **options).classify(texts, batch_size, warn)


@accepts(LoadOptions, load_runs)
def score(
    run: Runs,
    texts: str | Output | Sequence[str | tuple[str, ...] | Output],
    *,
    batch_size: int = BATCH,
    threads: int | None = None,
    warn: Warn = lambda _: None,
    **options: Unpack[LoadOptions],
) -> TextScore | list[TextScore]:
    """Return the log-probability of one text, or a list with the log-probability of each of several texts.

    A text is a string, a pair (source, target) or an `Output`; see `TrainedModel.score`.
    """
    with cpu_threads(threads):
        return load_one(run, "score", **options).score(texts, batch_size, warn)


@accepts(EvaluationOptions, evaluate_options, load_runs)
def evaluate(run: Run, *, threads: int | None = None, **options: Unpack[EvaluationOptions]) -> dict[str, Any]:
    """Return the scores of a trained model, or of a file of outputs, on test text, as in `regard evaluate --json`.

    regard.evaluate("runs/mine", source="test.en", reference="test.de", against="runs/other")
    """
    if isinstance(run, TrainedModel):
        load_runs(run, **_split(dict(options))[0])  # refuses options for loading
    with cpu_threads(threads):
        return evaluate_options(run, load, **options)
