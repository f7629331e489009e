"""Write docs/results/table.md: an ablation over the rows of Narang et al. 2021, next to the published numbers.

python docs/results/table.py runs/table
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
BASE = "base"


def ranks(values: list[float]) -> np.ndarray:
    """Return the ranks of the values, starting at 0. Equal values get the mean of their ranks."""
    array = np.asarray(values)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])


def correlation(a: list[float], b: list[float], draws: int = 20_000) -> tuple[float, float]:
    """Return (Spearman's rank correlation, p-value of a permutation test with `draws` permutations)."""
    x, y = ranks(a), ranks(b)
    if not x.std() or not y.std():
        return 0.0, 1.0
    rho = float(np.corrcoef(x, y)[0, 1])
    rng = np.random.default_rng(0)
    extreme = sum(abs(np.corrcoef(x, rng.permutation(y))[0, 1]) >= abs(rho) for _ in range(draws))
    return rho, (extreme + 1) / (draws + 1)


def page(table: dict[str, Any], published: dict[str, dict[str, str]]) -> str:
    """Return table.md as text, from our table.json and the published numbers by row name."""
    rows = {row["name"]: row for row in table["rows"]}
    rows["vanilla"] = rows.pop(BASE)
    metric: str = "BLEU" if table["metric"] == "bleu" else table["metric"]
    lines = [
        "# The 52 modifications of Narang et al. (2021), trained on Multi30k",
        "",
        "Written by `make table` (`docs/results/table.py`), which continues if it was stopped. Left: the base of "
        "Narang et al. 2021 at 16.7 million parameters (`narang_small`) on Multi30k en-de, "
        f"{table['steps']} steps of 4,096 tokens, {table['seeds']} seeds per row and {table['base_seeds']} of the "
        f"base, on {', '.join(table['devices'])}. Right: the published numbers, of 223 million parameters, C4, "
        "524,288 steps.",
        "",
        "Losses are nats per token on held-out text; early losses are those after an eighth of the steps; ± is the "
        "standard deviation over seeds. A verdict compares final losses, paired by seed, at a level of 5 % over all "
        "rows together (Holm), also if one row varies more than the others ([docs/ablation.md](../ablation.md)). An "
        f"effect of {table['detectable']:.3f} would be detected with 80 % power.{_apart(rows)}",
        "",
        f"| row | parameters | ops | steps/s | early loss | final loss | {metric} | effect | verdict "
        "| theirs: parameters | ops | steps/s | early | final | SuperGLUE | XSum | WebQ | WMT |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, theirs in published.items():
        lines.append("| " + " | ".join([f"`{name}`", *_ours(rows.get(name)), *_theirs(theirs)]) + " |")
    lines += ["", "## Rank correlation with the published results", ""]
    lines += _agreement(rows, published, metric)
    return "\n".join(lines) + "\n"


def _apart(rows: dict[str, Any]) -> str:
    """Return a sentence that names the rows that vary too much for the pooled variance, or an empty string."""
    effects = {name: row.get("effect") for name, row in rows.items()}
    names = [f"`{name}`" for name, effect in effects.items() if effect is not None and not effect["steady"]]
    return (
        f" Rows that vary far more than the others are compared by their own variance: {', '.join(names)}."
        if names
        else ""
    )


def _ours(row: dict[str, Any] | None) -> list[str]:
    if row is None or row["final"] is None:
        why = "not run yet" if row is None else row["verdict"]
        return [""] * 7 + [why]
    effect = row["effect"]
    return [
        f"{row['parameters'] / 1e6:.1f}M",
        f"{row['operations'] / 1e9:.2f}G",
        f"{row['speed']:.1f}",
        _mean(row["early"], 3),
        _mean(row["final"], 3),
        _mean(row["metric"], 1),
        "" if effect is None else f"{effect['effect']:+.3f}",
        row["verdict"] + (f" ({row['note']})" if row["note"] else ""),
    ]


def _mean(value: dict[str, float | None], digits: int) -> str:
    sd = "" if value["sd"] is None else f" ± {value['sd']:.{digits}f}"
    return f"{value['value']:.{digits}f}{sd}"


def _theirs(row: dict[str, str]) -> list[str]:
    early = f"{row['early']} ± {row['early_sd']}"
    scores = [row[name] for name in ("superglue", "xsum", "webq", "wmt")]
    return [f"{row['params_m']}M", f"{row['ops_t']}T", row["steps_s"], early, row["final"], *scores]


def _agreement(rows: dict[str, Any], published: dict[str, dict[str, str]], metric: str) -> list[str]:
    both = [name for name in published if name in rows and rows[name]["final"] is not None]
    if len(both) < 3:
        return ["Too few rows yet."]
    pairs = [
        ("final loss", "final loss", [rows[n]["final"]["value"] for n in both], [published[n]["final"] for n in both]),
        ("early loss", "early loss", [rows[n]["early"]["value"] for n in both], [published[n]["early"] for n in both]),
        ("final loss", "early loss", [rows[n]["final"]["value"] for n in both], [published[n]["early"] for n in both]),
        (metric, "WMT BLEU", [rows[n]["metric"]["value"] for n in both], [published[n]["wmt"] for n in both]),
    ]
    lines = [f"Spearman's rank correlation over the {len(both)} rows of both tables, with the base:", ""]
    lines += ["| ours | theirs | correlation | p-value |", "|---|---|--:|--:|"]
    for ours, theirs, a, b in pairs:
        rho, p = correlation(a, [float(value) for value in b])
        lines.append(f"| {ours} | {theirs} | {rho:+.2f} | {p:.4f} |")
    return lines


def main() -> None:
    """Read table.json from the folder of an ablation, and write table.md."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python docs/results/table.py FOLDER")
    table = json.loads((Path(sys.argv[1]) / "table.json").read_text(encoding="utf-8"))
    with open(HERE / "narang2021.tsv", encoding="utf-8", newline="") as file:
        published = {row["row"]: row for row in csv.DictReader(file, delimiter="\t")}
    (HERE / "table.md").write_text(page(table, published), encoding="utf-8")


if __name__ == "__main__":
    main()
