"""Tokenizer: text to ids and back, learned from the corpus or imported, and stored as one JSON file.

The file is a `tokenizer.json` of the tokenizers library, with a note of ours at `model.regard` that the library passes
over; `Tokenizer.plain_json` leaves the note out.
"""

import hashlib
import json
import os
import secrets
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from regard.data.token_store import Column
from regard.data.words import WordMemory
from regard.errors import DataError, SpecError
from regard.tree import Spec

Document = dict[str, Any]

CONTROL = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2
UNKNOWN = "<unk>"  # id 3, where there is one
BYTE_PIECES = len(CONTROL) + 256
CEILING = 32_000  # pieces, unless more are asked for
# A rare piece is hardly learned, which costs most where the text is small (Sennrich & Zhang 2019). Exact match on
# held-out lines for 5,000 unspaced Chinese sentences: 40 % with pieces that occur twice, 99 % with these.
FREQUENT = 5
MOST_PIECES = 1 << 24  # an id beyond is a mistake: a model has a vector for every id below it
TOGETHER = 4096  # texts that are encoded at once: what the library keeps of each is many times its size
SPACE = "\u2581"  # how a space is shown
VERSION: str = tokenizers.__version__  # of the library: another may learn other pieces from the same text
BY_WORD = ("bpe", "bytes", "characters")  # kinds that join nothing across a space or a line feed

# Words with the space before them. Marks belong to letters (GPT-2 cuts Hindi words at them). A number is read digit by
# digit, for any number is made of ten well-known pieces. A line feed stands alone, so that a line ends where it ends.
WORD = r"\n| ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]+"
CHARACTER = r"[\s\S]"

# GPT-2's alphabet: every byte as a character that can be seen; the 68 that cannot are moved up, in order.
_SEEN = (*range(33, 127), *range(161, 173), *range(174, 256))
_MOVED = [byte for byte in range(256) if byte not in _SEEN]
SYMBOLS = [chr(byte) if byte in _SEEN else chr(256 + _MOVED.index(byte)) for byte in range(256)]
BYTES = {symbol: byte for byte, symbol in enumerate(SYMBOLS)}

# A text that only a lossless tokenizer gives back: spaces, marks, look-alikes, controls, a sample of all Unicode.
HARD = "  a  b\t\r\n\u2028 e\u0301\u00e9 \ufb01 \uff21 don 't </s> <unk> [ x ] \u2581" + "".join(
    chr(code) for code in (*range(256), *range(256, 0x40000, 97)) if not 0xD800 <= code < 0xE000
)


@dataclass(frozen=True, slots=True)
class Note:
    """What the library's file does not say."""

    kind: str
    why: str  # these pieces and not others
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
            raise TypeError("its note has values of a wrong type")


