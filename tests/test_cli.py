"""The command line: output, streams and exit codes."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import tiny_eagle
from tiny_chat import TEMPLATE, write

from common.engine import Engine
from common.errors import BimetalError
from common.reference import NumpyOps
from common.step import Step
from generate import bench_streams
from generate.__main__ import main
from generate.backends import open_backend, usable
from generate.bench_streams import EveryToken, measure
from generate.cli import parse
from generate.server_flags import flags_of

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Run a command in this process; (exit code, stdout, stderr)."""

    def run(*argv: str, stdin: str | None = None, model: bool = True) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main([*argv, *(("--model", folder, "--backend", "numpy") if model else ())])
        return code, *capsys.readouterr()

    return run


def test_help_is_quick_and_imports_no_backend():
    code = (
        "import sys; from generate.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'mlx', 'cupy', 'tokenizers', 'jinja2', 'huggingface_hub', 'tqdm'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for flag in ("--temperature", "--chat", "--stop", "devices", "inspect", "bench"):
        assert flag in done.stdout


def test_a_prompt_streams_to_stdout_and_nothing_else(run):
    code, out, err = run("--prompt", "hi", "-n", "8")
    assert (code, err) == (0, "")
    assert len(out) > 1
    assert out.endswith("\n")


def test_stdin_is_the_prompt(run):
    expected = run("--prompt", "hi", "-n", "8")[1]
    assert run("-n", "8", stdin="hi")[1] == expected
    assert run("--prompt", "-", "-n", "8", stdin="hi")[1] == expected


def test_a_prompt_in_a_file(run, tmp_path):
    (tmp_path / "text").write_text("hi")
    expected = run("--prompt", "hi", "-n", "8")[1]
    assert run("-f", str(tmp_path / "text"), "-n", "8") == (0, expected, "")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"caf\xe9")
    for code, argv, message in (
        (1, ["-f", str(tmp_path / "no")], f"{tmp_path / 'no'}: No such file or directory"),
        (1, ["-f", str(tmp_path / "binary")], f"{tmp_path / 'binary'} is not UTF-8: unexpected end of data at byte 3"),
        (2, ["-f", str(tmp_path / "empty")], f"{tmp_path / 'empty'} is empty; a prompt must have at least one"),
        (2, ["-f", "a", "-p", "a"], "--prompt and --file exclude each other; either gives the prompt"),
        (2, ["-f", "a", "--chat"], "--chat and --file exclude each other; in a chat the prompt is typed"),
    ):
        got, out, err = run(*argv)
        assert (got, out, err.count("\n")) == (code, "", 1), err
        assert err.startswith(f"error: {message}")


def test_flags_have_the_names_of_llama_cpp():
    short = parse(["-hf", "a/b", "--ctx-size", "64", "-n", "4", "-s", "1", "-md", "demo", "-sys", "Brief.", "-p", "hi"])
    words = ["-m", "a/b", "--ctx", "64", "--predict", "4", "--seed", "1", "--draft", "demo", "--system", "Brief."]
    assert vars(short) == vars(parse([*words, "--prompt", "hi"]))
    assert parse(["-cnv"]).command == "chat"
    assert parse(["serve", "-np", "2"]).load.parallel == 2


def test_numbers_that_stand_for_no_number():
    """llama.cpp's -1 for no limit and for a new seed, and 0 for the model's own context, were refused."""
    plain = parse(["-p", "hi"])
    for flags in (["-n", "-1"], ["--predict=-2"], ["-c", "0"], ["-s", "-1"], ["-n", "-1", "-c", "0"]):
        given = parse(["-p", "hi", *flags])
        assert (given.options, given.load) == (plain.options, plain.load)
    assert parse(["bench", "-c", "0"]).options.ctx is None
    assert parse(["serve", "-n", "-1", "-c", "0"]).options == {}


def test_values_by_name_become_flags_of_a_server():
    """As replicas take them; false turns off what is on by default."""
    given = {"warmup": False, "log_json": "true", "insecure": "false", "allow_host": ["a", "b"], "parallel": 2}
    found = flags_of(given | {"kv_rotate_k": "false", "kv": "q8"})
    hosts = ["--allow-host=a", "--allow-host=b"]
    assert found == ["--no-warmup", "--log-json", *hosts, "--parallel=2", "--no-kv-rotate-k", "--kv=q8"]
    args = parse(["serve", *found])
    assert (args.warmup, args.log_json, args.insecure, args.load.kv_rotate_k) == (False, True, False, False)


def test_the_model_of_a_server_needs_no_flag():
    for argv in (["demo-wedlm"], ["--port", "0", "demo-wedlm"], ["-m", "demo-wedlm"]):
        assert parse(["serve", *argv]).model == "demo-wedlm"
    assert parse(["serve"]).model == "demo"
    assert parse(["bench", "--runs", "1", "demo-wedlm"]).options.model == "demo-wedlm"


