"""Write sharded tensors with all ranks, and return them whole to rank 0, which saves them as an ordinary checkpoint.

`torch.distributed.checkpoint` writes one safetensors file per rank and then consolidates them into whole tensors.
Tensors without a dimension, such as the step of Adam, are equal on all ranks and are not written, because consolidation
replaces them by 0 (torch 2.13).
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from regard.files import temporary
from regard.training.background_saving import HostCopy
from regard.training.parallel.group import Group, ProcessGroup
from regard.training.tensor_files import read_tensors

Tensors = Mapping[str, Tensor]


@contextmanager
def gathered(tensors: Tensors, folder: Path, group: Group) -> Iterator[dict[str, Tensor]]:
    """Yield whole tensors on rank 0, in files of a temporary folder inside `folder`, and no tensors on other ranks."""
    shards = {name: tensor for name, tensor in tensors.items() if hasattr(tensor, "full_tensor")}
    if not shards or not isinstance(group, ProcessGroup):
        yield dict(tensors)
        return
    path = Path(group.alone(lambda: str(temporary(folder / "shards"))))
    try:
        _write(shards, path, group)
        if not group.leads:
            yield {}
            return
        with group.beating():  # the others may already wait for the next value
            files = sorted(path.glob("*.safetensors"))
            yield dict(tensors) | {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    finally:
        if group.leads:
            shutil.rmtree(path, ignore_errors=True)


def host_copy(tensors: Tensors, folder: Path, group: Group) -> HostCopy | None:
    """Return a copy of whole tensors in the memory of rank 0, and None on other ranks. All ranks call this together."""
    with gathered(tensors, folder, group) as whole:
        return HostCopy(whole) if group.leads else None


def _write(shards: Tensors, path: Path, group: ProcessGroup) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: PLC0415  # takes a second
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    writer = HuggingFaceStorageWriter(str(path), save_distributed=True, enable_consolidation=True)
    save(dict(shards), storage_writer=writer, process_group=group.control)
