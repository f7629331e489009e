"""What the Transformer replaced: recurrent, convolutional and dilated models."""
