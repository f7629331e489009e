"""Training in a run folder: start or resume a run, stop on a signal, and report how fine-tuning changed the metrics."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from regard.data.cache import Cache
from regard.data.prepare import ROOM, Prepared, opened, prepare
from regard.data.tokenizer import tokenizer_files
from regard.errors import DataError, OutOfMemoryError, SpecError, lacks_memory
from regard.evaluation import baselines
from regard.evaluation.likelihood_metrics import LOSS
from regard.evaluation.validation import criterion_of, measured
from regard.files import LOCK, TEMPORARY, clear, locked
from regard.planner.speed import hardware
from regard.planner.threads import quiet as idle
from regard.recipe.recipe import Recipe, RecipeRequest
from regard.runs.assemble import assemble, forward_flops, measure_of
from regard.runs.options import RequestOptions, accepts, cpu_threads, seconds
from regard.runs.request import check_request, request_from_options
from regard.runs.resolve import choose_metric, labels_after, resolve
from regard.runs.trained_model import TrainedModel, choose_device, load, read_recipe, read_tokenizers
from regard.training import degenerate
from regard.training.checkpoint import FORMAT, RunFolder, read_json, write_json
from regard.training.console import TrainingConsole
from regard.training.log import Log, TensorBoard, environment
from regard.training.spec import TrainSpec
from regard.training.trainer import Outcome, Trainer, Watcher, precision

PARENT_RECORDS = 200  # validation examples of the parent run, translated before and after fine-tuning


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training command that are not part of the recipe."""

    device: str = "auto"
    max_time: float | None = None  # seconds after which training saves and stops
    quiet: bool = True
    trust_code: bool = False  # parts named as module:Class may be imported
    cache: bool = True  # read prepared data from the cache, and store it there
    plain: bool = False  # train the readable form of the model, without the kernels of regard.fast
    began: float = field(default_factory=time.monotonic)  # the start of a time budget


@accepts(RequestOptions, request_from_options)
def train(
    out: str | Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    max_time: str | float | None = None,
    cache: bool = True,
    plain: bool = False,
    quiet: bool = True,
    **options: Unpack[RequestOptions],
) -> TrainedModel:
    """Train a model on text files, save it in the run folder `out`, and return the trained model.

        regard.train("runs/mine", source="train.en", target="train.de", time="10m")
        regard.train("runs/novel", text="novel.txt", preset="gpt2_small", steps=1000, changes="model.dropout=0.2")

    The options are those of `regard train` (see `regard.runs.options.RequestOptions`). After `max_time`, in seconds or
    as a text such as "30m", training saves a checkpoint and stops; `regard.resume` continues the run. `cache` allows
    prepared data to be read from the cache and stored there. `plain` trains the readable form of the model, without the
    kernels of `regard.fast`.
    """
    request, trust_code = request_from_options(**options), options.get("trust_code", False)
    settings = TrainingOptions(device, seconds(max_time), quiet, trust_code, cache, plain)
    with cpu_threads(threads):
        return start_run(request, out, settings)[0]


def start_run(
    request: RecipeRequest, out: str | Path, options: TrainingOptions | None = None, beside: Sequence[str] = ()
) -> tuple[TrainedModel, Outcome]:
    """Train in a new run folder; return the trained model and the outcome of training.

    The folder may already contain files named in `beside`, but no other files.
    """
    options = options or TrainingOptions()  # not a default value, because the time budget begins now
    folder = RunFolder(out)
    if not folder.request.exists():  # do not even write a lock into a folder that is not a run
        _check_free(folder, beside)
    precision(request.train, choose_device(options.device))  # raises an error before anything is created
    check_request(request)
    request = request.absolute()
    console = TrainingConsole(quiet=options.quiet)
    # From here on, no other process can start a run in this folder.
    with locked(folder.path, lambda: _check_free(folder, beside)):
        try:
            write_json(folder.request, {"format": FORMAT} | request.record())
            trainer = _prepare_and_assemble(folder, request, options, console)
        except BaseException:  # nothing was trained: leave nothing behind
            clear(folder.path, [LOCK])
            raise
        try:
            return _fit(trainer, folder, request, options, console)
        except OutOfMemoryError:  # a folder without a trained step is not worth keeping
            if (latest := folder.latest()) is None or latest.step == 0:
                clear(folder.path, [LOCK])
            raise


def _check_free(folder: RunFolder, beside: Sequence[str]) -> None:
    """Raise an error if the folder contains files other than a lock file, temporary files and those in `beside`."""
    free = not folder.path.exists() or (
        folder.path.is_dir()
        and all(path.name in (LOCK, *beside) or TEMPORARY.fullmatch(path.name) for path in folder.path.iterdir())
    )
    if not free:
        hint = "regard resume continues it; " if folder.request.exists() else ""
        raise DataError(f"{folder.path} exists; {hint}choose another folder to train into")


