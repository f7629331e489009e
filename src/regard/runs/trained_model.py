"""A trained model and its tokenizers, loaded from a run folder."""

# pyright: reportOverlappingOverload=false
# A string is one text, though it is also an iterable of strings.

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
import torch
from torch import nn

from regard import fast
from regard.batch import Batch
from regard.data.batching import Windows
from regard.data.extraction import shortened
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import Objective
from regard.data.token_store import Column, Table
from regard.data.tokenizer import Tokenizer
from regard.errors import DataError, SpecError
from regard.inference.ctranslate2 import NAME
from regard.inference.engine import Engine
from regard.inference.export import Exported, Trained, engine, export, named
from regard.inference.text import Output, Prediction, ScoringInput, TextScore, Warn, classify, score
from regard.inspection.recording import Recording
from regard.inspection.selection import LIMIT
from regard.models.base import Classifier, LanguageModel, Model
from regard.models.build import build
from regard.recipe.recipe import Recipe
from regard.runs.checksums import verify
from regard.runs.decode import BATCH, ensemble, text_decoder
from regard.runs.evaluate import evaluate
from regard.runs.options import DecodingOptions, EvaluationOptions, TranslationOptions, accepts, search_from_options
from regard.training.checkpoint import FORMAT, RunFolder, newer, read_json
from regard.training.progress import Progress, newest_best
from regard.training.ranking import Metrics
from regard.training.tensor_files import mean, read_about, read_weights, weights_digest

if TYPE_CHECKING:
    from regard.runs.inspect import Attention, HiddenStates

COMMANDS = {"sequence_to_sequence": "translate", "language_model": "generate", "classifier": "classify"}


