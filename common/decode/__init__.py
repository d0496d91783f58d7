"""Decoders: each a generator of requests, which ends a step by a commit; `registry` lists them, `alone` runs one."""
