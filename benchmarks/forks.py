"""Which libraries work on in a fork that was made while their threads worked.

    python -m benchmarks.forks [--forks N] [--only WORD,...] [--json FILE]

Each case runs in a fresh process, twice: with the library's threads idle, and with the library at
work in a thread beside the one that forks. As the drones of a pool are, the process that uses the
library is the fork of a fork. It has a time limit, and its result is compared with the parent's.

`working` counts the forks before which a native thread was seen to run. `pool` is what a pool of
this process does: fork, or fresh interpreters. What needs a server gets one in a process of its
own; PostgreSQL is the server that `PGHOST` names, or one that is started from what is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 10.0  # for one fork and what it computes
CASE_SECONDS = 60.0  # for a case, and as many again for 50 forks
MAX_BAD = 2  # forks that hang, crash or are wrong, after which a case is over
THREADS = "4"  # of each library: more than the cores of a small machine

Use = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    name: str
    needs: tuple[str, ...]  # modules
    package: str  # whose version is told
    prepare: Callable[[Path], Use]
    """Imports the library, has it start its threads, and returns what is called over and over: to
    keep the threads busy, and in the forks. It returns the same each time."""


CASES: dict[str, Case] = {}


def case(
    name: str, *needs: str, package: str | None = None
) -> Callable[[Callable[[Path], Use]], Callable[[Path], Use]]:
    def add(prepare: Callable[[Path], Use]) -> Callable[[Path], Use]:
        CASES[name] = Case(name, needs, package or needs[0], prepare)
        return prepare

    return add


_held: list[Any] = []
"""Connections of the parent that stay open, with their threads; the forks make their own."""

# -- the table -------------------------------------------------------------------------------------


@case("numpy", "numpy")
def _numpy(place: Path) -> Use:
    import numpy as np

    a = np.ones((400, 400))
    return lambda: float((a @ a).sum())


@case("scipy, linear algebra", "scipy")
def _scipy(place: Path) -> Use:
    import numpy as np
    from scipy import linalg

    a = np.eye(300) + 1.0
    return lambda: round(float(linalg.solve(a, a).sum()), 6)


@case("scipy, fft with workers=", "scipy")
def _scipy_fft(place: Path) -> Use:
    import numpy as np
    from scipy import fft

    a = np.ones((400, 1000))
    return lambda: round(abs(fft.fft(a, workers=int(THREADS)).sum()), 3)


@case("scikit-learn", "sklearn", package="scikit-learn")
def _sklearn(place: Path) -> Use:
    import numpy as np
    from sklearn.ensemble import HistGradientBoostingClassifier

    x = np.random.default_rng(0).random((500, 4))
    y = (x[:, 0] > 0.5).astype(int)
    return lambda: int(HistGradientBoostingClassifier(max_iter=2).fit(x, y).predict(x).sum())


def _frame(rows: int = 100_000) -> Any:
    import numpy as np
    import pandas as pd

    names = [f"name {i % 1000}" for i in range(rows)]
    return pd.DataFrame({"a": np.arange(rows), "b": np.arange(rows) * 0.5, "c": names})


@case("pandas", "pandas")
def _pandas(place: Path) -> Use:
    df = _frame()
    return lambda: float(df.groupby("c")["b"].sum().sum()) + len(df[df["c"].str.endswith("7")])


@case("pandas, read_parquet", "pandas", "pyarrow")
def _pandas_parquet(place: Path) -> Use:
    import pandas as pd

    path = place / "frame.parquet"
    _frame().to_parquet(path)
    return lambda: float(pd.read_parquet(path)["b"].sum())


@case("polars", "polars")
def _polars(place: Path) -> Use:
    os.environ["POLARS_MAX_THREADS"] = THREADS
    import polars as pl

    df = pl.DataFrame({"a": range(100_000)}).with_columns(b=pl.col("a") % 1000)
    return lambda: int(df.group_by("b").agg(pl.col("a").sum())["a"].sum())


def _arrow() -> Any:
    import pyarrow as pa

    pa.set_cpu_count(int(THREADS))
    return pa


def _arrow_table(rows: int = 200_000) -> Any:
    pa = _arrow()
    return pa.table(
        {
            **{f"c{i}": pa.array(range(i, rows + i)) for i in range(8)},
            "text": [f"name {i % 1000}" for i in range(rows)],
        }
    )


@case("pyarrow, CPU pool", "pyarrow")
def _arrow_cpu(place: Path) -> Use:
    import pyarrow.compute as pc

    table = _arrow_table()

    def use() -> Any:
        sums = table.group_by("text").aggregate([("c0", "sum"), ("c1", "sum")])
        return pc.sum(sums["c0_sum"]).as_py()

    return use


@case("pyarrow, I/O pool", "pyarrow")
def _arrow_io(place: Path) -> Use:
    _arrow()
    from pyarrow import dataset, ipc

    table = _arrow_table()
    for i in range(4):
        with ipc.new_file(str(place / f"{i}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=20_000)
    files = [str(place / f"{i}.arrow") for i in range(4)]
    return lambda: dataset.dataset(files, format="ipc").count_rows()


@case("pyarrow, Parquet", "pyarrow")
def _arrow_parquet(place: Path) -> Use:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path = place / "table.parquet"
    pq.write_table(_arrow_table(60_000), path, row_group_size=15_000)
    return lambda: pc.sum(pq.read_table(path, pre_buffer=True)["c3"]).as_py()


@case("pyarrow, CSV", "pyarrow")
def _arrow_csv(place: Path) -> Use:
    import pyarrow.compute as pc
    from pyarrow import csv

    path = place / "table.csv"
    csv.write_csv(_arrow_table(50_000), path)
    return lambda: pc.sum(csv.read_csv(path)["c3"]).as_py()


def _write_dataset(place: Path) -> Callable[[], Any]:
    """Write a dataset, and return what opens it."""
    from pyarrow import dataset

    pa, table = _arrow(), _arrow_table(50_000)
    table = table.append_column("part", pa.array([i % 4 for i in range(len(table))]))
    dataset.write_dataset(table, place / "set", format="parquet", partitioning=["part"])
    return lambda: dataset.dataset(place / "set", format="parquet", partitioning=["part"])


@case("pyarrow, dataset", "pyarrow.dataset", package="pyarrow")
def _arrow_dataset(place: Path) -> Use:
    from pyarrow import dataset

    opened = _write_dataset(place)
    return lambda: opened().to_table(filter=dataset.field("c0") > 1000).num_rows


@case("pyarrow, a dataset that a thread reads", "pyarrow.dataset", package="pyarrow")
def _arrow_same_dataset(place: Path) -> Use:
    from pyarrow import dataset

    same = _write_dataset(place)()
    return lambda: same.to_table(filter=dataset.field("c0") > 1000).num_rows


@case("pyarrow, S3", "pyarrow.fs", "moto", "flask", package="pyarrow")
def _arrow_s3(place: Path) -> Use:
    from pyarrow import fs

    port = _start_moto(place)
    s3 = fs.S3FileSystem(
        access_key="a", secret_key="b", endpoint_override=f"127.0.0.1:{port}", scheme="http",
        allow_bucket_creation=True, region="us-east-1",
    )  # fmt: skip
    s3.create_dir("bucket")
    with s3.open_output_stream("bucket/key") as stream:
        stream.write(b"x" * 100_000)

    def use() -> int:
        with s3.open_input_file("bucket/key") as file:
            return len(file.read())

    return use


_FLIGHT = """
import sys, pyarrow as pa, pyarrow.flight as flight
class Server(flight.FlightServerBase):
    def do_get(self, context, ticket):
        return flight.RecordBatchStream(pa.table({"a": list(range(1000))}))
