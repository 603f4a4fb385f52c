"""Logs: one line per finished request with its phases and cost, and never a secret or a word of the talk."""

import asyncio
import json

import httpx

from tests.processes import PEER_TOKEN, Stack, until

PROMPT = "the zebra hides marzipan under lock seventeen"
BAD_PROMPT = "another prompt with quicksilver-teapot inside"


async def answer(stack: Stack, http: httpx.AsyncClient, **more: object) -> tuple[str, str]:
    """Return request id and text of a streamed answer."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 24,
        "stream": True,
        **more,
    }
    text, rid = "", ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        rid = response.headers["x-request-id"]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
    return rid, text


async def test_logs_hold_every_request_and_no_secret_prompt_or_answer(stack: Stack) -> None:
    stack.add_scheduler(environ={"SCHEDULER_LOG_LEVEL": "DEBUG"})
    stack.start()
    await stack.ready()
    headers = {"authorization": f"Bearer {stack.api_key}"}
    async with httpx.AsyncClient(base_url=stack.url, timeout=30, headers=headers) as http:
        rid, text = await answer(stack, http)
        body = {"model": "tiny", "messages": [{"role": "user", "content": BAD_PROMPT}], "temperature": "hot"}
        assert (await http.post("/v1/chat/completions", json=body)).status_code in (400, 422)
        assert (await http.post("/v1/chat/completions", content=f'{{"messages": "{BAD_PROMPT}"')).status_code in (
            400,
            422,
        )
        async with asyncio.TaskGroup() as tasks:
            talking = tasks.create_task(answer(stack, http, max_tokens=400))
            await until(lambda: stack.log("scheduler").count('"placed"') >= 2, 10)
            stack.kill("decode-0")  # faults are what usually makes a process talkative
            stack.start("decode-0")
            await talking
        wrong = await http.get(
            "/v1/models", headers={"authorization": "Bearer pdg_no-such-key-but-secret-all-the-same"}
        )
        assert wrong.status_code == 401
    await until(lambda: rid in stack.log("gateway"), 10)
    lines = [json.loads(line) for line in stack.log("gateway").splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line["event"] == "request_finished" and line["rid"] == rid]
    assert {"ttft_ms", "tpot_ms", "total_ms", "queue_ms", "prefill_ms", "transfer_ms", "decode_ms"} <= set(line)
    assert line["decode_tokens"] == 24
    assert line["cost_nano"] > 0
    assert (line["outcome"], line["path"]) == ("finished", "pd")
    stack.stop()
    secrets = [stack.api_key, PEER_TOKEN, "secret-all-the-same", "zebra", "marzipan", "quicksilver", text.strip()[:30]]
    for name in stack.processes:
        written = stack.log(name)
        assert [secret for secret in secrets if secret in written] == [], f"in the log of {name}"
