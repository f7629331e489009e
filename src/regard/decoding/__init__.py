"""From a model to text: beam search, greedy search, sampling and decoding constraints, on token ids."""
