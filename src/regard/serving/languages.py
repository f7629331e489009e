"""Codes and English names of languages (ISO 639-1), and detection of the language of a text."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from regard.errors import DataError

_NAMES = (
    "af Afrikaans, am Amharic, an Aragonese, ar Arabic, as Assamese, az Azerbaijani, be Belarusian, "
    "bg Bulgarian, bn Bengali, br Breton, bs Bosnian, ca Catalan, cs Czech, cy Welsh, da Danish, de German, "
    "dz Dzongkha, el Greek, en English, eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, "
    "fi Finnish, "
    "fo Faroese, "  # codespell:ignore fo
    "fr French, fy Frisian, ga Irish, gd Scottish Gaelic, gl Galician, gu Gujarati, ha Hausa, he Hebrew, "
    "hi Hindi, hr Croatian, ht Haitian Creole, hu Hungarian, hy Armenian, id Indonesian, ig Igbo, "
    "is Icelandic, it Italian, ja Japanese, jv Javanese, ka Georgian, kk Kazakh, km Khmer, kn Kannada, "
    "ko Korean, ku Kurdish, ky Kyrgyz, la Latin, lb Luxembourgish, lo Lao, lt Lithuanian, lv Latvian, "
    "mg Malagasy, mi Maori, mk Macedonian, ml Malayalam, mn Mongolian, mr Marathi, ms Malay, mt Maltese, "
    "my Burmese, nb Norwegian Bokmål, ne Nepali, nl Dutch, nn Norwegian Nynorsk, no Norwegian, ny Chichewa, "
    "oc Occitan, om Oromo, or Odia, pa Punjabi, pl Polish, ps Pashto, pt Portuguese, qu Quechua, ro Romanian, "
    "ru Russian, rw Kinyarwanda, sa Sanskrit, sd Sindhi, se Northern Sami, si Sinhala, sk Slovak, "
    "sl Slovenian, sm Samoan, sn Shona, so Somali, sq Albanian, sr Serbian, st Southern Sotho, su Sundanese, "
    "sv Swedish, sw Swahili, ta Tamil, "
    "te Telugu, "  # codespell:ignore te
    "tg Tajik, th Thai, ti Tigrinya, tk Turkmen, tl Tagalog, tn Tswana, tr Turkish, ts Tsonga, tt Tatar, "
    "ug Uyghur, uk Ukrainian, ur Urdu, uz Uzbek, vi Vietnamese, vo Volapük, wa Walloon, wo Wolof, xh Xhosa, "
    "yi Yiddish, yo Yoruba, zh Chinese, zu Zulu"
)
NAMES: Mapping[str, str] = MappingProxyType(
    dict(re.match(r"(\S+) (.+)", entry.strip()).groups() for entry in _NAMES.split(", "))  # type: ignore[union-attr]
)


def code_in(file: str) -> str | None:
    """Return the language code at the end of the name of a file: `en` for `train.en`, `corpus.en.gz` or `train-en.txt`.

    Return None if the name does not end with the code of a language.
    """
    stem = re.sub(r"\.(gz|xz|bz2|zst|txt)$", "", re.sub(r"\.(gz|xz|bz2|zst)$", "", PurePath(file).name.lower()))
    code = re.split(r"[._-]", stem)[-1] if re.search(r"[._-]", stem) else ""
    return code if code in NAMES else None


@cache
def _identifier() -> Any:
    """Return the language identifier of py3langid, which is an optional dependency."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier  # noqa: PLC0415
    except ImportError:
        raise DataError("language detection is not installed here: pip install 'regard[serve]'") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def detect(text: str, codes: Sequence[str]) -> list[tuple[str, float]]:
    """Return the probability of every language in `codes` that the detector supports, the most likely one first.

    The probabilities sum to 1. A text without letters has no language: the result is then empty.
    """
    if not any(character.isalpha() for character in text):
        return []
    ranked = [(str(code), float(probability)) for code, probability in _identifier().rank(text) if code in codes]
    total = sum(probability for _, probability in ranked)
    return [(code, probability / total if total else 1 / len(ranked)) for code, probability in ranked]
