"""Models that the Transformer replaced: recurrent, convolutional and dilated ones."""
