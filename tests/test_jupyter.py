"""Pools in a real Jupyter kernel: the magics, whose output is under which cell, interrupts, the
kernel's end."""

import asyncio
import os
import time
from contextlib import suppress
from queue import Empty

import pytest
from blocks import blocks_of
from census import MARKER, wait_until_gone
from faults import hold_until, wait_for
from scripts import output_of

import polycephaly as poly

jupyter_client = pytest.importorskip("jupyter_client")
jupyter_utils = pytest.importorskip("jupyter_core.utils")
pytest.importorskip("ipykernel")

TIMEOUT = 60


class Cell:
    """What came of one."""

    def __init__(self, message):
        self.id = message
        self.out = None
        self.html = None
        self.stdout = self.stderr = self.error = ""
        self.idle = False

    def take(self, kind, content):
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind in ("execute_result", "display_data"):
            self.out = content["data"].get("text/plain")
            self.html = content["data"].get("text/html")
        elif kind == "error":
            self.error = f"{content['ename']}: {content['evalue']}"
        elif kind == "status":
            self.idle = content["execution_state"] == "idle"


class Notebook:
    """A kernel of its own, and the cells that were run in it."""

    def __init__(self, folder):
        self.run_id = f"kernel-{os.urandom(8).hex()}"
        self.manager = jupyter_client.KernelManager()
        tests = os.path.dirname(os.path.abspath(__file__))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([tests, os.path.dirname(tests)]),
            "IPYTHONDIR": str(folder),
            "TMPDIR": str(folder),
            MARKER: self.run_id,
        }
        self.manager.start_kernel(env=env, cwd=str(folder))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)
        self.cells = {}

    def start(self, code, asks=False):
        cell = Cell(self.client.execute(code, allow_stdin=asks))
        self.cells[cell.id] = cell
        return cell

    def listen_until(self, condition):
        end = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < end, {each.id: vars(each) for each in self.cells.values()}
            with suppress(Empty):
                message = self.client.get_iopub_msg(timeout=1)
                cell = self.cells.get(message["parent_header"].get("msg_id"))
                if cell is not None:
                    cell.take(message["msg_type"], message["content"])

    def run(self, code):
        """Runs it to its end."""
        cell = self.start(code)
        self.listen_until(lambda: cell.idle)
        return cell

    def answer(self, line):
        """Answers the running cell's `input`, and gives its prompt."""
        message = self.client.get_stdin_msg(timeout=TIMEOUT)
        if line is not None:
            self.client.input(line)
        return message["content"]["prompt"]

    def close(self, **how):
        self.client.stop_channels()
        self.manager.shutdown_kernel(**how)
        self.manager.cleanup_resources()
        return wait_until_gone(self.run_id)


@pytest.fixture(scope="module", autouse=True)
def loop_that_jupyter_keeps():
    """Made by its first call, in whichever test that is, and kept: so it is there before all of
    them."""
    loop = jupyter_utils.ensure_event_loop()
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    notebook = Notebook(tmp_path_factory.mktemp("k"))
    notebook.run("%load_ext polycephaly\nimport polycephaly as poly")
    yield notebook
    assert not notebook.close()


@pytest.fixture
def notebook(kernel):
    kernel.cells.clear()
    assert not kernel.run("pool = poly.Pool(2, name='p')").error
    yield kernel
    assert not kernel.run("pool.shutdown(); del pool").error


def test_a_cell_is_run_in_a_drone_and_its_value_is_shown(notebook):
    cell = notebook.run("%%doit\nimport os\nx = 40\nos.getpid(), x + 2")
    assert cell.error == "" and cell.out.endswith(", 42)")
    assert cell.out != notebook.run("import os\nos.getpid(), 42").out
    assert notebook.run("%doit 6 * 7").out == "42"
    assert notebook.run("'x' in globals()").out == "False"


def test_everywhere_gives_the_values_of_all_drones_or_nothing(notebook):
    assert notebook.run("%%everywhere pool\ny = 7").out is None
    assert notebook.run("%everywhere y * 6").out == "[42, 42]"


