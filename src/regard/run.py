"""Runs: load one, use one."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.data.objectives import Classification, LanguageModelling, Objective
from regard.data.tokenizer import Tokenizer
from regard.decoding.api import Guess, Output, Texts, TextScore, Wishes, classify, score
from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.search import Search
from regard.engines.base import Engine
from regard.engines.ctranslate2 import NAME, CTranslate2, adapted
from regard.engines.exported import Exported, Trained, engine, export, named
from regard.errors import DataError, SpecError
from regard.models.base import Classifier, Generator, LanguageModel, Model, build
from regard.nn.packed import lay_out
from regard.recipe import Recipe
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
from regard.training.loop import Metrics, Progress, newest_best


@dataclass
class Run:
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
        return Trained(self.model, source, self.tokenizer, self.recipe.data.max_len, self.step, texts)

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

    def translate(
        self, texts: Sequence[str], beam: int | None = None, engine: str | Engine = "native", **settings: Any
    ) -> list[str]:
        """The best translation of every text, in order. Settings are those of `translations`."""
        search = self.recipe.decode if beam is None else replace(self._beam(), beams=beam, n_best=1)
        if engine == NAME or isinstance(engine, CTranslate2):
            search = adapted(search, settings.get("warn", lambda _: None))
        return [best[0].text for best in self.translations(texts, search=search, engine=engine, **settings)]

    def translations(
        self,
        texts: Iterable[str],
        search: Search | None = None,
        batch_size: int = 32,
        limits: Limits = Limits(),
        wishes: Wishes = Wishes(),
        warn: Callable[[str], None] = lambda _: None,
        engine: str | Engine = "native",
    ) -> Iterator[list[Output]]:
        """The n best translations of every text with their scores, as they are made.

        An engine that is named is made anew each time; one that `engine` returned is used as it is.
        """
        made = self.engine(engine, say=warn) if isinstance(engine, str) else engine
        together = replace(texts_of([self], warn), engine=made)
        if search is None:
            search = adapted(self.recipe.decode, warn) if isinstance(made, CTranslate2) else self.recipe.decode
        return together.translate(texts, search, batch_size, limits, wishes)

    def generate(
        self,
        prompts: Sequence[str],
        search: Search | None = None,
        batch_size: int = 32,
        limits: Limits = Limits(max_len=200),
        wishes: Wishes = Wishes(),
        warn: Callable[[str], None] = lambda _: None,
    ) -> list[list[Output]]:
        """Continuations of every prompt."""
        self._needs(LanguageModelling, "generate continues text")
        found = texts_of([self], warn).generate(
            prompts, search or self.recipe.decode, batch_size, limits, wishes, self.begin
        )
        return list(found)

    @property
    def begin(self) -> list[int]:
        """What stands before a prompt: a text of its own begins with bos, a stream with nothing."""
        return [] if self.objective.stream else [self.tokenizer.bos]

    def score(self, texts: Sequence[Any], batch_size: int = 32) -> list[TextScore]:
        """log p of each (source, target), or of each text, in one pass."""
        if not isinstance(self.model, LanguageModel):
            raise DataError(f"{self.path} holds a classifier, which scores classes; use classify")
        records = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
        wanted = len(self.objective.texts)
        wrong = next((i for i, record in enumerate(records) if len(record) != wanted), None)
        if wrong is not None:
            raise DataError(
                f"line {wrong + 1}: this model scores records of {wanted} texts, not of {len(records[wrong])}"
            )
        return score(self.model, self.objective, records, self.tokenizers, self.device, batch_size)

    def classify(
        self, texts: Sequence[str], batch_size: int = 32, warn: Callable[[str], None] = lambda _: None
    ) -> list[Guess]:
        """The class of every text, with the probability of each class."""
        if not isinstance(self.model, Classifier) or not isinstance(self.objective, Classification):
            raise DataError(f"{self.path} holds no classifier; train one with --labelled")
        return classify(
            self.model,
            self.objective,
            texts,
            self.tokenizers["text"],
            self.device,
            self.recipe.data.max_len,
            batch_size,
            warn,
        )

    def _beam(self) -> Beam:
        return self.recipe.decode if isinstance(self.recipe.decode, Beam) else Beam()

    def _needs(self, objective: type[Objective], what: str) -> None:
        if not isinstance(self.objective, objective):
            raise DataError(f"{what}, but {self.path} was trained for {self.objective.kind}")


def held_out(folder: RunFolder) -> list[tuple[str, ...]]:
    """The validation texts that a run still has: its data may have been removed."""
    try:
        with open(folder.data / "valid.jsonl", encoding="utf-8", newline="\n") as lines:
            return [tuple(json.loads(line)) for line in islice(lines, 200)]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def texts_of(runs: Sequence[Run], warn: Callable[[str], None] = lambda _: None) -> Texts:
    """Several runs as one: their models must say the same tokens."""
    first = runs[0]
    generators: list[Generator] = []
    for run in runs:
        if not isinstance(run.model, Generator):
            raise DataError(f"{run.path} holds a classifier, which says nothing; use classify")
        if {n: t.sha256 for n, t in run.tokenizers.items()} != {n: t.sha256 for n, t in first.tokenizers.items()}:
            raise DataError(f"{run.path} has other tokenizers than {first.path}; an ensemble needs the same ones")
        generators.append(run.model)
    source = first.tokenizers.get("source", first.tokenizer)
    longest = min(run.recipe.data.max_len for run in runs)
    if first.objective.stream:
        longest = min(getattr(run.recipe.data.batching, "length", longest) for run in runs)
    return Texts(generators, source, first.tokenizer, longest, first.device, warn)


def load(
    path: str | Path,
    device: str = "auto",
    average: int | None = None,
    step: int | None = None,
    trust_code: bool = False,
    mapped: bool = False,
) -> Run:
    """A run from its folder: the final weights, those of a step, or the mean of the last `average` checkpoints.

    With `mapped` the weights stay in their file, which all processes that map it have in memory together.
    """
    folder = RunFolder(path)
    recipe = read_recipe(folder, trust_code)
    steps, scores, weights = _weights(folder, recipe, average, step)
    model = build(recipe.model, init=False)
    load_weights(model, weights, folder.path, mapped)
    model.to(choose_device(device)).eval()
    lay_out(model)
    tokenizers = read_tokenizers(folder, recipe.data.objective)
    return Run(folder.path, recipe, model, tokenizers, max(steps), scores, folder.final.exists())


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
