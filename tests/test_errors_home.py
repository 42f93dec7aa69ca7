"""Errors come home as what they were, with the remote traceback; what cannot be sent harms nobody
else."""

import builtins
import copyreg
import dataclasses
import errno
import gc
import io
import linecache
import pickle
import socket
import threading
import traceback
import types
import weakref
from concurrent.futures.process import _RemoteTraceback

import pytest
from engines import on_each_engine, poly, pool_of_file
from faults import wait_for

from polycephaly.errors import copy_error
from polycephaly.runtime.sources import add_lines, lines_of
from polycephaly.wire.exceptions import pack_exception, unpack_exception

pytestmark = on_each_engine


class Several(Exception):
    def __init__(self, code, detail, *, hint="none"):
        super().__init__(f"{code}: {detail}")
        self.code, self.detail, self.hint = code, detail, hint


class Locked(Exception):
    """Cannot be pickled: it holds a socket."""

    def __init__(self, text):
        super().__init__(text)
        self.socket = socket.socket()
        self.socket.close()
        self.stream = io.TextIOWrapper(io.BytesIO())


class Treacherous(Exception):
    """Pickles, and breaks when unpickled."""

    def __reduce__(self):
        return _explode, ()


class Unwilling(Exception):
    def __reduce__(self):
        raise TypeError("not to be pickled")


class OfALibrary(Exception):
    def __init__(self, message, response=None):
        super().__init__(message)
        self.response = response

    def __reduce__(self):
        return type(self), (self.args[0], self.response)


class LeavesOutItsConnection(Exception):
    """As urllib3's errors, which requests' errors have among their `args`."""

    def __init__(self, connection, why):
        self.connection, self.why = connection, why
        super().__init__(f"{connection}: {why}")

    def __reduce__(self):
        return type(self), (None, self.why)


def raise_leaving_out():
    inner = LeavesOutItsConnection("host:80", "refused")
    try:
        raise inner
    except LeavesOutItsConnection:
        raise OSError(inner)  # noqa: B904 (the context is wanted)


class MadeOtherwise(OfALibrary):
    """As which it cannot be made, by the way that it inherits."""

    def __init__(self, text):
        super().__init__(f"it is {text}", 404)
        self.text = text


class WithState(Exception):
    def __init__(self, one, other="more"):
        super().__init__(f"{one} and {other}", len(one))

    def __setstate__(self, state):
        self.__dict__.update(state)


def _explode():
    raise RuntimeError("not to be rebuilt")


