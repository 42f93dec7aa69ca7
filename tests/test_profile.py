"""Profiles: which functions the tasks of a pool spend their time in."""

import html.parser
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from engines import on_each_engine, poly
from faults import append, block_for_ever, lines, sleep_holding_the_gil, wait_for
from in_time import FakeReactor, dispatcher_of

import polycephaly
from polycephaly.errors import Malformed
from polycephaly.pool import profile as profiles
from polycephaly.pool.profile import read_samples
from polycephaly.runtime import sampler as samplers
from polycephaly.runtime.sampler import OTHERS, StackSampler
from polycephaly.runtime.tuning import tuning
from polycephaly.timeline.flame import own_samples, page_of, speedscope_of
from polycephaly.wire.messages import PROFILE


def burns(gate):
    # Long enough to be sampled, also if the machine stands still meanwhile.
    until = time.thread_time() + 0.3
    while time.thread_time() < until or not os.path.exists(gate):
        burns_inside()


def burns_inside():
    for _ in range(1_000_000):
        pass


def beside(gate):
    burns(gate)


async def awaits(gate):
    burns(gate)


def two_levels(gate, started):
    append(started, "two_levels")
    beside(gate)


def samplers_alive():
    return [each for each in threading.enumerate() if each.name == "polycephaly-sampler"]


def has_no_sampler():
    wait_for(lambda: not samplers_alive())
    return sys.getswitchinterval()


@pytest.fixture
def gate(tmp_path):
    return str(tmp_path / "gate")


def profiled(pool, gate, tasks, enough=60):
    """A profile of tasks that run until there are so many samples of this process, and so, as many
    of theirs."""
    with pool.profile(hertz=200) as profile:
        running = [pool.promise(*each) for each in tasks]
        wait_for(lambda: all(each.running() for each in running))
        wait_for(lambda: sum(profile._sampler._counts.values()) > enough)
        open(gate, "w").close()
        for each in running:
            each.result()
    return profile


# -- tasks -----------------------------------------------------------------------------------------


@on_each_engine
def test_the_busy_function_is_on_top(gate, started):
    with poly.Pool(1) as pool:
        pool.doit("1")
        profile = profiled(pool, gate, [(two_levels, gate, started)])
        (name,) = [each.name for each in pool.drones]
        assert {*profile.samples} == {name, "controller"} and not profile.missing
        samples = profile.samples[name]
        (top, count), *_ = own_samples(samples).most_common()
        assert top == ("burns_inside", __file__) and count > samples.total() / 2
        stacks = {tuple(frame[0] for frame in stack) for stack in samples}
        assert ("two_levels", "beside", "burns", "burns_inside") in stacks
        assert not any("/polycephaly/drone/" in stack[0][1] for stack in samples)
        assert str(profile).splitlines()[3].split()[2:] == ["burns_inside", __file__]
        assert any(
            "profiled" in [frame[0] for frame in stack] for stack in profile.samples["controller"]
        )


def test_a_profile_that_is_used_again_begins_anew():
    with poly.Pool(1) as pool:
        profile = pool.profile()
        with profile:
            pool.doit("1")
        first = profile.samples
        first["a drone of the first block"] = profile.missing["another"] = {}
        with profile:
            assert not profile.samples and not profile.missing
            pool.doit("1")
        assert {*first} - {*profile.samples} == {"a drone of the first block"}
        assert not profile.missing


def test_tasks_that_run_beside_others_are_sampled(gate):
    with poly.Pool(1, width=2) as pool:
        profile = profiled(pool, gate, [(awaits, gate)])
        (name,) = [each.name for each in pool.drones]
        stacks = {tuple(frame[0] for frame in stack) for stack in profile.samples[name]}
        assert ("awaits", "burns", "burns_inside") in stacks


def test_an_idle_drone_has_no_samples_and_nothing_is_left():
    with poly.Pool(1) as pool:
        before = pool.doit(has_no_sampler)
        with pool.profile() as profile:
            wait_for(lambda: sum(profile._sampler._counts.values()) > 5)
        (name,) = [each.name for each in pool.drones]
        assert not profile.samples[name] and profile.samples["controller"]
        assert "No task was running." in str(profile)
        assert pool.doit(has_no_sampler) == before
    assert not samplers_alive()


