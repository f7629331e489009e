"""Writing systems without spaces between words, as character ranges for regular expressions; the words of a text.

Korean and Vietnamese are not listed, because they are written with spaces.
"""

import re
import unicodedata
from functools import cache

HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
KANA = r"\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d"
OTHERS = r"\u0e01-\u0e5b\u0e81-\u0edf\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Burmese, Khmer


def words(text: str) -> list[str]:
    """Return the words of a text in lower case. In a script without spaces, every character is a word.

    A word consists of letters, digits and underscores, and of the marks that combine with them, such as the vowel signs
    of Devanagari. The text is first normalised to NFC, so that a letter with an accent is the same word whether it is
    written with one character or with two.
    """
    return _pattern().findall(unicodedata.normalize("NFC", text.lower()))


@cache
def _pattern() -> re.Pattern[str]:
    unspaced = f"{HAN}{KANA}{OTHERS}"
    marks = "".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c).startswith("M"))
    return re.compile(f"(?=\\w)[{unspaced}][{marks}]*|[^\\W{unspaced}]+(?:[{marks}]+[^\\W{unspaced}]*)*")
