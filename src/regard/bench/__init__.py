"""How fast we are: the same work for us and for other people's code, interleaved in one process."""