def test_a_drone_that_starts_meanwhile_is_sampled(gate):
    with poly.Pool(1) as pool:
        pool.doit("1")
        with pool.profile() as profile:
            pool.resize(2)
            running = pool.everywhere(burns, gate)
            wait_for(lambda: all(each.running() for each in running))
            count = sum(profile._sampler._counts.values())
            wait_for(lambda: sum(profile._sampler._counts.values()) > count + 40)
            open(gate, "w").close()
            for each in running:
                each.result()
        names = [each.name for each in pool.drones]
        assert len(names) == 2 and all(profile.samples[name] for name in names)


def test_no_task_is_lost_or_reordered(gate):
    with poly.Pool(2) as pool:
        for _ in range(5):
            with pool.profile(hertz=1000):
                assert list(pool.map(abs, range(-2000, 0))) == [*range(2000, 0, -1)]
                values = [pool.promise(pow, n, 2) for n in range(500)]
                assert [each.value for each in values] == [n * n for n in range(500)]


def test_a_drone_that_dies_meanwhile_is_named(gate, started):
    with poly.Pool(2) as pool:
        pool.everywhere("1")[0].result()
        wait_for(lambda: all(each.pid for each in pool.drones))
        with pool.profile() as profile:
            lost = pool.promise(block_for_ever, started)
            wait_for(lambda: lines(started))
            victim = next(each for each in pool.drones if each.running)
            wait_for(lambda: len(pool._dispatcher.profiled) == 2)
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(polycephaly.DroneDied):
                lost.result()
            wait_for(lambda: victim not in pool.drones)
        assert profile.missing[victim.name] == "the drone ended before the block"
        assert f"missing: {victim.name}: the drone ended" in str(profile)
        assert pool.doit("1") == 1


def test_a_drone_that_does_not_answer_is_named(started, monkeypatch):
    monkeypatch.setattr(tuning, "profile_answer_seconds", 0.3)
    with poly.Pool(1) as pool:
        pool.doit("1")
        with pool.profile() as profile:
            pool.promise(sleep_holding_the_gil, started)
            wait_for(lambda: lines(started))
        (drone,) = pool.drones
        assert profile.missing == {drone.name: "no answer within 0.3 s"}
        drone.kill()


def test_a_pool_that_ends_meanwhile_is_told():
    with poly.Pool(1, name="ends") as pool:
        pool.doit("1")
        with pool.profile() as profile:
            wait_for(lambda: pool._dispatcher.profiled)
            pool.shutdown()
    assert profile.missing == {"ends.0": "the drone ended before the block"}


def test_an_error_in_the_block_ends_the_profile():
    with poly.Pool(1) as pool:
        with pytest.raises(ZeroDivisionError), pool.profile() as profile:
            raise ZeroDivisionError
        assert profile.samples and not samplers_alive()
        with pool.profile():
            pass


# -- errors ----------------------------------------------------------------------------------------


def test_one_profile_of_a_pool_at_a_time_and_of_two_pools_at_once(gate):
    with poly.Pool(1, name="one") as one, poly.Pool(1) as other:
        with one.profile():
            with (
                other.profile(),
                pytest.raises(RuntimeError, match="one is being profiled"),
                one.profile(),
            ):
                pass
            assert len(samplers_alive()) == 1
        with other.profile(hertz=200) as second:
            task = other.promise(burns, gate)
            wait_for(task.running)
            first = profiled(one, gate, [(burns, gate)])
            task.result()
        for profile in (first, second):
            (name,) = profile.samples.keys() - {"controller"}
            assert own_samples(profile.samples[name])["burns_inside", __file__]


@pytest.mark.parametrize(
    ("hertz", "error"),
    [(0, "hertz must be at least 1, not 0"), (1001, "hertz must be at most 1000, not 1001")],
)
def test_a_rate_that_makes_no_sense_is_refused(hertz, error):
    with poly.Pool(1) as pool, pytest.raises(ValueError, match=error):
        pool.profile(hertz=hertz)


def test_pools_that_cannot_be_profiled_say_what_to_use(tmp_path):
    with (
        polycephaly.Pool(1, engine="inline") as pool,
        pytest.raises(RuntimeError, match="cProfile"),
    ):
        pool.profile()
    card = str(tmp_path / "card.json")
    with (
        polycephaly.Pool(1, name="lab") as pool,
        polycephaly.serve(pool, file=card),
        polycephaly.connect(card) as remote,
        pytest.raises(RuntimeError, match=r"use pool.profile\(\) there"),
    ):
        remote.profile()