class BrokenStr(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class ExitingStr(Exception):
    def __str__(self):
        raise SystemExit(3)


class UnpicklableResult:
    def __reduce__(self):
        raise TypeError("this result stays where it is")


class ExplodesAtHome:
    """Pickles on the drone, fails to unpickle at the controller."""

    def __reduce__(self):
        return _explode, ()


class ExplodesThere:
    def __reduce__(self):
        return _explode, ()


def raise_(error, *notes):
    for each in notes:
        error.add_note(each)
    raise error


def raise_several(*args, **kwargs):
    raise Several(*args, **kwargs)


def raise_locked():
    raise Locked("holding a socket")


def raise_chain():
    try:
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("middle") from error
    except ValueError as error:
        raise Several(7, "outer") from error


def raise_in_context():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        raise LookupError("while handling")  # noqa: B904


def raise_from_none():
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        raise LookupError("alone") from None


def raise_group():
    raise ExceptionGroup(
        "several",
        [Several(1, "one"), ExceptionGroup("inner", [ValueError("two"), OSError(2, "no", "f")])],
    )


def open_missing():
    open("/no/such/file")  # noqa: SIM115


pool = pool_of_file(2, output="discard")


def remote_traceback(error):
    seen = set()
    while error.__cause__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__
    assert isinstance(error, _RemoteTraceback)
    return str(error)


@pytest.mark.guarantee("error-1")
def test_the_original_type_args_and_attributes_come_back(pool):
    error = pool.promise(raise_several, 5, "broken", hint="fix it").exception()
    assert type(error) is Several
    assert error.args == ("5: broken",) and (error.code, error.detail, error.hint) == (
        5,
        "broken",
        "fix it",
    )


def test_it_is_raised_at_the_wait(pool):
    with pytest.raises(Several, match="5: broken"):
        pool.doit(raise_several, 5, "broken")
    with pytest.raises(Several):
        _ = pool.promise(raise_several, 5, "broken").value


@pytest.mark.guarantee("error-1")
def test_notes_come_back(pool):
    error = pool.promise(raise_, ValueError("x"), "first note", "second note").exception()
    assert error.__notes__ == ["first note", "second note"]


def test_a_copy_of_an_error_has_the_notes_in_a_list_of_its_own():
    for kind in (ValueError, OfALibrary):
        error = kind("x")
        error.add_note("first")
        twin = copy_error(error)
        twin.add_note("second")
        assert type(twin) is kind and twin.__notes__ == ["first", "second"]
        assert error.__notes__ == ["first"]


@pytest.mark.guarantee("error-1")
def test_the_cause_chain_comes_back(pool):
    error = pool.promise(raise_chain).exception()
    assert type(error) is Several and type(error.__cause__) is ValueError
    assert type(error.__cause__.__cause__) is KeyError and error.__cause__.__cause__.args == (
        "key",
    )
    assert "raise_chain" in remote_traceback(error)


@pytest.mark.guarantee("error-1")
def test_the_context_comes_back(pool):
    error = pool.promise(raise_in_context).exception()
    assert type(error) is LookupError and type(error.__context__) is ZeroDivisionError


def test_a_suppressed_context_stays_suppressed(pool):
    error = pool.promise(raise_from_none).exception()
    text = "".join(traceback.format_exception(error))
    assert "LookupError: alone" in text and "ZeroDivisionError" not in text


def test_a_circular_chain_comes_back(pool):
    def circle():
        a, b = ValueError("a"), KeyError("b")
        a.__cause__, b.__cause__ = b, a
        raise a

    error = pool.promise(circle).exception()
    assert type(error) is ValueError and type(error.__cause__) is KeyError


@pytest.mark.guarantee("error-1")
def test_exception_groups_come_back_with_their_members(pool):
    error = pool.promise(raise_group).exception()
    assert type(error) is ExceptionGroup and error.message == "several"
    one, inner = error.exceptions
    assert type(one) is Several and one.code == 1
    assert [type(e) for e in inner.exceptions] == [ValueError, FileNotFoundError]
    assert error.split(OSError)[0] is not None
    assert "raise_group" in remote_traceback(error)


def test_os_errors_keep_number_text_and_file(pool):
    error = pool.promise(open_missing).exception()
    assert type(error) is FileNotFoundError
    assert (error.errno, error.filename) == (errno.ENOENT, "/no/such/file")
    error = pool.promise(raise_, ConnectionResetError(errno.ECONNRESET, "gone")).exception()
    assert type(error) is ConnectionResetError and error.errno == errno.ECONNRESET
    error = pool.promise(raise_, UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")).exception()
    assert type(error) is UnicodeDecodeError and error.object == b"\xff"
    error = pool.promise("import json; json.loads('{')").exception()
    assert type(error).__name__ == "JSONDecodeError" and error.pos == 1 and error.doc == "{"


# -- every builtin exception, and subclasses of it that were made in each of these ways -----------


def builtin_args(kind):
    """Arguments for the constructor of a builtin exception: all that it has fields for."""
    for base, args in {
        BaseExceptionGroup: ("several", [ValueError("one"), KeyError("two")]),
        UnicodeDecodeError: ("utf-8", b"\xff", 0, 1, "bad"),
        UnicodeEncodeError: ("ascii", "\xff", 0, 1, "bad"),
        UnicodeTranslateError: ("\xff", 0, 1, "bad"),
        BlockingIOError: (errno.EAGAIN, "again", 7),
        OSError: (errno.EACCES, "no", "from", None, "to"),
        SyntaxError: ("wrong", ("f.py", 1, 2, "x = = 1", 1, 3)),
    }.items():
        if issubclass(kind, base):
            return args
    return "text", 5


def fill(error):
    """Set what no constructor takes by position."""
    for name in ("name", "path", "name_from"):
        if hasattr(error, name):
            setattr(error, name, name)
    error.add_note("a note")
    return error


def inherited(base):
    return type(f"{base.__name__}Inherited", (base,), {})


def with_other_arguments(base):
    def __init__(self, code, *, hint="none"):
        base.__init__(self, *builtin_args(base))
        self.hint = [code, hint]

    return type(f"{base.__name__}WithOtherArguments", (base,), {"__init__": __init__})


def without_calling_the_base(base):
    def __init__(self, *, code):
        self.hint = [code]

    return type(f"{base.__name__}WithoutCallingTheBase", (base,), {"__init__": __init__})


def with_slots(base):
    def __init__(self, used, other):
        base.__init__(self, *builtin_args(base))
        self.used, self._other = used, other

    names = {"__init__": __init__, "__slots__": ("_other", "unused", "used")}
    return type(f"{base.__name__}WithSlots", (base,), names)


def made_by_new(base):
    def __new__(cls, code):
        error = base.__new__(cls, *builtin_args(base))
        error.hint = [code]
        return error

    def __init__(self, code):
        base.__init__(self, *builtin_args(base))

    return type(f"{base.__name__}MadeByNew", (base,), {"__new__": __new__, "__init__": __init__})


WAYS = {
    inherited: None,
    with_other_arguments: ((7,), {"hint": "more"}),
    without_calling_the_base: ((), {"code": 7}),
    with_slots: ((7, ["other"]), {}),
    made_by_new: ((7,), {}),
}
BUILTIN = [
    kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__name__ == name
]
for base in BUILTIN:
    for way in WAYS:
        kind = way(base)
        if issubclass(base, BaseExceptionGroup) and way not in (inherited, made_by_new):
            kind.__new__ = lambda cls, *_, **__: cls.__base__.__new__(cls, *builtin_args(cls))
        kind.__module__ = __name__
        globals()[kind.__name__] = kind


def make(base, way):
    """Return an exception of the builtin class, or of its subclass."""
    if way is None:
        return fill(base(*builtin_args(base)))
    args, kwargs = WAYS[way] or (builtin_args(base), {})
    return fill(globals()[way(base).__name__](*args, **kwargs))


def make_all(way):
    return [make(base, way) for base in BUILTIN]


def raise_made(base, way):
    raise make(base, way)


LINKS = ("__cause__", "__context__", "__dict__", "__suppress_context__", "__traceback__")


def state(error):
    """Everything that can be seen of it but the links to other errors, as text."""
    fields = {
        name: repr(getattr(error, name, "empty"))
        for base in type(error).__mro__
        for name, field in vars(base).items()
        if isinstance(field, types.MemberDescriptorType | types.GetSetDescriptorType)
        and name not in LINKS
    }
    shown = [type(error).__name__, str(error), repr(error), repr(vars(error))]
    return shown, fields


def states(errors):
    return [state(error) for error in errors]


each_way = pytest.mark.parametrize("way", [None, *WAYS])


@pytest.mark.guarantee("error-1")
@each_way
def test_every_builtin_exception_comes_home_with_all_its_fields(pool, way):
    promises = [pool.promise(raise_made, base, way) for base in BUILTIN]
    assert states([p.exception() for p in promises]) == states(make_all(way))


@pytest.mark.guarantee("error-1")
@each_way
def test_every_builtin_exception_is_the_same_as_an_argument_and_as_a_value(pool, way):
    expected = states(make_all(way))
    assert pool.doit(states, make_all(way)) == expected
    assert [pool.doit(state, error) for error in make_all(way)] == expected
    assert states(pool.doit(make_all, way)) == expected
    assert states(pool.map(make, BUILTIN, [way] * len(BUILTIN))) == expected


@pytest.mark.guarantee("error-1")
@each_way
def test_a_copy_of_every_builtin_exception_has_all_its_fields(way):
    errors = make_all(way)
    copies = [copy_error(error) for error in errors]
    assert states(copies) == states(errors)
    assert all(copied is not error for copied, error in zip(copies, errors, strict=True))


@dataclasses.dataclass
class Outcome:
    error: object
    large: bytearray


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_an_exception_that_lies_deep_in_a_value_keeps_its_fields(pool, size):
    error = make(OSError, with_other_arguments)
    error.outcome = Outcome(error, bytearray(size))  # leads back to it
    arrived = pool.doit(lambda outcome: outcome, error.outcome)
    assert arrived.error.outcome is arrived and len(arrived.large) == size
    del error.outcome, arrived.error.outcome
    assert state(arrived.error) == state(error)


def test_an_exception_of_a_class_that_travels_by_value_keeps_its_fields(pool):
    class Local(OSError):
        def __init__(self, path):
            super().__init__(errno.ENOENT, "not here", path)
            self.path = path

    error = pool.doit(lambda error: error, Local("/x"))
    assert state(error) == state(Local("/x"))


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def raise_frozen():
    try:
        raise Frozen(1)
    except Frozen as error:
        raise Frozen(2) from error


def test_an_exception_that_allows_no_change_comes_home(pool):
    error = pool.promise(raise_frozen).exception()
    assert error == Frozen(2) and error.__cause__ == Frozen(1)
    assert "raise_frozen" in remote_traceback(error)


class Counted(Exception):
    made = 0

    def __init__(self, *args):
        super().__init__(*args)
        type(self).made += 1


def test_no_constructor_of_users_runs_where_an_exception_arrives():
    error = Counted("x")
    before = Counted.made
    assert unpack_exception(pack_exception(error, pickle.dumps)).args == ("x",)
    assert copy_error(error).args == ("x",)
    assert Counted.made == before


@pytest.mark.guarantee("error-3")
def test_an_exception_whose_copy_would_read_otherwise_is_a_remote_error_in_a_value_too(pool):
    error = OSError(errno.ENOENT, "not here")
    error.filename = None  # which `str` shows, though a file's name that was never set is None, too
    assert str(error) == "[Errno 2] not here: None"
    arrived = pool.doit(lambda errors: errors, [error])[0]
    for each in (arrived, pool.promise(raise_, error).exception()):
        assert type(each) is poly.RemoteError and each.message == str(error)
        assert each.type_name == "FileNotFoundError"
        assert "reads otherwise" in each.__notes__[0]


def test_the_object_that_lacks_an_attribute_does_not_go_with_the_error(pool):
    def missing(value):
        return value.missing

    assert pool.promise(missing, "text").exception().obj == "text"
    error = pool.promise(missing, [threading.current_thread]).exception()
    assert type(error) is AttributeError and (error.name, error.obj) == ("missing", None)


class Registered:
    def __init__(self, value):
        self.value = value


def test_a_reducer_that_was_registered_after_a_type_was_sent_is_used(pool, monkeypatch):
    assert pool.doit(lambda each: each.value, Registered("x")) == "x"
    reduce = lambda each: (Registered, (f"{each.value}, reduced",))  # noqa: E731
    monkeypatch.setitem(copyreg.dispatch_table, Registered, reduce)
    assert pool.doit(lambda each: each.value, Registered("x")) == "x, reduced"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_nothing_of_an_argument_stays_alive_after_its_call(pool, size):
    argument = Outcome(Large(), bytearray(size))
    large = weakref.ref(argument.error)
    pool.doit(lambda outcome: None, argument)
    del argument
    assert large() is None


@pytest.mark.guarantee("error-3")
def test_what_cannot_be_pickled_comes_as_a_remote_error(pool):
    error = pool.promise(raise_locked).exception()
    assert type(error) is poly.RemoteError
    assert error.type_name.endswith("Locked") and error.message == "holding a socket"
    assert "raise_locked" in error.traceback and "holding a socket" in str(error)


@pytest.mark.parametrize(
    "error, reason",
    [
        (Locked("odd"), "TypeError: cannot pickle 'socket' object"),
        (Treacherous("odd"), "RuntimeError: not to be rebuilt"),
    ],
)
def test_a_remote_error_says_why_the_exception_came_as_text(error, reason):
    sent = unpack_exception(pack_exception(error, pickle.dumps))
    assert sent.__notes__ == [
        f"the exception arrives as text, because it cannot be pickled: {reason}"
    ]


@pytest.mark.guarantee("error-3")
def test_what_cannot_be_rebuilt_comes_as_a_remote_error(pool):
    error = pool.promise("class Odd(Exception): pass\nraise Odd('local')").exception()
    assert type(error).__name__ == "Odd" or type(error) is poly.RemoteError
    assert "local" in str(error)


@pytest.mark.guarantee("error-3")
@pytest.mark.parametrize("kind", ["Treacherous", "Unwilling"])
def test_a_class_that_says_how_it_is_pickled_is_believed_when_that_fails(pool, kind):
    error = pool.promise(raise_in_code_of, kind).exception()
    assert (
        type(error) is poly.RemoteError
        and error.type_name.endswith(kind)
        and error.message == "odd"
    )
    assert (
        "raise_in_code_of" in error.traceback
        and "Traceback (most recent call last)" in error.traceback
    )


@pytest.mark.parametrize("kind", [MadeOtherwise, WithState])
def test_a_way_that_is_inherited_or_of_its_state_only_does_not_hide_its_type(pool, kind):
    error = pool.promise(raise_in_code_of, kind.__name__).exception()
    assert (
        type(error) is kind and error.args == kind("odd").args and vars(error) == vars(kind("odd"))
    )


@pytest.mark.guarantee("error-1")
def test_an_error_whose_pickle_leaves_out_what_its_message_names_keeps_the_message(pool):
    error = pool.promise(raise_leaving_out).exception()
    assert type(error) is OSError and str(error) == "host:80: refused"
    for each in (error.args[0], error.__context__):
        assert type(each) is LeavesOutItsConnection and each.connection is None
        assert str(each) == "host:80: refused" and each.why == "refused"


def raise_in_code_of(name):
    raise globals()[name]("odd")


def test_an_exception_whose_str_fails_comes_home(pool):
    error = pool.promise(raise_in_code_of, "BrokenStr").exception()
    assert type(error) in (BrokenStr, poly.RemoteError)


def test_an_exception_whose_str_exits_comes_home(pool):
    assert type(pool.promise(raise_, ExitingStr()).exception()) is ExitingStr


@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, GeneratorExit, BaseException, StopIteration]
)
def test_base_exceptions_come_home_and_the_drone_lives(pool, kind):
    before = sorted(d.pid for d in pool.drones)
    assert type(pool.promise(raise_, kind("odd")).exception()) is kind
    assert sorted(d.pid for d in pool.drones) == before


