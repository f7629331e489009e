"""Write docs/results/heads.md: heads switched off, pruning, word alignment and attribution, on Multi30k.

    PYTHONPATH=src python docs/results/heads.py $REGARD_DATA --runs runs/heads --time 30m   # trains, measures, writes
    PYTHONPATH=src python docs/results/heads.py $REGARD_DATA --runs runs/heads --page       # writes from heads.json

Runs that exist already are used. Results are stored in heads.json after each part, and parts that are in it are not
measured again.
"""

import argparse
import gzip
import json
import random
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import sacrebleu
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import regard
from regard.inspection import head_plot
from regard.inspection.alignment import GoldAlignment, alignment_error_rate, diagonal_links
from regard.inspection.importance import head_values, importance_by_ablation, importance_by_gradient, mean_loss
from regard.inspection.interventions import Head, all_heads, scaled_heads, switched_off
from regard.inspection.pruning import least_important, pruned
from regard.runs.align import by_layer
from regard.runs.attribution import contrast
from regard.runs.heads import batches_of

HERE = Path(__file__).parent
STORED = HERE / "heads.json"
LOSS_TEXTS, BLEU_TEXTS = 400, 200
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
SEEDS = (1, 2, 3)
TUNED_SHARE, TUNED_STEPS = 2, 150
IBM_PAIRS = 10_000
CONTRASTS = (
    ("a woman in a red dress is singing .", "eine", "frau", "mann"),
    ("two dogs are playing in the snow .", "zwei", "hunde", "kinder"),
    ("a man is riding a bike down the street .", "ein mann fährt auf einem", "fahrrad", "motorrad"),
)


def main() -> None:
    """Train the models if necessary, measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="REGARD_DATA")
    parser.add_argument("--runs", type=Path, default=Path("runs/heads"), help="folder of the runs en-de and en-fr")
    parser.add_argument("--time", default="30m", help="training time of each model")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    results = json.loads(STORED.read_text()) if STORED.exists() else {}
    if not options.page:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, Path(folder), results)
    (HERE / "heads.md").write_text(page(results))


def measure(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Measure every part that `results` lacks, and store it."""
    texts = {
        (part, side): unpack(options.data, folder, part, side)
        for part in ("train", "val")
        for side in ("en", "de", "fr")
    }
    runs = {side: trained(options.runs / f"en-{side}", texts, side, options.time) for side in ("de", "fr")}
    pairs = list(zip(*(Path(texts["val", side]).read_text().splitlines() for side in ("en", "de")), strict=True))
    gold = {"enfr": hansards(options.data, folder), "smultron": smultron(options.data, folder)}
    parts: dict[str, Callable[[], Any]] = {
        "models": lambda: {side: described(run) for side, run in runs.items()},
        "off": lambda: heads_off(runs["de"], pairs),
        "curve": lambda: curve(runs["de"], pairs),
        "attribution": lambda: [repr(contrast(runs["de"], s, word, foil, p)) for s, p, word, foil in CONTRASTS],
        "align_fr": lambda: aligned(runs["fr"], *gold["enfr"]),
        "align_de": lambda: aligned(runs["de"], *gold["smultron"]),
        "align_own": lambda: agreement(runs["de"], texts),
        "bleu": lambda: bleu_of_pruned(runs["de"], pairs),
        "off_bleu": lambda: bleu_off(runs["de"], pairs),
        "tuned": lambda: fine_tuned(runs["de"], folder, texts, pairs),
    }
    for name, part in parts.items():
        if name not in results:
            print(name, flush=True)
            results[name] = part()
            STORED.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def unpack(data: Path, folder: Path, part: str, side: str) -> str:
    """Write the text of one side of a split to a file, and return its path."""
    path = folder / f"{part}.{side}"
    with gzip.open(data / "multi30k" / "tok" / f"{part}.lc.norm.tok.{side}.gz", "rt", encoding="utf-8") as file:
        path.write_text(file.read(), encoding="utf-8")
    return str(path)


