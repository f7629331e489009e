"""Tokenizers convert text to token ids and back. A tokenizer is learned from the corpus or imported.

A tokenizer is stored as one JSON file: a `tokenizer.json` for the tokenizers library with regard's settings at the key
`model.regard`. The library ignores this key, and `Tokenizer.plain_json` leaves it out.
"""

import hashlib
import json
import os
import re
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from regard.data.token_store import Column
from regard.data.vocabulary_size import MAX_VOCAB, choose_vocab
from regard.data.words import WordMemory
from regard.errors import DataError, SpecError
from regard.tree import Spec

Document = dict[str, Any]

CONTROL = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2
UNKNOWN = "<unk>"  # id 3 in the tokenizer kind "words"
BYTE_VOCAB = len(CONTROL) + 256
# Rare subwords are hardly learned, which costs most where the corpus is small (Sennrich & Zhang 2019). With 5,000
# unspaced Chinese sentences, exact match on held-out lines is 40 % with a minimum count of 2 and 99 % with 5.
MIN_COUNT = 5
ID_LIMIT = 1 << 24  # larger ids are refused: a model has an embedding for every id
ENCODE_BATCH = 4096  # texts per call of the library, because a call needs many times the memory of its texts
SPACE = "\u2581"  # a space in a printed token
VERSION: str = tokenizers.__version__  # another version of the library may learn other subwords from the same text
BY_WORD = ("bpe", "bytes", "characters")  # kinds of tokenizer in which no token crosses a space or a line feed

# A word includes the space before it. Combining marks count as letters (GPT-2 splits Hindi words at them). Every digit
# is a token, so that all numbers consist of ten frequent tokens. A line feed is a token of its own.
WORD = r"\n| ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
CHARACTER = r"[\s\S]"

# GPT-2's alphabet: every byte as a printable character. The 68 bytes that are not printable are shifted up, in order.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
SYMBOLS = [chr(byte) if byte in _VISIBLE else chr(256 + _HIDDEN.index(byte)) for byte in range(256)]
BYTES = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot encode

# Only a lossless tokenizer can encode and restore this text. It has spaces, combining marks, look-alike characters, the
# text of control tokens, and a sample of all Unicode characters.
ROUND_TRIP = "  a  b\t\r\n\u2028 e\u0301\u00e9 \ufb01 \uff21 don 't </s> <unk> [ x ] \u2581" + "".join(
    chr(code) for code in (*range(256), *range(256, 0x40000, 97)) if not 0xD800 <= code < 0xE000
)


@dataclass(frozen=True, slots=True)
class Note:
    """Settings that regard adds to a `tokenizer.json`, because the tokenizers library does not store them."""

    kind: str
    why: str  # the size of the vocabulary and the reason for it, which is printed
    pad: int = 0
    bos: int = 1
    eos: int = 2
    unknown: int | None = None
    format: int = 1

    def __post_init__(self) -> None:
        if self.format != 1:
            raise ValueError("it was written by a later version of regard")
        ids = (self.pad, self.bos, self.eos, 0 if self.unknown is None else self.unknown)
        if not all(type(value) is int for value in ids) or not all(type(s) is str for s in (self.kind, self.why)):
            raise TypeError("a setting in model.regard has a wrong type")