def test_a_reply_without_a_limit(run):
    """It goes on to the end of the context, as one without -n."""
    assert run("--prompt", "hi", "-n", "-1", "-c", "64") == run("--prompt", "hi", "-c", "64")


def test_stdin_that_is_not_utf_8(folder):
    process = start("--model", folder, "--backend", "numpy", stdin=subprocess.PIPE)
    out, err = process.communicate(b"caf\xe9", timeout=30)
    assert (process.returncode, out) == (1, b"")
    assert err == b"error: the prompt on stdin is not UTF-8 at character 4\n"


@pytest.mark.parametrize("flags", [(), ("--chat",)])
@pytest.mark.parametrize(
    ("encoding", "why"), [("utf-16", "UTF-16 stream does not start with BOM"), ("utf-16-le", "truncated data")]
)
def test_stdin_that_its_encoding_refuses(folder, monkeypatch, flags, encoding, why):
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    process = start("--model", folder, "--backend", "numpy", *flags, stdin=subprocess.PIPE)
    _, err = process.communicate(b"hello", timeout=30)
    what = "message" if flags else "prompt on stdin"
    given = f"{encoding.upper()}, the encoding that PYTHONIOENCODING or the locale gives stdin"
    assert err.decode(encoding) == f"error: the {what} is not {given}: {why}\n"
    assert process.returncode == 1


def test_raw_sends_no_template(run):

    code, out, _ = run("--prompt", "hi", "--raw", "-n", "8")
    assert code == 0
    assert out != run("--prompt", "hi", "-n", "8")[1]


def test_system_prompt_changes_the_reply(run):
    assert run("--prompt", "hi", "--system", "Be brief.", "-n", "8")[1] != run("--prompt", "hi", "-n", "8")[1]


def test_stats_go_to_stderr(run):
    _, out, err = run("--prompt", "hi", "-n", "8", "--stats")
    assert out == run("--prompt", "hi", "-n", "8")[1]
    for figure in ("prefill", "tok/s", "GB/s", "first token in", "peak memory"):
        assert figure in err


def test_seed_and_stop(run):
    warm = ("--prompt", "hi", "-n", "20", "--temperature", "1.2", "--seed", "4")
    _, out, _ = run(*warm)
    assert run(*warm)[1] == out
    stop = out[5:7]
    assert run(*warm, "--stop", stop)[1] == out[: out.find(stop)] + "\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "x"], "'x' is not a number"),
        (["--temperature", "-1"], "temperature is -1.0; it must be a finite number of at least 0"),
        (["--top-p", "2"], "top_p is 2.0"),
        (["--max-tokens", "0"], "--max-tokens: '0' is not a whole number of at least 1"),
        (["--max-tokens", "-3"], "'-3' is not a whole number of at least 1"),
        (["--ctx", "-1"], "--ctx: '-1' is not a whole number of at least 0"),
        (["--stop", ""], "a stop string is empty"),
        (
            ["--stop", "-x"],
            "--stop: expected one argument; a value that begins with - goes after =, as in --stop=-x; see",
        ),
        (["--memory", "-1GB"], "memory is '-1GB'; it must be bytes, or an amount of memory such as '8GB'"),
        (["--split", "-1,2"], "split is [-1.0, 2.0]; it must be proportions above 0"),
        (["--frequency-penalty", "-inf"], "frequency_penalty is -inf; it must be a finite number"),
        (["-ngl", "99"], "unrecognized arguments: -ngl; leave it out: a GPU holds the whole model; see"),
        (["-t", "4"], "unrecognized arguments: -t; leave it out: all cores are used; see"),
        (["--mlock"], "unrecognized arguments: --mlock; leave it out: files are always mapped into memory; see"),
        (["-i"], "unrecognized arguments: -i; it is --chat; see"),
        (["--mirostat", "2"], "unrecognized arguments: --mirostat; it is not supported: try --min-p; see"),
        (["--lora-scaled", "x"], "--lora-scaled; it is --adapter NAME, or --adapter NAME=X for a scale; see"),
        (["-no-cnv"], "unrecognized arguments: -no-cnv; it is --raw; see"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--chat"], "--chat and --prompt exclude each other"),
        (["--raw", "--system", "x"], "--system and --raw exclude each other"),
        (["--raw", "--parse-special"], "--parse-special and --raw exclude each other"),
        (["--cache-disk", "1GB"], "cache_disk goes with cache_dir, which is not given"),
        (["--prompt", "again"], "argument -p/--prompt: is given more than once"),
        (["--seed", "1", "--seed", "1"], "argument -s/--seed: is given more than once"),
        (["--temperature=--"], "--temperature has the value '--'"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--tree-budget", "136"], "'136' is neither auto nor a whole number from 1 to 135"),
        (["--tree-budget", "9" * 5000], f"'{'9' * 79} is neither auto nor a whole number from 1 to 135"),
        (["--top-k", "9" * 5000], f"--top-k: {'9' * 30}... has 5000 digits; at most 30 are supported"),
        (["--think", "--no-think"], "argument --think/--no-think: is given more than once"),
        (["--temperatur", "1"], "unrecognized arguments: --temperatur; did you mean --temperature?; see"),
        (["there"], "'there' is neither a flag nor the value of one; a text with spaces goes in quotes"),
        (["-n", "0"], "'0' is not a whole number of at least 1; -1 is no limit but the context"),
        (["-n", "-3"], "'-3' is not a whole number of at least 1; -1 is no limit but the context"),
        (["-c", "-1"], "'-1' is not a whole number of at least 0"),
        (["--cache-dir", "-"], "argument --cache-dir: '-' is not supported; give the name of a folder; see"),
        (["--spec", "tree"], "spec tree needs a draft model; give one, or choose lookup"),
        (["--tree-budget", "5"], "and none is chosen; give a draft or choose spec lookup"),
        (["--chain-seed"], "and none is chosen; give a draft and choose spec tree, lookup+tree"),
        (["--spec", "off", "--chain-seed"], "which is off; give a draft and choose spec tree, lookup+tree"),
        (["--spec", "off", "--wedlm-window", "5"], "wedlm_window is for spec wedlm, and spec is off"),
    ],
)
def test_bad_flags_exit_with_2_and_one_sentence(run, argv, message, monkeypatch):
    monkeypatch.setattr("generate.prompt.LLM", lambda *_: pytest.fail("a model was loaded"))
    code, out, err = run("--prompt", "hi", *argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["batch", "-", "out"], "IN"),
        (["batch", "in", "-"], "OUT"),
        (["pack", "demo", "-"], "OUT"),
        (["quantize", "demo", "-"], "OUT"),
        (["quantize", "demo", "--sensitivity", "--text", "in", "--plot", "-"], "--plot"),
        (["perplexity", "demo", "--text", "in", "--save-reference", "-"], "--save-reference"),
        (["bench", "--log", "-"], "--log"),
        (["selftest", "--out", "-"], "--out"),
        (["--spark", "--expert-profile", "-"], "--expert-profile"),
    ],
)
def test_files_that_stdin_and_stdout_cannot_be(capsys, argv, name):
    """A file of the name "-" was made."""
    assert main(argv) == 2
    assert f"argument {name}: '-' is not supported; give the name of a file; see" in capsys.readouterr().err


