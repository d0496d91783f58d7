"""Steps that prepare a backend leave no trace: texts and states are those of an engine that ran none."""

import pytest
import tiny
from test_engine import CONTEXT, Ids, look, submit

from common.engine import Engine
from common.reference import NumpyOps
from common.slots import Slots
from common.warm_up import Size, warm_sizes

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Ops(NumpyOps):
    warm_rows = (1, 8, 24, CONTEXT)


def test_sizes_that_fit_the_context():
    model, cold = (tiny.load("qwen3", ops) for ops in (Ops(), NumpyOps()))
    assert warm_sizes(model, Slots(model, CONTEXT, 1)) == [Size(1), Size(8), Size(24)]
    assert warm_sizes(cold, Slots(cold, CONTEXT, 1)) == []


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_nothing_is_kept(name):
    replies = {True: [], False: []}
    for warms, turns in replies.items():
        engine, prompt = Engine(tiny.load(name, Ops()), Ids(), CONTEXT, parallel=2), PROMPT
        for _ in range(3):
            if warms:
                assert all(engine.warm_up(size) for size in warm_sizes(engine.model, engine.memory))
            reply = submit(engine, prompt, max_tokens=6, temperature=0)
            assert not engine.warm_up(Size(8)), "a call waits"
            engine.drain()
            if warms:
                assert engine.warm_up(Size(24))
            look(engine, reply)
            turns.append((reply.tokens, reply.length, reply.sequence.cached, reply.after.tobytes()))
            prompt = [*prompt, *reply.tokens, 7]
    assert replies[True] == replies[False]
