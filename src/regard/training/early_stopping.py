"""Early stopping: stop training after several validations without an improvement."""

from regard.training.ranking import ERROR, LOSS, Criterion, Metrics, cost


def improvements(reached: Metrics, metrics: Metrics, criterion: Criterion) -> Metrics:
    """Return the criterion and the loss from `metrics`, each only if it is better than its best value in `reached`.

    If the criterion improved, its standard error is returned too. An improvement of either metric counts, because a
    model with falling loss is still learning, even if none of its outputs is right yet.
    """
    better = [each.name for each in (criterion, LOSS) if cost(metrics, each) < cost(reached, each)]
    if criterion.name in better and ERROR in metrics:
        better.append(ERROR)
    return {name: metrics[name] for name in better}


def should_stop(validations: int, patience: int | None) -> bool:
    """Return whether training stops after `validations` consecutive validations without improvement.

    With a patience of 0 or None, training never stops early.
    """
    return bool(patience) and validations >= (patience or 0)
