"""Tokenizers: ids, round trips, storage, and refused settings and files."""

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from regard.data import tokenizer as module
from regard.data.tokenizer import (
    BPE,
    MIN_COUNT,
    Bytes,
    Characters,
    Imported,
    Tokenizer,
    TokenizerSpec,
    TooFewSubwordsError,
    Words,
    tokenizer_files,
    train,
)
from regard.data.vocabulary_size import choose_vocab
from regard.errors import DataError, SpecError

CORPUS = [
    "The cat sat on the mat, and the other cat sat on the hat.",
    "Die Katze sa\u00df auf der Matte; die andere Katze trug 1987 einen Hut.",
    "\u732b\u304c\u30de\u30c3\u30c8\u306e\u4e0a\u306b\u5ea7\u3063\u305f\u3002",
    "No one wrote </s> or <s> before 1987; </s> or <s> is text.",
] * 4
HARD = [
    "",
    " ",
    "  leading, double  and trailing  ",
    "\ttab\t\tand CASE",
    "</s> <s> <pad> <unk>",
    "</s>",
    "<s></s><pad><unk></s>",
    "\u00e9 and e\u0301",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u05e9\u05dc\u05d5\u05dd \u200f\u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "a\rb\r\nc\n\nd\u2028e\x85f\x0bg\x0ch",
    "\x00\x01\x1f\x7f\ufeff\ufffd\uffff\U0010ffff",
    "don't 3.14159 1,000,000",
    "\u2581\u0120\u010a",
]
LEARNED: dict[str, TokenizerSpec] = {
    "bpe": BPE(),
    "bpe 270": BPE(270),
    "bytes": Bytes(),
    "characters": Characters(),
    "words": Words(),
}
LOSSLESS = [name for name in LEARNED if name != "words"]
TOKENIZERS = {name: train(spec, CORPUS) for name, spec in LEARNED.items()}


@pytest.mark.parametrize("name", LEARNED)
def test_control_tokens_have_fixed_ids(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos) == (0, 1, 2)
    assert tokenizer.unknown == (3 if name == "words" else None)
    assert tokenizer.tokens([0, 1, 2]) == ["<pad>", "<s>", "</s>"]
    assert tokenizer.kind == LEARNED[name].kind
    assert tokenizer.lossless == (name in LOSSLESS)


@pytest.mark.parametrize("name", LEARNED)
def test_vocabulary_has_a_unique_name_for_every_id(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    words = tokenizer.vocabulary(tokenizer.size + 2)
    assert words[:3] == ["<pad>", "<s>", "</s>"]
    assert words[: tokenizer.size] == tokenizer.vocabulary()
    assert len(set(words)) == tokenizer.size + 2
    reference = library.Tokenizer.from_str(tokenizer.plain_json())
    assert all(reference.token_to_id(word) == token_id for token_id, word in enumerate(tokenizer.vocabulary()))


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("text", HARD)
def test_decoding_restores_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    assert (ids == []) == (text == "")
    assert min(ids, default=3) >= 3, "text is never a control token"
    assert max(ids, default=0) < tokenizer.size
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos, tokenizer.pad]) == text


@pytest.mark.parametrize("name", LEARNED)
def test_encode_batch_equals_encoding_each_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[name]
    single = [tokenizer.encode(text) for text in HARD]
    for together in (1, 3, 4096):
        monkeypatch.setattr(module, "ENCODE_BATCH", together)
        assert tokenizer.encode_batch(HARD) == single
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode_batch(single) == [tokenizer.decode(ids) for ids in single]
    assert tokenizer.decode_batch([]) == []


