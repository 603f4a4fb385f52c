"""LangChain's ChatOpenAI, as it is. Prints what it saw as one JSON object."""

import json
import os

from langchain_openai import ChatOpenAI, OpenAI

where = {"base_url": os.environ["PDGATE_URL"] + "/v1", "api_key": os.environ["PDGATE_API_KEY"], "max_retries": 0}
model = os.environ["PDGATE_MODEL"]
chat = ChatOpenAI(model=model, max_tokens=5, stream_usage=True, **where)
answer = chat.invoke("Hello there")
chunks = list(chat.stream("Hello there"))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
responses = ChatOpenAI(model=model, max_tokens=5, use_responses_api=True, **where)
completion = OpenAI(model=model, max_tokens=4, **where)
seen = {
    "text": answer.content,
    "tokens": answer.usage_metadata["output_tokens"],
    "finish": answer.response_metadata["finish_reason"],
    "streamed": whole.content,
    "streamed_tokens": whole.usage_metadata["output_tokens"],
    "batch": [one.usage_metadata["output_tokens"] for one in chat.batch(["One", "Two", "Three"])],
    "responses": responses.invoke("Hello there").usage_metadata["output_tokens"],
    "responses_streamed": "".join(chunk.text for chunk in responses.stream("Hello there")),
    "completion": bool(completion.invoke("One")),
}
print(json.dumps(seen))
