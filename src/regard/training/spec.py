"""TrainSpec: all settings of training."""

import math
from dataclasses import dataclass
from typing import Literal

from regard.nn.checks import check_count, check_rate, require
from regard.training.optim import OptimizerSpec
from regard.training.schedule import InverseSqrt, Schedule
from regard.tree import Spec

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Parallel = Literal["replicate", "shard"]


@dataclass(frozen=True, slots=True)
class TrainSpec(Spec):
    """The training section of a recipe. A setting that is None is chosen from the corpus."""

    kind = "train"
    steps: int | None = None
    # Time budget in seconds, including earlier sessions if training is resumed. Training and the learning rate schedule
    # end with it, or after `steps` steps if that is sooner.
    time: float | None = None
    seed: int = 1
    optimizer: OptimizerSpec | None = None
    schedule: Schedule = InverseSqrt()
    # Gradient accumulation: number of batches per step. The gradient is the same as for one large batch, except that
    # auxiliary losses (and the capacity of experts) are computed for each batch.
    accumulate: int = 1
    # In several processes: replicate (every process has all weights) or shard (each has a part of them, for models that
    # do not fit on one GPU). The processes share the batches of a step, so `accumulate` is a multiple of their number.
    parallel: Parallel = "replicate"
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    precision: Precision = "auto"  # auto: bfloat16 (or float16) on CUDA, float32 elsewhere
    ema: float = 0.0  # decay of a moving average of the weights, which is validated and saved; 0: no average
    validate_every: int | None = None
    save_every: int | None = None  # None: at each validation
    log_every: int = 50
    keep: int = 5  # number of recent checkpoints whose weights are kept
    # Number of recent checkpoints whose optimizer state is kept. Training resumes from the last one, or from the one
    # before it if a file of the last one is damaged.
    keep_state: int = 2
    choose: Literal["best", "last"] = "best"  # final weights: best by validation, or the last
    average: int = 1  # number of checkpoints to average; used only if the mean validates better than each
    # The metric that ranks checkpoints, as a name or module:Class. Checkpoints that differ only by the noise of the
    # validation set are ranked by loss. auto: bleu for translation (chrf if targets are too short for bleu), accuracy
    # for classification, loss otherwise.
    criterion: str = "auto"
    decode: int = 500  # number of validation examples that are translated in each validation
    # sacreBLEU's tokenizer, "none" for tokenised text; auto: 13a, zh or char, depending on the script
    bleu_tokenize: str = "auto"
    # Early stopping: number of validations in which neither criterion nor loss improves; 0: never stop early.
    patience: int | None = None
    # A step whose loss or gradient is not finite changes nothing. Training ends after this number of them in a row.
    max_skipped: int = 5
    compile: bool | None = None  # torch.compile; None: on CUDA, if batches have one shape and it saves time
    # Activation checkpointing: the backward pass computes the activations of each block again. Training needs less
    # memory and about a third more time; the gradients are the same.
    checkpoint_layers: bool = False

    def check(self) -> None:
        for name in (
            "steps",
            "validate_every",
            "save_every",
            "accumulate",
            "log_every",
            "keep",
            "keep_state",
            "max_skipped",
            "average",
        ):
            check_count(name, getattr(self, name))
        check_count("patience", self.patience, least=0)
        require(self.time is None or 0 < self.time < math.inf, "time", f"must lie above 0, not {self.time}")
        check_count("decode", self.decode, least=0)
        check_rate("ema", self.ema)
        require(self.clip >= 0, "clip", f"must be at least 0, not {self.clip}")
        require(
            not (self.checkpoint_layers and self.compile),
            "compile",
            "cannot be combined with checkpoint_layers, whose steps run eagerly; leave one of the two out",
        )
        require(
            not (self.parallel == "shard" and self.compile),
            "compile",
            "cannot be combined with parallel = shard, whose steps run eagerly; leave one of the two out",
        )
        require(-(2**63) <= self.seed < 2**63, "seed", "must fit in 64 bits")
        too_many = self.choose == "last" and self.average > self.keep
        message = f"the last {self.average} checkpoints cannot be averaged if {self.keep} are kept"
        require(not too_many, "average", message)
