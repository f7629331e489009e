"""The printed summary of a model: a tree of its modules with parameter counts."""

import re

import pytest

import regard
from regard.presets import PRESETS

LINE = re.compile(r"( *)(.*\S) +([\d,]+)")


def counted(text: str) -> tuple[int, list[tuple[int, int, int]]]:
    """Return (total, [(depth, factor, parameter count) of every line])."""
    rows = []
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        assert match is not None
        factor = re.search(r"(\d+) x$", match[2])
        rows.append((len(match[1]) // 2, int(factor[1]) if factor else 1, int(match[3].replace(",", ""))))
    return rows[0][2], rows


@pytest.mark.parametrize("name", PRESETS)
def test_summary_fits_on_a_screen_and_its_counts_add_up(name: str) -> None:
    spec = regard.preset(name)
    text = repr(regard.build(spec, device="meta"))
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 80
    whole, rows = counted(text)
    assert whole == regard.count(spec)
    for i, (depth, _, size) in enumerate(rows):
        below = []
        for deeper, factor, part in rows[i + 1 :]:
            if deeper <= depth:
                break
            if deeper == depth + 1:
                below.append(factor * part)
        assert not below or sum(below) == size


def test_equal_blocks_share_one_line() -> None:
    text = repr(regard.build(regard.preset("transformer_base", vocab=8000)))
    assert len(text.splitlines()) <= 40
    assert re.match(r"EncoderDecoderModel +48,234,496\n", text)
    assert len(re.findall(r"0-5\.branches: 6 x +[\d,]+\n", text)) == 2
    assert "qkv: Projection 1536 x 512" in text
