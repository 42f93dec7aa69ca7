"""Groups: green threads that belong together, of which none outlives the block."""

import asyncio
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest
from faults import wait_for
from greens import forever

import polycephaly as poly
from polycephaly import green
from polycephaly.green.testing import all_waiting


async def clean_up(cleaned, clock):
    """Note the time when the clean-up, which takes five seconds, has ended."""
    try:
        await forever()
    finally:
        await green.sleep(5)
        cleaned.append(clock.time())


async def value(x):
    await green.sleep(0)
    return x


async def fail(error):
    await green.sleep(0)
    raise error


class Ended:
    """Green threads that note their end."""

    def __init__(self):
        self.names = []

    async def forever(self, name="forever"):
        try:
            await forever()
        finally:
            await green.sleep(0)
            self.names.append(name)


def kinds(group):
    """The types of the errors in a group, nested ones as lists."""
    return [kinds(e) if isinstance(e, BaseExceptionGroup) else type(e) for e in group.exceptions]


def run(main, *args):
    """As `green.run`, but one that hangs is an error soon."""
    return green.spawn(main, *args).result(30)


@pytest.mark.guarantee("green-14")
def test_a_block_ends_when_all_its_threads_have():
    ended = []

    async def slow(i):
        for _ in range(i):
            await green.sleep(0)
        ended.append(i)
        return i

    async def main():
        async with green.Group() as group:
            threads = [group.spawn(slow, i) for i in (3, 1, 2)]
            plain = group.spawn(pow, 2, 5)
            bound = group.spawn(slow, 4, bound=True, name="bound")
        assert all(thread.done() for thread in threads)
        assert bound.name == "bound"
        return sorted(ended), [thread.value for thread in threads], plain.value, bound.value

    assert run(main) == ([1, 2, 3, 4], [3, 1, 2], 32, 4)


def test_an_empty_group_ends_at_once():
    async def main():
        async with green.Group():
            pass
        return "on"

    assert run(main) == "on"


@pytest.mark.guarantee("green-14")
@pytest.mark.parametrize("plain", [False, True])
def test_the_first_error_cancels_the_siblings_and_the_block(plain):
    ended = Ended()

    async def main():
        async with green.Group() as group:
            group.spawn(ended.forever)
            group.spawn(ended.forever)
            await green.sleep(0)
            group.spawn((lambda: 1 / 0) if plain else (lambda: fail(ZeroDivisionError())))
            try:
                await forever()
            finally:
                ended.names.append("body")

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [ZeroDivisionError] and sorted(ended.names) == [
        "body",
        "forever",
        "forever",
    ]


@pytest.mark.guarantee("green-14")
def test_errors_are_raised_together():
    async def fails_when_cancelled(error):
        try:
            await forever()
        finally:
            raise error

    async def main():
        async with green.Group() as group:
            group.spawn(fails_when_cancelled, KeyError())
            group.spawn(fails_when_cancelled, OSError())
            await green.sleep(0)
            group.spawn(fail, ValueError("first"))

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value)[0] is ValueError and set(kinds(caught.value)) == {
        ValueError,
        KeyError,
        OSError,
    }


def test_an_error_of_the_block_cancels_its_threads_and_is_in_the_group():
    ended = Ended()

    async def main():
        async with green.Group() as group:
            group.spawn(ended.forever)
            await green.sleep(0)
            raise KeyError("body")

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [KeyError] and ended.names == ["forever"]


def test_a_block_that_fails_while_it_is_interrupted_adds_its_error():
    async def main():
        async with green.Group() as group:
            group.spawn(fail, KeyError("child"))
            try:
                await forever()
            finally:
                raise ValueError("body")

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [KeyError, ValueError]


def test_a_block_that_catches_its_interruption_ends_with_the_error_all_the_same():
    async def main():
        async with green.Group() as group:
            group.spawn(fail, KeyError("child"))
            try:
                await forever()
            except green.Cancelled:
                pass

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [KeyError]


def test_the_error_of_a_child_that_the_block_awaits_is_there_once():
    async def main():
        async with green.Group() as group:
            await group.spawn(fail, KeyError("child"))

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [KeyError]


