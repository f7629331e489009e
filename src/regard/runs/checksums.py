"""Checksums of the files that a training run writes once: request, recipe, tokenizers and prepared data.

A changed byte in one of these files could change the numbers of a model without an error. Checkpoints and final weights
contain checksums of their own.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from regard.errors import DataError
from regard.files import file_digest
from regard.training.checkpoint import RunFolder, read_json, write_json


def write_checksums(folder: RunFolder, recipe: str) -> None:
    """Write checksums.json for the files of a run whose recipe.json, with the text `recipe`, is about to be written."""
    files = [folder.request, *folder.path.glob("tokenizer*.json"), *_files(folder.data)]
    digests = {path.relative_to(folder.path).as_posix(): file_digest(path) for path in sorted(files)}
    digests[folder.recipe.name] = hashlib.sha256(recipe.encode()).hexdigest()
    write_json(folder.checksums, digests)


def verify(folder: RunFolder, *paths: Path) -> None:
    """Raise DataError for a file that has changed since `write_checksums`; all files of a folder are verified.

    Runs of earlier versions have no checksums, and nothing is verified.
    """
    if not folder.checksums.exists():
        return
    digests = read_json(folder.checksums)
    for path in paths:
        for file in _files(path):
            expected = digests.get(file.relative_to(folder.path).as_posix())
            if expected is not None and expected != file_digest(file):
                raise DataError(
                    f"{file} has changed since training began; restore it from a copy, or remove {folder.checksums} if "
                    "you changed the file yourself"
                )


def _files(path: Path) -> Iterable[Path]:
    return filter(Path.is_file, sorted(path.rglob("*"))) if path.is_dir() else [path] if path.is_file() else []
