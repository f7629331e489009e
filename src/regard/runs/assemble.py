"""Assemble a training run from a recipe and prepared data: model, data loader, validation and trainer.

`regard train`, `regard resume` and `regard ablate` use this module.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.data import cache
from regard.data.batching import Windows
from regard.data.loader import BatchLoader, Examples
from regard.data.prepare import Prepared
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.evaluation.likelihood_metrics import LOSS
from regard.evaluation.metric import Metric
from regard.evaluation.validation import HeldOut, measured, validate
from regard.fast import beam_search
from regard.inference.text import Texts
from regard.models.base import Generator, Model
from regard.models.build import build
from regard.planner import fit as fitting
from regard.recipe.recipe import Recipe
from regard.runs.trained_model import TrainedModel, load_weights
from regard.training.checkpoint import CheckpointPolicy, RunFolder
from regard.training.console import Sample
from regard.training.parallel.group import ALONE, Group
from regard.training.ranking import Criterion, Metrics
from regard.training.trainer import Trainer, Watcher

SAMPLED, SAMPLE_WORDS, SAMPLE_TOKENS = 100, range(4, 13), 20  # for the sample output shown at validation
COUNTED = (48, 96)  # lengths of the texts in which the FLOPs of longer texts are counted
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # environment variable: the folder for compiled code


def assemble(  # noqa: PLR0913  # all parts of a training run
    recipe: Recipe,
    data: Prepared,
    folder: RunFolder,
    device: torch.device,
    watchers: Sequence[Watcher] = (),
    measure: Callable[[Model], Metrics] | None = None,
    criterion: Metric = LOSS,
    *,
    parent: TrainedModel | None = None,
    checkpoints: CheckpointPolicy = CheckpointPolicy(),
    flops_per_token: float | None = None,
    began: float | None = None,
    plain: bool = False,
    group: Group = ALONE,
) -> Trainer:
    """Return the trainer for a recipe, before the first training step.

    If a trained model `parent` is given, its weights are the initial weights (fine-tuning). Otherwise the weights are
    initialised with the random seed of the recipe. The other arguments after `device` are passed to `Trainer`.
    """
    if recipe.train.compile or device.type == "cuda":
        keep_compiled_code()
    # A model that does not fit on one GPU is moved there in parts, when it is sharded.
    sharded = recipe.train.parallel == "shard" and group.device is not None
    model = build(recipe.model, "cpu" if sharded else device, seed=recipe.train.seed)
    if parent is not None:
        load_weights(model, _grown(parent.model.state_dict(), model.state_dict()), parent.path)
    assert recipe.data.batching is not None
    examples = Examples(data.train, data.weights, data.objective)
    loader = BatchLoader(examples, recipe.data.batching, recipe.train.seed)
    loader.plan(0)  # raises an error for examples that cannot be batched
    return Trainer(
        model,
        recipe.train,
        loader,
        folder,
        measure,
        watchers,
        Criterion(criterion.name, criterion.higher_is_better),
        flops_per_token=flops_per_token,
        began=began,
        trained=parent is not None,
        checkpoints=checkpoints,
        plain=plain,
        group=group,
        decoders={column.replace("text", "target"): each.decode for column, each in data.tokenizers.items()},
    )


def keep_compiled_code() -> None:
    """Make `torch.compile` store compiled code in regard's cache, unless the user has set TORCHINDUCTOR_CACHE_DIR."""
    folder = os.environ.get(COMPILE_CACHE, "")
    default = not folder or Path(folder).name.startswith("torchinductor_")  # torch's default, which a reboot may clear
    if default and (compiled := cache.compile_folder()) is not None:
        os.environ[COMPILE_CACHE] = str(compiled)