def test_a_pool_is_found_by_its_variable_and_by_its_name(notebook):
    notebook.run("other = poly.Pool(1, name='second', env={'WHO': 'other'})")
    code = "\nimport os\nos.environ.get('WHO')"
    for which in ("other", "second"):
        assert notebook.run(f"%%doit {which}" + code).out == "'other'"
    assert notebook.run("%%doit" + code).out == "'other'"  # the one used last
    assert notebook.run("%%doit pool" + code).out is None
    cell = notebook.run("%%doit nobody\n1")
    assert cell.stderr == "UsageError: no pool 'nobody': there are pool (p), other (second)\n"
    notebook.run("other.shutdown()")
    assert notebook.run("%%doit" + code).error == ""


def test_options(notebook):
    assert (
        notebook.run("%%doit pool --drone p.1\nimport os\nos.getpid()").out
        == notebook.run("pool.drones[1].pid").out
    )
    assert "TimeoutError" in notebook.run("%%doit --timeout 0.2\nimport time\ntime.sleep(60)").error
    assert notebook.run("later = %doit -a 6 * 7").error == ""
    assert notebook.run("later.value").out == "42"
    for line, told in [
        ("%%doit --drone p.9\n1", "no drone 'p.9': there are p.0, p.1"),
        ("%%doit pool --timeout soon\n1", "--timeout takes seconds, not 'soon'"),
        (
            "%%doit pool --what\n1",
            "unknown argument: '--what'; options are --drone NAME, --timeout SECONDS and --async",
        ),
        ("%doit", "there is no code to run"),
    ]:
        assert notebook.run(line).stderr == f"UsageError: {told}\n"


@pytest.mark.guarantee("log-4")
def test_output_appears_under_the_cell_that_ran_it(notebook):
    for i in range(3):
        cell = notebook.run(
            f"%%doit\nimport sys\nprint('out {i}')\nprint('err {i}', file=sys.stderr)"
        )
        notebook.listen_until(lambda cell=cell: cell.stdout and cell.stderr)
        assert cell.stdout.endswith(f"out {i}\n") and cell.stderr.endswith(f"err {i}\n")
    # The reactor's thread reads it while the cell does something else.
    cell = notebook.run(
        "import time\np = pool.promise(print, 'beside')\nwhile not p.done(): time.sleep(0.01)"
    )
    notebook.listen_until(lambda: "beside" in cell.stdout)
    cell = notebook.run("%%doit\nimport logging\nlogging.warning('mind')")
    notebook.listen_until(lambda: "WARNING:root:mind" in cell.stderr)


@pytest.mark.guarantee("log-4")
def test_an_interrupt_breaks_the_wait_and_cancels_the_work(notebook):
    notebook.run("before = [d.pid for d in pool.drones]")
    notebook.run(
        "from polycephaly.runtime.tuning import tuning; tuning.grace_seconds = 60.0"
    )  # kills nobody
    cell = notebook.start("%%doit\nimport time\nprint('begun')\ntime.sleep(600)")
    notebook.listen_until(lambda: "begun" in cell.stdout)
    notebook.manager.interrupt_kernel()
    notebook.listen_until(lambda: cell.idle)
    assert cell.error.startswith("KeyboardInterrupt")
    assert notebook.run("[pool.doit('1') for _ in range(4)]").out == "[1, 1, 1, 1]"
    assert notebook.run("[d.pid for d in pool.drones] == before").out == "True"
    notebook.run("tuning.grace_seconds = 1.0")


def test_a_breakpoint_asks_in_the_cell_one_drone_at_a_time(notebook):
    notebook.run("def work(n):\n    m = n + 1\n    breakpoint()\n    return m")
    cell = notebook.start("list(pool.map(work, [40, 40]))", asks=True)
    for _ in range(2):
        assert notebook.answer("p 'm is', m") == "ipdb> "
        assert notebook.answer("m = 7") == "ipdb> "
        assert notebook.answer("c") == "ipdb> "
    notebook.listen_until(lambda: cell.idle)
    assert cell.out == "[7, 7]" and cell.stdout.count("('m is', 41)") == 2