def test_a_recursion_error_comes_home(pool):
    def deep(n):
        return deep(n + 1)

    assert type(pool.promise(deep, 0).exception()) is RecursionError
    assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("error-2")
def test_the_remote_traceback_shows_file_line_and_source(pool):
    text = remote_traceback(pool.promise(raise_chain).exception())
    assert __file__ in text and 'raise ValueError("middle") from error' in text
    printed = "".join(traceback.format_exception(pool.promise(raise_in_context).exception()))
    assert 'raise LookupError("while handling")' in printed


def test_the_remote_traceback_of_a_code_string_shows_its_lines(pool):
    error = pool.promise("def divide(a):\n    return a / 0  # the line\n\ndivide(1)").exception()
    text = remote_traceback(error)
    assert type(error) is ZeroDivisionError
    assert "<doit " in text and "return a / 0  # the line" in text and "divide(1)" in text
    assert "polycephaly/drone" not in text


@pytest.mark.guarantee("error-2")
def test_the_remote_traceback_of_a_function_of_a_later_cell_shows_its_lines(pool, monkeypatch):
    name, source = "/tmp/ipykernel_1/1.py", "def divide(a):\n    return a / 0  # the line\n"
    cells = {name: (len(source), None, source.splitlines(keepends=True), name)}
    monkeypatch.setattr(linecache, "cache", linecache.cache | cells)
    namespace = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    text = remote_traceback(pool.promise(namespace["divide"], 1).exception())
    assert name in text and "return a / 0  # the line" in text


