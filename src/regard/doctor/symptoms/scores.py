"""The scores of a run: trivial baselines, the validation text, and how training ended."""

from collections.abc import Iterator

import numpy as np

from regard.data.token_store import Column
from regard.doctor.finding import Finding, share
from regard.doctor.run_record import RunRecord
from regard.errors import RegardError
from regard.evaluation import baselines
from regard.evaluation.validation import criterion_of
from regard.runs.train import inside_warmup

MANY, MOST = 0.01, 0.3  # share of validation examples in the training text that is a warning, and an error
PADDED = 0.5  # share of padding above which there is a note


def worse_than_baseline(run: RunRecord) -> Iterator[Finding]:
    """Find a model that is worse than a trivial baseline."""
    if not run.scores or run.step <= run.warmup:
        return
    try:
        criterion = criterion_of(run.recipe.train, run.recipe.data.objective, run.trust_code)
    except RegardError:  # a metric of the user's own code, or of a package that is not installed
        return
    sentences: list[str] = []
    baselines.compare(run.folder, run.scores, criterion, sentences.append)
    for sentence in sentences:
        what, _, advice = sentence.removeprefix("warning: ").partition("; ")
        finished = run.end is not None and run.end.get("finished")
        yield Finding("baselines", "warning" if finished else "note", what, advice=advice)


def leak(run: RunRecord) -> Iterator[Finding]:
    """Find validation examples that are in the training text, by comparing token ids."""
    data = run.data
    if data is None or data.valid is None or not data.valid.rows or data.objective.stream:
        return
    inputs = data.objective.columns[0]
    known = {row.tobytes() for table in data.train for row in _rows(table[inputs])}
    found = [i for i, row in enumerate(_rows(data.valid[inputs])) if row.tobytes() in known]
    if not found:
        return
    total = data.valid.rows
    level = "error" if len(found) > MOST * total else "warning" if len(found) > MANY * total else "note"
    message = f"{len(found):,} of {total:,} validation examples ({share(len(found), total)}) occur in the training text"
    yield Finding(
        "validation text",
        level,
        message if level == "note" else f"the validation text leaks: {message}",
        tuple(" | ".join(data.valid_texts[i]) for i in found[:3] if i < len(data.valid_texts)),
        "" if level == "note" else "remove them from the training text; the scores are better than on unseen text",
    )


def _rows(column: Column) -> Iterator[np.ndarray]:
    return (np.asarray(column[i]).astype(np.uint32) for i in range(len(column)))


def ending(run: RunRecord) -> Iterator[Finding]:
    """State how training ended, if it did not finish."""
    end, latest = run.end, run.folder.steps()
    resume = f"continue: regard resume {run.folder.path}"
    if end is None:
        saved = f"the last checkpoint is of step {latest[-1]:,}" if latest else "there is no checkpoint"
        message = f"training runs, or was killed, at step {run.step:,} of {run.steps:,}; {saved}"
        yield Finding("ending", "note", message, advice=f"if it does not run any more, {resume}")
    elif not end.get("finished"):
        why = str(end.get("why", "")).split(". Continue")[0]
        yield Finding("ending", "note", f"training stopped at step {run.step:,} of {run.steps:,}: {why}", advice=resume)
        warning = inside_warmup(run.recipe.train, run.step)
        if warning:
            yield Finding("ending", "warning", warning.removeprefix("warning: ").split("; ")[0], advice=resume)
    padding = [value for _, value in run.curve("step", "padding")]
    if padding and float(np.mean(padding)) > PADDED:
        yield Finding(
            "ending",
            "note",
            f"{np.mean(padding):.0%} of the positions are padding",
            advice="texts of very different lengths share batches; raise data.batching.tokens or shorten data.max_len",
        )
