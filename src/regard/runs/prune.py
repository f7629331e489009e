"""Remove attention heads from a trained model, and save the smaller model as a training run."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from regard.data.tokenizer import tokenizer_files
from regard.errors import DataError, SpecError
from regard.files import new_folder
from regard.inspection.importance import mean_loss
from regard.inspection.interventions import Head, all_heads
from regard.inspection.pruning import least_important, pruned
from regard.models.build import build
from regard.runs.heads import batches_of, importance, require_heads, texts_for
from regard.runs.inference import Runs, load_one, load_runs
from regard.runs.options import LoadOptions, accepts, cpu_threads
from regard.runs.trained_model import TrainedModel, held_out, load_weights
from regard.training.checkpoint import FORMAT, RunFolder, weights_digest, write_json

COPIED = ("environment.json", "baselines.json")


@dataclass(frozen=True)
class Pruning:
    """The removed heads, and the number of heads and parameters and the loss per label, each before and after."""

    path: Path
    removed: tuple[Head, ...]
    heads: tuple[int, int]
    parameters: tuple[int, int]
    loss: tuple[float, float] | None  # None: there was no text to measure it

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self) | {"path": str(self.path), "removed": [str(head) for head in self.removed]}


@accepts(LoadOptions, load_runs)
def prune(
    run: Runs,
    heads: float | str | Sequence[Head],
    out: str | Path,
    *,
    by: str | None = None,
    source: str | Path | None = None,
    target: str | Path | None = None,
    text: str | Path | None = None,
    threads: int | None = None,
    **options: Unpack[LoadOptions],
) -> Pruning:
    """Remove attention heads from a trained model, and write the smaller model to the new run folder `out`.

    `heads` is a share (0.25: the least important quarter), or a list of heads, such as "decoder.cross:1.0,
    encoder.self:0.3", with layers and heads counted from 0. For a share, the importance is measured as in
    `regard.heads`, by "gradient" (the default, divided by the norm of its layer) or by "ablation", on the given files
    or the validation text of the run. The new run is used, evaluated and fine-tuned like any other.
    """
    if Path(out).exists():
        raise DataError(f"{out} exists; choose another folder for the pruned model")
    share, removed = parsed(heads)
    if share is None and by is not None:
        raise SpecError("--by", "has no effect on a list of heads; leave it out, or give a share of the heads")
    whole = _plain(load_one(run, "prune", **options))
    with cpu_threads(threads):
        needed = share is not None or any((source, target, text)) or held_out(RunFolder(whole.path))
        batches = batches_of(whole, texts_for(whole, source, target, text)) if needed else []
        if share is not None:
            values = importance(whole, batches, by or "gradient")
            removed = least_important(whole.model, values, share, by_layer=by != "ablation")
        model = pruned(whole.model, removed)
        loss = (mean_loss(whole.model, batches), mean_loss(model, batches)) if batches else None
    smaller = replace(whole, model=model, recipe=replace(whole.recipe, model=model.spec), path=Path(out))
    write(smaller, whole)
    before = len(all_heads(whole.model))
    counts = (before, before - len(removed))
    return Pruning(smaller.path, tuple(sorted(removed)), counts, (whole.parameters, smaller.parameters), loss)


def _plain(run: TrainedModel) -> TrainedModel:
    """Return a copy of the model on the CPU, without the modules of `regard.fast`."""
    require_heads(run)
    model = build(run.recipe.model, init=False)
    load_weights(model, {name: tensor.cpu() for name, tensor in run.model.state_dict().items()}, run.path)
    return replace(run, model=model.eval())


def parsed(heads: float | str | Sequence[Head]) -> tuple[float | None, list[Head]]:
    """Return the share of heads and [], or None and the listed heads."""
    if isinstance(heads, str):
        try:
            heads = float(heads)
        except ValueError:
            heads = [Head.parse(each) for each in heads.split(",")]
    if isinstance(heads, int | float):
        return float(heads), []
    if not heads:
        raise SpecError("--heads", "is an empty list; name the heads to remove")
    return None, list(dict.fromkeys(Head(*head) for head in heads))


def write(run: TrainedModel, parent: TrainedModel) -> None:
    """Write the run folder of a model that was made from the model of another run."""
    with new_folder(run.path) as path:
        folder = RunFolder(path)
        write_json(folder.recipe, {"format": FORMAT} | run.recipe.record())
        for name, tokenizer in tokenizer_files(run.tokenizers).items():
            tokenizer.save(path / name)
        for name in COPIED:
            if (parent.path / name).exists():
                shutil.copyfile(parent.path / name, path / name)
        if (parent.path / "data" / "valid.jsonl").exists():
            folder.data.mkdir()
            shutil.copyfile(parent.path / "data" / "valid.jsonl", folder.data / "valid.jsonl")
        weights = run.model.state_dict()
        about = {"steps": json.dumps([run.step]), "scores": json.dumps({}), "sha256": weights_digest(weights)}
        folder.save_final(weights, about)
