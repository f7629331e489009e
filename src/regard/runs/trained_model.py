"""Runs: load one, use one."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import nn

from regard import fast
from regard.batch import Batch
from regard.data.batching import Windows
from regard.data.loader import BatchLoader, Examples
from regard.data.objectives import ModelType, Objective
from regard.data.token_store import Column, Table
from regard.data.tokenizer import Tokenizer
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.length_limit import widest
from regard.decoding.search import Search
from regard.errors import DataError, SpecError
from regard.inference.ctranslate2 import NAME, CTranslate2, adapted
from regard.inference.engine import Engine
from regard.inference.export import Exported, Trained, engine, export, named
from regard.inference.text import Constraints, Output, Prediction, ScoringInput, Texts, TextScore, Warn, classify, score
from regard.models.base import Classifier, Generator, LanguageModel, Model
from regard.models.build import build
from regard.recipe.recipe import Recipe
from regard.training.checkpoint import (
    FORMAT,
    RunFolder,
    mean,
    newer,
    read_about,
    read_json,
    read_tensors,
    weights_digest,
)
from regard.training.progress import Progress, newest_best
from regard.training.selection import Metrics


@dataclass
class TrainedModel:
    """A trained model with its tokenizers: text in, text out."""

    path: Path
    recipe: Recipe
    model: Model
    tokenizers: dict[str, Tokenizer]
    step: int
    scores: Metrics
    finished: bool

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of what the model says, or of all it reads."""
        return self.tokenizers.get("target") or next(iter(self.tokenizers.values()))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> int:
        """How many numbers were learned."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def weights_sha256(self) -> str:
        """The digest of the weights, whatever file they came from."""
        return weights_digest(self.model.state_dict())

    @property
    def objective(self) -> Objective:
        """What was learned."""
        return self.recipe.data.objective

    def export(
        self, to: str = NAME, quantize: str | None = None, out: str | Path | None = None, force: bool = False
    ) -> Exported:
        """Write this run for another engine, checked before it is done; into the run itself if `out` is not given."""
        if to != NAME:
            raise SpecError("--to", f"{to!r} is not known; known: {NAME!r}")
        folder = self.exports(quantize) if out is None else Path(out)
        return export(self.trained(), folder, quantize, own=out is None, force=force)

    def exports(self, quantize: str | None = None) -> Path:
        """Where this run keeps an export of its own."""
        folder = self.path / "exports"
        if folder.is_symlink():
            raise DataError(f"{folder} is a link, and nothing is written through links; give another folder with --out")
        return folder / f"{NAME}-{named(quantize)}"

    def trained(self) -> Trained:
        """What an engine needs to know of this run."""
        source = self.tokenizers.get("source", self.tokenizer)
        texts = held_out(RunFolder(self.path))
        return Trained(self.model, source, self.tokenizer, self.recipe.data.longest, self.step, texts)

    def engine(
        self,
        name: str,
        quantize: str | None = None,
        threads: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> Engine | None:
        """An engine by name; None for the native one, which needs no making."""
        if name == NAME:
            return engine(self.trained(), self.exports(quantize), quantize, threads, say)
        if name != "native":
            raise SpecError("--engine", f"{name!r} is not known; known: 'native', {NAME!r}")
        if quantize is not None:
            raise SpecError("--quantize", f"the native engine computes in float32; give --engine {NAME}, too")
        return None

    @overload
    def translate(  # type: ignore[reportOverlappingOverload]  # a string is one text, though it is iterable
        self, texts: str, beam: int | None = None, engine: str | Engine = "native", **settings: Any
    ) -> str: ...
    @overload
    def translate(
        self, texts: Iterable[str], beam: int | None = None, engine: str | Engine = "native", **settings: Any
    ) -> list[str]: ...
    def translate(
        self, texts: str | Iterable[str], beam: int | None = None, engine: str | Engine = "native", **settings: Any
    ) -> str | list[str]:
        """The best translation of a text, or of every one of several, in order. Settings are those of `translations`.

        `beam` is the size of a beam, where it is not to be the search of the recipe.
        """
        if beam is not None:
            if settings.get("search") is not None:
                raise SpecError("beam", "is part of a search; give one of the two")
            usual = self._beam()
            settings["search"] = replace(usual, beam_size=beam, n_best=min(usual.n_best, beam))
            if engine == NAME or isinstance(engine, CTranslate2):
                settings["search"] = adapted(settings["search"], settings.get("warn", lambda _: None))
        if isinstance(texts, str):
            return self.translations(texts, engine=engine, **settings)[0].text
        return [best[0].text for best in self.translations(texts, engine=engine, **settings)]

    @overload
    def translations(  # type: ignore[reportOverlappingOverload]
        self,
        texts: str,
        search: Search | None = ...,
        batch_size: int = ...,
        limits: Limits = ...,
        wishes: Constraints = ...,
        warn: Warn = ...,
        engine: str | Engine = ...,
    ) -> list[Output]: ...
    @overload
    def translations(
        self,
        texts: Iterable[str],
        search: Search | None = ...,
        batch_size: int = ...,
        limits: Limits = ...,
        wishes: Constraints = ...,
        warn: Warn = ...,
        engine: str | Engine = ...,
    ) -> Iterator[list[Output]]: ...
    def translations(
        self,
        texts: str | Iterable[str],
        search: Search | None = None,
        batch_size: int = 32,
        limits: Limits = Limits(),
        wishes: Constraints = Constraints(),
        warn: Warn = lambda _: None,
        engine: str | Engine = "native",
    ) -> list[Output] | Iterator[list[Output]]:
        """The n best translations of a text, or of every one of several as they are made, with their scores.

        Without `search` it is that of the recipe. An engine that is named is made anew each time; one that `engine`
        returned is used as it is.
        """
        self._needs("sequence_to_sequence", "translate reads a source")
        made = self.engine(engine, say=warn) if isinstance(engine, str) else engine
        together = replace(texts_of([self], warn), engine=made)
        if search is None:
            search = adapted(self.recipe.decode, warn) if isinstance(made, CTranslate2) else self.recipe.decode
        several = [texts] if isinstance(texts, str) else texts
        found = together.translate(several, search, batch_size, limits, wishes)
        return next(found) if isinstance(texts, str) else found

    @overload
    def generate(  # type: ignore[reportOverlappingOverload]
        self,
        prompts: str,
        search: Search | None = ...,
        batch_size: int = ...,
        limits: Limits = ...,
        wishes: Constraints = ...,
        warn: Warn = ...,
    ) -> list[Output]: ...
    @overload
    def generate(
        self,
        prompts: Iterable[str],
        search: Search | None = ...,
        batch_size: int = ...,
        limits: Limits = ...,
        wishes: Constraints = ...,
        warn: Warn = ...,
    ) -> list[list[Output]]: ...
    def generate(
        self,
        prompts: str | Iterable[str],
        search: Search | None = None,
        batch_size: int = 32,
        limits: Limits = Limits(),
        wishes: Constraints = Constraints(),
        warn: Warn = lambda _: None,
    ) -> list[Output] | list[list[Output]]:
        """Continuations of a prompt, or of every one of several. Without `search` it is that of the recipe.

        Without `limits.max_len` a continuation has at most 200 tokens, or as many as the model has positions for.
        """
        self._needs("language_model", "generate continues text")
        several = [prompts] if isinstance(prompts, str) else prompts
        search = self.recipe.decode if search is None else search
        found = list(texts_of([self], warn).generate(several, search, batch_size, limits, wishes))
        return found[0] if isinstance(prompts, str) else found

    @property
    def begin(self) -> tuple[int, ...]:
        """What stands before a prompt: a text of its own begins with bos, a stream with nothing."""
        return () if self.objective.stream else (self.tokenizer.bos,)

    @overload
    def score(self, texts: str | Output, batch_size: int = ..., warn: Warn = ..., first: int = ...) -> TextScore: ...
    @overload
    def score(
        self, texts: Sequence[str | tuple[str, ...] | Output], batch_size: int = ..., warn: Warn = ..., first: int = ...
    ) -> list[TextScore]: ...
    def score(
        self,
        texts: str | Output | Sequence[str | tuple[str, ...] | Output],
        batch_size: int = 32,
        warn: Warn = lambda _: None,
        first: int = 0,
    ) -> TextScore | list[TextScore]:
        """log p of each text, or of each target of (source, target), in one pass; of a single text, one score.

        An `Output` is scored token by token as it was said, after what was read before it, and with its end if it
        ended: its log_prob, to rounding. A text is scored as the tokenizer splits it, with its end; a long source is
        cut as `translate` cuts it. A line of a stream has no token for its beginning: it stands after a line
        feed.

        `first` is the number of the first text, where these are some of many.
        """
        if not isinstance(self.model, LanguageModel):
            raise DataError(f"{self.path} holds a classifier, which scores classes; use classify")
        alone = isinstance(texts, str | Output)
        records = [texts] if alone else list(texts)
        rows = self._rows_to_score(records, texts_of([self], warn), first)
        found = score(self.model, self.objective, rows, self.device, batch_size, first)
        for i, record in enumerate(records):
            if isinstance(record, Output) and not record.read:  # the model was never asked
                found[i] = TextScore(record.log_prob, (), 0)
        return found[0] if alone else found

    def _rows_to_score(self, records: Sequence[Any], texts: Texts, first: int) -> list[ScoringInput]:
        """The tokens of every record: outputs as they were said, texts as they are encoded."""
        if any(isinstance(record, Output) for record in records):
            if not all(isinstance(record, Output) for record in records):
                raise DataError(
                    "texts: outputs and texts are scored in different ways; score the ones, then the others"
                )
            return [self._said(output, first + i + 1) for i, output in enumerate(records)]
        plain = self._records([(record,) if isinstance(record, str) else record for record in records], first)
        encoded = self.objective.table(plain, self.tokenizers)["target"] if plain else ()
        ids = [tuple(row.tolist()) for row in encoded]
        if self.objective.stream:
            return [ScoringInput(tuple(self.tokenizer.encode("\n")), row) for row in ids]
        # bos stands before what is said
        if "source" not in self.objective.columns:
            return [ScoringInput(row[:1], row[1:]) for row in ids]
        sources = texts.sources([self.objective.pair(record)[0] for record in plain], first)
        return [ScoringInput(row[:1], row[1:], tuple(source)) for row, source in zip(ids, sources, strict=True)]

    def _records(self, records: Sequence[Any], first: int = 0) -> list[tuple[str, ...]]:
        """The records, if they are what this model learns from."""
        names = self.objective.texts
        for i, record in enumerate(records):
            if len(record) != len(names) or not all(isinstance(text, str) for text in record):
                form = f"pairs ({', '.join(names)})" if len(names) > 1 else "single texts"
                raise DataError(f"line {first + i + 1}: this model takes {form}, not {record!r:.60}")
        return [tuple(record) for record in records]

    def _said(self, output: Output, line: int) -> ScoringInput:
        size = self.tokenizer.size
        source = self.tokenizers.get("source", self.tokenizer)
        limit = source.size if "source" in self.objective.columns else size
        if any(not 0 <= one < size for one in output.ids) or any(not 0 <= one < limit for one in output.read):
            raise DataError(
                f"line {line}: the output has ids that this model's tokenizer has not; it is of another run"
            )
        said = (*output.ids, self.tokenizer.eos) if output.ended else output.ids
        if not output.read:
            if output.ids:
                raise DataError(
                    f"line {line}: the output has ids but not what was read before them (read), and cannot be scored"
                )
            return ScoringInput((), ())
        if "source" in self.objective.columns:
            return ScoringInput((self.tokenizer.bos,), said, output.read)
        return ScoringInput(output.read, said)

    @overload
    def classify(  # type: ignore[reportOverlappingOverload]
        self, texts: str, batch_size: int = ..., warn: Warn = ..., first: int = ...
    ) -> Prediction: ...
    @overload
    def classify(
        self, texts: Sequence[str], batch_size: int = ..., warn: Warn = ..., first: int = ...
    ) -> list[Prediction]: ...
    def classify(
        self,
        texts: str | Sequence[str],
        batch_size: int = 32,
        warn: Warn = lambda _: None,
        first: int = 0,
    ) -> Prediction | list[Prediction]:
        """The class of a text, or of every one of several, with the probability of each class.

        `first` is the number of the first text, where these are some of many.
        """
        if not isinstance(self.model, Classifier) or not self.objective.labelled:
            raise DataError(f"{self.path} holds no classifier; train one with --labelled")
        found = classify(
            self.model,
            self.objective,
            [texts] if isinstance(texts, str) else texts,
            self.tokenizers["text"],
            self.device,
            self.recipe.data.longest,
            batch_size,
            warn,
            first,
        )
        return found[0] if isinstance(texts, str) else found

    def batch(self, records: Sequence[str | tuple[str, ...]]) -> Batch:
        """Texts as one batch, laid out as training lays them out: `run.model.loss(run.batch(records))`.

        Records are (source, target), a text each, or (label, text), and rows are in their order; texts of a stream are
        joined and cut into windows, and a text of `lines` that is longer than `data.max_len` takes several rows.
        """
        if isinstance(records, str) or not records:
            raise DataError("records: a batch is made of several; give a list of them")
        each = self._records([(record,) if isinstance(record, str) else record for record in records])
        data = self.recipe.data
        fitted = self.objective.limit(self.objective.table(each, self.tokenizers), data.longest, data.long == "cut")
        if not fitted.kept.all():
            left_out = int(np.flatnonzero(~fitted.kept)[0])
            raise DataError(f"record {left_out + 1}: has more than {data.longest} tokens, and is not learned from")
        table = fitted.table
        if self.objective.stream:
            ids, length = table["target"].ids, getattr(data.batching, "length", len(table["target"].ids))
            table = Table({"target": Column(ids, np.array([0, len(ids)]))})
            batching = Windows(-(-len(ids) // length) * length, length)
            (item,) = BatchLoader(Examples([table], [1.0], self.objective), batching, seed=0).once()
        else:  # not by `once`, which goes by length: row i is record i
            item = self.objective.item(table.columns, list(np.arange(table.rows)[:, None]))
        return item.batch.to(self.device)

    def _beam(self) -> Beam:
        return self.recipe.decode if isinstance(self.recipe.decode, Beam) else Beam()

    def _needs(self, model: ModelType, what: str) -> None:
        if self.objective.model != model:
            raise DataError(f"{what}, but {self.path} was trained for {self.objective.kind}")


def held_out(folder: RunFolder) -> list[tuple[str, ...]]:
    """The validation texts that a run still has: its data may have been removed."""
    try:
        with open(folder.data / "valid.jsonl", encoding="utf-8", newline="\n") as lines:
            return [tuple(json.loads(line)) for line in islice(lines, 200)]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def texts_of(runs: Sequence[TrainedModel], warn: Warn = lambda _: None) -> Texts:
    """Several runs as one: their models must say the same tokens."""
    first = runs[0]
    generators: list[Generator] = []
    for run in runs:
        if not isinstance(run.model, Generator):
            raise DataError(f"{run.path} holds a classifier, which says nothing; use classify")
        if {n: t.sha256 for n, t in run.tokenizers.items()} != {n: t.sha256 for n, t in first.tokenizers.items()}:
            raise DataError(f"{run.path} has other tokenizers than {first.path}; an ensemble needs the same ones")
        if run.objective != first.objective:
            raise DataError(f"{run.path} and {first.path} did not learn the same; an ensemble needs one objective")
        generators.append(run.model)
    source = first.tokenizers.get("source", first.tokenizer)
    longest = min(run.recipe.data.longest for run in runs)
    if first.objective.stream:
        longest = min(getattr(run.recipe.data.batching, "length", longest) for run in runs)
    limit = widest([run.recipe.length_limit for run in runs])
    return Texts(
        generators, source, first.tokenizer, longest, first.device, warn, begin=first.begin, length_limit=limit
    )


def load(
    path: str | Path,
    device: str = "auto",
    average: int | None = None,
    step: int | None = None,
    trust_code: bool = False,
    mapped: bool = False,
    plain: bool = False,
) -> TrainedModel:
    """A run from its folder: the final weights, those of a step, or the mean of the last `average` checkpoints.

    With `mapped` the weights stay in their file, which all processes that map it have in memory together; they are to
    be used as they are (a change through `.data` may not be noticed). `plain` loads the readable form of the model,
    without the faster kernels of `regard.fast`.
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
    return TrainedModel(folder.path, recipe, model, tokenizers, max(steps), scores, folder.final.exists())


