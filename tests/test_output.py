"""What drones print comes home line by line, with the drone's name; each promise keeps the tail."""

import io
import os
import random
import select
import subprocess
import sys
import tempfile

import pytest
from engines import local_only, on_each_engine, poly
from faults import wait_for
from scripts import run_script

from polycephaly import green
from polycephaly.drone.console import set_tag
from polycephaly.wire import output
from polycephaly.wire.chunks import ChunkParser, chunk
from polycephaly.wire.output import Line, forward

pytestmark = on_each_engine


class Lines(list):
    def of(self, stream):
        return [line.text for line in self if line.stream == stream]


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture
def pool(lines):
    with poly.Pool(1, name="p", output=lines.append) as pool:
        yield pool


def speak():
    print("to stdout")
    print("to stderr", file=sys.stderr)


def test_of_a_line_that_rewrites_itself_the_last_state_counts(pool, lines):
    pool.doit("print('10%', '50%', '100%', sep='\\r'); print('of Windows\\r'); print('\\r')")
    assert lines.of("stdout") == ["100%", "of Windows", ""]


@local_only
def test_in_a_terminal_a_line_that_rewrites_itself_is_seen_as_it_changes(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with poly.Pool(1, name="p") as pool:
        given = pool.promise(
            "import sys, time\nsys.stderr.write('\\r10%')\nsys.stderr.flush()\ntime.sleep(60)"
        )
        wait_for(lambda: "[p.0] 10%" in sys.stderr.getvalue())
        given.cancel()
        pool.doit("import sys; print('other', file=sys.stderr)")
    erase = "\r\x1b[K"
    assert sys.stderr.getvalue().startswith(f"{erase}[p.0] 10%\r{erase}[p.0] 10%\n")
    assert sys.stderr.getvalue().endswith("[p.0] other\n")


@local_only
def test_states_of_a_line_are_seen_a_few_times_a_second(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output, "monotonic", lambda: now[0])
    reader, writer = os.pipe()
    source = output.OutputSource(reader, "p.0", "stderr")
    seen = []
    for percent in range(20):
        os.write(writer, b"\r%d%%" % percent)
        seen += [each.line.text for each in source.read()]
        now[0] += 0.1
    os.write(writer, b"\r100%\n")
    os.close(writer)
    ended = source.read()
    source.close()
    assert seen == ["0%", "3%", "6%", "9%", "12%", "15%", "18%"]
    assert [each.text for each in ended] == ["100%"]


def test_text_that_the_stream_of_this_process_cannot_encode_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    forward(Line("\xe4 costs 5 \u20ac", "p.0", "stdout"))
    assert written.getvalue().decode("latin-1").endswith("\xe4 costs 5 \\u20ac\n")


@pytest.mark.guarantee("output-1")
def test_lines_go_to_the_controllers_own_streams_with_a_prefix():
    done = run_script(
        """
        import sys, polycephaly as poly
        def speak():
            print("one\\ntwo")
            print("three", file=sys.stderr)
        with (
            poly.Pool(1, engine=sys.argv[1], name="p") as pool,
            poly.Drone(engine=sys.argv[1], name="d") as drone,
        ):
            pool.doit(speak); drone.doit(speak)
            print("own")
    """,
        poly.engine,
    )
    assert done.stdout.splitlines() == ["[p.0] one", "[p.0] two", "[d] one", "[d] two", "own"]
    assert done.stderr.splitlines() == ["[p.0] three", "[d] three"]


@pytest.mark.guarantee("output-2")
def test_a_callable_gets_each_line_with_its_drone_and_stream(pool, lines):
    pool.doit(speak)
    assert lines.of("stdout") == ["to stdout"] and lines.of("stderr") == ["to stderr"]
    assert {line.drone for line in lines} == {"p.0"} and "[p.0] to stdout" in lines


@pytest.mark.guarantee("output-1")
def test_lines_are_out_before_the_promise_settles(pool, lines):
    for i in range(200):
        pool.doit(print, i)
        assert lines[-1].text == str(i)


@pytest.mark.guarantee("output-2")
def test_discarded_output_goes_nowhere_but_the_promise_keeps_its_tail(capfd):
    with poly.Pool(1, output="discard") as pool:
        p = pool.promise(speak)
        assert p.value is None
        assert p.output == "to stdout\nto stderr\n"
    out, err = capfd.readouterr()
    assert out == "" and err == ""


@pytest.mark.guarantee("output-3")
def test_each_promise_has_its_own_tail(pool):
    work = [pool.promise(print, i) for i in range(300)]
    assert [(p.value, p.output) for p in work] == [(None, f"{i}\n") for i in range(300)]
    p = pool.promise(abs, -1)
    assert p.value == 1 and p.output == ""


def test_a_rejected_promise_has_its_tail_too(pool):
    p = pool.promise("print('before'); 1 / 0")
    assert isinstance(p.exception(), ZeroDivisionError) and p.output == "before\n"


@pytest.mark.guarantee("output-3")
def write_bytes(content):
    count = sys.stdout.buffer.write(content)
    sys.stderr.buffer.writelines([b"", memoryview(content)])
    return count, sys.stdout.buffer.fileno(), sys.stdout.buffer.writable()


@pytest.mark.guarantee("output-1")
@pytest.mark.guarantee("output-3")
def test_bytes_that_a_task_writes_are_out_before_its_promise_settles_and_in_its_tail(pool, lines):
    for text in "first\n", "second", "\xe9\n":
        content = text.encode()
        promise = pool.promise(write_bytes, content)
        assert promise.value == (len(content), 1, True)
        assert promise.output == 2 * text
        assert lines.of("stdout") == lines.of("stderr") == [text.strip()]
        lines.clear()
    content = 100_000 * b"x" + b"\n"
    assert pool.promise(write_bytes, content).value[0] == 100_001
    assert lines.of("stdout") == [content.decode().strip()]


def test_a_text_stream_that_a_task_makes_of_the_bytes_is_its_own(pool, lines):
    def write():
        io.TextIOWrapper(sys.stdout.buffer, "utf-8", write_through=True).write("wrapped\n")

    for _ in range(2):  # the first stream, when it is collected, does not close that of the second
        promise = pool.promise(write)
        promise.result()
        assert promise.output == "wrapped\n" and lines.of("stdout") == ["wrapped"]
        lines.clear()


def test_the_bytes_have_the_name_and_mode_of_a_standard_stream(pool):
    assert pool.doit("import sys; sys.stderr.buffer.name, sys.stderr.buffer.mode") == (2, "wb")


def test_the_tail_is_bounded_and_is_the_end(pool):
    p = pool.promise("for i in range(10000): print('line', i)")
    p.result()
    assert p.output.endswith("line 9999\n") and 0 < len(p.output) <= 4096


def test_huge_output_comes_whole(pool, lines):
    pool.doit("for i in range(30000): print(i, 'x' * 50)")
    wait_for(lambda: len(lines) >= 30000)
    assert [int(text.split()[0]) for text in lines.of("stdout")] == list(range(30000))


def test_one_very_long_line_comes_whole(pool, lines):
    pool.doit("print('y' * 3_000_000)")
    wait_for(lambda: lines)
    assert len(lines[0].text) == 3_000_000


@pytest.mark.guarantee("output-1")
def test_what_subprocesses_and_c_code_print_comes_home_too(pool, lines):
    pool.doit(subprocess.run, ["sh", "-c", "echo from a program; echo its error >&2"])
    pool.doit("import os; os.write(1, b'raw\\n')")
    wait_for(lambda: len(lines) >= 3)
    assert lines.of("stdout") == ["from a program", "raw"] and lines.of("stderr") == ["its error"]


def test_a_line_is_whole_however_it_was_written(pool, lines):
    pool.doit("import sys\nfor c in 'pieces': sys.stdout.write(c); sys.stdout.flush()\nprint()")
    wait_for(lambda: lines)
    assert lines.of("stdout") == ["pieces"]


@pytest.mark.guarantee("output-1")
def test_a_partial_line_ends_with_its_task(pool, lines):
    for text in ("one", "two"):
        pool.doit(print, text, end="")
    pool.doit("import sys; sys.stderr.write('three'); print('four')")
    assert lines.of("stdout") == ["one", "two", "four"] and lines.of("stderr") == ["three"]


@local_only
def test_the_end_of_a_task_beside_others_does_not_end_their_lines(lines):
    async def speaks(gate):
        print("begins", end=" ")
        while not os.path.exists(gate):
            await green.sleep(0.002)
        print("done")

    async def is_silent(gate):
        open(gate, "w").close()

    with (
        tempfile.TemporaryDirectory() as folder,
        poly.Pool(1, width=2, output=lines.append) as pool,
    ):
        first = pool.promise(speaks, gate := f"{folder}/gate")
        pool.promise(is_silent, gate).result(30)
        first.result(30)
    assert lines.of("stdout") == ["begins done"]


def test_a_partial_line_comes_at_the_drones_end(lines):
    with poly.Pool(1, output=lines.append) as pool:
        pool.doit("import os; os.write(1, b'no end')")
    assert lines.of("stdout") == ["no end"]


def test_bytes_that_are_no_text_are_shown_and_harm_nothing(pool, lines):
    pool.doit("import os; os.write(1, b'\\xff\\xfe\\n'); print('\\ud800')")
    wait_for(lambda: len(lines) == 2)
    assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("output-2")
def test_an_output_callable_that_raises_harms_nothing():
    def raises(line):
        raise ValueError(line)

    with poly.Pool(1, output=raises) as pool:
        pool.doit(print, "x")
        assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("output-4")
def test_the_standard_input_is_empty_and_there_is_no_terminal(pool):
    assert pool.doit("import sys; sys.stdin.read()") == ""
    assert isinstance(pool.promise(input).exception(), EOFError)
    assert pool.doit("import os; os.isatty(0), os.isatty(1), os.isatty(2)") == (False, False, False)
    assert pool.doit("os.getpgid(0) == os.getpid()")  # Ctrl-C in a terminal is not for it


@pytest.mark.guarantee("output-4")
@local_only
def test_a_drone_has_a_session_of_its_own(pool):
    assert pool.doit("import os; os.getsid(0) == os.getpid()")


def test_closing_the_streams_harms_only_what_prints(pool):
    pool.doit("import sys; sys.stdout.close()")
    assert isinstance(pool.promise(print, "x").exception(), ValueError)
    assert pool.doit(abs, -1) == 1


@local_only
def test_a_controller_whose_stdout_has_no_reader_goes_on():
    done = run_script("""
        import os, sys, polycephaly as poly
        r, w = os.pipe(); os.close(r); os.dup2(w, 1)
        with poly.Pool(1) as pool:
            for _ in range(3): pool.doit(print, "x")
            print(pool.doit(abs, -1), file=sys.stderr)
        os._exit(0)
    """)
    assert done.stderr == "1\n"


@local_only
def test_warnings_and_logging_of_a_drone_come_home():
    done = run_script("""
        import polycephaly as poly
        with poly.Pool(1, name="p") as pool:
            pool.doit("import warnings, logging; warnings.warn('careful'); logging.warning('mind')")
    """)
    assert "UserWarning: careful" in done.stderr and "[p.0] WARNING:root:mind" in done.stderr


def test_a_line_without_an_end_is_told_in_pieces_and_nothing_of_it_is_lost():
    pieces = []
    with poly.Pool(1, output=lambda line: pieces.append(line.text)) as pool:
        pool.doit("import os\nfor _ in range(1200): os.write(1, b'x' * 10_000)")
    assert sum(map(len, pieces)) == 12_000_000
    assert len(pieces) > 1


@local_only
def test_the_pieces_of_a_long_line_have_whole_characters(monkeypatch):
    monkeypatch.setattr(output, "_MAX_LINE_BYTES", 10)
    text = "xé€😀" * 10
    for size in range(1, 30):
        splitter = output.LineSplitter("p.0", "stdout")
        printed = text.encode()
        pieces = [
            piece.text
            for at in range(0, len(printed), size)
            for piece in splitter._parse(printed[at : at + size])
        ]
        splitter.open = False
        pieces += [piece.text for piece in splitter._parse(b"")]
        assert "".join(pieces) == text and len(pieces) > 1


# -- chunks: records between the printed bytes -----------------------------------------------------


def tagged(name, text, end="\n"):
    set_tag(name)
    try:
        print(text, end=end)
        print(text, file=sys.stderr, end=end)
        sys.stdout.flush()
        subprocess.run(["sh", "-c", "echo of a program"])
    finally:
        set_tag("")


def test_lines_know_on_whose_behalf_they_were_printed(pool, lines):
    pool.doit(print, "before")
    pool.doit(tagged, "job 7", "during")
    pool.doit(print, "after")
    assert [(line.text, line.tag) for line in lines if line.stream == "stdout"] == [
        ("before", ""),
        ("during", "job 7"),
        ("of a program", "job 7"),
        ("after", ""),
    ]
    assert [(line.text, line.tag) for line in lines if line.stream == "stderr"] == [
        ("during", "job 7")
    ]


def test_a_chunk_amid_a_line_does_not_break_it(pool, lines):
    pool.doit(
        "import sys; from polycephaly.drone.console import STDOUT, write_record\n"
        "print('one', end=' '); sys.stdout.flush(); write_record(STDOUT, 'O', '0'); print('line')"
    )
    assert lines.of("stdout") == ["one line"]


def test_another_tag_ends_a_line_that_was_begun(pool, lines):
    """Or what one prints would be told to another."""
    pool.doit(
        "from polycephaly.drone.console import set_tag; "
        "print('one', end=' '); set_tag('x'); print('two', end='')"
    )
    pool.doit("print('three')")
    assert [(line.text, line.tag) for line in lines] == [("one ", ""), ("two", "x"), ("three", "")]


def test_what_is_no_chunk_is_printed_as_it_is(pool, lines):
    junk = [
        "\x1e",
        "\x1epoly:",
        "\x1epoly:T;open",
        "\x1epoly:T;a\tb\x1e",
        "a\x1e\x1eb",
        "\x1epoly:t;x\x1e",
    ]
    junk += [
        "\x1epoly:L;7 {}\x1e",
        '\x1epoly:L;7 [["a"],{}]\x1e',
        "\x1epoly:O;z\x1e",
        "\x1epoly:X;y\x1e",
    ]
    pool.doit("import sys\nfor each in junk_: print(each)".replace("junk_", repr(junk)))
    assert lines.of("stdout") == junk


def test_a_lone_mark_is_not_held_back_for_ever(lines):
    with poly.Pool(1, output=lines.append) as pool:
        pool.doit("import os; os.write(1, b'end \\x1epoly:T;half')")
    assert lines.of("stdout") == ["end \x1epoly:T;half"]


def test_a_made_up_mark_of_order_loses_nothing(lines):
    with poly.Pool(1, output=lines.append) as pool:
        pool.doit(print, "before \x1epoly:O;999\x1eafter")
        pool.promise("import os; os.write(1, b'\\x1epoly:O;999\\x1elast'); os._exit(1)").exception()
    assert lines.of("stdout") == ["before after", "last"]


@pytest.mark.parametrize("name", ["x" * 129, "line\nend", "é", "\x1e"])
def test_a_tag_is_a_short_ascii_name(pool, name):
    error = pool.promise(
        "from polycephaly.drone.console import set_tag; set_tag(" + ascii(name) + ")"
    ).exception()
    assert isinstance(
        error, ValueError
    ) and "a tag is at most 128 printable ASCII characters" in str(error)


def sorted_out(data, cuts):
    sorter, out = ChunkParser(), []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        for each in sorter.parse(data[start:end], last=end == len(data)):
            if isinstance(each, bytes) and out and isinstance(out[-1], bytes):
                out[-1] += each
            else:
                out.append(each)
    return out


@local_only
def test_chunks_come_out_whole_wherever_the_reads_fall():
    dice = random.Random(7)
    body = "".join(chr(dice.randrange(32, 127)) for _ in range(10_000))
    first, other = chunk("L", body), chunk("L", "b" * 5000)
    assert len(first) == 3 and max(map(len, first)) <= select.PIPE_BUF
    mixed = [
        first[0],
        b"te",
        other[0],
        first[1],
        b"xt",
        other[1],
        b"\x1e",
        first[2],
        *chunk("T", ""),
        b"\xff\n",
    ]
    data = b"".join(mixed)
    wanted = [b"text", ("L", "b" * 5000), b"\x1e", ("L", body), ("T", ""), b"\xff\n"]
    for _ in range(200):
        assert sorted_out(data, sorted(dice.sample(range(1, len(data)), 6))) == wanted


@local_only
def test_parts_whose_rest_never_comes_are_forgotten():
    sorter = ChunkParser()
    for i in range(10_000):
        assert list(sorter.parse(b"\x1epoly:L%x.1+aaa\x1e" % i, last=False)) == []
    assert 16 < len(sorter._parts) < 5000
    for _ in range(10_000):
        assert list(sorter.parse(b"\x1epoly:Lf.2+%s\x1e" % (b"a" * 4000), last=False)) == []
    assert sum(len(part) for parts in sorter._parts.values() for part in parts) < 2 << 20


@local_only
@pytest.mark.parametrize("written", [b"abc", ["a"], None])
def test_what_is_no_text_is_an_error_of_the_task(written):
    with poly.Pool(1) as pool:
        with pytest.raises(TypeError):
            pool.doit(lambda: sys.stdout.write(written))
        assert pool.doit(abs, -3) == 3


@local_only
def test_a_task_may_put_any_object_in_place_of_stdout():
    def replace():
        print("x", end="")
        sys.stdout = Odd()

    class Odd:
        def flush(self):
            raise RuntimeError

    with poly.Pool(1, output="discard") as pool:
        pool.doit(replace)
        assert pool.doit(abs, -3) == 3