class Tokenizer:
    """A tokenizer encodes text as token ids and decodes token ids to text.

    Text is never parsed for control tokens: "</s>" in a text is 4 characters. `encode` never returns the ids `pad`,
    `bos` or `eos`, and `decode` skips these ids. An unknown word decodes to `<unk>`.
    """

    def __init__(self, text: str, document: Document, note: Note) -> None:
        self._text = text
        self.kind, self.why = note.kind, note.why
        self.pad, self.bos, self.eos, self.unknown = note.pad, note.bos, note.eos, note.unknown
        self._library, self._control = _load_guarded(document, note.unknown)
        self.size = 1 + max(self._library.get_vocab().values())
        if self.size > ID_LIMIT:
            raise ValueError(f"a token has the id {self.size - 1}, beyond {ID_LIMIT:,}")
        if not {self.pad, self.bos, self.eos} <= set(self._control) or not 0 <= (self.unknown or 0) < self.size:
            raise ValueError("the ids of its control tokens differ from those in model.regard")
        self._model: str | None = document["model"].get("type")
        self._continuation: str = document["model"].get("continuing_subword_prefix") or ""
        self._has_bytes = '"ByteLevel"' in json.dumps(document.get("decoder"))

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.why})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self._text,)

    @classmethod
    def from_json(cls, text: str, name: str = "the tokenizer") -> "Tokenizer":
        """Return the tokenizer that `to_json` converted to `text`. Error messages contain `name`."""
        document = _parse(text, name)
        note = document["model"].pop("regard", None)
        if note is None:
            raise DataError(f"{name}: was not written by regard; use it with the tokenizer kind 'imported'")
        try:
            return cls(text, document, Note(**note))
        except Exception as error:  # the library raises nothing more special
            why = " ".join(str(error).split())
            raise DataError(f"{name}: cannot be used as a tokenizer ({why})") from None

    def to_json(self) -> str:
        """Return the tokenizer as JSON text, which is the content of its file."""
        return self._text

    def plain_json(self) -> str:
        """Return the `tokenizer.json` of the tokenizers library, without regard's settings."""
        document = json.loads(self._text)
        del document["model"]["regard"]
        return _serialize(document)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Return the tokenizer that is stored in a file."""
        return cls.from_json(_read_text(path), os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer to a file."""
        try:
            Path(path).write_bytes(self._text.encode("utf-8"))
        except OSError as error:
            raise DataError(f"{os.fspath(path)}: cannot be written ({error.strerror})") from None

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 of the tokenizer's file."""
        return hashlib.sha256(self._text.encode("utf-8")).hexdigest()

    @cached_property
    def lossless(self) -> bool:
        """True if decoding an encoded text restores the text, tested on `ROUND_TRIP`."""
        return self.decode(self.encode(ROUND_TRIP)) == ROUND_TRIP

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without bos and eos."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of every text, computed on all cores."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), ENCODE_BATCH):
            batch = texts[start : start + ENCODE_BATCH]
            try:
                encoded = self._library.encode_batch_fast(batch, add_special_tokens=False)
            except Exception as error:  # the library raises nothing more special
                for number, text in enumerate(batch, start):
                    if LONE_SURROGATE.search(text):
                        raise DataError(f"text {number} has half a character (a lone surrogate); repair it") from None
                raise DataError(f"texts {start} to {start + len(batch) - 1} cannot be encoded ({error})") from None
            ids.extend(encoding.ids for encoding in encoded)
        return ids

    def encode_column(self, texts: list[str]) -> Column:
        """Return the token ids of every text as a column. Most tokenizers encode every distinct word only once."""
        return self._words.column(texts) if self.kind in BY_WORD else Column.of(self.encode_batch(texts))

    @cached_property
    def _words(self) -> WordMemory:
        return WordMemory(self.encode_batch)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; invalid UTF-8 decodes to U+FFFD."""
        return self._library.decode(self._without_control(ids), skip_special_tokens=False)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of every sequence of token ids."""
        return self._library.decode_batch([self._without_control(ids) for ids in rows], skip_special_tokens=False)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens of `ids` in printable form: a space as U+2581, other invisible characters escaped."""
        self._check(ids)
        return [self._control.get(i) or _visible(self._token_text(i)) for i in ids]

    pieces = tokens  # alias for compatibility

    def vocabulary(self, size: int | None = None) -> list[str]:
        """Return all tokens of the vocabulary as spelled in the file, ordered by id.

        An id without a token gives `<none-ID>`. If `size` is larger than the vocabulary, the list is extended to
        `size` entries.
        """
        tokens = (self._control.get(i) or self._library.id_to_token(i) for i in range(self.size))
        known = [token or f"<none-{i}>" for i, token in enumerate(tokens)]
        return known + [f"<none-{i}>" for i in range(self.size, size or self.size)]

    def starts_word(self, token_id: int) -> bool:
        """Return whether a token begins a new word. If not, the token continues the word of the previous token."""
        self._check((token_id,))
        if token_id in self._control or self._model == "WordLevel":
            return True
        text = self._token_text(token_id)
        return not text.startswith(self._continuation) if self._continuation else text[:1].isspace()

    def _token_text(self, token_id: int) -> str:
        token = self._library.id_to_token(token_id) or ""
        if not self._has_bytes:
            return token.replace(SPACE, " ")
        if not BYTES.keys() >= set(token):  # an added token of an imported file, which is plain text
            return token
        return bytes(BYTES[symbol] for symbol in token).decode("utf-8", "backslashreplace")

    def _without_control(self, ids: Sequence[int]) -> list[int]:
        self._check(ids)
        return [i for i in ids if i not in self._control]

    def _check(self, ids: Sequence[int]) -> None:
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.size:
            wrong = next(i for i in ids if not 0 <= i < self.size)
            raise DataError(f"id {wrong} is not in the vocabulary, 0 .. {self.size - 1}")


def tokenizer_files(tokenizers: Mapping[str, Tokenizer]) -> dict[str, Tokenizer]:
    """Return the tokenizers, keyed by file name: one joint tokenizer, or a separate one for source and target."""
    if len({tokenizer.sha256 for tokenizer in tokenizers.values()}) == 1:
        return {"tokenizer.json": next(iter(tokenizers.values()))}
    return {f"tokenizer.{name}.json": tokenizer for name, tokenizer in tokenizers.items()}


class TokenizerSpec(Spec):
    """Abstract base class of tokenizer specs: how a tokenizer is learned from text, or imported."""

    __slots__ = ()
    sampled: ClassVar[bool] = False  # True if a sample of a large corpus is enough to learn the tokenizer

    @abstractmethod
    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:
        """Learn a tokenizer from texts, deterministically and in one pass.

        `share` is the fraction of the corpus in `texts`. It is below 1 if `texts` is a sample.
        """


class TooFewSubwordsError(DataError):
    """Raised if a sample of the corpus has fewer subwords than needed. The whole corpus may have enough subwords."""


def train(spec: TokenizerSpec, texts: Iterable[str], share: float = 1.0) -> Tokenizer:
    """Learn the tokenizer that `spec` describes. `share` is the fraction of the corpus in `texts`."""
    if isinstance(texts, str):
        raise DataError("texts: needs a sequence of texts, not a single one; put it into a list")
    try:
        return spec.learn(texts, share)
    except UnicodeEncodeError:
        raise DataError("the corpus has half a character (a lone surrogate); repair the text") from None


@dataclass(frozen=True, slots=True)
class BPE(TokenizerSpec):
    """Byte-pair encoding (Sennrich et al. 2016) on bytes (Radford et al. 2019).

    Training merges the most frequent pair of tokens again and again. The encoding is lossless and has no unknown
    tokens, because every byte is a token. A pair is merged if it occurs at least twice, or at least `MIN_COUNT` times
    if the vocabulary size is chosen from the corpus.
    """

    kind = "bpe"
    sampled = True
    vocab: int | None = None  # number of tokens; None: from `choose_vocab`, or fewer if the corpus is small
    # Number of languages that share the vocabulary, for `choose_vocab`; None: 1 for a language model, 2 otherwise.
    languages: int | None = None

    def check(self) -> None:
        if self.languages is not None and self.languages < 1:
            raise SpecError("languages", f"must be at least 1, not {self.languages}")
        if self.vocab is not None and self.vocab < BYTE_VOCAB:
            always = f"{len(CONTROL)} control tokens and the 256 bytes"
            raise SpecError("vocab", f"must be at least {BYTE_VOCAB}, not {self.vocab}, for {always}")

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:
        library = _byte_level(models.BPE(), pre_tokenizers.Split(Regex(WORD), "isolated"))
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab or MAX_VOCAB,
            min_frequency=2 if self.vocab else max(2, round(MIN_COUNT * share)),
            show_progress=False,
            special_tokens=list(CONTROL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        counted_texts = _CountedTexts(texts)
        library.train_from_iterator(iter(counted_texts), trainer)
        counted_texts.check()
        document = json.loads(library.to_str())
        reached = len(document["model"]["vocab"])
        words = round(counted_texts.words / share)
        size = self.vocab or choose_vocab(words, self.languages or 2)
        if share < 1.0 and reached < size:
            raise TooFewSubwordsError(f"a sample of the corpus has {reached} subwords, fewer than {size}")
        sample = f", learned from {counted_texts.characters / 1e6:.1f} million characters" if share < 1.0 else ""
        if self.vocab is not None:
            _check_size(reached, self.vocab)
            return _tokenizer(document, Note(self.kind, f"{reached:,} subwords, as requested{sample}"))
        about = f"about {float(f'{words:.3g}'):,.0f}" if share < 1.0 else f"{words:,}"
        why = f"{min(size, reached):,} subwords (chosen from the corpus size, {about} words"
        if reached < size:
            why += f"; all that occur at least {MIN_COUNT} times"
        why += ")" + sample
        _truncate(document["model"], size)
        return _tokenizer(document, Note(self.kind, why))


@dataclass(frozen=True, slots=True)
class Bytes(TokenizerSpec):
    """One token per byte of UTF-8, with the id 3 + byte. The encoding is lossless, and nothing is learned."""

    kind = "bytes"

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        why = f"{BYTE_VOCAB} tokens: 256 bytes and {len(CONTROL)} control tokens"
        return _untrained(_byte_level(models.BPE(vocab=_byte_vocab(), merges=[])), Note(self.kind, why))


@dataclass(frozen=True, slots=True)
class Characters(TokenizerSpec):
    """One token per character that occurs in the corpus.

    Other characters are encoded as bytes, so the encoding is lossless.
    """

    kind = "characters"

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        if not counts:
            raise DataError("the corpus has no text to learn a vocabulary from")
        vocab = _byte_vocab()
        for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            vocab.setdefault("".join(SYMBOLS[byte] for byte in character.encode("utf-8")), len(vocab))
        # `ignore_merges` looks up whole characters; without merges, a character outside the vocabulary stays bytes.
        model = models.BPE(vocab=vocab, merges=[], ignore_merges=True)
        library = _byte_level(model, pre_tokenizers.Split(Regex(CHARACTER), "isolated"))
        return _untrained(
            library, Note(self.kind, f"{len(vocab):,} tokens: the bytes and the characters of the corpus")
        )


@dataclass(frozen=True, slots=True)
class Words(TokenizerSpec):
    """One token per whitespace-separated word that occurs at least twice. Other words become `<unk>`.

    A line feed is also a token. The encoding is not lossless: unknown words are lost, white space between words becomes
    one space, and spaces next to a line feed are removed.
    """

    kind = "words"
    vocab: int | None = None  # None: all words that occur at least twice, at most 32,000

    def check(self) -> None:
        if self.vocab is not None and self.vocab <= len(CONTROL) + 2:
            raise SpecError("vocab", f"must be above {len(CONTROL) + 2}, not {self.vocab}, to have room for a word")

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        library = tokenizers.Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        # Every word is stored with a space before it, so no word equals "</s>" and concatenation restores the text.
        words = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        blanks = pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed")
        library.pre_tokenizer = pre_tokenizers.Sequence([blanks, pre_tokenizers.Split("\n", "isolated"), words])
        space, feed = SYMBOLS[ord(" ")], SYMBOLS[ord("\n")]
        library.decoder = decoders.Sequence(
            [
                decoders.Replace(Regex(f"^{UNKNOWN}$"), space + UNKNOWN),
                decoders.ByteLevel(),
                decoders.Replace(" \n", "\n"),
                decoders.Replace("\n ", "\n"),
                decoders.Strip(" ", 1, 0),
            ]
        )
        always = [*CONTROL, UNKNOWN, space + feed]
        trainer = trainers.WordLevelTrainer(
            vocab_size=self.vocab or MAX_VOCAB, min_frequency=2, show_progress=False, special_tokens=always
        )
        counted_texts = _CountedTexts(texts)
        library.train_from_iterator(iter(counted_texts), trainer)
        counted_texts.check()
        document = json.loads(library.to_str())
        document["added_tokens"] = document["added_tokens"][: len(CONTROL)]
        reached = len(document["model"]["vocab"])
        if reached == len(always):
            raise DataError("no word occurs twice in the corpus; give more text, or use the tokenizer kind 'bpe'")
        if self.vocab is not None:
            _check_size(reached, self.vocab)
        why = f"{reached:,} words" + (" that occur at least twice" if self.vocab is None else ", as requested")
        return _tokenizer(document, Note(self.kind, why, unknown=3))


# Usual names of the control tokens, in order of preference; a missing token is added under the first name.
NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "bos": ("<s>", "<bos>", "[BOS]", "[CLS]", "<cls>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[EOS]", "[SEP]", "<sep>", "<|end_of_text|>", "<|endoftext|>"),
}


@dataclass(frozen=True, slots=True)
class Imported(TokenizerSpec):
    """A `tokenizer.json` from the tokenizers library. The ids stay the same, and missing control tokens are added.

    The post-processor, truncation, padding and dropout in the file are ignored, because regard adds bos and eos itself.
    """

    kind = "imported"
    path: str

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        document = _parse(_read_text(self.path), self.path)
        document["model"].pop("regard", None)
        try:
            note = _add_control_tokens(document, self.path)
        except DataError:
            raise
        except Exception as error:  # the file may be malformed in any way
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
            raise DataError(f"{self.path}: is not a valid tokenizer.json of the tokenizers library ({why})") from None
        return _tokenizer(document, note, self.path)


TOKENIZERS: dict[str, type[Spec]] = {spec.kind: spec for spec in (BPE, Bytes, Characters, Imported, Words)}


def _add_control_tokens(document: Document, name: str) -> Note:
    """Add missing control tokens to an imported `tokenizer.json` in place, and return regard's settings for it."""
    model, added = document["model"], {token["content"]: token for token in document.setdefault("added_tokens", [])}
    document |= {"truncation": None, "padding": None}
    if "dropout" in model:
        model["dropout"] = None
    unigram = model.get("type") == "Unigram"
    vocab = {token: i for i, (token, _) in enumerate(model["vocab"])} if unigram else dict(model["vocab"])
    ids = vocab | {content: token["id"] for content, token in added.items()}
    unknown = model["unk_id"] if unigram else ids.get(model.get("unk_token"))
    control = {role: next((name for name in names if name in ids), None) for role, names in NAMES.items()}
    special = [content for content, token in added.items() if token["special"] and token["id"] != unknown]
    if special and not any(control.values()):
        names = ", ".join(map(repr, special[:5]))
        raise DataError(
            f"{name}: none of its special tokens ({names}) has a usual name; name its end-of-text token '</s>'"
        )
    roles = []
    for role, content in control.items():
        chosen = content or NAMES[role][0]
        roles.append(f"{role} {chosen}" + ("" if content else " (added)"))
        token_id = ids.setdefault(chosen, 1 + max(ids.values()))
        usual = {"content": chosen, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added[chosen] = {"id": token_id, **usual} | added.get(chosen, {}) | {"special": True}
        control[role] = chosen
    document["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    control_ids = {role: ids[str(chosen)] for role, chosen in control.items()}
    why = f"{1 + max(ids.values()):,} tokens of {Path(name).name}: {', '.join(roles)}"
    return Note(Imported.kind, why, **control_ids, unknown=None if unknown in control_ids.values() else unknown)


class _CountedTexts:
    """Iterable over texts that counts the words and characters yielded so far. It can be iterated only once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.words, self.characters = texts, 0, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.words += len(text.split())
            self.characters += len(text)
            yield text

    def check(self) -> None:
        if not self.characters:
            raise DataError("the corpus has no text to learn a vocabulary from")


def _check_size(size: int, requested: int) -> None:
    if size < requested:
        raise DataError(f"the corpus supports a vocabulary of at most {size}; set vocab to {size} or less")


def _truncate(model: Document, size: int) -> None:
    """Reduce a BPE model to its first `size` tokens.

    Ids are in the order of the merges, so the result equals a model trained to that size.
    """
    vocab: dict[str, int] = model["vocab"]
    later = (at for at, (left, right) in enumerate(model["merges"]) if vocab[left + right] >= size)
    model["merges"] = model["merges"][: next(later, None)]
    model["vocab"] = {token: i for token, i in vocab.items() if i < size}


def _byte_vocab() -> dict[str, int]:
    return {token: i for i, token in enumerate((*CONTROL, *SYMBOLS))}


def _byte_level(model: models.BPE, *splits: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    library.decoder = decoders.ByteLevel()
    return library


def _untrained(library: tokenizers.Tokenizer, note: Note) -> Tokenizer:
    """Return a tokenizer that needs no training, with the control tokens that a trainer would add."""
    library.add_special_tokens(list(CONTROL))
    return _tokenizer(json.loads(library.to_str()), note)


def _tokenizer(document: Document, note: Note, name: str = "the tokenizer") -> Tokenizer:
    document["model"]["regard"] = asdict(note)
    return Tokenizer.from_json(_serialize(document), name)


def _serialize(document: Document) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{os.fspath(path)}: cannot be read ({why})") from None


def _parse(text: str, name: str) -> Document:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: is not JSON ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise DataError(f"{name}: is not a tokenizer.json: it has no model")
    return document


def _visible(text: str) -> str:
    marked = text.replace(" ", SPACE)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in marked)


def _load_guarded(document: Document, unknown: int | None) -> tuple[tokenizers.Tokenizer, dict[int, str]]:
    """Return a tokenizer of the library that never encodes text as control tokens, and a dict {id: control token}.

    The option `encode_special_tokens` is not enough, because a Unigram model has "</s>" in its vocabulary and would
    match it in a text. Control tokens therefore get random names in memory. The file is unchanged.
    """
    special = [token for token in document["added_tokens"] if token["special"] and token["id"] != unknown]
    secret = secrets.token_hex(16)
    names = {token["content"]: f"{secret}-{token['id']}" for token in special}
    model = dict(document["model"])
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("type") == "Unigram":
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(token, token): i for token, i in model["vocab"].items()}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_merge_tokens(merge))]
    added = [token | {"content": names.get(token["content"], token["content"])} for token in document["added_tokens"]]
    guarded = document | {"model": model, "added_tokens": added}
    library = tokenizers.Tokenizer.from_str(json.dumps(guarded))
    library.encode_special_tokens = True
    for token in special:
        if library.id_to_token(token["id"]) != names[token["content"]]:
            raise ValueError(f"{token['content']!r} cannot have the id {token['id']}, because the ids have gaps")
    return library, {token["id"]: token["content"] for token in special}


def _merge_tokens(merge: Any) -> tuple[str, str, str]:
    """Return (left token, right token, merged token) of a BPE merge. A merge is a pair, or a string in older files."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _fork_without_threads() -> None:
    """Disable the library's parallelism in forked processes, in which the library would warn or hang."""
    variable, set_here = "TOKENIZERS_PARALLELISM", list[bool]()

    def before() -> None:
        set_here.append(variable not in os.environ)
        os.environ.setdefault(variable, "false")

    def after_in_parent() -> None:
        if set_here.pop():
            del os.environ[variable]

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after_in_parent)


_fork_without_threads()
