"""The served model: loading, admission, and the end."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from generate.llm import LLM
from generate.server.errors import ApiError
from generate.server.facts import Facts, facts_of

RETRY = 5  # seconds after which a refused client may try again


class Service:
    """One model and the requests that it works on.

    most      requests at once, running and waiting
    running   requests now
    draining  the server shuts down: what runs is finished, and nothing else is begun
    """

    def __init__(self, most: int):
        self.most, self.running, self.draining = most, 0, False
        self._llm: LLM | None = None
        self._facts: Facts | None = None

    def load(self, name: str, make: Callable[[], LLM], failed: Callable[[BaseException], None]) -> None:
        """Load the model in a thread of its own; `failed` is called there with what went wrong."""

        def run() -> None:
            try:
                self.serve(make(), name)
            except BaseException as error:
                failed(error)

        threading.Thread(target=run, name="bimetal loading", daemon=True).start()

    def serve(self, llm: LLM, name: str) -> None:
        """Take requests for a loaded model."""
        self._facts = facts_of(llm, name)
        self._llm = llm

    @property
    def is_ready(self) -> bool:
        return self._llm is not None

    @property
    def llm(self) -> LLM:
        """The model; raises ApiError while it is loaded."""
        if self._llm is None:
            raise ApiError(503, "Loading model", retry=RETRY)
        return self._llm

    @property
    def facts(self) -> Facts:
        """What is known of the model; raises ApiError while it is loaded."""
        if self._facts is None:
            raise ApiError(503, "Loading model", retry=RETRY)
        return self._facts

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it runs; raises ApiError where there are too many, and while the server shuts down."""
        if self.draining:
            raise ApiError(503, "the server shuts down", retry=RETRY)
        if self.running >= self.most:
            raise ApiError(503, f"{self.running} requests run or wait, which is the most allowed", retry=RETRY)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def close(self) -> None:
        """End what runs, and free the model."""
        self.draining = True
        if self._llm is not None:
            self._llm.close()
