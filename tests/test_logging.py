"""What is logged in a drone reaches the controller's loggers, with the drone's name, once and in
order."""

import gc
import json
import logging
import logging.config
import multiprocessing
import os
import signal
import threading
import traceback
import warnings

import pytest
from engines import NO_FORK, local_only, on_each_engine, poly
from faults import kill_myself, segfault
from scripts import run_script

import polycephaly
from polycephaly import green
from polycephaly.wire.chunks import MAX_BODY_BYTES

pytestmark = on_each_engine

log = logging.getLogger("tests.drones")
LISTEN = {
    "initializer": log.setLevel,
    "initargs": (logging.INFO,),
}  # a drone that is no fork has levels of its own


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def messages(self):
        return [record.getMessage() for record in self.records]


@pytest.fixture
def records():
    handler = Records()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


@pytest.fixture
def pool(records):
    with poly.Pool(1, name="p", **LISTEN) as pool:
        yield pool


def log_an_error():
    try:
        {}["k"]
    except KeyError:
        log.exception("no %s", "key", stack_info=True)


@pytest.mark.guarantee("log-1")
def test_a_record_comes_home_with_all_that_it_says(pool, records):
    pool.doit(
        log.warning,
        "%s of %d",
        "one",
        2,
        extra={"request": 7, "rows": [1, {"a": None}], "odd": {1}},
    )
    (record,) = records.records
    assert (record.getMessage(), record.levelno, record.levelname) == (
        "one of 2",
        logging.WARNING,
        "WARNING",
    )
    assert record.drone == record.processName == "p.0" and record.process == pool.drones[0].pid
    assert record.threadName == "MainThread" and record.name == "tests.drones"
    assert (record.request, record.rows, record.odd) == (7, [1, {"a": None}], "{1}")


def test_an_exception_comes_home_as_text_with_the_place_of_the_call(pool, records):
    pool.doit(log_an_error)
    (record,) = records.records
    assert (record.getMessage(), record.funcName, record.module) == (
        "no key",
        "log_an_error",
        "test_logging",
    )
    told = logging.Formatter("%(message)s").format(record)
    assert "KeyError: 'k'" in told and '{}["k"]' in told and "Stack (most recent call last)" in told


@pytest.mark.guarantee("log-2")
@local_only(NO_FORK)
def test_levels_and_filters_are_those_of_the_snapshot_and_the_controllers_count_too(records):
    def no_secrets(record):
        return "secret" not in record.msg

    log.addFilter(no_secrets)
    try:
        with poly.Pool(1) as pool:
            pool.doit(lambda: (log.debug("quiet"), log.info("a secret"), log.info("told")))
            log.setLevel(logging.ERROR)
            pool.doit(lambda: (log.info("not wanted here"), log.error("wanted")))
    finally:
        log.removeFilter(no_secrets)
    assert records.messages == ["told", "wanted"]


def test_a_logger_that_does_not_propagate_sends_its_records_home(records):
    log.propagate = False
    try:
        with poly.Pool(1, **LISTEN) as pool:
            pool.doit(log.info, "of its own")
    finally:
        log.propagate = True
    assert records.messages == ["of its own"]


@pytest.mark.guarantee("log-2")
@local_only(NO_FORK)
def test_inherited_handlers_are_not_used_in_drones(tmp_path):
    path = tmp_path / "log"
    handler = logging.FileHandler(path)
    log.addHandler(handler)
    try:
        with poly.Pool(1) as pool:
            pool.doit(log.warning, "once")
            pool.doit("import logging; logging.shutdown()")
            pool.doit(log.warning, "twice")
    finally:
        log.removeHandler(handler)
        handler.close()
    assert path.read_text() == "once\ntwice\n"


@pytest.mark.guarantee("log-2")
@local_only(NO_FORK)
def test_a_lock_that_a_handlers_thread_holds_at_the_fork_does_not_matter(records):
    held, release = threading.Event(), threading.Event()

    def hold():
        with records.lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = poly.Pool(1)
    with pool:
        p = pool.promise(lambda: log.warning("free"))
        release.set()
        p.result()
    thread.join()
    assert records.messages == ["free"]


@pytest.mark.guarantee("log-1")
def test_what_was_logged_is_home_before_the_promise_settles(pool, records):
    for i in range(300):
        pool.doit(log.info, "%d", i)
        assert records.messages[-1] == str(i)