def resume(
    path: str | Path,
    device: str = "auto",
    max_time: str | float | None = None,
    quiet: bool = True,
    trust_code: bool = False,
    plain: bool = False,
    threads: int | None = None,
) -> TrainedModel:
    """Continue a training run exactly where it stopped, and return the trained model."""
    with cpu_threads(threads):
        return resume_run(path, TrainingOptions(device, seconds(max_time), quiet, trust_code, plain=plain))[0]


def resume_run(path: str | Path, options: TrainingOptions | None = None) -> tuple[TrainedModel, Outcome]:
    """Continue a training run where it stopped; return the trained model and the outcome of training.

    A run that stopped before its first checkpoint starts again from the beginning.
    """
    options = options or TrainingOptions()
    folder = RunFolder(path)
    if not folder.request.exists() and not folder.recipe.exists():
        raise DataError(f"{folder.path} is not a training run; create one with regard train")
    console = TrainingConsole(quiet=options.quiet)
    if not folder.final.exists():
        with locked(folder.path, writes=folder.writes):
            if not folder.final.exists():  # another process may have finished the run meanwhile
                request = _read_request(folder, options.trust_code)
                trainer = _prepare_and_assemble(folder, request, replace(options, cache=False), console)
                trainer.resume()
                return _fit(trainer, folder, request, options, console)
    run = load(folder.path, options.device, trust_code=options.trust_code, plain=options.plain)
    console.report(f"already finished: {folder.path}; to continue with other text: regard train --from {folder.path}")
    return run, Outcome(True, "it was finished", run.step)


def _read_request(folder: RunFolder, trust_code: bool) -> RecipeRequest:
    record = read_json(folder.request)
    record.pop("format", None)
    try:
        return RecipeRequest.of(record, trust_code)
    except SpecError as error:
        raise DataError(f"{folder.request}: {error}") from None


