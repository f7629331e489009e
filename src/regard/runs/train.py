"""Training in a run folder: start or resume a run, stop on a signal, and report how fine-tuning changed the metrics."""

import json
import re
import time
from collections.abc import Mapping, Sequence
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
from regard.evaluation.metric import Metric
from regard.evaluation.validation import criterion_of, measured
from regard.files import LOCK, TEMPORARY, clear, locked
from regard.planner.speed import hardware
from regard.planner.threads import quiet as idle
from regard.recipe.recipe import Recipe, RecipeRequest
from regard.runs.assemble import assemble, forward_flops, measure_of
from regard.runs.checksums import verify, write_checksums
from regard.runs.compare import differences
from regard.runs.options import RequestOptions, accepts, cpu_threads, seconds
from regard.runs.request import check_request, request_from_options
from regard.runs.resolve import choose_metric, labels_after, resolve
from regard.runs.shared_steps import longest_example, shared
from regard.runs.signals import stop_signals
from regard.runs.trained_model import TrainedModel, choose_device, load, read_recipe, read_tokenizers
from regard.training import degenerate
from regard.training.checkpoint import FORMAT, RunFolder, json_text, read_json, write_json
from regard.training.console import TrainingConsole
from regard.training.log import Log, TensorBoard, environment
from regard.training.parallel.group import Group, joined
from regard.training.parallel.joining import OtherRankError, launch_name
from regard.training.recovery import Recovery, newest_whole
from regard.training.spec import TrainSpec
from regard.training.trainer import Outcome, Trainer, Watcher, precision

START, RESUME, FINISHED = "start", "resume", "finished"  # what rank 0 does, and so all ranks
CLEARED = 2.0  # seconds from the moment when rank 0 clears the folder, until the others know that it has failed
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
    watchers: Sequence[Watcher] = ()  # receive the events of training, too
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
    watchers: Sequence[Watcher] = (),
    **options: Unpack[RequestOptions],
) -> TrainedModel:
    """Train a model on text files, save it in the run folder `out`, and return the trained model.

        regard.train("runs/mine", source="train.en", target="train.de", time="10m")
        regard.train("runs/novel", text="novel.txt", preset="gpt2_small", steps=1000, changes="model.dropout=0.2")

    The options are those of `regard train` (see `regard.runs.options.RequestOptions`). After `max_time`, in seconds or
    as a text such as "30m", training saves a checkpoint and stops; `regard.resume` continues the run. `cache` allows
    prepared data to be read from the cache and stored there. `plain` trains the readable form of the model, without the
    kernels of `regard.fast`. `watchers` are objects with a method `note(event)`, which receives every event of training
    as a dict, such as {"event": "valid", "step": 100, "loss": 2.9, ...} (see docs/cluster.md).
    """
    request, trust_code = request_from_options(**options), options.get("trust_code", False)
    settings = TrainingOptions(device, seconds(max_time), quiet, trust_code, cache, plain, watchers)
    with cpu_threads(threads):
        return start_run(request, out, settings)[0]


def start_run(
    request: RecipeRequest, out: str | Path, options: TrainingOptions | None = None, beside: Sequence[str] = ()
) -> tuple[TrainedModel, Outcome]:
    """Train in a new run folder; return the trained model and the outcome of training.

    The folder may already contain files named in `beside`, but no other files.
    """
    options = options or TrainingOptions()  # not a default value, because the time budget begins now
    with joined(choose_device(options.device).type) as group:
        if continues_launch(request, RunFolder(out), options, group):
            return _resume(RunFolder(out), options, group)
        return _start(request, RunFolder(out), options, beside, group)


def continues_launch(request: RecipeRequest, folder: RunFolder, options: TrainingOptions, group: Group) -> bool:
    """Return whether torchrun has started these processes again after a failure, and the run has begun before it.

    Raise an error if the run in the folder has begun with other settings.
    """

    def began() -> bool:
        if not folder.request.exists():
            return False
        about = folder.path / "environment.json"
        before = read_json(about).get("launch") if about.exists() else None
        continues = group.restarted or (before is not None and before == launch_name())
        if continues:
            _check_same_settings(request, folder, options)
        return continues

    return group.alone(began) if group.size > 1 or group.restarted else False


def _check_same_settings(request: RecipeRequest, folder: RunFolder, options: TrainingOptions) -> None:
    """Raise an error that names the first setting in which `request` differs from the request of a run."""
    requests = (_read_request(folder, options.trust_code), request.absolute())
    records = [json.loads(json_text(each.record())) for each in requests]
    for path, values in differences(records):
        name = {"start": "--from", "fixes_rows": "data.batching"}.get(path, re.sub("^changes", "model", path))
        before, now = (text if len(text) <= 60 else f"{text[:57]}..." for text in map(json.dumps, values))
        raise DataError(
            f"{folder.path} was started with {name} = {before}, not {now}; choose another folder with --out, or "
            f"continue the run as it is with regard resume {folder.path}"
        )


