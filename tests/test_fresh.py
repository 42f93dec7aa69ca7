"""`Pool(fresh=True)`: drones see the data of the controller process as they are at the call."""

import contextlib
import os
import subprocess
import sys
import threading
import warnings

import pytest
from faults import act_without_room, append, hold_until, lines, wait_for
from scripts import output_of, run_script

import polycephaly as poly

SCRIPT = """
    import polycephaly as poly
    table = {"n": 0}
    rate = 1
    class Config: pass
    config = Config()
    def look(_=None): return table["n"], rate, getattr(config, "late", None)
    def change(n):
        global rate
        table["n"] = rate = config.late = n
"""


@contextlib.contextmanager
def main_names(**names):
    """Names of `__main__` for the block."""
    main = vars(sys.modules["__main__"])
    main.update(names)
    try:
        yield main
    finally:
        for name in names:
            main.pop(name, None)


def snapshot_of(pool):
    """The zygote of the drone that runs the call."""
    return pool.doit("import os; os.getppid()")


@pytest.mark.guarantee("work-23")
def test_drones_see_changes_in_place_rebound_names_and_new_attributes_at_each_call():
    assert output_of(
        SCRIPT
        + """
    with poly.Pool(2, fresh=True) as pool:
        for n in range(1, 4):
            change(n)
            late = n
            print(pool.doit(look), list(pool.map(look, [0])), pool.doit("table['n'], late"),
                  [p.value for p in pool.everywhere(look)])
            change(-n)
            print(list(pool.map(look, [0])), pool.submit(look).result())
    """
    ) == "".join(
        f"{(n,) * 3} [{(n,) * 3}] {(n, n)} [{(n,) * 3}, {(n,) * 3}]\n[{(-n,) * 3}] {(-n,) * 3}\n"
        for n in range(1, 4)
    )