def _grown(weights: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights`, with rows that a tensor lacks (such as those of new classes) copied from `initial`."""
    return {
        name: torch.cat([tensor, initial[name][len(tensor) :].to(tensor.device)])
        if name in initial and initial[name].shape != tensor.shape and initial[name].shape[1:] == tensor.shape[1:]
        else tensor
        for name, tensor in weights.items()
    }


def held_out(recipe: Recipe, data: Prepared) -> HeldOut | None:
    """Return the validation set of a recipe, or None if the recipe has no validation text."""
    if data.valid is None or not data.valid.rows:
        return None
    batching, longest, limit = recipe.data.batching, recipe.data.longest, recipe.length_limit
    assert batching is not None
    batching = fitting.padded(batching) if batching.packed else batching
    texts, size = data.valid_texts, data.valid_survey.bytes
    extracts = recipe.data.long == "extract"
    return HeldOut(data.objective, data.valid, texts, data.tokenizers, batching, size, longest, limit, extracts)


def measure_of(
    recipe: Recipe,
    data: Prepared,
    criterion: Metric = LOSS,
    decode: int | None = None,
    show: Callable[[Sample], None] | None = None,
) -> Callable[[Model], Metrics] | None:
    """Return a function that computes the validation metrics of a model, or None if the recipe has no validation text.

    For metrics of text, the function decodes the first `decode` validation examples (default: `train.decode` of the
    recipe). It also calls `show` with a sample output.
    """
    records = held_out(recipe, data)
    if records is None:
        return None
    count = recipe.train.decode if decode is None else decode
    metrics = measured(data.objective, recipe.train.bleu_tokenize, criterion)

    def measure(model: Model) -> Metrics:
        outputs: list[str] = []
        values = validate(model, records, Beam(beam_size=1), count, metrics, criterion, outputs)
        if show is not None and (sample := sample_output(model, records, outputs)) is not None:
            show(sample)
        return values

    return measure


def sample_output(model: Model, records: HeldOut, outputs: Sequence[str]) -> Sample | None:
    """Return the model's output for a short validation example, or None if there is no output to show.

    `outputs` has the model's outputs for the first validation examples. If `outputs` is empty and the model is a
    language model, the model continues the first half of the example.
    """
    objective = records.objective
    pairs = [objective.pair(record) for record in records.texts[: len(outputs) or SAMPLED]]
    if not pairs:
        return None
    index = next((i for i, (text, _) in enumerate(pairs) if len(text.split()) in SAMPLE_WORDS), 0)
    source, reference = pairs[index]
    if outputs:
        return Sample(source, outputs[index], reference)
    if objective.model != "language_model" or not isinstance(model, Generator):
        return None
    words, tokenizer = source.split(), records.tokenizers["target"]
    prompt, rest = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
    begin = () if objective.stream else (tokenizer.bos,)
    device = next(model.parameters()).device
    texts = Texts([model], tokenizer, tokenizer, records.max_len, device, begin=begin)
    ((output,),) = texts.generate([prompt], Beam(beam_size=1), limits=Limits(max_len=SAMPLE_TOKENS))
    beam_search.release()  # frees the memory of the search for training
    return Sample(prompt, output.text.removeprefix(prompt), rest)


def forward_flops(recipe: Recipe, data: Prepared) -> float:
    """Return the FLOPs of a forward pass per predicted token, or per text for a classifier, at the mean text length."""
    from regard.models.cost import cost  # noqa: PLC0415  # torch's counter takes a second and a half to import

    column = data.objective.measured[-1]
    length = max(1, data.survey.ids[column] // max(1, data.survey.kept))
    if isinstance(recipe.data.batching, Windows):
        length = recipe.data.batching.length
    # The FLOPs of a token are a constant, plus a multiple of the length if there is attention. To count them, recurrent
    # layers run token by token, which would take half a minute for a thousand tokens.
    if length <= COUNTED[1]:
        per_token = cost(recipe.model, length).flops_per_token
    else:
        short, long = (cost(recipe.model, tokens).flops_per_token for tokens in COUNTED)
        per_token = short + (long - short) * (length - COUNTED[0]) / (COUNTED[1] - COUNTED[0])
    return per_token * length if data.objective.labelled else per_token