@pytest.mark.parametrize("name", LEARNED)
def test_saved_tokenizer_loads_unchanged(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == tokenizer.sha256
    copies = [Tokenizer.load(path), Tokenizer.from_json(tokenizer.to_json()), pickle.loads(pickle.dumps(tokenizer))]
    for copy in copies:
        assert copy.sha256 == tokenizer.sha256
        assert vars(copy).keys() >= {"kind", "why", "size", "pad", "bos", "eos", "unknown"}
        for field in ("kind", "why", "size", "pad", "bos", "eos", "unknown"):
            assert getattr(copy, field) == getattr(tokenizer, field)
        assert copy.encode_batch(HARD) == tokenizer.encode_batch(HARD), "and specials are still text"


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("plain", [False, True])
def test_tokenizers_library_loads_the_file(name: str, plain: bool) -> None:
    """The tokenizers library alone gives the same ids and texts, so an export does not need regard."""
    tokenizer = TOKENIZERS[name]
    text = tokenizer.plain_json() if plain else tokenizer.to_json()
    reference = library.Tokenizer.from_str(text)
    assert ("regard" in text) != plain
    assert reference.get_vocab_size() == tokenizer.size
    assert [reference.token_to_id(piece) for piece in ("<pad>", "<s>", "</s>")] == [0, 1, 2]
    assert reference.token_to_id("<unk>") == tokenizer.unknown
    assert [token.special for token in reference.get_added_tokens_decoder().values()] == [True] * 3
    reference.encode_special_tokens = True
    for sentence in HARD:
        ids = reference.encode(sentence).ids
        assert ids == tokenizer.encode(sentence)
        assert reference.decode([1, *ids, 2]) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", LEARNED)
def test_learning_is_deterministic(name: str) -> None:
    assert train(LEARNED[name], iter(CORPUS)).sha256 == TOKENIZERS[name].sha256


def test_learning_is_deterministic_across_processes_and_threads() -> None:
    """Neither a progress bar nor a warning about forks is printed, and a forked process encodes equally."""
    code = (
        "import os, sys\n"
        "from regard.data.tokenizer import *\n"
        "texts = [f'{i % 90:b}{i * 7919 % 1000:x} cats and {i % 13} dogs' for i in range(3000)]\n"
        "texts = [text.translate(dict(enumerate('klmnopqrst', ord('0')))) for text in texts]\n"
        "made = [train(spec, texts) for spec in (BPE(), BPE(300), Words(), Characters())]\n"
        "ids = made[0].encode_batch(texts)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    quiet = os.environ.get('TOKENIZERS_PARALLELISM') == 'false'\n"
        "    os._exit(0 if quiet and made[0].encode_batch(texts) == ids else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0 and 'TOKENIZERS_PARALLELISM' not in os.environ\n"
        "print(*(tokenizer.sha256 for tokenizer in made))\n"
    )
    outputs = set()
    for threads in ("1", "4"):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        environment.pop("TOKENIZERS_PARALLELISM", None)
        options: dict[str, Any] = {"env": environment, "capture_output": True, "text": True}
        process = subprocess.run([sys.executable, "-c", code], **options, check=False, timeout=60)
        assert (process.returncode, process.stderr) == (0, "")
        outputs.add(process.stdout)
    assert len(outputs) == 1


def test_parallelism_setting_of_the_user_is_kept() -> None:
    code = "import os, regard.data.tokenizer\nif os.fork(): print(os.wait()[1], os.environ['TOKENIZERS_PARALLELISM'])\n"
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["0", "true"]


def test_learning_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for spec in LEARNED.values():
        train(spec, CORPUS)
    assert capfd.readouterr() == ("", "")


def test_bpe_merges_frequent_pairs() -> None:
    """By hand: `aaab aaab` merges (a a) first, then (a b), which has lower ids than the equally frequent (aa a)."""
    tokenizer = train(BPE(261), ["aaab", "aaab"])
    assert tokenizer.size == 261
    assert tokenizer.tokens([259, 260]) == ["aa", "ab"]
    assert tokenizer.tokens(tokenizer.encode("aaab")) == ["aa", "ab"]


def test_bpe_splits_words_marks_digits_and_line_feeds() -> None:
    texts = ["1987 don't\n\n  \u0928\u092e\u0938\u094d\u0924\u0947 (ok)..."] * 50
    tokenizer = train(BPE(), texts)
    expected = ["1", "9", "8", "7", "\u2581don", "'", "t", "\\n", "\\n", "\u2581"]
    expected += ["\u2581\u0928\u092e\u0938\u094d\u0924\u0947", "\u2581(", "ok", ")..."]
    assert tokenizer.tokens(tokenizer.encode(texts[0])) == expected


@pytest.mark.parametrize("name", LOSSLESS)
def test_control_tokens_in_the_corpus_are_not_learned_as_words(name: str) -> None:
    tokenizer = train(LEARNED[name], ["no </s> or <s>, and <pad> twice"] * 9)
    model = json.loads(tokenizer.plain_json())["model"]
    assert not {"".join(merge) for merge in model["merges"]} & {"<pad>", "<s>", "</s>", "s>", "/s>", "<s", "<p"}
    assert tokenizer.tokens(tokenizer.encode("</s>"))[-2:] == ["s", ">"]


@pytest.mark.parametrize("name", LEARNED)
def test_line_feed_is_one_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    (feed,) = tokenizer.encode("\n")
    assert feed > 3
    assert tokenizer.encode("cat\n\ncat") == [*tokenizer.encode("cat"), feed, feed, *tokenizer.encode("cat")]


def test_requested_vocabulary_size_is_reached_or_refused() -> None:
    assert TOKENIZERS["bpe 270"].size == 270
    with pytest.raises(
        DataError, match=r"^the corpus supports a vocabulary of at most (\d+); set vocab to \1 or less$"
    ) as refused:
        train(BPE(20_000), CORPUS)
    most = int(str(refused.value).split()[8].rstrip(";"))
    assert train(BPE(most), CORPUS).size == most > TOKENIZERS["bpe"].size
    with pytest.raises(DataError, match=f"^the corpus supports a vocabulary of at most {most}"):
        train(BPE(most + 1), CORPUS)
    most = TOKENIZERS["words"].size
    assert train(Words(most), CORPUS).size == most
    assert train(Words(10), CORPUS).size == 10
    with pytest.raises(
        DataError, match=f"^the corpus supports a vocabulary of at most {most}; set vocab to {most} or less$"
    ):
        train(Words(most + 1), CORPUS)
    assert train(BPE(259), CORPUS).size == 259


def test_rare_pairs_are_not_merged() -> None:
    assert train(BPE(260), ["xyzzy", "zz"]).size == 260  # a size that is given is reached
    assert train(BPE(), ["zz"] * (MIN_COUNT - 1)).size == 259
    assert train(BPE(), ["zz"] * MIN_COUNT).size == 260


def test_chosen_vocabulary_equals_training_to_that_size(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{chr(97 + i % 26)}{chr(97 + i * 7 % 26)}{chr(97 + i * 11 % 25)} abc{i % 17}ab" for i in range(2000)] * 10
    for size in (300, 333, 400):
        monkeypatch.setattr(module, "choose_vocab", lambda words, _, size=size: size if words == 40_000 else 0)
        chosen, requested = train(BPE(), texts), train(BPE(size), texts)
        assert chosen.size == size
        assert json.loads(chosen.plain_json()) == json.loads(requested.plain_json())
        assert "40,000 words" in chosen.why
        assert "as requested" in requested.why


def test_vocabulary_learned_from_a_sample_fits_the_whole_corpus() -> None:
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(12_000)]
    texts = [" ".join(rng.choices(words, k=100)) for _ in range(400)]
    whole, sample = train(BPE(), texts), train(BPE(), texts, 0.25)
    assert whole.size == choose_vocab(40_000)
    assert sample.size == choose_vocab(160_000) > whole.size
    assert sample.why.startswith(
        f"{sample.size:,} subwords (chosen from the corpus size, about 160,000 words), learned from 0.2"
    )
    with pytest.raises(TooFewSubwordsError, match="a sample of the corpus has"):
        train(BPE(20_000), texts, 0.25)
    with pytest.raises(DataError, match="the corpus supports a vocabulary of at most"):
        train(BPE(20_000), texts)


def test_vocabulary_size_for_the_number_of_words() -> None:
    sizes = {0: 300, 1: 300, 10_000: 1_000, 200_000: 4_700, 1_000_000: 10_000, 50_000_000: 29_000, 10**9: 32_000}
    assert {words: choose_vocab(words) for words in sizes} == sizes
    assert [choose_vocab(words, languages=1) for words in (10_000, 200_000, 2_000_000)] == [1_000, 3_700, 6_600]
    assert f"all that occur at least {MIN_COUNT} times" in TOKENIZERS["bpe"].why
    assert f"{sum(len(text.split()) for text in CORPUS)} words" in TOKENIZERS["bpe"].why


def test_byte_ids_are_byte_values_plus_three() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.size == 259
    assert tokenizer.encode("A\u00e9\n") == [3 + byte for byte in "A\u00e9\n".encode()]
    assert tokenizer.tokens(tokenizer.encode("A \u00e9\n")) == ["A", "\u2581", "\\xc3", "\\xa9", "\\n"]
    assert tokenizer.decode([3 + 0xC3]) == "\ufffd"


def test_characters_of_the_corpus_are_tokens() -> None:
    tokenizer = train(Characters(), ["ros\u00e9 \u4f60\u4f60 e\u0301"])
    assert tokenizer.size == 259 + 3
    assert tokenizer.tokens(tokenizer.encode("\u00e9\u4f60\u0301")) == ["\u00e9", "\u4f60", "\u0301"]
    assert tokenizer.encode("\u4f60") == [259], "the most frequent comes first"
    assert len(tokenizer.encode("\u597d")) == 3
    assert tokenizer.tokens(tokenizer.encode("<s>\n")) == ["<", "s", ">", "\\n"]


def test_words_that_occur_twice_are_tokens() -> None:
    tokenizer = train(Words(), ["the cat </s> <unk>x ros\u00e9 once", "the  cat </s> <unk>x ros\u00e9", "the"])
    assert tokenizer.size == 5 + 5
    text = " the\tcat  </s> dog <pad>\n\n ros\u00e9\r\n<unk>x once <unk> "
    ids = tokenizer.encode(text)
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode(ids) == "the cat </s> <unk> <unk>\n\nros\u00e9\n<unk>x <unk> <unk>"
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.tokens(ids[:3]) == ["\u2581the", "\u2581cat", "\u2581</s>"]
    assert tokenizer.encode("the")[0] == 5, "the most frequent comes first"
    assert tokenizer.encode("  ") == []
    with pytest.raises(DataError, match="no word occurs twice"):
        train(Words(), ["every word here once"])


def test_starts_word_groups_tokens_into_words() -> None:
    expected = {"bpe": "The cat", "characters": "The cat", "bytes": "The cat", "words": "cat Katze"}
    for name, text in expected.items():
        tokenizer = TOKENIZERS[name]
        words: list[list[int]] = []
        for token_id in tokenizer.encode(text):
            if tokenizer.starts_word(token_id) or not words:
                words.append([])
            words[-1].append(token_id)
        assert [tokenizer.decode(word).strip() for word in words] == text.split()
        assert all(tokenizer.starts_word(token_id) for token_id in (0, 1, 2))


def test_invisible_characters_are_escaped_in_tokens() -> None:
    tokenizer = TOKENIZERS["characters"]
    tokens = tokenizer.tokens(tokenizer.encode("\t\x00 \u732b\u00a0"))
    assert tokens == ["\\t", "\\x00", "\u2581", "\u732b", "\\xc2", "\\xa0"]


@pytest.mark.parametrize("wrong", [-1, 259, 10**12])
def test_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    tokenizer = TOKENIZERS["bytes"]
    for call in (tokenizer.decode, tokenizer.pieces, lambda ids: tokenizer.decode_batch([[5], ids])):
        with pytest.raises(DataError, match=f"id {wrong} is not in the vocabulary, 0 .. 258"):
            call([5, wrong])
    with pytest.raises(DataError, match="is not in the vocabulary"):
        tokenizer.starts_word(wrong)


def test_lone_surrogates_are_refused() -> None:
    for name, tokenizer in TOKENIZERS.items():
        with pytest.raises(DataError, match="text 1 has half a character"):
            tokenizer.encode_batch(["fine", "\ud83d"])
        if name != "bytes":
            with pytest.raises(DataError, match="half a character"):
                train(LEARNED[name], ["fine", "\ud83d"])


@pytest.mark.parametrize("name", ["bpe", "characters", "words"])
def test_empty_corpus_is_refused(name: str) -> None:
    for texts in ([], [""], iter(["", ""])):
        with pytest.raises(DataError, match="no text"):
            train(LEARNED[name], texts)
    with pytest.raises(DataError, match="put it into a list"):
        train(LEARNED[name], "one text")


@pytest.mark.parametrize("name", ["bpe", "characters", "words"])
def test_error_while_reading_the_corpus_is_raised(name: str) -> None:
    def texts() -> Iterator[str]:
        yield "fine"
        raise DataError("file.txt: line 2 is not text")

    with pytest.raises(DataError, match=r"^file.txt: line 2 is not text$"):
        train(LEARNED[name], texts())


@pytest.mark.parametrize(("make", "vocab"), [(BPE, 258), (BPE, 0), (BPE, -5), (Words, 5), (Words, 0)])
def test_too_small_vocabulary_is_refused(make: Any, vocab: int) -> None:
    with pytest.raises(SpecError, match="vocab: must be"):
        make(vocab)


def damaged(**changes: Any) -> str:
    """A stored tokenizer in which some values are changed."""
    document = json.loads(TOKENIZERS["bpe 270"].to_json())
    for key, value in changes.items():
        target = document if key in document else document["model"] if key in document["model"] else None
        if target is None:
            document["model"]["regard"][key] = value
        else:
            target[key] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[" * 100_000,
        "[]",
        "{}",
        '{"model": 3}',
        '{"model": {}}',
        '{"model": {"regard": {}}}',
        TOKENIZERS["bpe"].plain_json(),
        TOKENIZERS["bpe"].to_json()[:1000],
        damaged(regard="x"),
        damaged(kind=3),
        damaged(format=2),
        damaged(pad=5),
        damaged(eos=True),
        damaged(unknown=270),
        damaged(other=1),
        damaged(vocab={}),
        damaged(merges=[["x", "y"]]),
        damaged(added_tokens=[]),
        damaged(decoder={"type": "Nonsense"}),
    ],
    ids=range(21),
)
def test_invalid_files_are_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        Tokenizer.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_unreadable_and_unwritable_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            Tokenizer.load(path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.load(tmp_path / "binary.json")
    with pytest.raises(DataError, match="cannot be written"):
        TOKENIZERS["bytes"].save(tmp_path / "no folder" / "tokenizer.json")


def gpt2() -> library.Tokenizer:
    """A tokenizer like that of GPT-2: bytes, one special token at the end, no padding."""
    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.get_vocab_size() - 1)]
    )
    return tokenizer


