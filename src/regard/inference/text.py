"""Translate, continue, classify and score texts, in batches of similar length. Results keep the order of the input."""

from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from regard.data.extraction import best_first
from regard.data.objectives import Objective
from regard.data.token_store import Column, Table, chunks
from regard.data.tokenizer import Tokenizer
from regard.decoding.constraint import BannedWords, Constraint, ForcedPrefix, NoRepeatedNgram, RequiredWords, bind_all
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, Piece, SpecialTokens
from regard.decoding.length_limit import LengthLimit
from regard.decoding.loops import find_loop
from regard.decoding.positions import Positions, positions
from regard.decoding.sample import Sample
from regard.decoding.search import Search
from regard.errors import DataError, SpecError
from regard.inference.engine import Engine
from regard.inference.native import Native, by_length
from regard.models.base import Classifier, Generator, LanguageModel

AHEAD = 32  # the number of batches whose texts are read at once and sorted by length
NEW = 200  # default number of tokens of a continuation
Warn = Callable[[str], None]
Growing = abc.Generator[str, None, tuple[list[int], bool]]


@dataclass(frozen=True, slots=True)
class Output:
    """One output text of a model."""

    text: str  # begins with the prompt, if there was one
    score: float  # the length-normalised log-probability, by which outputs are ranked
    log_prob: float
    tokens: tuple[str, ...]
    ended: bool  # True: the output ended with eos; False: it was cut at the length limit
    ids: tuple[int, ...] = ()  # the ids of the tokens
    read: tuple[int, ...] = ()  # ids of the source with eos, or of the prompt; (): the model was not used


