"""Faster implementations of modules: kernels, fused modules, prepacked weights, shared caches, beam search on the GPU.

`install` replaces modules of a model by faster implementations. Parameter names, the model's spec and its results stay
the same. `remove` restores the original modules.
"""

from regard.fast.install import install, remove

__all__ = ["install", "remove"]
