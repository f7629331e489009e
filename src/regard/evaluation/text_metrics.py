"""Metrics of text: sacreBLEU's BLEU, chrF and TER, exact match, and ROUGE."""

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float

from regard.data.scripts import words
from regard.errors import DataError, SpecError, nearest
from regard.evaluation.metric import Metric, References, Score, reference_streams


class SacreBLEU(Metric):
    """A metric that sacreBLEU computes, with sacreBLEU's statistics and signature."""

    @abstractmethod
    def make_scorer(self) -> Any:
        """Return the sacreBLEU metric object with the settings of this metric."""

    @cached_property
    def scorer(self) -> Any:
        """The sacreBLEU metric object, created on first use because the import of sacreBLEU takes 0.2 s."""
        return self.make_scorer()

    def statistics(self, outputs: Sequence[str], references: References = ()) -> Float[np.ndarray, "N K"]:
        streams = reference_streams(outputs, references)
        return np.array(self.scorer._extract_corpus_statistics(list(outputs), streams), dtype=np.float64)

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        return self.scorer._compute_score_from_stats(total.tolist()).score

    def score(self, outputs: Sequence[str], references: References = ()) -> Score:
        streams = reference_streams(outputs, references)
        score = self.scorer.corpus_score(list(outputs), streams)
        return Score(score.score, self.signature(len(streams)), score.name)

    def signature(self, references: int, **bootstrap: int) -> str:
        self.scorer.num_refs = references
        signature = self.scorer.get_signature()
        for name, setting in bootstrap.items():
            signature.update(name, setting)
        return signature.format()


