"""Coding agents and OpenAI's package from npm against a server on loopback, started by `launch` where it knows them.

Proxies that nobody serves keep them from other hosts.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"
SECONDS = 120


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Desk:
    """A folder to work in, a home of its own, and what starts a program there."""

    def __init__(self, folder, live, program, package):
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"{program} is not installed (npm install -g {package})")
        self.program, self.live, self.work = found, live, folder / "work"
        self.work.mkdir()
        home = folder / "home"
        (home / ".codex").mkdir(parents=True)
        self.env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        self.env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOBODY)
        self.env |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        version = self.run(["--version"]).split("\n")[0]
        live.client = f"{program} {next(word for word in version.split() if word[:1].isdigit() or word[:1] == 'v')}"

    def run(self, arguments, **env):
        """Return what the program prints."""
        return self._run([self.program, *arguments], env)

    def launch(self, client, arguments):
        """Return what the program prints when `launch` starts it."""
        start = [sys.executable, "-m", "generate", "launch", client, "--url", self.live.url, "--"]
        return self._run([*start, *arguments], {})

    def _run(self, command, env):
        made = subprocess.run(
            command,
            env=self.env | env,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
        assert made.returncode == 0, f"{made.stdout[-3000:]}\n{made.stderr[-3000:]}"
        return made.stdout

    def answered(self):
        """Check that no request was refused, and return the bodies of those for text."""
        refused = [(e.method, e.path, e.status, e.answered) for e in self.live.recorder.exchanges if e.status >= 400]
        assert not refused
        return [json.loads(e.sent) for e in self.live.recorder.exchanges if e.written]


def objects(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


CODEX = ["--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]


@pytest.fixture
def codex(tmp_path, live):
    return Desk(tmp_path, live, "codex", "@openai/codex")


def test_codex_runs_a_command_and_resumes(codex, live):
    live.llm.write = lambda prompt: (
        "It is three." if "one-two\n" in prompt else call("exec_command", cmd="echo one-two")
    )
    events = objects(codex.launch("codex", ["exec", "--json", *CODEX, "Run it."]))
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    commands = [item for item in items if item["type"] == "command_execution"]
    assert [(command["exit_code"], command["aggregated_output"]) for command in commands] == [(0, "one-two\n")]
    assert items[-1]["text"] == "It is three."
    live.llm.write = lambda prompt: "Four."
    again = objects(codex.launch("codex", ["exec", "resume", "--last", "--json", *CODEX, "And now?"]))
    assert [e["item"]["text"] for e in again if e.get("item", {}).get("type") == "agent_message"] == ["Four."]
    first, second, third = codex.answered()
    assert len(first["input"]) < len(second["input"]) < len(third["input"])
    ends = [prompt.index("<|im_end|>\n[{") for prompt in live.llm.prompts]
    for earlier, later, end in zip(live.llm.prompts, live.llm.prompts[1:], ends, strict=False):
        assert later.startswith(earlier[:end])  # the prefix cache has all of the turn before


def test_codex_output_schema(codex, live):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    (codex.work / "schema.json").write_text(json.dumps(schema))
    live.llm.text = '{"sum": 3}'
    output = ["--output-schema", "schema.json", "--output-last-message", "last.txt"]
    codex.launch("codex", ["exec", *CODEX, *output, "Add."])
    assert json.loads((codex.work / "last.txt").read_text()) == {"sum": 3}
    [body] = codex.answered()
    assert body["text"]["format"]["type"] == "json_schema"


@pytest.mark.parametrize("provider", ["ollama", "lmstudio"])
def test_codex_oss(codex, live, provider):
    model = [] if provider == "ollama" else ["-m", "scripted"]  # LM Studio's own program gets models that are missing
    arguments = ["exec", "--oss", "--local-provider", provider, *model, "--json", *CODEX, "Hi"]
    events = objects(codex.run(arguments, CODEX_OSS_BASE_URL=f"{live.url}/v1"))
    assert [e["item"]["text"] for e in events if e.get("item", {}).get("type") == "agent_message"] == ["Hello"]
    codex.answered()


@pytest.fixture
def claude(tmp_path, live):
    return Desk(tmp_path, live, "claude", "@anthropic-ai/claude-code")


def thoughtful(prompt, text):
    """A reply with reasoning where the prompt opens it."""
    return f"Hm.</think>{text}" if prompt.endswith("<think>\n") else text


def test_claude_runs_a_command_and_continues(claude, live):
    command = call("Bash", command="echo one-two", description="Echo")
    live.llm.write = lambda prompt: thoughtful(prompt, "It is three." if "one-two<" in prompt else command)
    stream = ["--print", "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash(echo:*)"]
    events = objects(claude.launch("claude", [*stream, "--include-partial-messages", "Run it."]))
    assert (events[-1]["type"], events[-1]["is_error"], events[-1]["result"]) == ("result", False, "It is three.")
    blocks = [block for e in events if e["type"] in ("assistant", "user") for block in e["message"]["content"]]
    results = [block for block in blocks if isinstance(block, dict) and block["type"] == "tool_result"]
    assert [(block["content"], block["is_error"]) for block in results] == [("one-two", False)]
    assert events[-1]["usage"]["output_tokens"] > 0
    assert events[-1]["modelUsage"]["scripted"]["contextWindow"] == live.llm.context
    live.llm.write = lambda prompt: thoughtful(prompt, "Four.")
    found = json.loads(claude.launch("claude", ["--print", "--continue", "--output-format", "json", "And now?"]))
    assert (found["result"], found["is_error"]) == ("Four.", False)
    bodies = [body for body in claude.answered() if len(body.get("tools", ())) > 3]
    assert len(bodies) == 3
    assert "It is three." in json.dumps(bodies[-1]["messages"])


@pytest.fixture
def opencode(tmp_path, live):
    return Desk(tmp_path, live, "opencode", "opencode-ai")


def test_opencode_runs_a_command(opencode, live):
    command = call("bash", command="echo one-two", description="Echo")
    live.llm.write = lambda prompt: "It is three." if "one-two\n" in prompt or '"bash"' not in prompt else command
    assert "It is three." in opencode.launch("opencode", ["run", "Run it."])
    opencode.answered()


SCRIPT = """
const { OpenAI } = require("openai");
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { a: { type: "integer" } }, required: ["a"] };
const messages = [{ role: "user", content: "Add." }];
async function main() {
  const models = []; for await (const model of client.models.list()) models.push(model.id);
  const whole = await client.chat.completions.create({ model: "scripted", messages });
  const tools = [{ type: "function", function: { name: "add", parameters } }];
  const stream = client.chat.completions.stream({ model: "scripted", messages, tools });
  const final = (await stream.finalChatCompletion()).choices[0];
  const responses = client.responses.stream({
    model: "scripted", input: "Add.", tools: [{ type: "function", name: "add", parameters, strict: false }] });
  const kinds = []; for await (const event of responses) kinds.push(event.type);
  const response = await responses.finalResponse();
  let refused;
  try { await client.chat.completions.create({ model: "scripted", messages: [] }); } catch (e) { refused = e; }
  console.log(JSON.stringify({ models, text: whole.choices[0].message.content, said: final.message.content,
    call: final.message.tool_calls[0].function, finish: final.finish_reason, last: kinds[kinds.length - 1],
    output: response.output.map((item) => item.type), text2: response.output_text,
    refused: [refused.constructor.name, refused.status] }));
}
main();
"""


def test_openai_for_node(tmp_path, live):
    node = Desk(tmp_path, live, "node", "openai, with node")
    folders = (
        os.environ.get("NODE_PATH")
        or subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=True).stdout.strip()
    )
    if not any((Path(folder) / "openai").is_dir() for folder in folders.split(os.pathsep)):
        pytest.skip("openai is not installed (npm install -g openai, or NODE_PATH)")
    package = next(Path(f) / "openai" for f in folders.split(os.pathsep) if (Path(f) / "openai").is_dir())
    live.client = f"openai-node {json.loads((package / 'package.json').read_text())['version']}"
    (node.work / "script.cjs").write_text(SCRIPT)
    live.llm.text = "Let me see." + call("add", a=1)
    live.llm.write = lambda prompt: live.llm.text if '"add"' in prompt else "Hello"
    found = json.loads(node.run(["script.cjs", live.url], NODE_PATH=folders))
    assert (found["models"], found["text"], found["said"]) == (["scripted"], "Hello", "Let me see.")
    assert (found["call"]["name"], json.loads(found["call"]["arguments"])) == ("add", {"a": 1})
    assert (found["finish"], found["last"]) == ("tool_calls", "response.completed")
    assert (found["output"], found["text2"]) == (["message", "function_call"], "Let me see.")
    assert found["refused"] == ["BadRequestError", 400]