def sentencepiece() -> library.Tokenizer:
    """A tokenizer like that of T5: Unigram with control tokens in its vocabulary; it adds eos and padding."""
    tokenizer = library.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    control = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=control, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.enable_padding(pad_id=0, pad_token="<pad>", length=50)
    tokenizer.enable_truncation(5)
    return tokenizer


def wordpiece() -> library.Tokenizer:
    """A tokenizer like that of BERT."""
    tokenizer = library.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=control, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def imported(source: library.Tokenizer | str, folder: Path) -> Tokenizer:
    path = folder / "imported.json"
    path.write_text(source if isinstance(source, str) else source.to_str(), encoding="utf-8")
    return train(Imported(str(path)), [])


def test_import_of_a_tokenizer_like_gpt2(tmp_path: Path) -> None:
    reference = gpt2()
    tokenizer = imported(reference, tmp_path)
    last = reference.get_vocab_size() - 1
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.unknown) == (last, last, last + 1, None)
    assert tokenizer.size == last + 2
    assert "pad <pad> (added)" in tokenizer.why
    assert tokenizer.lossless
    for text in [*HARD, "<|endoftext|>", "a<|endoftext|>b<pad>"]:
        ids = tokenizer.encode(text)
        assert not {last, last + 1} & set(ids)
        assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos, tokenizer.pad]) == text
    for text in CORPUS:
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.tokens([last, last + 1, *tokenizer.encode(" the")]) == ["<|endoftext|>", "<pad>", "\u2581the"]
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.encode_batch(HARD) == tokenizer.encode_batch(HARD)
    assert library.Tokenizer.from_str(tokenizer.plain_json()).token_to_id("<pad>") == last + 1


