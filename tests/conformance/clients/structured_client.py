"""Tools and structured outputs by instructor, Anthropic's and OpenAI's clients, LangChain and LiteLLM, as they are."""

import json
import os
from typing import Annotated, Literal

import anthropic
import instructor
import litellm
import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

url, key, model = os.environ["PDGATE_URL"], os.environ["PDGATE_API_KEY"], os.environ["PDGATE_MODEL"]
litellm.suppress_debug_info = True


class Report(BaseModel):
    """An answer that even random weights can only give in full."""

    model_config = ConfigDict(extra="forbid")

    sky: Literal["blue", "grey"]
    degrees: Annotated[int, Field(ge=0, le=99)]


def checked(given):
    report = given if isinstance(given, Report) else Report.model_validate(given)
    return report.sky in ("blue", "grey")


question = "What is the weather?"
messages = [{"role": "user", "content": question}]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
seen = {}

# -- instructor ------------------------------------------------------------------------------------------------
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    patched = instructor.from_openai(client, mode=mode)
    report = patched.chat.completions.create(
        model=model, messages=messages, response_model=Report, max_tokens=120, temperature=0, max_retries=0
    )
    seen[f"instructor {mode.name}"] = checked(report)

# -- Anthropic: a tool call, whole and streamed, and its result sent back ------------------------------------------
claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120)
tool = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": Report.model_json_schema(),
    "strict": True,
}
asked = {"model": model, "max_tokens": 120, "messages": messages, "tools": [tool], "extra_body": {"temperature": 0}}
forced = {**asked, "tool_choice": {"type": "tool", "name": "weather"}}
message = claude.messages.create(**forced)
call = next(block for block in message.content if block.type == "tool_use")
with claude.messages.stream(**forced) as stream:
    final = stream.get_final_message()
streamed = next(block for block in final.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "mild"}
history = [*messages, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
after = claude.messages.create(**{**asked, "messages": history, "tool_choice": {"type": "none"}, "max_tokens": 4})
seen["anthropic"] = {
    "stop": [message.stop_reason, final.stop_reason],
    "call": checked(call.input) and checked(streamed.input) and call.name == streamed.name == "weather",
    "after": after.stop_reason,
}

# -- OpenAI's responses: a call, its output sent back, a parsed format ----------------------------------------------
function = {"type": "function", "name": "weather", "parameters": Report.model_json_schema(), "strict": True}
asked = {"model": model, "tools": [function], "max_output_tokens": 120, "temperature": 0}
response = client.responses.create(input=question, tool_choice="required", parallel_tool_calls=False, **asked)
call = next(item for item in response.output if item.type == "function_call")
output = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
follow = client.responses.create(
    input=[output], previous_response_id=response.id, tool_choice="none", **{**asked, "max_output_tokens": 4}
)
events = list(
    client.responses.create(input=question, tool_choice="required", parallel_tool_calls=False, stream=True, **asked)
)
done = next(event for event in events if event.type == "response.function_call_arguments.done")
pieces = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
parsed = client.responses.parse(model=model, input=question, text_format=Report, max_output_tokens=120, temperature=0)
seen["responses"] = {
    "call": checked(json.loads(call.arguments)),
    "follow": follow.status,
    "stream": pieces == done.arguments and checked(json.loads(pieces)),
    "last": events[-1].type,
    "parsed": checked(parsed.output_parsed),
}

# -- LangChain and LiteLLM -----------------------------------------------------------------------------------------
chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=key, max_retries=0, max_tokens=120, temperature=0)
for method in ("function_calling", "json_schema"):
    structured = chat.with_structured_output(Report, method=method, strict=True)
    seen[f"langchain {method}"] = checked(structured.invoke(question))
completion = litellm.completion(
    model=f"openai/{model}",
    api_base=f"{url}/v1",
    api_key=key,
    messages=messages,
    tools=[{"type": "function", "function": {name: function[name] for name in ("name", "parameters", "strict")}}],
    tool_choice="required",
    max_tokens=120,
    temperature=0,
)
seen["litellm"] = checked(json.loads(completion.choices[0].message.tool_calls[0].function.arguments))
print(json.dumps(seen))