def test_base_exceptions_come_in_a_base_exception_group():
    async def main():
        async with green.Group() as group:
            group.spawn(fail, SystemExit(3))

    with pytest.raises(BaseExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [SystemExit] and not isinstance(caught.value, ExceptionGroup)


def test_errors_in_a_group_are_not_printed_as_well(capfd):
    test_errors_are_raised_together()
    assert capfd.readouterr().err == ""


def test_a_child_that_is_cancelled_by_itself_disturbs_nobody():
    async def main():
        async with green.Group() as group:
            lost = group.spawn(forever)
            kept = group.spawn(value, 7)
            lost.cancel()
        return lost.cancelled(), kept.value

    assert run(main) == (True, 7)


def test_children_may_start_others_and_these_are_waited_for_too():
    ended = []

    async def starts(group, depth):
        if depth:
            group.spawn(starts, group, depth - 1)
            group.spawn(starts, group, depth - 1)
        await green.sleep(0)
        ended.append(depth)

    async def main():
        async with green.Group() as group:
            group.spawn(starts, group, 5)
        return len(ended)

    assert run(main) == 63


def test_plain_members_and_foreign_calls_may_start_others():
    ended = []

    async def note(i):
        ended.append(i)

    async def main():
        async with green.Group() as group:

            def starts(i):
                for k in range(100):
                    group.spawn(note, (i, k))

            for i in range(4):
                group.spawn(starts, i)
            await green.call(starts, 4)
        return len(ended)

    assert run(main) == 500


def test_a_child_that_ends_before_the_plain_code_that_starts_it_goes_on_is_not_waited_for():
    def slowly(frame, event, arg):
        if event == "return" and frame.f_code.co_name == "start":
            time.sleep(0.02)

    async def main():
        async with green.Group() as group:

            def starts():
                sys.setprofile(slowly)
                try:
                    group.spawn(value, 1)
                finally:
                    sys.setprofile(None)

            group.spawn(starts)
        return "on"

    assert run(main) == "on"


def test_a_group_takes_nobody_outside_of_its_block():
    async def main():
        group = green.Group()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="inside its `async with`"):
                group.spawn(forever)
            async with green.Group() as group:
                pass
        with pytest.raises(RuntimeError, match="one block"):
            async with group:
                pass
        group.cancel()  # it has ended: nothing happens
        await green.sleep(0)
        return "on"

    assert run(main) == "on"
    with pytest.raises(RuntimeError):
        asyncio.run(_enter_in_asyncio())


async def _enter_in_asyncio():
    async with green.Group():
        pass


def test_wrong_arguments_to_spawn_are_errors_of_the_block():
    async def main():
        async with green.Group() as group:
            with pytest.raises(TypeError):
                group.spawn(value)
            with pytest.raises(TypeError):
                group.spawn(None)
        return "on"

    assert run(main) == "on"


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_body", [False, True])
def test_cancel_ends_all_and_the_block_without_an_error(in_body):
    ended = Ended()

    async def cancels(group):
        await green.sleep(0)
        group.cancel()

    async def main():
        async with green.Group() as group:
            group.spawn(ended.forever)
            await green.sleep(0)
            group.spawn(cancels, group)
            if in_body:
                await forever()
                ended.names.append("never")
        await green.sleep(0)
        return ended.names

    assert run(main) == ["forever"]


def test_cancel_from_the_block_itself_interrupts_its_next_await():
    told = []

    async def main():
        async with green.Group() as group:
            group.cancel()
            group.cancel()
            told.append("this step goes on")
            await green.sleep(0)
            told.append("never")
        async with green.Group() as group:
            group.cancel()
        await green.sleep(0)
        return told

    assert run(main) == ["this step goes on"]


def test_a_thread_started_in_a_cancelled_group_is_cancelled_too():
    async def main():
        async with green.Group() as group:
            try:
                group.cancel()
                await green.sleep(0)
            finally:
                late = group.spawn(forever)
        return late.cancelled()

    assert run(main)


