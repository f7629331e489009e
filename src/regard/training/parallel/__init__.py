"""Training in several processes (ranks): the process group, gradients, sharded checkpoints, and starting the processes.

No other package of regard imports torch.distributed.
"""
