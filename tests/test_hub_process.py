"""Downloads in a process of their own: its environment, its terminal and its signals."""
# ruff: noqa: F811  tests take the fixtures of hub_models.py by their names

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from hub_models import BODY, ROOT, cache, partials, running, server  # noqa: F401  fixtures
from hub_server import Fault, HubServer, Repo

from common.hub import resolve_model

# Another process: what its environment, its terminal and its signals do


def interruptible() -> None:
    """Restore Ctrl-C: a shell that starts the tests in the background makes their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(server: HubServer, home: Path, name: str, stderr: int) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
        "HF_HOME": str(home),
        "HF_ENDPOINT": server.url,
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
    }
    code = "import sys; from common.hub import resolve_model; print(resolve_model(sys.argv[1]))"
    command = [sys.executable, "-c", code, name]
    return subprocess.Popen(
        command, env=environment, cwd=home, stdout=subprocess.PIPE, stderr=stderr, preexec_fn=interruptible
    )


def test_the_environment_and_no_bar_without_a_terminal(server: HubServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "org/safe", subprocess.PIPE)
    out, err = process.communicate(timeout=20)
    assert Path(out.decode().strip()).parent.parent == tmp_path / "hub" / "models--org--safe"
    assert err == b""


def test_one_bar_on_a_terminal(server: HubServer, tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    process = start(server, tmp_path, "org/safe", terminal)
    process.communicate(timeout=20)
    os.close(terminal)
    shown = b""
    while select.select([screen], [], [], 0)[0]:
        try:
            shown += os.read(screen, 65536)
        except OSError:  # how Linux reports that the other end is closed
            break
    os.close(screen)
    assert process.returncode == 0
    assert b"org/safe: 100%" in shown
    assert b"614k/614k" in shown
    assert b"Fetching" not in shown
    assert b"config.json" not in shown


def test_two_runs_at_once_fetch_once(server: HubServer, tmp_path: Path) -> None:
    server.faults.append(Fault("GET", "one.Q5_0.gguf", delay=0.1))
    processes = [start(server, tmp_path, "org/one", subprocess.PIPE) for _ in range(2)]
    for out, err in [process.communicate(timeout=20) for process in processes]:
        assert err == b""
        assert Path(out.decode().strip()).read_bytes() == BODY
    assert sum(r.sent for r in server.sent("one.Q5_0.gguf")) == len(BODY)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_leaves_only_the_partial(server: HubServer, tmp_path: Path, cache: Path) -> None:
    server.repos["org/one"] = Repo({"one.Q5_0.gguf": BODY * 20})
    server.faults.append(Fault("GET", "one.Q5_0.gguf", delay=0.02))
    process = start(server, tmp_path, "org/one", subprocess.PIPE)
    wait_for(lambda: any(r.sent > 1_500_000 for r in server.sent("one.Q5_0.gguf")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in err
    (partial,) = partials(cache)
    kept = partial.stat().st_size
    assert kept >= 1 << 20
    assert not any(cache.rglob("*.gguf"))
    assert resolve_model("org/one").read_bytes() == BODY * 20
    assert server.sent("one.Q5_0.gguf")[-1].headers["range"] == f"bytes={kept}-"


def test_the_import_is_light() -> None:
    code = "import sys, common.hub; print(sorted({'huggingface_hub', 'tqdm', 'numpy', 'httpx'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