Server(f"grpc://127.0.0.1:{sys.argv[1]}").serve()
"""


@case("pyarrow, Flight", "pyarrow.flight", package="pyarrow")
def _arrow_flight(place: Path) -> Use:
    from pyarrow import flight

    port = _serve(place, _FLIGHT)

    def read(client: Any) -> int:
        return int(client.do_get(flight.Ticket(b"")).read_all().num_rows)

    def use() -> int:
        with flight.connect(f"grpc://127.0.0.1:{port}") as client:
            return read(client)

    _held.append(flight.connect(f"grpc://127.0.0.1:{port}"))
    read(_held[-1])
    return use


def _duckdb(place: Path, own: bool) -> Use:
    import duckdb

    def connect() -> Any:
        return duckdb.connect(config={"threads": int(THREADS)})

    def ask(connection: Any) -> Any:
        groups = "select range % 1000 as b, sum(range) as a from range(500000) group by b"
        found = connection.cursor().execute(f"select sum(a) from ({groups})").fetchone()
        return int(found[0])

    of_parent = connect()
    return lambda: ask(connect() if own else of_parent)


@case("duckdb, the parent's connection", "duckdb")
def _duckdb_same(place: Path) -> Use:
    return _duckdb(place, own=False)


@case("duckdb, a new connection", "duckdb")
def _duckdb_own(place: Path) -> Use:
    return _duckdb(place, own=True)


@case("numexpr", "numexpr")
def _numexpr(place: Path) -> Use:
    os.environ["NUMEXPR_NUM_THREADS"] = THREADS
    import numexpr
    import numpy as np

    a = np.arange(500_000.0)
    return lambda: float(numexpr.evaluate("a * 2 + 1", {"a": a}).sum())


def _numba(layer: str) -> Use:
    os.environ["NUMBA_THREADING_LAYER"], os.environ["NUMBA_NUM_THREADS"] = layer, THREADS
    import numba
    import numpy as np

    @numba.njit(parallel=True)
    def compute(a: Any) -> Any:
        total = 0.0
        for i in numba.prange(len(a)):
            total += a[i] * 0.5
        return total

    a = np.ones(1_000_000)
    compute(a)
    if numba.threading_layer() != layer:
        raise ImportError(f"numba took its layer {numba.threading_layer()}")
    return lambda: round(float(compute(a)), 3)


@case("numba, workqueue", "numba")
def _numba_workqueue(place: Path) -> Use:
    return _numba("workqueue")


@case("numba, tbb", "numba", package="numba")
def _numba_tbb(place: Path) -> Use:
    library = Path(sys.prefix, "lib", "libtbb.so.12")  # where the wheel `tbb` puts it
    if library.exists():
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    return _numba("tbb")


@case("numba, omp", "numba")
def _numba_omp(place: Path) -> Use:
    return _numba("omp")


@case("blosc", "blosc")
def _blosc(place: Path) -> Use:
    import blosc

    blosc.set_nthreads(int(THREADS))
    blosc.set_releasegil(True)
    data = bytes(range(256)) * 8000
    return lambda: len(blosc.decompress(blosc.compress(data, typesize=8)))


@case("blosc2", "blosc2")
def _blosc2(place: Path) -> Use:
    import blosc2

    blosc2.set_nthreads(int(THREADS))
    data = bytes(range(256)) * 8000
    return lambda: len(blosc2.decompress2(blosc2.compress2(data)))


@case("zarr", "zarr")
def _zarr(place: Path) -> Use:
    import numpy as np
    import zarr

    made = zarr.create_array(
        str(place / "a.zarr"), shape=(400, 400), chunks=(100, 100), dtype="f8", overwrite=True
    )
    made[:] = np.ones((400, 400))
    return lambda: float(zarr.open_array(str(place / "a.zarr"), mode="r")[:].sum())


@case("h5py", "h5py")
def _h5py(place: Path) -> Use:
    import h5py
    import numpy as np

    with h5py.File(place / "a.h5", "w") as file:
        file.create_dataset("a", data=np.ones((400, 400)), compression="gzip", chunks=(100, 400))

    def use() -> float:
        with h5py.File(place / "a.h5", "r") as file:
            return float(file["a"][:].sum())

    return use


@case("opencv", "cv2", package="opencv-python-headless")
def _opencv(place: Path) -> Use:
    import cv2
    import numpy as np

    cv2.setNumThreads(int(THREADS))
    picture = np.arange(1000 * 1000 * 3, dtype=np.uint32).astype(np.uint8).reshape(1000, 1000, 3)
    return lambda: int(cv2.GaussianBlur(cv2.resize(picture, (700, 700)), (9, 9), 0).sum())


@case("Pillow", "PIL", package="Pillow")
def _pillow(place: Path) -> Use:
    from PIL import Image

    picture = Image.new("RGB", (800, 800), (10, 200, 30))
    picture.save(place / "a.png")

    def use() -> Any:
        with Image.open(place / "a.png") as opened:
            return opened.resize((100, 100)).getpixel((5, 5))

    return use


@case("lxml", "lxml")
def _lxml(place: Path) -> Use:
    from lxml import etree

    text = b"<r>" + b"<a b='1'>t</a>" * 5000 + b"</r>"
    return lambda: len(etree.fromstring(text).xpath("//a[@b='1']"))


@case("orjson", "orjson")
def _orjson(place: Path) -> Use:
    import orjson

    data = [{"a": i, "b": str(i)} for i in range(5000)]
    return lambda: len(orjson.loads(orjson.dumps(data)))


def _sql(url: str, **options: Any) -> Use:
    import sqlalchemy as sql

    engine, owner = sql.create_engine(url, **options), os.getpid()
    with engine.begin() as connection:
        connection.execute(sql.text("create table t (a int)"))
        connection.execute(sql.text("insert into t values (:a)"), [{"a": i} for i in range(100)])

    def use() -> Any:
        if os.getpid() != owner:
            engine.dispose(close=False)  # as SQLAlchemy's documentation says for forks
        with engine.connect() as connection:
            return connection.execute(sql.text("select sum(a) from t")).scalar()

    return use


@case("SQLAlchemy, sqlite3", "sqlalchemy", package="SQLAlchemy")
def _sqlite(place: Path) -> Use:
    return _sql(f"sqlite:///{place}/a.sqlite")


@case("SQLAlchemy, psycopg", "sqlalchemy", "psycopg", package="SQLAlchemy")
def _psycopg(place: Path) -> Use:
    if "PGHOST" not in os.environ:
        os.environ.update(_start_postgres(place))
    import psycopg

    deadline = time.monotonic() + 30
    while True:
        try:
            with psycopg.connect("", dbname="postgres", autocommit=True) as connection:
                connection.execute("drop table if exists t")
            break
        except psycopg.OperationalError:  # it listens, and is still starting up
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    return _sql("postgresql+psycopg:///postgres")


@case("requests", "requests")
def _requests(place: Path) -> Use:
    import requests

    url = f"http://127.0.0.1:{_serve_files(place)}/file"

    def get() -> int:
        with requests.Session() as session:
            session.trust_env = False  # no proxy
            return len(session.get(url, timeout=10).content)

    return get


@case("httpx", "httpx")
def _httpx(place: Path) -> Use:
    import httpx

    port = _serve_files(place)
    url = f"http://127.0.0.1:{port}/file"
    return lambda: len(httpx.get(url, timeout=10, trust_env=False).content)


_GRPC = """
import sys, grpc
from concurrent.futures import ThreadPoolExecutor
class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request * 2)
server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
server.start()
server.wait_for_termination()
"""


def _grpc(place: Path) -> Use:
    import grpc

    port = _serve(place, _GRPC)

    def ask(channel: Any) -> bytes:
        return bytes(channel.unary_unary("/a/b")(b"x", timeout=15))

    def use() -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            return ask(channel)

    _held.append(grpc.insecure_channel(f"127.0.0.1:{port}"))
    ask(_held[-1])
    return use


@case("grpc", "grpc", package="grpcio")
def _grpc_plain(place: Path) -> Use:
    return _grpc(place)


@case("grpc, GRPC_ENABLE_FORK_SUPPORT=1", "grpc", package="grpcio")
def _grpc_forking(place: Path) -> Use:
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "1"
    return _grpc(place)


@case("boto3", "boto3", "moto", "flask")
def _boto3(place: Path) -> Use:
    import boto3

    port = _start_moto(place)

    def client() -> Any:
        return boto3.session.Session().client(
            "s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
            aws_access_key_id="a", aws_secret_access_key="b",
        )  # fmt: skip

    client().create_bucket(Bucket="bucket")
    client().put_object(Bucket="bucket", Key="key", Body=b"x" * 1000)
    return lambda: len(client().get_object(Bucket="bucket", Key="key")["Body"].read())


@case("matplotlib", "matplotlib")
def _matplotlib(place: Path) -> Use:
    import io

    from matplotlib.figure import Figure

    def use() -> int:
        figure = Figure(figsize=(2, 2))
        figure.subplots().plot([1, 3, 2])
        file = io.BytesIO()
        figure.savefig(file, format="raw")
        return len(file.getvalue())

    return use


@case("tqdm", "tqdm")
def _tqdm(place: Path) -> Use:
    from tqdm import tqdm

    return lambda: sum(tqdm(range(1000), file=open(os.devnull, "w")))


@case("torch", "torch")
def _torch(place: Path) -> Use:
    import torch

    torch.set_num_threads(int(THREADS))
    a = torch.ones(400, 400)
    return lambda: float((a @ a + torch.ones(400, 400).exp()).sum())


def _points() -> Any:
    import numpy as np

    x = np.random.default_rng(0).random((2000, 8))
    return x, (x[:, 0] > 0.5).astype(int)


@case("xgboost", "xgboost", package="xgboost-cpu")
def _xgboost(place: Path) -> Use:
    import xgboost

    x, y = _points()
    options = {"n_estimators": 3, "n_jobs": int(THREADS)}
    return lambda: int(xgboost.XGBClassifier(**options).fit(x, y).predict(x).sum())


@case("lightgbm", "lightgbm")
def _lightgbm(place: Path) -> Use:
    import lightgbm

    x, y = _points()
    data = lightgbm.Dataset(x, y, free_raw_data=False)
    options = {"objective": "binary", "num_threads": int(THREADS), "verbose": -1}
    return lambda: round(float(lightgbm.train(options, data, 3).predict(x).sum()), 6)


# -- servers, in processes of their own ------------------------------------------------------------

_servers: list[subprocess.Popen[bytes]] = []


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _serve(place: Path, program: str, *args: str, **options: Any) -> int:
    """Run `program` with a port as its first argument, and return that port once it listens."""
    return _serve_command(lambda port: [sys.executable, "-c", program, str(port), *args], **options)


def _serve_command(command: Callable[[int], list[str]], **options: Any) -> int:
    port = _free_port()
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    _servers.append(subprocess.Popen(command(port), **quiet, **options))
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return port
        if _servers[-1].poll() is not None or time.monotonic() > deadline:
            raise ImportError("the server of this case does not start")
        time.sleep(0.05)


def _serve_files(place: Path) -> int:
    (place / "file").write_bytes(b"x" * 10_000)
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]
    return _serve_command(lambda port: [*command, "--directory", str(place), str(port)])


def _start_moto(place: Path) -> int:
    return _serve_command(lambda port: [sys.executable, "-m", "moto.server", "-p", str(port)])


def _start_postgres(place: Path) -> dict[str, str]:
    """Start PostgreSQL, which refuses to run as root, and return libpq's variables for it."""
    found = [shutil.which("initdb"), *sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))]
    programs = [Path(each) for each in found if each and (Path(each).parent / "postgres").exists()]
    if not programs:
        raise ImportError("PostgreSQL's server is not installed")
    home = Path(tempfile.mkdtemp(prefix="forks-", dir="/tmp"))
    identity: dict[str, Any] = {"cwd": home}
    if os.geteuid() == 0:
        shutil.chown(home, "nobody")
        identity |= {"user": "nobody", "group": os.stat(home).st_gid, "extra_groups": []}
    folder = programs[-1].parent
    subprocess.run(
        [folder / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **identity,
    )  # fmt: skip
    _homes.append(home)
    port = _serve_command(
        lambda port: [
            str(folder / "postgres"), "-D", f"{home}/data", "-p", str(port), "-k", str(home),
            "-c", "listen_addresses=127.0.0.1",
        ],
        **identity,
    )  # fmt: skip
    return {"PGHOST": "127.0.0.1", "PGPORT": str(port), "PGUSER": "postgres"}


_homes: list[Path] = []


def _stop_servers() -> None:
    for server in _servers:
        server.kill()  # PostgreSQL would wait for its clients
        server.wait()
    for home in _homes:
        shutil.rmtree(home, ignore_errors=True)


# -- one case, in this process ---------------------------------------------------------------------


def _use_in_fork_of_fork(use: Use, expected: Any) -> int:
    """In a fork: fork again and use the library there. Return the exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if use() == expected else 2
        except BaseException as error:
            print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return abs(os.waitstatus_to_exitcode(status)) if os.WIFEXITED(status) else 3


def _fork_and_use(use: Use, expected: Any) -> str:
    """Return "right", "wrong", "raised", "crashed" or "hung"."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            code = _use_in_fork_of_fork(use, expected)
        finally:
            os._exit(code)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    descriptor = os.pidfd_open(pid)
    ready, _, _ = select.select([descriptor], [], [], LIMIT_SECONDS)
    os.close(descriptor)
    if not ready:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not ready:
        return "hung"
    code = os.waitstatus_to_exitcode(status)
    return {0: "right", 1: "raised", 2: "wrong"}.get(code, "crashed")


@contextlib.contextmanager
def _at_work(use: Use, errors: list[str]) -> Iterator[None]:
    """Use the library over and over in another thread, which ends at its first error."""
    end, begun = threading.Event(), threading.Event()

    def work() -> None:
        try:
            while not end.is_set():
                use()
                begun.set()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            begun.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait(60)
    try:
        yield
    finally:
        end.set()
        thread.join(60)


def _native_threads() -> set[str]:
    python = {os.getpid(), *(each.native_id for each in threading.enumerate())}
    return {each for each in os.listdir("/proc/self/task") if int(each) not in python}


def _is_running(thread: str) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "R"
    return False


def _decision() -> str:
    """Return what a pool does here: "fork", or why its drones are fresh interpreters."""
    import polycephaly as poly

    with warnings.catch_warnings(record=True) as told, poly.Pool(1):
        warnings.simplefilter("always")
        poly.Pool(1).shutdown()
    unsafe = [str(each.message) for each in told if "does not fork" in str(each.message)]
    return unsafe[0] if unsafe else "fork"


def take(name: str, busy: bool, forks: int, place: Path) -> dict[str, Any]:
    """Measure a case. Raises `ImportError` if it cannot be measured here."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # os.fork beside threads
    before = _native_threads()
    for module in CASES[name].needs:
        importlib.import_module(module)
    use = CASES[name].prepare(place)
    expected = use()
    threads = len(_native_threads() - before)
    counts: Counter[str] = Counter()
    working, first_bad = 0, 0
    began = time.monotonic()
    errors: list[str] = []
    with _at_work(use, errors) if busy else contextlib.nullcontext():
        while counts.total() < forks and counts.total() - counts["right"] < MAX_BAD:
            if busy:  # until a thread runs, because an idle moment tests nothing
                deadline = time.monotonic() + 0.05
                while not (runs := any(map(_is_running, _native_threads()))):
                    if time.monotonic() > deadline:
                        break
                working += runs
            counts[_fork_and_use(use, expected)] += 1
            (place / "progress").write_text(json.dumps({**counts, "working": working}))
            if not first_bad and counts.total() > counts["right"]:
                first_bad = counts.total()
        seconds = round(time.monotonic() - began, 1)
    return {
        **counts, "forks": counts.total(), "working": working, "threads": threads,
        "first_bad": first_bad, "parent_errors": errors, "seconds": seconds,
        "same": bool(use() == expected), "pool": _decision(),
    }  # fmt: skip


def take_apart(name: str, busy: bool, forks: int) -> dict[str, Any]:
    """Measure a case in a fresh process."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    mode = "busy" if busy else "idle"
    with tempfile.TemporaryDirectory(prefix="forks-") as place:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.forks", "--alone", place, "--only", name,
             "--forks", str(forks), "--mode", mode],
            env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        out, err, ended = "", "", "hangs"
        try:
            out, err = process.communicate(timeout=CASE_SECONDS * (1 + forks / 50))
            ended = str(process.returncode)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):  # with its servers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for line in out.splitlines():
            with contextlib.suppress(ValueError):
                found: dict[str, Any] = json.loads(line)
                return {**found, "stderr": err[-600:]} if err else found
        progress = Path(place, "progress")
        so_far: dict[str, Any] = {}
        if progress.exists():
            since = round(time.time() - progress.stat().st_mtime, 1)
            so_far = {**json.loads(progress.read_text()), "seconds_since_last": since}
    return {**so_far, "parent": ended, "stderr": err[-2000:]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--forks", default=100, help="Forks for each case and mode.")
@click.option("--only", default="", help="Words, with commas: cases whose name holds one of them.")
@click.option("--mode", type=click.Choice(["idle", "busy", "both"]), default="both")
@click.option("--json", "to", type=click.Path(path_type=Path), help="Write all figures there.")
@click.option("--alone", type=click.Path(path_type=Path), hidden=True)
def main(forks: int, only: str, mode: str, to: Path | None, alone: Path | None) -> None:
    """Fork while libraries work, and tell which work on in the forks."""
    if alone is not None:
        try:
            print(json.dumps(take(only, mode == "busy", forks, alone)), flush=True)
        except ImportError as error:
            print(json.dumps({"absent": str(error)}), flush=True)
        except Exception:
            traceback.print_exc()
        finally:
            _stop_servers()
            sys.stdout.flush()
            os._exit(0)  # a library that has lost threads may not end by itself
    words = only.split(",")
    figures: dict[str, Any] = {}
    for name, each in CASES.items():
        if not any(word in name for word in words):
            continue
        for busy in (False, True):
            if mode in (("busy" if busy else "idle"), "both"):
                found = take_apart(name, busy, forks)
                found["version"] = _version(each.package)
                figures[f"{name}, {'busy' if busy else 'idle'}"] = found
                print(f"{name}, {'busy' if busy else 'idle'}: {found}", flush=True)
                if to is not None:
                    to.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