def test_frames_of_a_failed_task_are_debugged_in_the_cell(notebook):
    notebook.run("careful = poly.Pool(1, post_mortem=True)\ndef divide(a): return a / 0")
    notebook.run("failed = careful.promise(divide, 1234)\nfailed.exception()")
    cell = notebook.start("failed.debug()", asks=True)
    assert notebook.answer("p a + 1") == "ipdb> "
    assert notebook.answer("q") == "ipdb> "
    notebook.listen_until(lambda: cell.idle)
    assert "1235" in cell.stdout and not cell.error
    notebook.run("careful.shutdown()")


def test_an_interrupt_at_the_debuggers_prompt_ends_the_session(notebook):
    cell = notebook.start("pool.doit('breakpoint()')", asks=True)
    assert notebook.answer(None) == "ipdb> "
    notebook.manager.interrupt_kernel()
    notebook.listen_until(lambda: cell.idle)
    assert cell.error.startswith("KeyboardInterrupt")
    cell = notebook.start("[input('name? '), pool.doit('1')]", asks=True)
    assert notebook.answer("me") == "name? "
    notebook.listen_until(lambda: cell.idle)
    assert cell.out == "['me', 1]"


def test_the_end_of_the_input_ends_the_session(notebook):
    cell = notebook.start("pool.promise('breakpoint()').exception()", asks=True)
    assert notebook.answer("\x04") == "ipdb> "
    notebook.listen_until(lambda: cell.idle)
    assert "BdbQuit" in cell.out


STOPS = """
from faults import wait_for
from polycephaly.wire.debugging import waiting_debuggers
def stopped(pool):
    promise, found = pool.promise('x = 4; breakpoint(); x'), []
    wait_for(lambda: found.extend(waiting_debuggers()) or found)
    for each in found:
        each.connection.close()
    return promise
"""


def test_a_breakpoint_waits_until_a_cell_waits_and_the_cells_own_questions_come_first(notebook):
    notebook.run(STOPS)
    cell = notebook.start("promise = stopped(pool)\ninput('name? ')", asks=True)
    assert notebook.answer("me") == "name? "
    notebook.listen_until(lambda: cell.idle)
    assert cell.out == "'me'"
    cell = notebook.start("promise.value", asks=True)
    assert notebook.answer("x = 5") == "ipdb> "
    assert notebook.answer("c") == "ipdb> "
    notebook.listen_until(lambda: cell.idle)
    assert cell.out == "5"


def test_a_breakpoint_between_two_cells_asks_in_the_next_that_waits(notebook, tmp_path):
    gate = tmp_path / "gate"
    work = f"from faults import hold_until; hold_until({str(gate)!r}); breakpoint(); 5"
    cell = notebook.start(f"p = pool.promise({work!r})")
    notebook.listen_until(lambda: cell.idle)
    gate.touch()
    notebook.listen_until(
        lambda: any("breakpoint at" in each.stderr for each in notebook.cells.values())
    )
    cell = notebook.start("p.value", asks=True)
    assert notebook.answer("c") == "ipdb> "
    notebook.listen_until(lambda: cell.idle)
    assert cell.out == "5"


def test_where_nobody_can_be_asked_breakpoints_wait_for_a_terminal(notebook):
    notebook.run(STOPS)
    cell = notebook.run("promise = stopped(pool)\npromise.result(0.2)")  # without `asks`
    assert cell.error.startswith("TimeoutError")
    assert notebook.run("promise.cancel(), pool.everywhere('1')[0].value").out == "(True, 1)"
    notebook.run("careful = poly.Pool(1, post_mortem=True)\nfailed = careful.promise('1 / 0')")
    cell = notebook.run("failed.exception()\nfailed.debug()")
    assert cell.error.startswith("RuntimeError") and "attach" in cell.error
    notebook.run("careful.shutdown()")


def test_an_error_is_shown_with_its_remote_traceback(notebook):
    assert notebook.run("%%doit\n1 / 0").error == "ZeroDivisionError: division by zero"
    assert notebook.run("pool.doit(abs, -1)").out == "1"


