"""Feeds crafted answers to SGLang's parsers, cut at every point; run by the engine's Python, prints JSON.

Each case says what the answer is made of. The result of a case is the set of different readings over all cuts:
one reading means that chunk borders change nothing.
"""

import json
import os
import sys

from gateway.samples import Sample
from workers.engines.answer_parser import AnswerParser

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CASES = {
    "hermes": (
        (
            "Ich schaue nach: €漢字🙂.\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🙂", "days": 2}}\n</tool_call>'
        ),
        "hermes",
        "",
    ),
    "hermes, two": (
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        ),
        "hermes",
        "",
    ),
    "qwen25, two": (
        (
            'Two.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        ),
        "qwen25",
        "",
    ),
    "llama3": ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "llama3", ""),
    "mistral": ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]', "mistral", ""),
    "reasoning, then a call": (
        '<think>Où est-ce? €\nOk.</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "hermes",
        "qwen3",
    ),
    "reasoning, then text": ("<think>1 < 2, </thin no</think>Yes: 1 < 2 <b>.", "hermes", "deepseek-r1"),
    "no call": ("a < b <tool_ca is no call: 漢字", "hermes", ""),
}


def read(parts, tool_parser, reasoning_parser):
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    tools = [Tool.model_validate(tool) for tool in (WEATHER, NOW)]
    parser = AnswerParser(
        "rid/0",
        reasoning=ReasoningParser(reasoning_parser, stream_reasoning=True) if reasoning_parser else None,
        tools=FunctionCallParser(tools, tool_parser),
    )
    sample = Sample()
    for part in (*parts, None):
        text, detail = parser.take(part, 1) if part is not None else parser.end(complete=True)
        if detail is None:
            sample.piece(text)
        else:
            sample.detailed(text, detail)
    calls = [[call.id, call.name, json.loads(call.arguments)] for call in sample.tool_calls]
    return {"text": sample.text.strip(), "reasoning": sample.reasoning.strip(), "calls": calls}


def main() -> None:
    results = {}
    for name, (answer, tool_parser, reasoning_parser) in CASES.items():
        cuts = [[answer], list(answer), *([answer[:at], answer[at:]] for at in range(1, len(answer)))]
        readings = {}
        for parts in cuts:
            reading = json.dumps(read(parts, tool_parser, reasoning_parser), ensure_ascii=False, sort_keys=True)
            readings.setdefault(reading, parts if len(parts) < 3 else "characters")
        results[name] = [{**json.loads(reading), "cut": cut} for reading, cut in readings.items()]
    sys.stdout.write("\n" + json.dumps(results, ensure_ascii=False))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
