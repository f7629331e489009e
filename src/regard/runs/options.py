"""The options of `translate` and `generate`, by the same names in Python and on the command line."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_type_hints

import torch

from regard.decoding.beam import Beam
from regard.decoding.hypothesis import Limits
from regard.decoding.sample import Sample
from regard.decoding.search import Search
from regard.errors import SpecError
from regard.inference.engine import Engine
from regard.inference.text import Constraints, Warn
from regard.recipe.recipe import PARTS, parse_changes
from regard.tree import edit

Function = TypeVar("Function", bound=Callable[..., Any])


Paths = str | Path | Sequence[str | Path]


class RequestOptions(TypedDict, total=False):
    """What to learn from, and how a recipe differs from what is chosen for that text."""

    source: str | Path | None  # source text, one sentence per line
    target: str | Path | None  # its translation, line by line
    valid_source: str | Path | None  # validation source; split off if not given
    valid_target: str | Path | None  # its translation
    tsv: Paths  # tab-separated source and target
    jsonl: Paths  # JSON lines with source and target
    text: Paths  # text for a language model
    labelled: Paths  # tab-separated label and text, for a classifier
    valid: str | Path | None  # validation file of the same kind as tsv, jsonl, text or labelled
    recipe: str | Path | None  # a .toml or .json recipe, which the other options override
    preset: str | None  # a model by name
    variants: str | Sequence[str]  # modifications by name, or module:function
    changes: str | Sequence[str]  # PATH=VALUE edits of the recipe, such as "train.accumulate=2"
    start: str | Path | None  # the run to start from (--from)
    steps: int | None  # training steps: train.steps
    time: str | float | None  # time for the whole training, which is planned to end with it: 300, "5m", "2h"
    trust_code: bool  # import parts that are named as module:Class


class LoadOptions(TypedDict, total=False):
    """How to load a run from its folder. A `TrainedModel` is loaded already and takes none of them."""

    average: int | None  # use the mean of the last N checkpoints
    device: str  # auto, cpu, cuda or mps
    plain: bool  # the readable form of the model, without the faster kernels of `regard.fast`
    trust_code: bool  # import parts that are named as module:Class


class SearchOptions(TypedDict, total=False):
    """How to choose the next token. A setting that is not given is that of the recipe (`decode`)."""

    beam: int | None  # beam size; 1 is greedy search
    temperature: float | None  # sampling temperature; lower is more conservative
    top_k: int | None  # sample from the K likeliest tokens
    top_p: float | None  # sample from the likeliest tokens that make up this probability
    min_p: float | None  # sample from tokens at least this likely, relative to the likeliest
    seed: int | None  # random seed of sampling
    changes: str | Sequence[str]  # PATH=VALUE edits of the search, such as "alpha=0.6"


class DecodingOptions(SearchOptions, total=False):
    """How to decode: the search, and what an output may be."""

    min_len: int  # fewest tokens of an output
    max_len: int | None  # most tokens of an output
    prefix: str  # text that every output begins with
    required: str | Sequence[str]  # words that every output must contain
    banned: str | Sequence[str]  # words that no output may contain
    no_repeat: int  # forbid repeated sequences of N tokens; 0 allows them
    batch_size: int  # texts decoded together; changes nothing but speed
    warn: Warn  # called with each warning
    search: Search | None  # the search itself, in place of the options above that choose one
    limits: Limits | None  # in place of min_len and max_len
    wishes: Constraints | None  # in place of prefix, required, banned and no_repeat


class EvaluationOptions(LoadOptions, total=False):
    """Test text, what to measure on it, and how to decode."""

    source: str | None  # file of test text to translate
    reference: str | None  # file of its human translation
    tsv: str | None  # file of tab-separated source and reference, in place of the two
    text: str | None  # file of test text for a language model
    labelled: str | None  # file of labelled test text for a classifier
    against: str | None  # a run to compare with, or a file of its outputs
    tokenize: str | None  # sacreBLEU's tokenizer: 13a, none, intl, zh, char, ...
    beam: int | None  # beam size
    changes: str | Sequence[str]  # PATH=VALUE edits of the search
    batch_size: int | None  # texts decoded together
    stride: int | None  # tokens from window to window of a language model; None: half a window
    samples: int | None  # resamples of the paired bootstrap
    metrics: str | Sequence[str]  # names of metrics, or module:Class; the usual ones of the task if not given
    warn: Warn  # called with each warning


class TranslationOptions(DecodingOptions, total=False):
    """Those of `translate`, which other engines can compute, too."""

    engine: str | Engine  # "native", or "ctranslate2", which exports the run on first use
    quantize: str | None  # store the weights of an export as int8 or float16


def search_from_options(  # noqa: PLR0913  # the options of the command line
    default: Search,
    *,
    beam: int | None = None,
    n_best: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    changes: str | Sequence[str] = (),
    trust_code: bool = False,
) -> Search:
    """Return the search of a recipe with these options: sampling, if any setting of sampling is given.

    A search of the other kind than the recipe's begins with that kind's defaults. A search of the recipe that is
    neither a beam nor a sample takes no options: it is changed by path alone.
    """
    edits = parse_changes(several(changes), "decode")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and beam is not None:
        raise SpecError("--beam", "selects beam search, and sampling settings select sampling; choose one of them")
    if not isinstance(default, Beam | Sample):
        _refuse_options(default, given | {"beam": beam, "n_best": n_best, "seed": seed})
        return edit(default, edits, PARTS, trust_code) if edits else default
    if n_best is not None:
        given["n_best"] = n_best
    if beam is None and (isinstance(default, Sample) or given.keys() - {"n_best"}):
        if seed is not None:
            given["seed"] = seed
        search: Search = replace(default if isinstance(default, Sample) else Sample(), **given)
    else:
        if seed is not None:
            raise SpecError("--seed", "beam search is not random; leave it out, or sample with --temperature 1")
        search = _beam_search(default if isinstance(default, Beam) else Beam(), beam, n_best)
        if beam is not None:
            given["beam_size"] = beam
    for path in edits:
        if path in given:
            option = "beam" if path == "beam_size" else path
            raise SpecError("--set", f"{path} is set by {_flag(option)} already; give one of them")
    return edit(search, edits, PARTS, trust_code) if edits else search


def _beam_search(default: Beam, beam: int | None, n_best: int | None) -> Beam:
    """A beam of this size; without one, of at least `n_best`."""
    outputs = n_best or default.n_best
    beam_size = beam if beam is not None else max(default.beam_size, outputs)
    if outputs > beam_size:
        origin = "" if n_best else ", which the recipe sets (decode.n_best)"
        raise SpecError("--n-best", f"a beam of {beam_size} does not hold {outputs}{origin}; raise --beam")
    return replace(default, beam_size=beam_size, n_best=outputs)


def _refuse_options(default: Search, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise SpecError(_flag(name), f"the search of the recipe is {default.kind!r}; change it with --set")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def one_best(search: Search, beam: int | None) -> Search:
    """A search that returns no more outputs than a beam of this size holds, for where only the best is used."""
    if beam is None or not isinstance(search, Beam):
        return search
    return replace(search, n_best=min(search.n_best, beam))


def accepts(options: Any, *functions: Callable[..., Any]) -> Callable[[Function], Function]:
    """Put `options`, a TypedDict, into the signature of a function that takes them as `**options`.

    Their defaults are those of `functions`, to which it passes them on.
    """

    def expanded(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        inner = {p.name: p for each in functions for p in inspect.signature(each).parameters.values()}
        keywords = {name: inner[name] for name in get_type_hints(options) if name in inner} | {p.name: p for p in own}
        positional = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        named = [p for p in keywords.values() if p.kind is p.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*positional, *named])
        return function

    return expanded


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Compute with this number of CPU threads; None: leave it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def several(values: str | Path | Iterable[str | Path] | None) -> list[str]:
    """One path or name as a list of one, several as a list: a string is never its characters."""
    return [str(values)] if isinstance(values, str | Path) else [str(value) for value in values or ()]


def seconds(time: str | float | None, option: str = "--max-time") -> float | None:
    """A number of seconds, or a text such as `90`, `90s`, `30m` or `2h`, in seconds."""
    if time is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(time).strip())
    if not match or float(match[1]) == 0:
        raise SpecError(option, f"{time!r} is not a time; write 90s, 30m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
