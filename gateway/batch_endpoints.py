"""What connects batches with the endpoints and the keys that their lines go through."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from contracts.errors import BadRequest
from gateway.auth import Authenticator
from gateway.batch_runner import Begin
from gateway.outputs import WholeAnswer
from gateway.starter import Arrival, Started, Starter
from gateway.tenants import ApiKey


class Begun(Protocol):
    """What the endpoints' `start` gives."""

    @property
    def started(self) -> Started:
        """The requests that run."""
        ...

    @property
    def output(self) -> object:
        """Where the answer goes."""
        ...


def begin_line(start: Callable[[Arrival], Awaitable[Begun]]) -> Begin:
    """Return an endpoint for lines of a batch, none of which is streamed."""

    async def begin(arrival: Arrival) -> tuple[Started, WholeAnswer]:
        begun = await start(arrival)
        if not isinstance(begun.output, WholeAnswer):
            begun.started.client_left()
            raise BadRequest("A line of a batch is not streamed.", param="stream")
        return begun.started, begun.output

    return begin


class LineKeys:
    """Lets lines arrive in the name of the key that made their batch."""

    def __init__(self, auth: Authenticator, starter: Starter) -> None:
        self._auth = auth
        self._starter = starter

    async def find(self, org: str, key_id: str) -> ApiKey:
        """Return a key as it is now. Raises InvalidApiKey, DependencyDown."""
        return await self._auth.find(org, key_id)

    def new_rid(self) -> str:
        """Return the id of a request that arrives now."""
        return self._starter.new_rid()

    def arrive(self, key: ApiKey, body: bytes, endpoint: str, *, rid: str, repeated: bool) -> Arrival:
        """Return a line as a request that has arrived."""
        reload_key = partial(self._auth.find, key.organisation_id, key.id)
        return self._starter.arrive_later(key, body, endpoint, rid=rid, repeated=repeated, reload_key=reload_key)
