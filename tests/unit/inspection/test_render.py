"""Heat maps of attention: cells and labels are aligned, widths are respected, and files are written atomically."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len

from regard.errors import DataError, SpecError
from regard.inspection.picture import heat_map as png
from regard.inspection.render import readable, terminal

STRANGE = [
    "我们",
    "喜欢",
    "cafe\u0301",
    "\u0301",
    "\u200d",
    "😀",
    "\x1b[31m",
    "\u2581the",
    "a\tb\n",
    "$\\nothing_$",
    "",
    "한국어",
]


def weights(rows: int, columns: int) -> torch.Tensor:
    return torch.softmax(3 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)), -1)


def test_a_small_matrix_has_its_labels_above_the_columns() -> None:
    heat_map = terminal(torch.tensor([[0.0, 0.25, 0.8], [0.4, 0.6, 0.2]]), ["Die", "Katze"], ["the", "cat", "sat"])
    assert heat_map.split("\n") == [
        "       the  cat  sat",
        "  Die       ░░░  ███",
        "Katze  ▒▒▒  ▓▓▓  ░░░",
        "",
        "blank 0   ░ 0.2   ▒ 0.4   ▓ 0.6   █ 0.8",
    ]


def test_wide_letters_keep_the_columns_in_line() -> None:
    lines = terminal(torch.eye(3), ["我", "cafe\u0301", "b"], ["日本", "n\u0303", "end"]).split("\n")
    assert lines[0] == "      日本  n\u0303   end"
    # 日本 is four cells wide, so the next column begins after four cells.
    assert lines[1] == "  我  ███"
    assert lines[2] == "cafe\u0301        ██"
    assert lines[3] == "   b            ███"


def test_columns_whose_labels_do_not_fit_are_numbered_with_a_legend() -> None:
    columns = [f"word{i}" for i in range(1, 13)]
    lines = terminal(torch.eye(12)[[0, 11]], ["x", "y"], columns, width=40).split("\n")
    assert lines[0] == "   1  2  3  4  5  6  7  8  9 10 11 12"
    assert lines[1] == "x ██"
    assert lines[2] == "y" + " " * 34 + "██"
    assert lines[4:7] == [
        "1 word1   2 word2   3 word3   4 word4",
        "5 word5   6 word6   7 word7   8 word8",
        "9 word9   10 word10   11 word11",
    ]


def test_columns_that_do_not_fit_a_line_are_divided_into_panels() -> None:
    lines = terminal(torch.eye(20)[[0, 19]], ["x", "y"], ["longer"] * 20, width=32).split("\n")
    assert lines[0] == "   1  2  3  4  5  6  7  8  9 10"
    assert lines[1:4] == ["x ██", "y", ""]
    assert lines[4] == "  11 12 13 14 15 16 17 18 19 20"
    assert lines[5:7] == ["x", "y" + " " * 28 + "██"]


@pytest.mark.parametrize("width", [24, 31, 60, 100, 300])
@pytest.mark.parametrize("columns", [1, 12, 150])
def test_lines_fit_the_width(width: int, columns: int) -> None:
    rows = [*STRANGE, "very " * 30, "很" * 50]
    labels = [*(STRANGE * 13)[: columns - 1], "长" * 60]
    heat_map = terminal(weights(len(rows), columns), rows, labels, width)
    assert max(map(cell_len, heat_map.split("\n"))) <= width
    assert all(line == line.rstrip() for line in heat_map.split("\n"))
    assert all(character.isprintable() for line in heat_map.split("\n") for character in line)


def test_a_width_that_is_too_small_is_refused() -> None:
    with pytest.raises(SpecError, match="width: must be at least 24 cells, not 10"):
        terminal(weights(1, 1), ["a"], ["b"], width=10)


def test_labels_escape_unprintable_characters() -> None:
    assert readable("a\nb\x1b\u200d\xa0") == "a\\nb\\x1b\\u200d\\xa0"
    assert readable("\u0301x") == "\u25cc\u0301x"
    assert readable("é日") == "é日"
    assert readable("é日", known=str.isascii) == "\\xe9\\u65e5"
    assert readable("") == ""


@pytest.mark.parametrize(
    "matrix",
    [
        torch.tensor([[0.0, 1.0]], requires_grad=True),
        torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16),
        torch.tensor([[0.0, 1.0]], dtype=torch.float32),
        np.array([[0.0, 1.0]]),
        np.array([[0.0, 1.0]], dtype=np.float32),
    ],
)
def test_tensors_and_arrays_of_any_precision(matrix: Any) -> None:
    assert terminal(matrix, ["a"], ["x", "y"]).split("\n")[1] == "a      ██"


def test_negative_and_zero_weights_have_a_scale() -> None:
    lines = terminal(torch.tensor([[-0.4, 0.0, 0.4]]), ["a"], ["x", "y", "z"]).split("\n")
    assert lines[1] == "a      ▒▒  ██"
    assert lines[-1] == "blank -0.4   ░ -0.2   ▒ 0   ▓ 0.2   █ 0.4"
    assert terminal(torch.zeros(1, 1), ["a"], ["x"]).split("\n")[1] == "a"


def to_png(path: Path) -> Callable[..., None]:
    return lambda matrix, rows, columns: png(matrix, rows, columns, path)


@pytest.mark.parametrize("picture", ["terminal", "png"])
def test_weights_and_labels_of_other_shapes_are_refused(picture: str, tmp_path: Path) -> None:
    draw: Callable[..., Any] = terminal if picture == "terminal" else to_png(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"weights: \(2, 3\) does not fit 2 row and 2 column labels"):
        draw(weights(2, 3), ["a", "b"], ["x", "y"])
    with pytest.raises(DataError, match=r"weights: needs queries by keys \(T, S\), not \(0, 2\)"):
        draw(weights(0, 2), [], ["x", "y"])
    with pytest.raises(DataError, match="not finite"):
        draw(torch.tensor([[float("nan")]]), ["a"], ["x"])
    assert not list(tmp_path.iterdir())


def read_png(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)[..., :3]


def test_a_png_has_dark_cells_where_the_weights_are(tmp_path: Path) -> None:
    matrix = torch.zeros(2, 3)
    matrix[0, 2] = 1.0
    png(matrix, ["a", "b"], ["x", "y", "z"], tmp_path / "a.png", "title")
    image = read_png(tmp_path / "a.png")
    blue = (image[..., 2] > image[..., 0] + 0.2) & (image.sum(-1) < 1)  # the dark end of the scale
    left = blue[:, : int(image.shape[1] * 0.75)]  # without the colour bar on the right
    rows, columns = np.nonzero(left)
    assert len(rows) > 500
    assert columns.min() > left.shape[1] * 0.5
    assert rows.max() < image.shape[0] * 0.7
    png(matrix.flip(0).flip(1), ["a", "b"], ["x", "y", "z"], tmp_path / "b.png")
    image = read_png(tmp_path / "b.png")
    blue = (image[..., 2] > image[..., 0] + 0.2) & (image.sum(-1) < 1)
    rows, columns = np.nonzero(blue[:, : int(image.shape[1] * 0.75)])
    assert columns.max() < image.shape[1] * 0.5
    assert rows.min() > image.shape[0] * 0.4


def test_png_of_any_characters_gives_no_warning(tmp_path: Path) -> None:
    png(weights(len(STRANGE), len(STRANGE)), STRANGE, STRANGE, tmp_path / "a.png", "日本 $\\nothing$ \n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_the_size_of_a_picture_is_bounded(tmp_path: Path) -> None:
    png(weights(2, 300), ["a", "b"], ["x"] * 300, tmp_path / "a.png")
    assert read_png(tmp_path / "a.png").shape[1] < 42 * 150


def test_png_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"old")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DataError, match=r"cannot write .*a\.png: No space left on device"):
        png(weights(1, 1), ["a"], ["x"], path)
    monkeypatch.undo()
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]
    png(weights(1, 1), ["a"], ["x"], str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_missing_folder_gives_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write .*nowhere/a\.png: No such file or directory"):
        png(weights(1, 1), ["a"], ["x"], tmp_path / "nowhere" / "a.png")


def test_pyplot_state_is_unchanged(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    png(weights(1, 1), ["a"], ["x"], tmp_path / "a.png")
    assert dict(mpl.rcParams) == before


def test_missing_matplotlib_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(SpecError) as caught:
        png(weights(1, 1), ["a"], ["x"], tmp_path / "a.png")
    assert str(caught.value) == "a picture needs the package matplotlib: pip install 'regard[plot]'"