@dataclass(frozen=True)
class Bleu(SacreBLEU):
    """BLEU (Papineni et al., 2002) in percent."""

    name = "bleu"
    title = "BLEU"
    tokenize: str = "13a"
    lowercase: bool = False

    def with_tokenizer(self, tokenize: str) -> "Bleu":
        return replace(self, tokenize=tokenize)

    def make_scorer(self) -> Any:
        from sacrebleu.metrics.bleu import BLEU  # noqa: PLC0415  # see scorer

        if self.tokenize not in BLEU.TOKENIZERS:
            hint = nearest(self.tokenize, BLEU.TOKENIZERS)
            raise SpecError("tokenize", f"unknown tokenizer {self.tokenize!r}; {hint}")
        try:
            # force=True suppresses the warning about lines that end in a tokenized period.
            return BLEU(tokenize=self.tokenize, lowercase=self.lowercase, force=True)
        except (ImportError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise SpecError("tokenize", f"sacreBLEU cannot use {self.tokenize!r} here: {reason}") from None


@dataclass(frozen=True)
class Chrf(SacreBLEU):
    """chrF, the character n-gram F-score (Popovic, 2015), in percent."""

    name = "chrf"
    title = "chrF"
    word_order: int = 0
    lowercase: bool = False

    @property
    def full_title(self) -> str:
        return f"chrF2{'+' * self.word_order}"

    def make_scorer(self) -> Any:
        from sacrebleu.metrics.chrf import CHRF  # noqa: PLC0415  # see scorer

        if self.word_order < 0:
            raise SpecError("word_order", f"must be 0 (chrF) or more (2 is chrF++), not {self.word_order}")
        return CHRF(word_order=self.word_order, lowercase=self.lowercase)


@dataclass(frozen=True)
class ChrfPlusPlus(Chrf):
    """chrF++ (Popovic, 2017): chrF with unigrams and bigrams of words."""

    name = "chrf++"
    title = "chrF++"
    word_order: int = 2


@dataclass(frozen=True)
class Ter(SacreBLEU):
    """Translation edit rate (Snover et al., 2006) in percent of the reference's words."""

    name = "ter"
    title = "TER"
    higher_is_better = False
    case_sensitive: bool = False

    def make_scorer(self) -> Any:
        from sacrebleu.metrics.ter import TER  # noqa: PLC0415  # see scorer

        return TER(case_sensitive=self.case_sensitive)


class ExactMatch(Metric):
    """Percentage of lines that equal one of their references, apart from white space at the ends."""

    name = "exact_match"
    title = "exact match"
    heading = "exact"
    proportion = True
    unit = " %"

    def segment(self, output: str, references: Sequence[str]) -> Sequence[float | int]:
        return output.strip() in {reference.strip() for reference in references}, 1

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        return 100 * total[0] / total[1]


@dataclass(frozen=True)
class Rouge(Metric):
    """ROUGE (Lin, 2004) in percent: the F-score of each line with its best reference, averaged over the lines.

    The tokenizer `english` is that of the package rouge-score, used for published numbers: words consist of a to z and
    0 to 9, and every other character separates words. The tokenizer `unicode` accepts the letters of every script; in
    scripts without spaces, every character is a word.
    """

    kind: ClassVar[str]  # the name in rouge-score
    companions = ("rouge1", "rouge2", "rougeL")
    package = "rouge_score"
    tokenize: Literal["english", "unicode"] = "unicode"
    stem: bool = False

    @cached_property
    def scorer(self) -> Any:
        """rouge-score's scorer with these settings."""
        if self.tokenize not in ("english", "unicode"):
            hint = nearest(self.tokenize, ("english", "unicode"))
            raise SpecError("tokenize", f"unknown tokenizer {self.tokenize!r}; {hint}")
        if self.stem and self.tokenize != "english":
            raise SpecError("stem", "the stemmer is for English; use tokenize='english'")
        try:
            from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415  # an extra, and 2 s
        except ImportError:
            raise SpecError("", "ROUGE needs the package rouge-score: pip install 'regard[metrics]'") from None
        words = _UnicodeWords() if self.tokenize == "unicode" else None
        return RougeScorer([self.kind], use_stemmer=self.stem, tokenizer=words)

    def statistics(self, outputs: Sequence[str], references: References = ()) -> Float[np.ndarray, "N K"]:
        streams = reference_streams(outputs, references)
        assert self.scorer
        if self.tokenize == "english":
            _check_english(streams)
        return super().statistics(outputs, streams)

    def segment(self, output: str, references: Sequence[str]) -> Sequence[float | int]:
        return self.scorer.score_multi(references, output)[self.kind].fmeasure, 1

    def value(self, total: Float[np.ndarray, " K"]) -> float:
        return 100 * total[0] / total[1]

    def signature(self, references: int, **bootstrap: int) -> str:
        resampling = "".join(f"|{name}:{setting}" for name, setting in bootstrap.items())
        version = metadata.version("rouge-score")
        stem = "yes" if self.stem else "no"
        return f"nrefs:{references}{resampling}|tok:{self.tokenize}|stem:{stem}|rouge-score:{version}"


class Rouge1(Rouge):
    """ROUGE-1: the overlap of words."""

    name = kind = "rouge1"
    title = "ROUGE-1"


class Rouge2(Rouge):
    """ROUGE-2: the overlap of word bigrams."""

    name = kind = "rouge2"
    title = "ROUGE-2"


class RougeL(Rouge):
    """ROUGE-L: the longest common subsequence of words."""

    name = kind = "rougeL"
    title = "ROUGE-L"


class _UnicodeWords:
    """A tokenizer for rouge-score that splits a text in any script into lower-case words."""

    def tokenize(self, text: str) -> list[str]:
        return words(text)


def _check_english(streams: list[list[str]]) -> None:
    """Raise DataError for a reference without English words, because every hypothesis would score 0."""
    for stream in streams:
        for number, line in enumerate(stream, start=1):
            if re.search(r"\w", line) and not re.search(r"[a-z0-9]", line.lower()):
                raise DataError(
                    f"references: line {number} has no letter from a to z, and ROUGE's English tokenizer reads "
                    "no others; use tokenize='unicode'"
                )
