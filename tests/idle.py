"""What a loaded model still holds once nothing runs: the counts that must not depend on how much has run before."""

import gc
import os
import threading
import time
from dataclasses import dataclass

from generate.llm import LLM

PATIENCE = 60.0  # seconds until what was cancelled has ended


@dataclass(frozen=True)
class Held:
    """Of an idle model: slots, tuners, and the tokens that its pool has free where it has one.

    objects  that Python's collector knows, in the whole process; so are descriptors and threads
    """

    slots: int
    tuners: int
    free_tokens: int | None
    objects: int
    descriptors: int
    threads: int


def check_idle(llm: LLM) -> Held:
    """Wait until nothing runs, check that nothing is left of it, and forget what idle slots hold."""
    engine, end = llm._engine, time.monotonic() + PATIENCE
    while engine.running or engine.waiting or engine.suspended or engine._inbox:
        assert time.monotonic() < end, f"{engine.load} run and wait, {len(engine.suspended)} are suspended"
        time.sleep(0.001)

    def look() -> Held:
        slots, memory = engine.slots, engine.memory
        assert len({id(slot.state) for slot in slots}) == len(slots) <= engine.parallel
        for slot in slots:
            assert slot._saved is None, "a slot waits for its state"
            assert slot.state.length <= len(slot.tokens), "a state holds tokens that its slot does not know"
        if (check := getattr(engine.prefixes, "check", None)) is not None:
            check()
        memory.reset([])
        assert not any(slot.state.length for slot in slots)
        free = None if memory.pool is None else memory.pool.free_tokens
        tuners = len(engine.tuners)
        assert not any(each.users for each in engine.tuners.values())
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        return Held(len(slots), tuners, free, len(gc.get_objects()), descriptors, threading.active_count())

    return llm._submit(look).result()