@pytest.mark.guarantee("work-23")
def test_a_pool_with_a_call_unsettled_or_a_map_unfinished_keeps_its_snapshot(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(2, fresh=True) as pool:
        running = pool.promise(hold_until, gate, started)
        wait_for(lambda: os.path.exists(started))
        first = snapshot_of(pool)
        assert snapshot_of(pool) == first
        append(gate, "open")
        running.result(60)
        second = snapshot_of(pool)
        assert second != first
        results = pool.map(abs, [1, 2])
        third = snapshot_of(pool)
        assert snapshot_of(pool) == third != second
        assert list(results) == [1, 2]
        assert snapshot_of(pool) != third


@pytest.mark.guarantee("work-23")
def test_calls_of_two_threads_at_once_share_a_snapshot(monkeypatch):
    """The second arrives while the first takes it, and waits for it."""
    taking, arrived, zygotes = threading.Event(), threading.Event(), []
    with poly.Pool(2, fresh=True) as pool:
        engine = pool._dispatcher.supervisor.engine
        take = engine.snapshot

        def slow():
            taking.set()
            arrived.wait(60)
            return take()

        monkeypatch.setattr(engine, "snapshot", slow)
        threads = [
            threading.Thread(target=lambda: zygotes.append(snapshot_of(pool))) for _ in range(2)
        ]
        threads[0].start()
        taking.wait(60)
        threads[1].start()
        arrived.set()
        for thread in threads:
            thread.join(60)
        assert len(zygotes) == 2 and len(set(zygotes)) == 1


@pytest.mark.guarantee("work-23")
def test_the_initializer_runs_again_and_what_was_pushed_arrives(tmp_path):
    path = str(tmp_path / "ran")
    with poly.Pool(1, fresh=True, initializer=append, initargs=(path, "x")) as pool:
        pool.doit("import os; os.getpid()")
        pool.push({"pushed": 1})
        assert pool.doit("pushed") == 1
        assert pool.doit("pushed") == 1
        assert len(lines(path)) >= 3
        pool.doit("private = 1")
        assert isinstance(pool.promise("private").exception(60), NameError)


@pytest.mark.guarantee("work-23")
def test_while_a_kept_value_lives_none_is_taken_and_one_warning_names_it():
    with poly.Pool(1, fresh=True) as pool:
        kept = pool.promise("[1]", keep=True).result(60)
        with pytest.warns(RuntimeWarning, match=r"keeps the value of code '\[1\]' #\d+") as warned:
            zygotes = [snapshot_of(pool) for _ in range(3)]
        assert len(set(zygotes)) == 1 and len(warned) == 1
        assert warned[0].filename == __file__
        assert pool.doit(len, kept) == 1
        del kept
        assert snapshot_of(pool) != zygotes[0]


@pytest.mark.guarantee("work-23")
def test_while_the_frames_of_a_failed_task_live_none_is_taken_and_one_warning_names_them():
    with poly.Pool(1, fresh=True, post_mortem=True, output="discard") as pool:
        failed = pool.promise("1 / 0")
        failed.exception(60)
        with pytest.warns(RuntimeWarning, match=r"keeps the frames of code '1 / 0' #\d+"):
            zygote = snapshot_of(pool)
        failed.release()
        wait_for(lambda: snapshot_of(pool) != zygote)


@pytest.mark.guarantee("work-23")
@pytest.mark.parametrize("how", [{"start": "spawn"}, {"engine": "ray"}])
def test_drones_that_are_no_forks_are_refused(how):
    with pytest.raises(ValueError, match="fresh=True takes snapshots by forks of this process"):
        poly.Pool(1, fresh=True, **how)


def test_a_process_that_cannot_be_forked_is_refused(monkeypatch):
    from polycephaly.engines.local import launcher

    def refuse():
        raise launcher.UnsafeFork("a library has native threads", "leave it out", ())

    monkeypatch.setattr(launcher, "check_before_fork", refuse)
    with (
        pytest.raises(ValueError, match=r"fork of this process: that is not safe, because a lib"),
        pytest.warns(RuntimeWarning, match="native threads"),
    ):
        poly.Pool(1, fresh=True)


def test_inline_tasks_see_the_data_anyway():
    with main_names(number=1) as main, poly.Pool(fresh=True, engine="inline") as pool:
        main["number"] = 2
        assert [pool.doit("number") for _ in range(2)] == [2, 2]


def test_a_call_in_a_callback_takes_none_and_ends():
    with poly.Pool(1, fresh=True) as pool:
        assert pool.promise(abs, -1).then(lambda n: pool.promise(abs, -2)).result(60) == 2


def test_clients_of_a_served_pool_take_none(tmp_path):
    card = str(tmp_path / "pool.json")
    with (
        poly.Pool(1, fresh=True) as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        zygotes = {remote.doit("import os; os.getppid()") for _ in range(3)}
        assert len(zygotes) == 1 and snapshot_of(pool) not in zygotes


def test_a_loop_of_calls_leaves_no_process_and_no_descriptor_behind():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with poly.Pool(2, fresh=True) as pool:
        pool.doit(abs, -1)
        before = descriptors()
        for _ in range(16):
            pool.doit(abs, -1)
        # Fewer than one for each snapshot: one drone or two may be up at either count.
        wait_for(lambda: descriptors() < before + 8)


def test_threads_that_submit_and_read_get_all_results():
    with poly.Pool(2, fresh=True) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        results = []

        def work(first):
            results.extend(pool.map(abs, range(first, first + 20)))
            results.extend(pool.doit(abs, -n) for n in range(first, first + 5))

        threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 100


@pytest.mark.script
@pytest.mark.guarantee("work-23")
def test_in_ipython_a_snapshot_is_taken_only_if_a_cell_ran_since():
    pytest.importorskip("IPython")
    done = run_script("""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        zygote = 'pool.doit("import os; os.getppid()")'
        for cell in ('import polycephaly as poly; pool = poly.Pool(1, fresh=True)',
                     f'seen = [{zygote} for _ in range(3)]',
                     f'seen += [{zygote}]; n = 1',
                     f'seen += [{zygote}, pool.doit("n")]',
                     'print([seen.index(each) for each in seen], seen[-1]); pool.shutdown()'):
            shell.run_cell(cell)
    """)
    assert done.stdout.splitlines()[-1:] == ["[0, 0, 0, 3, 4, 5] 1"], done.stderr


@pytest.mark.script
@pytest.mark.guarantee("work-23")
def test_at_pythons_prompt_a_snapshot_is_taken_once_a_line():
    lines_typed = (
        "import polycephaly as poly; pool = poly.Pool(1, fresh=True); n = 1",
        "zygote = 'import os; os.getppid()'",
        "seen = [pool.doit(zygote) for _ in range(2)]",
        "seen += [pool.doit(zygote)]; n = 2",
        "print('seen', [seen.index(each) for each in seen], pool.doit('n'))",
        "pool.shutdown()",
    )
    done = subprocess.run(
        [sys.executable, "-i"], input="\n".join(lines_typed) + "\n", capture_output=True, text=True
    )
    assert "seen [0, 0, 2] 2" in done.stdout, done.stderr


NOTEBOOK = """
    import warnings
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    def run(*cells):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for cell in cells:
                shell.run_cell(cell)
            for each in caught:
                if "snapshot" in str(each.message):
                    print(*str(each.message).partition(": ")[0].split())
        print("-")
    run("import polycephaly as poly; table, rate, name, rows = {'n': 1}, 1, 'a', [[1]]",
        "def look(_=0): return table['n']\\ndef times(n=1): return n * rate * len(name)",
        "def twice(): return 2 * times()\\ndef first(_=0): return rows[0]",
        "pool = poly.Pool(1, name='lab')")
"""


@pytest.mark.script
@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (["pool.doit(look)", "pool.doit(times)", "pool.doit(look)"], []),
        (["pool.doit(first)"], []),
        (["table['n'] = 2; pool.doit(look)", "pool.doit(look)"],
         ["look reads table, which was changed after the snapshot of lab"]),
        (["1", "list(pool.map(first, [1]))", "pool.doit(first)"],
         ["first reads rows, which cells may have changed after the snapshot of lab"]),
        (["rate = 2; pool.doit(twice)"],
         ["twice reads rate, which was bound anew after the snapshot of lab"]),
        (["1", "pool.doit('rows')"],
         ["code 'rows' reads rows, which cells may have changed after the snapshot of lab"]),
        (["rate = 2", "pool.doit(lambda: rate)"], []),
        (["rate = 2", "pool.refresh()", "pool.doit(times)"], []),
        (["pool.shutdown(); pool = poly.Pool(1, fresh=True)", "rate = 2", "pool.doit(times)"], []),
        (["pool.shutdown(); pool = poly.Pool(engine='inline')", "rate = 2", "pool.doit(times)"],
         []),
    ],
    ids=["nothing changed", "the next cell", "in place", "a map", "bound anew", "code", "captured",
         "refreshed", "fresh", "inline"],
)  # fmt: skip
def test_in_a_notebook_one_warning_tells_what_may_be_stale_and_the_cures(cells, told):
    pytest.importorskip("IPython")
    done = run_script(f"{NOTEBOOK}\n    run(*{cells!r})\n    run('pool.shutdown()')\n")
    printed = [line for line in done.stdout.splitlines() if not line.startswith("Out[")]
    assert printed == ["-", *told, "-", "-"], done.stderr


@pytest.mark.guarantee("work-23")
def test_everywhere_calls_also_the_drones_for_which_others_make_room(monkeypatch):
    seen = []
    with poly.Pool(2, fresh=True, output="discard") as pool:

        def call_everywhere():
            seen.extend(each.result(60) for each in pool.everywhere(abs, -1))

        act_without_room(pool, monkeypatch, call_everywhere)
    assert seen == [1, 1]