# EMPTY is the translation of an empty line. MISSING pads the list if a search returns fewer than n_best outputs.
EMPTY = Output("", 0.0, 0.0, (), True)
MISSING = Output("", float("-inf"), float("-inf"), (), False)


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on every output, as text: a prefix, required words, banned words, and n-grams that must not repeat.

    A string that is passed instead of a sequence of words counts as one word.
    """

    prefix: str = ""
    required: Sequence[str] = ()
    banned: Sequence[str] = ()
    no_repeat: int = 0

    def __post_init__(self) -> None:
        for name in ("required", "banned"):
            words = getattr(self, name)
            object.__setattr__(self, name, (words,) if isinstance(words, str) else tuple(words))

    def parts(self) -> tuple[Constraint, ...]:
        """Return the constraints as a tuple of `Constraint` specs."""
        words = RequiredWords(tuple(self.required)), BannedWords(tuple(self.banned))
        return (*words, ForcedPrefix(self.prefix), NoRepeatedNgram(self.no_repeat))

    def rules(self, tokenizer: Tokenizer) -> TokenConstraints:
        """Return the constraints in the token ids of `tokenizer`."""
        return bind_all(self.parts(), tokenizer)


@dataclass(frozen=True)
class Texts:
    """Models that share their tokenizers, with methods that read and return text."""

    models: Sequence[Generator]
    source: Tokenizer
    target: Tokenizer
    max_len: int  # the maximum number of tokens of an input; the rest is cut off, with a warning
    device: torch.device
    warn: Warn = field(default=lambda _: None)
    engine: Engine | None = None  # computes the outputs; None: the native engine
    begin: tuple[int, ...] = ()  # tokens read before every prompt; (): an empty prompt becomes a line feed
    length_limit: LengthLimit | None = None  # fitted to the training text; None: the default of `Limits`
    extracts: bool = False  # True: the paragraphs of a source that is too long are ranked before the rest is cut off

    def translate(
        self,
        texts: Iterable[str],
        search: Search,
        batch_size: int = 32,
        limits: Limits = Limits(),
        wishes: Constraints = Constraints(),
        first: int = 0,
    ) -> Iterator[list[Output]]:
        """Yield the n_best translations of every text, in order. The translation of an empty text is empty.

        `first` is the index of the first text in the whole input, for warnings and random numbers.
        """
        refuse_string(texts)
        (search, rules), limits = self._bound(search, wishes), self._derived(limits)
        engine = self._engine()
        engine.check(search, limits, rules)
        for begin, chunk in _numbered(texts, AHEAD * batch_size, first):
            sources = self.sources(chunk, begin)
            filled = [i for i, text in enumerate(chunk) if text.strip()]
            self._check_room(limits, {begin + i + 1: self._read_first(sources[i]) for i in filled})
            inputs, numbers = [sources[i] for i in filled], [begin + i for i in filled]
            results = engine.find(inputs, search, batch_size, limits, rules, numbers)
            decoded = dict(zip(filled, results, strict=True))
            for i, source in enumerate(sources):
                best = [EMPTY] * outputs_of(search)
                if i in decoded:
                    best = [self._output(h, source) for h in decoded[i]]
                if i in decoded and best:
                    self._warn_about_output(begin + i + 1, search, best[0].ids, source[:-1], best[0].ended, limits)
                yield best + [MISSING] * (outputs_of(search) - len(best))

    def translate_stream(
        self, text: str, search: Search, limits: Limits = Limits(), wishes: Constraints = Constraints(), number: int = 0
    ) -> Iterator[str]:
        """Yield the pieces of a translation as they are generated. `number` is the index of `text` in the input."""
        if not text.strip():
            return
        (source,) = self.sources([text], number)
        self._check_room(limits, {number + 1: self._read_first(source)})
        (search, rules), limits = self._bound(search, wishes), self._derived(limits)
        steps = self._engine().stream(source, search, limits, rules, number, translates=True)
        ids, ended = yield from self._growing(steps)
        self._warn_about_output(number + 1, search, ids, source[:-1], ended, limits)

    def generate(
        self,
        prompts: Iterable[str],
        search: Search,
        batch_size: int = 32,
        limits: Limits = Limits(),
        wishes: Constraints = Constraints(),
        first: int = 0,
    ) -> Iterator[list[Output]]:
        """Yield the n_best continuations of every prompt, in order. The text of an output begins with the prompt.

        If `limits.max_len` is None, a continuation has at most 200 tokens, or fewer if the model has fewer positions
        left. `first` is the index of the first prompt in the whole input, for warnings and random numbers.
        """
        refuse_string(prompts)
        search, rules = self._bound(search, wishes)
        for begin, chunk in _numbered(prompts, AHEAD * batch_size, first):
            texts = [self._prompt(text) for text in chunk]
            read = self.prompts(texts, begin, limits)
            bounds = [self._bounds(limits, ids) for ids in read]
            numbers = range(begin, begin + len(read))
            results = self._engine().extend(read, search, batch_size, bounds, rules, numbers)
            for number, text, prompt, hypotheses in zip(numbers, texts, read, results, strict=True):
                best = [self._output(h, prompt, text) for h in hypotheses]
                if best:
                    self._warn_about_output(number + 1, search, best[0].ids, prompt)
                yield best + [MISSING] * (outputs_of(search) - len(best))

    def generate_stream(
        self,
        prompt: str,
        search: Search,
        limits: Limits = Limits(),
        wishes: Constraints = Constraints(),
        number: int = 0,
    ) -> Iterator[str]:
        """Yield a prompt, then the pieces of a continuation. `number` is the index of `prompt` in the whole input."""
        text = self._prompt(prompt)
        (read,) = self.prompts([text], number, limits)
        (search, rules), bounds = self._bound(search, wishes), self._bounds(limits, read)
        steps = self._engine().stream(read, search, bounds, rules, number, translates=False)
        yield text
        ids, _ = yield from self._growing(steps)
        self._warn_about_output(number + 1, search, ids, read)

    def _engine(self) -> Engine:
        return self.engine or Native(self.models, self.ends, self.device)

    def _growing(self, steps: Iterator[list[Piece]]) -> Growing:
        """Yield the pieces of an output as they are generated. Return all ids, and whether eos ended the output."""
        ids: list[int] = []
        yielded, ended = "", False
        for pieces in steps:
            ids += [i for piece in pieces for i in piece.ids]
            ended = ended or any(piece.hypothesis is not None and piece.hypothesis.ended for piece in pieces)
            text = self.target.decode(ids)
            # A character of several bytes is yielded once all its bytes are generated.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(yielded) :]
                yielded = text
        yield self.target.decode(ids)[len(yielded) :]
        return ids, ended

    def _bound(self, search: Search, constraints: Constraints) -> tuple[Search, TokenConstraints]:
        """Return the search without its constraints, and all constraints combined, in token ids."""
        own: tuple[Constraint, ...] = getattr(search, "constraints", ())
        rules = bind_all((*constraints.parts(), *own), self.target)
        return (replace(search, constraints=()) if own else search), rules  # type: ignore[call-arg]

    def _derived(self, limits: Limits) -> Limits:
        """Return `limits`. If `limits.derived` is None, set it to the length limit fitted to the training text."""
        return limits if limits.derived is not None else replace(limits, derived=self.length_limit)

    def _warn_about_output(
        self,
        line: int,
        search: Search,
        ids: Sequence[int],
        read: Sequence[int],
        ended: bool = True,
        limits: Limits = Limits(),
    ) -> None:
        """Warn if an output is cut at a derived length limit, or if it contains a loop and the input does not."""
        loop = None if isinstance(search, Sample) else find_loop(ids)
        if loop is not None and find_loop(read) is None:
            self.warn(
                f"line {line}: the output repeats itself: a loop of period {loop.period} fills {loop.tokens} of its "
                f"{len(ids)} tokens; the model may need more training"
            )
        elif not ended and limits.max_len is None:
            self.warn(
                f"line {line}: the translation has not ended after {len(ids)} tokens and is cut there; the model may "
                "need more training, and --max-len sets another limit"
            )

    @property
    def ends(self) -> SpecialTokens:
        """The special tokens of the target."""
        return SpecialTokens(self.target.bos, self.target.eos, self.target.pad)

    @cached_property
    def positions(self) -> Positions:
        """The number of positions that the models have, and whether the source takes up positions."""
        return positions(self.models)

    def sources(self, texts: Sequence[str], first: int = 0) -> list[list[int]]:
        """Return the ids of the sources, each with eos. A source that is too long is cut at the end, with a warning.

        If `extracts` is true, its paragraphs are ranked by tf-idf first, as in training with data.long=extract.
        """
        encoded = self.source.encode_batch(list(texts))
        long = [i for i, ids in enumerate(encoded) if len(ids) > self.max_len]
        effect = "only these are read"
        if self.extracts:
            effect = "these are read after the paragraphs are ranked by tf-idf for the words of the first paragraph"
        warn_about(
            self.warn,
            {first + i + 1: f"{len(encoded[i])} tokens" for i in long},
            f"are more than the {self.max_len} that the model was trained for (data.max_len); {effect}",
        )
        if self.extracts and long:
            for i, ids in zip(long, self.source.encode_batch([best_first(texts[i]) for i in long]), strict=True):
                encoded[i] = ids
        return [[*ids[: self.max_len], self.source.eos] for ids in encoded]

    def prompts(self, texts: Sequence[str], first: int = 0, limits: Limits = Limits()) -> list[list[int]]:
        """Return the ids of the prompts. A prompt that is too long is cut at the beginning, with a warning.

        A prompt is too long if it has more tokens than the model was trained for, or if it leaves too few positions for
        `limits.max_len` new tokens. Half of the positions are always reserved for the prompt.
        """
        count, keep = self.positions.count, self.max_len
        if count is not None:
            new = min(limits.max_len or max(NEW, limits.min_len), (count + 1) // 2)
            keep = max(min(keep, count + 1 - len(self.begin) - new), 1)
        encoded = self.target.encode_batch(list(texts))
        read = {first + i + 1: len(self.begin) + min(len(ids), keep) for i, ids in enumerate(encoded)}
        for line, tokens in read.items():
            if not tokens:
                raise DataError(
                    f"line {line}: the prompt has no tokens, and this model has no start token; give more text"
                )
        self._check_room(limits, read)
        warn_about(
            self.warn,
            {first + i + 1: f"{len(ids)} tokens" for i, ids in enumerate(encoded) if len(ids) > keep},
            f"are more of a prompt than the model can read and continue; only the last {keep} are read",
        )
        return [[*self.begin, *ids[-keep:]] for ids in encoded]

    def _prompt(self, text: str) -> str:
        """Return `text`, or a line feed if `text` is empty and the model has no start token."""
        return text if text or self.begin else "\n"

    def _bounds(self, limits: Limits, read: Sequence[int]) -> Limits:
        """Return the limits for the continuation of a prompt."""
        if limits.max_len is not None:
            return limits
        left = self.positions.left(len(read))
        return Limits(limits.min_len, max(NEW if left is None else min(NEW, left), limits.min_len, 1))

    def _read_first(self, source: Sequence[int]) -> int:
        """Return the number of positions that bos and, in some models, the source take up before a translation."""
        return 1 + (len(source) if self.positions.source_first else 0)

    def _check_room(self, limits: Limits, read: Mapping[int, int]) -> None:
        """Raise an error for limits that exceed the number of positions; warn if fewer than `max_len` are left.

        `read` maps the line number of each input to the number of tokens that are read before the output.
        """
        count = self.positions.count
        if count is None:
            return
        for name, value in {"min_len": limits.min_len, "max_len": limits.max_len or 0}.items():
            if value > count:
                raise SpecError(name, f"the model has {count} positions and cannot generate {value} tokens; lower it")
        left = {line: count - tokens + 1 for line, tokens in read.items()}
        for line, room in left.items():
            if limits.min_len > room:
                raise DataError(
                    f"line {line}: the input takes {read[line]} of the model's {count} positions, which leaves no "
                    f"room for min_len {limits.min_len}; lower it"
                )
        if limits.max_len is not None:
            warn_about(
                self.warn,
                {line: f"at most {room} tokens" for line, room in left.items() if limits.max_len > room},
                f"can follow, not max_len {limits.max_len}: the input takes the rest of the model's {count} positions",
            )

    def _output(self, hypothesis: Hypothesis, read: Sequence[int], prompt: str = "") -> Output:
        ids, ended = list(hypothesis.ids), hypothesis.ended
        score, log_prob = hypothesis.score, hypothesis.log_prob
        text, tokens = prompt + self.target.decode(ids), tuple(self.target.tokens(ids))
        return Output(text, score, log_prob, tokens, ended, tuple(ids), tuple(read))


def warn_about(warn: Warn, lines: Mapping[int, str], why: str) -> None:
    """Emit the warning `line N: <subject> <why>` for every line; `lines` maps line numbers to subjects."""
    for line, what in lines.items():
        warn(f"line {line}: {what} {why}")


def outputs_of(search: Search) -> int:
    """Return the number of outputs that a search returns for each text."""
    return getattr(search, "n_best", 1)


def refuse_string(texts: object) -> None:
    """Raise DataError if `texts` is a string, because each character would be read as a text."""
    if isinstance(texts, str):
        raise DataError("texts: needs a list of texts, not one string")


def _numbered(items: Iterable[str], size: int, first: int) -> Iterator[tuple[int, list[str]]]:
    for chunk in chunks(items, size):
        yield first, chunk
        first += len(chunk)


@dataclass(frozen=True, slots=True)
class TextScore:
    """The log-probability of a given text under a model."""

    log_prob: float  # the sum of token_log_probs
    token_log_probs: tuple[float, ...]  # includes the end token, if there is one
    tokens: int  # the number of scored tokens


@dataclass(frozen=True, slots=True)
class ScoringInput:
    """A sequence to score: the tokens `scored`, with the tokens `given` and the source (if any) as context."""

    given: tuple[int, ...]
    scored: tuple[int, ...]
    source: tuple[int, ...] = ()


@torch.no_grad()
def score(
    model: LanguageModel,
    objective: Objective,
    rows: Sequence[ScoringInput],
    device: torch.device,
    batch_size: int = 32,
    first: int = 0,
) -> list[TextScore]:
    """Return the log-probabilities of the tokens to score in every input.

    If an input has neither a source nor `given` tokens, its first token is not scored. `first` is the index of the
    first of `rows` in the whole input, for error messages.
    """
    results = {i: TextScore(0.0, (), 0) for i, row in enumerate(rows)}
    scored = [i for i, row in enumerate(rows) if row.scored and len(row.given) + len(row.scored) > 1]
    targets = [[*rows[i].given, *rows[i].scored] for i in scored]
    limit = positions([model])
    for i, target in zip(scored, targets, strict=True):
        read = len(target) - 1 + (len(rows[i].source) if limit.source_first else 0)
        if limit.count is not None and read > limit.count:
            raise DataError(
                f"line {first + i + 1}: {read} tokens are more than the {limit.count} positions that the model has; "
                "split the text"
            )
    columns = {"target": Column.of(targets)}
    if "source" in objective.columns:
        columns["source"] = Column.of([rows[i].source for i in scored])
    for places in by_length(targets, batch_size):
        batch = objective.item(columns, list(np.asarray(places)[:, None])).batch.to(device)
        assert batch.labels is not None
        scores = model.log_probs(batch).gather(-1, batch.labels[:, :, None])[:, :, 0].double().cpu()
        for place, row in zip(places, scores, strict=True):
            own = rows[scored[place]]
            log_probs = row[max(len(own.given) - 1, 0) : len(targets[place]) - 1].tolist()
            results[scored[place]] = TextScore(sum(log_probs), tuple(log_probs), len(log_probs))
    return [results[i] for i in range(len(rows))]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted class of a text, and the probabilities of all classes."""

    label: str
    probabilities: dict[str, float]


