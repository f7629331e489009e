"""The table that bench/defaults.py prints and the page docs/results/defaults.md, both made from its results file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

Result = Mapping[str, Any]

SYSTEMS = {
    "regard": "regard",
    "script": "Hugging Face script",
    "bag": "TF-IDF + logistic regression",
    "ngram": "n-gram",
}
METRICS = {  # name on the page, and whether lower is better
    "bleu": ("BLEU", False),
    "exact_match": ("exact match, %", False),
    "rougeL": ("ROUGE-L", False),
    "accuracy": ("accuracy, %", False),
    "nats_per_character": ("nats per character", True),
    "perplexity_per_word": ("perplexity per word", True),
}
INTRODUCTION = """\
# Accuracy with default options, compared with hand-written scripts

Written by `make bench-defaults` and `make bench-defaults-gpu` (`bench/defaults.py`); every run is a line of
`defaults.jsonl`. regard is trained with its files and `--time` alone. On the same machine and for the same seconds, it
is compared with what you would write instead:

- **Hugging Face script** (`bench/competitors/script.py`): MarianMTModel, BPE, AdamW with 300 warm-up steps and a cosine
  over the time, label smoothing 0.1, beam size 5.

  | | layers | width | subwords | tokens per batch |
  |---|---|--:|--:|--:|
  | CPU | 2 + 2 | 128 | 4,000 | 1,500 |
  | GPU, Europarl, bfloat16 | 6 + 6 | 512 | 16,000 | 16,384 |
  | GPU, other texts | 3 + 3 | 256 | 8,000 | 8,192 |

- **TF-IDF + logistic regression** (`bench/competitors/bag.py`, scikit-learn): tokenisation, words or words and bigrams,
  and C of 1 or 10, chosen on a tenth of the training text.
- **n-gram** (`bench/competitors/ngram.py`): modified interpolated Kneser-Ney of words or characters; the order is
  chosen on a tenth of the training text. It takes seconds, not the time of the row.

`bench/texts.py` makes the texts and their parts. Settings are chosen on validation parts or held-out training text;
test parts are for the final measurement. One exception: while TF-IDF + logistic regression was written, 16 of its
settings were scored on the test parts of TREC and of SST-2; the setting in use was chosen on training text.
tinyshakespeare is split as in nanoGPT: its last tenth is the validation text and is measured. The official validation
part of WikiText-2 is measured, and not used in training.

Runs on the H200 and on its host's cores ran at the same time. Up to three runs, of regard or of the Hugging Face
script, shared the GPU, so all of them are slower than alone. A commit with a + had changes that were committed next.

| column | meaning |
|---|---|
| BLEU | sacreBLEU of the default output of `regard translate` (13a; for Multi30k, which is tokenised: none) |
| perplexity per word | exp(nats of the text / (words + lines)), whatever the tokens are; a line end counts as a word |
| trivial | the baselines that the run itself prints |
| degenerate | outputs that reach the length limit or end in a loop |
| seconds | the whole command, from start to exit |
| several seeds | the mean, and the range |
"""


def newest(results: Iterable[Result]) -> list[Result]:
    """Return the results without those that a later result of the same run (text, system, device, ...) replaces."""
    keys = ("text", "part", "system", "device", "threads", "time", "seed")
    return list({tuple(result[key] for key in keys): result for result in results}.values())


def clock(seconds: float) -> str:
    """Return a training time as text, such as `90 s` or `5 min`."""
    return f"{seconds:g} s" if seconds < 60 or seconds % 60 else f"{seconds / 60:g} min"


def number(value: float) -> str:
    """Return a number with about three digits, such as 0.123, 1.68 or 28.3."""
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def spread(values: Sequence[float]) -> str:
    """Return the mean of scores, and with more than one seed, their minimum and maximum."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(mean(values))} ({number(min(values))} to {number(max(values))}, {len(values)} seeds)"


def score_cell(results: Sequence[Result], best: bool) -> str:
    """Return the mean score of one system, in bold if `best`, or the reason why there is no score."""
    scores = [result["score"] for result in results if result["score"] is not None]
    if scores:
        return f"**{spread(scores)}**" if best else spread(scores)
    return results[-1]["error"] if results else ""