def test_import_of_a_tokenizer_like_sentencepiece(tmp_path: Path) -> None:
    reference = sentencepiece()
    tokenizer = imported(reference, tmp_path)
    added = reference.get_vocab_size()
    assert (tokenizer.pad, tokenizer.bos, tokenizer.eos, tokenizer.unknown) == (0, added, 1, 2)
    assert "bos <s> (added)" in tokenizer.why
    assert not tokenizer.lossless
    reference.no_padding()
    reference.no_truncation()
    for text in CORPUS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos, tokenizer.pad]) == text
        if "</s>" not in text:
            assert ids == reference.encode(text, add_special_tokens=False).ids
    assert 1 in reference.encode("or </s> is", add_special_tokens=False).ids, "the library alone reads text as control"
    assert tokenizer.decode(tokenizer.encode("or </s> is <s>")) == "or </s> is <s>"
    assert not {0, 1, added} & set(tokenizer.encode("</s> <s> or</s>or <pad>"))
    assert tokenizer.decode(tokenizer.encode("cat \u0416")) == "cat <unk>"
    assert tokenizer.tokens(tokenizer.encode("the mat"))[0].startswith("\u2581")
    starts = [tokenizer.starts_word(token_id) for token_id in tokenizer.encode("the mat")]
    assert starts.count(True) == 2
    copy = Tokenizer.from_json(tokenizer.to_json())
    assert copy.sha256 == tokenizer.sha256
    assert copy.encode_batch(CORPUS) == tokenizer.encode_batch(CORPUS)


