"""Decode text with one trained model or with an ensemble."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from regard.decoding.hypothesis import Limits
from regard.decoding.length_limit import widest
from regard.decoding.search import Search
from regard.errors import DataError, SpecError
from regard.inference.engine import Engine
from regard.inference.text import Constraints, Output, Texts, Warn
from regard.models.base import Generator
from regard.recipe.recipe import parse_changes
from regard.runs.options import SearchOptions, one_best, search_from_options, several

if TYPE_CHECKING:
    from regard.runs.trained_model import TrainedModel

BATCH = 32  # texts decoded together


@dataclass(frozen=True)
class TextDecoder:
    """Models and search settings for translating source texts or continuing prompts."""

    texts: Texts
    translates: bool
    search: Search
    limits: Limits
    constraints: Constraints
    batch_size: int

    def outputs(self, texts: Iterable[str], first: int = 0) -> Iterator[list[Output]]:
        """Yield the n best outputs for each text, in order. The first text has the index `first` in the whole input."""
        decode = self.texts.translate if self.translates else self.texts.generate
        return decode(texts, self.search, self.batch_size, self.limits, self.constraints, first)

    def stream(self, text: str, number: int = 0) -> Iterator[str]:
        """Yield the pieces of an output as they are generated; `number` is the index of the text in the whole input."""
        decode = self.texts.translate_stream if self.translates else self.texts.generate_stream
        return decode(text, self.search, self.limits, self.constraints, number)


def text_decoder(  # noqa: PLR0913  # the options of the command line
    runs: "Sequence[TrainedModel]",
    *,
    n_best: int | None = None,
    min_len: int = 0,
    max_len: int | None = None,
    prefix: str = "",
    required: str | Sequence[str] = (),
    banned: str | Sequence[str] = (),
    no_repeat: int = 0,
    batch_size: int = BATCH,
    engine: str | Engine = "native",
    quantize: str | None = None,
    search: Search | None = None,
    limits: Limits | None = None,
    wishes: Constraints | None = None,
    warn: Warn = lambda _: None,
    threads: int | None = None,
    report: Callable[[str], None] | None = None,
    best: bool = False,
    **options: Unpack[SearchOptions],
) -> TextDecoder:
    """Return a `TextDecoder` with these options, for one trained model or for several as an ensemble.

    An engine such as CTranslate2 uses `threads` CPU threads, and calls `report` with progress messages. Set `best` if
    only the best output for each text is used; the beam size may then be smaller than the recipe's `n_best`.
    """
    for name, value in ({"n_best": n_best} | options).items():
        if search is not None and value not in (None, (), []):
            raise SpecError(name, "is part of `search`, which is also given; leave one of the two out")
    changes = several(options.get("changes"))
    chosen = search
    if chosen is None:
        default = runs[0].recipe.decode
        if best and n_best is None:
            default = one_best(default, options.get("beam"))
        chosen = search_from_options(default, n_best=n_best, trust_code=runs[0].trust_code, **options)
    texts = ensemble(runs, warn)
    if engine != "native" or quantize is not None:
        if len(runs) > 1:
            raise SpecError("--engine", f"{engine!r} cannot join several runs as an ensemble; give one run")
        loaded = runs[0].engine(engine, quantize, threads, report or warn) if isinstance(engine, str) else engine
        texts = replace(texts, engine=loaded)
        if loaded is not None and search is None and "stopping" not in parse_changes(changes, "decode"):
            chosen = loaded.adapted(chosen, warn)
    constraints = wishes or Constraints(prefix, several(required), several(banned), no_repeat)
    translates = runs[0].objective.model == "sequence_to_sequence"
    return TextDecoder(texts, translates, chosen, limits or Limits(min_len, max_len), constraints, batch_size)


def ensemble(runs: "Sequence[TrainedModel]", warn: Warn = lambda _: None) -> Texts:
    """Combine trained models into an ensemble that decodes text. All must have the same tokenizers and objective."""
    first = runs[0]
    generators: list[Generator] = []
    for run in runs:
        if not isinstance(run.model, Generator):
            raise DataError(f"{run.path} holds a classifier, which generates no text; use classify")
        if {n: t.sha256 for n, t in run.tokenizers.items()} != {n: t.sha256 for n, t in first.tokenizers.items()}:
            raise DataError(f"{run.path} has other tokenizers than {first.path}; an ensemble needs the same ones")
        if run.objective != first.objective:
            raise DataError(f"{run.path} and {first.path} were trained for different objectives; an ensemble needs one")
        generators.append(run.model)
    source, target = first.tokenizers.get("source", first.tokenizer), first.tokenizer
    longest = min(run.recipe.data.longest for run in runs)
    if first.objective.stream:
        longest = min(getattr(run.recipe.data.batching, "length", longest) for run in runs)
    limit = widest([run.recipe.length_limit for run in runs])
    extracts = first.recipe.data.long == "extract"
    return Texts(generators, source, target, longest, first.device, warn, None, first.begin, limit, extracts)