def test_lines_that_come_with_a_function_replace_none_that_are_known(monkeypatch):
    monkeypatch.setattr(linecache, "cache", {})
    add_lines("<cell>", 2, "two\nthree\n")
    add_lines("<cell>", 1, "one\nother\n")
    assert linecache.getlines("<cell>") == ["one\n", "two\n", "three\n"]
    code = compile("\n\ndef f():\n    return 1\n", "<of this process>", "exec")
    assert lines_of(code) == ""
    linecache.cache["<of this process>"] = 30, None, ["\n", "\n", "def f():\n", "    1\n"], ""
    assert lines_of(code.co_consts[0]) == "def f():\n    1\n"
    assert lines_of(code.co_consts[0].replace(co_filename="<cell>")) == ""  # it came itself


@pytest.mark.parametrize("source, name", [("missing", "missing"), ("int.missing", "missing")])
def test_the_name_that_was_not_found_comes_with_the_error(source, name):
    with pytest.raises((NameError, AttributeError)) as raised:
        eval(source)
    error = unpack_exception(pack_exception(raised.value, pickle.dumps))
    assert type(error) is raised.type and error.name == name


def test_a_name_that_is_no_text_keeps_no_error_from_coming():
    error = unpack_exception(pack_exception(NameError("no", name=threading.Lock()), pickle.dumps))
    assert type(error) is NameError and str(error) == "no"


