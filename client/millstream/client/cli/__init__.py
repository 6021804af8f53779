"""The commands of `millstream`, one module each: `add_arguments(parser)` and `run(args) -> int`."""
