"""Clients of servers in this process, over the demo model and over a model that writes what a test gives it."""

import io
import os
import re
from dataclasses import dataclass
from typing import Any

import pytest

import generate

BASE = "http://localhost"


def client_of(llm, name="demo", policy=None, most=64, log=None, options=None):
    """A client of a server over `llm`; `app`, `service` and `log` are its attributes. Skips without the extra."""
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    testclient = pytest.importorskip("starlette.testclient", reason="the server extra is not installed")
    from generate.server.app import build
    from generate.server.guard import Policy
    from generate.server.log import Log
    from generate.server.service import Service

    service = Service(most, options=options)
    service.serve(llm, name)
    log = log or io.StringIO()
    app = build(service, policy or Policy(), Log(stream=log))
    client = testclient.TestClient(app, base_url=BASE)
    client.app, client.service, client.log, client.llm = app, service, log, llm
    return client


@pytest.fixture(scope="session")
def demo():
    with generate.load("demo", backend="numpy") as llm:
        yield llm


@pytest.fixture(scope="session")
def client(demo):
    """A client of the demo model."""
    return client_of(demo)


@pytest.fixture
def scripted(tmp_path):
    """A client of a scripted model, which is its `llm`."""
    from scripted import Scripted

    return client_of(Scripted(tmp_path / "model"), "scripted")


@dataclass
class Live:
    """A server on loopback, for clients that open connections.

    llm     the model; tests set what a scripted one writes
    client  name and version of the program that calls, for the recording
    """

    url: str
    llm: Any
    recorder: Any
    client: str = ""


@pytest.fixture
def live(request, tmp_path):
    """A server of a scripted model whose context an agent's prompt fits into."""
    from scripted import Scripted

    yield from _live(request, Scripted(tmp_path / "model", context=1 << 20), "scripted")


@pytest.fixture
def live_demo(request, demo):
    """A server of the demo model."""
    yield from _live(request, demo, "demo")


def _live(request, llm, name):
    """Serve `llm`; with RECORD=1 in the environment, store what the test's client sends and is answered."""
    from recording import Recorder
    from serving import serving

    recorder = Recorder(client_of(llm, name).app)
    with serving(recorder) as url:
        made = Live(url, llm, recorder)
        yield made
    if os.environ.get("RECORD") == "1" and recorder.exchanges:
        recorder.save(re.sub(r"\[(.*)\]", r"_\1", request.node.name.removeprefix("test_")), made.client, name)
