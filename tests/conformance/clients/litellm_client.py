"""LiteLLM as a client, as it is: over the OpenAI and the Anthropic form. Prints what it saw as one JSON object."""

import json
import os

import litellm

litellm.suppress_debug_info = True
url, key, model = os.environ["PDGATE_URL"], os.environ["PDGATE_API_KEY"], os.environ["PDGATE_MODEL"]
openai_form = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "num_retries": 0}
anthropic_form = {"model": f"anthropic/{model}", "api_base": url, "api_key": key, "num_retries": 0}
messages = [{"role": "user", "content": "Hello there"}]
seen = {}
for name, form in (("openai", openai_form), ("anthropic", anthropic_form)):
    whole = litellm.completion(messages=messages, max_tokens=5, **form)
    chunks = list(
        litellm.completion(messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}, **form)
    )
    seen[name] = {
        "text": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "streamed_tokens": [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)][-1],
    }
text = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt="One", max_tokens=4, api_base=f"{url}/v1", api_key=key
)
seen["text_completion"] = text.usage.completion_tokens
try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 4000}], max_tokens=5, **openai_form)
except litellm.ContextWindowExceededError as error:
    seen["too_long"] = error.status_code
print(json.dumps(seen))
