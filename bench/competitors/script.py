"""Translation as users write it with Hugging Face: MarianMTModel, BPE, AdamW, one loop over batches, beam search.

    python bench/competitors/script.py X.train X.test --time 300 --threads 2 --out script.json

Trains on lines source<TAB>target for `--time` seconds of wall-clock time, including imports, reading and the training
of the tokenizer. Then translates the sources of the test file, and writes one JSON object: outputs, number of steps,
and times in seconds.
"""

import time

START = time.perf_counter()  # before the imports, because they count as well

import argparse  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

PAD, EOS = 0, 1
LONGEST = 512  # tokens of a source or a target, with the end token; longer texts are cut
WARM_UP = 300
Ids = list[int]
Example = tuple[Ids, Ids]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batches, and the peak learning rate."""

    layers: int  # in the encoder, and in the decoder
    width: int
    heads: int
    feed_forward: int
    vocabulary: int
    tokens: int  # per batch, with padding, in the source or the target, whichever is longer
    learning_rate: float


SHAPES = {
    "small": Shape(2, 128, 4, 512, 4_000, 1_500, 1e-3),
    "medium": Shape(3, 256, 4, 1024, 8_000, 8_192, 1e-3),
    "base": Shape(6, 512, 8, 2048, 16_000, 16_384, 5e-4),
}


def learning_rate(step: int, share: float, peak: float) -> float:
    """Return a linear warm-up over steps times a cosine that falls to 0. `share` is the fraction of the time used."""
    return peak * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def batches(examples: Sequence[Example], tokens: int, rng: random.Random) -> list[list[Example]]:
    """Group examples of similar length into batches of at most `tokens` tokens per side, in random order."""
    ordered = sorted(examples, key=lambda example: (max(map(len, example)), rng.random()))
    groups: list[list[Example]] = [[]]
    for example in ordered:  # sorted, so this example is the longest of the batch
        if groups[-1] and (len(groups[-1]) + 1) * max(map(len, example)) > tokens:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    return groups


def padded(rows: Sequence[Ids], value: int, device: str) -> torch.Tensor:
    """Return sequences of different lengths as one tensor, padded with `value`."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows], device=device)


def pairs_of(path: Path) -> list[tuple[str, str]]:
    """Return the two columns of a tab-separated file as pairs."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line)
    return [(row[0], row[1]) for row in rows]


def trained_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on `texts`, which contain sources and targets."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def marian(shape: Shape, vocabulary: int) -> Any:
    """Return a new MarianMTModel."""
    from transformers import MarianConfig, MarianMTModel  # noqa: PLC0415  # slow; not needed for --help

    config = MarianConfig(
        vocab_size=vocabulary,
        d_model=shape.width,
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        encoder_attention_heads=shape.heads,
        decoder_attention_heads=shape.heads,
        encoder_ffn_dim=shape.feed_forward,
        decoder_ffn_dim=shape.feed_forward,
        activation_function="relu",
        dropout=0.1,
        max_position_embeddings=LONGEST,
        scale_embedding=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
    )
    return MarianMTModel(config)


def train(model: Any, examples: Sequence[Example], shape: Shape, budget: float, seed: int, device: str) -> int:
    """Train until `budget` seconds after the start of the process, and return the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.learning_rate)
    rng, step, last = random.Random(seed), 0, 0.0
    model.train()
    while True:
        for batch in batches(examples, shape.tokens, rng):
            begun = time.perf_counter() - START
            if begun + last > budget:
                return step
            source = padded([source for source, _ in batch], PAD, device)
            labels = padded([target for _, target in batch], PAD, device)
            inputs = F.pad(labels[:, :-1], (1, 0), value=PAD)
            with autocast(device):
                logits = model(input_ids=source, attention_mask=source != PAD, decoder_input_ids=inputs).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), ignore_index=PAD, label_smoothing=0.1
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, begun / budget, shape.learning_rate)
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()  # so that the clock measures completed steps
            step, last = step + 1, time.perf_counter() - START - begun


def autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager for mixed precision: bfloat16 on a GPU, float32 elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


@torch.inference_mode()
def translate(model: Any, tokenizer: Tokenizer, sources: Sequence[Ids], device: str) -> list[dict[str, Any]]:
    """Translate with beam size 5. Return every text, and whether it ended before the length limit."""
    model.eval()
    size = 256 if device == "cuda" else 32
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    translations: list[dict[str, Any]] = [{}] * len(sources)
    for first in range(0, len(order), size):
        numbers = order[first : first + size]
        source = padded([sources[number] for number in numbers], PAD, device)
        limit = min(2 * source.shape[1] + 20, LONGEST - 1)
        with autocast(device):
            outputs = model.generate(
                input_ids=source, attention_mask=source != PAD, num_beams=5, max_new_tokens=limit, do_sample=False
            )
        for number, ids in zip(numbers, outputs.tolist(), strict=True):
            text = tokenizer.decode([token for token in ids if token not in (PAD, EOS)])
            translations[number] = {"text": " ".join(text.split()), "ended": EOS in ids}
    return translations


def main() -> None:
    """Train, translate the test file, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--time", type=float, required=True, help="time limit for training, in seconds")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    shape = SHAPES[options.shape]
    pairs = pairs_of(options.train)
    tokenizer = trained_tokenizer((text for pair in pairs for text in pair), shape.vocabulary)

    def ids(texts: Sequence[str]) -> list[Ids]:
        return [[*encoded.ids[: LONGEST - 1], EOS] for encoded in tokenizer.encode_batch(list(texts))]

    examples = list(zip(*(ids(side) for side in zip(*pairs, strict=True)), strict=True))
    model = marian(shape, tokenizer.get_vocab_size()).to(options.device)
    steps = train(model, examples, shape, options.time, options.seed, options.device)
    trained = time.perf_counter() - START
    outputs = translate(model, tokenizer, ids([source for source, _ in pairs_of(options.test)]), options.device)
    results = {
        "steps": steps,
        "train_seconds": trained,
        "decode_seconds": time.perf_counter() - START - trained,
        "parameters": model.num_parameters(),
        "outputs": outputs,
    }
    options.out.write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