def test_import_of_a_tokenizer_like_bert(tmp_path: Path) -> None:
    reference = wordpiece()
    tokenizer = imported(reference, tmp_path)
    assert (tokenizer.pad, tokenizer.unknown, tokenizer.bos, tokenizer.eos) == (0, 1, 2, 3)
    assert tokenizer.size == reference.get_vocab_size()
    ids = tokenizer.encode("The matte cat")
    assert ids == reference.encode("The matte cat", add_special_tokens=False).ids
    assert tokenizer.decode([2, *ids, 3]) == "the matte cat"
    assert sum(tokenizer.starts_word(token_id) for token_id in ids) == 3
    assert not {0, 2, 3, 4} & set(tokenizer.encode("[CLS] the [MASK] [SEP]"))
    assert not tokenizer.lossless
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[": 4, "]": 5, "unk": 6}
    bracketed = library.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    bracketed.normalizer, bracketed.pre_tokenizer = reference.normalizer, reference.pre_tokenizer
    bracketed.add_special_tokens(["[UNK]"])
    assert imported(bracketed, tmp_path).encode("[UNK] x") == [4, 6, 5, 1]


def test_control_tokens_in_text_are_encoded_as_text(tmp_path: Path) -> None:
    """Models with control tokens as words, as unsplit tokens, or as the result of a merge."""
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}
    words = library.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pieces = {symbol: token_id for token_id, symbol in enumerate(["</s>", "<", "/", "s", ">", "</", "s>", "a"])}
    merges = [("<", "/"), ("s", ">"), ("</", "s>")]
    merged = library.Tokenizer(models.BPE(pieces, merges))
    whole = library.Tokenizer(models.BPE(pieces, merges, ignore_merges=True))
    for source in (words, merged, whole):
        tokenizer = imported(source, tmp_path)
        assert tokenizer.eos == source.token_to_id("</s>")
        assert tokenizer.eos not in tokenizer.encode("</s>")
        assert tokenizer.encode("a") == [source.token_to_id("a")]
    assert imported(merged, tmp_path).tokens(imported(merged, tmp_path).encode("</s>a")) == ["</", "s>", "a"]
    old = json.loads(merged.to_str())
    old["model"]["merges"] = [" ".join(pair) for pair in merges]
    assert imported(json.dumps(old), tmp_path).encode("</s>") == [5, 6]


