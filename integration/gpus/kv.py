"""An agent of NIXL that moves blocks of a KV cache with the calls of vLLM's connector, and compares
every byte. The argument is JSON: backend, kind of memory, and lists of descriptors. The results are
JSON lines on standard output. Rank 0 has the cache of prefill; rank 1 is decode, which reads and
writes it.

The environment has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. It needs
NIXL's Python package and NumPy. PEERLANE_CUDA_LIBRARY names another CUDA library, for tests.
"""

import concurrent.futures
import ctypes
import faulthandler
import importlib.metadata
import json
import os
import pickle
import resource
import select
import signal
import socket
import statistics
import struct
import sys
import threading
import time

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

RANK = int(os.environ["RANK"])
GRANULE = 2 << 20


def say(kind, **what):
    print(json.dumps({"kind": kind, "rank": RANK, **what}), flush=True)


class GPU:
    """Device memory by the driver's calls, without PyTorch."""

    def __init__(self, ordinal):
        self.ordinal = ordinal
        self.cuda = ctypes.CDLL(os.environ.get("PEERLANE_CUDA_LIBRARY") or "libcuda.so.1")
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.context = ctypes.c_void_p()
        if hasattr(self.cuda, "cuDevicePrimaryCtxRetain"):  # PyTorch's context
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        else:  # the simulator
            self.call("cuCtxCreate_v2", ctypes.byref(self.context), 0, device)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()
        self.thread = threading.local()
        self.enter()

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def enter(self):
        """Every thread needs the context, and has a stream."""
        self.call("cuCtxSetCurrent", self.context)
        self.thread.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.thread.stream), 1)

    def allocate(self, size, kind):
        """Memory of cuMemCreate with a POSIX file descriptor as vLLM's --enable-cumem-allocator
        has it, or of cudaMalloc."""
        size = -(-size // GRANULE) * GRANULE
        at = ctypes.c_uint64()
        if kind == "cudaMalloc":
            self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
            return at.value
        properties = struct.pack("iiiiQQ", 1, 1, 1, self.ordinal, 0, 0)
        access = struct.pack("iii", 1, self.ordinal, 3)
        handle, n = ctypes.c_uint64(), ctypes.c_size_t(size)
        none = ctypes.c_uint64(0)
        self.call("cuMemCreate", ctypes.byref(handle), n, properties, none)
        self.call("cuMemAddressReserve", ctypes.byref(at), n, ctypes.c_size_t(0), none, none)
        self.call("cuMemMap", at, n, ctypes.c_size_t(0), handle, none)
        self.call("cuMemSetAccess", at, n, access, ctypes.c_size_t(1))
        return at.value

    def write(self, at, array):
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(at), ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), self.thread.stream)
        self.call("cuStreamSynchronize", self.thread.stream)

    def read(self, at, array):
        self.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(at), ctypes.c_size_t(array.nbytes), self.thread.stream)
        self.call("cuStreamSynchronize", self.thread.stream)


class Side:
    """The other process, over TCP: vLLM has a side channel, too."""

    def __init__(self):
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        end = time.monotonic() + 60
        if RANK == 0:
            listener = socket.create_server(address)
            listener.settimeout(60)
            self.socket, _ = listener.accept()
            return
        while True:
            try:
                self.socket = socket.create_connection(address, timeout=5)
                self.socket.settimeout(None)
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def send(self, what):
        text = pickle.dumps(what)
        self.socket.sendall(struct.pack("Q", len(text)) + text)

    def receive(self):
        (size,) = struct.unpack("Q", self.exactly(8))
        return pickle.loads(self.exactly(size))

    def exactly(self, size):
        text = b""
        while len(text) < size:
            part = self.socket.recv(size - len(text))
            if not part:
                raise RuntimeError("the other rank has ended")
            text += part
        return text

    def waits(self, seconds):
        return bool(select.select([self.socket], [], [], seconds)[0])