class Tokenizer:
    """Text <-> ids. Nothing in a text is ever read as a control token: "</s>" is four characters.

    `pad`, `bos` and `eos` are never made by `encode`, and `decode` drops them; an unknown word shows as itself.
    """

    def __init__(self, text: str, document: Document, note: Note) -> None:
        self._text = text
        self.kind, self.why = note.kind, note.why
        self.pad, self.bos, self.eos, self.unknown = note.pad, note.bos, note.eos, note.unknown
        self._library, self._control = _guarded(document, note.unknown)
        self.size = 1 + max(self._library.get_vocab().values())
        if self.size > MOST_PIECES:
            raise ValueError(f"a piece has the id {self.size - 1}, beyond {MOST_PIECES:,}")
        if not {self.pad, self.bos, self.eos} <= set(self._control) or not 0 <= (self.unknown or 0) < self.size:
            raise ValueError("its control tokens are not where its note says")
        self._model: str | None = document["model"].get("type")
        self._inside: str = document["model"].get("continuing_subword_prefix") or ""
        self._of_bytes = '"ByteLevel"' in json.dumps(document.get("decoder"))

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.why})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_json, (self._text,)

    @classmethod
    def from_json(cls, text: str, name: str = "the tokenizer") -> "Tokenizer":
        """The tokenizer that `to_json` wrote; `name` is what an error calls it."""
        document = _document(text, name)
        note = document["model"].pop("regard", None)
        if note is None:
            raise DataError(f"{name}: was not written by regard; take it in with the tokenizer kind 'imported'")
        try:
            return cls(text, document, Note(**note))
        except Exception as error:  # the library raises nothing more special
            why = " ".join(str(error).split())
            raise DataError(f"{name}: cannot be used as a tokenizer ({why})") from None

    def to_json(self) -> str:
        """The whole tokenizer, as it is stored."""
        return self._text

    def plain_json(self) -> str:
        """The `tokenizer.json` of the tokenizers library, without regard's note."""
        document = json.loads(self._text)
        del document["model"]["regard"]
        return _written(document)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """The tokenizer in a file."""
        return cls.from_json(_content(path), os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer into a file."""
        try:
            Path(path).write_bytes(self._text.encode("utf-8"))
        except OSError as error:
            raise DataError(f"{os.fspath(path)}: cannot be written ({error.strerror})") from None

    @cached_property
    def sha256(self) -> str:
        """The checksum of the stored file."""
        return hashlib.sha256(self._text.encode("utf-8")).hexdigest()

    @cached_property
    def lossless(self) -> bool:
        """Whether text comes back as it was: proved for the kinds learned here, tried on `HARD` for an imported one."""
        return self.decode(self.encode(HARD)) == HARD

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without bos and eos."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), TOGETHER):
            some = texts[start : start + TOGETHER]
            try:
                encoded = self._library.encode_batch_fast(some, add_special_tokens=False)
            except Exception as error:  # the library raises nothing more special
                for number, text in enumerate(some, start):
                    _check_whole(text, f"text {number}")
                raise DataError(f"texts {start} to {start + len(some) - 1} cannot be encoded ({error})") from None
            ids.extend(encoding.ids for encoding in encoded)
        return ids

    def encode_column(self, texts: list[str]) -> Column:
        """What `encode_batch` gives, as a column: the way for a corpus, for it encodes no word twice."""
        return self._words.column(texts) if self.kind in BY_WORD else Column.of(self.encode_batch(texts))

    @cached_property
    def _words(self) -> WordMemory:
        return WordMemory(self.encode_batch)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that make no character show as U+FFFD."""
        return self._library.decode(self._said(ids), skip_special_tokens=False)

    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of many rows of ids."""
        return self._library.decode_batch([self._said(ids) for ids in rows], skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The pieces as they can be shown: a space is U+2581, and what cannot be seen is written as Python does."""
        self._check(ids)
        return [self._control.get(one) or _visible(self._surface(one)) for one in ids]

    def vocabulary(self, size: int | None = None) -> list[str]:
        """The piece of every id as the file has it, `size` of them; an id without a piece has a name of its own."""
        names = (self._control.get(one) or self._library.id_to_token(one) for one in range(self.size))
        known = [name or f"<none-{one}>" for one, name in enumerate(names)]
        return known + [f"<none-{one}>" for one in range(self.size, size or self.size)]

    def starts_word(self, one: int) -> bool:
        """Whether a piece begins a word of its own, rather than go on with the one before it."""
        self._check((one,))
        if one in self._control or self._model == "WordLevel":
            return True
        surface = self._surface(one)
        return not surface.startswith(self._inside) if self._inside else surface[:1].isspace()

    def _surface(self, one: int) -> str:
        piece = self._library.id_to_token(one) or ""
        if not self._of_bytes:
            return piece.replace(SPACE, " ")
        if not all(symbol in BYTES for symbol in piece):  # an imported file may have words of its own beside the bytes
            return piece
        return bytes(BYTES[symbol] for symbol in piece).decode("utf-8", "backslashreplace")

    def _said(self, ids: Sequence[int]) -> list[int]:
        self._check(ids)
        return [one for one in ids if one not in self._control]

    def _check(self, ids: Sequence[int]) -> None:
        if len(ids) and not 0 <= min(ids) <= max(ids) < self.size:
            wrong = next(one for one in ids if not 0 <= one < self.size)
            raise DataError(f"id {wrong} is not one of the tokenizer's, 0 .. {self.size - 1}")


class TokenizerSpec(Spec):
    """Slot: how text becomes ids."""

    __slots__ = ()
    sampled: ClassVar[bool] = False  # whether a sample of a large text is enough

    @abstractmethod
    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:
        """The tokenizer for such texts, which are read once. The same texts give the same file.

        Texts that are a sample are that `share` of what they stand for.
        """


class TooFewPiecesError(DataError):
    """A sample has fewer pieces than are wanted; all of the text may have enough."""


def train(spec: TokenizerSpec, texts: Iterable[str], share: float = 1.0) -> Tokenizer:
    """The tokenizer that `spec` describes, learned from `texts`, all of the text or that `share` of it."""
    if isinstance(texts, str):
        raise DataError("texts: needs many texts, not one; put it into a list")
    try:
        return spec.learn(texts, share)
    except UnicodeEncodeError:
        raise DataError("the corpus has half a character (a lone surrogate); repair the text") from None


@dataclass(frozen=True, slots=True)
class BPE(TokenizerSpec):
    """Sennrich et al. 2016 on bytes (Radford et al. 2019): the most frequent pair of pieces becomes a piece, and so on.

    Lossless, and nothing is unknown: every byte is a piece. Where the size of the vocabulary is chosen, pairs that
    occur fewer than `FREQUENT` times are not joined; where it is given, pairs that occur once.
    """

    kind = "bpe"
    sampled = True
    vocab: int | None = None  # None: `choose_vocab`, or what the corpus has
    # How many share the pieces, where their number is chosen; None: one in a language model, two elsewhere.
    languages: int | None = None

    def check(self) -> None:
        if self.languages is not None and self.languages < 1:
            raise SpecError("languages", f"must be at least 1, not {self.languages}")
        if self.vocab is not None and self.vocab < BYTE_PIECES:
            needed = f"{len(CONTROL)} control tokens and the 256 bytes"
            raise SpecError("vocab", f"must be at least {BYTE_PIECES}, not {self.vocab}: {needed} are always there")

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:
        library = _byte_level(models.BPE(), pre_tokenizers.Split(Regex(WORD), "isolated"))
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab or CEILING,
            min_frequency=2 if self.vocab else max(2, round(FREQUENT * share)),
            show_progress=False,
            special_tokens=list(CONTROL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        counted = _Counted(texts)
        library.train_from_iterator(iter(counted), trainer)
        counted.check()
        document = json.loads(library.to_str())
        reached = len(document["model"]["vocab"])
        words = round(counted.words / share)
        wanted = self.vocab or choose_vocab(words, self.languages or 2)
        if share < 1.0 and reached < wanted:
            raise TooFewPiecesError(f"a sample of the text has {reached} pieces; {wanted} are wanted")
        sample = f", learned from {counted.characters / 1e6:.1f} million characters" if share < 1.0 else ""
        if self.vocab is not None:
            _check_reached(reached, self.vocab)
            return _tokenizer(document, Note(self.kind, f"{reached:,} pieces, as asked{sample}"))
        about = f"about {float(f'{words:.3g}'):,.0f}" if share < 1.0 else f"{words:,}"
        why = f"{min(wanted, reached):,} subwords (chosen from the corpus size, {about} words"
        if reached < wanted:
            why += f"; all that occur at least {FREQUENT} times"
        why += ")" + sample
        _cut(document["model"], wanted)
        return _tokenizer(document, Note(self.kind, why))


@dataclass(frozen=True, slots=True)
class Bytes(TokenizerSpec):
    """Every byte of UTF-8 is a piece, with the id 3 + byte. Lossless; nothing is learned."""

    kind = "bytes"

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        library = _byte_level(models.BPE(vocab=_byte_vocab(), merges=[]))
        return _tokenizer(_fixed(library), Note(self.kind, f"{BYTE_PIECES} pieces, the bytes"))


@dataclass(frozen=True, slots=True)
class Characters(TokenizerSpec):
    """Every character of the corpus is a piece, and every byte, of which other characters are made. Lossless."""

    kind = "characters"

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text)
        if not counts:
            raise DataError("the corpus has no text to learn pieces from")
        vocab = _byte_vocab()
        for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            vocab.setdefault("".join(SYMBOLS[byte] for byte in character.encode("utf-8")), len(vocab))
        # A character that is in the vocabulary is taken whole; there are no merges, so any other stays bytes.
        model = models.BPE(vocab=vocab, merges=[], ignore_merges=True)
        library = _byte_level(model, pre_tokenizers.Split(Regex(CHARACTER), "isolated"))
        why = f"{len(vocab):,} pieces, the bytes and the characters of the corpus"
        return _tokenizer(_fixed(library), Note(self.kind, why))


@dataclass(frozen=True, slots=True)
class Words(TokenizerSpec):
    """What stands between white space is a piece if the corpus has it twice, else unknown; so is a line feed.

    Not lossless: unknown words are lost, and spaces become one between words and none beside a line feed.
    """

    kind = "words"
    vocab: int | None = None  # None: all words seen twice, at most 32,000

    def check(self) -> None:
        if self.vocab is not None and self.vocab <= len(CONTROL) + 2:
            raise SpecError("vocab", f"must be above {len(CONTROL) + 2}, not {self.vocab}, to have room for a word")

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        library = tokenizers.Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        # Every word is written with a space before it. So no word is ever "</s>", and joining them restores the text.
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
            vocab_size=self.vocab or CEILING, min_frequency=2, show_progress=False, special_tokens=always
        )
        counted = _Counted(texts)
        library.train_from_iterator(iter(counted), trainer)
        counted.check()
        document = json.loads(library.to_str())
        document["added_tokens"] = document["added_tokens"][: len(CONTROL)]
        reached = len(document["model"]["vocab"])
        if reached == len(always):
            raise DataError("the corpus has no word twice; give more text, or use the tokenizer kind 'bpe'")
        if self.vocab is not None:
            _check_reached(reached, self.vocab)
        why = f"{reached:,} pieces" + (" for words seen twice" if self.vocab is None else ", as asked")
        return _tokenizer(document, Note(self.kind, why, unknown=3))


