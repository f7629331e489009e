"""Read and write safetensors files with metadata and digests, and compute the mean of several sets of weights."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import DataError
from regard.files import sync, usual_mode

CHECKSUM = "checksum"  # key of the checksum of all other keys of a JSON object
NOTES = "regard"  # header key of the metadata, stored as one JSON object because safetensors has no order of keys
Tensors = Mapping[str, Tensor]


def write_tensors(path: Path, tensors: Tensors, about: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, with the metadata `about` and their checksum in its header, and flush it to disk."""
    host = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    notes = json.dumps({**about, CHECKSUM: checksum(about)}, sort_keys=True) if about else None
    save_file(host, path, metadata={NOTES: notes} if notes else {"format": "pt"})
    path.chmod(usual_mode(path.parent))  # safetensors lets only the owner read the file
    sync(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file, by name."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(f"{path} is damaged or not a safetensors file ({error}); restore it from a copy") from None


def read_about(path: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, str] = file.metadata() or {}
        if NOTES in about:
            about |= json.loads(about.pop(NOTES))
        if CHECKSUM in about and about.pop(CHECKSUM) != checksum(about):
            raise DataError(f"{path} has changed since it was saved; restore it from a copy")
        return about
    except DataError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged or not a safetensors file ({error}); restore it from a copy") from None


def write_weights(path: Path, weights: Tensors, about: Mapping[str, str] | None = None) -> None:
    """Write weights to a safetensors file, with their digest and the metadata `about` in its header."""
    write_tensors(path, weights, {**(about or {}), "sha256": weights_digest(weights)})


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a safetensors file, after verifying the digest in its header.

    Checkpoints of earlier versions have no digest there and are not verified.
    """
    weights = read_tensors(path)
    expected = read_about(path).get("sha256")
    if expected is not None and expected != weights_digest(weights):
        raise DataError(f"{path} has changed since it was saved; restore it from a copy")
    return weights


def checksum(record: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(dict(record), sort_keys=True).encode()).hexdigest()


def weights_digest(weights: Tensors) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and values of weights, independent of the file format."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous().cpu()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def mean(weights: Iterable[Tensors]) -> dict[str, Tensor]:
    """Return the average of several sets of weights, summed in float64."""
    total: dict[str, Tensor] = {}
    first: Tensors = {}
    count = 0
    for each in weights:
        count += 1
        first = first or each
        if {name: t.shape for name, t in each.items()} != {name: t.shape for name, t in first.items()}:
            raise DataError("weights of different models cannot be averaged")
        for name, tensor in each.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / count).to(first[name].dtype) for name, tensor in total.items()}
