"""The official Anthropic client, as it is. Prints what it saw as one JSON object."""

import json
import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["PDGATE_URL"], api_key=os.environ["PDGATE_API_KEY"], max_retries=0)
model = os.environ["PDGATE_MODEL"]
messages = [{"role": "user", "content": "Hello there"}]
seen = {"version": anthropic.__version__}


def error_of(call):
    try:
        call()
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.body["error"]["type"], bool(error.request_id)]
    return None


message = client.messages.create(model=model, max_tokens=5, messages=messages, system="Be brief.")
seen["message"] = {
    "text": message.content[0].text,
    "stop": message.stop_reason,
    "tokens": message.usage.output_tokens,
    "request_id": message._request_id is not None,
}
with client.messages.stream(model=model, max_tokens=5, messages=messages, system="Be brief.") as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
seen["stream"] = {
    "text": text,
    "same": final.content[0].text == text,
    "stop": final.stop_reason,
    "tokens": final.usage.output_tokens,
    "input": final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0),
}
events = client.messages.create(model=model, max_tokens=3, messages=messages, stream=True)
seen["events"] = [event.type for event in events if event.type != "content_block_delta"]
counted = client.messages.count_tokens(model=model, messages=messages, system="Be brief.")
seen["counted"] = counted.input_tokens
wrong_key = anthropic.Anthropic(base_url=os.environ["PDGATE_URL"], api_key="pdg_wrong", max_retries=0)
picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
seen["errors"] = {
    "key": error_of(lambda: wrong_key.messages.create(model=model, max_tokens=1, messages=messages)),
    "model": error_of(lambda: client.messages.create(model="none", max_tokens=1, messages=messages)),
    "picture": error_of(
        lambda: client.messages.create(model=model, max_tokens=1, messages=[{"role": "user", "content": [picture]}])
    ),
}
print(json.dumps(seen))
