"""Writing systems without spaces between words, as character ranges for regular expressions.

Korean and Vietnamese are not listed, because they are written with spaces.
"""

HAN = r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
KANA = r"\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9d"
OTHERS = r"\u0e01-\u0e5b\u0e81-\u0edf\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Tibetan, Burmese, Khmer
