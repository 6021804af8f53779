"""What benches print: a JSON line for each figure."""

from __future__ import annotations

import json
from typing import Any


def report(name: str, /, **figures: Any) -> None:
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps({"bench": name, **rounded}), flush=True)
