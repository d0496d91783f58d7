"""`python -m generate selftest`: the conformance tests and a short bench on one backend, as one file to send us.

pytest runs in a separate process, so that the report can name a kernel that crashes it. In that process
generate/selftest_plugin.py writes each outcome to a pipe.
"""

import argparse
import datetime
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from tqdm import tqdm

from common.demo import demo_path
from common.errors import BimetalError, UsageError
from common.files import rewrite
from common.hub import resolve_model
from generate.backends import Found, choose
from generate.bench_log import environment, processor
from generate.selftest_plugin import PIPE

ROOT = Path(__file__).parents[1]
PLAIN = ["-m", "not gpu and not model and not slow and not compile and not long and not clients"]
EXTRAS = {"mlx": ".[mlx,test]", "cuda": ".[cuda12,test]", "numpy": ".[test]"}
MODELS = ["tests/models/test_golden.py", "tests/models/test_smollm2.py", "tests/test_demo.py"]
SUITES: dict[str, dict[str, list[str]]] = {  # by backend and title, the arguments of pytest
    "cuda": {
        "ops and kernels": [
            f"tests/ops/test_cuda_{name}.py"
            for name in ("ops", "products", "mixtures", "sampling", "delta", "attention")
        ]
        + ["-m", "gpu"],
        "models": ["tests/models/test_cuda_models.py", "-m", "gpu"],
        "state": ["tests/decode/test_rollback.py", "tests/decode/test_cuda_speculation.py", "-m", "gpu"],
    },
    "mlx": {
        "ops": [f"tests/ops/test_{name}.py" for name in ("mlx_ops", "mlx_weights", "latent_and_window")]
        + ["-k", "mlx", *PLAIN],
        "kernels": [
            f"tests/simt/test_{name}.py" for name in ("quantized", "recurrent", "top_k", "entropy", "wht", "models")
        ]
        + PLAIN,
        "models": [*MODELS, "-k", "mlx", *PLAIN],
        "state": ["tests/test_state.py", "-k", "mlx", *PLAIN],
    },
    "numpy": {
        "ops": ["tests/ops/test_latent_and_window.py", "-k", "numpy", *PLAIN],
        "models": [*MODELS, "-k", "numpy", *PLAIN],
        "state": ["tests/test_state.py", "-k", "numpy", *PLAIN],
    },
}
BENCH = ["--contexts", "128,512", "--new-tokens", "32", "--runs", "3"]
VERSIONS = ("bimetal", "numpy", "mlx", "mlx-metal", "cupy-cuda12x", "cupy-cuda13x", "tokenizers", "pytest")


@dataclass
class Suite:
    """Some tests, and their outcomes so far."""

    title: str
    arguments: list[str]
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)  # by test: passed, failed or skipped; and why
    seconds: float = 0.0
    under_way: str = ""  # a test that has begun and not ended
    error: str = ""  # reason why pytest gave no verdict

    def count(self, outcome: str) -> int:
        return sum(got == outcome for got, _ in self.outcomes.values())

    @property
    def failed(self) -> bool:
        return bool(self.error) or self.count("failed") > 0


@dataclass
class Bench:
    model: str = ""  # its name and file, or why there is none
    path: Path | None = None
    table: str = ""
    error: str = ""


