// The server's Chat Completions and model list.

function headers(key) {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function refused(response) {
  let said = "";
  try {
    said = (await response.json()).error?.message ?? "";
  } catch {
    // no JSON: the status says what there is to say
  }
  return new Error(said || `the server answered ${response.status} ${response.statusText}`);
}

// A GET of JSON.
export async function get(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await refused(response);
  return response.json();
}

// Calls take({text, reasoning}) for each piece, and returns {usage, timings, reason} at the end.
export async function chat(request, key, signal, take) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(key), body, signal });
  if (!response.ok) throw await refused(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const end = {};
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return end;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      if (event.usage) end.usage = event.usage;
      if (event.timings) end.timings = event.timings;
      const [choice] = event.choices ?? [];
      if (!choice) continue;
      if (choice.finish_reason) end.reason = choice.finish_reason;
      const { content, reasoning_content } = choice.delta ?? {};
      if (content || reasoning_content) take({ text: content ?? "", reasoning: reasoning_content ?? "" });
    }
  }
}