def test_unknown_token_that_is_also_a_control_token_is_not_unknown(tmp_path: Path) -> None:
    source = library.Tokenizer(models.BPE({"<|endoftext|>": 0, "a": 1}, [], unk_token="<|endoftext|>"))
    source.add_special_tokens(["<|endoftext|>"])
    tokenizer = imported(source, tmp_path)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.unknown) == (0, 0, None)
    assert tokenizer.encode("aa") == [1, 1]


def test_dropout_of_an_imported_tokenizer_is_disabled(tmp_path: Path) -> None:
    document = json.loads(gpt2().to_str())
    document["model"]["dropout"] = 0.9
    tokenizer = imported(json.dumps(document), tmp_path)
    assert len({tuple(tokenizer.encode(CORPUS[0])) for _ in range(20)}) == 1


def test_import_of_a_file_written_by_regard(tmp_path: Path) -> None:
    tokenizer = imported(TOKENIZERS["bpe"].to_json(), tmp_path)
    assert tokenizer.encode_batch(HARD) == TOKENIZERS["bpe"].encode_batch(HARD)
    assert (tokenizer.kind, tokenizer.pad, tokenizer.bos, tokenizer.eos) == ("imported", 0, 1, 2)
    assert imported(TOKENIZERS["words"].plain_json(), tmp_path).unknown == 3