def run(args: argparse.Namespace) -> int:
    found = choose(args.backend)
    _check_tests(found.name)
    bench = _model(args.model)
    started = datetime.datetime.now(datetime.UTC)
    out = Path(args.out or _file_name(found, started))
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out} must be a file in a folder that exists")
    about = _about(found, started)
    suites = [Suite(title, arguments) for title, arguments in SUITES[found.name].items()]

    def save(state: str) -> None:
        took = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
        text = _report(state, about | {"took": f"{took:.0f} s"}, suites, bench, found)
        rewrite(out, _private(text))

    doing = ""
    try:
        for suite in suites:
            doing = suite.title
            save(f"unfinished: {doing} was running when this was written")
            _run_suite(suite)
        doing = "the bench"
        save("unfinished: the bench was running when this was written")
        _run_bench(bench, found.name)
    except KeyboardInterrupt:
        save(f"interrupted by Ctrl-C during {doing}")
        print(f"interrupted; what is known so far is in {out}", file=sys.stderr)
        raise
    failed = any(suite.failed for suite in suites) or bool(bench.error)
    save("finished, with failures" if failed else "finished, nothing failed")
    counts = ", ".join(f"{sum(s.count(o) for s in suites)} {o}" for o in ("passed", "failed", "skipped"))
    for trouble in [f"{s.title}: {s.error}" for s in suites if s.error] + [f"bench: {bench.error}"] * bool(bench.error):
        print(f"error: {trouble}", file=sys.stderr)
    if bench.path is None:
        print(f"no bench: {bench.model}", file=sys.stderr)
    print(f"{counts}; the report is {out}")
    return 1 if failed else 0


def _check_tests(backend: str) -> None:
    install = f"pip install -e '{EXTRAS[backend]}'"
    if not (ROOT / "tests/conftest.py").is_file() or not (ROOT / "pyproject.toml").is_file():
        raise BimetalError(
            f"bimetal was installed without its tests; clone its repository and run there: "
            f"{install} && python -m generate selftest --backend {backend}"
        )
    if find_spec("pytest") is None:
        raise BimetalError(f"pytest is not installed; run in {ROOT}: {install}")


def _model(name: str | None) -> Bench:
    """Choose the model to time: `name`, or without one the demo model if its weights are here."""
    if name is not None:
        path = resolve_model(name)
        return Bench(f"{name} ({path.name})", path.absolute())
    try:
        path = demo_path()
    except BimetalError as error:
        return Bench(f"{error}; give a model by --model")
    return Bench(f"demo ({path.name})", path)


# -- what is run -------------------------------------------------------------------------------------------------------


def _run_suite(suite: Suite) -> None:
    """Run pytest and fill in `suite`. An interrupt ends pytest and is raised again."""
    started = time.perf_counter()
    reading, writing = os.pipe()
    options = ["-p", "generate.selftest_plugin", "-o", "addopts=--strict-markers", "--continue-on-collection-errors"]
    with TemporaryFile("w+", errors="replace") as log, open(reading) as told:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *suite.arguments],
            cwd=ROOT,
            env=os.environ | {PIPE: str(writing)},
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        )
        os.close(writing)
        reader = threading.Thread(target=_listen, args=(suite, told))  # Ctrl-C in this thread loses none of its lines
        reader.start()
        try:
            reader.join()
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        finally:
            reader.join()
            suite.seconds = time.perf_counter() - started
        log.seek(0)
        suite.error = _error(suite, code, log.read())


def _listen(suite: Suite, told: Iterable[str]) -> None:
    with tqdm(desc=suite.title, unit="test", leave=False, disable=None) as bar:
        for line in told:
            match json.loads(line):
                case {"total": int(total)}:
                    bar.reset(total)
                case {"begins": str(test)}:
                    suite.under_way = test
                case {"ends": str()}:
                    suite.under_way = ""
                    bar.update()
                case {"test": str(test), "outcome": str(outcome), "why": str(why)}:
                    suite.outcomes[test] = outcome, why
                    if outcome == "failed":
                        bar.set_postfix(failed=suite.count("failed"))


def _stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _error(suite: Suite, code: int, log: str) -> str:
    """Return why pytest gave no verdict on the tests, by its pytest.ExitCode; "" if it gave one."""
    during = f" during {suite.under_way}" if suite.under_way else ""
    last = " | ".join(line.strip() for line in log.strip().splitlines()[-3:])
    if code < 0:
        return f"pytest was ended by {signal.Signals(-code).name}{during}: {last}"
    if code == 5 and not suite.outcomes:
        return f"no test is selected by {' '.join(suite.arguments)}"
    return "" if code in (0, 1, 5) else f"pytest ended with code {code}{during}: {last}"


