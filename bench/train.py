"""How fast we train: the trainer's step against the same step of Hugging Face Marian, on the same batches.

Ours is `Trainer.step` as `regard train` runs it: batches of a `Stream`, prepared by its thread, clipping, schedule,
fused AdamW, the window of the log. Theirs is the loop that a careful user writes, with the same batches ready made: the
forward pass with SDPA, the loss, clipping, fused AdamW. Before anything is timed, losses and gradients must agree, so
that both are known to compute the same thing.

A round is a few steps of each, in alternating order, in CPU seconds of all threads at one thread for products. Counted
are target tokens without padding. "own loss" is the loss inside their model, without label smoothing on either side;
"smoothed" has label smoothing 0.1, theirs by torch's cross_entropy. The exit code is 1 if an interval lies below its
limit.

    python bench/train.py --rounds 10
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from marian import BOS, EOS, Result, pair, parser, report, summarise
from overhead import SHAPES, interleave, sentences
from torch import Tensor

from regard.batch import Batch
from regard.data.batching import Buckets
from regard.data.objectives import Translation
from regard.data.store import Table
from regard.data.stream import Examples, Place, Prefetch, Stream
from regard.training.checkpoint import RunFolder
from regard.training.loop import Trainer
from regard.training.optim import AdamW
from regard.training.schedule import Constant
from regard.training.spec import TrainSpec

LIMIT = 0.95
LOSSES = {"own loss": 0.0, "smoothed": 0.1}
ADAMW = AdamW(rate=1e-4)
SPEC = TrainSpec(steps=100_000, optimizer=ADAMW, schedule=Constant(warmup=0))


def stream(tokens: int) -> Stream:
    """Batches of at most `tokens` padded tokens a side, from 10,000 sentences."""
    pairs = sentences(SHAPES["small"], 10_000, seed=0)
    table = Table.of(source=[[*s, EOS] for s, _ in pairs], target=[[BOS, *t, EOS] for _, t in pairs])
    return Stream(Examples([table], [1.0], Translation()), Buckets(tokens), seed=SPEC.seed)


def asked(batch: Batch) -> dict[str, Tensor]:
    """A batch as Marian takes it. A causal decoder needs no mask for padding at the end."""
    assert batch.source is not None
    assert batch.source_seg is not None
    assert batch.labels is not None
    assert batch.target_seg is not None
    return {
        "input_ids": batch.source,
        "attention_mask": batch.source_seg,
        "decoder_input_ids": batch.target,
        "labels": batch.labels.masked_fill(batch.target_seg == 0, -100),
    }


def their_loss(theirs: Any, inputs: dict[str, Tensor], smoothing: float) -> Tensor:
    """The mean loss of a batch: their own, or torch's with label smoothing over their logits."""
    if not smoothing:
        return theirs(**inputs, use_cache=False).loss
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    logits = theirs(**inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


def check(batch: Batch, smoothing: float) -> None:
    """Refuse to compare what does not compute the same: the loss in training mode, and its gradient."""
    ours, theirs = pair(smoothing, dropout=0.0)
    loss = ours.train().loss(batch)
    (loss.total / loss.tokens).backward()
    expected = their_loss(theirs.train(), asked(batch), smoothing)
    expected.backward()
    torch.testing.assert_close(loss.total / loss.tokens, expected, rtol=1e-5, atol=1e-5)
    for our, their in (
        ("encoder.blocks.0.branches.1.branch.up", theirs.model.encoder.layers[0].fc1),
        ("decoder.blocks.2.branches.1.branch.query", theirs.model.decoder.layers[2].encoder_attn.q_proj),
    ):
        torch.testing.assert_close(ours.get_parameter(f"{our}.weight").grad, their.weight.grad, rtol=1e-3, atol=1e-6)


def our_step(trainer: Trainer) -> None:
    """A step of the trainer, with its line of the log when one is due."""
    trainer.step()
    if trainer.progress.step % trainer.spec.log_every == 0:
        trainer.note_window()


def their_step(theirs: Any, smoothing: float) -> Callable[[dict[str, Tensor]], None]:
    """The same step of Marian."""
    theirs.train()
    parameters = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.decay, fused=True
    )

    def step(inputs: dict[str, Tensor]) -> None:
        their_loss(theirs, inputs, smoothing).backward()
        torch.nn.utils.clip_grad_norm_(parameters, SPEC.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(smoothing: float, rounds: int, steps: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """CPU seconds of every round, ours and theirs, and its target tokens."""
    warm_up = 1
    items = [item for item, _ in islice(stream(tokens).after(Place()), (warm_up + rounds) * steps)]
    check(items[0].batch, smoothing)
    ours, theirs = pair(smoothing, dropout=0.1)
    inputs = [asked(item.batch) for item in items]
    their = their_step(theirs, smoothing)
    with TemporaryDirectory() as folder, closing(Prefetch(stream(tokens), Place())) as prefetch:
        trainer = Trainer(ours, SPEC, stream(tokens), RunFolder(Path(folder)))
        trainer.prefetch = prefetch

        def our_round(_: int) -> float:
            began = time.process_time()
            for _ in range(steps):
                our_step(trainer)
            time.sleep(0.1)  # meanwhile the thread fills its queue again: its work is ours, whenever it is done
            return time.process_time() - began

        def their_round(i: int) -> float:
            began = time.process_time()
            for one in inputs[i * steps : (i + 1) * steps]:
                their(one)
            return time.process_time() - began

        seconds = interleave([our_round, their_round], rounds, warm_up)
    labels = np.array([item.labels for item in items]).reshape(-1, steps).sum(1)
    assert trainer.progress.labels == labels.sum(), "both sides read the same batches"
    return seconds, labels[warm_up:]


def main() -> int:
    """Measure, print, and answer 1 if a limit is missed."""
    options = parser(__doc__, rounds=10)
    options.add_argument("--steps", type=int, default=4, help="steps a round")
    options.add_argument("--tokens", type=int, default=2048, help="of a padded batch")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def results() -> Iterator[Result]:
        for name, smoothing in LOSSES.items():
            yield summarise(f"training, {name}", *measure(smoothing, chosen.rounds, chosen.steps, chosen.tokens), LIMIT)

    return report(results(), chosen)


if __name__ == "__main__":
    sys.exit(main())
