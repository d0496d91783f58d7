"""compute-sanitizer over the kernels' tests: python tests/sanitize.py [FILE ...]. Needs a GPU and a CUDA toolkit.

memcheck runs all tests marked gpu and notes which builds of kernels each launches. racecheck, which takes a hundred
times as long as a test by itself, runs tests that together launch every build. Printed are what they report of our
kernels, tests that fail or do not end, and builds that racecheck has not seen; the exit code is 1 if there is any.

This file is also the pytest plugin of the processes that it starts. Each takes the next test that no other has taken:
under pytest-xdist compute-sanitizer hangs.
"""

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# the tools take some of the host's memory, and of the device's they see none that a pool keeps
TESTS = ["-m", "gpu and not model and not slow", "-k", "not host_memory and not memory_of"]
LARGE = "real_widths"  # tests that take up to 28 GB of host memory each under racecheck
OPTIONS = {"memcheck": [], "racecheck": ["--num-cuda-barriers", "64"]}  # more than it expects by itself
FOLDER = "BIMETAL_SANITIZE"  # chosen.json, where tests are chosen; claims/; results.*.jsonl

# -- in each process ---------------------------------------------------------------------------------------------------

launched: set[str] = set()  # builds, by the test that runs
outcomes: set[str] = set()  # of its parts


def pytest_sessionstart() -> None:
    import cupy

    from cuda_backend import launch

    cupy.cuda.set_allocator(None)  # a pool would hide what reads freed memory
    compiled = launch._kernel

    def noted(device: int, stem: str, name: str, defines: tuple[str, ...], shared: int, second: tuple[str, ...]) -> Any:
        launched.add(" ".join((f"{stem}.cu", name, *defines, *second)))
        return compiled(device, stem, name, defines, shared, second)

    launch._kernel = noted  # type: ignore[assignment]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcomes.add(report.outcome)


def pytest_runtestloop(session: pytest.Session) -> bool:
    folder = Path(os.environ[FOLDER])
    items = session.items
    if (chosen := folder / "chosen.json").exists():
        place = {test: n for n, test in enumerate(json.loads(chosen.read_text()))}
        items = sorted((i for i in items if i.nodeid in place), key=lambda i: place[i.nodeid])
    mine = (item for n, item in enumerate(items) if taken(folder / "claims" / str(n), item.nodeid))
    item = next(mine, None)
    while item:
        following = next(mine, None)
        launched.clear()
        outcomes.clear()
        with (folder / "large").open("a") as turn:
            if LARGE in item.nodeid:
                fcntl.flock(turn, fcntl.LOCK_EX)
            began = time.perf_counter()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds = time.perf_counter() - began
        result = {"test": item.nodeid, "outcomes": sorted(outcomes), "seconds": seconds, "builds": sorted(launched)}
        with (folder / f"results.{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps(result), file=file)
        item = following
    return True


def taken(claim: Path, test: str) -> bool:
    """By this process, for no other has taken it."""
    try:
        with claim.open("x") as file:
            file.write(test)
    except FileExistsError:
        return False
    return True


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600, help="after which a tool is stopped (3600)")
    parser.add_argument("tests", nargs="*", help="files of tests; else all that have tests marked gpu")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as when interrupted: no process of ours goes on
    tests = args.tests or [str(p) for p in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()]
    work = Path(tempfile.mkdtemp(prefix="bimetal-sanitize-"))
    print(f"logs: {work}", flush=True)

    results = run("memcheck", work, tests, args.seconds)
    ran = [result for result in results if result["builds"]]
    builds = {build for result in ran for build in result["builds"]}
    print(f"memcheck: {len(ran)} tests launch {len(builds)} builds", flush=True)
    clean = bool(ran) and told(work / "memcheck", results, builds)

    chosen = choose(ran)
    results = run("racecheck", work, tests, args.seconds, chosen)
    missed = sorted(builds - {build for result in results for build in result["builds"]})
    print(f"racecheck: {len(results)} of {len(chosen)} tests, {len(builds) - len(missed)} of {len(builds)} builds")
    print(*(f"  not launched: {build}\n" for build in missed), sep="", end="")
    clean = told(work / "racecheck", results, builds) and not missed and clean
    print("clean" if clean else "not clean")
    return 0 if clean else 1