def test_a_syntax_error_in_a_code_string_shows_the_place(pool):
    error = pool.promise("x = 1\ny = = 2").exception()
    assert type(error) is SyntaxError and error.lineno == 2
    assert "y = = 2" in "".join(traceback.format_exception(error))


@pytest.mark.guarantee("error-4")
def test_arguments_that_do_not_pickle_reject_that_promise_and_say_which(pool):
    good = pool.promise(abs, -1)
    bad = pool.promise(print, 1, threading.Lock())
    keyword = pool.promise(print, end=UnpicklableResult())
    also = pool.promise(abs, -2)
    assert (good.value, also.value) == (1, 2)
    error = bad.exception()
    assert isinstance(error, TypeError) and any(
        "argument 1" in n and "lock" in n for n in error.__notes__
    )
    error = keyword.exception()
    assert "stays where it is" in str(error) and any("end" in n for n in error.__notes__)


@pytest.mark.guarantee("error-4")
def test_arguments_that_do_not_unpickle_reject_that_promise_alone(pool):
    work = [pool.promise(str, ExplodesThere() if i == 50 else i) for i in range(100)]
    for i, p in enumerate(work):
        if i == 50:
            assert "not to be rebuilt" in str(p.exception())
            assert any("unpickling" in n for n in p.exception().__notes__)
        else:
            assert p.value == str(i)


