"""Triton kernels: one kernel and its typed launcher per file, their torch oracles in reference.py.

A launcher checks shapes and strides. It is a plain function: a `torch.library` op would add up to
90 us of host time to a call. This package imports no Triton by itself; a kernel's module does.
"""