def test_what_is_defined_in_cells_works(notebook):
    notebook.run(
        "class Point:\n    def __init__(self, x): self.x = x\ndef double(p): return Point(p.x * 2)"
    )
    assert notebook.run("pool.doit(double, Point(21)).x").out == "42"
    assert notebook.run("list(pool.map(lambda x: x * k, [1, 2, 3]))\n").error.startswith(
        "NameError"
    )
    notebook.run("k = 2\nasync def slow(x):\n    await poly.green.sleep(0)\n    return x * k")
    assert notebook.run("list(pool.map(lambda x: x * k, [1, 2, 3]))").out == "[2, 4, 6]"
    cell = notebook.run("pool.doit(slow, 4)")
    assert cell.out == "8", vars(cell)


def test_cells_may_await(notebook):
    code = (
        "import asyncio\n"
        "await asyncio.gather(pool.promise('1'), asyncio.wrap_future(pool.promise('2')))"
    )
    assert notebook.run(code).out == "[1, 2]"
    assert (
        notebook.run("[x async for x in poly.as_completed([pool.promise('3')])][0].value").out
        == "3"
    )
    assert notebook.run("p = poly.promise('5'); await p").out == "5"


@pytest.mark.guarantee("end-5")
@pytest.mark.parametrize("awaits", ["", "await asyncio.sleep(0)"])
def test_what_a_cell_makes_belongs_to_the_kernel(notebook, awaits):
    assert not notebook.run(f"import asyncio\nd = poly.Drone()\n{awaits}").error
    assert not notebook.run("d.doit('x = 41')").error
    cell = notebook.run("d.doit('x + 1')")
    assert cell.out == "42", vars(cell)
    held = "import time\nwhile not os.path.exists(go): time.sleep(0.01)\n5"
    notebook.run(
        f"import os, tempfile\ngo = tempfile.mktemp()\np = poly.promise({held!r})\n{awaits}"
    )
    notebook.run("open(go, 'w').close()")
    cell = notebook.run("p.value")
    assert cell.out == "5", vars(cell)
    notebook.run("os.unlink(go)\nd.release()")


@pytest.mark.guarantee("end-5")
def test_what_a_task_of_the_users_makes_in_a_cell_ends_with_the_task(notebook):
    notebook.run("async def make():\n    global d\n    d = poly.Drone()")
    notebook.run("import asyncio\ntask = asyncio.create_task(make(), name='mine')\nawait task")
    assert "its owner, asyncio task 'mine', has ended" in notebook.run("d.doit('1')").error
    assert notebook.run("del task\nd.release()").error == ""


def test_the_readmes_first_section_may_be_cells(notebook):
    block = blocks_of("README.md")[0]
    for name in block.needs:
        pytest.importorskip(name)
    paragraphs = block.code.split("\n\n")
    assert len(paragraphs) > 3
    assert "".join(notebook.run(each).stdout for each in paragraphs).splitlines() == block.said


IN_A_DRONE = """
import asyncio, gc, getpass, sys, threading
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
told = []
for ask in (input, getpass.getpass):
    try:
        ask("asks")
    except EOFError:
        told.append("EOF")
async def nothing():
    return 1
gc.collect()
told, asyncio.run(nothing()), type(sys.stdout).__name__
"""


@pytest.mark.guarantee("log-4")
def test_drones_do_not_disturb_the_kernel(notebook):
    cell = notebook.run("%%doit" + IN_A_DRONE)
    assert cell.out == "(['EOF', 'EOF'], 1, 'Console')", vars(cell)
    notebook.listen_until(lambda: "thread" in cell.stdout)
    cell = notebook.run("%%doit\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>'))")
    notebook.listen_until(lambda: "<IPython.core.display.HTML object>" in cell.stdout)
    assert notebook.run("%%everywhere\nimport os\nos._exit(3)").error.startswith("DroneDied")
    assert notebook.run("%history -l 1").stdout != "" and notebook.run("6 * 7").out == "42"