def result_of(i):
    return {10: UnpicklableResult, 20: ExplodesAtHome}.get(i, lambda: i)()


@pytest.mark.guarantee("error-4")
def test_results_that_do_not_pickle_or_unpickle_reject_that_promise_alone(pool):
    work = [pool.promise(result_of, i) for i in range(30)]
    assert [p.value for i, p in enumerate(work) if i not in (10, 20)] == [
        i for i in range(30) if i not in (10, 20)
    ]
    error = work[10].exception()
    assert type(error) is TypeError and "stays where it is" in str(error)
    assert any("UnpicklableResult" in n for n in error.__notes__)
    error = work[20].exception()
    assert type(error) is RuntimeError and "not to be rebuilt" in str(error)
    assert any("result" in n for n in error.__notes__)


@pytest.mark.guarantee("error-4")
def test_work_that_does_not_pickle_rejects_with_what_it_was(pool):
    lock = threading.Lock()

    def uses_a_lock():
        return lock.locked()

    error = pool.promise(uses_a_lock).exception()
    assert isinstance(error, TypeError) and any("uses_a_lock" in n for n in error.__notes__)


def test_an_error_raised_twice_does_not_grow(pool):
    p = pool.promise(raise_chain)
    texts = []
    for _ in range(3):
        with pytest.raises(Several) as caught:
            p.result()
        texts.append("".join(traceback.format_exception(caught.value.__cause__)))
    assert texts[0] == texts[1] == texts[2]


