"""The course of a pool, drawn with fewer points than were kept."""

from contracts.series import Flip, Point, summed_up


def _point(second: int, **seen) -> Point:
    quiet = {
        "at_unix_ms": second * 1000,
        "prefill": 2,
        "decode": 2,
        "unified": 0,
        "target": "2P2D",
        "why": "hold",
        "mode": "auto",
        "rung": "none",
        "met": 10,
        "missed": 0,
        "structural": 0,
        "refused": 0,
        "by_stage": {},
        "num_waiting": 0,
        "oldest_wait_s": 0.0,
        "queued_prefill_tokens": 0,
        "decode_use": 0.1,
        "num_running": 4,
    }
    return Point(**{**quiet, **seen})


def test_a_course_that_fits_is_drawn_as_it_is():
    course = [_point(second) for second in range(0, 50, 5)]
    assert summed_up(course, 10) == course
    assert summed_up([], 10) == []


def test_the_misses_and_the_queue_of_five_seconds_are_in_the_course_of_a_day():
    flip = Flip(worker_id="d1", from_role="decode", to_role="prefill", why="blamed", done=True)
    course = [_point(second * 5) for second in range(17_280)]
    course[7_001] = _point(
        35_005,
        met=1,
        missed=9,
        by_stage={"prefill": 9},
        num_waiting=70,
        oldest_wait_s=3.5,
        decode_use=0.9,
        flips=(flip,),
    )
    drawn = summed_up(course, 180)
    assert len(drawn) == 180
    assert sum(one.met for one in drawn) == 17_279 * 10 + 1
    bad = [one for one in drawn if one.missed]
    assert [(one.missed, one.by_stage, one.num_waiting, one.oldest_wait_s, one.decode_use) for one in bad] == [
        (9, {"prefill": 9}, 70, 3.5, 0.9)
    ]
    assert bad[0].attainment == (95 * 10 + 1) / 960
    assert bad[0].flips == (flip,)


def test_a_point_of_several_has_the_time_of_the_last_and_the_mean_of_known_rates():
    drawn = summed_up([_point(0, rate_rps=2.0), _point(5), _point(10, rate_rps=4.0, prefill=1), _point(15)], 2)
    assert [(one.at_unix_ms, one.rate_rps) for one in drawn] == [(5_000, 2.0), (15_000, 4.0)]
