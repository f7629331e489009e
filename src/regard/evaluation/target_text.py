"""Choose the validation metric and sacreBLEU's tokenizer from the target text."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from regard.data.scripts import HAN, KANA, OTHERS
from regard.evaluation.text_metrics import Bleu

SAMPLE = 1000  # lines in the sample
ORDER = 4  # the length of the longest n-grams that BLEU counts, and the least number of tokens in a typical line

# The units into which sacreBLEU's tokenizers split a text; tokenizers not listed have units of their own.
UNITS = {"13a": "word", "intl": "word", "none": "word", "zh": "character", "char": "character"}


@dataclass(frozen=True)
class Choice:
    """A metric that ranks checkpoints, the tokenizer for BLEU, and the reason for the choice."""

    criterion: Literal["bleu", "chrf"]
    tokenize: str
    reason: str


def choose(targets: Sequence[str], tokenize: str = "auto") -> Choice:
    """Choose the metric and the tokenizer: BLEU if most targets have at least four tokens, else chrF.

    With `tokenize="auto"`, the tokenizer depends on the script of the targets.
    """
    automatic = tokenize == "auto"
    tokenize = bleu_tokenizer(targets) if automatic else tokenize
    split = Bleu(tokenize).scorer.tokenizer
    sample = _sample(targets)
    typical = statistics.median(len(split(line).split()) for line in sample) if sample else ORDER
    if typical < ORDER:
        unit = UNITS.get(tokenize, "token") + ("" if typical == 1 else "s")
        return Choice("chrf", tokenize, f"chrF: a typical target has {typical:g} {unit}, and BLEU needs {ORDER}")
    reason = ": the target script has no spaces between words" if automatic and tokenize != "13a" else ""
    return Choice("bleu", tokenize, f"BLEU, tokenizer {tokenize}{reason}")


def bleu_tokenizer(targets: Sequence[str]) -> str:
    """Return the sacreBLEU tokenizer: `zh` for Chinese, `char` for other scripts without spaces, otherwise `13a`."""
    text = "".join(_sample(targets))
    letters = sum(character.isalpha() for character in text)
    han, kana, others = (len(re.findall(f"[{script}]", text)) for script in (HAN, KANA, OTHERS))
    if han + kana + others <= letters / 2:
        return "13a"
    # Japanese has kana in every sentence; its own tokenizer (ja-mecab) needs a package and a dictionary.
    return "zh" if han > 10 * (kana + others) else "char"


def _sample(lines: Sequence[str]) -> Sequence[str]:
    return lines[:: max(1, len(lines) // SAMPLE)][:SAMPLE]