class Agent:
    def __init__(self, job):
        self.job, self.lists, self.side = job, job["lists"], Side()
        self.gpu = GPU(int(os.environ.get("LOCAL_RANK", "0")))
        layers = max(x["layers"] for x in self.lists)
        sizes = [max(x["blocks"] * x["bytes"] for x in self.lists if x["layers"] > i) for i in range(layers)]
        self.bases = [self.gpu.allocate(size, job["memory"]) for size in sizes]
        self.counter = np.arange(max(sizes) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.threads = concurrent.futures.ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)), initializer=self.gpu.enter)
        # As vLLM: threads for UCX alone.
        backend = job["backend"]
        settings = nixl_agent_config(num_threads=4) if backend == "UCX" else nixl_agent_config(backends=[backend])
        self.agent = nixl_agent(f"rank-{RANK}", settings)
        regions = [(base, size, self.gpu.ordinal, "") for base, size in zip(self.bases, sizes)]
        self.registered = self.agent.register_memory(self.agent.get_reg_descs(regions, "VRAM"), backends=[backend])
        say("ready", gpu=self.gpu.name, nixl=version(), pid=os.getpid())

    def pattern(self, x, layer, seed):
        words = x["blocks"] * x["bytes"] // 8
        return self.counter[:words] + np.uint64(seed * 1_000_003 + layer * 7919)

    def fill(self, x, seed):
        list(self.threads.map(lambda i: self.gpu.write(self.bases[i], self.pattern(x, i, seed)), range(x["layers"])))

    def compare(self, x, seed, order):
        """order[i] is the number of the other rank's block that block i must have."""

        def layer(i):
            got = np.empty(x["blocks"] * x["bytes"] // 8, dtype=np.uint64)
            self.gpu.read(self.bases[i], got)
            want = self.pattern(x, i, seed).reshape(x["blocks"], -1)[order]
            wrong = (got.reshape(x["blocks"], -1) != want).any(axis=1).nonzero()[0]
            return f"layer {i}: {len(wrong)} wrong blocks from {wrong[0]}" if len(wrong) else ""

        found = [text for text in self.threads.map(layer, range(x["layers"])) if text]
        say("check", operation=x["name"], bytes=x["layers"] * x["blocks"] * x["bytes"], problem="; ".join(found[:3]))

    def rows(self, x, bases, ordinal):
        """Every block of every layer, layer by layer, as vLLM prepares them."""
        offsets = np.arange(x["blocks"], dtype=np.uint64) * np.uint64(x["bytes"])
        rows = np.empty((x["layers"] * x["blocks"], 3), dtype=np.uint64)
        for i in range(x["layers"]):
            rows[i * x["blocks"]:(i + 1) * x["blocks"], 0] = offsets + np.uint64(bases[i])
        rows[:, 1], rows[:, 2] = x["bytes"], ordinal
        return rows


def version():
    for name in ("nixl", "nixl-cu13", "nixl-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown"


def order_of(x):
    return np.random.default_rng(7).permutation(x["blocks"])


def prefill(a):
    """Takes notifications, and obeys the other rank."""
    a.side.send({"metadata": a.agent.get_agent_metadata(), "bases": a.bases, "ordinal": a.gpu.ordinal})
    notes = 0
    while True:
        for texts in a.agent.get_new_notifs().values():
            notes += sum(text.startswith(b"request-") for text in texts)
        if not a.side.waits(0.001):
            continue
        what = a.side.receive()
        if what[0] == "fill":
            a.fill(a.lists[what[1]], what[2])
        elif what[0] == "compare":
            x = a.lists[what[1]]
            a.compare(x, what[2], np.argsort(order_of(x)))
        elif what[0] == "notes":
            end = time.monotonic() + 10
            while notes < what[1] and time.monotonic() < end:
                for texts in a.agent.get_new_notifs().values():
                    notes += sum(text.startswith(b"request-") for text in texts)
            if notes != what[1]:
                raise RuntimeError(f"{notes} notifications of {what[1]} transfers")
        else:
            a.agent.deregister_memory(a.registered)
            return
        a.side.send("done")


def decode(a):
    def order(*what):
        a.side.send(what)
        a.side.receive()

    other = a.side.receive()
    start = time.monotonic()
    name = a.agent.add_remote_agent(other["metadata"])
    say("doing", what=f"added {name} in {(time.monotonic() - start) * 1e3:.1f} ms")
    sent = 0
    for number, x in enumerate(a.lists):
        blocks = order_of(x)
        there = (np.arange(x["layers"])[:, None] * x["blocks"] + blocks[None, :]).reshape(-1).astype(np.int32)
        here = np.arange(x["layers"] * x["blocks"], dtype=np.int32)
        near = a.agent.prep_xfer_dlist("NIXL_INIT_AGENT", a.rows(x, a.bases, a.gpu.ordinal), "VRAM")
        far = a.agent.prep_xfer_dlist(name, a.rows(x, other["bases"], other["ordinal"]), "VRAM")
        for operation in x.get("operations", ["READ", "WRITE"]):
            for round_, interval in enumerate(x.get("intervals", [0, 0.01])):
                seed = 100 * number + 10 * round_ + (operation == "WRITE")
                say("doing", what=f"{x['name']}, {operation}")
                # Different bytes at both sides, and new ones for each interval: no earlier transfer
                # can have left the right ones.
                order("fill", number, 1000000 + seed)
                a.fill(x, 2000000 + seed)
                posts, alls, makes, processor = [], [], [], []
                end = time.monotonic() + x["seconds"]
                while not alls or len(alls) <= x["rounds"] and time.monotonic() < end:
                    note = f"request-{sent}".encode()
                    used = resource.getrusage(resource.RUSAGE_SELF)
                    begun = time.perf_counter()
                    handle = a.agent.make_prepped_xfer(operation, near, here, far, there, notif_msg=note)
                    made = time.perf_counter()
                    state = a.agent.transfer(handle)
                    posted = time.perf_counter()
                    while state == "PROC":
                        if interval:
                            time.sleep(interval)
                        state = a.agent.check_xfer_state(handle)
                    done = time.perf_counter()
                    after = resource.getrusage(resource.RUSAGE_SELF)
                    if state != "DONE":
                        raise RuntimeError(f"{x['name']}, {operation}: a transfer ended with {state}")
                    a.agent.release_xfer_handle(handle)
                    sent += 1
                    makes.append(made - begun)
                    posts.append(posted - made)
                    alls.append(done - made)
                    processor.append(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime)
                counted = slice(1 if len(alls) > 1 else 0, None)  # the first connects
                entries = x["layers"] * x["blocks"]
                say("list", name=x["name"], operation=operation, interval_ms=interval * 1e3, entries=entries, entry_bytes=x["bytes"],
                    transfers=len(alls[counted]), first_ms=alls[0] * 1e3, min_ms=min(alls[counted]) * 1e3,
                    median_ms=statistics.median(alls[counted]) * 1e3, post_ms=statistics.median(posts[counted]) * 1e3,
                    make_ms=statistics.median(makes[counted]) * 1e3, processor_us=statistics.median(processor[counted]) / entries * 1e6,
                    rate=entries * x["bytes"] / statistics.median(alls[counted]) / 1e9)
                if operation == "READ":
                    a.compare(x, 1000000 + seed, blocks)
                else:
                    order("compare", number, 2000000 + seed)
        a.agent.release_dlist_handle(near)
        a.agent.release_dlist_handle(far)
    order("notes", sent)
    a.agent.remove_remote_agent(name)
    a.agent.deregister_memory(a.registered)
    a.side.send(("end",))


def main():
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    agent = Agent(json.loads(sys.argv[1]))
    (prefill if RANK == 0 else decode)(agent)
    say("done")
    sys.stdin.read()  # until the harness has read its relay's report


try:
    main()
except BaseException as e:
    say("failed", error=f"{type(e).__name__}: {e}")
    raise
