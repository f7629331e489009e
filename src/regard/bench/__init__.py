"""Speed comparisons with other libraries, which take turns at the same work in one process."""
