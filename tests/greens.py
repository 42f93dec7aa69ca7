"""For tests of green threads."""

from __future__ import annotations

import pytest

from polycephaly import green
from polycephaly.green.scheduler import scheduler


def run(main, *args, seconds=60.0):
    """`green.run`, with a guard: what hangs fails, and says who waits where. What is left at the
    end is cancelled."""

    async def guarded():
        me = green.current()
        limit = green.timeout(seconds)
        try:
            async with limit:
                return await main(*args)
        except TimeoutError:
            if limit.expired:
                waiting = "\n  ".join(str(each) for each in green.threads())
                pytest.fail(f"not done within {seconds} s; there are\n  {waiting}", pytrace=False)
            raise
        finally:
            for thread in [each for each in scheduler.live if each is not me]:
                if thread.name.startswith("close of "):  # of a generator, which it must close
                    continue
                thread.cancel()
                thread.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    return green.run(guarded)


async def turns(n=3):
    """Lets everybody who is ready go first, `n` times."""
    for _ in range(n):
        await green.sleep(0)


async def double(x):
    return 2 * x


async def fail(error):
    raise error


async def forever():
    await green.sleep(1000)


async def awaited(promise):
    return await promise


async def outcome(promise):
    """The value of `promise`, or the class of its error."""
    try:
        return await promise
    except BaseException as error:
        if isinstance(error, green.Cancelled):
            raise
        return type(error)


def nobody_waits(*channels):
    """Whether nobody is left in the queues of `channels`."""
    return all(
        ch._sender is None and ch._receiver is None and ch.rare_state is None for ch in channels
    )
