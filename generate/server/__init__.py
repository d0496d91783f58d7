"""HTTP server: OpenAI Chat Completions, Completions and Responses, Anthropic Messages, and a part of Ollama's API.

Every dialect parses its request into a `task.Task` and writes the events of `events.py` in its own form; none is
translated into another. `app.py` has the routes, `serve.py` the command.
"""
