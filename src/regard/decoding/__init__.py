"""Generate token ids with a model: beam search, greedy search, sampling and decoding constraints."""
