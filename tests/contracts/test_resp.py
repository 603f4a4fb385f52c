"""The pipelining Redis connection."""

import asyncio
import time
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from contracts.resp import RespConnection, Script


@pytest.fixture
async def connection(redis_url: str):
    opened = RespConnection(redis_url)
    yield opened
    opened.close()


async def test_replies_come_back_in_order(connection: RespConnection):
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(connection.call("ECHO", str(n))) for n in range(100)]
    assert [task.result() for task in running] == [str(n).encode() for n in range(100)]


async def test_an_error_reply_is_the_callers_alone(connection: RespConnection):
    await connection.call("SET", "text", b"\x00\xff")
    replies = await connection.call_all([("GET", "text"), ("INCR", "text"), ("GET", "none")])
    assert replies[0] == b"\x00\xff"
    assert isinstance(replies[1], ResponseError)
    assert replies[2] is None
    with pytest.raises(ResponseError):
        await connection.call("INCR", "text")


async def test_a_cancelled_call_shifts_no_reply(connection: RespConnection):
    await connection.call("PING")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(connection.call("ECHO", "lost"))
        await asyncio.sleep(0)
        task.cancel()
    assert await connection.call("ECHO", "mine") == b"mine"


async def test_a_connection_that_was_cut_fails_its_calls_and_opens_again(connection: RespConnection, redis):
    number = await connection.call("CLIENT", "ID")
    async with asyncio.TaskGroup() as tasks:
        blocked = tasks.create_task(_outcome(connection.call("BLPOP", "nothing", 0)))
        await asyncio.sleep(0)
        await redis.execute_command("CLIENT", "KILL", "ID", number)
    assert isinstance(blocked.result(), RedisConnectionError)
    assert await connection.call("PING") == b"PONG"


async def _outcome(call) -> object:
    try:
        return await call
    except RedisError as error:
        return error


async def test_a_script_is_loaded_when_redis_forgot_it(connection: RespConnection, redis):
    script = Script(connection, "return {KEYS[1], ARGV[1]}")
    assert await script(["k"], ["a"]) == [b"k", b"a"]
    await redis.script_flush()
    assert await script(["k"], ["b"]) == [b"k", b"b"]


async def test_scripts_and_commands_beside_them_leave_together(connection: RespConnection, redis):
    script = Script(connection, "return tonumber(ARGV[1]) + redis.call('INCRBY', KEYS[1], 0)")
    await redis.set("n", 5)
    calls = [(["n"], [1]), (["text"], [1]), (["n"], [2])]
    await redis.set("text", "no number")
    for _ in range(2):  # the script is unknown at first
        first, refused, last, beside = await script.call_all(calls, beside=[("ECHO", "beside")])
        assert (first, last, beside) == (6, 7, b"beside")
        assert isinstance(refused, ResponseError)
    assert await script.call_all([], beside=[("ECHO", "alone")]) == [b"alone"]


async def test_a_server_that_stops_answering_fails_all_who_wait_and_is_called_anew(tmp_path: Path):
    num_connections = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.read(1000)
        writer.write(b"+first\r\n")
        while await reader.read(1000):
            pass
        writer.close()

    server = await asyncio.start_unix_server(answer_once, tmp_path / "s")
    connection = RespConnection(f"unix://{tmp_path}/s", timeout_s=0.2)
    assert await connection.call("PING") == b"first"
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(_outcome(connection.call("PING"))) for _ in range(2)]
        waiting.append(tasks.create_task(_outcome(connection.call_all([("PING",), ("PING",)]))))
    assert all(isinstance(task.result(), RedisTimeoutError) for task in waiting)
    assert await connection.call("PING") == b"first"
    assert num_connections == 2
    connection.close()
    server.close()


async def test_no_redis_is_a_redis_error(tmp_path: Path):
    with pytest.raises(RedisConnectionError, match="cannot connect"):
        await RespConnection(f"unix://{tmp_path}/none.sock").call("PING")


async def test_a_redis_that_takes_no_commands_now_counts_as_away(tmp_path: Path):
    async def loading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n" * 2)
        writer.close()

    server = await asyncio.start_unix_server(loading, tmp_path / "s")
    connection = RespConnection(f"unix://{tmp_path}/s", timeout_s=5)
    with pytest.raises(RedisConnectionError, match="LOADING"):
        await connection.call_all([("PING",), ("PING",)])
    connection.close()
    server.close()


async def test_what_is_asked_is_done_at_once_though_its_reply_lies_unread(connection: RespConnection, redis):
    connection.rest(60)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        setting = tasks.create_task(connection.call("SET", "rested", "1"))
        while await redis.get("rested") != b"1":  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.001)
        also = tasks.create_task(connection.call("INCR", "rested"))
        while await redis.get("rested") != b"2":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not setting.done()
        assert not also.done()
        connection.listen()
        assert (await setting, await also) == (b"OK", 2)


async def test_a_reply_is_read_by_itself_when_patience_ends(connection: RespConnection):
    connection.rest(0.01)
    async with asyncio.timeout(10):
        assert await connection.call("PING") == b"PONG"
        connection.rest(60)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(connection.call("ECHO", "a"))
            await asyncio.sleep(0)
            connection.rest(0)
        assert asked.result() == b"a"


async def test_who_rests_hears_of_the_end_of_the_connection(connection: RespConnection, redis):
    number = await connection.call("CLIENT", "ID")
    connection.rest(0.02)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        blocked = tasks.create_task(_outcome(connection.call("BLPOP", "nothing", 0)))
        await asyncio.sleep(0)
        await redis.client_kill_filter(_id=number)
        assert isinstance(await blocked, RedisConnectionError)


async def test_a_process_that_was_frozen_reads_its_replies_before_it_gives_up(redis_url: str):
    connection = RespConnection(redis_url, timeout_s=0.2)
    await connection.call("PING")
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(connection.call("ECHO", "a"))
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 - frozen, as by SIGSTOP
    assert asked.result() == b"a"
    assert connection.num_opened == 1
    connection.close()