def test_an_empty_prompt(run):
    for argv, stdin in ((["--raw", "--prompt", ""], None), ([], "")):
        code, out, err = run(*argv, stdin=stdin)
        assert (code, out, "is empty" in err, err.count("\n")) == (2, "", True, 1)


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (
            ["no-such-command"],
            2,
            "is not a command; commands: list, pull, rm, devices, inspect, bench",
        ),
        (["-p", "x", "--model", "/no/such.gguf"], 1, "/no/such.gguf"),
        (["-p", "x", "--model", "nothere.gguf"], 1, "there is no file or directory 'nothere.gguf'"),
        (["-p", "x", "--model", "demo:"], 1, "demo: names no quantization"),
        (["-p", "x", "--max-kv-size", "1"], 2, "max_kv_size is 1; it must be a whole number of at least 8"),
        (["fit", "demo", "-c", "999999999999"], 2, "999999999999 tokens are more than the 2147483647"),
        (["-p", "x", "--backend", "tpu"], 2, "invalid choice: 'tpu'"),
        (["inspect"], 2, "the model is not named; give it as MODEL or by --model"),
        (["inspect", "--model", ""], 1, "model name '' is neither an existing path nor of a supported form"),
        (["inspect", "a", "-m", "b"], 2, "the model is named twice"),
        (["-p", "x", "bench"], 2, "the command bench comes first"),
        (["inspect", "/no/such.gguf"], 1, "/no/such.gguf"),
        (["bench", "--contexts", "8,0"], 2, "--contexts: '0' is not a whole number of at least 1"),
        (["bench", "--rows", "0"], 2, "--rows: '0' is not a whole number of at least 1"),
        (["bench", "--contexts", "many"], 2, "'many' is not a whole number"),
        (["inspect", "demo", "--kv-sinks", "3"], 2, "kv_sinks goes with kv, cache_type_k or cache_type_v"),
        (["chat", "smollm2"], 2, "'chat' is not a command; here it is: python -m generate --model smollm2 --chat"),
        (["run", "--verbose"], 2, "'run' is not a command; here it is: python -m generate --model MODEL --chat"),
        (["ls"], 2, "'ls' is not a command; here it is: python -m generate list"),
        (["serve", "demo", "-m", "demo"], 2, "the model is named twice; give it as MODEL or by --model"),
        (["serve", "demo", "other"], 2, "unrecognized arguments: other; see python -m generate serve --help"),
        (
            ["bench", "--spec", "tree"],
            2,
            "unrecognized arguments: --spec; bench measures every speculative mode on the",
        ),
        (["serve", "--max-model-len", "8"], 2, "unrecognized arguments: --max-model-len; it is --ctx N; see"),
        (["plan", "demo", "--machines", "x"], 2, "unrecognized arguments: --machines; --cluster FILE predicts for"),
        (["bench", "--nonsense", "x"], 2, "unrecognized arguments: --nonsense; see python -m generate bench --help"),
        (
            ["quantize", "demo", "--bits", "4", "a", "b"],
            2,
            "unrecognized arguments: b; see python -m generate quantize",
        ),
        (
            ["quantize", "demo", "a", "--bits", "4", "b"],
            2,
            "unrecognized arguments: b; see python -m generate quantize",
        ),
    ],
)
def test_bad_commands_and_models(run, argv, code, message):
    got, out, err = run(*argv, model=False)
    assert (got, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_prompt_longer_than_the_context(run):
    code, out, err = run("--prompt", "x" * 300)
    assert (code, out) == (1, "")
    assert "tokens and the context holds 256; shorten it or raise ctx (the model was trained for 256)" in err


def test_a_truncated_model_is_one_sentence(run, folder, tmp_path):
    for name in os.listdir(folder):
        data = Path(folder, name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2] if name.endswith(".safetensors") else data)
    code, out, err = run("-p", "x", "--backend", "numpy", "--model", str(tmp_path), model=False)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "model.safetensors" in err


