"""Server-sent events of one chat stream, written from template bytes.

Only the text of a chunk is encoded per token; everything around it is prepared once per request
(0.1 us against 3.6 us for `json.dumps` of the whole chunk; see benches).
"""

from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
SIMULATED: Final = "simulated"
"""`system_fingerprint` of text that a latency model made."""

encode_text: Final = msgspec.json.Encoder().encode


class ChunkTemplate:
    """The bytes around the text of each chunk of one stream, per sample.

    `fingerprint` becomes `system_fingerprint`; empty = none. It marks simulated text on every chunk.
    """

    def __init__(
        self,
        *,
        chunk_id: str,
        created_s: int,
        model: str,
        num_samples: int,
        with_usage: bool,
        fingerprint: str = "",
    ) -> None:
        fields = {"id": chunk_id, "object": "chat.completion.chunk", "created": created_s, "model": model}
        head = msgspec.json.encode(fields | ({"system_fingerprint": fingerprint} if fingerprint else {}))
        self._open = b"data: " + head[:-1] + b',"choices":['
        self._usage = b',"usage":null' if with_usage else b""
        self.text_prefix = [self._open + b'{"index":%d,"delta":{"content":' % index for index in range(num_samples)]
        self.first_prefix = [
            self._open + b'{"index":%d,"delta":{"role":"assistant","content":' % index for index in range(num_samples)
        ]
        self.text_suffix = b'},"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def detailed(self, index: int, delta: Any, logprobs: Any) -> bytes:
        """Return a chunk with any delta."""
        tail = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}]' % (
            index,
            msgspec.json.encode(delta),
            msgspec.json.encode(logprobs),
        )
        return self._open + tail + self._usage + b"}\n\n"

    def finish(self, index: int, reason: str) -> bytes:
        """Return the chunk that ends a sample."""
        tail = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}]' % (index, encode_text(reason))
        return self._open + tail + self._usage + b"}\n\n"

    def usage(self, usage: Any, pdgate: Any) -> bytes:
        """Return the trailing chunk: no choices, the usage and how it was served."""
        tail = b'],"usage":%b,"pdgate":%b}\n\n' % (msgspec.json.encode(usage), msgspec.json.encode(pdgate))
        return self._open + tail


def error_event(body: Any) -> bytes:
    """Return the event that ends a broken stream; no [DONE] follows it."""
    return b"data: %b\n\n" % msgspec.json.encode(body)
