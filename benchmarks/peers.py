"""The others, and ours: each started by a context manager, and then with the same face.

A peer's module is imported when the peer is started, never before: what one of them loads or starts
must not be in the image that another one forks."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from operator import methodcaller
from typing import Any

from .measuring import Executors, Map


def _nap() -> None:
    time.sleep(1)


@dataclass(frozen=True)
class Peer:
    title: str
    module: str
    start: Callable[[int], AbstractContextManager[Executors]]
    most: int = 1_000_000  # the slow are given fewer tasks

    @property
    def installed(self) -> bool:
        return find_spec(self.module.partition(".")[0]) is not None


OURS = "polycephaly"
CHUNKS = (4, 16)  # for each worker; the first is multiprocessing's own choice


def _in_chunks(run: Callable[..., Any], workers: int) -> tuple[Map, ...]:
    """Return the ways to map by a pool whose users choose the size of chunks."""

    def by(chunks: int | None) -> Map:
        def mapped(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
            chunksize = -(-len(items) // (chunks * workers)) if chunks else 1
            return list(run(fn, items, chunksize=chunksize))

        return mapped

    return tuple(map(by, (*CHUNKS, None)))


def _executor(pool: Any, maps: tuple[Map, ...]) -> Executors:
    return Executors(pool.submit, methodcaller("result"), maps)


@contextmanager
def polycephaly_pool(workers: int) -> Iterator[Executors]:
    import polycephaly as poly

    with poly.Pool(workers) as pool:
        yield _executor(pool, (lambda fn, items: list(pool.map(fn, items)),))


@contextmanager
def multiprocessing_pool(workers: int) -> Iterator[Executors]:
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield Executors(
            lambda fn, *args: pool.apply_async(fn, args),
            methodcaller("get"),
            _in_chunks(pool.map, workers),
        )


@contextmanager
def process_pool_executor(workers: int) -> Iterator[Executors]:
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        yield _executor(pool, _in_chunks(pool.map, workers))


@contextmanager
def loky(workers: int) -> Iterator[Executors]:
    with import_module("loky").ProcessPoolExecutor(workers) as pool:
        yield _executor(pool, _in_chunks(pool.map, workers))


@contextmanager
def joblib(workers: int) -> Iterator[Executors]:
    module = import_module("joblib")
    delayed = module.delayed
    with module.Parallel(n_jobs=workers, backend="loky") as parallel:
        yield Executors(
            submit=lambda fn, *args: parallel([delayed(fn)(*args)])[
                0
            ],  # it has no other: this one waits
            result=lambda value: value,
            maps=(lambda fn, items: list(parallel(delayed(fn)(item) for item in items)),),
        )


@contextmanager
def mpire(workers: int) -> Iterator[Executors]:
    # Without `keep_alive` each `map` would start its workers anew.
    with import_module("mpire").WorkerPool(
        n_jobs=workers, start_method="fork", keep_alive=True
    ) as pool:
        yield Executors(
            submit=lambda fn, *args: pool.apply_async(fn, args),
            result=methodcaller("get"),
            maps=(pool.map,),
        )


@contextmanager
def ray(workers: int) -> Iterator[Executors]:
    module = import_module("ray")
    module.init(
        num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    remote: dict[Any, Any] = {}

    def submit(fn: Any, *args: Any) -> Any:
        if fn not in remote:
            remote[fn] = module.remote(fn)
        return remote[fn].remote(*args)

    try:
        module.get([submit(_nap) for _ in range(workers)])  # until all workers are up
        yield Executors(
            submit=submit,
            result=module.get,
            maps=(lambda fn, items: list(module.get([submit(fn, item) for item in items])),),
            gather=module.get,
            prepare=module.put,
        )
    finally:
        module.shutdown()


@contextmanager
def dask(workers: int) -> Iterator[Executors]:
    module = import_module("distributed")
    with (
        module.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            silence_logs="ERROR",
        ) as cluster,
        module.Client(cluster) as client,
    ):
        yield Executors(
            submit=lambda fn, *args: client.submit(fn, *args, pure=False),
            result=methodcaller("result"),
            maps=(lambda fn, items: list(client.gather(client.map(fn, items, pure=False))),),
            gather=client.gather,
            prepare=lambda array: client.scatter(array, hash=False),
        )


@contextmanager
def ipyparallel(workers: int) -> Iterator[Executors]:
    with import_module("ipyparallel").Cluster(n=workers, log_level=40) as client:
        client.wait_for_engines(workers, interactive=False)
        view = client.load_balanced_view()
        yield Executors(
            submit=view.apply_async,
            result=methodcaller("get"),
            maps=(lambda fn, items: list(view.map_sync(fn, items)),),
        )


# -- the machine's own floor: two processes that do nothing but echo -------------------------------


@contextmanager
def seqpacket_echo(_: int) -> Iterator[Executors]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        here.close()
        while message := there.recv(64):
            there.send(message)
        os._exit(0)
    there.close()
    with here:
        yield Executors(
            submit=lambda fn, number: here.send(number.to_bytes(8, sys.byteorder)),
            result=lambda _: int.from_bytes(here.recv(64), sys.byteorder),
        )
    os.waitpid(child, 0)


@contextmanager
def zeromq_echo(_: int) -> Iterator[Executors]:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/echo"
        child = os.fork()
        import zmq  # not before the fork: a context does not survive one

        if not child:
            dealer = zmq.Context().socket(zmq.DEALER)
            dealer.connect(address)
            dealer.send(b"here")
            while message := dealer.recv():
                dealer.send(message)
            os._exit(0)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(address)
            peer, _hello = router.recv_multipart()
            yield Executors(
                submit=lambda fn, number: router.send_multipart(
                    [peer, number.to_bytes(8, sys.byteorder)]
                ),
                result=lambda _: int.from_bytes(router.recv_multipart()[1], sys.byteorder),
            )
            router.send_multipart([peer, b""])
            os.waitpid(child, 0)


PEERS = {
    OURS: Peer("polycephaly.Pool", "polycephaly.pool.pool", polycephaly_pool),
    "multiprocessing": Peer("multiprocessing.Pool", "multiprocessing.pool", multiprocessing_pool),
    "futures": Peer(
        "ProcessPoolExecutor", "concurrent.futures.process", process_pool_executor, most=20_000
    ),
    "loky": Peer("loky", "loky", loky, most=20_000),
    "joblib": Peer("joblib", "joblib", joblib),
    "mpire": Peer("mpire", "mpire", mpire),
    "ray": Peer("Ray", "ray", ray, most=2_000),
    "dask": Peer("Dask", "distributed", dask, most=500),
    "ipyparallel": Peer("ipyparallel", "ipyparallel", ipyparallel, most=500),
    "zeromq": Peer("a ZeroMQ echo", "zmq", zeromq_echo),
    "seqpacket": Peer("a SEQPACKET echo", "socket", seqpacket_echo),
}
FLOORS = ("zeromq", "seqpacket")
