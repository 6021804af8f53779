"""The two implementations of ops.py, and the attention of the one for GPUs."""
