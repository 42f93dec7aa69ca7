"""The processors that a control group grants, read from trees of files as the kernel shows them;
and errors that say what a process lacks.
"""

import errno
import fcntl
import os
import select
import sys
from types import SimpleNamespace

import pytest

import polycephaly as poly
from polycephaly.green.distributed.transport import ChannelTransport
from polycephaly.promises.event_loop import EventLoop
from polycephaly.runtime import system_limits
from polycephaly.runtime.system_limits import processor_limit, usable_processors

BOTH = "4:memory:/\n3:cpuset:/\n2:cpu,cpuacct:/user/job\n1:name=systemd:/user\n0::/\n"


@pytest.fixture
def tree(tmp_path):
    def make(groups, **files):
        """`groups` of this process; a key of `files` is a path below /sys/fs/cgroup."""
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
        for path, content in files.items():
            file = tmp_path / "sys/fs/cgroup" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "max 100000"}, 1.0),
        ("0::/a/b\n", {"a/c/cpu.max": "100000 100000", "cpu.max": "300000 100000"}, 3.0),
        ("0::/../../gone\n", {"cpu.max": "50000 100000"}, 0.5),  # of another namespace
        ("0::/\n", {"cpu.max": ""}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/\n", {"cpu.max": "100000 0"}, None),
        (BOTH, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (
            BOTH,
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "cpu/user/cpu.cfs_quota_us": "500000",
                "cpu/user/cpu.cfs_period_us": "100000",
                "cpu/user/job/cpu.cfs_quota_us": "125000",
                "cpu/user/job/cpu.cfs_period_us": "50000",
            },
            2.5,
        ),
        # In a container of version 1, the path is that outside, and the mount is its own group.
        (
            "2:cpu,cpuacct:/docker/ab12\n",
            {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        ("", {"cpu.max": "100000 100000"}, 1.0),
    ],
)
def test_the_least_limit_of_all_groups_around_this_process_counts(tree, groups, files, limit):
    assert processor_limit(tree(groups, **files)) == limit


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert processor_limit(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("limit", "count"), [(None, 8), (0.2, 1), (1.0, 1), (1.01, 2), (7.5, 8), (64.0, 8)]
)
def test_a_limit_is_rounded_up_and_does_not_exceed_the_affinity(monkeypatch, limit, count):
    monkeypatch.setattr(system_limits, "processor_limit", lambda: limit)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert usable_processors() == count


def test_without_proc_the_error_says_so(monkeypatch):
    def nothing_there(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", nothing_there)
    with pytest.raises(FileNotFoundError, match="drones need /proc, which is not mounted"):
        poly.Pool(1)


@pytest.mark.parametrize("module", ["socket", "select", "threading"])
def test_no_loop_runs_on_what_gevent_has_replaced(monkeypatch, module):
    monkey = SimpleNamespace(is_module_patched=lambda name: name == module)
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    with pytest.raises(RuntimeError, match=f"have replaced {module}, .* not patched"):
        EventLoop("loop")


def test_gevent_may_replace_the_rest(monkeypatch):
    monkey = SimpleNamespace(is_module_patched=lambda name: name == "time")
    monkeypatch.setitem(sys.modules, "gevent.monkey", monkey)
    loop = EventLoop("loop")
    loop.start()
    loop.post(loop.stop)
    loop.thread.join()


class LimitedEpoll:
    """An epoll of a user who may watch `left` descriptors more."""

    left = 0
    real = select.epoll

    def __init__(self):
        self.epoll = self.real()

    def register(self, fd, events):
        if LimitedEpoll.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        LimitedEpoll.left -= 1
        self.epoll.register(fd, events)

    def __getattr__(self, name):
        return getattr(self.epoll, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.epoll.close()


@pytest.fixture
def limit_epoll(monkeypatch):
    monkeypatch.setattr(select, "epoll", LimitedEpoll)
    return lambda left: monkeypatch.setattr(LimitedEpoll, "left", left)


def test_the_limit_of_watched_descriptors_is_named_wherever_a_pool_meets_it(limit_epoll):
    met = 0
    while True:
        limit_epoll(met)
        try:
            with poly.Pool(1) as pool:
                assert pool.doit(abs, -1) == 1
            break
        except OSError as error:
            assert error.errno == errno.ENOSPC and "fs.epoll.max_user_watches" in str(error)
            met += 1
    assert met >= 6


@pytest.mark.parametrize("left", [0, 1])
def test_at_this_limit_a_transport_of_channels_leaves_nothing_open(limit_epoll, tmp_path, left):
    limit_epoll(left)
    with pytest.raises(OSError, match="max_user_watches"):
        ChannelTransport(str(tmp_path / "1.c"))
    assert os.listdir(tmp_path) == []


def test_a_pool_that_has_begun_needs_no_more_watched_descriptors(limit_epoll):
    limit_epoll(-1)
    with poly.Pool(1) as pool:
        limit_epoll(0)
        assert pool.doit(abs, -1) == 1
        limit_epoll(-1)


def test_a_file_system_without_locks_is_named_with_the_file_and_the_cure(tmp_path, monkeypatch):
    def refuse(fd, flags):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with poly.Pool(1) as pool:
        monkeypatch.setattr(fcntl, "flock", refuse)
        with pytest.raises(OSError, match=r"no locks.*XDG_RUNTIME_DIR.*[.]lock'") as raised:
            poly.serve(pool, name="lab")
        assert raised.value.errno == errno.ENOLCK
    with pytest.raises(OSError, match=r"no locks.*TMPDIR.*/lock'"), poly.Pool(1):
        pass
    monkeypatch.undo()
