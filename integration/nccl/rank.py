"""A rank of a run: PyTorch's collectives over NCCL, compared with a CPU reference, or
timed. The first argument is the job in JSON; standard output has results as JSON lines.
The rank has no code for Peerlane: NCCL's variables select the network.

The environment has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them.
"""

import datetime
import faulthandler
import json
import os
import signal
import statistics
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Values are small whole numbers, so that a sum is the same in any order and exact also in
# bfloat16. The period is a prime number, so that a misplaced piece is an error.
PERIOD = 1_000_003


def say(kind, **what):
    print(json.dumps({"kind": kind, "rank": RANK, **what}), flush=True)


def pattern(rank, elements, dtype):
    """The contribution of a rank, on the CPU."""
    generator = torch.Generator().manual_seed(1000 + rank)
    period = torch.randint(-4, 5, (min(PERIOD, elements),), generator=generator).to(dtype)
    return period.repeat(-(-elements // len(period)))[:elements]


class Operation:
    """A collective on buffers of `bytes` (of the larger one), within a group."""

    # Factors of the bus bandwidth of nccl-tests.
    FACTORS = {
        "all_reduce": lambda n: 2 * (n - 1) / n,
        "all_gather": lambda n: (n - 1) / n,
        "reduce_scatter": lambda n: (n - 1) / n,
        "all_to_all": lambda n: (n - 1) / n,
        "broadcast": lambda n: 1,
        "send_recv": lambda n: 1,
    }

    def __init__(self, name, size, dtype, ranks, group=None):
        self.name, self.group, self.ranks, self.dtype = name, group, ranks, DTYPES[dtype]
        self.me, self.n = ranks.index(RANK), len(ranks)
        width = torch.empty(0, dtype=self.dtype).element_size()
        whole = max(size // width, 1)
        self.part = max(whole // self.n, 1)
        many = self.part * self.n
        self.inputs, self.outputs = {
            "all_reduce": (whole, whole),
            "all_gather": (self.part, many),
            "reduce_scatter": (many, self.part),
            "all_to_all": (many, many),
            "broadcast": (whole, whole),
            "send_recv": (whole, whole),
        }[name]
        self.bytes = max(self.inputs, self.outputs) * width
        self.input = self.output = None

    def fill(self):
        self.input = pattern(RANK, self.inputs, self.dtype).cuda()
        in_place = self.name in ("all_reduce", "broadcast")
        self.output = self.input if in_place else torch.full((self.outputs,), 77, dtype=self.dtype, device="cuda")

    def reserve(self):
        """Buffers whose content does not matter."""
        self.input = torch.zeros(self.inputs, dtype=self.dtype, device="cuda")
        self.output = self.input if self.name in ("all_reduce", "broadcast") else torch.zeros(self.outputs, dtype=self.dtype, device="cuda")

    def run(self):
        if self.name == "all_reduce":
            dist.all_reduce(self.output, group=self.group)
        elif self.name == "all_gather":
            dist.all_gather_into_tensor(self.output, self.input, group=self.group)
        elif self.name == "reduce_scatter":
            dist.reduce_scatter_tensor(self.output, self.input, group=self.group)
        elif self.name == "all_to_all":
            dist.all_to_all_single(self.output, self.input, group=self.group)
        elif self.name == "broadcast":
            dist.broadcast(self.output, self.ranks[-1], group=self.group)
        else:
            # Around the ring, both concurrently: no rank waits for the other direction.
            to, of = self.ranks[(self.me + 1) % self.n], self.ranks[self.me - 1]
            for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, self.input, to, self.group),
                dist.P2POp(dist.irecv, self.output, of, self.group),
            ]):
                work.wait()

    def reference(self):
        """The expected output, computed on the CPU."""
        def of(position):
            return pattern(self.ranks[position], self.inputs, self.dtype)

        if self.name in ("all_reduce", "reduce_scatter"):
            total = of(0)
            for i in range(1, self.n):
                total += of(i)
            return total if self.name == "all_reduce" else total[self.me * self.part:(self.me + 1) * self.part]
        if self.name == "all_gather":
            return torch.cat([of(i) for i in range(self.n)])
        if self.name == "all_to_all":
            return torch.cat([of(i)[self.me * self.part:(self.me + 1) * self.part] for i in range(self.n)])
        if self.name == "broadcast":
            return of(self.n - 1)
        return of(self.me - 1)

    def wrong(self):
        """The first difference from the expected output, or None."""
        got, want = self.output.cpu(), self.reference()
        if torch.equal(got, want):
            return None
        bad = torch.nonzero(got != want).flatten()
        first = bad[0].item()
        return (f"{len(bad)} of {len(want)} elements are wrong, from {first} to {bad[-1].item()}: "
                f"[{first}] is {got[first].item()}, not {want[first].item()}")


def check(what, groups):
    for ranks, group in groups:
        if RANK not in ranks:
            continue
        o = Operation(what["operation"], what["bytes"], what["dtype"], ranks, group)
        say("doing", what=f"check of {o.name}, {o.bytes} bytes, {what['dtype']}, ranks {ranks}")
        o.fill()
        o.run()
        torch.cuda.synchronize()
        problem = o.wrong()
        say("check", operation=o.name, bytes=o.bytes, dtype=what["dtype"], ranks=ranks, problem=problem or "")


def agree(store, key, value):
    """The value of rank 0, at every rank, without NCCL."""
    if RANK == 0:
        store.set(key, json.dumps(value))
    return json.loads(store.get(key))


# Delay of a GPU per queued collective: longer than Python takes to queue it, about 0.1 ms.
CYCLES_EACH = 200_000


def measure(what, ranks, store, key):
    o = Operation(what["operation"], what["bytes"], what.get("dtype", "float32"), ranks)
    say("doing", what=f"timing {o.name}, {o.bytes} bytes")
    o.reserve()

    def batch(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if what.get("queued"):
            torch.cuda._sleep(CYCLES_EACH * calls)
            o.run()  # all ranks begin together
        start.record()
        for _ in range(calls):
            o.run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / calls  # microseconds

    batch(3)  # connections, and the clocks
    once = batch(3)
    # Batches of equal length, as many as fit into the time.
    share = what["seconds"] * 1e6 / 7
    calls = agree(store, key, int(max(1, min(share / once, 50 if what.get("queued") else 2000))))
    times = [batch(calls) for _ in range(7)]
    median = statistics.median(times)
    say("rate", operation=o.name, bytes=o.bytes, queued=what.get("queued", False), microseconds=median, min=min(times), max=max(times), calls=7 * calls,
        algorithm=o.bytes / median / 1e3, bus=o.bytes / median / 1e3 * o.FACTORS[o.name](o.n))


def endless(ranks):
    """Collectives until an error of NCCL, after which PyTorch's watchdog ends the process."""
    o = Operation("all_reduce", 64 << 20, "float32", ranks)
    o.reserve()
    o.run()
    torch.cuda.synchronize()
    say("running")
    while True:
        o.run()
        torch.cuda.synchronize()


def train(what):
    """A small transformer, data parallel: losses, and the longest step. With graphs a step
    is captured, with its collectives, and replayed."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True, warn_only=True)
    width, vocabulary, length = 512, 1024, 128
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), torch.nn.TransformerEncoder(layer, 4),
                                torch.nn.Linear(width, vocabulary)).cuda()
    graphs = what.get("graphs", False)
    if not graphs:
        model = DistributedDataParallel(model, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator(device="cuda").manual_seed(RANK)
    tokens = torch.zeros(8, length + 1, dtype=torch.int64, device="cuda")

    def once():
        out = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=not graphs)
        loss.backward()
        if graphs:  # what DistributedDataParallel does
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= WORLD
        optimizer.step()
        return loss.detach()

    def next_tokens():
        tokens.copy_(torch.randint(vocabulary, tokens.shape, device="cuda", generator=generator))

    step = once
    if graphs:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                next_tokens()
                once()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Not "global": PyTorch's own thread asks CUDA about earlier collectives meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = once()

        def step():
            graph.replay()
            return captured

    losses, longest, begun = [], 0.0, time.monotonic()
    for number in range(what["steps"]):
        start = time.monotonic()
        sleeps = what.get("sleep", 0) and number == what["sleep_at"]
        if sleeps and RANK == WORLD - 1:
            say("doing", what=f"sleeping for {what['sleep']} s")
            time.sleep(what["sleep"])
        next_tokens()
        losses.append(step().item())
        if number > 5 and not sleeps:
            longest = max(longest, time.monotonic() - start)
        if number % 100 == 0:
            say("doing", what=f"step {number} of {what['steps']}")
    say("trained", steps=what["steps"], losses=losses[::max(len(losses) // 50, 1)] + losses[-1:], longest_ms=longest * 1e3,
        seconds=time.monotonic() - begun)


def main():
    job = json.loads(sys.argv[1])
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    device = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums each time
    say("ready", torch=torch.__version__, nccl=".".join(str(n) for n in torch.cuda.nccl.version()), gpu=torch.cuda.get_device_name(device),
        pid=os.getpid())
    # The harness ends hanging ranks; NCCL reports its errors without a limit here.
    limit = datetime.timedelta(seconds=max(job["limit"], 30))
    # torchrun has a store at this address.
    serves = RANK == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, serves, timeout=limit)
    dist.init_process_group("nccl", timeout=limit, store=dist.PrefixStore("nccl", store), rank=RANK, world_size=WORLD,
                            device_id=torch.device("cuda", device))
    everybody = list(range(WORLD))
    say("doing", what="the first collective")
    first = torch.ones(1, device="cuda")
    dist.all_reduce(first)
    torch.cuda.synchronize()
    if first.item() != WORLD:
        raise RuntimeError(f"1 from each of {WORLD} ranks adds up to {first.item()}")
    say("connected")
    groups = [(everybody, None)]
    for ranks in job.get("groups", []):
        groups.append((ranks, dist.new_group(ranks)))
    for i, what in enumerate(job.get("rates", [])):
        measure(what, everybody, store, f"calls-{i}")
    for what in job.get("checks", []):
        check(what, groups)
    if "train" in job:
        train(job["train"])
    if job.get("endless"):
        endless(everybody)
    torch.cuda.synchronize()
    say("done")
    sys.stdin.read()  # until the harness lets the rank end: it inspects the relay meanwhile
    dist.destroy_process_group()


try:
    main()
except BaseException as e:  # includes exceptions of PyTorch after an error of NCCL
    say("failed", error=f"{type(e).__name__}: {e}")
    raise
