"""pip, which ends with who started it: `python -P pip_child.py ARGUMENTS`.

stdin is a pipe whose other end the parent keeps open and never writes to. However the parent ends,
killed or past its clean-up, the pipe does too, and a download goes on for nobody.
"""

from __future__ import annotations

import os
import runpy
import threading


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