# The usual names, the better one first; a missing one is added under the first.
NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "bos": ("<s>", "<bos>", "[BOS]", "[CLS]", "<cls>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[EOS]", "[SEP]", "<sep>", "<|end_of_text|>", "<|endoftext|>"),
}


@dataclass(frozen=True, slots=True)
class Imported(TokenizerSpec):
    """A `tokenizer.json` of the tokenizers library, with its own ids; missing control tokens are added at the end.

    Its post-processor, truncation, padding and dropout are not used: regard places bos and eos, and cuts nothing.
    """

    kind = "imported"
    path: str

    def learn(self, texts: Iterable[str], share: float = 1.0) -> Tokenizer:  # noqa: ARG002
        document = _document(_content(self.path), self.path)
        document["model"].pop("regard", None)
        try:
            note = _imported(document, self.path)
        except DataError:
            raise
        except Exception as error:  # whatever may be wrong with a file
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
            raise DataError(f"{self.path}: is not a tokenizer.json as the library writes it ({why})") from None
        return _tokenizer(document, note, self.path)


TOKENIZERS: dict[str, type[Spec]] = {spec.kind: spec for spec in (BPE, Bytes, Characters, Imported, Words)}


def _imported(document: Document, name: str) -> Note:
    """Settle the control tokens of an imported file, in place, and say which they are."""
    model, added = document["model"], {token["content"]: token for token in document.setdefault("added_tokens", [])}
    document |= {"truncation": None, "padding": None}
    if "dropout" in model:
        model["dropout"] = None
    ids = _vocab(model) | {content: token["id"] for content, token in added.items()}
    unknown = model["unk_id"] if model.get("type") == "Unigram" else ids.get(model.get("unk_token"))
    found = {role: next((name for name in names if name in ids), None) for role, names in NAMES.items()}
    special = [content for content, token in added.items() if token["special"] and token["id"] != unknown]
    if special and not any(found.values()):
        shown = ", ".join(map(repr, special[:5]))
        raise DataError(f"{name}: none of its special tokens ({shown}) has a usual name; call its end of text '</s>'")
    said = []
    for role, content in found.items():
        chosen = content or NAMES[role][0]
        said.append(f"{role} {chosen}" + ("" if content else " (added)"))
        one = ids.setdefault(chosen, 1 + max(ids.values()))
        usual = {"content": chosen, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added[chosen] = {"id": one, **usual} | added.get(chosen, {}) | {"special": True}
        found[role] = chosen
    document["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    control = {role: ids[str(chosen)] for role, chosen in found.items()}
    why = f"{1 + max(ids.values()):,} pieces of {Path(name).name}: {', '.join(said)}"
    return Note(Imported.kind, why, **control, unknown=None if unknown in control.values() else unknown)


def choose_vocab(words: int, languages: int = 2) -> int:
    """Pieces for a corpus of so many words: the smaller of 10.5 words^(1/2) and 175 words^(1/4) for each language.

    For two languages that is 1,000 for ten thousand words, 10,000 for a million and 32,000 (the most) for seventy
    million. Where text is short, more pieces are seen too rarely: with 15,000 sentence pairs 8,000 pieces had half of
    the BLEU of 4,000, and on WikiText-2 13,000 pieces had 7 % more perplexity a word than 6,000.
    """
    wanted = min(10.5 * words**0.5, 175 * languages * words**0.25)
    step = 100 if wanted < 10_000 else 1_000
    return min(max(round(wanted / step) * step, 300), CEILING)


class _Counted:
    """Texts that are counted while they are read: they can be read only once."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.words, self.characters = texts, 0, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.words += len(text.split())
            self.characters += len(text)
            yield text

    def check(self) -> None:
        if not self.characters:
            raise DataError("the corpus has no text to learn pieces from")


def _check_reached(reached: int, wanted: int) -> None:
    if reached < wanted:
        raise DataError(f"the corpus supports at most {reached} pieces; ask for {reached} or fewer")


def _cut(model: Document, size: int) -> None:
    """What training up to `size` pieces would have left: pieces are learned one by one, in the order of their ids."""
    vocab: dict[str, int] = model["vocab"]
    later = (at for at, (left, right) in enumerate(model["merges"]) if vocab[left + right] >= size)
    model["merges"] = model["merges"][: next(later, None)]
    model["vocab"] = {piece: one for piece, one in vocab.items() if one < size}


def _byte_vocab() -> dict[str, int]:
    return {piece: one for one, piece in enumerate((*CONTROL, *SYMBOLS))}


def _byte_level(model: models.BPE, *splits: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    library.decoder = decoders.ByteLevel()
    return library


def _fixed(library: tokenizers.Tokenizer) -> Document:
    """The document of a tokenizer that is not trained: a trainer adds control tokens itself, once it has read the text.

    Before, they would be cut out of the text and learned as words.
    """
    library.add_special_tokens(list(CONTROL))
    return json.loads(library.to_str())


def _tokenizer(document: Document, note: Note, name: str = "the tokenizer") -> Tokenizer:
    document["model"]["regard"] = asdict(note)
    return Tokenizer.from_json(_written(document), name)


def _written(document: Document) -> str:
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _content(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"{os.fspath(path)}: cannot be read ({why})") from None


def _document(text: str, name: str) -> Document:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: is not JSON ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise DataError(f"{name}: is not a tokenizer.json: it has no model")
    return document


def _vocab(model: Document) -> dict[str, int]:
    if model.get("type") == "Unigram":
        return {piece: one for one, (piece, _) in enumerate(model["vocab"])}
    return dict(model["vocab"])


def _check_whole(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{name} has half a character (a lone surrogate); repair it") from None


def _visible(text: str) -> str:
    marked = text.replace(" ", SPACE)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in marked)


def _guarded(document: Document, unknown: int | None) -> tuple[tokenizers.Tokenizer, dict[int, str]]:
    """The library's tokenizer, blind to control tokens in text, and these tokens by id.

    `encode_special_tokens` is not enough: a model may have "</s>" among its own pieces, as Unigram models do, and would
    find it in text. So here, not in the file, control tokens have names that no text has.
    """
    special = [token for token in document["added_tokens"] if token["special"] and token["id"] != unknown]
    secret = secrets.token_hex(16)
    names = {token["content"]: f"{secret}-{token['id']}" for token in special}
    model = dict(document["model"])
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if model.get("type") == "Unigram":
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): one for piece, one in model["vocab"].items()}
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_involved(merge))]
    added = [token | {"content": names.get(token["content"], token["content"])} for token in document["added_tokens"]]
    guarded = document | {"model": model, "added_tokens": added}
    library = tokenizers.Tokenizer.from_str(json.dumps(guarded))
    library.encode_special_tokens = True
    for token in special:
        if library.id_to_token(token["id"]) != names[token["content"]]:
            raise ValueError(f"{token['content']!r} cannot have the id {token['id']}, for the ids have gaps")
    return library, {token["id"]: token["content"] for token in special}


def _involved(merge: Any) -> tuple[str, str, str]:
    """The two pieces of a merge, which older files write as one string, and what they make."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _fork_without_threads() -> None:
    """Keep forked processes off the library's threads, which they lack: it would warn, or wait for them for ever."""
    variable = "TOKENIZERS_PARALLELISM"
    ours: list[bool] = []

    def before() -> None:
        ours.append(variable not in os.environ)
        os.environ.setdefault(variable, "false")

    def after_in_parent() -> None:
        if ours.pop():
            del os.environ[variable]

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after_in_parent)


_fork_without_threads()
