"""What a worker keeps of ended requests: an acknowledgement counts whether it comes before or after the settlement."""

from contracts.lifecycle import Phase
from contracts.v1 import worker_pb2 as pb
from contracts.wire import Attempt
from workers.finals import KEEP_S, Finals
from workers.outbox import Key

RID = "01a229bd-76e1-7cb4-8f6f-64bf51d2c09d"


def test_an_end_that_was_settled_before_it_was_acknowledged_is_still_marked_once():
    now = [0.0]
    finals, key = Finals(lambda: now[0]), Key(Attempt(RID, 1, 0), Phase.DECODE)
    finals.add(key, pb.Final())
    finals.settle(RID)
    assert finals.all() == []
    assert finals.mark_delivered([key]) == [key]
    assert finals.mark_delivered([key]) == []
    finals.add(key, pb.Final())
    finals.settle(RID)
    now[0] = KEEP_S + 1
    finals.expire()
    assert finals.mark_delivered([key]) == []