def trained(path: Path, texts: dict[tuple[str, str], str], side: str, time: str) -> regard.TrainedModel:
    """Return the model in the run folder `path`, which is trained now if there is none."""
    if path.exists():
        return regard.load(path, "cpu")
    files: dict[str, Any] = {"source": texts["train", "en"], "target": texts["train", side]}
    valid: dict[str, Any] = {"valid_source": texts["val", "en"], "valid_target": texts["val", side]}
    return regard.train(path, **files, **valid, time=time, device="cpu", quiet=False)


def described(run: regard.TrainedModel) -> dict[str, Any]:
    """Return the size, the step and the validation scores of a model."""
    return {"parameters": run.parameters, "step": run.step, "finished": run.finished, "scores": run.scores}


def translated(run: regard.TrainedModel, pairs: list[tuple[str, str]]) -> tuple[float, float]:
    """Return BLEU and chrF of greedy translations of the first pairs; the text is tokenised already."""
    some = pairs[:BLEU_TEXTS]
    outputs = run.translate([source for source, _ in some], beam=1, batch_size=50)
    references = [[target for _, target in some]]
    bleu = sacrebleu.corpus_bleu(outputs, references, tokenize="none", force=True)
    return bleu.score, sacrebleu.corpus_chrf(outputs, references).score


