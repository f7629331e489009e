"""The peers: other libraries that regard is benchmarked against."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from regard.bench.peers.base import PeerError
from regard.errors import nearest


@dataclass(frozen=True)
class Peer:
    """Another library that is benchmarked.

    `module` has the functions `training_model` (for the task "train") and `decoding_models` (for the task "decode").
    They return models of this library. A module lacks the function of a task that is not in `tasks`.
    """

    name: str
    title: str
    package: str  # must be importable
    install: str
    module: str
    tasks: tuple[str, ...]  # train, decode

    def installed(self) -> bool:
        """Return True if the library's package can be found. Nothing is imported."""
        return find_spec(self.package) is not None

    def code(self) -> ModuleType:
        """Return the module in this package that adapts the library."""
        return import_module(f"regard.bench.peers.{self.module}")


FROM_ORACLES = "make test-oracles installs it"
PEERS = (
    Peer("hf", "Hugging Face", "transformers", "pip install transformers", "huggingface", ("train", "decode")),
    Peer("ctranslate2", "CTranslate2", "ctranslate2", "pip install ctranslate2", "ctranslate2", ("decode",)),
    Peer("joeynmt", "Joey NMT", "joeynmt", FROM_ORACLES, "joeynmt", ("train",)),
    Peer("fairseq", "fairseq", "fairseq", FROM_ORACLES, "fairseq", ("train",)),
    Peer(
        "xtransformers", "x-transformers", "x_transformers", "pip install x-transformers", "x_transformers", ("train",)
    ),
    Peer("torch", "torch.nn.Transformer", "torch", "pip install torch", "torch_layers", ("train",)),
)


def chosen(names: Sequence[str] | None, task: str) -> tuple[list[Peer], list[Peer]]:
    """Return the libraries to benchmark, and the libraries that are left out because they are not installed.

    The libraries in `names` must be installed. If `names` is None, all libraries that support `task` are considered.
    """
    able = {peer.name: peer for peer in PEERS if task in peer.tasks}
    if names is None:
        present = [peer for peer in able.values() if peer.installed()]
        return present, [peer for peer in able.values() if peer not in present]
    known = {peer.name: peer for peer in PEERS}
    peers = []
    for name in dict.fromkeys(names):
        if name not in known:
            raise PeerError(f"--against: unknown library {name!r}; {nearest(name, known)}")
        peer = known[name]
        if name not in able:
            raise PeerError(f"--against: {peer.title} does not support {task}; use {' or '.join(able)}")
        if not peer.installed():
            raise PeerError(f"--against: {peer.title} is not installed; {peer.install}")
        peers.append(peer)
    return peers, []