def read_recipe(folder: RunFolder, trust_code: bool = False) -> Recipe:
    """The resolved recipe of a run."""
    if not folder.path.is_dir():
        raise DataError(f"{folder.path} is no run: there is no such folder; regard train makes one")
    if not folder.recipe.exists():
        more = "its training did not begin yet; regard resume starts it" if folder.asked.exists() else "no recipe.json"
        raise DataError(f"{folder.path} is no run to use: {more}")
    record = read_json(folder.recipe)
    version = record.pop("format", 0)
    if not isinstance(version, int) or version > FORMAT:
        raise DataError(newer(folder.path, version))
    try:
        return Recipe.of(record, trust_code)
    except SpecError as error:
        raise DataError(f"{folder.recipe}: {error}") from None


def read_tokenizers(folder: RunFolder, objective: Objective) -> dict[str, Tokenizer]:
    """The tokenizers of a run by what they encode."""
    joint = folder.path / "tokenizer.json"
    if joint.exists():
        return dict.fromkeys(objective.encoded, Tokenizer.load(joint))
    apart = {name: folder.path / f"tokenizer.{name}.json" for name in objective.encoded}
    lost = [path.name for path in apart.values() if not path.exists()]
    if lost:
        missing = joint.name if len(lost) == len(apart) else " and ".join(lost)
        raise DataError(f"{folder.path} has lost its {missing}; restore it from a copy")
    return {name: Tokenizer.load(path) for name, path in apart.items()}


