"""Triton kernels: one kernel and its typed launcher per file, their torch oracles in reference.py.

A launcher checks shapes and strides and is registered as a `torch.library` op with a fake. This
package imports no Triton by itself; a kernel's module does.
"""
