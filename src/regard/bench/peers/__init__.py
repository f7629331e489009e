"""Other people's code: who is raced against, and whether it is here."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from regard.bench.peers.base import PeerError
from regard.errors import nearest


@dataclass(frozen=True)
class Peer:
    """One of them. Its module here has `trainee` or `speakers`, by what it can do."""

    name: str
    title: str
    package: str  # what must be importable
    install: str
    module: str
    does: tuple[str, ...]  # train, decode

    def installed(self) -> bool:
        """Whether its package can be found; nothing is imported."""
        return find_spec(self.package) is not None

    def code(self) -> ModuleType:
        """Our file about it."""
        return import_module(f"regard.bench.peers.{self.module}")


ORACLES = "make test-oracles installs it"
PEERS = (
    Peer("hf", "Hugging Face", "transformers", "pip install transformers", "huggingface", ("train", "decode")),
    Peer("ctranslate2", "CTranslate2", "ctranslate2", "pip install ctranslate2", "ctranslate2", ("decode",)),
    Peer("joeynmt", "Joey NMT", "joeynmt", ORACLES, "joeynmt", ("train",)),
    Peer("fairseq", "fairseq", "fairseq", ORACLES, "fairseq", ("train",)),
    Peer(
        "xtransformers", "x-transformers", "x_transformers", "pip install x-transformers", "x_transformers", ("train",)
    ),
    Peer("torch", "torch.nn.Transformer", "torch", "pip install torch", "torch_layers", ("train",)),
)


def chosen(names: Sequence[str] | None, task: str) -> tuple[list[Peer], list[Peer]]:
    """The peers of a race, and those left out because they are not installed. Those asked for must be there."""
    able = {peer.name: peer for peer in PEERS if task in peer.does}
    if names is None:
        present = [peer for peer in able.values() if peer.installed()]
        return present, [peer for peer in able.values() if peer not in present]
    every = {peer.name: peer for peer in PEERS}
    found = []
    for name in dict.fromkeys(names):
        if name not in every:
            raise PeerError(f"--against: unknown peer {name!r}; {nearest(name, every)}")
        peer = every[name]
        if name not in able:
            raise PeerError(f"--against: nothing here is compared with {peer.title} in {task}; use {' or '.join(able)}")
        if not peer.installed():
            raise PeerError(f"--against: {peer.title} is not installed; {peer.install}")
        found.append(peer)
    return found, []