def _weights(
    folder: RunFolder, recipe: Recipe, average: int | None, step: int | None
) -> tuple[list[int], Metrics, dict[str, torch.Tensor]]:
    """Steps, scores and weights: of the final ones, or those asked for."""
    if step is not None:
        if step not in folder.steps():
            kept = ", ".join(str(s) for s in folder.steps()) or "none"
            raise DataError(f"{folder.path} keeps no weights of step {step}; it has {kept}")
        return [step], {}, read_tensors(folder.weights(step))
    if average is None and folder.final.exists():
        return *_about_final(folder), read_tensors(folder.final)
    latest = folder.latest()
    if latest is None:
        raise DataError(f"{folder.path} has no checkpoint yet; regard resume goes on training")
    progress = Progress.read(folder, latest)
    if average is not None:
        saved = progress.saved
        if not 1 <= average <= len(saved):
            raise DataError(f"--average {average}: {folder.path} keeps {len(saved)} checkpoints (train.keep)")
        steps = saved[-average:]
        return steps, {}, mean(read_tensors(folder.weights(s)) for s in steps)
    step = newest_best(recipe.train, latest.step, progress.best, list(progress.scores))
    return [step], progress.scores.get(step, {}), read_tensors(folder.weights(step))


def _about_final(folder: RunFolder) -> tuple[list[int], Metrics]:
    """The steps that the final weights are the mean of, and their scores."""
    about = read_about(folder.final)
    try:
        steps, scores = json.loads(about["steps"]), json.loads(about["scores"])
        whole = isinstance(scores, dict) and isinstance(steps, list) and all(type(step) is int for step in steps)
    except (KeyError, TypeError, ValueError, RecursionError):
        whole, steps, scores = False, [], {}
    if not whole or not steps:
        raise DataError(f"{folder.final} does not tell the steps and scores of its weights; restore it from a copy")
    return steps, scores


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], path: Path, mapped: bool = False) -> None:
    """Put the weights of the run at `path` into a model."""
    try:
        model.load_state_dict(dict(weights), assign=mapped)
    except RuntimeError as error:
        raise DataError(
            f"{path}: the weights do not fit the model of recipe.json ({str(error).splitlines()[0]})"
        ) from None


def choose_device(name: str) -> torch.device:
    """auto: a CUDA GPU, Apple's, or the CPU, in this order."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    kind = next(k for k in ("cuda", "mps", "cpu") if available[k]) if name == "auto" else name.partition(":")[0]
    if kind not in available:
        raise SpecError("--device", f"{name!r} is not one of auto, cpu, cuda, mps")
    if not available[kind]:
        raise SpecError("--device", f"there is no {kind} device here; use auto or cpu")
    if kind == "cuda":
        # cuDNN's attention plans every new shape for a tenth of a second, and batches of text hardly repeat a shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(kind if name == "auto" else name)
