"""The files of one encoder layer, from token ids to the output of the block, are short and listed in docs/tour.md."""

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
STEP = re.compile(r"^\d+\. \*\*`(nn/\S+\.py)`\*\*", re.MULTILINE)
NAMED = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)*(?:\.py|/))`")
ENCODER_DECODER = {
    *(f"models/{name}.py" for name in ("encoder_decoder", "sequence_to_sequence", "base", "decoding")),
    *(f"models/{name}.py" for name in ("embedding", "loss", "build")),
    "nn/branches/cross_attention.py",
    *(f"nn/vocab/{name}.py" for name in ("tables", "softmax", "base")),
}


def path() -> dict[str, int]:
    """Return the files of an encoder layer that docs/tour.md lists, with their numbers of lines."""
    section = TOUR.read_text().split("## How one encoder layer is computed")[1].split("\n## ")[0]
    return {name: lines(name) for name in STEP.findall(section)}


def lines(name: str) -> int:
    return len((SOURCE / name).read_text().splitlines())


def executed() -> set[CodeType]:
    """Return the functions of regard that run from token ids to the output of a stack of encoder layers."""
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


def test_the_tour_names_files_that_exist() -> None:
    """A file named without a folder is in the folder of the last name that has one."""
    last, missing = SOURCE, []
    for name in NAMED.findall(TOUR.read_text()):
        if name in {"tests/unit/test_tour.py", "tests/test_architecture.py"}:
            continue
        last = (SOURCE / name).parent if "/" in name and (SOURCE / name).exists() else last
        if not any((folder / name).exists() for folder in (SOURCE, last, *SOURCE.glob("*/"))):
            missing.append(name)
    assert missing == []


def test_the_tour_names_every_package() -> None:
    packages = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    assert {name for name in packages if f"{name}/" not in TOUR.read_text()} == set()


def test_the_path_of_an_encoder_layer_is_at_most_9_files_and_800_lines() -> None:
    assert len(path()) <= 9
    assert sum(path().values()) <= 800


def test_code_that_an_encoder_layer_runs_is_on_the_path_and_at_most_350_lines() -> None:
    codes = executed()
    files = {str(Path(code.co_filename).relative_to(SOURCE)) for code in codes}
    assert files <= path().keys()
    functions = [code for code in codes if "<" not in code.co_name]
    assert len(functions) > 15
    assert sum(len(inspect.getsource(code).splitlines()) for code in functions) <= 350


def branches_per_100_lines(files: list[Path]) -> float:
    """Return the number of if statements and conditional expressions per 100 lines."""
    texts = [file.read_text() for file in files]
    nodes = sum(isinstance(node, ast.If | ast.IfExp) for text in texts for node in ast.walk(ast.parse(text)))
    return 100 * nodes / sum(len(text.splitlines()) for text in texts)


def test_modules_and_models_have_at_most_5_branches_per_100_lines() -> None:
    assert branches_per_100_lines([*(SOURCE / "nn").rglob("*.py"), *(SOURCE / "models").rglob("*.py")]) <= 5


def test_the_path_of_an_encoder_decoder_has_at_most_5_branches_per_100_lines() -> None:
    assert branches_per_100_lines([SOURCE / name for name in sorted(ENCODER_DECODER | path().keys())]) <= 5
