"""`python -m millstream.hub fetch | import-gguf`: the same commands as `millstream`'s."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from millstream.hub import commands


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m millstream.hub", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    fetch = subparsers.add_parser("fetch", help="obtain a model and print its folder")
    commands.add_fetch_arguments(fetch)
    fetch.set_defaults(run=commands.run_fetch)
    import_gguf = subparsers.add_parser("import-gguf", help="convert a GGUF file")
    commands.add_import_gguf_arguments(import_gguf)
    import_gguf.set_defaults(run=commands.run_import_gguf)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
