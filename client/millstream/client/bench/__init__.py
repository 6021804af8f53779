"""`millstream bench`: sends requests, notes when their tokens come, and makes figures of that.

Times are what the client sees, in seconds of one clock:

    due ... sent      piece           piece              piece
             |---------|---------------|------------------|
             |  TTFT   |   ITL x n     |   ITL x n        |
             |--------------------- E2E ------------------|

A *piece* is what one message brought of a request: usually one token, n where the engine merged
steps. TTFT: from sending the request to its first piece. ITL: between two tokens; the n tokens of a
piece share the time since the piece before evenly, those of the first piece have none. TPOT: a
request's mean ITL. E2E: from sending to the last piece.

`traces` and `metrics` are pure; `senders` and `in_process` run requests; `runs` says which.
"""
