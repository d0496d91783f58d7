"""Reads what a server sends: events of a stream."""

import json


def sse(response):
    """The data of each event of a Chat Completions stream, without the last line, which must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[len("data: ") :]) for line in lines[:-1]]


def named(response):
    """(name, data) of each event of a stream whose events have names, which must be their types."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        event, data = block.split("\n")
        name, value = event.removeprefix("event: "), json.loads(data.removeprefix("data: "))
        assert value["type"] == name
        found.append((name, value))
    return found


def ndjson(response):
    """The objects of a stream of lines."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]
