"""Faster forms of the modules of `regard.nn`: kernels, fused modules, prepacked weights, shared caches, GPU search.

`install` puts the fast form into a built model; parameter names, records and results stay the same. `remove` restores
the readable form.
"""

from regard.fast.install import install, remove

__all__ = ["install", "remove"]
