"""Faster forms of the modules in `regard.nn`: kernels, fused modules, prepacked weights, shared caches, GPU search.

`install` replaces the modules in a built model by faster ones. Parameter names, the JSON record of the model and
results stay the same. `remove` restores the readable modules.
"""

from regard.fast.install import install, remove

__all__ = ["install", "remove"]
