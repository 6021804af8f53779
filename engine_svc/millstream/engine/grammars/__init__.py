"""Structured output: grammars, compiled and checked, and the masks of what a row may sample."""
