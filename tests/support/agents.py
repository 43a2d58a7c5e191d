"""Shortened requests of coding agents, with the fields in their published sources and documentation.

Codex: `ResponsesApiRequest` in openai/codex, codex-rs/codex-api/src/common.rs, and the parser of its streams,
sse/responses.rs. Claude Code: Anthropic's documentation of the Messages API and of LLM gateways, and captures in public
issues. Copilot: microsoft/vscode-copilot-chat, src/extension/byok (ollamaProvider.ts, openAIEndpoint.ts). Open WebUI:
open-webui/open-webui, backend/open_webui (routers/openai.py, routers/ollama.py, routers/tasks.py, utils/payload.py).
"""

from __future__ import annotations

from typing import Any

_COMMAND = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
    "required": ["cmd"],
    "additionalProperties": False,
}
CODEX_CALL = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
CODEX_NAMESPACED = CODEX_CALL.replace("exec_command", "mcp__docs__search")
CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent running in the Codex CLI.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "# AGENTS.md instructions for /repo"},
                {"type": "input_text", "text": "<environment_context><cwd>/repo</cwd></environment_context>"},
            ],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Run it.", "strict": False, "parameters": _COMMAND},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
        },
        {
            "type": "namespace",
            "name": "mcp__docs",
            "description": "Docs",
            "tools": [{"type": "function", "name": "search", "strict": False, "parameters": _COMMAND}],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019ab2f0-0000-7000-8000-000000000000",
    "client_metadata": {"x-codex-installation-id": "00000000-0000-4000-8000-000000000000"},
}
CODEX_HEADERS = {"originator": "codex_cli_rs", "session_id": "019ab2f0", "accept": "text/event-stream"}

_BASH = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
_CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"}}\n</tool_call>'
CLAUDE_PATH = "/v1/messages?beta=true"
CLAUDE: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nThe date is 2026-11-23.\n</system-reminder>"},
                {"type": "text", "text": "List the files.", **_CACHED},
            ],
        }
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **_CACHED},
        {"type": "text", "text": "You are an interactive agent.", **_CACHED},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": _BASH, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.37 (external, cli)",
}
CLAUDE_QUOTA = {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": {"user_id": "0"}}

COPILOT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are an expert AI programming assistant."},
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
        {
            "role": "assistant",
            "content": "I look.",
            "cot_id": "0",
            "cot_summary": "Hm.",
            "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": "list_dir", "arguments": '{"path": "/"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "src"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "list_dir",
                "description": "List.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ],
    "temperature": 0.1,
    "top_p": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
}

_CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}
OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "messages": [
        {"role": "system", "content": "User Context:\n\n"},
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"index": 0, "id": "call_0", "type": "function", "function": {"name": "clock", "arguments": ""}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "noon"},
        {"role": "user", "content": [{"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}}]},
    ],
    "tools": [_CLOCK],
    "temperature": 0.8,
    "stream_options": {"include_usage": True},
}
"""A chat over a connection with OpenAI's API, with native function calling enabled."""
OPEN_WEBUI_TITLE: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "### Task:\nGenerate a title.\n<chat_history>\nUSER: hi\n</chat_history>"}
    ],
    "stream": False,
    "max_completion_tokens": 1000,
}
OPEN_WEBUI_OLLAMA: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"index": 0, "id": "0", "function": {"name": "clock", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "0", "content": "noon"},
        {"role": "user", "content": "And now?"},
    ],
    "stream": True,
    "tools": [_CLOCK],
    "options": {"temperature": 0.8, "num_ctx": 2048, "repeat_last_n": -1, "use_mmap": True},
    "keep_alive": "5m",
}
