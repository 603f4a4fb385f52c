"""When a prompt counts as computed on an engine that only says when its KV cache has arrived."""

from contracts.lifecycle import HandOff, Phase
from contracts.wire import Sampling, pack_ids
from tests.workers.peers import new_attempt
from workers.engine import Job
from workers.engines.prefill_watch import PrefillWatch


class Heard:
    def __init__(self) -> None:
        self.counts = []

    def prefilled(self, counts, stages) -> None:
        self.counts.append(counts)


def opened(watch: PrefillWatch, at_unix_s: float, tokens: int = 9) -> tuple[Job, Heard]:
    job = Job(
        attempt=new_attempt(), phase=Phase.PREFILL, gateway_id="g", deadline_unix_ms=0, prompt=pack_ids(range(tokens)),
        sampling=Sampling(max_tokens=1), hand_off=HandOff.DIRECT,
    )  # fmt: skip
    heard = Heard()
    watch.opened(job, heard, at_unix_s)
    return job, heard


def test_the_oldest_prompts_are_the_computed_ones_and_each_is_told_once():
    watch = PrefillWatch()
    jobs = [opened(watch, float(at)) for at in range(3)]
    watch.look(at_unix_s=10.0, waiting_for_peer=0, in_transfer=1)
    watch.look(at_unix_s=10.1, waiting_for_peer=0, in_transfer=2)
    assert [len(heard.counts) for _, heard in jobs] == [1, 1, 0]
    assert jobs[0][1].counts[0].prompt_tokens == 9
    watch.ended(jobs[0][0])
    watch.look(at_unix_s=10.2, waiting_for_peer=0, in_transfer=2)
    assert [len(heard.counts) for _, heard in jobs] == [1, 1, 1]


def test_nothing_is_concluded_while_one_waits_for_its_decode_side():
    watch = PrefillWatch()
    _, first = opened(watch, 1.0)
    opened(watch, 2.0)
    watch.look(at_unix_s=3.0, waiting_for_peer=1, in_transfer=1)
    assert not first.counts


def test_a_load_older_than_a_prompt_says_nothing_of_it():
    watch = PrefillWatch()
    _, heard = opened(watch, 5.0)
    watch.look(at_unix_s=4.9, waiting_for_peer=0, in_transfer=1)
    assert not heard.counts