def test_pools_drones_and_promises_are_shown_as_tables(notebook):
    notebook.run("p = pool.promise(print, '<b>'); p.result()")
    shown = {
        "pool": "p.0",
        "pool.drones[0]": "p.0",
        "p": "print",
        "pool.promise('<i>')": "&lt;i&gt;",
    }
    for name, wanted in shown.items():
        cell = notebook.run(name)
        assert cell.out.startswith("<") and "<table" in cell.html and wanted in cell.html, vars(
            cell
        )
        assert "<i>" not in cell.html


def test_the_bar_tells_what_a_promise_has_been_through(tmp_path):
    with poly.Pool(1) as pool:
        p = pool.promise(hold_until, str(tmp_path / "go"), str(tmp_path / "begun"))
        q = pool.promise(abs, -1)
        wait_for((tmp_path / "begun").exists)
        during, behind = p._repr_html_(), q._repr_html_()
        (tmp_path / "go").touch()
        p.result()
        after = p._repr_html_()
    assert "ran " in during and "on its way" not in during and "hold_until" in during
    assert "waited" in behind and "ran " not in behind
    assert "ran " in after and "on its way back" in after
    assert "<small>" not in poly.Promise()._repr_html_()


@pytest.mark.guarantee("log-4")
def test_a_kernel_that_is_killed_or_restarted_leaves_no_drones(tmp_path):
    notebook = Notebook(tmp_path)
    try:
        assert (
            notebook.run("import polycephaly as poly; pool = poly.Pool(2); pool.doit('1')").out
            == "1"
        )
        notebook.manager.restart_kernel(now=True)
        notebook.client.wait_for_ready(timeout=TIMEOUT)
        assert (
            notebook.run("import polycephaly as poly; pool = poly.Pool(2); pool.doit('1')").out
            == "1"
        )
        cell = notebook.start(
            "%load_ext polycephaly\npool.promise('print(1); import time; time.sleep(600)').value"
        )
        notebook.listen_until(lambda: cell.stdout)
    finally:
        left = notebook.close(now=True)
    assert not left


def test_the_magics_work_in_plain_ipython():
    said = output_of("""
        import os
        os.environ["IPYTHONDIR"] = os.environ["TMPDIR"]
        from IPython.core.interactiveshell import InteractiveShell
        import polycephaly as poly
        InteractiveShell.enable_history_manager = False
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "polycephaly")
        with poly.Pool(1, name="plain") as pool:
            shell.user_ns["mine"] = pool
            print(
                shell.run_cell_magic("doit", "mine", "x = 41\\nx + 1"),
                shell.run_line_magic("doit", "x"),
            )
            card = os.path.join(os.environ["TMPDIR"], "card")
            with poly.serve(pool, file=card), poly.connect(card) as far:
                shell.user_ns["far"] = far
                print(shell.run_cell_magic("doit", "far", "x + 1"))
            shell.run_cell_magic("doit", "mine", "1")
        import gc, weakref
        lost = weakref.ref(shell.user_ns.pop("mine"))
        del pool
        gc.collect()
        print("the magics keep it" if lost() else "collected")
        shell.run_line_magic("unload_ext", "polycephaly")
        print(shell.find_cell_magic("doit"))
    """)
    assert said == "42 41\n42\ncollected\nNone\n"


@pytest.mark.guarantee("end-5")
def test_what_an_awaiting_cell_makes_in_plain_ipython_belongs_to_the_image():
    said = output_of("""
        import os
        os.environ["IPYTHONDIR"] = os.environ["TMPDIR"]
        from IPython.core.interactiveshell import InteractiveShell
        InteractiveShell.enable_history_manager = False
        shell = InteractiveShell.instance()
        shell.run_cell(
            "import asyncio\\nimport polycephaly as poly\\n"
            "d = poly.Drone(); await asyncio.sleep(0)"
        )
        shell.run_cell("print(d.doit('6 * 7'))")
    """)
    assert said == "42\n"


def test_where_ipykernel_is_only_imported_no_drone_loads_ipython():
    here, there = output_of("""
        import sys
        import ipykernel
        import polycephaly as poly
        with poly.Drone() as drone:
            print(
                "IPython" in sys.modules,
                drone.doit("__import__('sys').modules.keys() >= {'IPython'}"),
            )
    """).split()
    assert here == there