def run(
    name: str, work: Path, tests: list[str], seconds: float, chosen: list[str] | None = None
) -> list[dict[str, Any]]:
    """What pytest made of the tests, or those chosen, in many processes under the tool, whose logs are N.log."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if not tool:
        sys.exit("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    folder = work / name
    (folder / "claims").mkdir(parents=True)
    if chosen is not None:
        (folder / "chosen.json").write_text(json.dumps(chosen))
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", FOLDER: str(folder)}
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sanitize", *TESTS, *tests]
    began, processes = time.monotonic(), []
    try:
        for n in range(max(1, (os.cpu_count() or 2) - 1)):
            command = [tool, "--tool", name, *OPTIONS[name], "--show-backtrace", "device"]
            command += ["--log-file", str(folder / f"{n}.log"), *pytest_]
            with (folder / f"{n}.out").open("w") as out:
                started = subprocess.Popen(
                    command, stdout=out, stderr=out, env=environment, cwd=ROOT, start_new_session=True
                )
            processes.append(started)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, began + seconds - time.monotonic()))
    finally:  # out of time or interrupted
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    lines = [line for path in folder.glob("results.*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def choose(results: Iterable[dict[str, Any]]) -> list[str]:
    """Tests that together launch every build, those that take longest first."""
    seen: set[str] = set()
    chosen = []
    for result in sorted(results, key=lambda r: r["seconds"] / len(r["builds"])):
        if not seen.issuperset(result["builds"]):
            seen.update(result["builds"])
            chosen.append(result)
    return [result["test"] for result in sorted(chosen, key=lambda r: -r["seconds"])]


def told(folder: Path, results: list[dict[str, Any]], builds: Iterable[str]) -> bool:
    """Print what went wrong under a tool; True if nothing did."""
    failed = [result["test"] for result in results if "failed" in result["outcomes"]]
    claims = {claim.read_text() for claim in (folder / "claims").iterdir()}
    cut_off = sorted(claims - {result["test"] for result in results})
    ours = {build.split()[1] for build in builds}
    reports = Counter(report for log in folder.glob("*.log") for report in reports_of(log, ours))
    print(*(f"  failed: {test}\n" for test in failed), sep="", end="")
    print(*(f"  did not end: {test}\n" for test in cut_off), sep="", end="")
    print(*(f"  {count} times:\n{report}\n" for report, count in reports.most_common()), sep="", end="", flush=True)
    return not failed and not cut_off and not reports


def reports_of(log: Path, ours: set[str]) -> list[str]:
    """What the tool reports of a process, without what differs between two reports of the same.

    Not what it reports of other kernels alone: racecheck has found races in those of cuBLAS.
    """
    text = log.read_text(errors="replace")
    out = [] if "SUMMARY" in text or "before first instrumented" in text else ["    the process left no summary"]
    for block in re.split(r"^=+ *\n", text, flags=re.MULTILINE):
        lines = [re.sub(r"^=+ ?", "    ", line) for line in block.splitlines()]
        said = "\n".join(line for line in lines if not re.search("COMPUTE-SANITIZER|SUMMARY", line))
        named = set(re.findall(r"(\w+)(?:\(.*\))?\+0x", said))
        of_pytest = said.strip() == "Target application returned an error"  # which tells what has failed
        of_idle = "before first instrumented" in said  # a process that found no test to take
        if said and not of_pytest and not of_idle and (not named or named & ours):
            out.append(re.sub(r"(?<!\+)0x[0-9a-f]+|\(\d+,\d+,\d+\)|\[\d+ hazards\]", "#", said))
    return out


if __name__ == "__main__":
    sys.exit(main())