def baselines_cell(baselines: Sequence[Mapping[str, Any]] | None, metric: str) -> str:
    """Return the names and scores of those trivial baselines of a run that were measured with `metric`."""
    cells = []
    for baseline in baselines or ():
        scores = baseline["metrics"]
        if metric == "nats_per_character" and "bits_per_byte" in scores:  # the same for ASCII text
            scores = scores | {metric: scores["bits_per_byte"] * math.log(2)}
        if metric in scores:
            cells.append(f"{baseline['name']} {number(scores[metric])}")
    return ", ".join(cells)


def seconds_cell(results: Sequence[Result]) -> str:
    """Return the longest training time in seconds, marked if it exceeds the requested time by more than 10 %."""
    done = [result for result in results if result["wall_seconds"] is not None]
    if not done:
        return ""
    longest = max(done, key=lambda result: result["wall_seconds"])
    over = longest["wall_seconds"] > 1.1 * longest["time"]
    return f"{longest['wall_seconds']:.0f}{' (over)' if over else ''}"


def table(results: Iterable[Result]) -> list[str]:
    """Return a Markdown table with one row per text and training time, and one column per system."""
    rows: dict[tuple[Any, ...], list[Result]] = {}
    for result in newest(results):
        rows.setdefault((result["text"], result["part"], result["time"], result["metric"]), []).append(result)
    systems = [name for name in SYSTEMS if any(each["system"] == name for row in rows.values() for each in row)]
    head = ["text", "time", "metric", *(SYSTEMS[name] for name in systems)]
    head += ["trivial", "degenerate, %", "steps", "seconds"]
    lines = [f"| {' | '.join(head)} |", f"|---|--:|---|{'--:|' * len(systems)}---|--:|--:|--:|"]
    for (text, part, time, metric), row in rows.items():
        title, less = METRICS[metric]
        of = {name: [result for result in row if result["system"] == name] for name in systems}
        means = {
            name: mean(scores)
            for name, each in of.items()
            if (scores := [result["score"] for result in each if result["score"] is not None])
        }
        best = (min if less else max)(means.values(), default=None)
        scores = [score_cell(of[name], name in means and means[name] == best) for name in systems]
        ours = of.get("regard", [])
        degenerate = [r["degenerate_percent"] for r in ours if r["degenerate_percent"] is not None]
        steps = [result["steps"] for result in ours if result["steps"] is not None]
        cells = [text if part == "test" else f"{text}.{part}", clock(time), f"{title}{', less is better' * less}"]
        cells += [
            *scores,
            baselines_cell(ours[-1]["baselines"], metric) if ours else "",
            f"{max(degenerate):.1f}" if degenerate else "",
            f"{mean(steps):,.0f}" if steps else "",
            seconds_cell(ours),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def runs_table(results: Iterable[Result]) -> list[str]:
    """Return a Markdown table with one row per run."""
    lines = [
        "| text | system | time | seed | score | steps | seconds | within 10 % | degenerate, % | commit |",
        "|---|---|--:|--:|--:|--:|--:|---|--:|---|",
    ]
    for result in newest(results):
        score, steps, wall = result["score"], result["steps"], result["wall_seconds"]
        within, degenerate = result["within_10_percent"], result["degenerate_percent"]
        cells = [
            result["text"],
            SYSTEMS[result["system"]],
            clock(result["time"]),
            str(result["seed"]),
            result["error"] if score is None else number(score),
            "" if steps is None else f"{steps:,}",
            "" if wall is None else f"{wall:.0f}",
            "" if within is None else "yes" if within else "no",
            "" if degenerate is None else f"{degenerate:.1f}",
            result["commit"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def machine(result: Result) -> str:
    """Return a description of the hardware that a result was measured on."""
    name = result["gpu"] or f"{result['cpu']}, {result['threads']} core{'' if result['threads'] == 1 else 's'}"
    return f"{'GPU' if result['device'] == 'cuda' else 'CPU'}: {name}"


def page(results: Sequence[Result]) -> str:
    """Return docs/results/defaults.md: per machine, a table and a list of all runs. Only test scores are published."""
    published = newest(result for result in results if result["part"] == "test")
    machines = dict.fromkeys(machine(result) for result in published)
    lines = [INTRODUCTION.rstrip("\n")]
    for name in machines:
        here = [result for result in published if machine(result) == name]
        versions = {version: None for result in here for version in [_versions(result)]}
        lines += ["", f"## {name}", "", *table(here), "", f"With {'; '.join(versions)}.", "", "### Scores per run", ""]
        lines += runs_table(here)
    return "\n".join(lines) + "\n"


def _versions(result: Result) -> str:
    return ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
