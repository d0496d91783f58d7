"""Serves an application on loopback from a thread of this process, for clients that open connections."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Yield the address of `app` on a free port, and end the server when the block ends."""
    import uvicorn

    from generate.server.serve import config_of

    server = uvicorn.Server(config_of(app, port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server ended before it listened")
        time.sleep(0.01)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