def test_unusable_imports_are_refused(tmp_path: Path) -> None:
    strange = gpt2()
    strange.add_special_tokens(["<fin>"])
    document = json.loads(strange.to_str())
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] == "<fin>"]
    gaps = library.Tokenizer(models.BPE({"a": 0, "b": 7}, []))
    for content, message in [
        (json.dumps(document), r"none of its special tokens \('<fin>'\)"),
        (gaps, "have gaps"),
        ("{}", "has no model"),
        ('{"model": {"type": "BPE"}}', "imported.json"),
        ('{"model": {"type": "BPE", "vocab": "x"}}', "imported.json"),
        ('{"model": {"type": "Unigram", "vocab": [[]]}}', "imported.json"),
        ('{"model": {"type": "Other", "vocab": {"a": 0}}}', "imported.json"),
        ("x", "is not JSON"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            imported(content, tmp_path)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="cannot be read"):
        train(Imported(str(tmp_path / "nothing.json")), [])
    unigram = imported(library.Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], None)), tmp_path)
    with pytest.raises(DataError, match="texts 0 to 1 cannot be encoded"):
        unigram.encode_batch(["ab", "c"])


def test_one_tokenizer_for_both_sides_is_one_file() -> None:
    joint, separate = (BPE(260).learn([text * 40]) for text in ("ab cd ", "ef gh "))
    assert tokenizer_files({"source": joint, "target": joint}) == {"tokenizer.json": joint}
    assert [*tokenizer_files({"source": joint, "target": separate})] == [
        "tokenizer.source.json",
        "tokenizer.target.json",
    ]
