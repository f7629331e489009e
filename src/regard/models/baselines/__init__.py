"""Models from before the Transformer: recurrent and convolutional encoder-decoders."""
