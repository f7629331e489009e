"""The same computation, faster: kernels, fused modules, prepacked weights, shared caches, search on the GPU.

`install` puts the fast form into a built model; parameter names, records and results stay the same. `remove` gives the
readable form of `regard.nn` back.
"""

from regard.fast.install import install, remove

__all__ = ["install", "remove"]
