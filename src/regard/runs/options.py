"""Options for training, loading, decoding and evaluation, with the same names in Python and on the command line."""

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
    """Options for a new training run: training text and recipe settings. Other settings are chosen automatically."""

    source: str | Path | None  # file of source text, one sentence per line
    target: str | Path | None  # file with the translation of each line of the source file
    valid_source: str | Path | None  # validation source file; default: part of the training text is held out
    valid_target: str | Path | None  # file with the translation of each line of the validation source
    tsv: Paths  # files of tab-separated source and target
    jsonl: Paths  # files with one JSON object per line, with source and target
    text: Paths  # text files for a language model
    labelled: Paths  # files of tab-separated label and text, for a classifier
    valid: str | Path | None  # validation file in the same format as tsv, jsonl, text or labelled
    task: str | None  # the objective, such as "summarization"; default: chosen by the format of the training files
    recipe: str | Path | None  # a .toml or .json recipe, which the other options override
    preset: str | None  # name of a published model, such as "gpt2_small"
    variants: str | Sequence[str]  # names of model modifications, or module:function
    changes: str | Sequence[str]  # PATH=VALUE edits of the recipe, such as "train.accumulate=2"
    start: str | Path | None  # folder of the training run to fine-tune (--from)
    steps: int | None  # training steps: train.steps
    time: str | float | None  # time budget for which the training is planned: 300 (seconds), "5m", "2h"
    trust_code: bool  # import parts that are named as module:Class


class LoadOptions(TypedDict, total=False):
    """Options for loading a trained model from a run folder. A `TrainedModel` is already loaded and takes none."""

    average: int | None  # use the mean of the last N checkpoints
    device: str  # auto, cpu, cuda or mps
    plain: bool  # the readable form of the model, without the faster kernels of `regard.fast`
    trust_code: bool  # import parts that are named as module:Class


class SearchOptions(TypedDict, total=False):
    """Options for beam search or sampling. Options that are not given are taken from the recipe (`decode`)."""

    beam: int | None  # beam size; 1 is greedy search
    temperature: float | None  # sampling temperature; lower is more conservative
    top_k: int | None  # sample from the K most probable tokens
    top_p: float | None  # sample from the smallest set of tokens with this total probability
    min_p: float | None  # sample from tokens at least this probable, relative to the most probable one
    seed: int | None  # random seed for sampling
    changes: str | Sequence[str]  # PATH=VALUE edits of the search, such as "alpha=0.6"


class DecodingOptions(SearchOptions, total=False):
    """Options for decoding: beam search or sampling, and constraints on the output."""

    min_len: int  # minimum length of an output in tokens
    max_len: int | None  # maximum length of an output in tokens
    prefix: str  # text that every output begins with
    required: str | Sequence[str]  # words that every output must contain
    banned: str | Sequence[str]  # words that no output may contain
    no_repeat: int  # forbid repeated sequences of N tokens; 0 allows them
    batch_size: int  # texts decoded together; affects speed only
    warn: Warn  # called with each warning
    search: Search | None  # a complete search, in place of the search options
    limits: Limits | None  # in place of min_len and max_len
    wishes: Constraints | None  # in place of prefix, required, banned and no_repeat


class EvaluationOptions(LoadOptions, total=False):
    """Options for evaluation: test text, metrics and search settings."""

    source: str | None  # file of test text to translate
    reference: str | None  # file of human translations of the source
    tsv: str | None  # file of tab-separated source and reference, in place of `source` and `reference`
    jsonl: str | None  # file of JSON objects with `source` and `target`, in which texts may have several lines
    text: str | None  # file of test text for a language model
    labelled: str | None  # file of labelled test text for a classifier
    against: str | None  # a second run folder, or a file of outputs, to compare with
    tokenize: str | None  # sacreBLEU's tokenizer: 13a, none, intl, zh, char, ...
    beam: int | None  # beam size
    changes: str | Sequence[str]  # PATH=VALUE edits of the search
    batch_size: int | None  # texts decoded together
    stride: int | None  # for a language model, tokens from one window to the next; None: half a window
    windows: str | Sequence[int]  # for a language model, windows to which attention is limited: (16, 32) or "16,32"
    samples: int | None  # number of resamples in the paired bootstrap
    metrics: str | Sequence[str]  # names of metrics, or module:Class; default: those usual for the task
    warn: Warn  # called with each warning


class TranslationOptions(DecodingOptions, total=False):
    """Options of `translate`: the options for decoding, and the inference engine."""

    engine: str | Engine  # "native" or "ctranslate2"; the latter exports the run on first use
    quantize: str | None  # the type in which an export stores weights: int8 or float16


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
    """Return `default`, the search of a recipe, modified by these options.

    `beam` selects beam search, and `temperature`, `top_k`, `top_p` or `min_p` selects sampling. If `default` is a
    search of the other kind, settings that are not given have the default values of the selected kind. If `default` is
    neither beam search nor sampling, it can be modified only by `changes`.
    """
    edits = parse_changes(several(changes), "decode")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and beam is not None:
        raise SpecError("--beam", "selects beam search, and sampling settings select sampling; choose one of them")
    if not isinstance(default, Beam | Sample):
        for name, value in (given | {"beam": beam, "n_best": n_best, "seed": seed}).items():
            if value is not None:
                raise SpecError(_flag(name), f"the search of the recipe is {default.kind!r}; change it with --set")
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
    """Return `default` with these settings. If `beam` is None, the beam size is at least the number of outputs."""
    outputs = n_best or default.n_best
    beam_size = beam if beam is not None else max(default.beam_size, outputs)
    if outputs > beam_size:
        origin = "" if n_best else ", which the recipe sets (decode.n_best)"
        raise SpecError(
            "--n-best", f"beam size {beam_size} is too small for {outputs} outputs{origin}; increase --beam"
        )
    return replace(default, beam_size=beam_size, n_best=outputs)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def one_best(search: Search, beam: int | None) -> Search:
    """Return the search with `n_best` reduced to at most `beam`, for callers that use only the best output."""
    if beam is None or not isinstance(search, Beam):
        return search
    return replace(search, n_best=min(search.n_best, beam))


def accepts(options: Any, *functions: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that lists the keys of the TypedDict `options` as parameters in the signature of a function.

    The decorated function takes these options as `**options` and passes them to `functions`. The signature shows the
    default values of `functions`.
    """

    def expanded(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        inner = {name: p for each in functions for name, p in inspect.signature(each).parameters.items()}
        keywords = {name: inner[name] for name in get_type_hints(options) if name in inner} | {p.name: p for p in own}
        positional = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        named = [p for p in keywords.values() if p.kind is p.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*positional, *named])
        return function

    return expanded


@contextmanager
def cpu_threads(threads: int | None) -> Iterator[None]:
    """Set the number of CPU threads within a `with` block; None leaves the number unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def several(values: str | Path | Iterable[str | Path] | None) -> list[str]:
    """Return paths or names as a list of strings: one element for a single string, and no elements for None."""
    return [str(values)] if isinstance(values, str | Path) else [str(value) for value in values or ()]


def seconds(time: str | float | None, option: str = "--max-time") -> float | None:
    """Convert a duration to seconds; `time` is a number of seconds, or a text such as `90`, `90s`, `30m` or `2h`."""
    if time is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(time).strip())
    if not match or float(match[1]) == 0:
        raise SpecError(option, f"{time!r} is not a time; write 90s, 30m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
