"""Text classification with a bag of words: TF-IDF and logistic regression (scikit-learn).

    python bench/competitors/bag.py X.train X.test --out bag.json

Three settings are chosen on a tenth of the training text: the tokenisation (scikit-learn's words of two letters or
more, or all words and punctuation), words with or without bigrams, and C of 1 or 10. The final classifier is trained on
the whole training text. Lines of the files are label<TAB>text. The output is one JSON object: the label of every test
line, the chosen settings, and the times in seconds.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

START = time.perf_counter()
WORDS = (r"(?u)\b\w\w+\b", r"(?u)\w+|[^\w\s]")
CHOICES = [{"word": word, "ngrams": n, "C": C} for word in WORDS for n in (1, 2) for C in (1.0, 10.0)]
Example = tuple[str, str]


def examples_of(path: Path) -> list[Example]:
    """Return the pair (label, text) of every line."""
    rows = (line.split("\t", 1) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return [(row[0], row[1]) for row in rows]


def fitted(examples: Sequence[Example], word: str, ngrams: int, C: float) -> Any:
    """Return a classifier trained on the examples."""
    text, linear = import_module("sklearn.feature_extraction.text"), import_module("sklearn.linear_model")
    vectorizer = text.TfidfVectorizer(ngram_range=(1, ngrams), token_pattern=word)
    regression = linear.LogisticRegression(C=C, max_iter=1000)
    pipeline = import_module("sklearn.pipeline").make_pipeline(vectorizer, regression)
    return pipeline.fit([text for _, text in examples], [label for label, _ in examples])


def accuracy(classifier: Any, examples: Sequence[Example]) -> float:
    """Return the percentage of examples that are classified correctly."""
    labels = classifier.predict([text for _, text in examples])
    return 100 * sum(label == right for label, (right, _) in zip(labels, examples, strict=True)) / len(examples)


def main() -> None:
    """Choose the settings, train, classify the test file, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    examples = examples_of(options.train)
    shuffled = random.Random(options.seed).sample(examples, len(examples))
    held_out = len(shuffled) // 10
    scores = [accuracy(fitted(shuffled[held_out:], **choice), shuffled[:held_out]) for choice in CHOICES]
    choice = CHOICES[scores.index(max(scores))]
    classifier = fitted(examples, **choice)
    trained = time.perf_counter() - START
    labels = classifier.predict([text for _, text in examples_of(options.test)])
    results = {
        "steps": None,
        "train_seconds": trained,
        "decode_seconds": time.perf_counter() - START - trained,
        "choice": choice | {"held_out_accuracy": max(scores)},
        "outputs": [{"text": str(label), "ended": True} for label in labels],
    }
    options.out.write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