def test_cancel_from_plain_code_at_any_moment_harms_nothing_after_the_block():
    async def main():
        for _ in range(200):
            async with green.Group() as group:
                native = threading.Thread(target=group.cancel)
                native.start()
            await green.sleep(0)
            native.join()
            await green.sleep(0)
        return "on"

    assert run(main) == "on"


def test_who_is_cancelled_in_a_block_cancels_its_threads_first():
    ended = Ended()

    async def outer():
        async with green.Group() as group:
            group.spawn(ended.forever)
            group.spawn(ended.forever)
            await green.sleep(0)
            try:
                await forever()
            finally:
                ended.names.append("body")

    async def waits_at_the_end():
        async with green.Group() as group:
            group.spawn(ended.forever)
            group.spawn(ended.forever)
            group.spawn(value, 1)

    for fn, expected in (
        (outer, ["body", "forever", "forever"]),
        (waits_at_the_end, ["forever"] * 2),
    ):
        ended.names.clear()
        thread = green.spawn(fn)
        run(all_waiting)
        thread.cancel()
        with pytest.raises(CancelledError):
            thread.result(30)
        assert thread.cancelled() and ended.names == expected


def test_who_is_cancelled_twice_waits_for_its_threads_all_the_same():
    ended = Ended()

    async def slow_to_end():
        try:
            await forever()
        finally:
            for _ in range(20):
                await green.sleep(0)
            ended.names.append("slow")

    async def outer():
        async with green.Group() as group:
            group.spawn(slow_to_end)

    async def main():
        thread = green.spawn(outer)
        await all_waiting()
        thread.cancel()
        await green.sleep(0)
        await green.sleep(0)
        thread.cancel()
        with pytest.raises(CancelledError):
            await thread
        return ended.names

    assert run(main) in (
        ["slow"],
        [],
    )  # the second may have hit the clause itself; but nobody outlives the block
    assert not [each for each in green.threads() if "slow_to_end" in each.name]


def test_the_clean_up_of_members_is_not_broken_off_by_what_ends_the_block(clock):
    cleaned = []

    async def failing_block():
        async with green.Group() as group:
            group.spawn(clean_up, cleaned, clock)
            group.spawn(fail, KeyError())
            try:
                await forever()
            finally:
                await green.sleep(1)
                raise ValueError

    async def under_two_limits():
        async with green.timeout(2), green.timeout(1), green.Group() as group:
            group.spawn(clean_up, cleaned, clock)

    with pytest.raises(ExceptionGroup) as caught:
        run(failing_block)
    assert kinds(caught.value) == [KeyError, ValueError] and cleaned == [5]
    with pytest.raises(TimeoutError):
        run(under_two_limits)
    assert cleaned == [5, 11]


@pytest.mark.parametrize("how", ["await", "gather", "plain"])
def test_a_member_that_others_await_is_cancelled_once_with_its_group(how, clock):
    cleaned = []

    async def wait(thread):
        await (thread if how == "await" else poly.gather(thread, thread))

    async def main():
        async with green.Group() as group:
            thread = group.spawn(clean_up, cleaned, clock)
            for _ in range(5):  # the order in which they are cancelled is that of a set
                group.spawn(*((thread.result,) if how == "plain" else (wait, thread)))
            await all_waiting()
            group.cancel()

    green.run(main)
    assert cleaned == [5]


def test_the_promises_that_cancelled_members_wait_for_are_cancelled():
    with poly.Pool(2) as pool:
        work = [pool.promise("import time; time.sleep(100)") for _ in range(2)]

        async def waits(promise):
            await promise

        async def main():
            async with green.Group() as group:
                for promise in work:
                    group.spawn(waits, promise)
                await green.sleep(0.01)
                group.spawn(fail, KeyError())

        with pytest.raises(ExceptionGroup):
            run(main)
        assert all(promise.cancelled() for promise in work)
        assert pool.doit(abs, -1) == 1


