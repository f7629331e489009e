"""Text in, text out: translations, continuations, classes and scores. Sorted by length inside, input order outside."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from regard.batch import Batch, pad
from regard.data.objectives import Classification, Objective
from regard.data.store import chunks
from regard.data.tokenizer import Tokenizer
from regard.decoding.hypothesis import Ends, Hypothesis, Limits
from regard.decoding.rules import Rules
from regard.decoding.search import Search, find, stream
from regard.engines.base import Engine
from regard.engines.native import Native, by_length
from regard.errors import DataError
from regard.models.base import Classifier, Generator, LanguageModel

AHEAD = 32  # batches that are read before the first is decoded, to sort them by length
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Output:
    """One text that a model said."""

    text: str
    score: float  # what ranks: length-normalised log-probability
    log_prob: float
    tokens: tuple[str, ...]
    ended: bool  # by itself, not for want of room


@dataclass(frozen=True, slots=True)
class Wishes:
    """Rules in words, of every output: how it begins, what it must and must not say."""

    prefix: str = ""
    required: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()
    no_repeat: int = 0

    def rules(self, tokenizer: Tokenizer) -> Rules:
        """The same in ids. A word has other ids at the beginning of a text than inside; all its spellings are banned.

        A required word is asked for as it stands after a space, which is where most words stand.
        """
        banned = [ids for word in self.banned for ids in spellings(word, tokenizer)]
        required = [spellings(word, tokenizer)[0] for word in self.required]
        return Rules(tuple(tokenizer.encode(self.prefix)), tuple(banned), tuple(required), self.no_repeat)


def spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The ids of a word after a space, and at the beginning of a text."""
    found = [tuple(tokenizer.encode(f" {word}")), tuple(tokenizer.encode(word))]
    return list(dict.fromkeys(ids for ids in found if ids))


@dataclass(frozen=True)
class Texts:
    """Models that share their tokenizers, and how texts go in and come out."""

    models: Sequence[Generator]
    source: Tokenizer
    target: Tokenizer
    max_len: int  # tokens of an input that are read; the rest is cut off, with a warning
    device: torch.device
    warn: Warn = field(default=lambda _: None)
    engine: Engine | None = None  # who translates; None: the models themselves

    def translate(
        self,
        texts: Iterable[str],
        search: Search,
        batch_size: int = 32,
        limits: Limits = Limits(),
        wishes: Wishes = Wishes(),
        first: int = 0,
    ) -> Iterator[list[Output]]:
        """The best outputs for every text, in order; an empty text has an empty translation.

        `first` is the number of the first text, where these are some of many.
        """
        rules = wishes.rules(self.target)
        engine = self.engine or Native(self.models, self.ends, self.device)
        engine.check(search, limits, rules)
        for before, chunk in _numbered(texts, AHEAD * batch_size):
            begin = first + before
            sources = [self._source(text, begin + i + 1) for i, text in enumerate(chunk)]
            filled = [i for i, text in enumerate(chunk) if text.strip()]
            results = engine.find(
                [sources[i] for i in filled], search, batch_size, limits, rules, [begin + i for i in filled]
            )
            found = dict(zip(filled, results, strict=True))
            nothing = [Output("", 0.0, 0.0, (), True)]
            for i in range(len(chunk)):
                yield [self._output(h) for h in found[i]] if i in found else nothing

    def translate_stream(
        self, text: str, search: Search, limits: Limits = Limits(), wishes: Wishes = Wishes()
    ) -> Iterator[str]:
        """A translation as it grows: each piece is what the text has gained."""
        if not text.strip():
            return
        ids, seg = pad([self._source(text, 1)])
        batch = Batch(ids, source=ids, source_seg=seg).to(self.device)
        yield from self._growing(batch, search, limits, wishes)

    def generate(
        self,
        prompts: Sequence[str],
        search: Search,
        batch_size: int = 32,
        limits: Limits = Limits(max_len=200),
        wishes: Wishes = Wishes(),
        begin: Sequence[int] = (),
    ) -> Iterator[list[Output]]:
        """Continuations of prompts; `begin` stands before every prompt. The prompt is part of the text."""
        rules = wishes.rules(self.target)
        read = [self._prompt(prompt, number + 1, begin) for number, prompt in enumerate(prompts)]
        found: dict[int, list[Output]] = {}
        for rows in by_length(read, batch_size):
            ids, seg = pad([read[i] for i in rows])
            batch = Batch(ids, target_seg=seg).to(self.device)
            results = find(self.models, batch, search, self.ends, limits, rules, rows)
            for i, best in zip(rows, results, strict=True):
                found[i] = [self._output(h, prompts[i]) for h in best]
        yield from (found[i] for i in range(len(prompts)))

    def generate_stream(
        self, prompt: str, search: Search, limits: Limits, wishes: Wishes = Wishes(), begin: Sequence[int] = ()
    ) -> Iterator[str]:
        """A continuation as it grows."""
        ids, seg = pad([self._prompt(prompt, 1, begin)])
        yield from self._growing(Batch(ids, target_seg=seg).to(self.device), search, limits, wishes)

    def _growing(self, batch: Batch, search: Search, limits: Limits, wishes: Wishes) -> Iterator[str]:
        said: list[int] = []
        shown = ""
        for pieces in stream(self.models, batch, search, self.ends, limits, wishes.rules(self.target)):
            said += [i for piece in pieces for i in piece.ids]
            text = self.target.decode(said)
            # A character of several bytes is shown once it is whole.
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text
        yield self.target.decode(said)[len(shown) :]

    @property
    def ends(self) -> Ends:
        """The ids that are not text."""
        return Ends(self.target.bos, self.target.eos, self.target.pad)

    def _source(self, text: str, line: int) -> list[int]:
        return [*self._cut(self.source.encode(text), line), self.source.eos]

    def _prompt(self, text: str, line: int, begin: Sequence[int]) -> list[int]:
        ids = [*begin, *self._cut(self.target.encode(text), line)]
        if not ids:
            raise DataError(f"line {line}: the prompt is empty; this model continues text and needs some")
        return ids

    def _cut(self, ids: list[int], line: int) -> list[int]:
        if len(ids) > self.max_len:
            self.warn(
                f"line {line}: {len(ids)} tokens are more than the {self.max_len} that the model was trained for "
                "(data.max_len); only these are read"
            )
        return ids[: self.max_len]

    def _output(self, hypothesis: Hypothesis, prompt: str = "") -> Output:
        ids = list(hypothesis.ids)
        return Output(
            prompt + self.target.decode(ids),
            hypothesis.score,
            hypothesis.log_prob,
            tuple(self.target.pieces(ids)),
            hypothesis.ended,
        )


