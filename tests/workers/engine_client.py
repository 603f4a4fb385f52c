"""A gateway and a leader on each of the three real engines of a run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contracts.lifecycle import Phase
from contracts.wire import Attempt
from tests.engines import ROLES, Engines
from tests.workers.peers import Answer, Gateway, Leader, new_attempt, pair_submits, submit_of

LEADER_EPOCH = 1_000_000  # above that of every scheduler that ran on these workers before


class Client:
    """A gateway and a leader on each of the three workers."""

    def __init__(self, engines: Engines, name: str, gateways: dict[str, Gateway], leaders: dict[str, Leader]) -> None:
        self.engines = engines
        self.name = name  # the gateway's id
        self.gateways = gateways
        self.leaders = leaders

    async def submit_pair(self, prompt: list[int], **fields) -> Attempt:
        attempt = new_attempt()
        to_prefill, to_decode = self.pair_submits(prompt, attempt, **fields)
        await self.leaders["decode"].send(submit=to_decode)
        await self.leaders["prefill"].send(submit=to_prefill)
        return attempt

    def pair_submits(self, prompt: list[int], attempt: Attempt, **fields):
        fields["gateway_id"] = self.name
        return pair_submits(self.engines.prefill, self.engines.decode, prompt, attempt, epoch=LEADER_EPOCH, **fields)

    def unified_submit(self, prompt: list[int], **fields):
        return submit_of(self.engines.unified, prompt, gateway_id=self.name, epoch=LEADER_EPOCH, **fields)

    async def pair(self, prompt: list[int], **fields) -> tuple[Answer, Answer]:
        """Run one request through the pair: (prefill's answer, decode's answer)."""
        attempt = await self.submit_pair(prompt, **fields)
        return await self.ends(attempt)

    async def ends(self, attempt: Attempt) -> tuple[Answer, Answer]:
        decode = await self.gateways["decode"].answer(attempt, Phase.DECODE)
        return await self.gateways["prefill"].answer(attempt, Phase.PREFILL), decode

    async def unified(self, prompt: list[int], **fields) -> Answer:
        attempt = new_attempt()
        await self.leaders["unified"].send(submit=self.unified_submit(prompt, attempt=attempt, **fields))
        return await self.gateways["unified"].answer(attempt)

    async def idle(self, role: str):
        """Wait until a worker reports that nothing is left in its engine, and return that status."""
        seen = len(self.leaders[role].of("status"))

        def free(status) -> bool:
            is_new = self.leaders[role].of("status").index(status) >= seen
            return is_new and not (status.num_running or status.num_waiting or status.kv_used_tokens)

        return await self.leaders[role].next_of("status", free)


@asynccontextmanager
async def client_of(engines: Engines) -> AsyncIterator[Client]:
    workers = {role: getattr(engines, role) for role in ROLES}
    async with asyncio.TaskGroup() as tasks:
        name = str(new_attempt().rid)
        gateways = {role: Gateway(w.address, gateway_id=name) for role, w in workers.items()}
        leaders = {role: Leader(w.address, epoch=LEADER_EPOCH) for role, w in workers.items()}
        for role, worker in workers.items():
            await leaders[role].open(tasks)
            await gateways[role].attach(tasks, epoch=worker.epoch)
        try:
            yield Client(engines, name, gateways, leaders)
        finally:
            for role in workers:
                await gateways[role].detach()
                await leaders[role].close()