def test_weights_that_are_not_numbers_are_one_sentence(run, tmp_path):
    from safetensors.numpy import load_file, save_file

    write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][5, 3] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    code, out, err = run("-p", "x", "--backend", "numpy", "--model", str(tmp_path), model=False)
    assert (code, out.strip()) == (1, "")
    assert (
        err
        == "error: 1 of 258 logits are NaN: the weights are damaged, or the activations pass the range of their type\n"
    )


def test_devices_names_the_choice_and_the_reason(run):
    code, out, _ = run("devices", model=False)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["cuda", "mlx", "numpy"]
    chosen = next(line.split()[0] for line in out.splitlines() if " chosen " in line)
    assert chosen in ("cuda", "mlx", "numpy")
    assert "on a CPU numpy, whose products use all cores, where a model's float32 weights" in out


def test_cuda_says_what_it_lacks(run):
    from importlib.util import find_spec

    if find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    code, out, err = run("-p", "x", "--backend", "cuda", model=False)
    assert (code, out) == (1, "")
    assert "backend cuda cannot run here: " in err


def test_inspect_lists_what_is_there(run, folder):
    code, out, _ = run("inspect", folder, model=False)
    assert code == 0
    for part in (
        "llama, safetensors",
        "hidden       32",
        "F32",
        "21 in the file, 21 used",
        "<|im_end|> 1",
        "256 tokens",
    ):
        assert part in out


@pytest.mark.parametrize("name", ["laguna", "glm", "qwen35"])
@pytest.mark.few(1)
def test_inspect_prints_the_state_that_is_allocated(run, name):
    model = tiny.load(name, open_backend(None, tiny.checkpoint(name)))
    tokens = model.config.context
    state, rows = model.new_state(tokens), model.ops.prefill_rows
    for start in range(0, tokens, rows):
        count = min(rows, tokens - start)
        model.forward(state, Step.chain(np.zeros(count, np.int32), start), slice(0, 0))
        state.commit(np.arange(count))
    code, out, _ = run("inspect", str(tiny.FOLDER / name), model=False)
    assert code == 0
    line = next(line for line in out.splitlines() if line.split()[:2] == [str(tokens), "tokens"])
    held = f"{state.nbytes / 2**20:.1f} MiB {state.nbytes / tokens:.0f} bytes per token"
    assert line.split()[2:] == held.split()


@pytest.mark.parametrize(
    ("changes", "layers"), [({}, "0, 1, 1"), ({"eagle_config": None}, "1, n / 2 - 1 and n - 4 of n")]
)
def test_inspect_of_an_eagle_draft(run, tmp_path, changes, layers):
    code, out, _ = run("inspect", str(tiny_eagle.write(tmp_path / "draft", 32, 96, [0, 1, 1], **changes)), model=False)
    assert code == 0
    for part in ("EAGLE-3 draft, safetensors, for a model of hidden size 32", "it knows 40 of the model's 96 tokens"):
        assert part in out
    assert f"it reads the outputs of the model's layers {layers}, counted from 0" in out
    assert "tensors: 15 in the file, 13 used\n  2 left alone: maps between the vocabularies" in out
    assert "\n  taps" not in out


