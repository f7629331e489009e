"""The path of one encoder layer, from token ids to the output of the block: short, and described by docs/tour.md."""

import ast
import inspect
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import regard
from regard import build, preset
from regard.models.encoder_decoder import EncoderDecoderModel
from regard.nn.mask import Context, Mask, View

SOURCE = Path(regard.__path__[0])
TOUR = SOURCE.parents[1] / "docs/tour.md"
STEP = re.compile(r"^\d+\. \*\*`(nn/\S+\.py)`\*\* \((\d+) lines\)", re.MULTILINE)


def path() -> dict[str, int]:
    """The files of the path and their lines, as the tour states them."""
    return {name: int(lines) for name, lines in STEP.findall(TOUR.read_text())}


def lines(name: str) -> int:
    return len((SOURCE / name).read_text().splitlines())


def executed() -> set[CodeType]:
    """The functions of regard that run from token ids to the output of a stack of encoder layers."""
    model = build(preset("transformer_small", vocab=50)).eval()
    assert isinstance(model, EncoderDecoderModel)
    ids = torch.tensor([[3, 4, 5], [6, 7, 0]])
    table, tokens, codes = model.tables.get("source"), model.inputs.get("source"), set()
    positions = torch.arange(3)[None]
    ctx = Context(View(Mask(q_seg=(ids != 0).long(), k_seg=(ids != 0).long()), 3, 3, ids.device))

    def record(frame: FrameType, _event: str, _arg: Any) -> None:
        if frame.f_code.co_filename.startswith(str(SOURCE)):
            codes.add(frame.f_code)

    previous = sys.gettrace()
    sys.settrace(record)
    try:
        model.encoder(tokens(ids, table, positions, 3), ctx)
    finally:
        sys.settrace(previous)
    return codes


def test_the_tour_states_the_lines_of_each_file() -> None:
    assert path() == {name: lines(name) for name in path()}


def test_the_path_of_an_encoder_layer_is_at_most_9_files_and_800_lines() -> None:
    assert len(path()) <= 9
    assert sum(path().values()) <= 800


def test_what_runs_in_an_encoder_layer_is_on_the_path_in_at_most_350_lines() -> None:
    codes = executed()
    files = {str(Path(code.co_filename).relative_to(SOURCE)) for code in codes}
    assert files <= path().keys()
    functions = [code for code in codes if "<" not in code.co_name]
    assert len(functions) > 15
    assert sum(len(inspect.getsource(code).splitlines()) for code in functions) <= 350


def branches_per_100_lines(files: list[Path]) -> float:
    """if statements and conditional expressions per 100 lines that are not blank."""
    texts = [file.read_text() for file in files]
    nodes = sum(isinstance(node, ast.If | ast.IfExp) for text in texts for node in ast.walk(ast.parse(text)))
    return 100 * nodes / sum(bool(line.strip()) for text in texts for line in text.splitlines())


def test_branches_per_100_lines_do_not_grow() -> None:
    """The aim is 5; this is what there is."""
    assert branches_per_100_lines([*(SOURCE / "nn").rglob("*.py"), *(SOURCE / "models").rglob("*.py")]) <= 7.5