def _start(
    request: RecipeRequest, folder: RunFolder, options: TrainingOptions, beside: Sequence[str], group: Group
) -> tuple[TrainedModel, Outcome]:
    if not group.leads:
        return _follow(folder, options, group)
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
            group.alone(lambda: START)
            trainer = _prepare_and_assemble(folder, request, options, console, group)
        except BaseException:  # nothing was trained: leave nothing behind
            clear(folder.path, [LOCK])
            raise
        try:
            return _fit(trainer, folder, request, options, console, group)
        except OutOfMemoryError:  # a folder without a trained step is not worth keeping
            if max(folder.checkpoints(), default=0) == 0:
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
    watchers: Sequence[Watcher] = (),
) -> TrainedModel:
    """Continue a training run exactly where it stopped, and return the trained model.

    `watchers` are objects with a method `note(event)`, as in `train`.
    """
    options = TrainingOptions(device, seconds(max_time), quiet, trust_code, plain=plain, watchers=watchers)
    with cpu_threads(threads):
        return resume_run(path, options)[0]


def resume_run(path: str | Path, options: TrainingOptions | None = None) -> tuple[TrainedModel, Outcome]:
    """Continue a training run where it stopped; return the trained model and the outcome of training.

    A run that stopped before its first checkpoint starts again from the beginning.
    """
    options = options or TrainingOptions()
    with joined(choose_device(options.device).type) as group:
        return _resume(RunFolder(path), options, group)


def _resume(folder: RunFolder, options: TrainingOptions, group: Group) -> tuple[TrainedModel, Outcome]:
    if not folder.request.exists() and not folder.recipe.exists():
        raise DataError(f"{folder.path} is not a training run; create one with regard train")
    console = TrainingConsole(quiet=options.quiet)
    if not group.leads:
        return _follow(folder, options, group)
    if not folder.final.exists():
        with locked(folder.path, writes=folder.writes):
            if not folder.final.exists():  # another process may have finished the run meanwhile
                request = _read_request(folder, options.trust_code)
                recovery = _recovered(folder, group)
                options = replace(options, cache=False)
                trainer = _prepare_and_assemble(folder, request, options, console, group, recovery)
                trainer.resume(recovery)
                del recovery  # with its copies of all tensors
                return _fit(trainer, folder, request, options, console, group)
    group.alone(lambda: FINISHED)
    run = load(folder.path, options.device, trust_code=options.trust_code, plain=options.plain)
    console.report(f"already finished: {folder.path}; to continue with other text: regard train --from {folder.path}")
    return run, Outcome(True, "it was finished", run.step)


def _recovered(folder: RunFolder, group: Group) -> Recovery | None:
    """Read the checkpoint from which to resume, on rank 0. The other ranks wait, and then read it themselves."""
    found: list[Recovery | None] = []

    def read() -> str:
        found.append(newest_whole(folder))
        return RESUME

    group.alone(read)
    return found.pop()


def _follow(folder: RunFolder, options: TrainingOptions, group: Group) -> tuple[TrainedModel, Outcome]:
    """Train on a rank other than 0. Rank 0 has the lock of the folder, and decides whether to start or resume."""
    task = group.alone(lambda: START)  # the value of rank 0
    if not folder.request.exists() and not folder.recipe.exists():
        if group.failed_elsewhere(CLEARED):
            raise OtherRankError(f"rank {group.rank} stops, because another rank has failed")
        raise DataError(
            f"rank {group.rank} does not find {folder.path}, where rank 0 trains; use a folder that all machines share"
        )
    if task == FINISHED:
        run = load(folder.path, options.device, trust_code=options.trust_code, plain=options.plain)
        return run, Outcome(True, "it was finished", run.step)
    request, console = _read_request(folder, options.trust_code), TrainingConsole(quiet=True)
    recovery = newest_whole(folder) if task == RESUME else None
    trainer = _prepare_and_assemble(folder, request, options, console, group, recovery)
    if task == RESUME:
        trainer.resume(recovery)
    del recovery  # with its copies of all tensors
    return _fit(trainer, folder, request, options, console, group)


def _read_request(folder: RunFolder, trust_code: bool) -> RecipeRequest:
    record = read_json(folder.request)
    record.pop("format", None)
    try:
        request = RecipeRequest.of(record, trust_code)
    except SpecError as error:
        raise DataError(f"{folder.request}: {error}") from None
    verify(folder, folder.request)
    return request


