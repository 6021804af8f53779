"""The scheduler's parts: whose turn it is, who holds what, how blocks are named. Pure."""