def _prepare_and_assemble(
    folder: RunFolder, request: RecipeRequest, options: TrainingOptions, console: TrainingConsole
) -> Trainer:
    """Return the trainer of a run.

    Data and recipe are read from the run folder if an earlier command has written them. Otherwise the data are prepared
    and the recipe is resolved now.
    """
    parent = None
    if request.start is not None and folder.latest() is None:
        parent = load(request.start, "cpu", trust_code=options.trust_code)
    if folder.recipe.exists():
        recipe = read_recipe(folder, options.trust_code)
        read_tokenizers(folder, recipe.data.objective)  # raises an error now rather than after training
        data = opened(recipe.data, folder.data)
        # Recipes written by earlier versions do not include the metric that is chosen to suit the text.
        recipe = replace(recipe, train=choose_metric(recipe.train, data, []))
    else:
        data, recipe = _prepared(folder, request, parent, options, console)
    device, latest = choose_device(options.device), folder.latest()
    write_json(folder.path / "environment.json", environment(device))
    step = latest.step if latest else 0
    watchers: list[Watcher] = [Log(folder.log, step), console]
    if TensorBoard.installed():
        watchers.append(TensorBoard(folder.path / "tensorboard", step))
    else:
        console.report("no TensorBoard events: pip install 'regard[log]' adds them")
    criterion = criterion_of(recipe.train, data.objective, options.trust_code)
    trainer = assemble(
        recipe,
        data,
        folder,
        device,
        watchers,
        measure_of(recipe, data, criterion, show=None if options.quiet else console.show),
        criterion,
        parent=parent,
        flops_per_token=forward_flops(recipe, data) if device.type == "cuda" else None,
        began=options.began,
        plain=options.plain,
    )
    threads = f", threads: {torch.get_num_threads()}" if device.type == "cpu" else ""
    console.report(f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters on {device}{threads}")
    console.titles = {each.name: each.heading for each in (LOSS, criterion, *measured(data.objective, "none"))}
    baselines.report(folder, data, recipe.train, criterion, trainer.emit, console.report)
    return trainer


def _prepared(
    folder: RunFolder,
    request: RecipeRequest,
    parent: TrainedModel | None,
    options: TrainingOptions,
    console: TrainingConsole,
) -> tuple[Prepared, Recipe]:
    """Prepare the data and resolve the recipe of a new run; write both to the run folder and return them."""
    if parent is not None:
        if parent.objective.kind != request.data.objective.kind:
            raise DataError(f"{parent.path} was trained for {parent.objective.kind}, not {request.data.objective.kind}")
        if request.data.objective.labelled:
            objective = request.data.objective.with_labels(labels_after(parent, request.data, console.report))
            request = replace(request, data=replace(request.data, objective=objective))
        # The length limit of the parent is kept, because its model may have no more positions.
        spec, known = request.data, parent.recipe.data
        limits = {"max_len": spec.max_len or known.max_len, "long": spec.long or known.long}
        request = replace(request, data=replace(spec, tokenizer=known.tokenizer, **limits))
    tokenizers = None if parent is None else parent.tokenizers
    cache, device = Cache.default() if options.cache else None, choose_device(options.device)
    room = ROOM if device.type == "cuda" else ROOM // 2
    data = prepare(request.data, folder.data, request.train.seed, tokenizers, console.report, cache, room)
    for sentence in data.report:
        console.report(sentence)
    elapsed = time.monotonic() - options.began
    recipe = resolve(
        request, data, device, console.report, parent, hardware=hardware(device, keep=idle()), elapsed=elapsed
    )
    for name, tokenizer in tokenizer_files(data.tokenizers).items():
        tokenizer.save(folder.path / name)
    write_json(folder.recipe, {"format": FORMAT} | recipe.record())
    return data, recipe


def _fit(
    trainer: Trainer, folder: RunFolder, request: RecipeRequest, options: TrainingOptions, console: TrainingConsole
) -> tuple[TrainedModel, Outcome]:
    """Train until the last step, a signal or the time limit; return the trained model and the outcome of training."""
    deadline = None if options.max_time is None else time.monotonic() + options.max_time
    try:
        with _signals() as caught:

            def stop() -> str | None:
                if caught:
                    return f"{caught[0]}. Continue: regard resume {folder.path}"
                if deadline is not None and time.monotonic() > deadline:
                    return f"time limit reached. Continue: regard resume {folder.path}"
                return None

            outcome = trainer.fit(stop)
    finally:
        console.close()
    if not outcome.finished and (warning := inside_warmup(trainer.spec, outcome.step)):
        console.report(warning)
    if not folder.steps():
        raise DataError(f"{folder.path} has no checkpoint; start again with regard resume")
    run = load(folder.path, options.device, trust_code=options.trust_code, plain=options.plain)
    warnings = list[str]()
    if outcome.finished:
        criterion = criterion_of(trainer.spec, run.objective, options.trust_code)
        baselines.compare(folder, run.scores, criterion, warnings.append)
        for sentence in warnings:
            console.report(sentence)
        change = None if request.start is None else _change_on_parent(request.start, run, options)
        if change is not None:
            trainer.emit("parent", **change)
            console.report(described_change(change, criterion.name))
    console.warn(run.scores)
    if warnings or degenerate.warnings(run.scores):
        console.report(f"to find the cause: regard doctor {folder.path}")
    return run, outcome


def _change_on_parent(start: str, run: TrainedModel, options: TrainingOptions) -> dict[str, Any] | None:
    """Evaluate the parent model and the fine-tuned model on the validation text of the parent run.

    Return {"parent": path, "before": metrics, "after": metrics}, or None if the parent cannot be loaded or memory runs
    out.
    """
    try:
        parent = load(start, options.device, trust_code=options.trust_code, plain=options.plain)
        data = opened(parent.recipe.data, RunFolder(parent.path).data)
        criterion = criterion_of(parent.recipe.train, data.objective, options.trust_code)
    except (DataError, SpecError):  # the folder has been moved or cleared, or the criterion is code that is not trusted
        return None
    decode = min(PARENT_RECORDS, parent.recipe.train.decode)
    # The fine-tuned classifier may have new classes, so each model is measured with its own objective.
    before, after = (
        measure_of(parent.recipe, replace(data, objective=each.objective), criterion, decode) for each in (parent, run)
    )
    if before is None or after is None:
        return None
    try:
        with torch.no_grad():
            return {"parent": str(parent.path), "before": before(parent.model), "after": after(run.model)}
    except (MemoryError, RuntimeError) as error:  # the run itself is complete
        if not lacks_memory(error):
            raise
        return None


def described_change(change: Mapping[str, Any], criterion: str) -> str:
    """Return a sentence on how fine-tuning changed the metrics on the validation text of the parent run."""
    before, after = change["before"], change["after"]
    names = [name for name in dict.fromkeys((criterion, "loss")) if name in before and name in after]
    values = ", ".join(f"{name} {before[name]:.3g} before, {after[name]:.3g} now" for name in names)
    return f"validation text of {change['parent']}: {values}"


def inside_warmup(train: TrainSpec, step: int) -> str | None:
    """Return a warning if training stopped during learning rate warm-up, and None otherwise."""
    warmup = getattr(train.schedule, "warmup", None) or 0
    if step >= warmup:
        return None
    return (
        f"warning: training stopped inside the learning rate warm-up (step {step:,} of {warmup:,}), so the model has "
        "hardly begun to learn; with --time the schedule fits the time"
    )


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Yield a list. The first Ctrl-C or SIGTERM appends a description to the list; the second has its usual effect."""
    caught: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: Any) -> None:
        caught.append("interrupted" if number == signal.SIGINT else "terminated")
        signal.signal(number, before[number])

    try:
        for number in before:
            signal.signal(number, note)
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
