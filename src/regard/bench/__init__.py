"""Benchmarks: the speed of regard and of other libraries, and the cost of long sequences."""
