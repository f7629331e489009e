"""Contrastive attribution for a trained model: which words of the input favour one next word over another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.batch import Batch, translation
from regard.data.tokenizer import Tokenizer
from regard.errors import DataError, SpecError
from regard.inspection import attribution
from regard.models.base import LanguageModel
from regard.runs.trained_model import TrainedModel, load


@dataclass(frozen=True, repr=False)
class Contrast:
    """The contribution of every input token to logit(token) - logit(foil), by side ("source" and "target")."""

    token: str
    foil: str
    difference: float  # of the logits
    tokens: Mapping[str, Sequence[str]]
    scores: Mapping[str, Tensor]

    def __repr__(self) -> str:
        lines = [f"{self.token} and not {self.foil}: difference of the logits {self.difference:.2f}"]
        for side, names in self.tokens.items():
            shown = (f"{name} {score:+.2f}" for name, score in zip(names, self.scores[side].tolist(), strict=True))
            lines.append(f"  {side:<8}" + "  ".join(shown))
        return "\n".join(lines)


def contrast(run: TrainedModel | str | Path, text: str, word: str, foil: str, prefix: str = "") -> Contrast:
    """Return how much each input token favours `word` over `foil` as the next word (gradient x input).

    A translation model reads `text` as its source, and its output so far is `prefix`. A language model reads `text`. If
    the words have several subwords, the first subwords in which they differ are compared. The subwords before these are
    appended to the input.
    """
    run = run if isinstance(run, TrainedModel) else load(run)
    model = run.model
    if not isinstance(model, LanguageModel):
        raise DataError(f"{run.path} holds a classifier, which has no next word")
    translates = run.command == "translate"
    if prefix and not translates:
        raise SpecError("prefix", "is the output of a translation model so far; append it to the text")
    before = prefix if translates else text
    read, own, other = first_difference(run.tokenizer, before, word, foil)
    if translates:
        source = run.tokenizers.get("source", run.tokenizer)
        batch = translation([(source.encode(text), read)], bos=run.tokenizer.bos, eos=source.eos)
        names = {"source": source.tokens(batch.source[0].tolist())} if batch.source is not None else {}
    else:
        ids = [*run.begin, *read]
        if not ids:
            raise DataError("text: is empty, and this model needs a token to begin with")
        batch, names = Batch(torch.tensor([ids])), {}
    names["target"] = run.tokenizer.tokens(batch.target[0].tolist())
    batch = batch.to(run.device)
    scores = attribution.contrast(model, batch, batch.target.shape[1] - 1, own, other)
    if set(scores) != set(names):  # a decoder-only translator embeds one sequence, the source and then the target
        scores = dict(zip(names, scores["target"].split([len(each) for each in names.values()], 1), strict=True))
    with torch.no_grad():
        logits = model.logits(batch)[0, -1]
    words = run.tokenizer.tokens([own, other])
    cut = {side: score[0].cpu() for side, score in scores.items()}
    return Contrast(words[0], words[1], float(logits[own] - logits[other]), names, cut)


def first_difference(tokenizer: Tokenizer, before: str, word: str, foil: str) -> tuple[list[int], int, int]:
    """Return the tokens of the text `before` and of the common beginning of both words, and the next token of each."""
    own, other = (tokenizer.encode(f"{before} {each}" if before else each) for each in (word, foil))
    common = next((n for n, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
    if common is None:
        raise SpecError("foil", f"the tokens of {word!r} and {foil!r} do not differ, or one begins with the other")
    return own[:common], own[common], other[common]
