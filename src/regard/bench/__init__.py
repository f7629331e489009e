"""Speed comparisons with other libraries: the same work, interleaved in one process."""