def test_inspect_names_a_tensor_that_it_does_not_understand(run, folder, tmp_path):
    from safetensors.numpy import load_file, save_file

    write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.layers.0.mystery.weight": weights["model.norm.weight"]}, tmp_path / "model.safetensors")
    code, out, _ = run("inspect", str(tmp_path), model=False)
    assert code == 0
    assert "not understood: model.layers.0.mystery.weight" in out
    code, _, err = run("-p", "x", "--backend", "numpy", "--model", str(tmp_path), model=False)
    assert (code, "model.layers.0.mystery.weight" in err) == (1, True)


def test_inspect_names_a_tensor_of_a_wrong_shape(run, tmp_path):
    from safetensors.numpy import load_file, save_file

    write(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].reshape(2, -1)
    save_file(weights, tmp_path / "model.safetensors")
    code, out, _ = run("inspect", str(tmp_path), model=False)
    assert code == 0
    assert "wrong shape: model.norm.weight: shape (2, " in out


@pytest.mark.long
def test_bench_prints_a_table_and_logs_rows(run, tmp_path):
    log = tmp_path / "rows.tsv"
    argv = ["bench", "--contexts", "8,16", "--new-tokens", "4", "--runs", "2", "--log", str(log), "--note", "a test"]
    code, out, err = run(*argv)
    assert (code, err) == (0, "")
    assert "copy bandwidth" in out
    header, *rows = (line.split("\t") for line in log.read_text().splitlines())
    assert [row[header.index("context")] for row in rows] == ["8", "16"]
    assert run(*argv)[0] == 0
    assert len(log.read_text().splitlines()) == 5  # one header


def test_bench_of_all_backends_is_one_table(folder, capsys):
    argv = ["bench", "-m", folder, "--backend", "all", "--contexts", "8,16", "--new-tokens", "4", "--runs", "1"]
    assert main(argv) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert "copy bandwidth" in head
    names = [found.name for found in usable()]
    assert [line.split()[:2] for line in lines] == [[name, n] for name in names for n in ("8", "16")]
    assert main([*argv, "--peer", "mlx-lm"]) == 2
    assert "--backend all goes with a model alone, not with --peer" in capsys.readouterr().err


def test_bench_of_streams(run, tmp_path):
    """Tokens per second of several replies at once, and the times that their readers see."""
    log = tmp_path / "rows.tsv"
    code, out, _ = run("bench", "--streams", "1,3", "--contexts", "8", "--new-tokens", "4", "--log", str(log))
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [line[0] for line in lines[-2:]] == ["1", "3"]
    assert all(float(number) > 0 for line in lines[-2:] for number in line[:-2])
    assert [line[-2:] for line in lines[-2:]] == [["-", "-"]] * 2  # nobody waits for a device
    assert [line.split("\t")[9] for line in log.read_text().splitlines()] == ["decoder", "1 streams", "3 streams"]


def test_more_streams_than_a_queue_holds(run, monkeypatch):
    """The 257th call was refused."""

    def small(*args, queue=2, **more):
        return Engine(*args, queue=queue, **more)

    monkeypatch.setattr(bench_streams, "Engine", small)
    code, _, err = run("bench", "--streams", "4", "--contexts", "8", "--new-tokens", "2")
    assert (code, err) == (0, "")


def test_the_hosts_time_is_what_it_does_not_wait(monkeypatch):
    """Per step, from the end of the first one on."""
    ops, seconds = SimpleNamespace(waited=5.0, count_idle=lambda: lambda: 0.5), iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(bench_streams.time, "perf_counter", lambda: next(seconds))
    host = bench_streams.HostTime(ops)
    host.step()
    assert (host.seconds, host.idle) == (None, None)
    for waited in (6.5, 8.5):
        ops.waited = waited
        host.step()
    assert host.seconds == pytest.approx((15 - 10 - 3.5) / 2)
    assert host.idle == 0.5


def test_bench_of_streams_refuses_a_time_in_which_not_all_decode():
    engine = Engine(tiny.load("llama", NumpyOps()), EveryToken(), 12, 3)
    engine.schedule.has_read = lambda *of: setattr(engine.schedule, "owed", 9.0)  # decoding alone after a prompt
    engine.schedule.has_decoded = lambda *of: None
    with pytest.raises(BimetalError, match="filled the context of 12 tokens"):
        measure(engine, 3, 8, 4)


@pytest.mark.parametrize("flag", ["--rows", "--prefill", "--prompts", "--budgets", "--tree-topk", "--draft-device"])
def test_flags_of_another_bench_are_refused(flag, run):
    code, _, err = run("bench", flag, "3")
    assert (code, f"{flag} goes with --s" in err, "not with a model alone" in err) == (2, True, True)


