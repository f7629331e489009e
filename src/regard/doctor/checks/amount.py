"""The amount of text, and the tokenizer and vocabulary that suit it."""

from collections.abc import Iterator

from regard.data.choices import choose_tokenizer
from regard.data.tokenizer import BPE
from regard.data.vocabulary_size import choose_vocab
from regard.doctor.case import Case
from regard.doctor.finding import Finding

FEW = {"sequence_to_sequence": 500, "classifier": 50, "language_model": 100}  # examples below which there is a warning


def amount(case: Case) -> Iterator[Finding]:
    """State the size of the text and the vocabulary that suits it; find text that is too short to learn from."""
    objective, size = case.objective, case.train.size
    words = sum(len(text.split()) for name in case.names for text in case.train.columns[name])
    if size < FEW[objective.model]:
        yield Finding(
            "amount",
            "warning",
            f"the training text has only {size:,} examples",
            advice="collect more text; for a trial, regard demo trains on a corpus that needs no download",
        )
    vocab = choose_vocab(words, objective.languages)
    records = list(zip(*case.train.columns.values(), strict=True))
    given = case.request.data.tokenizer
    choice = choose_tokenizer(objective, records) if given is None else None
    if choice is not None and isinstance(choice.tokenizer, BPE):
        suited = f"; {vocab:,} subwords suit it"
    elif choice is not None:
        suited = f"; {choice.why}"
    else:
        suited = "; the tokenizer is as given"
        asked = getattr(given, "vocab", None)
        if asked and asked > 2 * vocab:
            yield Finding(
                "amount",
                "warning",
                f"a vocabulary of {asked:,} is large for {words:,} words of text: many subwords would be rare",
                advice=f"leave data.tokenizer out, or set data.tokenizer.vocab={vocab}",
            )
    yield Finding("amount", "note", f"the training text has {size:,} examples and {words:,} words{suited}")
