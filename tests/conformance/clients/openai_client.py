"""The official OpenAI client, as it is. Prints what it saw as one JSON object."""

import json
import os
import time

import openai

client = openai.OpenAI(base_url=os.environ["PDGATE_URL"] + "/v1", api_key=os.environ["PDGATE_API_KEY"], max_retries=0)
model = os.environ["PDGATE_MODEL"]
messages = [{"role": "user", "content": "Hello there"}]
seen = {"version": openai.__version__}


def error_of(call):
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return None


# -- chat ------------------------------------------------------------------------------------------------
raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=5)
chat = raw.parse()
seen["chat"] = {
    "finish": chat.choices[0].finish_reason,
    "text": chat.choices[0].message.content,
    "tokens": chat.usage.completion_tokens,
    "total": chat.usage.total_tokens - chat.usage.prompt_tokens,
    "request_id": raw.headers["x-request-id"],
    "path": raw.headers["x-pdgate-path"],
}
chunks = list(
    client.chat.completions.create(
        model=model, messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
)
seen["stream"] = {
    "role": chunks[0].choices[0].delta.role,
    "text": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "finish": [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason],
    "usage": [c.usage.completion_tokens for c in chunks if c.usage],
    "empty": sum(not c.choices for c in chunks),
}
two = list(client.chat.completions.create(model=model, messages=messages, max_tokens=3, stream=True, n=2))
seen["samples"] = sorted({c.choices[0].index for c in two})
with client.chat.completions.stream(model=model, messages=messages, max_tokens=4) as stream:
    stream.until_done()
    seen["helper"] = stream.current_completion_snapshot.choices[0].finish_reason

# -- completions -----------------------------------------------------------------------------------------
completion = client.completions.create(model=model, prompt=["One", [5, 6]], max_tokens=4, echo=True)
seen["completion"] = {
    "choices": [choice.index for choice in completion.choices],
    "echo": completion.choices[0].text.startswith("One"),
    "tokens": completion.usage.completion_tokens,
}
pieces = list(client.completions.create(model=model, prompt="One", max_tokens=4, stream=True))
seen["completion_stream"] = [p.choices[0].finish_reason for p in pieces][-1]

# -- responses -------------------------------------------------------------------------------------------
response = client.responses.create(model=model, input="Hello there", max_output_tokens=5)
seen["response"] = {
    "text": response.output_text,
    "status": response.status,
    "tokens": response.usage.output_tokens,
    "again": client.responses.retrieve(response.id).output_text == response.output_text,
}
follow = client.responses.create(model=model, input="More", previous_response_id=response.id, max_output_tokens=5)
seen["follow"] = follow.usage.input_tokens > response.usage.input_tokens
events = list(client.responses.create(model=model, input="Hello there", max_output_tokens=5, stream=True))
seen["response_stream"] = {
    "types": [event.type for event in events if event.type != "response.output_text.delta"],
    "numbers": [event.sequence_number for event in events] == list(range(len(events))),
    "text": "".join(event.delta for event in events if event.type == "response.output_text.delta"),
}
background = client.responses.create(model=model, input="Hello", max_output_tokens=1000, background=True)
seen["cancelled"] = client.responses.cancel(background.id).status
client.responses.delete(response.id)
seen["deleted"] = error_of(lambda: client.responses.retrieve(response.id))

# -- models, files, batches --------------------------------------------------------------------------------
seen["models"] = [one.id for one in client.models.list()]
seen["model"] = client.models.retrieve(model).id
line = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": model, "messages": messages, "max_tokens": 3},
}
file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
until = time.monotonic() + 60
while batch.status not in ("completed", "failed") and time.monotonic() < until:
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
output = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
seen["batch"] = [batch.status, batch.request_counts.completed, output[0]["custom_id"]]
seen["files"] = sorted({one.purpose for one in client.files.list()})
seen["file_deleted"] = client.files.delete(file.id).deleted

# -- errors ------------------------------------------------------------------------------------------------
wrong_key = openai.OpenAI(base_url=client.base_url, api_key="pdg_wrong", max_retries=0)
picture = {"type": "image_url", "image_url": {"url": "data:,"}}
seen["errors"] = {
    "key": error_of(lambda: wrong_key.chat.completions.create(model=model, messages=messages)),
    "model": error_of(lambda: client.chat.completions.create(model="none", messages=messages)),
    "param": error_of(lambda: client.chat.completions.create(model=model, messages=messages, temperature=9)),
    "context": error_of(lambda: client.completions.create(model=model, prompt=[1] * 3000)),
    "picture": error_of(
        lambda: client.chat.completions.create(model=model, messages=[{"role": "user", "content": [picture]}])
    ),
    "embedding": error_of(lambda: client.embeddings.create(model=model, input="x")),
    "image": error_of(lambda: client.images.generate(model=model, prompt="x")),
    "audio": error_of(lambda: client.audio.speech.create(model=model, input="x", voice="alloy")),
}
print(json.dumps(seen))
