"""Downloads that break off, answers that a hub does not give, and refusals: a server stands in for the Hub."""
# ruff: noqa: F811  tests take the fixtures of hub_models.py by their names

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_models import BODY, SAFETENSORS, cache, files, partials, refusal, running, server  # noqa: F401  fixtures
from hub_server import COMMIT, Fault, HubServer, Repo

from common import hub_download
from common.hub import resolve_model
from common.hub_answers import retry_after

# Downloads that go wrong


def test_a_cut_connection_is_resumed(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", cut=100_000))
    assert resolve_model("org/one").read_bytes() == BODY
    first, second = server.sent("one.Q5_0.gguf")
    assert "range" not in first.headers
    assert second.headers["range"] == "bytes=100000-"
    assert first.sent + second.sent == len(BODY)


def test_a_later_run_resumes_what_an_earlier_one_left(cache: Path, server: HubServer) -> None:
    server.faults += [Fault("GET", "one.Q5_0.gguf", cut=100_000), Fault("GET", "one.Q5_0.gguf", times=5, status=503)]
    assert "503" in refusal("org/one")
    (partial,) = partials(cache)
    assert partial.read_bytes() == BODY[:100_000]
    assert not any(cache.rglob("*.gguf"))
    assert resolve_model("org/one").read_bytes() == BODY
    assert server.sent("one.Q5_0.gguf")[-1].headers["range"] == "bytes=100000-"
    assert sum(r.sent for r in server.sent("one.Q5_0.gguf")) == len(BODY)
    assert partials(cache) == []


def test_a_server_without_ranges_sends_the_whole_file_again(cache: Path, server: HubServer) -> None:
    server.faults += [Fault("GET", "one.Q5_0.gguf", cut=100_000), Fault("GET", "one.Q5_0.gguf", whole=True)]
    assert resolve_model("org/one").read_bytes() == BODY


def test_a_connection_that_never_lasts(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", times=99, cut=1000, whole=True))
    assert "broke off" in refusal("org/one")
    assert len(server.sent("one.Q5_0.gguf")) == 6
    assert not any(cache.rglob("*.gguf"))


def test_a_file_shorter_than_listed(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", times=99, short=1, whole=True))
    assert f"one.Q5_0.gguf of org/one ends before its {len(BODY)} bytes" in refusal("org/one")
    assert not any(cache.rglob("*.gguf"))


def test_a_small_file_shorter_than_listed(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", f"{COMMIT}/config.json", times=99, short=1))
    assert "config.json of org/safe ends before its 16 bytes" in refusal("org/safe")
    assert not any(cache.rglob("config.json"))
    server.faults.clear()
    assert files(resolve_model("org/safe")) == SAFETENSORS


def test_damaged_content(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", flip=True))
    assert "arrived damaged" in refusal("org/one")
    assert partials(cache) == []
    assert not any(cache.rglob("*.gguf"))
    assert resolve_model("org/one").read_bytes() == BODY


def test_server_errors_are_retried(cache: Path, server: HubServer) -> None:
    server.faults += [
        Fault("GET", "/api/models/org/safe", times=2, status=500),
        Fault("GET", "model-00001-of-00002.safetensors", times=2, status=502),
        Fault("GET", "/config.json", status=503),
    ]
    assert files(resolve_model("org/safe")) == SAFETENSORS
    server.faults.append(Fault("GET", "/api/", times=99, status=503))
    assert "answers 503 Service Unavailable for org/one; try again later" in refusal("org/one")


def test_a_file_that_is_listed_but_gone(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", status=404))
    assert "answers 404" in refusal("org/one")


def test_a_full_disk(cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(BODY) - 1))
    assert re.search(r"needs 0\.00 GB, 0\.0 MB more than the disk of .* set HF_HOME", refusal("org/one"))
    assert server.sent("one.Q5_0.gguf") == []


def test_a_full_disk_is_enough_for_what_is_already_there(
    cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_model("org/one")
    server.repos["org/one"] = Repo(server.repos["org/one"].files, commit="d" * 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert resolve_model("org/one").read_bytes() == BODY


def test_a_disk_that_fills_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hub_download, "_append", append)
    assert "is full; make room, or set HF_HOME" in refusal("org/one")


def test_a_cache_that_cannot_be_written(cache: Path, server: HubServer) -> None:
    cache.write_text("a file where the folder should be")
    assert "cannot write to the cache" in refusal("org/one")


# Answers that a hub does not give


def in_listing(**changes: object) -> Callable[[dict[str, Any]], None]:
    """Changes of the one weight file of org/one, or with `sha` of the listing."""

    def change(body: dict[str, Any]) -> None:
        file = next(f for f in body["siblings"] if f["rfilename"] == "one.Q5_0.gguf")
        for key, value in changes.items():
            (body if key == "sha" else file["lfs"] if key == "sha256" else file)[key] = value

    return change


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sha256": "../../../../outside"}, "the SHA-256 '../../../../outside' of one.Q5_0.gguf"),
        ({"sha256": "A" * 64}, "which has not 64 hexadecimal digits"),
        ({"sha256": 5}, "the SHA-256 5 of one.Q5_0.gguf"),
        ({"sha256": None}, "the SHA-256 None of one.Q5_0.gguf"),
        ({"sha": "../../../outside"}, "the commit '../../../outside', which is not a hexadecimal hash"),
        ({"sha": 5}, "the commit 5"),
        ({"sha": None}, "the commit None"),
        ({"sha": ["c0ffee"]}, "the commit ['c0ffee']"),
        ({"size": "x"}, "the size 'x' of one.Q5_0.gguf, which is not a number of bytes"),
        ({"size": -1}, "the size -1"),
        ({"size": True}, "the size True"),
        ({"size": None}, "the size None"),
        ({"rfilename": "/abs.gguf"}, "the file name '/abs.gguf', which is not a path inside the repository"),
        ({"rfilename": "..\\x.gguf"}, "the file name '..\\\\x.gguf'"),
        ({"rfilename": "a/../../x.gguf"}, "the file name 'a/../../x.gguf'"),
        ({"rfilename": "C:x.gguf"}, "the file name 'C:x.gguf'"),
        ({"rfilename": "x\n.gguf"}, "the file name 'x\\n.gguf'"),
        ({"rfilename": 5}, "the file name 5"),
        ({"lfs": "x"}, "does not answer like a model hub"),
    ],
)
def test_odd_values_in_a_listing(cache: Path, server: HubServer, changes: dict[str, Any], says: str) -> None:
    server.faults.append(Fault("GET", "/api/", times=99, change=in_listing(**changes)))
    assert says in refusal("org/one")
    assert not any(path.is_file() for path in cache.parent.rglob("*"))


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("name", ["../../../outside", "/{}/outside"])
def test_no_header_names_a_file(cache: Path, server: HubServer, header: str, name: str) -> None:
    """huggingface_hub writes to the path that an ETag names."""
    value = f'"{name.format(cache.parent)}"'
    server.faults += [Fault(method, "", times=99, headers={header: value}) for method in ("HEAD", "GET")]
    assert files(resolve_model("org/safe")) == SAFETENSORS
    assert [path.name for path in cache.parent.rglob("*outside*")] == []


def test_a_small_file_is_checked_by_its_hash_in_git(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", f"{COMMIT}/config.json", flip=True))
    assert "config.json of org/safe arrived damaged: its hash is" in refusal("org/safe")
    assert files(resolve_model("org/safe")) == SAFETENSORS


def test_a_disk_without_links(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    for _ in range(2):
        folder = resolve_model("org/safe")
        assert files(folder) == SAFETENSORS
        assert not any(path.is_symlink() for path in folder.iterdir())


@pytest.mark.parametrize("endpoint", ["http://[::", "ftp://127.0.0.1", "huggingface.co", "http://", "http://x:99999"])
def test_odd_endpoints(cache: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says = f"HF_ENDPOINT is {endpoint!r}; it must be an address such as https://huggingface.co"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert refusal("org/one") == says


@pytest.mark.parametrize("command", [["inspect", "org/one"], ["fit", "org/one"], ["list"], ["rm", "org/one"]])
def test_an_odd_endpoint_is_refused_before_huggingface_hub_reads_it(command: list[str]) -> None:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    given = {**os.environ, "HF_ENDPOINT": "http://[::"}
    done = subprocess.run([sys.executable, "-m", "generate", *command], capture_output=True, text=True, env=given)
    assert done.stderr == "error: HF_ENDPOINT is 'http://[::'; it must be an address such as https://huggingface.co\n"
    assert done.returncode == 1


@pytest.mark.parametrize("revision", ["../main", "..", "/main", "a\\b", ""])
def test_odd_revisions(cache: Path, server: HubServer, revision: str) -> None:
    assert refusal("org/one", revision=revision).startswith(f"revision {revision!r} is not the name of a branch")
    assert server.requests == []


@pytest.mark.parametrize("kept", [0, 1000, len(BODY) + 1])
def test_a_cached_file_of_another_size_is_fetched_again(cache: Path, server: HubServer, kept: int) -> None:
    path = resolve_model("org/one")
    path.resolve().write_bytes((BODY + b"x")[:kept])
    server.requests.clear()
    assert resolve_model("org/one").read_bytes() == BODY
    assert sum(r.sent for r in server.sent("one.Q5_0.gguf")) == len(BODY) - (kept if kept < len(BODY) else 0)
    folder = resolve_model("org/safe")
    (folder / "config.json").resolve().write_bytes(b"{")
    assert files(resolve_model("org/safe")) == SAFETENSORS


@pytest.mark.parametrize("path", ["/api/", "one.Q5_0.gguf"])
def test_retry_after_is_waited_for(cache: Path, server: HubServer, path: str) -> None:
    server.faults.append(Fault("GET", path, status=429, headers={"Retry-After": "1"}))
    start = time.monotonic()
    assert resolve_model("org/one").read_bytes() == BODY
    assert time.monotonic() - start >= 1


@pytest.mark.parametrize("path", ["/api/", "one.Q5_0.gguf"])
@pytest.mark.parametrize("value", ["3600", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_long_retry_after_ends_the_attempts(cache: Path, server: HubServer, path: str, value: str) -> None:
    server.faults.append(Fault("GET", path, times=99, status=429, headers={"Retry-After": value}))
    assert re.search(r"answers 429 Too Many Requests for org/one; try again in \d{4,} seconds", refusal("org/one"))


@pytest.mark.parametrize("value", ["", "soon", "-5", "1.5", "²"])
def test_an_unusable_retry_after_is_ignored(value: str) -> None:
    assert retry_after(SimpleNamespace(headers={"Retry-After": value})) == 0


def test_an_answer_that_will_not_pass_is_not_to_be_tried_again(cache: Path, server: HubServer) -> None:
    server.faults.append(Fault("GET", "/api/", times=99, status=403))
    assert refusal("org/one").endswith("answers 403 Forbidden for org/one")


# Permissions


def test_refusals_of_the_hub(cache: Path, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"{server.url}/org/gated"
    assert refusal("org/gated") == (
        f"org/gated is gated: accept its licence on {page} and set HF_TOKEN to a token of that account"
    )
    for name in ("org/nothing", "org/hidden"):
        assert refusal(name).startswith(f"{name} is neither an existing path nor a model of {server.url}")
    assert "has no .gguf file and no .safetensors, only config.json, pytorch_model.bin" in refusal("org/pickle")
    server.faults.append(Fault("GET", "/api/", status=401))
    assert "refuses the token" in refusal("org/one")


@pytest.mark.parametrize("name", ["org/gated", "org/hidden"])
def test_the_token_goes_to_the_hub_and_nowhere_else(
    cache: Path, server: HubServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert resolve_model(name).read_bytes() == BODY
    assert {r.headers.get("authorization") for r in server.requests if not r.cdn} == {"Bearer hf_secret"}
    assert {r.headers.get("authorization") for r in server.requests if r.cdn} == {None}