def _prepare_and_assemble(
    folder: RunFolder,
    request: RecipeRequest,
    options: TrainingOptions,
    console: TrainingConsole,
    group: Group,
    recovery: Recovery | None = None,
) -> Trainer:
    """Return the trainer of a run, which is to resume from the checkpoint `recovery`, if there is one.

    Data and recipe are read from the run folder if an earlier command, or rank 0, has written them. Otherwise the data
    are prepared and the recipe is resolved now.
    """
    parent = None
    if request.start is not None and recovery is None:
        parent = load(request.start, "cpu", trust_code=options.trust_code)
    device = group.device or choose_device(options.device)
    prepared: list[tuple[Prepared, Recipe]] = []

    def prepare_data() -> None:
        written = folder.recipe.exists()
        prepared.append(
            _opened(folder, options) if written else _prepared(folder, request, parent, options, console, group.size)
        )

    group.alone(prepare_data)
    data, recipe = prepared[0] if prepared else _opened(folder, options)
    step = recovery.progress.step if recovery else 0
    watchers = _watchers(folder, step, device, console, group, options.watchers) if group.leads else []
    criterion = criterion_of(recipe.train, data.objective, options.trust_code)
    trainer = assemble(
        recipe,
        data,
        folder,
        device,
        watchers,
        measure_of(recipe, data, criterion, show=None if options.quiet or not group.leads else console.show),
        criterion,
        parent=parent,
        flops_per_token=forward_flops(recipe, data) if device.type == "cuda" and group.leads else None,
        began=options.began,
        plain=options.plain,
        group=group,
    )
    group.alone(lambda: _report_model(trainer, folder, data, criterion, console))
    return trainer


def _check_resolved(folder: RunFolder, recipe: Recipe) -> None:
    """Raise an error if a recipe that was read from a run folder lacks a setting that training needs."""
    needed = {
        "data.batching": recipe.data.batching,
        "train.steps": recipe.train.steps,
        "train.optimizer": recipe.train.optimizer,
    }
    for path, value in needed.items():
        if value is None:
            raise DataError(f"{folder.recipe}: {path} is missing; restore the file from a copy")


def _watchers(
    folder: RunFolder,
    step: int,
    device: torch.device,
    console: TrainingConsole,
    group: Group,
    extra: Sequence[Watcher],
) -> list[Watcher]:
    """Write environment.json, and return the objects that receive the events of training from `step` on."""
    about = {"processes": group.size, "launch": launch_name()}
    write_json(folder.path / "environment.json", environment(device) | about)
    watchers: list[Watcher] = [Log(folder.log, step), console, *extra]
    if TensorBoard.installed():
        watchers.append(TensorBoard(folder.path / "tensorboard", step))
    else:
        console.report("no TensorBoard events: pip install 'regard[log]' adds them")
    return watchers


def _report_model(
    trainer: Trainer, folder: RunFolder, data: Prepared, criterion: Metric, console: TrainingConsole
) -> None:
    """Print the size of the model and the device, and write the metrics of trivial models."""
    device, size = trainer.device, trainer.group.size
    where = f"{device}, threads: {torch.get_num_threads()}" if device.type == "cpu" else str(device)
    processes = f", in {size} processes ({trainer.spec.parallel})" if size > 1 else ""
    console.report(f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters on {where}{processes}")
    console.titles = {each.name: each.heading for each in (LOSS, criterion, *measured(data.objective, "none"))}
    baselines.report(folder, data, trainer.spec, criterion, trainer.emit, console.report)


def _opened(folder: RunFolder, options: TrainingOptions) -> tuple[Prepared, Recipe]:
    """Return the data and the recipe in a run folder."""
    recipe = read_recipe(folder, options.trust_code)
    _check_resolved(folder, recipe)
    read_tokenizers(folder, recipe.data.objective)  # raises an error now rather than after training
    verify(folder, folder.data)
    data = opened(recipe.data, folder.data)
    # Recipes written by earlier versions do not include the metric that is chosen to suit the text.
    return data, replace(recipe, train=choose_metric(recipe.train, data, []))


def _prepared(
    folder: RunFolder,
    request: RecipeRequest,
    parent: TrainedModel | None,
    options: TrainingOptions,
    console: TrainingConsole,
    processes: int,
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
    recipe = shared(recipe, processes, longest_example(data), console.report)
    for name, tokenizer in tokenizer_files(data.tokenizers).items():
        tokenizer.save(folder.path / name)
    record = {"format": FORMAT} | recipe.record()
    write_checksums(folder, json_text(record))
    write_json(folder.recipe, record)
    return data, recipe


def _fit(
    trainer: Trainer,
    folder: RunFolder,
    request: RecipeRequest,
    options: TrainingOptions,
    console: TrainingConsole,
    group: Group,
) -> tuple[TrainedModel, Outcome]:
    """Train until the last step, a signal or the time limit; return the trained model and the outcome of training."""
    deadline = None if options.max_time is None else time.monotonic() + options.max_time
    try:
        with stop_signals() as caught:

            def stop() -> str | None:
                if caught.reason:
                    return f"{caught.reason}. Continue: regard resume {folder.path}"
                if deadline is not None and time.monotonic() > deadline:
                    return f"time limit reached. Continue: regard resume {folder.path}"
                return None

            outcome = trainer.fit(stop)
            outcome = outcome if outcome.finished else replace(outcome, exit_code=caught.exit_code or 0)
    finally:
        console.close()
    group.alone(lambda: None)  # until rank 0 has written all files
    if not outcome.finished and (warning := inside_warmup(trainer.spec, outcome.step)):
        console.report(warning)
    if not folder.steps():
        raise DataError(f"{folder.path} has no checkpoint; start again with regard resume")
    run = load(folder.path, options.device, trust_code=options.trust_code, plain=options.plain)
    warnings = list[str]()
    if outcome.finished and group.leads:
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