def test_a_log_that_cannot_take_rows_is_refused_first(run, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system", "/folder/part")

    other, empty = tmp_path / "other.tsv", tmp_path / "empty.tsv"
    other.write_text("a\tb\n")
    empty.touch()
    flags = ["bench", "--contexts", "8,99999", "--new-tokens", "4", "--runs", "1", "--log"]
    for log, said in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x.tsv", "No such file or directory"),
        (other, "is another table: it begins with 'a\\tb', not with 'date'"),
    ):
        code, out, err = run(*flags, str(log))
        assert (code, out, said in err, len(err.splitlines())) == (2, "", True, 1)
    assert other.read_text() == "a\tb\n"
    with monkeypatch.context() as patched:
        patched.setattr("common.files.TemporaryFile", refuse)
        code, out, err = run(*flags, str(tmp_path / "new.tsv"))
    said = f"error: --log {tmp_path / 'new.tsv'} cannot be written: Read-only file system\n"
    assert (code, out, err) == (2, "", said)
    code, _, err = run(*flags, str(empty))
    assert (code, "left out: 99999 tokens leave no room for 4 more" in err) == (0, True)
    assert empty.read_text().startswith("date\tcommit\t")


# -- the conversation ------------------------------------------------------------------------------------------------


def test_chat_remembers_saves_and_loads(run, tmp_path):
    file = tmp_path / "talk.json"
    code, out, err = run("--chat", "-n", "5", stdin=f"hello\nand then?\n/save {file}\n/quit\n")
    assert (code, err) == (0, "")
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant", "user", "assistant"]
    assert saved["messages"][2]["content"] == "and then?"
    assert out.startswith(saved["messages"][1]["content"])
    again = tmp_path / "again.json"
    run("--chat", "-n", "5", stdin=f"/load {file}\n/save {again}\n")
    assert json.loads(again.read_text()) == saved


def test_reset_forgets_and_regen_repeats(run, tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    run("--chat", "-n", "5", stdin=f"hello\n/save {one}\n/regen\n/save {two}\n")
    assert json.loads(one.read_text()) == json.loads(two.read_text())  # greedy
    run("--chat", "-n", "5", stdin=f"noise\n/reset\nhello\n/save {two}\n")
    assert json.loads(one.read_text()) == json.loads(two.read_text())


def test_a_message_of_several_lines(run, tmp_path):
    file = tmp_path / "talk.json"
    run("--chat", "-n", "2", stdin=f'"""\nfirst\nsecond\n"""\n/save {file}\n')
    assert json.loads(file.read_text())["messages"][0]["content"] == "first\nsecond"


def test_what_a_chat_says_of_files_and_thinking(run, tmp_path):
    """An error had the system's number; thinking was found to be impossible at the next message."""
    file, missing = tmp_path / "talk.json", tmp_path / "no" / "talk.json"
    stdin = f"hello\n/save {missing}\n/set think on\n/set think default\n/set temperature 0\n/reset\n/save {file}\n"
    code, out, err = run("--chat", "-n", "1", "--stats", stdin=stdin)
    assert code == 0
    assert "decode 1 token; " in err
    said = [line for line in err.splitlines() if line.startswith("error")]
    assert said == [
        f"error: {missing}: No such file or directory",
        "error: the model's chat template cannot turn thinking on; leave think out",
    ]
    assert f"saved 0 messages to {file}" in out


def test_a_chat_takes_numbers_that_stand_for_no_number(run, tmp_path):
    code, out, err = run("--chat", "-n", "1", "-s", "7", stdin="/set max_tokens -1\n/set seed -1\n/set\n")
    assert (code, err) == (0, "")
    assert (
        dict(line.split() for line in out.splitlines()).items() >= {"max_tokens": "default", "seed": "default"}.items()
    )


def test_chat_errors_do_not_end_the_chat(run, tmp_path):
    stdin = f"/nonsense\n/save\n/load {tmp_path / 'absent'}\n/regen\n{'x' * 400}\nhello\n/stats\n"
    code, out, err = run("--chat", "-n", "3", stdin=stdin)
    assert code == 0
    assert [line.partition(":")[0] for line in err.splitlines()] == ["error"] * 5
    assert "decode 3 tokens" in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1}', "{'a': 1} has no system"),
        ('[{"role": "user"}]', "[{'role': 'user'}] has no system"),
        ('{"system": null, "messages": {}}', "{} is no list"),
        ('{"system": null, "messages": ["x"]}', "'x' has no role"),
        ('{"system": null, "messages": [{"role": "user"}]}', "{'role': 'user'} has no content"),
        ('{"system": "caf\xe9", "messages": []}', "it is not UTF-8 at byte 15"),
    ],
)
def test_files_that_hold_no_conversation(text, says, run, tmp_path):
    """What was said came from Python: 'list indices must be integers or slices, not str', or 'system' alone."""
    file = tmp_path / "talk.json"
    file.write_text(text, encoding="latin-1")
    err = run("--chat", stdin=f"/load {file}\n")[2]
    assert err == f"error: {file} is not a conversation that /save wrote: {says}\n"


