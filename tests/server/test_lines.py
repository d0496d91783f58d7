"""Lines of answers: clients that end a line at other characters than a line feed read each event whole."""

import json

import pytest

TEXT = "a\u2028b\u2029c\x85d é\U0001f600"
USER = {"messages": [{"role": "user", "content": "Hello?"}]}
STREAMS = {
    "/v1/chat/completions": USER,
    "/v1/completions": {"prompt": "Hello?"},
    "/v1/responses": {"input": "Hello?"},
    "/v1/messages": {**USER, "max_tokens": 99},
    "/api/chat": USER,
    "/api/generate": {"prompt": "Hello?"},
}


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("path", STREAMS)
def test_a_line_ends_at_line_feeds_alone(scripted, path, logprobs):
    scripted.llm.text, scripted.llm.cut = TEXT, 1
    more = {"logprobs": 0 if path == "/v1/completions" else True} if logprobs else {}
    for stream in (True, False):
        text = scripted.post(path, json={**STREAMS[path], **more, "stream": stream}).content.decode()
        assert text.splitlines() == text.removesuffix("\n").split("\n")
        assert "".join(texts(text)).count(TEXT) >= 1


def texts(answer):
    """Every text of an answer's events, in order."""
    for line in answer.split("\n"):
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield from strings(json.loads(data))


def strings(value):
    """Every text that stands under a name by which a reply is sent."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if key in ("content", "text", "delta", "response") and isinstance(inner, str):
            yield inner
        else:
            yield from strings(inner)