def test_an_error_passes_through_nested_drones():
    def outer():
        with poly.Drone() as drone:
            return drone.doit(raise_chain)

    with poly.Drone() as drone:
        error = drone.promise(outer).exception()
    assert type(error) is Several and type(error.__cause__) is ValueError
    assert "raise_chain" in remote_traceback(error)


def test_the_cause_of_a_remote_error_can_itself_be_unpicklable(pool):
    def both():
        try:
            raise_locked()
        except Locked as error:
            raise ValueError("outer") from error

    error = pool.promise(both).exception()
    assert type(error) is ValueError and type(error.__cause__) is poly.RemoteError
    assert error.__cause__.message == "holding a socket"


class Unnotable(Exception):
    def add_note(self, note):
        raise TypeError("no notes")


def refuse():
    raise Unnotable("at home")


class Refused:
    def __reduce__(self):
        return refuse, ()


def test_a_result_whose_error_takes_no_note_rejects_that_one_alone():
    with poly.Pool(1) as pool:
        promises = [pool.promise(lambda i: Refused() if i == 3 else [i], i) for i in range(60)]
        errors = [p.exception(30) for p in promises]
    assert isinstance(errors[3], Unnotable)
    assert [p.value for i, p in enumerate(promises) if i != 3] == [[i] for i in range(60) if i != 3]


def raise_key_error():
    raise KeyError("at home")


async def await_one(make):
    return await make()


class Large:
    pass


@pytest.mark.parametrize(
    "fail",
    [
        lambda pool: pool.doit(raise_key_error),
        lambda pool: pool.drones[0].doit("1 / 0"),
        lambda pool: pool.promise(raise_key_error).value,
        lambda pool: list(pool.map(lambda n: 1 / n, [1, 0])),
        lambda pool: poly.gather(pool.promise(raise_key_error)).value,
        lambda pool: poly.race(pool.promise(raise_key_error)).value,
        lambda pool: pool.promise(threading.Lock, keep=True).value.value,
        lambda pool: poly.green.run(await_one, lambda: pool.promise(raise_key_error)),
    ],
)
def test_an_error_that_was_caught_keeps_nothing_of_its_callers_alive(pool, fail):
    """As in the standard library, no cycle leads from the error through the frames of its
    traceback, which hold what the callers work on, back to the error."""

    def catch():
        large = Large()
        with pytest.raises(Exception):  # noqa: B017 - whatever it is
            fail(pool)
        return weakref.ref(large)

    gc.disable()
    try:
        large = catch()
        wait_for(lambda: large() is None)
    finally:
        gc.enable()


def test_a_long_chain_arrives_without_its_end():
    with poly.Pool(1) as pool:
        error = pool.promise(raise_long_chain, 1000).exception()
    assert isinstance(error, OSError)
    length = 0
    while isinstance(error, OSError):
        error, length = error.__cause__, length + 1
    assert length > 50


def raise_long_chain(length):
    error = OSError(0, "the first")
    for number in range(length):
        later = OSError(number, "later")
        later.__cause__, error = error, later
    raise error


def test_a_cause_that_several_errors_have_is_sent_once():
    def fail(depth):
        try:
            fail(depth - 1) if depth else 1 // 0
        except Exception as first:
            try:
                raise ValueError(depth)
            except Exception as second:
                raise KeyError(depth) from first if depth % 2 else second

    with poly.Pool(1) as pool:
        error = pool.promise(fail, 40).exception()
    assert error.args == (40,)


def test_the_error_of_a_c_function_shows_nothing_of_the_package(pool):
    error = pool.promise(int, "x").exception(60)
    assert "ValueError" in remote_traceback(error) and "polycephaly" not in remote_traceback(error)
