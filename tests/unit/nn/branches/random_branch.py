"""Branches with random weights, for tests of their formulas."""

from typing import Any

from torch import nn

from regard.nn.core import Site


def branch_of(spec: Any, site: Site) -> Any:
    """Return a branch with random weights, biases and gains, so that a formula without one of them fails."""
    branch = spec.build(site)
    for parameter in branch.parameters():
        nn.init.normal_(parameter, 0.0, 0.5)
    return branch
