"""Clients of servers in this process, over the demo model and over a model that writes what a test gives it."""

import io

import pytest

import generate

BASE = "http://localhost"


def client_of(llm, name="demo", policy=None, most=64, log=None):
    """A client of a server over `llm`; `app`, `service` and `log` are its attributes. Skips without the extra."""
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    testclient = pytest.importorskip("starlette.testclient", reason="the server extra is not installed")
    from generate.server.app import build
    from generate.server.guard import Policy
    from generate.server.log import Log
    from generate.server.service import Service

    service = Service(most)
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
