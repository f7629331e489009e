"""Early stopping: what counts as an improvement, and how long training continues without one."""

from regard.training.ranking import ERROR, LOSS, Criterion, Metrics, cost


def improvements(reached: Metrics, metrics: Metrics, criterion: Criterion) -> Metrics:
    """Return the criterion and the loss, each only if better than in `reached`; the criterion with its standard error.

    Either improvement is progress: a model whose loss falls still learns, even if none of its outputs is right yet.
    """
    better = [each.name for each in (criterion, LOSS) if cost(metrics, each) < cost(reached, each)]
    if criterion.name in better and ERROR in metrics:
        better.append(ERROR)
    return {name: metrics[name] for name in better}


def should_stop(validations: int, patience: int | None) -> bool:
    """Return whether training stops after this number of validations in a row without improvement.

    With a patience of 0 or None, training never stops early.
    """
    return bool(patience) and validations >= (patience or 0)
