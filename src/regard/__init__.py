"""regard: train, modify, compare, inspect and export Transformer models.

Names are imported on first use, so that `import regard` and the command line start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.ablation.ablate import ablate
    from regard.batch import Batch
    from regard.catalogue import from_record, to_record
    from regard.errors import DataError, KernelError, RegardError, SpecError
    from regard.models.base import Classifier, Generator, Model, ModelSpec
    from regard.models.baselines.bytenet import ByteNet
    from regard.models.baselines.convs2s import ConvS2S
    from regard.models.baselines.rnn import Recurrent
    from regard.models.build import build, count
    from regard.models.decoder_only import DecoderOnly
    from regard.models.decoding import Decoding
    from regard.models.encoder import Encoder
    from regard.models.encoder_decoder import EncoderDecoder
    from regard.models.encoder_only import EncoderOnly
    from regard.models.loss import Loss
    from regard.nn.trace import Trace
    from regard.presets import preset
    from regard.runs.align import align
    from regard.runs.compare import compare
    from regard.runs.heads import heads
    from regard.runs.inference import classify, evaluate, generate, score, translate
    from regard.runs.inspect import attention, inspect
    from regard.runs.prune import prune
    from regard.runs.train import resume, train
    from regard.runs.trained_model import TrainedModel, load
    from regard.serving.serve import serve
    from regard.tree import Spec, diff, replace_at, swap

__version__ = "0.1.0.dev0"

__all__ = [
    "Batch", "ByteNet", "Classifier", "ConvS2S", "DataError", "DecoderOnly", "Decoding", "Encoder",
    "EncoderDecoder", "EncoderOnly", "Generator", "KernelError", "Loss", "Model", "ModelSpec", "Recurrent",
    "RegardError", "Spec", "SpecError", "Trace", "TrainedModel", "ablate", "align", "attention", "build", "classify",
    "compare", "count", "diff", "evaluate", "from_record", "generate", "heads", "inspect", "load", "preset", "prune",
    "replace_at", "resume", "score", "serve", "swap", "to_record", "train", "translate",
]  # fmt: skip

_HOMES = {
    "regard.ablation.ablate": ("ablate",),
    "regard.batch": ("Batch",),
    "regard.catalogue": ("from_record", "to_record"),
    "regard.errors": ("DataError", "KernelError", "RegardError", "SpecError"),
    "regard.models.base": ("Classifier", "Generator", "Model", "ModelSpec"),
    "regard.models.build": ("build", "count"),
    "regard.models.decoding": ("Decoding",),
    "regard.models.loss": ("Loss",),
    "regard.models.baselines.bytenet": ("ByteNet",),
    "regard.models.baselines.convs2s": ("ConvS2S",),
    "regard.models.decoder_only": ("DecoderOnly",),
    "regard.models.encoder": ("Encoder",),
    "regard.models.encoder_decoder": ("EncoderDecoder",),
    "regard.models.encoder_only": ("EncoderOnly",),
    "regard.models.baselines.rnn": ("Recurrent",),
    "regard.nn.trace": ("Trace",),
    "regard.presets": ("preset",),
    "regard.runs.trained_model": ("TrainedModel", "load"),
    "regard.runs.train": ("resume", "train"),
    "regard.runs.align": ("align",),
    "regard.runs.compare": ("compare",),
    "regard.runs.heads": ("heads",),
    "regard.runs.prune": ("prune",),
    "regard.runs.inference": ("classify", "evaluate", "generate", "score", "translate"),
    "regard.runs.inspect": ("attention", "inspect"),
    "regard.serving.serve": ("serve",),
    "regard.tree": ("Spec", "diff", "replace_at", "swap"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_FORMER = {"Run": "TrainedModel"}  # former names, which still work


def __getattr__(name: str) -> Any:
    name = _FORMER.get(name, name)
    if name == "weights":
        return import_module("regard.weights")
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