def heads_off(run: regard.TrainedModel, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the loss of the model, and both kinds of importance of every head."""
    batches = batches_of(run, pairs[:LOSS_TEXTS])
    ablation = head_values(importance_by_ablation(run.model, batches))
    gradient = head_values(importance_by_gradient(run.model, batches))
    return {
        "loss": mean_loss(run.model, batches),
        "ablation": {str(head): value for head, value in ablation.items()},
        "gradient": {str(head): value for head, value in gradient.items()},
    }


def bleu_off(run: regard.TrainedModel, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return BLEU and chrF with each head off."""
    scores = {"none": translated(run, pairs)}
    for head in all_heads(run.model):
        with scaled_heads(run.model, switched_off([head])):
            scores[str(head)] = translated(run, pairs)
    return scores


def rankings(run: regard.TrainedModel, pairs: list[tuple[str, str]]) -> dict[str, tuple[Any, bool]]:
    """Return the importance of all heads, and whether it is normalised by layer, for each order of removal."""
    batches = batches_of(run, pairs[:LOSS_TEXTS])
    orders: dict[str, tuple[Any, bool]] = {
        "gradient": (importance_by_gradient(run.model, batches), True),
        "ablation": (importance_by_ablation(run.model, batches), False),
    }
    for seed in SEEDS:
        rng = random.Random(seed)
        shuffled = {k: [each.clone() for each in layers] for k, layers in orders["ablation"][0].items()}
        for each in (layer for layers in shuffled.values() for layer in layers):
            each.copy_(each.new_tensor([rng.random() for _ in range(len(each))]))
        orders[f"random {seed}"] = shuffled, False
    return orders


def curve(run: regard.TrainedModel, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return, for each order of removal and each share, the removed heads, and the loss without them."""
    batches, found = batches_of(run, pairs[:LOSS_TEXTS]), {}
    for name, (importance, normalised) in rankings(run, pairs).items():
        found[name] = []
        for share in SHARES:
            removed = least_important(run.model, importance, share, normalised)
            with scaled_heads(run.model, switched_off(removed)):
                found[name].append({"heads": [str(head) for head in removed], "loss": mean_loss(run.model, batches)})
    return found


def bleu_of_pruned(run: regard.TrainedModel, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return BLEU, chrF and the size of pruned models, for removal by gradient, by ablation and at random."""
    stored = json.loads(STORED.read_text())["curve"]
    found: dict[str, Any] = {"whole": [*translated(run, pairs), run.parameters]}
    plain = regard.load(run.path, "cpu", plain=True)
    for name in ("gradient", "ablation", "random 1"):
        found[name] = []
        for entry in stored[name]:
            model = pruned(plain.model, [Head.parse(head) for head in entry["heads"]])
            plain_run = regard.TrainedModel(**{**vars(plain), "model": model})
            found[name].append([*translated(plain_run, pairs), plain_run.parameters])
    return found


def fine_tuned(
    run: regard.TrainedModel, folder: Path, texts: dict[tuple[str, str], str], pairs: list[tuple[str, str]]
) -> dict[str, Any]:
    """Remove heads with `regard.prune`, fine-tune the smaller model, and return loss, BLEU and chrF at the end."""
    removed = json.loads(STORED.read_text())["curve"]["ablation"][TUNED_SHARE]["heads"]
    regard.prune(run, ",".join(removed), folder / "small")
    files: dict[str, Any] = {"source": texts["train", "en"], "target": texts["train", "de"]}
    valid: dict[str, Any] = {"valid_source": texts["val", "en"], "valid_target": texts["val", "de"]}
    tuned = regard.train(folder / "tuned", **files, **valid, start=folder / "small", steps=TUNED_STEPS, device="cpu")
    loss = mean_loss(tuned.model, batches_of(tuned, pairs[:LOSS_TEXTS]))
    return {"heads": len(removed), "loss": loss, "scores": translated(tuned, pairs)}


def aligned(run: regard.TrainedModel, source: Path, target: Path, gold: Path) -> dict[str, Any]:
    """Return the alignment error rate, precision and recall by layer and reading of the attention."""
    found = {}
    for query in ("output", "input"):
        scores = regard.align(run, source, target, gold=gold, query=query).scores
        found[query] = {name: [score.error_rate, score.precision, score.recall] for name, score in scores.items()}
    return found | {"sentences": len(gold.read_text().splitlines())}


def agreement(run: regard.TrainedModel, texts: dict[tuple[str, str], str]) -> dict[str, Any]:
    """Return the differences from statistical alignments of the validation text, by layer and reading of the attention.

    The reference is the intersection of the alignments of IBM model 1 in both directions (Brown et al. 1993).
    """
    pairs = {
        part: [
            (source.split(), target.split())
            for source, target in zip(
                *(Path(texts[part, side]).read_text("utf-8").splitlines() for side in ("en", "de")), strict=True
            )
        ]
        for part in ("train", "val")
    }
    some = pairs["val"][:LOSS_TEXTS]
    learn = pairs["train"][:IBM_PAIRS] + some
    forward, backward = ibm_model_1(learn), ibm_model_1([(target, source) for source, target in learn])
    gold = []
    for source, target in some:
        there = {(max(range(len(source)), key=lambda i: forward[source[i], word]), j) for j, word in enumerate(target)}
        back = {(i, max(range(len(target)), key=lambda j: backward[target[j], word])) for i, word in enumerate(source)}
        gold.append(GoldAlignment(frozenset(there & back), frozenset(there | back)))
    found: dict[str, Any] = {"sentences": len(some)}
    for query in ("output", "input"):
        layers = by_layer(run, [(" ".join(source), " ".join(target)) for source, target in some], query)
        layers["diagonal"] = [diagonal_links(len(source), len(target)) for source, target in some]
        scores = {name: alignment_error_rate(links, gold) for name, links in layers.items()}
        found[query] = {name: [score.error_rate, score.precision, score.recall] for name, score in scores.items()}
    return found


def ibm_model_1(pairs: list[tuple[list[str], list[str]]]) -> dict[tuple[str, str], float]:
    """Return the translation probabilities t(target word | source word) after five iterations of EM."""
    table: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
    for _ in range(5):
        counts: dict[tuple[str, str], float] = defaultdict(float)
        totals: dict[str, float] = defaultdict(float)
        for source, target in pairs:
            for word in target:
                shares = [table[each, word] for each in source]
                whole = sum(shares)
                for each, share in zip(source, shares, strict=True):
                    counts[each, word] += share / whole
                    totals[each] += share / whole
        table = defaultdict(float, {key: count / totals[key[0]] for key, count in counts.items()})
    return table


def hansards(data: Path, folder: Path) -> tuple[Path, Path, Path]:
    """Return files with the lowercased sentence pairs and the reference of the Hansards test set."""
    pairs = [line.split("|||") for line in (data / "align/enfr/enfr.src-tgt").read_text("utf-8").splitlines()]
    gold = (data / "align/enfr/enfr.gold").read_text("utf-8").splitlines()
    return written(
        folder,
        "enfr",
        [(en.lower().strip(), fr.lower().strip(), links) for (en, fr), links in zip(pairs, gold, strict=True)],
    )


def written(folder: Path, name: str, rows: list[tuple[str, str, str]]) -> tuple[Path, Path, Path]:
    """Write three files with one column of `rows` each, and return their paths."""
    paths = tuple(folder / f"{name}.{part}" for part in ("source", "target", "gold"))
    for path, column in zip(paths, zip(*rows, strict=True), strict=True):
        path.write_text("".join(f"{line}\n" for line in column), encoding="utf-8")
    return paths  # type: ignore[return-value]


def smultron(data: Path, folder: Path) -> tuple[Path, Path, Path]:
    """Return files with the sentence pairs and word links of the Smultron sample that are aligned one to one."""
    where = data / "align" / "smultron-de-en"
    words = {side: sentences(where / f"smultron_{side}_banana.xml") for side in ("en", "de")}
    links: dict[tuple[str, str], list[tuple[int, str, int]]] = defaultdict(list)
    for element in ElementTree.parse(where / "alignments_banana_de_en.xml").iter("align"):
        ids = {str(node.get("treebank_id")): str(node.get("node_id")) for node in element.iter("node")}
        if all(ids[side].split("_")[1] in words[side].get(ids[side].split("_")[0], {}) for side in ids):
            (en, i), (de, j) = ids["en"].split("_"), ids["de"].split("_")
            numbers = words["en"][en], words["de"][de]
            mark = "-" if element.get("type") == "good" else "p"
            links[en, de].append((numbers[0][i][0], mark, numbers[1][j][0]))
    partners = {side: defaultdict(set) for side in (0, 1)}
    for pair in links:
        for side in (0, 1):
            partners[side][pair[side]].add(pair[1 - side])
    rows = []
    for (en, de), own in links.items():
        if len(partners[0][en]) == len(partners[1][de]) == 1:
            texts = [" ".join(word.lower() for _, word in each.values()) for each in (words["en"][en], words["de"][de])]
            rows.append((texts[0], texts[1], " ".join(f"{i}{mark}{j}" for i, mark, j in own)))
    return written(folder, "smultron", rows)


def sentences(path: Path) -> dict[str, dict[str, tuple[int, str]]]:
    """Return the words of every sentence of a treebank, without tags: id of the word -> (number from 1, word)."""
    found = {}
    for sentence in ElementTree.parse(path).iter("s"):
        words = [(str(t.get("id")).split("_")[1], str(t.get("word")).replace(" ", "")) for t in sentence.iter("t")]
        kept = [(name, word) for name, word in words if word and not word.startswith("<")]
        found[str(sentence.get("id"))] = {name: (n, word) for n, (name, word) in enumerate(kept, start=1)}
    return found


def page(results: dict[str, Any]) -> str:
    """Return heads.md as text, and draw the pictures."""
    lines = [*HEADER, *models_section(results["models"])]
    for name, section in SECTIONS.items():
        if name in results:
            lines += ["", *section(results)]
    return "\n".join(lines) + "\n"


HEADER = [
    "# Attention heads of translation models",
    "",
    "Written by `docs/results/heads.py`. It trains two small models on the official lowercased, tokenised text of",
    "Multi30k (29,000 pairs) with `regard train --time 48m` and no other setting, on one thread of a CPU that other",
    "programs used at the same time, and measures their attention heads on the validation text. Layers and heads are",
    "counted from 0. One seed was trained, for less time than usual: small differences are noise.",
]


def models_section(models: dict[str, Any]) -> list[str]:
    """Return the table of the models."""
    lines = ["", "| model | parameters | steps | validation loss | BLEU (greedy) |", "|---|---|---|---|---|"]
    for side, facts in models.items():
        scores = facts["scores"]
        lines.append(
            f"| en-{side}, 2 + 2 layers, d_model 128, 4 heads | {facts['parameters']:,} | {facts['step']:,} | "
            f"{scores['loss']:.3f} | {scores['bleu']:.1f} |"
        )
    return lines


def off_section(results: dict[str, Any]) -> list[str]:
    """Return the effects of single heads, and draw them."""
    off, bleu = results["off"], results.get("off_bleu", {})
    values = {tuple(Head.parse(name)): value for name, value in off["ablation"].items()}
    head_plot.write(values, HERE / "heads-off.png", "increase of the loss")  # type: ignore[arg-type]
    names = list(off["ablation"])
    gradient = list(off["gradient"])
    lines = [
        "## One head off",
        "",
        f"The loss of the en-de model on {LOSS_TEXTS} validation pairs is {off['loss']:.3f} per token. The picture",
        "shows how much it increases if one head is switched off (`regard heads --by ablation`, `scaled_heads`).",
        "",
        "![Increase of the loss with each head off](heads-off.png)",
        "",
        f"The largest effect is that of {names[-1]} (+{off['ablation'][names[-1]]:.3f}), the smallest that of "
        f"{names[0]} ({off['ablation'][names[0]]:+.3f}). Spearman's rank correlation between importance by gradient "
        f"and by ablation is {spearman(names, gradient):.2f}.",
    ]
    if bleu:
        whole = bleu["none"]
        lines += [
            "",
            f"BLEU and chrF of greedy translations of the first {BLEU_TEXTS} validation sentences, for the whole "
            "model, and their changes without one head:",
            "",
            "| head off | loss | BLEU | chrF |",
            "|---|---|---|---|",
            f"| none | {off['loss']:.3f} | {whole[0]:.1f} | {whole[1]:.1f} |",
        ]
        for name in reversed(names):
            score = bleu[name]
            lines.append(
                f"| {name} | {off['ablation'][name]:+.3f} | {score[0] - whole[0]:+.1f} | {score[1] - whole[1]:+.1f} |"
            )
    return lines


def spearman(first: list[str], second: list[str]) -> float:
    """Return Spearman's rank correlation of two orders of the same names."""
    n = len(first)
    return 1 - 6 * sum((rank - second.index(name)) ** 2 for rank, name in enumerate(first)) / (n * (n * n - 1))


def pruning_section(results: dict[str, Any]) -> list[str]:
    """Return the curve of the loss and of BLEU over the share of removed heads, and draw it."""
    found, bleu, loss = results["curve"], results.get("bleu"), results["off"]["loss"]
    draw_curve(found, loss)
    randoms = [[found[f"random {seed}"][i]["loss"] for seed in SEEDS] for i in range(len(SHARES))]
    lines = [
        "## Pruning",
        "",
        "`regard prune` removes heads with their parameters; each layer keeps at least one. Heads are removed in the",
        f"order of importance by gradient, by ablation, or at random (mean of {len(SEEDS)} orders), without any",
        f"training afterwards. The loss is measured on the {LOSS_TEXTS} pairs that also determined the order.",
        "",
        "![Loss over the share of removed heads](heads-pruning.png)",
        "",
        "| heads removed | loss, gradient | loss, ablation | loss, random |"
        + (" parameters | BLEU / chrF, gradient | BLEU / chrF, ablation | BLEU / chrF, random |" if bleu else ""),
        "|---|---|---|---|" + ("---|---|---|---|" if bleu else ""),
        f"| none | {loss:.3f} | {loss:.3f} | {loss:.3f} |"
        + (f" {bleu['whole'][2]:,} |" + f" {bleu['whole'][0]:.1f} / {bleu['whole'][1]:.1f} |" * 3 if bleu else ""),
    ]
    for i in range(len(SHARES)):
        count = len(found["gradient"][i]["heads"])
        losses = [found["gradient"][i]["loss"], found["ablation"][i]["loss"], sum(randoms[i]) / len(SEEDS)]
        row = f"| {count} of 24 |" + "".join(f" {loss:.3f} |" for loss in losses)
        if bleu:
            row += f" {bleu['gradient'][i][2]:,} |"
            row += "".join(
                f" {bleu[name][i][0]:.1f} / {bleu[name][i][1]:.1f} |" for name in ("gradient", "ablation", "random 1")
            )
        lines.append(row)
    if bleu:
        lines += [
            "",
            f"BLEU and chrF are those of the pruned models on the first {BLEU_TEXTS} validation sentences, and for the "
            "first random order.",
        ]
    if "tuned" in results:
        tuned = results["tuned"]
        lines += [
            "",
            f"After {TUNED_STEPS} steps of `regard train --from`, the model without {tuned['heads']} heads (order by "
            f"ablation) has a loss of {tuned['loss']:.3f}, BLEU {tuned['scores'][0]:.1f} and "
            f"chrF {tuned['scores'][1]:.1f}.",
        ]
    return lines


def draw_curve(found: dict[str, Any], loss: float) -> None:
    """Draw the loss over the share of removed heads."""
    figure = Figure(figsize=(5, 3), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = {"gradient": "C0", "ablation": "C1", "random": "0.6"}
    shown = set()
    for name, entries in found.items():
        kind = name.split()[0]
        shares = [0.0, *(len(entry["heads"]) / 24 for entry in entries)]
        label = None if kind in shown else kind
        shown.add(kind)
        axes.plot(shares, [loss, *(entry["loss"] for entry in entries)], color=colours[kind], marker=".", label=label)
    axes.set_xlabel("share of heads removed")
    axes.set_ylabel("validation loss per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "heads-pruning.png")


def alignment_section(results: dict[str, Any]) -> list[str]:
    """Return the tables of alignment error rates."""
    lines = [
        "## Word alignment",
        "",
        "`regard align` links each target word to the source word with most attention. With `--query output`, the",
        "attention is that of the step that predicts the word; with `--query input`, that of the step that reads it.",
        "The references are of **other domains** than the captions on which the models were trained: debates of the",
        "Canadian parliament (Hansards, en-fr), and a text on the certification of bananas (Smultron, en-de, sentences",
        "aligned one to one); both are lowercased here. fast_align, trained on the Hansards, has 10.5 % on en-fr. The",
        "diagonal links words at the same relative position.",
        "",
        "There is no reference for captions. The first table compares with statistical alignments instead, which have",
        f"errors of their own: IBM model 1, trained on {IBM_PAIRS:,} training pairs in both directions. Links in both",
        "directions count as sure, the others as possible.",
    ]
    names = {
        "align_own": "Multi30k validation text en-de, compared with the statistical alignments,",
        "align_fr": "Hansards en-fr,",
        "align_de": "Smultron en-de,",
    }
    for key, title in names.items():
        if key not in results:
            continue
        found = results[key]
        lines += [
            "",
            f"{title} {found['sentences']} sentence pairs:",
            "",
            "| attention | query | error rate | precision | recall |",
            "|---|---|---|---|---|",
        ]
        for layer in (name for name in found["output"] if name != "diagonal"):
            for query in ("output", "input"):
                error, precision, recall = found[query][layer]
                where = "mean of the layers" if layer == "mean" else f"layer {layer}"
                lines.append(f"| {where} | {query} | {error:.1%} | {precision:.1%} | {recall:.1%} |")
        error, precision, recall = found["output"]["diagonal"]
        lines.append(f"| diagonal | | {error:.1%} | {precision:.1%} | {recall:.1%} |")
        best = min((found[q][name][0], name, q) for q in ("output", "input") for name in found[q] if name != "diagonal")
        where = "the mean of the layers" if best[1] == "mean" else f"layer {best[1]}"
        lines += ["", f"Lowest error rate of attention: {best[0]:.1%} ({where}, {best[2]}); diagonal: {error:.1%}."]
    return lines


def attribution_section(results: dict[str, Any]) -> list[str]:
    """Return the examples of contrastive attribution."""
    lines = [
        "## Which input tokens favour one word over another",
        "",
        "`regard.runs.attribution.contrast` (gradient x input of the difference of two logits), for three next words",
        "of the en-de model. Positive numbers favour the first word. A model is not linear, so the numbers do not add",
        "up to the difference.",
    ]
    for (source, prefix, word, foil), text in zip(CONTRASTS, results["attribution"], strict=True):
        lines += ["", f'"{source}", after "{prefix}": {word} or {foil}?', "", "```text", *wrapped(text), "```"]
    return lines


def wrapped(text: str) -> list[str]:
    """Return the lines of a text, wrapped to 110 characters."""
    lines = []
    for line in text.splitlines():
        indent = " " * 10 if line.startswith(" ") else ""
        lines += textwrap.wrap(line, 110, subsequent_indent=indent, replace_whitespace=False) or [""]
    return lines


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "off": off_section,
    "curve": pruning_section,
    "align_fr": alignment_section,
    "attribution": attribution_section,
}

if __name__ == "__main__":
    main()
