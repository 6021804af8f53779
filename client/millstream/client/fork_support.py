"""To be imported before gRPC: turns its fork handlers off, unless the user has chosen.

They are for programs that go on using gRPC in a forked child, which a Client refuses to do. With a
thread inside gRPC, as a Client has, they crash about one child in eight, whatever that does
(grpcio 1.85): a data loader's worker, say.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
