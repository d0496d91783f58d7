"""A server that is killed under load: what it leaves in --cache-dir is whole or ignored, and replies stay the same."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEM = "".join(f"def f{at}(x):\n    return x + {at}\n\n" for at in range(40))  # some 500 tokens
KILLS = 4


@contextmanager
def server(folder):
    """Yield a server of the demo, its address, and the lines that it has logged when it ends."""
    command = [sys.executable, "-m", "generate", "serve", "--port", "0", "--backend", "numpy", "--parallel", "4"]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    made = subprocess.Popen(
        [*command, "--cache-dir", str(folder)], stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
    )
    made.lines = []
    while "ready" not in (line := made.stderr.readline()):
        assert line, made.lines
        made.lines.append(line)
    made.url = re.search(r"http://\S+", "".join(made.lines))[0]
    reading = threading.Thread(target=lambda: made.lines.extend(made.stderr), daemon=True)
    reading.start()
    try:
        yield made
    finally:
        made.kill()
        made.wait()
        reading.join(10)


def ask(url, prompt, most):
    """The text of a greedy reply and its usage."""
    body = json.dumps({"prompt": prompt, "max_tokens": most, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        found = json.loads(response.read())
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt(at):
    return f"{SYSTEM}# {at}\ndef g{at}(x):\n"


@pytest.mark.slow
def test_kill_under_load(tmp_path, demo):
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    rng, cached = random.Random(5), 0
    expected = {at: demo.generate(prompt(at), max_tokens=8, temperature=0).text for at in range(4)}
    for kill in range(KILLS):
        with server(tmp_path) as made:
            for at, text in expected.items():
                found, read = ask(made.url, prompt(at), 8)
                assert found == text, f"start {kill}, prompt {at}"
                cached += read * (kill > 0)
            answered = []

            def load(url, first, answered=answered):
                try:
                    for at in range(first, first + 1000):
                        ask(url, prompt(at)[at % 97 :], 64)
                        answered.append(at)
                except (OSError, ValueError):
                    return  # the server is gone

            clients = [threading.Thread(target=load, args=(made.url, 1000 * n)) for n in range(1, 7)]
            for client in clients:
                client.start()
            while len(answered) < 3:
                assert made.poll() is None
                time.sleep(0.01)
            time.sleep(rng.random())
            made.send_signal(signal.SIGKILL)
            for client in clients:
                client.join(60)
        complaints = [line for line in made.lines if not re.search(r" (loading|ready|request) ", line)]
        assert complaints == []
    assert cached > 0