def test_a_drone_made_in_a_green_thread_is_cancelled_with_it():
    async def uses():
        with poly.Drone() as drone:
            return await drone.promise("import time; time.sleep(100)")

    async def main():
        async with green.Group() as group:
            group.spawn(uses)
            await green.sleep(0.05)
            group.cancel()
        return "on"

    assert run(main) == "on"


def test_a_plain_member_in_foreign_code_is_waited_for():
    entered, opened = threading.Event(), threading.Event()

    def blocks():
        entered.set()
        assert opened.wait(30)

    async def main():
        async with green.Group() as group:
            blocked = group.spawn(blocks)
            await green.call_long(entered.wait)
            group.cancel()
            try:
                await forever()
            finally:
                assert not blocked.done()
                opened.set()
        return blocked.done()

    assert run(main)


# -- nested ----------------------------------------------------------------------------------------


def test_nested_groups_end_from_the_inside_out():
    ended = Ended()

    async def inner():
        try:
            async with green.Group() as group:
                group.spawn(ended.forever, "inner child")
                await forever()
        finally:
            ended.names.append("inner block")

    async def main():
        async with green.Group() as group:
            group.spawn(inner)
            await all_waiting()
            group.spawn(fail, KeyError())

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [KeyError] and ended.names == ["inner child", "inner block"]


def test_an_error_in_a_nested_block_is_nested():
    async def main():
        async with green.Group() as outer:
            outer.spawn(forever)
            async with green.Group() as inner:
                inner.spawn(fail, KeyError())
                await forever()

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [[KeyError]]


def test_cancelling_the_outer_of_two_blocks_ends_both():
    ended = Ended()

    async def main():
        async with green.Group() as outer, green.Group() as inner:
            inner.spawn(ended.forever)
            await green.sleep(0)
            outer.cancel()
            await forever()
        await green.sleep(0)
        return ended.names

    assert run(main) == ["forever"]


def test_cancelling_the_inner_of_two_blocks_leaves_the_outer():
    async def main():
        async with green.Group() as outer:
            kept = outer.spawn(value, 7)
            async with green.Group() as inner:
                inner.spawn(forever)
                inner.cancel()
                await forever()
            await green.sleep(0)
        return kept.value

    assert run(main) == 7


def test_both_blocks_cancelled_at_once_both_end():
    async def main():
        for first in (0, 1):
            async with green.Group() as outer, green.Group() as inner:
                for group in (outer, inner) if first else (inner, outer):
                    group.cancel()
                await forever()
            await green.sleep(0)
        return "on"

    assert run(main) == "on"


@pytest.mark.parametrize("waits_for", ["await", "members", "nothing"])
def test_a_thread_that_is_cancelled_before_its_group_is_still_ends(waits_for, clock):
    """The interruption of the group may take the place of the thread's own, in a `finally`."""
    groups, cleaned = [], []

    async def outer():
        async with green.Group() as group:
            groups.append(group)
            if waits_for == "members":
                async with green.Group() as inner:
                    inner.spawn(clean_up, cleaned, clock)
            else:
                await clean_up(cleaned, clock)
        await forever()

    async def main():
        thread = green.spawn(outer)
        await all_waiting()
        thread.cancel()
        if waits_for != "nothing":
            await green.sleep(1)
        groups[0].cancel()
        with pytest.raises(CancelledError):
            await thread

    run(main)
    assert clock.time() < 10


# -- timeouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_body", [False, True])
def test_a_timeout_around_a_group_ends_its_threads(in_body, clock):
    ended = Ended()

    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(1), green.Group() as group:
                group.spawn(ended.forever)
                if in_body:
                    await forever()
        return ended.names, clock.time()

    assert run(main) == (["forever"], 1)


def test_a_timeout_in_a_group_is_an_error_of_the_group(clock):
    async def main():
        async with green.Group() as group:
            group.spawn(forever)
            async with green.timeout(1):
                await forever()

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [TimeoutError] and clock.time() == 1


def test_an_error_in_a_member_that_a_timeout_cancels_passes_the_timeout(clock):
    async def fails_when_cancelled():
        try:
            await forever()
        finally:
            raise KeyError("cleanup")

    async def main():
        async with green.timeout(1), green.Group() as group:
            group.spawn(fails_when_cancelled)

    with pytest.raises(ExceptionGroup) as caught:
        run(main)
    assert kinds(caught.value) == [KeyError] and clock.time() == 1


