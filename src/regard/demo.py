"""The demo: a small Transformer learns to read number words and to write digits, then shows where it looked."""

import random
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from regard.batch import Batch, pad, translation
from regard.models.base import LanguageModel, build
from regard.nn.core import Trace
from regard.presets import preset

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()  # noqa: E501, SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
WORDS = ("<pad>", "<bos>", "<eos>", *ONES, *TENS, "hundred", "thousand", "and", *"0123456789")
IDS = {word: i for i, word in enumerate(WORDS)}
BOS, EOS = IDS["<bos>"], IDS["<eos>"]
HIGHEST = 99999


def in_words(number: int) -> list[str]:
    """307 -> three hundred and seven."""
    if number >= 1000:
        rest = number % 1000
        joint = ["and"] if 0 < rest < 100 else []
        return [*in_words(number // 1000), "thousand", *joint, *(in_words(rest) if rest else ())]
    if number >= 100:
        return [ONES[number // 100], "hundred", *(["and", *in_words(number % 100)] if number % 100 else ())]
    if number >= 20:
        return [TENS[number // 10 - 2], *([ONES[number % 10]] if number % 10 else ())]
    return [ONES[number]]


def pair(number: int) -> tuple[list[int], list[int]]:
    """Ids of the words and of the digits."""
    return [IDS[word] for word in in_words(number)], [IDS[digit] for digit in str(number)]


def run(steps: int, seed: int) -> None:
    """Train, test on numbers never seen, and show the attention of one of them."""
    torch.set_num_threads(1)  # a second thread only waits for so small a model, 20 times longer on a busy machine
    console = Console()
    numbers = random.Random(seed).sample(range(HIGHEST + 1), 4200)
    training, unseen = numbers[200:], numbers[:200]
    spec = preset(
        "transformer_tiny", vocab=len(WORDS), d_model=64, dropout=0.0, **{"encoder.depth": 2, "decoder.depth": 2}
    )
    model = build(spec, seed=seed)
    assert isinstance(model, LanguageModel)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"A Transformer of {count:,} parameters reads number words and writes digits: "
        f"{len(training):,} numbers below {HIGHEST + 1:,} to learn from, {len(unseen)} others to be tested on.",
        highlight=False,
    )
    start = time.monotonic()
    train(model, training, steps, seed, console)
    said = write(model, [pair(number)[0] for number in unseen])
    right = sum(text == str(number) for text, number in zip(said, unseen, strict=True))
    console.print(
        f"\n{steps} steps in {time.monotonic() - start:.0f} s. "
        f"Numbers it has never seen: [bold]{right} of {len(unseen)} right[/].\n",
        highlight=False,
    )
    for number, text in list(zip(unseen, said, strict=True))[:5]:
        mark = "" if text == str(number) else f"   (should be {number})"
        console.print(f"  {' '.join(in_words(number))} -> [bold]{text}[/]{mark}", highlight=False)
    longest = max(unseen, key=lambda number: len(in_words(number)))
    console.print("\nWhere the decoder looked while it wrote each digit (last layer, mean of the heads):\n")
    console.print(picture(model, longest), highlight=False, markup=False)


def train(model: LanguageModel, numbers: list[int], steps: int, seed: int, console: Console) -> None:
    """Adam with a short warm-up and a linear descent to zero."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 50, (steps - n) / steps))
    columns = (TextColumn("training"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    model.train()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for step in range(1, steps + 1):
            total, tokens, _, nll = model.loss(translation([pair(n) for n in rng.sample(numbers, 64)], BOS, EOS))
            (total / tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            progress.update(task, advance=1, loss=(nll / tokens).item())
            if not console.is_terminal and step % max(1, steps // 5) == 0:
                console.print(f"step {step}: loss {(nll / tokens).item():.3f}", highlight=False)
    model.eval()


@torch.no_grad()
def write(model: LanguageModel, sources: list[list[int]]) -> list[str]:
    """Greedy decoding, one token a step."""
    source, seg = pad(sources)
    decoding = model.start(Batch(source, source=source, source_seg=seg), max_len=8)
    ids = torch.full((len(sources), 1), BOS)
    said: list[Tensor] = []
    for _ in range(7):
        ids = model.advance(ids, decoding).argmax(-1, keepdim=True)
        said.append(ids)
    texts = []
    for row in torch.cat(said, 1).tolist():
        end = row.index(EOS) if EOS in row else len(row)
        texts.append("".join(WORDS[i] for i in row[:end]))
    return texts


@torch.no_grad()
def picture(model: LanguageModel, number: int) -> str:
    """Cross-attention as a table of shades: words across, digits down."""
    trace = Trace()
    model.log_probs(translation([pair(number)], BOS, EOS), trace)
    weights = trace.weights["decoder.cross"][-1][0].mean(0)  # (T, S)
    words, digits = in_words(number), [*str(number), "end"]
    lines = ["      " + "  ".join(words)]
    for digit, row in zip(digits, weights, strict=True):
        cells = (" .:-=+*#%@"[min(9, int(10 * w))] * 3 for w in row.tolist())
        lines.append(f"{digit:>4}  " + "  ".join(f"{c:^{len(w)}}" for c, w in zip(cells, words, strict=True)))
    return "\n".join(lines)
