"""How good an output is, and whether one is better than another."""
