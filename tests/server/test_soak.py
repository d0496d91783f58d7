"""What runs leaves nothing behind: slots, states, objects, descriptors and threads after many and after wild requests.

`BIMETAL_SOAK` is how many seconds the longest of them takes.
"""

import json
import os
import random
import threading
import time
from collections import Counter

import pytest
from conftest import client_of
from idle import check_idle
from tiny_chat import write

import generate
from common import encoded_parts
from common.errors import BimetalError

SECONDS = float(os.environ.get("BIMETAL_SOAK", "60"))
MIB = 1 << 20


@pytest.fixture
def llm(tmp_path, monkeypatch):
    """A tiny model whose memories of earlier prompts are full after few of them."""
    monkeypatch.setattr(encoded_parts, "REMEMBERED", 1 << 14)
    how = {"backend": "numpy", "parallel": 4, "cache_memory": 100_000, "queue": 10**4}
    with generate.load(write(tmp_path / "model"), **how) as llm:
        yield llm


def some(llm, count, random, spec=("off", "lookup")):
    """Run `count` short requests, several at a time; some are cancelled, some refused."""
    for _ in range(count // 20):
        prompts = ["".join(random.choices("abcdef ", k=random.randint(1, 30))) for _ in range(18)]
        llm.generate(prompts, max_tokens=random.randint(1, 3), spec=random.choice(spec))
        with llm.stream(random.choice(prompts), max_tokens=20) as stream:
            next(stream)
        with pytest.raises(BimetalError):
            llm.generate("a" * 500)


def test_what_is_held_does_not_grow_with_the_requests(llm):
    draw = random.Random(1)
    some(llm, 40, draw)
    before = check_idle(llm)
    some(llm, 60, draw)
    after = check_idle(llm)
    assert (after.slots, after.descriptors, after.threads) == (before.slots, before.descriptors, before.threads)
    assert abs(after.objects - before.objects) < 500  # entries of the prefix cache, which is full at both times


@pytest.mark.slow
def test_memory_after_10000_requests_is_that_after_100(llm):
    draw = random.Random(2)
    some(llm, 100, draw)
    before, at = check_idle(llm), resident()
    some(llm, 9900, draw)
    after = check_idle(llm)
    assert (after.slots, after.descriptors, after.threads) == (before.slots, before.descriptors, before.threads)
    assert abs(after.objects - before.objects) < 3000
    assert resident() - at < 8 * MIB  # less than a KiB for each request


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


URLS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat")


def body(draw):
    """A request, of which a part is spoiled three times of four."""
    prompt = "".join(draw.choices('abcdef {}<|>"\\', k=draw.randint(0, 400)))
    made = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "prompt": prompt,
        "max_tokens": draw.randint(1, 12),
        "stream": draw.random() < 0.5,
        "seed": draw.randint(0, 9),
        "n": draw.choice([1, 1, 1, 3]),
        "temperature": draw.random(),
    }
    kind = draw.randrange(4)
    if kind == 1:
        made[draw.choice(list(made))] = draw.choice([None, -1, 10**30, "x", [], {}, [[1]], {"a": 1}])
    if kind == 2:
        del made[draw.choice(list(made))]
    data = json.dumps(made).encode()
    return data if kind < 3 else data[: draw.randrange(len(data))]


class Load:
    """Random work until a time: threads that call, cancel, and send what nobody should."""

    def __init__(self, llm, client, seconds, seed):
        self.llm, self.client, self.end, self.seed = llm, client, time.monotonic() + seconds, seed
        self.done, self.errors = Counter(), []

    def run(self):
        threads = [
            threading.Thread(target=self._work, args=(what, random.Random(self.seed + n)))
            for n, what in enumerate((self.call, self.call, self.cancel, self.cancel, self.post, self.post, self.many))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, what, draw):
        try:
            while time.monotonic() < self.end:
                what(draw)
                self.done[what.__name__] += 1
        except BaseException as error:
            self.errors.append(error)

    def call(self, draw):
        """A reply by any decoder, which equals what it was before."""
        how = {"max_tokens": draw.randint(1, 30), "spec": draw.choice(["off", "lookup"])}
        how |= draw.choice([{}, {"temperature": 0.9, "seed": 4}, {"logprobs": 2}, {"repetition_penalty": 1.2}])
        prompt = draw.choice("abc") * draw.randint(1, 180)
        assert self.llm.generate(prompt, **how).tokens == self.llm.generate(prompt, **how).tokens

    def cancel(self, draw):
        """A stream that is left after some tokens, or dropped before the first."""
        stream = self.llm.stream("ab" * draw.randint(1, 90), max_tokens=40)
        for _, _ in zip(stream, range(draw.randint(0, 9)), strict=False):
            pass
        stream.cancel()

    def post(self, draw):
        """A request to the server, which is answered with no fault of the server's."""
        answer = self.client.post(draw.choice(URLS), content=body(draw), headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 413), answer.text
        self.done[answer.status_code] += 1

    def many(self, draw):
        """A list that one bad prompt refuses as a whole."""
        prompts = ["ab" * draw.randint(1, 40) for _ in range(draw.randint(2, 12))]
        if draw.random() < 0.3:
            prompts.append("a" * 999)
            with pytest.raises(BimetalError):
                self.llm.generate(prompts)
        else:
            self.llm.generate(prompts, max_tokens=3)


@pytest.mark.slow
def test_a_soak_leaves_nothing(llm):
    """Random load, cancellations and malformed requests; then nothing runs, and what is held is what was."""
    with open(os.devnull, "w") as log:  # kept, its lines would be most of the growth
        client = client_of(llm, most=10**4, log=log)
        client.service.short_jobs.submit(int).result()  # its thread is there from then on
        warm = Load(llm, client, 5, 0)
        warm.run()
        before, at = check_idle(llm), resident()
        load = Load(llm, client, SECONDS, 100)
        load.run()
        after = check_idle(llm)
    print(load.done, before, after, f"{(resident() - at) / MIB:.1f} MiB more")
    assert (warm.errors, load.errors) == ([], [])
    assert all(load.done[name] for name in ("call", "cancel", "post", "many", 200, 400))
    assert (after.slots, after.descriptors, after.threads) == (before.slots, before.descriptors, before.threads)
    assert client.service.running == 0
    assert abs(after.objects - before.objects) < 3000
    assert resident() - at < 16 * MIB