def _numbered(items: Iterable[str], size: int) -> Iterator[tuple[int, list[str]]]:
    first = 0
    for chunk in chunks(items, size):
        yield first, chunk
        first += len(chunk)


@dataclass(frozen=True, slots=True)
class TextScore:
    """How probable a model finds a given text."""

    log_prob: float  # with eos
    token_log_probs: tuple[float, ...]
    tokens: int


@torch.no_grad()
def score(
    model: LanguageModel,
    objective: Objective,
    records: Sequence[tuple[str, ...]],
    tokenizers: dict[str, Tokenizer],
    device: torch.device,
    batch_size: int = 32,
) -> list[TextScore]:
    """log p of the said text of every record, in one pass each."""
    table = objective.table(records, tokenizers)
    found: dict[int, TextScore] = {}
    targets = [table["target"][row].tolist() for row in range(table.rows)]
    for numbers in by_length(targets, batch_size):
        item = objective.item(table.columns, list(np.asarray(numbers)[:, None]))
        batch = item.batch.to(device)
        assert batch.labels is not None
        scores = model.log_probs(batch).gather(-1, batch.labels[:, :, None])[:, :, 0].double().cpu()
        for number, row in zip(numbers, scores, strict=True):
            said = row[: len(targets[number]) - 1].tolist()
            found[number] = TextScore(sum(said), tuple(said), len(said))
    return [found[i] for i in range(len(records))]


@dataclass(frozen=True, slots=True)
class Guess:
    """The class of a text."""

    label: str
    probabilities: dict[str, float]


@torch.no_grad()
def classify(
    model: Classifier,
    objective: Classification,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    device: torch.device,
    max_len: int,
    batch_size: int = 32,
    warn: Warn = lambda _: None,
) -> list[Guess]:
    """The class of every text; of one without words, that of nothing at all."""
    rows = []
    for line, ids in enumerate(tokenizer.encode_batch(list(texts)), start=1):
        if len(ids) > max_len:
            warn(f"line {line}: {len(ids)} tokens are more than {max_len} (data.max_len); only these are read")
        rows.append([tokenizer.bos, *ids[:max_len]])
    found: dict[int, Guess] = {}
    for numbers in by_length(rows, batch_size):
        ids, seg = pad([rows[i] for i in numbers])
        scores: Tensor = model.scores(Batch(ids, target_seg=seg).to(device))
        for number, chances in zip(numbers, scores.double().softmax(-1).tolist(), strict=True):
            best = max(range(len(chances)), key=lambda i: (round(chances[i] / 1e-6), -i))
            found[number] = Guess(objective.labels[best], dict(zip(objective.labels, chances, strict=True)))
    return [found[i] for i in range(len(texts))]