def test_commands_of_a_chat_that_cannot_be(run, tmp_path):
    broken = {
        "system.json": '{"system": 5, "messages": []}',
        "parts.json": '{"system": null, "messages": [{"role": "user", "content": ["x"]}]}',
        "deep.json": "[" * 100_000,
        "long.json": f'{{"system": null, "messages": {"1" * 5000}}}',
    }
    for name, text in broken.items():
        (tmp_path / name).write_text(text)
    commands = [f"/load {tmp_path / name}" for name in (*broken, "")]
    commands += [
        "/load /dev/zero",
        "/save a\0b",
        "/save ~nobody-of-this-name/a",
        f"/set max_tokens {'9' * 5000}",
        "h\udce9",
    ]
    code, out, err = run("--chat", "-n", "3", stdin="\n".join([*commands, "hello"]))
    assert (code, len(out.splitlines())) == (0, 1)
    lines = err.splitlines()
    assert [line[:7] for line in lines] == ["error: "] * len(commands)
    said = [
        *["is not a conversation that /save wrote"] * 4,
        *["is not a regular file"] * 2,
        "without the character NUL",
    ]
    said += [
        "nobody-of-this-name/a",
        "takes a whole number or default, not '999",
        "the message is not UTF-8 at character 2",
    ]
    assert [text for text, line in zip(said, lines, strict=True) if text not in line or len(line) > 400] == []


def test_a_stdin_that_never_ends(run, monkeypatch):
    monkeypatch.setattr("generate.prompt.MOST_READ", 1000)
    code, out, err = run(stdin="hello " * 1000)
    assert (code, out) == (2, "")
    assert err == "error: the prompt on stdin has more than 1000 characters, which is the most supported\n"


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
THINKS = TEMPLATE + "{% if false %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "argv", "code", "message"),
    [
        (None, ["--chat"], 2, "has no chat template; use --prompt"),
        (None, ["-p", "x", "--system", "y"], 2, "has no chat template, so --system cannot be used"),
        (None, ["-p", "x", "--no-think"], 2, "has no chat template, so --think and --no-think cannot be used"),
        (TEMPLATE, ["-p", "x", "--think"], 2, "the model's chat template cannot turn thinking on"),
        (TEMPLATE, ["--chat", "--think"], 2, "the model's chat template cannot turn thinking on"),
        (THINKS, ["-p", "x", "--no-think"], 2, "the model's chat template cannot turn thinking off"),
        (NO_SYSTEM, ["-p", "x", "--system", "y"], 1, "no system role"),
        (NO_SYSTEM, ["--chat", "--system", "y"], 1, "no system role"),
        ("{% for", ["-p", "x"], 1, "template"),
    ],
)
def test_what_a_template_lacks_is_refused_before_weights_are_loaded(
    run, template, argv, code, message, tmp_path, monkeypatch
):
    monkeypatch.setattr("generate.loading.open_model", lambda *_, **__: pytest.fail("weights were loaded"))
    model = str(write(tmp_path, template=template))
    got, out, err = run(*argv, "--model", model, "--backend", "numpy", stdin="", model=False)
    assert (got, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


# -- signals -----------------------------------------------------------------------------------------------------------


def interruptible() -> None:
    """Restore Ctrl-C: a shell that starts the tests in the background makes their children ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(*argv: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "generate", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=interruptible, **pipes, **options)


def test_ctrl_c_keeps_the_text_and_exits_with_130(folder):
    process = start("--model", folder, "--backend", "numpy", "--ctx", "100000", "-p", "hi", "--raw")
    first = process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert first + rest
    assert b"Traceback" not in err


@pytest.mark.parametrize("module", ["common.options", "generate.flags", "generate.devices"])
def test_ctrl_c_while_modules_are_imported(module):
    """It was a traceback of the module that was being imported."""
    code = f"""
import os, runpy, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder)
sys.argv, sys.orig_argv = ["-m", "devices"], ["python", "-m", "generate", "devices"]
runpy.run_module("generate", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_importing_generate_leaves_ctrl_c_to_the_program():
    code = "import signal, sys; sys.argv = ['-m']; sys.orig_argv = ['python', '-m', 'other']\nimport generate\n"
    code += "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, preexec_fn=interruptible, check=True, timeout=60)


@pytest.mark.long
def test_ctrl_c_ends_a_bench(folder):
    """It waited for all runs."""
    flags = ("--contexts", "8", "--new-tokens", "200", "--runs", "100000")
    process = start("bench", "--model", folder, "--backend", "numpy", *flags)
    try:
        while b"decode tok/s" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, b"")


def test_ctrl_c_in_a_chat_stops_the_reply_and_not_the_program(folder, tmp_path):
    file = tmp_path / "talk.json"
    process = start("--chat", "--model", folder, "--backend", "numpy", "--ctx", "100000", stdin=subprocess.PIPE)
    process.stdin.write(b"hello\n")
    process.stdin.flush()
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    _, err = process.communicate(f"/save {file}\n/quit\n".encode(), timeout=30)
    assert (process.returncode, b"Traceback" in err) == (0, False)
    messages = json.loads(file.read_text())["messages"]
    assert len(messages) == 2
    assert len(messages[1]["content"].encode()) >= 5  # the bytes that were read


