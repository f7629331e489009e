"""regard: the Transformer that people train themselves. Train it, change it, prove the change, see inside it, ship it.

Names are imported on first use, so that `import regard` and the command line start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.batch import Batch
    from regard.catalogue import from_record, to_record
    from regard.errors import DataError, KernelError, RegardError, SpecError
    from regard.models.base import Classifier, Decoding, Generator, Loss, Model, ModelSpec, build, count
    from regard.models.bytenet import ByteNet
    from regard.models.convs2s import ConvS2S
    from regard.models.decoder_only import DecoderOnly
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.encoder_only import EncoderOnly
    from regard.models.recurrent import Recurrent
    from regard.nn.core import Trace
    from regard.presets import preset
    from regard.run import Run, load
    from regard.session import resume, train
    from regard.tree import Spec, diff, replace_at, swap

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch",
    "ByteNet",
    "Classifier",
    "ConvS2S",
    "DataError",
    "DecoderOnly",
    "Decoding",
    "EncoderDecoder",
    "EncoderOnly",
    "Generator",
    "KernelError",
    "Loss",
    "Model",
    "ModelSpec",
    "Recurrent",
    "RegardError",
    "Run",
    "Spec",
    "SpecError",
    "Trace",
    "build",
    "count",
    "diff",
    "from_record",
    "load",
    "preset",
    "replace_at",
    "resume",
    "swap",
    "to_record",
    "train",
]

_HOMES = {
    "regard.batch": ("Batch",),
    "regard.catalogue": ("from_record", "to_record"),
    "regard.errors": ("DataError", "KernelError", "RegardError", "SpecError"),
    "regard.models.base": ("Classifier", "Decoding", "Generator", "Loss", "Model", "ModelSpec", "build", "count"),
    "regard.models.bytenet": ("ByteNet",),
    "regard.models.convs2s": ("ConvS2S",),
    "regard.models.decoder_only": ("DecoderOnly",),
    "regard.models.encoder_decoder": ("EncoderDecoder",),
    "regard.models.encoder_only": ("EncoderOnly",),
    "regard.models.recurrent": ("Recurrent",),
    "regard.nn.core": ("Trace",),
    "regard.presets": ("preset",),
    "regard.run": ("Run", "load"),
    "regard.session": ("resume", "train"),
    "regard.tree": ("Spec", "diff", "replace_at", "swap"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