def test_a_closed_pool_is_not_profiled():
    with poly.Pool(1) as pool:
        pass
    with pytest.raises(RuntimeError), pool.profile():
        pass
    assert not samplers_alive()


def test_other_files_are_refused(tmp_path):
    with poly.Pool(1) as pool, pool.profile() as profile:
        pass
    with pytest.raises(ValueError, match=r"saved as .html or .json, not as 'p.svg'"):
        profile.save(tmp_path / "p.svg")


# -- files -----------------------------------------------------------------------------------------

EVIL = "</script><img src=x onerror=alert(1)>{{ data }}"
MAIN, WORK, BAD = ("main", "a.py", 3), ("work", "a.py", 7), (EVIL, "b.py", 1)
SAMPLES = {
    "p.0": Counter({(MAIN, WORK): 3, (MAIN,): 1}),
    "p.1": Counter({(MAIN, WORK): 1, (MAIN, BAD): 2}),
    "controller": Counter({(OTHERS,): 4}),
}


def test_a_speedscope_file_has_the_frames_once_and_a_profile_of_each_process():
    contents = json.loads(speedscope_of(SAMPLES, 100, "a run"))
    assert contents["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = contents["shared"]["frames"]
    assert frames == [
        {"name": "main", "file": "a.py", "line": 3},
        {"name": "work", "file": "a.py", "line": 7},
        {"name": EVIL, "file": "b.py", "line": 1},
        {"name": "others"},
    ]
    assert [each["name"] for each in contents["profiles"]] == ["p.0", "p.1", "controller"]
    assert contents["profiles"][0] == {
        "type": "sampled", "name": "p.0", "unit": "seconds", "startValue": 0, "endValue": 0.04,
        "samples": [[0, 1], [0]], "weights": [0.03, 0.01],
    }  # fmt: skip


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self.here = [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.here = dict(attrs).get("id")

    def handle_data(self, data):
        if self.here == "data":
            self.data += data

    def handle_endtag(self, tag):
        self.here = None


def test_the_page_has_the_names_as_data_and_asks_for_nothing():
    text = page_of(SAMPLES, 100, "<b>run</b>", "Without <p.9>: lost.").decode()
    page = Page(text)
    contents = json.loads(page.data)
    assert [name for name, _ in contents["processes"]] == ["all drones", *SAMPLES]
    assert contents["frames"][2] == [*BAD]
    assert contents["processes"][0][1] == [[[0, 1], 4], [[0], 1], [[0, 2], 2]]
    assert "img" not in page.tags and "b" not in page.tags and "p.9" not in page.tags
    assert not re.search(r"https?:|\bsrc=[\"']|@import|url\(", text)
    assert "default-src 'none'" in text


def test_the_script_of_the_page_draws_and_zooms(tmp_path):
    """In Node, with as much of a document as the script uses."""
    text = page_of(SAMPLES, 100, "run", "").decode()
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    (tmp_path / "page.js").write_text(
        "const data_ = " + json.dumps(Page(text).data) + ";\n" + STAND_IN + script + CHECKS
    )
    try:
        run = subprocess.run(["node", tmp_path / "page.js"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no node")
    assert run.stdout.splitlines() == [
        "all@0+100 main:3@0+100 work:7@28.6+57.1",
        "all@0+100 main:3@0+100 work:7@0+100",
        "7 samples, 100.0 %; its own: 1, 14.3 %",
        "others@0+100",
    ], run.stderr


STAND_IN = """
const made = {};
class Element {
  constructor() { this.style = {}; this.children = []; this.own = ""; }
  set textContent(text) { this.own = text; this.children = []; }
  get textContent() { return this.own; }
  append(...those) { this.children.push(...those); }
  replaceChildren(...those) { this.children = those; }
}
const byId = (id) => (made[id] = made[id] || Object.assign(new Element(), { value: 0 }));
byId("data").textContent = data_;
globalThis.document = { getElementById: byId, createElement: () => new Element() };
globalThis.innerWidth = globalThis.innerHeight = 1000;
globalThis.onkeydown = null;
(() => {
"""
CHECKS = """
const short = (text) => String(Math.round(10 * parseFloat(text)) / 10);
const boxes = () => byId("flame").children.filter((each) => !each.textContent.startsWith("</"));
const place = (style) => "@" + short(style.left) + "+" + short(style.width);
const told = () => boxes().map((each) => each.textContent + place(each.style)).join(" ");
console.log(told());
boxes().find((each) => each.textContent === "work:7").onclick();
console.log(told().split(" ").sort().join(" "));
boxes().find((each) => each.textContent === "main:3").onmousemove({ clientX: 1, clientY: 1 });
console.log(byId("tip").children[2].textContent);
process.value = 3;
process.onchange();
console.log(told().replace("all@0+100 ", ""));
})();
"""


# -- the sampler, without drones -------------------------------------------------------------------


def runs(task):
    return task()


def sampled(task, boundary=""):
    """A report of one sample, taken in this thread while the task runs."""
    sampler = StackSampler(1, list)
    sampler._targets = lambda: [(threading.get_ident(), boundary)]
    runs(lambda: task(sampler))
    sampler.stop(wait=True)
    return sampler.report()


def test_samples_are_added_up_by_stack():
    def task(sampler):
        for _ in range(3):
            sampler._sample(2)
        sampler._sample(1)

    report = sampled(task)
    counts = sorted(count for _, count in report["stacks"])
    assert counts == [1, 6]
    samples = read_samples(json.loads(json.dumps(report)))
    assert samples.total() == 7
    assert {stack[-1][0] for stack in samples} == {"StackSampler._sample"}
    assert all("runs" in [frame[0] for frame in stack] for stack in samples)


def test_a_stack_without_the_boundary_is_none():
    assert sampled(lambda sampler: sampler._sample(1), "no such file")["stacks"] == []


def test_frames_outside_are_left_out_and_a_stack_without_frames_is_c_code():
    whole = StackSampler(1, list)
    whole.stop(wait=True)
    whole._targets = lambda: [(threading.get_ident(), __file__)]
    whole._sample(1)
    (stack,) = read_samples(whole.report())
    assert [frame[0] for frame in stack] == ["StackSampler._sample"]
    (stack,) = read_samples(whole.report(os.path.dirname(samplers.__file__)))
    assert stack == (samplers.C_CODE,)


def test_too_many_stacks_are_counted_as_others(monkeypatch):
    monkeypatch.setattr(tuning, "sampled_stacks", 1)

    def task(sampler):
        sampler._sample(1)
        sampler._sample(5)

    samples = read_samples(sampled(task))
    assert len(samples) == 2 and samples[OTHERS,] == 5


def test_a_deep_stack_is_cut_to_its_innermost_frames(monkeypatch):
    monkeypatch.setattr(tuning, "sampled_frames", 2)
    (stack,) = read_samples(sampled(lambda sampler: sampler._sample(1)))
    assert [frame[0].rpartition(".")[2] for frame in stack] == ["<lambda>", "_sample"]


def test_the_switch_interval_is_restored_unless_a_task_has_changed_it():
    before = sys.getswitchinterval()
    try:
        sampler = StackSampler(1, list, 0.0005)
        assert sys.getswitchinterval() == 0.0005
        sampler.stop(wait=True)
        assert sys.getswitchinterval() == before
        sampler = StackSampler(1, list, 0.0005)
        sys.setswitchinterval(0.002)
        sampler.stop(wait=True)
        assert sys.getswitchinterval() == 0.002
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    "report",
    [{}, {"frames": []}, {"frames": [["f", "x"]], "stacks": []},
     {"frames": [], "stacks": [[[0], 1]]}, {"frames": [], "stacks": [7]},
     {"frames": [["f", "x", 1]], "stacks": [[["0"], 1]]}],
)  # fmt: skip
def test_a_report_that_is_none_is_malformed(report):
    with pytest.raises(Malformed, match="a report without samples"):
        read_samples(report)


# -- decisions, without a process ------------------------------------------------------------------


def test_drones_are_told_to_sample_once_and_only_during_a_profile():
    dispatcher = dispatcher_of(FakeReactor(), 2, ready=False)
    early, late = dispatcher.handles
    early.starts(), late.starts()
    early.says_hello()
    profile = profiles.Profile(dispatcher, 50)
    dispatcher.post(profile._begin)
    dispatcher.reactor.turn()
    assert early.got(PROFILE)[1:] == [50] and not late.got(PROFILE)
    late.says_hello()
    assert late.got(PROFILE)[1:] == [50] and len(early.got(PROFILE)) == 2
    asked = profiles.Signal()
    profile._end(asked)
    dispatcher.reactor.turn()
    assert early.got(PROFILE)[3:] == late.got(PROFILE)[3:] == [0]
    answers = asked.result()
    late.dies()
    assert answers[1].result() is None
    assert not answers[0].done()