def test_a_closed_pipe_is_quiet(folder):
    process = start("--model", folder, "--backend", "numpy", "--ctx", "100000", "-p", "hi", "--raw")
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(30) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


# -- standard streams ------------------------------------------------------------------------------------------------


def shell(command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", "-c", command.replace("generate", f"{sys.executable} -m generate", 1)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        ("<&-", 0, b""),
        ("2>&-", 0, b""),
        (">&-", 1, b"error: stdout is closed"),
        ("<&- 2>&- >&-", 1, b""),
    ],
)
def test_closed_streams(closed, code, said, folder):
    """A closed stderr hung for ever, the others were tracebacks."""
    done = shell(f"generate -m {folder} --backend numpy -p hi -n 4 {closed}")
    assert (done.returncode, done.stderr[: len(said)], done.stderr.count(b"\n")) == (code, said, bool(said))
    assert bool(done.stdout) == (code == 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("flags", ["--help", "bench --help", "--version", "devices", "fit demo --json"])
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.few(4)
def test_a_full_disk_for_the_output(flags, buffered):
    """Help was lost in silence, and other output was complained about by the interpreter at its end."""
    done = shell(f"generate {flags} > /dev/full", PYTHONUNBUFFERED=buffered)
    assert (done.returncode, done.stderr) == (1, b"error: stdout: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_chat_ends_where_its_output_cannot_be_written(folder):
    """The error of the output was taken for that of a command, for ever."""
    done = shell(f"yes hello | generate -m {folder} --backend numpy --chat -n 4 2>&1 > /dev/full | head -n 3")
    assert done.stdout == b"error: stdout: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_notes_that_cannot_be_written_do_not_end_a_reply(folder):
    """A full disk for stderr ended the run with status 1."""
    plain = shell(f"generate -m {folder} --backend numpy -p hi -n 4")
    done = shell(f"generate -m {folder} --backend numpy -p hi -n 4 --stats 2> /dev/full")
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert shell(f"generate -m {folder} -p hi --top-k x 2> /dev/full").returncode == 2


def test_a_closed_stdin_is_no_prompt(folder):
    done = shell(f"generate -m {folder} --backend numpy <&-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"the prompt on stdin is empty" in done.stderr


@pytest.mark.long
def test_a_locale_of_ascii(tmp_path):
    """The reply broke off at the first character that ASCII lacks; prompts and folders beyond it were refused."""
    folder = write(tmp_path / "modèle")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    flags = f"-m {folder} --backend numpy -n 60 --raw --temperature 1.5 --seed 3"
    expected = shell(f"generate {flags} -p 'caffè'", PYTHONUTF8="1")
    assert (expected.returncode, expected.stdout.isascii()) == (0, False)
    for command in (f"generate {flags} -p 'caffè'", f"printf 'caffè' | generate {flags}"):
        done = shell(command, **plain)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, b"")
    talk = tmp_path / "caffè.json"
    assert (
        shell(f"printf 'ciao\\n/save {talk}\\n' | generate -m {folder} --backend numpy -n 4 --chat", **plain).returncode
        == 0
    )
    assert talk.is_file()
    done = shell(f"generate {flags} -p $(printf 'caf\\351')", **plain)
    assert (done.returncode, b"-p/--prompt: is not UTF-8" in done.stderr) == (2, True)


def test_a_text_far_beyond_the_context_is_refused_before_it_is_encoded(run, monkeypatch):
    """10 MB of text took half a minute."""
    from common.tokenizer import Tokenizer

    encode = Tokenizer.encode

    def short(self, text, *args, **options):
        assert len(text) < 1000, "the text was encoded"
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", short)
    for flags in ([], ["--raw"]):
        code, out, err = run(*flags, stdin="hello " * 200_000)
        assert (code, out) == (1, "")
        assert "the prompt has at least" in err


def test_the_output_of_quantize_may_follow_flags():
    """It was refused where a flag came between model and output."""
    for argv in (
        ["demo", "a.gguf", "--type", "Q4_0", "--requantize"],
        ["demo", "--type", "Q4_0", "--requantize", "a.gguf"],
        ["--type", "Q4_0", "demo", "--requantize", "a.gguf"],
        ["--type", "Q4_0", "--requantize", "demo", "a.gguf"],
    ):
        args = parse(["quantize", *argv])
        assert (args.model, args.out, args.type, args.requantize) == ("demo", "a.gguf", "Q4_0", True)


def test_commands_of_one_reply_take_memory_for_one():
    assert parse(["--prompt", "x"]).load.parallel == parse(["--chat"]).load.parallel == 1
    assert parse(["serve", "--model", "demo"]).load.parallel is None
    assert parse(["serve", "--model", "demo", "--parallel", "3"]).load.parallel == 3
