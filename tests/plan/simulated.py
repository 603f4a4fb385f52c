"""An event-driven referee for the closed form: the same workers and traffic, played request by request.

Prefill workers share one FIFO queue. A decode worker runs one step after the other; requests join at the next step, but
only as long as the step stays within the TPOT target, and otherwise wait, on TTFT's account. A
unified worker adds to each step as much of its oldest prompt as fits under the step budget. Requests go to the worker
with the least of what it queues, then of what it runs. Nothing here is shared with the closed form but the workers'
coefficients.
"""

import heapq
from collections import deque


class Batch:
    """Running requests of one worker: how many, their KV tokens, and when each ends, in the worker's own steps."""

    def __init__(self):
        self.steps = 0
        self.running = 0
        self.kv_tokens = 0.0
        self._ends = []

    def join(self, key, start, prompt, output):
        heapq.heappush(self._ends, (self.steps + output, key, start, prompt, output))
        self.running += 1
        self.kv_tokens += prompt

    def step(self, now):
        """One token for each; returns those that end now as (key, start, output)."""
        self.steps += 1
        self.kv_tokens += self.running
        done = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, key, start, prompt, output = heapq.heappop(self._ends)
            self.running -= 1
            self.kv_tokens -= prompt + output
            done.append((key, start, output))
        return done


def decode_ms(cost, batch):
    return cost.fixed_ms + cost.per_request_ms * batch.running + cost.per_kv_token_ms * batch.kv_tokens


def simulate_split(requests, prefill, decode, num_prefill, num_decode, layers, tpot_ms):
    """Return (ttft_ms, tpot_ms) of each request; requests are (arrival_ms, prompt, output)."""
    free = [0.0] * num_prefill
    heapq.heapify(free)
    arrivals = [[] for _ in range(num_decode)]
    ttft = {}
    for key, (at, prompt, output) in enumerate(requests):
        start = max(at, heapq.heappop(free))
        service = prefill.prefill.ms(prompt)
        heapq.heappush(free, start + service)
        ready = start + service + prefill.transfer.exposed_ms(prompt, service, layers)
        ttft[key] = ready - at + prefill.front_ms
        arrivals[key % num_decode].append((ready, key, prompt, output))
    tpot = {}
    for queue in arrivals:
        queue.sort()
        waiting, batch, now = deque(queue), Batch(), 0.0
        while waiting or batch.running:
            if not batch.running:
                now = max(now, waiting[0][0])  # idle until the next one is handed over
            while waiting and waiting[0][0] <= now:
                batch.running += 1
                batch.kv_tokens += waiting[0][2]
                fits = decode_ms(decode.decode, batch) <= tpot_ms and batch.kv_tokens <= decode.kv_capacity_tokens
                batch.running -= 1
                batch.kv_tokens -= waiting[0][2]
                if not fits and batch.running:
                    break
                ready, key, prompt, output = waiting.popleft()
                ttft[key] += now - ready
                batch.join(key, now, prompt, max(1, output - 1))
            now += decode_ms(decode.decode, batch)
            for key, start, output in batch.step(now):
                tpot[key] = (now - start) / output
    return [(ttft[key], tpot[key]) for key in range(len(requests))]


def simulate_unified(requests, latency, num_workers, budget_ms, mixing, chunk_tokens=None):
    """Return (ttft_ms, tpot_ms) of each request, as `simulate_split`.

    With `chunk_tokens` a step takes so many of its oldest prompt, whatever time that takes, and pays the fixed part
    again.
    """
    clock = [0.0] * num_workers
    batches = [Batch() for _ in range(num_workers)]
    queues = [deque() for _ in range(num_workers)]
    owed = [0.0] * num_workers  # queued prefill, ms
    ttft, tpot = {}, {}

    def advance(worker, until):
        batch, queue = batches[worker], queues[worker]
        while clock[worker] < until:
            if not batch.running and not queue:
                clock[worker] = until
                return
            step = decode_ms(latency.decode, batch) if batch.running else 0.0
            room = max(0.0, budget_ms - max(step, latency.decode.fixed_ms))
            finished = []
            if chunk_tokens and queue:
                room = chunk_tokens * latency.prefill.per_token_ms
                step += latency.prefill.fixed_ms
            while queue and room > 0:
                part = min(room, queue[0][0])
                queue[0][0] -= part
                room -= part
                step += part
                owed[worker] -= part
                if queue[0][0] <= 1e-9:
                    finished.append(queue.popleft()[1:])
                if chunk_tokens:
                    break
            if not batch.running:
                step += latency.decode.fixed_ms
            clock[worker] += step
            for key, start, output in batch.step(clock[worker]):
                tpot[key] = (clock[worker] - start) / output
            for key, at, prompt, output in finished:
                ttft[key] = clock[worker] - at + latency.front_ms
                batch.join(key, clock[worker], prompt, max(1, output - 1))

    for key, (at, prompt, output) in enumerate(requests):
        for worker in range(num_workers):
            advance(worker, at)
        worker = min(range(num_workers), key=lambda w: (round(owed[w], 6), batches[w].running))
        service = mixing * latency.prefill.ms(prompt)
        if chunk_tokens:
            service = prompt * latency.prefill.per_token_ms
        queues[worker].append([service, key, at, prompt, output])
        owed[worker] += service
    for worker in range(num_workers):
        advance(worker, float("inf") if batches[worker].running or queues[worker] else clock[worker])
    return [(ttft[key], tpot[key]) for key in range(len(requests))]


def attained(seen, ttft_ms, tpot_ms, skip=0.1):
    """Share of requests, after a warm-up, that met both targets."""
    kept = seen[int(len(seen) * skip) : int(len(seen) * (1 - skip))]
    return sum(first <= ttft_ms and step <= tpot_ms for first, step in kept) / len(kept)
