"""Jobs on a cluster: a pool with the interface of `concurrent.futures`, and its schedulers, by submitit."""
