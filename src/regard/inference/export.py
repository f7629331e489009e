"""Export a trained model to another engine, and compare the export with the original model.

An export is a folder that contains these files:

    model.bin config.json *vocabulary.json    CTranslate2's own files
    tokenizer*.json                           for the tokenizers library, so that the folder is self-contained
    regard.json                               origin of the export, digests of all files, result of the comparison

The folder is written under a temporary name, checked, and then renamed. An existing export is therefore complete and
correct.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

import torch

from regard.batch import Batch, translation
from regard.catalogue import to_record
from regard.data.tokenizer import Tokenizer, tokenizer_files
from regard.decoding.beam import Beam
from regard.decoding.constraints import TokenConstraints
from regard.decoding.hypothesis import Hypothesis, Limits, SpecialTokens
from regard.decoding.search import find
from regard.errors import DataError, SpecError, nearest
from regard.files import file_digest, sync, write_text
from regard.inference.ctranslate2 import COMPUTED, NAME, CTranslate2, library
from regard.inference.ctranslate2_export import Vocabulary, written
from regard.inference.native import Native
from regard.models.base import LanguageModel, Model
from regard.nn.position.additive import Learned
from regard.training.checkpoint import SaveError, read_json
from regard.training.tensor_files import weights_digest

FORMAT = 1
RECORD = "regard.json"
TEXTS = 32  # the number of texts on which the engines are compared
BEAMS = 5
LIMITS = Limits()
# Maximum of `Check.largest`: ten to a hundred times the rounding error. An int8 export has no maximum.
TOLERANCE = {"float32": 1e-3, "float16": 0.1}
TIE = 1e-4  # two outputs whose scores differ by less than this count as equally good
ROOM = 2048  # minimum number of rows of a computed position table; more if longer texts are allowed
ENDLESS = 2**30
ATTEMPTS = 5  # to rename a folder while other processes may use the name


@dataclass(frozen=True)
class Trained:
    """A trained model and its tokenizers."""

    model: Model
    source: Tokenizer
    target: Tokenizer
    max_len: int  # the maximum number of tokens of a source
    step: int
    texts: Sequence[tuple[str, ...]] = ()  # texts for the comparison, each (source, target) or a single text

    @property
    def translates(self) -> bool:
        """True if the model reads a source and generates a target."""
        return self.model.spec.reads_source

    @property
    def ends(self) -> SpecialTokens:
        """The special tokens of the target."""
        return SpecialTokens(self.target.bos, self.target.eos, self.target.pad)

    @property
    def positions(self) -> int:
        """The number of rows of a computed position table, if the model needs one."""
        return max(ROOM, 2 * (self.max_len + 1) + 20)

    @property
    def room(self) -> int:
        """The maximum length of a source or an output of the exported model, in tokens."""
        spec: Any = self.model.spec
        if isinstance(spec.input.position, Learned):
            return spec.input.position.max_len
        # Position schemes inside attention need no table.
        return self.positions if spec.decoder.position is None else ENDLESS

    def vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """Return the source and target vocabularies, with one token string for each row of the embedding tables."""
        spec: Any = self.model.spec
        sizes = (spec.vocab, getattr(spec, "target_vocab", None) or spec.vocab)
        return tuple(
            Vocabulary(each.vocabulary(size), each.bos, each.eos, each.pad if each.unknown is None else each.unknown)
            for each, size in zip((self.source, self.target), sizes, strict=True)
        )  # type: ignore[reportReturnType]

    def identity(self, stored: str) -> dict[str, Any]:
        """Return the values that identify an export, such as a digest of the weights. A stale export has other ones."""
        record = json.dumps(to_record(self.model.spec), sort_keys=True)
        return {
            "format": FORMAT,
            "to": NAME,
            "quantize": stored,
            "weights_sha256": weights_digest(self.model.state_dict()),
            "model_sha256": hashlib.sha256(record.encode()).hexdigest(),
            "tokenizers_sha256": [self.source.sha256, self.target.sha256],
            "positions": self.positions,
        }


@dataclass(frozen=True)
class Check:
    """The result of comparing the native engine and the export on the same inputs."""

    inputs: str  # a description of the inputs
    texts: int
    agreed: int  # outputs of beam search with equal tokens
    ties: int  # outputs with different tokens but equal scores
    tokens: int  # the number of tokens whose log-probabilities were compared
    largest: float  # the largest difference of log-probabilities; it is relative for log-probabilities below -1

    def passed(self, stored: str) -> bool:
        """Return whether rounding the weights to the type `stored` can explain the differences."""
        same = self.agreed + self.ties == self.texts or stored != "float32"
        return same and self.largest <= TOLERANCE.get(stored, float("inf"))


@dataclass(frozen=True, slots=True)
class Anything(SpecialTokens):
    """Special tokens for the comparison of engines, in which every id may be generated.

    If an id were excluded, CTranslate2 would renormalise the probabilities. In normal use, allowing every id makes no
    difference, because trained models give bos and padding very low probabilities (see `CTranslate2`).
    """

    @property
    def never(self) -> tuple[int, ...]:
        """The ids that are never generated: none."""
        return ()


@dataclass(frozen=True)
class Exported:
    """A finished export: the folder, and the content of `regard.json`."""

    path: Path
    record: dict[str, Any]


def named(quantize: str | None) -> str:
    """Return the type in which the weights are stored: `quantize`, or float32 if `quantize` is None."""
    stored = quantize or "float32"
    if stored not in COMPUTED:
        raise SpecError("--quantize", f"{stored!r} is not known; {nearest(stored, COMPUTED)}")
    return stored


def export(
    trained: Trained, out: Path, quantize: str | None = None, own: bool = False, force: bool = False
) -> Exported:
    """Write a model for CTranslate2 into the folder `out`, and return the finished export.

    An existing folder is replaced only in two cases: if `own` is true, which means that regard manages the folder, or
    if `force` is true and the folder contains an export. If the exported model differs too much from the original, an
    error is raised and nothing is written.
    """
    stored = named(quantize)
    version = library().__version__
    if out.exists() and not own:
        if not force:
            raise DataError(f"{out} exists; choose another --out, or replace it with --force")
        if not (out / RECORD).exists():
            raise DataError(f"{out} holds no export ({RECORD}), so --force does not replace it; remove it yourself")
    source, target = trained.vocabularies()
    theirs = written(trained.model, source, target, trained.positions)
    theirs.optimize(quantization=stored)
    with _making(out) as making:
        theirs.save(str(making))
        for name, tokenizer in tokenizer_files({"source": trained.source, "target": trained.target}).items():
            write_text(making / name, tokenizer.plain_json())
        check = compare(trained, making, stored)
        if not check.passed(stored):
            raise DataError(
                f"the exported model differs from the original: {check.agreed + check.ties} of {check.texts} outputs "
                f"agree, and log-probabilities differ by up to {check.largest:.2g}; nothing was written"
            )
        files = {path.name: file_digest(path) for path in sorted(making.iterdir())}
        record = trained.identity(stored) | {
            "step": trained.step,
            "regard": metadata.version("regard"),
            "ctranslate2": version,
            "check": asdict(check),
            "files": files,
        }
        for name in files:
            sync(making / name)
        write_text(making / RECORD, json.dumps(record, indent=2) + "\n")
        _rename(making, out)
    return Exported(out, record)


@contextmanager
def _making(out: Path) -> Iterator[Path]:
    making = out.with_name(f".{out.name}-making-{os.getpid()}")
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        yield making
    except OSError as error:
        full = error.errno == errno.ENOSPC
        raise SaveError(f"cannot write {out}: {'the disk is full' if full else error.strerror}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _rename(making: Path, out: Path) -> None:
    """Rename the finished folder to `out`. A process that opened files of an old `out` can still read those files."""
    old = out.with_name(f".{out.name}-old-{os.getpid()}")
    for attempt in count(1):
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        try:
            making.rename(out)
            break
        except OSError:  # another process renamed its own folder to `out`
            if attempt == ATTEMPTS:
                raise
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def fresh(folder: Path, trained: Trained, stored: str) -> dict[str, Any] | None:
    """Return the content of `regard.json`, or None if the export in `folder` is missing, incomplete or stale."""
    try:
        record = read_json(folder / RECORD)
        whole = all(file_digest(folder / name) == digest for name, digest in record["files"].items())
    except (DataError, OSError, KeyError, TypeError, AttributeError):
        return None
    expected = trained.identity(stored)
    return record if whole and all(record.get(key) == value for key, value in expected.items()) else None


def engine(
    trained: Trained,
    folder: Path,
    quantize: str | None = None,
    threads: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> CTranslate2:
    """Return the CTranslate2 engine for a translation model.

    The model is exported first if the export in `folder` is missing, stale or damaged.
    """
    stored = named(quantize)
    library()
    if not trained.translates:
        raise DataError(f"the engine {NAME!r} runs only translators, not a model of kind {trained.model.spec.kind!r}")
    if fresh(folder, trained, stored) is None:
        why = "is stale or damaged; exporting again" if folder.exists() else "does not exist yet; exporting once"
        report(f"the export {folder} {why}")
        record = export(trained, folder, quantize, own=True).record
        report(sentence(Check(**record["check"])))
    return _opened(trained, folder, stored, threads)


def _opened(trained: Trained, folder: Path, stored: str, threads: int | None) -> CTranslate2:
    source, target = trained.vocabularies()
    return CTranslate2(folder, (source.words, target.words), trained.ends, trained.room, stored, threads)


def sentence(check: Check) -> str:
    """Return the result of a comparison as a sentence."""
    ties = f" ({check.ties} more are ties)" if check.ties else ""
    return (
        f"checked on {check.texts} texts ({check.inputs}): {check.agreed} of {check.texts} outputs the same{ties}; "
        f"over {check.tokens} tokens, log-probabilities differ by at most {check.largest:.2g}"
    )


def compare(trained: Trained, folder: Path, stored: str) -> Check:
    """Compare a model with the export in `folder` on the same inputs."""
    model = trained.model
    assert isinstance(model, LanguageModel)
    pairs, inputs = _pairs(trained)
    training = model.training
    model.eval()
    try:
        run = _run_translators if trained.translates else _run_language_models
        native, exported, expected, scored = run(trained, model, folder, stored, pairs)
    finally:
        model.train(training)
    agreed = ties = 0
    for (ours, *_), (theirs, *_) in zip(native, exported, strict=True):
        if (ours.ids, ours.ended) == (theirs.ids, theirs.ended):
            agreed += 1
        elif abs(ours.score - theirs.score) <= TIE:
            ties += 1
    differences = [
        abs(a - b) / max(1.0, abs(a))
        for row, other in zip(expected, scored, strict=True)
        for a, b in zip(row, other.log_probs, strict=True)
    ]
    return Check(inputs, len(native), agreed, ties, len(differences), max(differences))


# The outputs of the native engine and of the export, then the log-probabilities of the same tokens in both.
Results = tuple[list[list[Hypothesis]], list[list[Hypothesis]], list[list[float]], list[Any]]
Pairs = list[tuple[list[int], list[int]]]


def _run_translators(trained: Trained, model: LanguageModel, folder: Path, stored: str, pairs: Pairs) -> Results:
    ends, device = Anything(**asdict(trained.ends)), next(model.parameters()).device
    theirs = _opened(trained, folder, stored, 1)
    theirs.ends = ends
    search = Beam(BEAMS, stopping=NAME)
    sources, rows = [source for source, _ in pairs], list(range(len(pairs)))
    native = Native([model], ends, device).find(sources, search, len(pairs), LIMITS, TokenConstraints(), rows)
    exported = theirs.find(sources, search, len(pairs), LIMITS, TokenConstraints(), rows)
    batch = translation(pairs, ends.bos, ends.eos, source_end=()).to(device)
    assert batch.labels is not None
    with torch.no_grad():
        ours = model.log_probs(batch).gather(-1, batch.labels[..., None]).squeeze(-1).cpu()
    scored = theirs.translator.score_batch(
        [[theirs.source[token] for token in source] for source, _ in pairs],
        [[theirs.target[token] for token in target] for _, target in pairs],
        max_input_length=0,
    )
    expected = [ours[row, : len(target) + 1].tolist() for row, (_, target) in enumerate(pairs)]
    return native, exported, expected, scored


def _run_language_models(trained: Trained, model: LanguageModel, folder: Path, stored: str, pairs: Pairs) -> Results:
    """Return the `Results` for greedy continuations of the first half of each text, and for scoring all texts."""
    ends, device = Anything(**asdict(trained.ends)), next(model.parameters()).device
    rows = [[ends.bos, *target] for _, target in pairs if target]
    words = trained.vocabularies()[1].words
    theirs = library().Generator(str(folder), compute_type=COMPUTED[stored], inter_threads=1, intra_threads=1)
    prompts = [row[: max(len(row) // 2, 1)] for row in rows]
    search, steps = Beam(1, stopping=NAME), min(20, trained.room - max(map(len, prompts)))
    native: list[list[Hypothesis]] = []
    expected = []
    with torch.no_grad():
        for row, prompt in zip(rows, prompts, strict=True):
            batch = Batch(torch.tensor([prompt], device=device))
            native += find(model, batch, search, ends, Limits(max_len=steps))
            ids = torch.tensor([row], device=device)
            expected.append(model.log_probs(Batch(ids))[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1).tolist())
    places = {word: number for number, word in enumerate(words)}
    results = theirs.generate_batch(
        [[words[token] for token in prompt] for prompt in prompts],
        max_batch_size=1,  # in a batch of prompts of unequal lengths, the library counts some prompt tokens as new
        max_length=steps,
        min_length=0,
        include_prompt_in_result=False,
        return_scores=True,
        return_end_token=True,
        sampling_topk=1,
    )
    exported = []
    for result in results:
        ids = [places[word] for word in result.sequences[0]]
        ended = bool(ids) and ids[-1] == ends.eos
        exported.append([Hypothesis(tuple(ids[: len(ids) - ended]), result.scores[0], result.scores[0], (), ended)])
    scored = theirs.score_batch([[words[token] for token in row] for row in rows], max_input_length=0)
    return native, exported, expected, scored


def _pairs(trained: Trained) -> tuple[Pairs, str]:
    """Return pairs of source ids and target ids, and their description. Without validation text, the ids are random."""
    pairs = []
    longest = min(trained.max_len, trained.room - 2)
    for record in trained.texts:
        source = [*trained.source.encode(record[0])[:longest], trained.source.eos]
        target = trained.target.encode(record[-1])[:longest]
        if len(source) > 1 and target:
            pairs.append((source, target))
        if len(pairs) == TEXTS:
            break
    if pairs:
        return pairs, "validation text"
    rng = torch.Generator().manual_seed(0)

    def draw(size: int, eos: int) -> list[int]:
        length = int(torch.randint(1, min(longest, 40) + 1, (), generator=rng))
        ids = torch.randint(0, size, (length,), generator=rng).tolist()
        return [token if token > eos else size - 1 for token in ids]

    sides = (trained.source, trained.target)
    drawn = [[draw(each.size, each.eos) for each in sides] for _ in range(TEXTS)]
    return [([*source, trained.source.eos], target) for source, target in drawn], "random ids"
