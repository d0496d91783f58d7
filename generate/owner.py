"""The one thread that owns a loaded model: callers hand it jobs and wait, so that none of them interleave."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from common.errors import BimetalError

T = TypeVar("T")


class Owner:
    """A daemon thread that runs jobs one after another.

    MLX arrays and CUDA contexts belong to the thread that made them, so loading is a job too.

    at_end  called in the thread when it ends
    """

    def __init__(self, name: str, at_end: Callable[[], None]):
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._at_end = at_end
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread; os.fork copies none."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Refuse callers who would wait for ever; raises BimetalError."""
        if not self.is_here:
            raise BimetalError(
                f"the model was loaded in process {self._process} and does not survive os.fork(); load it in process "
                f"{os.getpid()}, or start that one by spawn"
            )
        if threading.current_thread() is self._thread:
            raise BimetalError(
                "a callback runs in the thread that owns the model and cannot call this model; call it from another "
                "thread after the callback has returned"
            )

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        """Queue a job for which the caller may wait; raises BimetalError where it cannot."""
        self.check()
        return self.put(job)

    def put(self, job: Callable[[], T]) -> "Future[T]":
        """Queue a job."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Let the jobs handed in so far finish, and end the thread."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # whatever it is belongs to the caller
                future.set_exception(error)
            del item, future, job  # a job holds the caller's objects
        self._at_end()