def _run_bench(bench: Bench, backend: str) -> None:
    if bench.path is None:
        return
    with tqdm(desc="bench", bar_format="{desc}", leave=False, disable=None):
        done = subprocess.run(
            [sys.executable, "-m", "generate", "bench", "--model", str(bench.path), "--backend", backend, *BENCH],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    bench.table = done.stdout.rstrip()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        bench.error = f"it ended with code {done.returncode}: {last.removeprefix('error: ')}"


# -- the report --------------------------------------------------------------------------------------------------------


def _file_name(found: Found, started: datetime.datetime) -> str:
    chip = re.sub(r"[^a-z0-9]+", "-", _chip(found).lower()).strip("-")
    return f"bimetal-selftest-{_os().split()[0].lower()}-{chip}-{started:%Y-%m-%d-%H%M}.md"


def _chip(found: Found) -> str:
    return found.description.partition(",")[0] if found.name == "cuda" else processor()


def _os() -> str:
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    return f"{system} ({platform.release()}, {platform.machine()})"


def _about(found: Found, started: datetime.datetime) -> dict[str, str]:
    here = environment(found.name)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "began": f"{started:%Y-%m-%d %H:%M} UTC",
        "OS": _os(),
        "chip": here["machine"],
        "memory": f"{memory / 2**30:.1f} GiB",
        "backend": f"{found.name}: {found.description}",
        "versions": ", ".join([f"Python {platform.python_version()}", *filter(None, map(_version, VERSIONS))]),
        "commit": f"{here['commit']}{', with changes' if here['dirty'] == 'yes' else ''}",
    }


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


def _report(state: str, about: dict[str, str], suites: list[Suite], bench: Bench, found: Found) -> str:
    lines = [f"# bimetal self-test: {found.name} on {_chip(found)}", "", f"**{state}**", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in about.items()]
    lines += ["", "## Tests", "", "| suite | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for suite in suites:
        counts = " | ".join(str(suite.count(outcome)) for outcome in ("passed", "failed", "skipped"))
        lines.append(f"| {suite.title} | {counts} | {f'{suite.seconds:.0f}' if suite.seconds else 'not run'} |")
    if found.name == "mlx" and found.description.startswith("CPU"):
        lines += ["", "MLX has no GPU here: the kernels that were not skipped ran in the emulator."]
    for suite in suites:
        lines += _details(suite)
    lines += ["", "## Bench", ""]
    if bench.path is None:
        return "\n".join([*lines, f"No model: {bench.model}.", ""])
    lines += [f"Model: {bench.model}; `python -m generate bench {' '.join(BENCH)}`.", ""]
    if bench.error:
        lines += [f"Failed: {bench.error}", ""]
    return "\n".join([*lines, *_block(bench.table or "not run"), ""])


def _details(suite: Suite) -> list[str]:
    lines = []
    if suite.under_way and not suite.error:
        lines += ["", f"{suite.title}: `{suite.under_way}` was under way."]
    if suite.error:
        lines += ["", f"{suite.title}: {suite.error}"]
    for test, (outcome, why) in suite.outcomes.items():
        if outcome == "failed":
            lines += ["", f"### {suite.title}: `{test}`", "", *_block(why)]
    reasons = Counter(why for outcome, why in suite.outcomes.values() if outcome == "skipped")
    lines += [""] * bool(reasons)
    return lines + [f"- {suite.title}: {count} skipped: {why}" for why, count in reasons.items()]


def _block(text: str) -> list[str]:
    return ["```", text.replace("```", "'''"), "```"]


def _private(text: str) -> str:
    """Replace the names of the sender's own folders in `text`."""
    for folder, name in ((ROOT, "."), (Path.home(), "~")):
        if folder != Path(folder.anchor):
            text = text.replace(str(folder), name)
    return text