def interleave(n):
    import sys

    for i in range(n):
        print(f"out {i}")
        log.info(f"log {i}")
        if i % 3 == 0:
            log.info(f"again {i}")
            print(f"err {i}", file=sys.stderr)


@pytest.mark.guarantee("log-1")
def test_records_keep_their_order_with_what_is_printed(records):
    told = []
    records.emit = lambda record: told.append(record.getMessage())
    with poly.Pool(1, output=lambda line: told.append(line.text), **LISTEN) as pool:
        pool.doit(interleave, 3000)
    told = [each for each in told if not each.startswith("err")]
    wanted = [
        f"{what} {i}"
        for i in range(3000)
        for what in ("out", "log", "again")
        if what != "again" or i % 3 == 0
    ]
    assert told == wanted


def test_records_keep_their_order_with_what_is_printed_on_stderr(records):
    told = []
    records.emit = lambda record: told.append(record.getMessage())
    with poly.Pool(1, output=lambda line: told.append(line.text), **LISTEN) as pool:
        pool.doit(interleave, 300)
    told = [each for each in told if not each.startswith("out")]
    assert told == [
        f"{w} {i}" for i in range(300) for w in ("log", "again", "err") if w == "log" or i % 3 == 0
    ]


@pytest.mark.guarantee("log-1")
@pytest.mark.parametrize(
    "end", [lambda: os._exit(3), kill_myself, segfault], ids=["os._exit", "SIGKILL", "segfault"]
)
def test_what_was_logged_last_before_a_crash_arrives_once(end, pool, records):
    def crash():
        for i in range(50):
            log.info("%d", i)
        end()

    error = pool.promise(crash).exception()
    assert isinstance(error, poly.DroneDied)
    assert records.messages == [str(i) for i in range(50)]
    assert error.stack or "INFO:tests.drones:49" in error.stderr


