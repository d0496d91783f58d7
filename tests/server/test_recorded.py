"""What real clients sent is answered as it was when they accepted the answers: recordings, replayed without them."""

import asyncio
import json
import math
from contextlib import ExitStack

import pytest
from asgi import call
from conftest import client_of
from recording import FOLDER, Ids, masked, media_of, parsed, scrub, shown
from scripted import Scripted

import generate

RECORDINGS = sorted(FOLDER.glob("*.json"))


@pytest.fixture
def model(tmp_path):
    """What makes the model of a recording. It has read nothing before, which answers would count as cached tokens."""
    with ExitStack() as loaded:

        def made(name):
            if name == "demo":
                return loaded.enter_context(generate.load("demo", backend="numpy"))
            return Scripted(tmp_path / "model", context=1 << 20)

        yield made


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_replay(path, model):
    recording = json.loads(path.read_text(encoding="utf-8"))
    client = client_of(model(recording["model"]), recording["model"])
    ids = Ids()

    async def run():
        for at, exchange in enumerate(recording["exchanges"]):
            written = iter(exchange["written"])
            if recording["model"] == "scripted":
                client.llm.write = lambda prompt, written=written: next(written)
            sent = exchange["sent"]
            body = b"" if sent is None else json.dumps(ids.restored(sent)).encode()
            target = ids.restored(exchange["path"])
            answer = await call(client.app, exchange["method"], target, body, exchange["headers"])
            found = shown(parsed(media_of(answer.headers), answer.body), sent, ids, recording["model"])
            where = f"{path.name}, exchange {at}: {exchange['method']} {exchange['path']}"
            assert (answer.status, media_of(answer.headers)) == (exchange["status"], exchange["media"]), where
            assert [*differences(found, exchange["answered"])] == [], where
            assert next(written, None) is None, f"{where}: fewer replies than recorded"

    asyncio.run(run())


def differences(found, expected, at="answer"):
    """Where two JSON values differ; floats may by a thousandth, as products of matrices do between machines."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        for key in expected:
            yield from differences(found[key], expected[key], f"{at}.{key}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, pair in enumerate(zip(found, expected, strict=True)):
            yield from differences(*pair, f"{at}[{index}]")
    elif isinstance(found, float) and isinstance(expected, int | float):
        if not math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-3):
            yield f"{at}: {found} is not {expected}"
    elif found != expected:
        yield f"{at}: {found!r:.500} is not {expected!r:.500}"


def test_the_documentation_lists_the_clients():
    clients = {json.loads(path.read_text(encoding="utf-8"))["client"] for path in RECORDINGS}
    table = (FOLDER.parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
    assert len(clients) >= 9
    assert [client for client in clients if f"| {client.replace(' ', ' | ')} |" not in table] == []


def test_a_changed_answer_is_found():
    assert [*differences({"a": [1, {"b": "x"}]}, {"a": [1, {"b": "x"}]})] == []
    for changed in ({"a": [1, {"b": "y"}]}, {"a": [1]}, {"a": [1, {"b": "x", "c": None}]}, {}):
        assert len([*differences(changed, {"a": [1, {"b": "x"}]})]) == 1


def test_what_belongs_to_a_machine_is_not_stored():
    text = "in /home/ada/work/x.py and /tmp/a-b_1, not https://a.b/home/x; 0190f3a2-1234-7abc-8def-0123456789ab"
    assert scrub({"a": [text]})["a"] == [
        "in /path and /path, not https://a.b/home/x; 00000000-0000-0000-0000-000000000000"
    ]
    assert len(scrub("x" * 5000)) < 200
    ids = Ids()
    first = masked({"id": "resp_" + "0a" * 12, "created_at": 5}, ids, True)
    assert first == {"id": "resp_#1", "created_at": 0}
    assert ids.known({"previous": "resp_" + "0a" * 12}) == {"previous": "resp_#1"}
    assert ids.restored({"previous": "resp_#1"}) == {"previous": "resp_" + "0a" * 12}
