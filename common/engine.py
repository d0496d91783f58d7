"""Engine of several sequences over one model: a loop that begins calls, joins the rows of decoding ones, and ends them.

One thread runs the engine's loop; any thread may submit calls. The engine only passes tensors on, and computes nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from contextlib import suppress
from traceback import clear_frames, print_exc
from typing import Any, TypeVar

from common.decode.requests import ASKS_ROWS, Draft, DraftStretch, Rows, Stretch
from common.decode.speculative import new_tuner
from common.decode.tuner import FIRST, FIRST_RECORDED, SharedTuner, TunerShare
from common.decoders import Speculation
from common.draft_stretches import DraftStretches
from common.errors import CLOSED, BimetalError, NoRoomError
from common.histogram import Histogram
from common.models import Model
from common.models.window import windowed
from common.options import GenerationOptions
from common.pieces import Piece
from common.row_runner import RowRunner
from common.schedule import QUEUE, Schedule
from common.sequence import Call, Sequence, Target
from common.slot import Prefixes, Slot
from common.slots import Slots
from common.stretches import Stretches
from common.suspended import Failed, Suspended
from common.tokenizer import Tokenizer
from common.warm_up import Size, warm_up

DEFAULTS = GenerationOptions()
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds of a histogram
T = TypeVar("T")
Launched = tuple[Sequence, Any, Any]  # a sequence of a step, its request, and its answer or error
AnyStretches = Stretches | DraftStretches


class Engine:
    """A loaded model and the sequences that run on it.

    context           context length: maximum tokens of a sequence
    parallel          maximum number of sequences that run at once, each in its own slot
    attention_window  maximum number of positions that decoding attends to; None: all. Changes the text
    queue             maximum number of sequences that wait
    prefixes          a store of states outside the slots
    tokens            maximum tokens of all sequences together, if they share a pool; None: `parallel` full contexts

    step_tokens  histogram of the steps so far by their tokens: tokens of a prompt, or new tokens of replies
    deliver      function that sends pieces of replies to their callers. It is called at a reply's first token and at
                 the end of a turn; if the next turn begins with a launch, after that launch, because threads that
                 wake up may delay the launch
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: int,
        parallel: int = 1,
        attention_window: int | None = None,
        queue: int = QUEUE,
        prefixes: Prefixes | None = None,
        tokens: int | None = None,
    ):
        decoding = model if attention_window is None else windowed(model, attention_window)
        self.target = Target(model, decoding, tokenizer, context)
        self.model, self.parallel, self.prefixes = model, parallel, prefixes
        joins = model.ops.joins and isinstance(model, Model)
        self._divides = joins and parallel > 1  # steps of prompts, so that decoding does not wait for a whole one
        self.schedule = Schedule(joins, queue, batches=model.ops.micro_batches if joins else 1)
        self.memory = Slots(model, context, parallel, tokens)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._suspended = Suspended(self.schedule, self.memory)
        self.suspended = self._suspended.sequences
        self.tuners: dict[tuple[Speculation, bool], SharedTuner] = {}  # by the options that they learn for
        self.step_tokens = Histogram(STEP_TOKENS)
        self.deliver: Callable[[], object] = lambda: None
        self._rows = RowRunner(decoding)
        self._launched: deque[list[Launched] | AnyStretches] = deque()  # steps of micro-batches, answered later
        self._stretches: list[AnyStretches] = []  # which the sequences of a step continue in its next one
        self._inbox: deque[Sequence] = deque()
        self._open: set[Sequence] = set()  # submitted, and not ended
        self._lock = threading.Lock()
        self._arrivals = self._prompt_steps = 0
        self._forgets = self._is_closed = False

    @property
    def slots(self) -> List[Slot]:
        """Return the slots of running sequences, and the idle ones."""
        return self.memory.slots

    # -- from any thread ---------------------------------------------------------------------------------------------

    @property
    def preemptions(self) -> int:
        """Count how often a running sequence was suspended to free memory for other sequences."""
        return self._suspended.count

    @property
    def load(self) -> tuple[int, int]:
        """Return the numbers of sequences that run and that wait."""
        return len(self.running), len(self.waiting) + len(self._inbox)

    def submit(self, call: Call) -> Sequence:
        """Queue a call; raises UsageError or BimetalError if it cannot be served, BusyError if the queue is full."""
        sequence = Sequence(self.target, call)
        with self._lock:
            if self._is_closed:
                raise BimetalError(CLOSED)
            self.schedule.check_room(len(self._open) - self.parallel)  # those for which a slot is free do not wait
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self._open.add(sequence)
            self._inbox.append(sequence)
        return sequence

    def close(self) -> None:
        """Refuse further calls."""
        with self._lock:
            self._is_closed = True

    def reset(self) -> None:
        """Make the next turn empty the idle slots before it begins a call."""
        self._forgets = True

    # -- the loop ----------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Run one step of a prompt or of decoding; return whether work is left."""
        try:
            self._collect()
            if self.running:
                self._turn()
        except Exception as error:
            if not (self.running or self.suspended or self.waiting):
                raise
            self._fail(error)
        if not self._launches_next:
            self.deliver()
        return bool(self.running or self.waiting or self.suspended or self._inbox)

    @property
    def _launches_next(self) -> bool:
        """Test whether the next turn begins by launching a step of decoding, without waiting for the device."""
        if self._continues and not (self._inbox or self.suspended):
            return self._stretches[0].launches_at_once
        decodes = bool(self.running) and all([type(each.request) in (Rows, Stretch) for each in self.running])
        return decodes and self.model.ops.runs_ahead and not (self._inbox or self.suspended)

    @property
    def _continues(self) -> bool:
        """Test whether the next step has the sequences of the last one, all of them within a stretch."""
        return len(self._stretches) == 1 and self._stretches[0].sequences == self.running

    def _turn(self) -> None:
        schedule, running = self.schedule, self.running
        if not self._continues:
            self._take_kept(tuple(self.running))
            self._decline_drafts()
        if len(running) == 1 and type(running[0].request) in ASKS_ROWS:  # alone: nothing to choose or to count
            self._step(running[:1])
            return
        if self.memory.grows and not self._suspended.grant(running):
            error = NoRoomError("no memory is free for a longer reply beside others")
            self._make_room(error)
            return
        started = time.perf_counter()
        if self._continues:
            self._step(running)
            schedule.has_decoded(time.perf_counter() - started)
            return
        reader = schedule.reader(running)
        if reader is not None:
            self._finish_launched()  # the prompt's step may overwrite the rows of launched steps
            self._read_prompt(reader)
            schedule.has_read(time.perf_counter() - started, any(not each.reads for each in running))
            return
        while asking := [each for each in running if type(each.request) is Draft]:
            if self._launched:  # whose sequences may ask for a draft as well
                self._finish_launched()
                continue
            self._draft(asking if schedule.joins and self._rows.shares_drafts else asking[:1])
        chosen = schedule.step([each for each in running if type(each.request) in ASKS_ROWS])
        if chosen:
            self._step(chosen)
        schedule.has_decoded(time.perf_counter() - started)

    def _take_kept(self, sequences: List[Sequence]) -> None:
        """Add tokens that a speculative step kept until the launch of the next one to their replies."""
        for each in sequences:
            try:
                each.take_kept()
            except Exception as error:  # raised by the caller's function
                self._end(each, error)

    def _decline_drafts(self) -> None:
        """Have each sequence request the parts of its speculative steps, unless all that decode can share one step."""
        drafting = [each for each in self.running if type(each.request) is DraftStretch]
        if not drafting:
            return
        models = [each for each in drafting if each.speculation.decoder.needs_draft]
        shares = len(models) < 2 or self._rows.shares_drafts
        is_alone = len(drafting) == len([each for each in self.running if each.request is not None])
        if not (shares and is_alone and self.schedule.joins and self.schedule.batches == 1):
            for each in drafting:
                while type(each.request) is DraftStretch:  # the first answer may end a stretch that has begun
                    self._advance(each, None)

    def warm_up(self, size: Size) -> bool:
        """Run steps of a size, and keep nothing of them; while there are calls, run nothing and return False."""
        if any(self.load) or self.suspended:
            return False
        if self.memory.slots:
            warm_up(self.model, self.memory, size)
        return True

    def drain(self) -> None:
        """Run all submitted calls to their end."""
        while self.turn():
            pass

    def stream(
        self,
        prompt: List[int],
        options: GenerationOptions = DEFAULTS,
        cancel: threading.Event | None = None,
        shared: int | None = None,
    ) -> Iterator[Piece]:
        """Generate a reply to `prompt` (token ids), piece by piece, by running the engine's loop in this thread.

        cancel, shared  as in Call
        """
        pieces, ends = deque[Piece](), list[BaseException | None]()
        call = Call(prompt, options, pieces.append, ends.append, cancel or threading.Event(), shared)
        sequence = self.submit(call)
        try:
            while not ends or pieces:
                while pieces:
                    yield pieces.popleft()
                if not ends:
                    self.turn()
            if ends[0] is not None:
                raise ends[0]
        finally:
            if not ends:
                self._leave(sequence)

    # -- beginning and ending ----------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Collect submitted calls, end cancelled sequences, and begin waiting ones."""
        if self._inbox:
            self.deliver()  # beginning a call may take long
        while self._inbox:
            self.waiting.append(self._inbox.popleft())
        if self._forgets:
            self._forgets = False
            self.memory.reset([each.slot for each in (*self.running, *self.suspended)])
        live = *self.running, *self.waiting, *self.suspended
        for each in [each for each in live if each.call.cancel.is_set()]:
            each.reason = "cancelled"
            self._take_kept([each])
            if each in self._open:
                self._end(each)
        if self.suspended:
            self._after_move(self._suspended.resume(self.running))
        elif self.waiting and len(self.running) < self.parallel:
            self.schedule.admit(self.waiting, self._begin)
            if begun := [each for each in self.running if each.request is None and not each.reads]:
                self._decode(begun)

    def _begin(self, sequence: Sequence) -> bool:
        """Give `sequence` a slot and begin its prompt, if slot and memory are free; return whether it has begun."""
        if len(self.running) >= self.parallel:
            return False
        try:
            running = [(each.slot, each.granted) for each in self.running if each.slot]
            slot = self.memory.take(sequence.prompt, sequence.reading, sequence.granted, running)
            if slot is None:
                return False
            self.running.append(sequence)
            sequence.slot = slot
            if sequence.begin(slot, slot.rewind(sequence.prompt, sequence.reading), self.prefixes):
                self._share_rows()
            else:  # its decoder runs after all calls of this turn have begun, so that the number of rows is known
                logits = slot.logits_after(len(sequence.prompt)) if sequence.cached == len(sequence.prompt) else ()
                sequence.decode(logits)
        except Exception as error:
            if sequence.slot is not None:
                sequence.slot.reset()  # its state may be partly restored
            self._end(sequence, error)
        return True

    def _end(self, sequence: Sequence, error: BaseException | None = None) -> None:
        """End a sequence with its last piece, or with an error."""
        error = self._leave(sequence) or error
        if error is None:
            try:
                sequence.finish()
            except Exception as raised:  # raised by the caller's functions
                error = raised
        try:
            sequence.call.ended(error)
            if error is None:
                self._offer(sequence)
        except Exception:  # no call is left to end with it
            print_exc()

    def _offer(self, sequence: Sequence) -> None:
        """Offer the state at a reply's end to the prefix cache.

        With `attention_window` no state is offered, because its rows differ from those of a prompt of the same tokens.
        """
        slot, same_bits = sequence.slot, self.target.decoding is self.model
        if self.prefixes is not None and slot is not None and sequence.decoder is not None and same_bits:
            self.prefixes.offer(slot.committed, slot.state)

    def _leave(self, sequence: Sequence) -> Exception | None:
        """Remove a sequence and close its decoder; if closing fails, drop the slot and return the error."""
        self._open.discard(sequence)
        self._suspended.has_ended = True
        for queue in (self.running, self.waiting, self.suspended):
            with suppress(ValueError):
                queue.remove(sequence)
        self._share_rows()
        sequence.request = sequence.unfinished_parts = None
        if sequence.reads:
            sequence.first_token_at = sequence.last_token_at = time.perf_counter() if sequence.slot else 0.0
        if sequence.tuner is not None:
            sequence.tuner.leave()
        slot, error = sequence.slot, None
        if slot is None:
            return None
        slot.forget_saved()
        try:
            if sequence.decoder is not None:
                sequence.decoder.close()
        except Exception as raised:
            error = raised
            self.memory.slots.remove(slot)
        return error

    def _tuner(self, sequence: Sequence) -> TunerShare:
        """Return this sequence's share of the tuner for calls with the same options."""
        key = sequence.speculation, sequence.sampler.is_argmax
        if key not in self.tuners:
            first = FIRST if self.model.ops.built is None else FIRST_RECORDED
            self.tuners[key] = SharedTuner(new_tuner(sequence.speculation, self.model, first), self._disturbances)
        return TunerShare(self.tuners[key])

    def _disturbances(self) -> int:
        """Count the events so far, other than steps of decoding, that have taken time."""
        return self._prompt_steps + (self.model.ops.built or 0)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _read_prompt(self, sequence: Sequence) -> None:
        """Run the next step of a prompt, or a part of one."""
        self._prompt_steps += 1
        try:
            read = sequence.read(self._divides, beside=len(self.running) > 1)
        except NoRoomError as error:
            self._make_room(error)
            return
        except BimetalError as error:
            self._end(sequence, error)
            return
        except Exception as error:
            self._fail(error)
            return
        if read is None:
            return
        step, logits = read
        try:
            if not sequence.commit_prompt_step(step, logits, self.prefixes):
                sequence.decode(logits)
                self._decode([sequence])
        except BaseException as error:  # raised by the caller's function, sys.exit included
            self._end(sequence, error)
        self.step_tokens.observe(len(step) + sequence.new_tokens)

    def _decode(self, sequences: List[Sequence]) -> None:
        """Run the decoders of sequences that have begun to decode up to their first requests."""
        self._share_rows()
        for each in sequences:
            if each.speculation.drafts and each.speculation.budget is None:
                each.take_tuner(self._tuner(each))
            self._advance(each, None)

    def _share_rows(self) -> None:
        """Divide the rows of a step among the sequences that draft: set the most draft tokens of each.

        While more than one step of a prompt, or part of such a step, is left to compute, no sequence runs ahead.
        """
        runs = [each.run for each in self.running if each.run is not None]
        reading = [each for each in self.running if each.run is None]
        runs_ahead = not reading or (len(reading) == 1 and not reading[0].reads_twice(self._divides))
        for run in runs:
            run.runs_ahead = runs_ahead
        drafting = [run for run in runs if run.options.drafts]
        most = self.schedule.most_drafted(len(drafting), len(runs) - len(drafting)) if drafting else None
        for run in drafting:
            run.limit_drafts(most)
        for stretches in self._stretches:
            stretches.stop()
        self._stretches.clear()

    def _draft(self, asking: list[Sequence]) -> None:
        """Answer the draft requests of sequences, which share the draft's passes."""

        def drafts() -> list[Launched]:
            return _answered(asking, self._rows.drafted([each.asked_draft for each in asking]))

        answered = self._run(asking, drafts)
        if answered is not None:
            self._hand_out(answered)

    def _step(self, chosen: list[Sequence]) -> None:
        """Run the rows that sequences requested.

        With several micro-batches, answers are sent only after a step of each micro-batch was launched, because a
        decoder may wait for its tokens.
        """
        if self._launched and any(each in chosen for step in self._launched for each in _sequences_of(step)):
            self._finish_launched()
            chosen = [each for each in chosen if each in self.running and type(each.request) in ASKS_ROWS]
            if not chosen:
                return
        launched = self._launch(chosen)
        if launched is not None:
            self._launched.append(launched)
        if isinstance(launched, DraftStretches):
            self._take_kept(launched.sequences)
        self.deliver()
        left = self.schedule.batches - 1
        if left and not any(type(each.request) in ASKS_ROWS and each not in chosen for each in self.running):
            left = 0
        self._finish_launched(left)

    def _launch(self, chosen: list[Sequence]) -> list[Launched] | AnyStretches | None:
        """Launch the rows that sequences requested; None if that failed."""

        def answers() -> list[Launched]:
            asked = [each.asked_rows for each in chosen]
            return _answered(chosen, [self._rows.alone(*asked[0])] if len(asked) == 1 else self._rows.together(asked))

        stretches = self._stretches_of(chosen)
        run: Callable[[], list[Launched] | AnyStretches] = answers if stretches is None else stretches.launch
        return self._run(chosen, run)

    def _stretches_of(self, chosen: list[Sequence]) -> AnyStretches | None:
        """Return the stretches in which the sequences run, new ones if needed.

        If they do not all request a stretch of the same kind, end their stretches and return None.
        """
        for each in self._stretches:
            if each.sequences == chosen:
                return each
        for each in [each for each in self._stretches if not set(chosen).isdisjoint(each.sequences)]:
            self._stretches.remove(each)
            each.stop()
        kinds = {type(each.request) for each in chosen}
        if kinds == {Stretch}:
            self._stretches.append(Stretches(self._rows, chosen))
        elif kinds == {DraftStretch}:
            self._stretches.append(DraftStretches(self._rows, chosen))
        else:
            return None
        return self._stretches[-1]

    def _run(self, asking: list[Sequence], run: Callable[[], T]) -> T | None:
        """Return the result of `run`. If it fails, return None: the sequences have ended, or memory has been freed."""
        try:
            return run()
        except NoRoomError as error:
            self._make_room(error)
        except BimetalError as error:
            self._take_kept(tuple(asking))  # which may be `running`
            for each in [each for each in asking if each in self._open]:
                self._end(each, error)
        except Exception as error:
            self._fail(error)
        return None

    def _finish_launched(self, except_last: int = 0) -> None:
        """Send the answers of launched steps to their sequences, but not those of the last `except_last` steps."""
        while len(self._launched) > except_last:
            self._hand_out(self._launched.popleft())

    def _hand_out(self, launched: list[Launched] | AnyStretches) -> None:
        """Send sequences their answers."""
        if isinstance(launched, AnyStretches):
            self._hand_out_tokens(launched)
            return
        new, begins = 0, False
        for sequence, request, answer in launched:
            if sequence.request is not request:  # it has ended
                continue
            begins |= not sequence.new_tokens
            new -= sequence.new_tokens
            if isinstance(answer, Exception):
                self._end(sequence, answer)
            else:
                self._advance(sequence, answer)
            new += sequence.new_tokens
        self._note_tokens(new, begins)

    def _hand_out_tokens(self, stretches: AnyStretches) -> None:
        """Hand out the tokens before a step, and continue the sequences whose stretch has ended."""
        ended, new, begins = stretches.hand_out()
        for each, error in ended:
            self._end(each, error)
        if isinstance(stretches, DraftStretches) and not stretches.launches_at_once:
            self._take_kept(stretches.sequences)
        if not stretches.steps_left:
            if stretches in self._stretches:
                self._stretches.remove(stretches)
            for each in stretches.settle():
                new -= each.new_tokens
                self._advance(each, None)
                new += each.new_tokens
        self._note_tokens(new, begins)

    def _note_tokens(self, new: int, begins: bool) -> None:
        """Count the new tokens of a step; `begins` states whether one of them is a reply's first."""
        if new:
            self.step_tokens.observe(new)
        if begins:  # a first token is delivered without waiting for another launch
            self.deliver()

    def _make_room(self, error: NoRoomError) -> None:
        """Free memory for a step that lacks it: finish the launched steps, or if there are none, suspend a sequence."""
        self._take_kept(tuple(self.running))
        if self._launched:
            self._finish_launched()
        else:
            self._after_move(self._suspended.make_room(self.running, error))

    def _advance(self, sequence: Sequence, answer: Any) -> None:
        """Send a decoder the answer to its request, and handle its requests until it needs rows or a draft, or ends."""
        try:
            goes_on = sequence.advance(answer)
        except Exception as error:
            self._end(sequence, error)
            return
        if not goes_on:
            self._end(sequence)

    def _after_move(self, failed: Failed | None) -> None:
        """Divide the rows again after a state was moved to or from the host; end the sequence whose move failed."""
        if failed is not None:
            self._end(*failed)
        self._share_rows()

    def _fail(self, error: Exception) -> None:
        """End all replies in progress: after a failure of the backend the contents of all states are unknown.

        If no replies are in progress, waiting calls end, because the engine's loop would not run for them.
        """
        failed = BimetalError(f"the {self.model.ops.name} backend failed, and all replies in progress ended: {error}")
        failed.__cause__ = error
        self._launched.clear()
        clear_frames(error.__traceback__)  # whose variables hold memory of the backend
        self._take_kept(tuple(self.running))
        for sequence in (*self.running, *self.suspended) or tuple(self.waiting):
            self._end(sequence, failed)
        self._rows = RowRunner(self.target.decoding)
        self.memory.renew()


def _answered(asking: list[Sequence], answers: List[Any]) -> list[Launched]:
    return [(each, each.request, answer) for each, answer in zip(asking, answers, strict=True)]


def _sequences_of(launched: list[Launched] | AnyStretches) -> list[Sequence]:
    return launched.sequences if isinstance(launched, AnyStretches) else [sequence for sequence, _, _ in launched]
