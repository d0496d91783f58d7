"""Two models in two threads on one GPU, neither of which sees what the other one launches."""

import threading

import numpy as np
import pytest
import tiny

from common.models import load_model
from common.step import Step

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend.launch import Stream  # noqa: E402
from cuda_backend.memory import Memory  # noqa: E402
from cuda_backend.ops import CudaOps  # noqa: E402

pytestmark = pytest.mark.gpu

STEPS = 4
PROMPT = 9


class Pause:
    """Ops whose layers stop once, at `layer` of the step `at`, until another thread has gone on."""

    def __init__(self, ops: CudaOps, at: int):
        self.ops, self.steps, self.at = ops, 0, at
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.scope = ops.scope

    def __call__(self, layer, block, x):
        self.steps += layer == 0
        if layer == 1 and self.steps == self.at:
            self.reached.set()
            assert self.go_on.wait(60)
        return self.scope(layer, block, x)


def decoded(model, ids):
    """Logits of a prompt and of STEPS rows, one at a time, and the launches of each step."""
    state, out, launches = model.new_state(64), [], []
    for at in range(STEPS + 1):
        rows = ids[:PROMPT] if at == 0 else ids[PROMPT + at : PROMPT + at + 1]
        before = model.ops.launches
        logits = model.forward(state, Step.chain(rows, state.length))
        launches.append(model.ops.launches - before)
        out.append(model.ops.read(logits)[-1])
        state.commit(range(len(rows)))
    return np.array(out), launches


@pytest.mark.parametrize("at", [2, 3], ids=["as it comes", "captured"])
def test_two_models_in_two_threads(at, monkeypatch):
    """While one model is in the middle of a step that is launched or captured, the other one decodes in its thread."""
    names = ("laguna", "qwen35")
    ids = [tiny.golden(name)["ids"].astype(np.int32) for name in names]
    expected = [decoded(load_model(tiny.checkpoint(n), CudaOps()), i) for n, i in zip(names, ids, strict=True)]
    results, failed = [None, None], []
    models = [load_model(tiny.checkpoint(name), CudaOps()) for name in names]
    pause = Pause(models[0].ops, at)
    monkeypatch.setattr(models[0].ops, "scope", pause)

    def run(which):
        try:
            results[which] = decoded(models[which], ids[which])
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            pause.reached.set()
            pause.go_on.set()

    first = threading.Thread(target=run, args=(0,))
    first.start()
    assert pause.reached.wait(60)
    second = threading.Thread(target=run, args=(1,))
    second.start()
    for thread in (first, second):
        thread.join(120)
    assert not failed
    assert pause.steps == 3  # a prompt, a row as it comes and one captured; what is replayed calls no op
    for (logits, launches), (alone, counted) in zip(results, expected, strict=True):
        assert np.array_equal(logits, alone)
        assert launches == counted


@pytest.mark.skipif(not hasattr(cupy.cuda, "get_current_stream"), reason="the stand-in for CuPy has no memory pool")
def test_memory_goes_back_to_its_stream():
    """What is given back while its stream may still read it goes to no other stream."""
    first, second = Stream(), Stream()
    memory = Memory(1 << 16, first)
    address = memory.address
    del memory
    assert Memory(1 << 16, second).address != address
    assert Memory(1 << 16, first).address == address