def test_timeouts_and_groups_nested_at_will_end_their_own_blocks(clock):
    async def main():
        told = []
        async with green.timeout(100), green.Group() as outer:
            outer.spawn(value, 1)
            try:
                async with green.timeout(1), green.Group() as group:
                    group.spawn(forever)
                    try:
                        async with green.timeout(50):
                            await forever()
                    except TimeoutError:
                        told.append("wrong")
            except TimeoutError:
                told.append("right")
            await green.sleep(0)
        return told, clock.time()

    assert run(main) == (["right"], 1)


@pytest.mark.parametrize(("outer", "inner"), [(1, 2), (2, 1)])
def test_two_timeouts_that_expire_while_a_group_ends_both_count(outer, inner, clock):
    async def slow_to_end():
        try:
            await forever()
        except green.Cancelled:
            await green.sleep(6)

    async def main():
        told = []
        try:
            async with green.timeout(outer):
                try:
                    async with green.timeout(inner), green.Group() as group:
                        group.spawn(slow_to_end)
                except TimeoutError:
                    told.append("inner")
                await forever()
        except TimeoutError:
            told.append("outer")
        await green.sleep(1)
        return told, clock.time()

    assert run(main) == (["outer"] if outer < inner else ["inner", "outer"], 8)


@pytest.mark.parametrize("seconds", [1, 2, 3])
def test_a_group_and_a_timeout_that_end_at_the_same_time_leave_nothing_behind(seconds, clock):
    async def fails():
        await green.sleep(seconds)
        raise KeyError

    async def main():
        green.spawn(both_are_due)
        with pytest.raises(ExceptionGroup) as caught:
            async with green.timeout(2), green.Group() as group:
                group.spawn(fails)
                await forever()
        await green.sleep(0)
        await green.sleep(0)
        return kinds(caught.value), clock.time()

    async def both_are_due():
        await all_waiting()
        clock.advance(3)

    assert run(main) == ([KeyError], 3)


def test_a_cancel_that_was_asked_for_before_a_timeout_block_is_not_taken_for_its_timeout(clock):
    in_call, asked = threading.Event(), threading.Event()

    async def worker():
        await green.call(lambda: (in_call.set(), asked.wait(30)))
        async with green.timeout(1):
            try:
                await green.Event().wait()
            finally:
                await green.sleep(3)

    thread = green.spawn(worker)
    in_call.wait()
    thread.cancel()
    asked.set()
    with pytest.raises(CancelledError):
        thread.result(30)
    assert clock.time() == 3


def test_each_time_limit_around_a_call_counts_however_many_came_before(clock):
    def returns_too_late(limit):
        clock.advance(1)
        wait_for(lambda: limit.expired)

    async def main():
        late = 0
        for _ in range(5):
            try:
                async with green.timeout(1) as limit:
                    await green.call(returns_too_late, limit)
            except TimeoutError:
                late += 1
        return late

    assert green.run(main) == 5


def test_a_timeout_and_a_group_are_for_one_block_of_a_coroutine():
    async def twice():
        limit = green.timeout(None)
        async with limit:
            pass
        with pytest.raises(RuntimeError, match="another"):
            async with limit:
                pass

    async def in_asyncio(make):
        async with make():
            pass

    green.run(twice)
    for make in (green.Group, lambda: green.timeout(1)):
        with pytest.raises(RuntimeError, match="green threads"):
            green.run(asyncio.run, in_asyncio(make))


def test_an_asynchronous_generator_with_a_group_is_closed():
    ended = []

    async def wait():
        try:
            await green.sleep(60)
        finally:
            ended.append(True)

    async def generate():
        async with green.Group() as group:
            group.spawn(wait)
            yield 1

    async def main():
        generator = generate()
        await anext(generator)
        await green.sleep(0)
        await generator.aclose()

    green.run(main)
    assert ended == [True]
