"""Tools for a model whose chat template knows none: told in the conversation itself, in the format of Hermes.

Qwen2.5's template says the same to models that were trained on it; others follow it more or less, and a forced
call does not depend on their will.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.schemas.conversation import Message, text_of

HERMES: Final = frozenset({"hermes", "qwen", "qwen25"})
"""Tool parsers that read this format."""

_TOLD: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def told_of_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the conversation with tools, calls and results written out as text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    told = _TOLD.format(tools="\n".join(msgspec.json.encode(tool).decode() for tool in tools))
    if plain[0].role in ("system", "developer"):
        first = Message(plain[0].role, f"{text_of(plain[0])}\n\n{told}", plain[0].name)
        return [first, *plain[1:]]
    return [Message("system", told), *plain]


def _plain(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{text_of(message)}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [
        f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {call.function.arguments or "{}"}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    return Message("assistant", "\n".join([*filter(None, [text_of(message)]), *calls]), message.name)
