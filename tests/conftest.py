"""Shapes in signatures are checked while tests run: a wrong one fails where it is passed, with a sentence."""

from importlib.util import find_spec

from jaxtyping import install_import_hook

# A lent GPU machine has no beartype; `make setup` always installs it.
if find_spec("beartype"):
    install_import_hook("regard", "beartype.beartype")