@dataclass(repr=False)
class TrainedModel:
    """A trained model with its recipe and tokenizers, and methods to use it on text."""

    path: Path
    recipe: Recipe
    model: Model
    tokenizers: dict[str, Tokenizer]
    step: int
    scores: Metrics
    finished: bool
    trust_code: bool = False  # parts named as module:Class may be imported

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the target text, or of the input text for a classifier."""
        return self.tokenizers.get("target") or next(iter(self.tokenizers.values()))

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weights_sha256(self) -> str:
        """The SHA-256 of the weights; it does not depend on the format of the weights file."""
        return weights_digest(self.model.state_dict())

    @property
    def objective(self) -> Objective:
        """The objective for which the model was trained."""
        return self.recipe.data.objective

    @property
    def command(self) -> str:
        """The `regard` command that uses this model: `translate`, `generate` or `classify`."""
        return COMMANDS[self.objective.model]

    @property
    def begin(self) -> tuple[int, ...]:
        """The token ids before a prompt: bos, or no token if the model was trained on one stream of text."""
        return () if self.objective.stream else (self.tokenizer.bos,)

    def __repr__(self) -> str:
        sizes = {name: tokenizer.size for name, tokenizer in self.tokenizers.items()}
        shared = len({tokenizer.sha256 for tokenizer in self.tokenizers.values()}) == 1
        steps = "" if self.recipe.train.steps is None else f" of {self.recipe.train.steps:,}"
        facts = {
            "task": f"{self.objective.kind} (use it with {self.command})",
            "model": f"{self.recipe.model.kind}, {self.parameters:,} parameters, on {self.device}",
            "vocabulary": f"{self.tokenizer.size:,} subwords" if shared else _listed(sizes),
            "step": f"{self.step:,}{steps}, {'finished' if self.finished else 'not finished'}",
            "scores": _listed(self.scores) or "none yet",
        }
        return "\n".join([f"TrainedModel {self.path}", *(f"  {name:<12}{fact}" for name, fact in facts.items())])

    @overload
    def translate(self, texts: str, *, n_best: None = None, **options: Unpack[TranslationOptions]) -> str: ...
    @overload
    def translate(self, texts: str, *, n_best: int, **options: Unpack[TranslationOptions]) -> list[str]: ...
    @overload
    def translate(
        self, texts: Iterable[str], *, n_best: None = None, **options: Unpack[TranslationOptions]
    ) -> list[str]: ...
    @overload
    def translate(
        self, texts: Iterable[str], *, n_best: int, **options: Unpack[TranslationOptions]
    ) -> list[list[str]]: ...
    @accepts(TranslationOptions, text_decoder, search_from_options)
    def translate(
        self, texts: str | Iterable[str], *, n_best: int | None = None, **options: Unpack[TranslationOptions]
    ) -> Any:
        """Translate one text (a string) or several texts, and return a string or a list of strings.

        With `n_best`, each translation is replaced by a list of the n best translations. The options are those of
        `regard translate` (see `regard.runs.options`). By default, the search settings of the recipe are used.
        """
        self.check_command("translate")
        decoder = text_decoder([self], n_best=n_best, best=True, **options)
        outputs = [[output.text for output in best] for best in decoder.outputs(_listed_texts(texts))]
        results = outputs if n_best is not None else [best[0] for best in outputs]
        return results[0] if isinstance(texts, str) else results

    @overload
    def translations(
        self, texts: str, *, n_best: int | None = None, **options: Unpack[TranslationOptions]
    ) -> list[Output]: ...
    @overload
    def translations(
        self, texts: Iterable[str], *, n_best: int | None = None, **options: Unpack[TranslationOptions]
    ) -> Iterator[list[Output]]: ...
    @accepts(TranslationOptions, text_decoder, search_from_options)
    def translations(
        self, texts: str | Iterable[str], *, n_best: int | None = None, **options: Unpack[TranslationOptions]
    ) -> list[Output] | Iterator[list[Output]]:
        """Return the n best translations of a text, with scores. For several texts, yield one such list per text.

        If `engine` is a name, each call loads the engine again. To load it only once, pass the result of `self.engine`.
        """
        self.check_command("translate")
        outputs = text_decoder([self], n_best=n_best, **options).outputs(_listed_texts(texts))
        return next(outputs) if isinstance(texts, str) else outputs

    @overload
    def generate(
        self, prompts: str, *, n_best: int | None = None, **options: Unpack[DecodingOptions]
    ) -> list[Output]: ...
    @overload
    def generate(
        self, prompts: Iterable[str], *, n_best: int | None = None, **options: Unpack[DecodingOptions]
    ) -> list[list[Output]]: ...
    @accepts(DecodingOptions, text_decoder, search_from_options)
    def generate(
        self, prompts: str | Iterable[str], *, n_best: int | None = None, **options: Unpack[DecodingOptions]
    ) -> list[Output] | list[list[Output]]:
        """Return the n best continuations of a prompt; for several prompts, return one such list per prompt.

        The options are those of `regard generate`. Without `max_len`, a continuation has at most 200 tokens, or fewer
        if the model has fewer positions.
        """
        self.check_command("generate")
        outputs = list(text_decoder([self], n_best=n_best, **options).outputs(_listed_texts(prompts)))
        return outputs[0] if isinstance(prompts, str) else outputs

    @accepts(DecodingOptions, text_decoder, search_from_options)
    def stream(self, text: str, **options: Unpack[DecodingOptions]) -> Iterator[str]:
        """Yield the pieces of a translation or continuation as they are generated. Requires beam size 1 or sampling."""
        return text_decoder([self], **options).stream(text)

    @overload
    def score(self, texts: str | Output, batch_size: int = ..., warn: Warn = ..., first: int = ...) -> TextScore: ...
    @overload
    def score(
        self, texts: Sequence[str | tuple[str, ...] | Output], batch_size: int = ..., warn: Warn = ..., first: int = ...
    ) -> list[TextScore]: ...
    def score(
        self,
        texts: str | Output | Sequence[str | tuple[str, ...] | Output],
        batch_size: int = BATCH,
        warn: Warn = lambda _: None,
        first: int = 0,
    ) -> TextScore | list[TextScore]:
        """Return the log-probability of one text, or a list with the log-probability of each of several texts.

        A string is tokenized and scored with eos. In a pair (source, target), the target is scored, and a long source
        is truncated as in `translate`. A model that was trained on one stream of text has no bos and scores each text
        as if it followed a line feed. If a text is an `Output`, its generated tokens are scored given its source or
        prompt. If the output ended with eos, eos is scored too. The score of an `Output` equals `Output.log_prob`,
        except for rounding.

        `first` is the index of the first text in the input, for messages.
        """
        if not isinstance(self.model, LanguageModel):
            raise DataError(f"{self.path} holds a classifier, which scores classes; use classify")
        single = isinstance(texts, str | Output)
        records = [texts] if single else list(texts)
        rows = self._rows_to_score(records, warn, first)
        scores = score(self.model, self.objective, rows, self.device, batch_size, first)
        for i, record in enumerate(records):
            if isinstance(record, Output) and not record.read:  # the output was not computed by the model
                scores[i] = TextScore(record.log_prob, (), 0)
        return scores[0] if single else scores

    def _rows_to_score(self, records: Sequence[Any], warn: Warn, first: int) -> list[ScoringInput]:
        """Return the tokens to score for each text or `Output`, with the tokens that come before them."""
        if any(isinstance(record, Output) for record in records):
            if not all(isinstance(record, Output) for record in records):
                raise DataError("texts: outputs and texts are scored in different ways; score them in separate calls")
            return [self._output_to_score(output, first + i + 1) for i, output in enumerate(records)]
        texts = self._records([(record,) if isinstance(record, str) else record for record in records], first)
        encoded = self.objective.table(texts, self.tokenizers)["target"] if texts else ()
        ids = [tuple(row.tolist()) for row in encoded]
        if self.objective.stream:
            return [ScoringInput(tuple(self.tokenizer.encode("\n")), row) for row in ids]
        if "source" not in self.objective.columns:
            return [ScoringInput(row[:1], row[1:]) for row in ids]  # bos, then the tokens to score
        sources = ensemble([self], warn).sources([self.objective.pair(record)[0] for record in texts], first)
        return [ScoringInput(row[:1], row[1:], tuple(source)) for row, source in zip(ids, sources, strict=True)]

    def _records(self, records: Sequence[Any], first: int = 0) -> list[tuple[str, ...]]:
        """Return the examples as tuples of texts; raise an error if an example does not fit the objective."""
        names = self.objective.texts
        for i, record in enumerate(records):
            if len(record) != len(names) or not all(isinstance(text, str) for text in record):
                form = f"pairs ({', '.join(names)})" if len(names) > 1 else "single texts"
                raise DataError(f"line {first + i + 1}: this model takes {form}, not {record!r:.60}")
        return [tuple(record) for record in records]

    def _output_to_score(self, output: Output, line: int) -> ScoringInput:
        size = self.tokenizer.size
        source = self.tokenizers.get("source", self.tokenizer)
        limit = source.size if "source" in self.objective.columns else size
        if any(not 0 <= i < size for i in output.ids) or any(not 0 <= i < limit for i in output.read):
            raise DataError(
                f"line {line}: the output has ids that this model's tokenizer lacks; score it with the run that "
                "generated it"
            )
        ids = (*output.ids, self.tokenizer.eos) if output.ended else output.ids
        if not output.read:
            if output.ids:
                raise DataError(
                    f"line {line}: the output lacks the ids of its source or prompt (read) and cannot be scored"
                )
            return ScoringInput((), ())
        if "source" in self.objective.columns:
            return ScoringInput((self.tokenizer.bos,), ids, output.read)
        return ScoringInput(output.read, ids)

    @overload
    def classify(self, texts: str, batch_size: int = ..., warn: Warn = ..., first: int = ...) -> Prediction: ...
    @overload
    def classify(
        self, texts: Sequence[str], batch_size: int = ..., warn: Warn = ..., first: int = ...
    ) -> list[Prediction]: ...
    def classify(
        self, texts: str | Sequence[str], batch_size: int = BATCH, warn: Warn = lambda _: None, first: int = 0
    ) -> Prediction | list[Prediction]:
        """Predict the class of one text or of several texts. A prediction includes the probability of every class.

        `first` is the index of the first text in the input, for messages.
        """
        if not isinstance(self.model, Classifier) or not self.objective.labelled:
            raise DataError(f"{self.path} holds no classifier; train one with --labelled")
        listed, longest = _listed_texts(texts), self.recipe.data.longest
        predictions = classify(
            self.model, self.objective, listed, self.tokenizers, self.device, longest, batch_size, warn, first
        )
        return predictions[0] if isinstance(texts, str) else predictions

    def evaluate(self, **options: Unpack[EvaluationOptions]) -> dict[str, Any]:
        """Return the scores on test text, for example `run.evaluate(source="test.en", reference="test.de")`.

        The options are those of `regard evaluate`. With `against`, the result includes the differences from a second
        system and whether they are significant.
        """
        return evaluate(self, load, **options)

    def inspect(
        self,
        text: str,
        target: str | None = None,
        *,
        top: int = 5,
        keep: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        queries: slice | None = None,
        limit: int = LIMIT,
    ) -> Recording:
        """Return what the model computes for a text: attention, routing, hidden states, predictions and logit lens.

        The decoder of a translation model reads `target`, by default the model's own translation of the text. `top` is
        the number of alternatives at each position. `keep` selects parts, such as "decoder.cross" or "predictions".
        `layers` selects layers of attention, counted from 0. `queries` selects the tokens whose attention is recorded.
        By default, everything is recorded. If weights and states need more than `limit` bytes, an error is raised.
        """
        from regard.runs.inspect import inspect  # noqa: PLC0415  # it imports this module

        return inspect(self, text, target, top=top, keep=keep, layers=layers, queries=queries, limit=limit)

    def attention(self, text: str, target: str | None = None) -> "Attention":
        """Return the attention weights for a text, and the tokens of the text.

        The decoder of a translation model reads `target`, by default the model's own translation of the text.
        """
        from regard.runs.inspect import Attention  # noqa: PLC0415  # it imports this module

        recording = self.inspect(text, target, keep=["attention"])
        return Attention(recording.tokens, recording.attention)

    def hidden_states(self, text: str, target: str | None = None) -> "HiddenStates":
        """Return the hidden states for a text, and the tokens of the text.

        The decoder of a translation model reads `target`, by default the model's own translation of the text.
        """
        from regard.runs.inspect import HiddenStates  # noqa: PLC0415  # it imports this module

        recording = self.inspect(text, target, keep=["states"])
        return HiddenStates(recording.tokens, recording.states)

    def export(
        self, to: str = NAME, quantize: str | None = None, out: str | Path | None = None, force: bool = False
    ) -> Exported:
        """Convert the model for another inference engine, compare its outputs with the model's, and return the export.

        If `out` is None, the export is written into the run folder.
        """
        if to != NAME:
            raise SpecError("--to", f"{to!r} is not known; known: {NAME!r}")
        folder = self.exports(quantize) if out is None else Path(out)
        return export(self.trained(), folder, quantize, own=out is None, force=force)

    def exports(self, quantize: str | None = None) -> Path:
        """Return the subfolder of the run folder for exports with this quantization."""
        folder = self.path / "exports"
        if folder.is_symlink():
            raise DataError(f"{folder} is a link, and nothing is written through links; give another folder with --out")
        return folder / f"{NAME}-{named(quantize)}"

    def trained(self) -> Trained:
        """Return the model, tokenizers and validation examples, which an inference engine needs."""
        source = self.tokenizers.get("source", self.tokenizer)
        texts = held_out(RunFolder(self.path))
        return Trained(self.model, source, self.tokenizer, self.recipe.data.longest, self.step, texts)

    def engine(
        self,
        name: str,
        quantize: str | None = None,
        threads: int | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> Engine | None:
        """Return the inference engine with this name, or None for the native engine, which is the model itself."""
        if name == NAME:
            return engine(self.trained(), self.exports(quantize), quantize, threads, report)
        if name != "native":
            raise SpecError("--engine", f"{name!r} is not known; known: 'native', {NAME!r}")
        if quantize is not None:
            raise SpecError("--quantize", f"the native engine computes in float32; give --engine {NAME}, too")
        return None

    def batch(self, records: Sequence[str | tuple[str, ...]]) -> Batch:
        """Return training examples as one `Batch`, in the same format as in training.

        For example, `run.model.loss(run.batch(records))` is the loss on these examples.

        `records` are pairs (source, target), single texts, or pairs (label, text); the batch rows have the same order.
        If the model was trained on one stream of text, the texts are joined and cut into windows. Otherwise, a single
        text that is longer than `data.max_len` takes several rows.
        """
        if isinstance(records, str) or not records:
            raise DataError("records: needs a non-empty list of records")
        each = self._records([(record,) if isinstance(record, str) else record for record in records])
        data = self.recipe.data
        fitted = shortened(self.objective, each, self.tokenizers, data.longest, data.long)
        if not fitted.kept.all():
            left_out = int(np.flatnonzero(~fitted.kept)[0])
            raise DataError(f"record {left_out + 1}: has more than {data.longest} tokens (data.max_len); leave it out")
        table = fitted.table
        if self.objective.stream:
            ids, length = table["target"].ids, getattr(data.batching, "length", len(table["target"].ids))
            table = Table({"target": Column(ids, np.array([0, len(ids)]))})
            batching = Windows(-(-len(ids) // length) * length, length)
            (item,) = BatchLoader(Examples([table], [1.0], self.objective), batching, seed=0).once()
        else:  # not `once`, which sorts by length: row i must be record i
            item = self.objective.item(table.columns, list(np.arange(table.rows)[:, None]))
        return item.batch.to(self.device)

    def check_command(self, command: str) -> None:
        """Raise an error if `command` is not the command that uses this model."""
        if self.command != command:
            raise DataError(
                f"{self.path} was trained for {self.objective.kind}; use regard {self.command}, not {command}"
            )


def _listed_texts(texts: str | Iterable[str]) -> Any:
    return [texts] if isinstance(texts, str) else texts


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}" for name, value in values.items()
    )


def held_out(folder: RunFolder) -> list[tuple[str, ...]]:
    """Return up to 200 validation examples of a run, or an empty list if the run folder no longer has them."""
    try:
        with open(folder.data / "valid.jsonl", encoding="utf-8", newline="\n") as lines:
            return [tuple(json.loads(line)) for line in islice(lines, 200)]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def load(
    path: str | Path,
    device: str = "auto",
    average: int | None = None,
    step: int | None = None,
    trust_code: bool = False,
    mapped: bool = False,
    plain: bool = False,
) -> TrainedModel:
    """Load the trained model from a run folder.

    `step` selects the checkpoint of this training step. `average` selects the mean of the last `average` checkpoints.
    If both are None, the final weights are loaded. If training has not finished, the best checkpoint is loaded instead.
    `mapped` memory-maps the weights file, so that several processes share the weights in memory. Do not change mapped
    weights: prepacked copies are not updated after a change through `.data`. `plain` loads the readable form of the
    model, without the faster kernels of `regard.fast`.
    """
    folder = RunFolder(path)
    recipe = read_recipe(folder, trust_code)
    steps, scores, weights = _weights(folder, recipe, average, step)
    model = build(recipe.model, init=False)
    load_weights(model, weights, folder.path, mapped)
    model.to(choose_device(device)).eval()
    if not plain:
        fast.install(model, fixed=True, mapped=mapped)
    tokenizers = read_tokenizers(folder, recipe.data.objective)
    finished = folder.final.exists()
    return TrainedModel(folder.path, recipe, model, tokenizers, max(steps), scores, finished, trust_code)


def read_recipe(folder: RunFolder, trust_code: bool = False) -> Recipe:
    """Read the complete recipe of a run from the run folder."""
    if not folder.path.is_dir():
        raise DataError(f"{folder.path} does not exist; create a training run with regard train")
    if not folder.recipe.exists():
        if folder.request.exists():
            raise DataError(f"{folder.path} has no model yet; start its training with regard resume")
        raise DataError(f"{folder.path} is not a training run: it has no recipe.json; name another folder")
    record = read_json(folder.recipe)
    version = record.pop("format", 0)
    if not isinstance(version, int) or version > FORMAT:
        raise DataError(newer(folder.path, version))
    try:
        recipe = Recipe.of(record, trust_code)
    except SpecError as error:
        raise DataError(f"{folder.recipe}: {error}") from None
    verify(folder, folder.recipe)
    return recipe


def read_tokenizers(folder: RunFolder, objective: Objective) -> dict[str, Tokenizer]:
    """Read the tokenizers of a run, keyed by the column that they encode: `source`, `target` or `text`."""
    joint = folder.path / "tokenizer.json"
    verify(folder, *folder.path.glob("tokenizer*.json"))
    if joint.exists():
        return dict.fromkeys(objective.encoded, Tokenizer.load(joint))
    apart = {name: folder.path / f"tokenizer.{name}.json" for name in objective.encoded}
    lost = [path.name for path in apart.values() if not path.exists()]
    if lost:
        missing = joint.name if len(lost) == len(apart) else " and ".join(lost)
        raise DataError(f"{folder.path} lacks {missing}; restore it from a copy")
    return {name: Tokenizer.load(path) for name, path in apart.items()}


def _weights(
    folder: RunFolder, recipe: Recipe, average: int | None, step: int | None
) -> tuple[list[int], Metrics, dict[str, torch.Tensor]]:
    """Return the training steps, the validation scores and the weights for the arguments of `load`."""
    if step is not None:
        if step not in folder.steps():
            kept = ", ".join(str(s) for s in folder.steps()) or "none"
            raise DataError(f"{folder.path} has no weights of step {step}; steps with weights: {kept}")
        return [step], {}, read_weights(folder.weights(step))
    if average is None and folder.final.exists():
        return *_about_final(folder), read_weights(folder.final)
    latest = folder.latest()
    if latest is None:
        raise DataError(f"{folder.path} has no checkpoint yet; continue training with regard resume")
    progress = Progress.read(folder, latest)
    if average is not None:
        saved = progress.saved
        if not 1 <= average <= len(saved):
            raise DataError(f"--average {average}: {folder.path} keeps {len(saved)} checkpoints (train.keep)")
        steps = saved[-average:]
        return steps, {}, mean(read_weights(folder.weights(s)) for s in steps)
    step = newest_best(recipe.train, latest.step, progress.best, list(progress.scores))
    return [step], progress.scores.get(step, {}), read_weights(folder.weights(step))


def _about_final(folder: RunFolder) -> tuple[list[int], Metrics]:
    """Return the steps of the checkpoints averaged in the final weights, and the validation scores of these weights."""
    about = read_about(folder.final)
    try:
        steps, scores = json.loads(about["steps"]), json.loads(about["scores"])
        whole = isinstance(scores, dict) and isinstance(steps, list) and all(type(step) is int for step in steps)
    except (KeyError, TypeError, ValueError, RecursionError):
        whole, steps, scores = False, [], {}
    if not whole or not steps:
        raise DataError(f"{folder.final} lacks the steps and scores of its weights; restore it from a copy")
    return steps, scores


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], path: Path, mapped: bool = False) -> None:
    """Load `weights` into a model; `path` is the run folder, for error messages.

    With `mapped`, the tensors of `weights` become the parameters without being copied.
    """
    try:
        model.load_state_dict(dict(weights), assign=mapped)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        raise DataError(f"{path}: the weights do not fit the model of recipe.json ({problem})") from None


def choose_device(name: str) -> torch.device:
    """Return the device with this name; `auto` selects the first available of a CUDA GPU, an Apple GPU and the CPU."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind = next(k for k in ("cuda", "mps", "cpu") if available[k]) if name == "auto" else name.partition(":")[0]
    if kind not in available:
        raise SpecError("--device", f"{name!r} is not one of auto, cpu, cuda, mps")
    if not available[kind]:
        raise SpecError("--device", f"there is no {kind} device here; use auto or cpu")
    if kind == "cuda":
        # cuDNN attention takes a tenth of a second to plan each new shape, and batches of text rarely repeat a shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(kind if name == "auto" else name)