@torch.no_grad()
def classify(  # noqa: PLR0913, PLR0917  # a classifier of a run, and the options of one call
    model: Classifier,
    objective: Objective,
    texts: Sequence[str],
    tokenizers: dict[str, Tokenizer],
    device: torch.device,
    max_len: int,
    batch_size: int = 32,
    warn: Warn = lambda _: None,
    first: int = 0,
    tokens: int | None = None,
) -> list[Prediction]:
    """Return the predicted class of every text, including empty texts.

    A batch has at most `batch_size` texts and, if `tokens` is given, at most so many tokens with padding, or one text.
    `first` is the index of the first text in the whole input, for warnings.
    """
    refuse_string(texts)
    whole = Table({objective.columns[0]: objective.inputs(texts, tokenizers)})
    lengths = whole[objective.columns[0]].lengths - 1  # without bos
    warn_about(
        warn,
        {first + i + 1: f"{length} tokens" for i, length in enumerate(lengths) if length > max_len},
        f"are more than {max_len} (data.max_len); only these are read",
    )
    table = objective.limit(whole, max_len).table
    inputs = table[objective.columns[0]]
    predictions: dict[int, Prediction] = {}
    for numbers in by_length([inputs[i] for i in range(len(texts))], batch_size, tokens):
        batch = objective.item(table.columns, list(np.asarray(numbers)[:, None])).batch
        scores: Tensor = model.scores(batch.to(device))
        for number, probabilities in zip(numbers, scores.double().softmax(-1).tolist(), strict=True):
            best = max(range(len(probabilities)), key=lambda i: (round(probabilities[i] / 1e-6), -i))
            by_label = dict(zip(objective.labels, probabilities, strict=True))
            predictions[number] = Prediction(objective.labels[best], by_label)
    return [predictions[i] for i in range(len(texts))]