def test_threads_green_threads_and_forks_of_a_drone(pool, records):
    def all_of_them():
        threads = [
            threading.Thread(target=log.info, args=("t%d", i), name=f"thread {i}") for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        green.map(lambda i: log.info("g%d", i), range(8))
        pid = os.fork()
        if pid == 0:
            log.info("a fork")
            os._exit(0)
        os.waitpid(pid, 0)

    pool.doit(all_of_them)
    assert sorted(records.messages) == sorted(
        [f"{w}{i}" for w in "tg" for i in range(8)] + ["a fork"]
    )
    assert {r.threadName for r in records.records} >= {f"thread {i}" for i in range(8)}


def test_a_drones_drones_records_travel_up_both(pool, records):
    def inner():
        with poly.Pool(1, name="q") as pool:
            pool.doit(log.warning, "from below")

    pool.doit(inner)
    (record,) = records.records
    assert record.getMessage() == "from below" and record.drone == record.processName == "p.0/q.0"


def test_discarded_output_does_not_discard_records(records):
    with poly.Pool(1, output="discard", **LISTEN) as pool:
        pool.doit(lambda: (print("gone"), log.info("not gone")))
    assert records.messages == ["not gone"]


@local_only
def test_spawned_drones():
    done = run_script("""
        import logging, polycephaly as poly
        logging.basicConfig(level=logging.INFO, format="%(drone)s %(name)s %(message)s")
        if __name__ == "__main__":
            with poly.Pool(1, name="s", start="spawn") as pool:
                pool.doit("import logging; logging.getLogger('a.b').info('hello')")
    """)
    assert done.stderr == "s.0 a.b hello\n"


@local_only
def test_where_nothing_is_configured_warnings_are_printed_with_the_drones_name():
    done = run_script("""
        import logging, polycephaly as poly
        log = logging.getLogger("a.b")
        with poly.Pool(1, name="p") as pool:
            pool.doit(lambda: (log.info("no"), log.warning("yes"), logging.error("and\\nthis")))
    """)
    assert (
        done.stderr == "[p.0] WARNING:a.b:yes\n[p.0] ERROR:root:and\n[p.0] this\n"
        and done.stdout == ""
    )


def test_basic_config_in_a_drone_neither_breaks_nor_doubles_it(pool, records):
    pool.doit(
        "import logging; logging.basicConfig(level=1); logging.getLogger('tests.drones').info('x')"
    )
    assert records.messages == ["x"]


def test_a_handler_that_work_adds_works_in_the_drone_in_addition(pool, records, tmp_path):
    def add(path):
        log.addHandler(logging.FileHandler(path))
        log.info("both")

    pool.doit(add, str(tmp_path / "log"))
    assert records.messages == ["both"] and (tmp_path / "log").read_text() == "both\n"


def test_a_configuration_of_its_own_takes_the_records_home_as_text(records):
    lines = []

    def configure():
        handlers = {"h": {"class": "logging.StreamHandler"}}
        logging.config.dictConfig(
            {
                "version": 1,
                "disable_existing_loggers": False,
                "handlers": handlers,
                "root": {"handlers": ["h"]},
            }
        )
        log.info("as text")

    with poly.Pool(1, output=lambda line: lines.append(line.text), **LISTEN) as pool:
        pool.doit(configure)
    assert lines == ["as text"] and records.messages == []


@local_only(NO_FORK)
def test_captured_warnings_come_as_records():
    handler = Records()
    logging.getLogger("py.warnings").addHandler(handler)
    logging.captureWarnings(True)
    try:
        with poly.Pool(1) as pool:
            pool.doit("import warnings; warnings.warn('careful')")
    finally:
        logging.captureWarnings(False)
        logging.getLogger("py.warnings").removeHandler(handler)
    assert "UserWarning: careful" in handler.messages[0]


@pytest.mark.slow
def test_logging_in_signal_handlers_and_finalizers_does_not_deadlock(pool, records):
    class Logs:
        def __init__(self):
            self.me = self

        def __del__(self):
            log.info("finalizer")

    def storm():
        signals = iter(range(1000))

        def handler(*_):
            log.info("signal")
            if next(signals, None) is None:  # a slow machine does nothing else any more
                signal.setitimer(signal.ITIMER_REAL, 0)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            for i in range(3000):
                log.info("main")
                if i % 100 == 0:
                    Logs()
                    gc.collect()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    pool.doit(storm)
    assert records.messages.count("main") == 3000 and records.messages.count("finalizer") == 30
    assert "signal" in records.messages


def test_long_and_odd_messages(pool, records):
    long = "é\x1e\x7f\n" * 30_000
    pool.doit(log.info, long)
    pool.doit(log.info, "\ud800 and \0")
    pool.doit(log.info, "x" * 5_000_000)
    assert records.messages[:2] == [long, "\ud800 and \0"]
    assert records.messages[2].startswith("xxx") and records.messages[2].endswith(
        "more characters)"
    )


def test_a_record_that_cannot_be_told_harms_nothing(pool, records):
    circle = []
    circle.append(circle)

    class Odd:
        def __str__(self):
            raise RuntimeError("no")

    pool.doit(lambda: log.info("wrong %d", "x"))
    pool.doit(lambda: log.info("right", extra={"circle": circle, "odd": Odd()}))
    pool.doit(lambda: log.info("right", extra={"odd": Odd()}))
    assert records.messages == ["right"] * 2
    assert all({"circle", "odd"}.isdisjoint(each.__dict__) for each in records.records)


def test_a_handler_that_raises_keeps_nothing_from_the_others(pool, records):
    records.emit = lambda record: 1 / 0
    pool.doit(lambda: (print("before"), log.info("x")))
    assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("log-3")
@local_only
def test_the_library_logs_to_its_own_loggers_and_prints_nothing():
    done = run_script("""
        import logging, os, polycephaly as poly
        with poly.Pool(2) as pool:
            pool.promise("import os; os._exit(3)").exception()
            pool.doit(abs, -1)
        assert [
            type(h).__name__ for h in logging.getLogger("polycephaly").handlers
        ] == ["NullHandler"]
    """)
    assert done.stdout == done.stderr == ""


def test_long_records_of_many_threads_at_once_all_come(pool, records):
    def work():
        at_once = threading.Barrier(40)

        def tell():
            at_once.wait()
            for _ in range(4):
                log.warning("x" * 40_000)

        threads = [threading.Thread(target=tell) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    pool.doit(work)
    assert [len(each.msg) for each in records.records] == [40_000] * 160


def test_records_about_as_long_as_can_be_sent_come(pool, records):
    def work():
        for size in range(MAX_BODY_BYTES - 400, MAX_BODY_BYTES, 20):
            log.warning("y" * size)
        log.warning("\x7f" * (MAX_BODY_BYTES // 3))
        try:
            raise ValueError("\U0001f600" * MAX_BODY_BYTES)
        except ValueError:
            log.warning("\U0001f600" * MAX_BODY_BYTES, exc_info=True)

    pool.doit(work)
    assert len(records.records) == 22


@pytest.mark.parametrize(
    "forged", [5, ["n", 30], {}, {"name": 5, "levelno": 30}, {"name": "n", "levelno": "x"}]
)
def test_what_only_looks_like_a_record_of_ours_breaks_nothing(forged, capfd):
    printed = f"\x1epoly:L;1 {json.dumps(forged)}\x1e\n".encode()
    with poly.Pool(1, name="p") as pool:
        pool.doit(os.write, 2, printed)
        assert pool.doit("6 * 7") == 42
    assert "[p.0] \x1epoly:L;1 " in capfd.readouterr().err


@pytest.mark.parametrize("rest", [{"exc_text": 5}, {"msg": [1], "msecs": "x"}, {"getMessage": 1}])
def test_a_forged_record_harms_nothing(rest, pool, records, capfd):
    forged = {"name": "tests.drones", "levelno": 30, **rest}
    pool.doit(os.write, 2, f"\x1epoly:L;1 {json.dumps(forged)}\x1e\n".encode())
    pool.doit(log.info, "next")
    assert records.records[-1].msg == "next"


def starts_processes():
    from joblib.externals.loky import ProcessPoolExecutor

    logger = multiprocessing.get_logger()
    with ProcessPoolExecutor(1) as executor:
        return [each.formatter._fmt for each in logger.handlers], executor.submit(pow, 2, 5).result(
            60
        )


@local_only(NO_FORK)
@pytest.mark.parametrize("text", [None, "%(processName)s: %(message)s"])
def test_what_starts_processes_in_a_drone_copies_the_format_of_multiprocessings_logger(text):
    done = run_script(f"""
        import logging, multiprocessing
        import polycephaly as poly
        from test_logging import starts_processes
        logger = multiprocessing.log_to_stderr() if {text!r} else multiprocessing.get_logger()
        for handler in logger.handlers:
            handler.setFormatter(logging.Formatter({text!r}))
        with poly.Pool(1) as pool:
            print(pool.doit(starts_processes))
    """)  # fmt: skip
    assert done.stdout == f"({[text] if text else []}, 32)\n", done.stderr


def root_format():
    return logging.root.handlers[0].formatter._fmt


def test_the_roots_handler_in_a_drone_has_a_formatter():
    with poly.Pool(1) as pool:
        assert pool.doit(root_format)


SECRET = "only-for-the-drone"


def locals_below():
    """What a tool that prints the locals of all frames prints of those below a task that are of
    this package, or of what starts its processes.
    """
    own = os.path.dirname(polycephaly.__file__), os.path.dirname(multiprocessing.__file__)
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), capture_locals=True)
    return [(each.name, each.locals) for each in stack if each.filename.startswith(own)]


def shown_secrets(of):
    frames = of.doit(locals_below)
    assert {"_run_next", "serve"} <= {name for name, _ in frames}
    secrets = [SECRET, repr(bytes(multiprocessing.current_process().authkey))]
    return [
        (name, local, secret)
        for name, values in frames
        for local, value in values.items()
        for secret in secrets
        if secret in value
    ]


@local_only(NO_FORK)
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("kind", [poly.Pool, poly.Drone])
def test_no_frame_below_a_task_shows_env_or_initargs(kind, start):
    given = {"env": {"TOKEN": SECRET}, "initializer": str, "initargs": (SECRET,), "start": start}
    with kind(**given) as one:
        assert shown_secrets(one) == []


@local_only(NO_FORK)
def test_nor_does_a_frame_of_a_drone_that_came_later():
    with poly.Pool(1, env=lambda index: {"TOKEN": SECRET}, retries=3) as pool:
        pool.refresh()
        assert shown_secrets(pool) == []
        os.kill(pool.doit(os.getppid), signal.SIGKILL)  # the pool takes a new snapshot
        assert shown_secrets(pool) == []
