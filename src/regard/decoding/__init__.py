"""From a model to text: beam search, greedy search, sampling and their rules, ids in and ids out."""
