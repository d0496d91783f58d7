"""The thread that owns a loaded model: it runs jobs of callers, and between jobs the engine, turn by turn.

A long job is a generator; one of its steps runs between two turns.
"""

import asyncio
import os
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from common.errors import CLOSED, BimetalError

T = TypeVar("T")
Job = Callable[[], T] | Generator[None, None, T]
MOST_PAUSE = 2.0  # most seconds between two steps of a job: its first step may be long because kernels compile


class Inbox:
    """Passes items, such as pieces of replies, from the owner thread to queues of one event loop.

    Items are held until `deliver`, which wakes the loop once for all of them: a woken loop takes the interpreter from
    the owner thread, which should first launch the device's next step.

    due  called with `deliver` when there is an item to deliver
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[Callable[[], None]], object]) -> None:
        # weak references: queues refer to their loop, and items that nobody fetched must not keep a closed loop alive
        self._loop, self._due = weakref.ref(loop), due
        self._items: deque[tuple[weakref.ref[asyncio.Queue[Any]], Any]] = deque()
        self._is_due = False

    def put(self, queue: "asyncio.Queue[Any]", item: Any) -> None:
        """Put `item` into a queue of the loop, from the owner thread."""
        self._items.append((weakref.ref(queue), item))
        if not self._is_due:
            self._is_due = True
            self._due(self.deliver)

    def deliver(self) -> None:
        """Wake the loop, from the owner thread; a closed loop is left alone."""
        self._is_due = False
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._fill)
        except RuntimeError:  # the loop is closed
            self._items.clear()

    def _fill(self) -> None:
        while self._items:
            reader, item = self._items.popleft()
            if (queue := reader()) is not None:
                queue.put_nowait(item)


class Outbox:
    """Passes items from the owner thread to queues on which other threads wait.

    Items are held until `deliver`, as those of an Inbox: each thread that wakes takes the interpreter.

    due  called with `deliver` when there is an item to deliver
    """

    def __init__(self, due: Callable[[Callable[[], None]], object]) -> None:
        self._due = due
        self._items: deque[tuple[queue.SimpleQueue[Any], Any]] = deque()

    def put(self, reader: "queue.SimpleQueue[Any]", item: Any) -> None:
        """Put `item` into a queue, from the owner thread."""
        self._items.append((reader, item))
        if len(self._items) == 1:
            self._due(self.deliver)

    def deliver(self) -> None:
        """Fill the queues, from the owner thread."""
        while self._items:
            reader, item = self._items.popleft()
            reader.put(item)


class OwnerThread:
    """A daemon thread that runs jobs one after another, and `turn` whenever no job waits.

    MLX arrays and CUDA contexts belong to the thread that made them, so loading is a job too. A job that takes long is
    a generator, which returns the result. Such jobs run one after another too, beside the other jobs: while `turn` has
    work, their steps take at most half of the time.

    at_end  called in the thread when the thread ends
    outbox  passes items to queues of other threads
    turn    Engine.turn, which the job that loads a model puts here: runs a step, calls `deliver`, and returns whether
            work is left. It is called after each job, and again as long as work is left
    """

    def __init__(self, name: str, at_end: Callable[[], None]):
        self._jobs: queue.SimpleQueue[tuple[Future, Job[Any]] | None] = queue.SimpleQueue()
        self._long: deque[tuple[Future, Generator[None, None, Any]]] = deque()
        self._next_step = 0.0  # the time at which the next step of a long job is due
        self.turn: Callable[[], bool] = lambda: False
        self._inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Inbox] = weakref.WeakKeyDictionary()
        self._due: deque[Callable[[], None]] = deque()
        self.outbox = Outbox(self._due.append)
        self._at_end = at_end
        self._process, self._has_ended = os.getpid(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Test whether this process has the thread; os.fork copies none."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Refuse calls that would wait for ever; raises BimetalError."""
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

    def submit(self, job: Job[T]) -> "Future[T]":
        """Queue a job for which the caller may wait; raises BimetalError if it cannot."""
        self.check()
        return self.put(job)

    def put(self, job: Job[T]) -> "Future[T]":
        """Queue a job. The future of a generator can be cancelled until it has its result."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        if self._has_ended:
            self._refuse_jobs()
        return future

    def inbox(self, loop: asyncio.AbstractEventLoop) -> Inbox:
        """Return the inbox of an event loop in which streams are read."""
        return self._inboxes.setdefault(loop, Inbox(loop, self._due.append))

    def deliver(self) -> None:
        """Wake each event loop whose inbox has items, and the threads whose queues get some, from this thread."""
        while self._due:
            self._due.popleft()()

    def wake(self) -> None:
        """Have `turn` called until no work is left; raises BimetalError if the thread has ended."""
        self.put(lambda: None)
        if self._has_ended:
            raise BimetalError(CLOSED)

    def _refuse_jobs(self) -> None:
        """End the jobs that will not run."""
        with suppress(queue.Empty):
            while True:
                if (item := self._jobs.get_nowait()) is not None and item[0].set_running_or_notify_cancel():
                    item[0].set_exception(BimetalError(CLOSED))

    def close(self) -> None:
        """End the thread after the jobs that have been put, and after the last turn that has work.

        Generators end at their next step with BimetalError.
        """
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def end_long(self) -> None:
        """End all generators with BimetalError, from this thread."""
        while self._long:
            future, steps = self._long.popleft()
            steps.close()
            if future.set_running_or_notify_cancel():
                future.set_exception(BimetalError(CLOSED))

    def _run(self) -> None:
        busy, jobs, long = False, self._jobs, self._long
        while True:
            while not ((busy or long) and jobs.empty()):
                item = jobs.get()
                if item is None:
                    self._has_ended = True
                    self.end_long()
                    while self._turn():
                        pass
                    self.deliver()
                    self._refuse_jobs()
                    del self.turn, item  # and with it the model
                    self._at_end()
                    return
                self._serve(*item)
                del item  # a job holds the caller's objects
                busy = True
            busy = self._turn()
            if long and (not busy or time.perf_counter() >= self._next_step):
                self._step()

    def _serve(self, future: Future, job: Job[Any]) -> None:
        """Run a job, or queue a long one, whose steps run later."""
        if isinstance(job, Generator):
            self._long.append((future, job))
            return
        self.deliver()  # a job may take long
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:  # whatever it is belongs to the caller
                future.set_exception(error)
        self.deliver()

    def _step(self) -> None:
        """Run a step of the oldest long job, and delay the next one by the time that the step took."""
        self.deliver()
        started = time.perf_counter()
        if not _goes_on(*self._long[0]):
            self._long.popleft()
        ended = time.perf_counter()
        self._next_step = ended + min(ended - started, MOST_PAUSE)

    def _turn(self) -> bool:
        """Call `turn`; after a failure no work counts as left."""
        try:
            return self.turn()
        except Exception:  # of nobody's call
            traceback.print_exc()
            self.deliver()
            return False


def _goes_on(future: Future, steps: Generator[None, None, Any]) -> bool:
    """Run a step of a long job; return whether steps are left. One whose future was cancelled is ended."""
    if future.cancelled():
        steps.close()
        return False
    try:
        next(steps)
        return True
    except StopIteration as done:
        if future.set_running_or_notify_cancel():
            future.set_result(done.value)
    except BaseException as error:  # whatever it is belongs to the caller
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    return False
