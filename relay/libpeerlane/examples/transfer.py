#!/usr/bin/env python3
"""Two programs that exchange GPU memory through their relays, by ctypes alone:

    transfer.py SOCKET GPU receive BYTES COUNT SEED         prints a handle, then receives
    transfer.py SOCKET GPU send HANDLE BYTES COUNT SEED

SOCKET is the relay's, "-" for the usual one; GPU is a UUID, "-" for the first. COUNT
messages of BYTES each cross, at once; their contents are made of SEED, and the receiver
checks every byte. transfer.c is the same in C, and each talks to the other.

LIBPEERLANE names the library, if it is not where the loader looks; PEERLANE_CUDA_LIBRARY
one in place of libcuda.so.1, such as Peerlane's simulator.
"""

import os
import sys
from ctypes import (CDLL, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint,
                    c_uint8, c_uint32, c_uint64, c_void_p, create_string_buffer)

MIB = 1 << 20


class GPU(Structure):  # peerlane_gpu, CUuuid
    _fields_ = [("bytes", c_uint8 * 16)]


class Handle(Structure):  # peerlane_handle
    _fields_ = [("bytes", c_uint8 * 128)]


class Allocation(Structure):  # struct peerlane_allocation
    _fields_ = [("fd", c_int), ("kind", c_uint32), ("bytes", c_uint64), ("offset", c_uint64),
                ("length", c_uint64), ("reserved", c_uint64 * 4)]


class Options(Structure):  # struct peerlane_options
    _fields_ = [("tag", c_uint64), ("context", c_uint64), ("flags", c_uint32), ("reserved", c_uint32),
                ("after_timeline", c_uint32), ("signal_timeline", c_uint32),
                ("after_value", c_uint64), ("signal_value", c_uint64)]


# Every argument has a type: what has none is an int to ctypes, and cut to 32 bits.
lib = CDLL(os.environ.get("LIBPEERLANE", "libpeerlane.so.0"))
lib.peerlane_error.restype = c_char_p
lib.peerlane_close.restype = None
for name, arguments in {
    "peerlane_gpu_parse": [c_char_p, POINTER(GPU)],
    "peerlane_dial": [c_char_p, POINTER(GPU), c_uint, c_int, POINTER(c_void_p)],
    "peerlane_close": [c_void_p],
    "peerlane_export": [c_void_p, POINTER(Allocation), c_uint, POINTER(GPU), c_uint32, POINTER(c_uint32)],
    "peerlane_unexport": [c_void_p, c_uint32],
    "peerlane_listen": [c_void_p, POINTER(GPU), POINTER(c_uint32), POINTER(Handle)],
    "peerlane_accept": [c_void_p, c_uint32, c_int, POINTER(c_uint32)],
    "peerlane_connect": [c_void_p, POINTER(GPU), POINTER(Handle), POINTER(c_uint32)],
    "peerlane_disconnect": [c_void_p, c_uint32],
    "peerlane_send": [c_void_p, c_uint32, c_uint32, c_uint64, c_uint64, POINTER(Options), POINTER(c_uint64)],
    "peerlane_receive": [c_void_p, c_uint32, c_uint32, c_uint64, c_uint64, POINTER(Options), POINTER(c_uint64)],
    "peerlane_wait": [c_void_p, c_uint64, c_int, POINTER(c_uint64)],
}.items():
    getattr(lib, name).argtypes = arguments


def check(status, what):
    if status:
        sys.exit(f"{what}: {lib.peerlane_error().decode()} (status {status})")


# --- the little of CUDA that it needs; with PyTorch or cuda-python it is theirs ---

class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(Structure):  # CUmemAllocationProp
    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", Location),
                ("windows", c_void_p), ("flags", c_uint8 * 8)]


class Access(Structure):  # CUmemAccessDesc
    _fields_ = [("location", Location), ("flags", c_int)]


cuda = CDLL(os.environ.get("PEERLANE_CUDA_LIBRARY") or "libcuda.so.1")
for name, arguments in {
    "cuMemCreate": [POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64],
    "cuMemExportToShareableHandle": [POINTER(c_int), c_uint64, c_int, c_uint64],
    "cuMemAddressReserve": [POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(Access), c_size_t],
    "cuMemRelease": [c_uint64],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_char_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_char_p, c_uint64, c_size_t, c_void_p],
    "cuStreamSynchronize": [c_void_p],
}.items():
    getattr(cuda, name).argtypes = arguments


def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    if result:
        sys.exit(f"{name}: CUDA error {result}")


def use_gpu(wanted):
    """A context and a stream on the GPU of that UUID, on the first without."""
    n, device, uuid = c_int(), c_int(), GPU()
    call("cuInit", 0)
    call("cuDeviceGetCount", byref(n))
    for i in range(n.value):
        call("cuDeviceGet", byref(device), i)
        call("cuDeviceGetUuid_v2", byref(uuid), device)
        if wanted is None or bytes(wanted) == bytes(uuid):
            context, stream = c_void_p(), c_void_p()
            call("cuCtxCreate_v2", byref(context), 0, device)
            call("cuStreamCreate", byref(stream), 1)
            return device.value, uuid, stream
    sys.exit("no such GPU here")


def allocate(device, size):
    """VMM memory: its address, and a descriptor to export it by."""
    handle, address, fd = c_uint64(), c_uint64(), c_int()
    properties = Properties(type=1, handle_types=1, location=Location(1, device))
    call("cuMemCreate", byref(handle), size, byref(properties), 0)
    call("cuMemExportToShareableHandle", byref(fd), handle, 1, 0)
    call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
    call("cuMemMap", address, size, 0, handle, 0)
    call("cuMemSetAccess", address, size, byref(Access(Location(1, device), 3)), 1)
    call("cuMemRelease", handle)
    return address.value, fd.value


def contents(size, seed, message):
    """Each word says where it belongs."""
    start = seed + message * 0x9E3779B97F4A7C15
    words = (start + i * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF for i in range((size + 7) // 8))
    return b"".join(w.to_bytes(8, "little") for w in words)[:size]


def main():
    sends = len(sys.argv) == 8 and sys.argv[3] == "send"
    if not sends and not (len(sys.argv) == 7 and sys.argv[3] == "receive"):
        sys.exit(__doc__)
    socket = None if sys.argv[1] == "-" else sys.argv[1].encode()
    size, count, seed = map(int, sys.argv[-3:])
    wanted = None
    if sys.argv[2] != "-":
        wanted = GPU()
        check(lib.peerlane_gpu_parse(sys.argv[2].encode(), byref(wanted)), "the GPU")

    device, gpu, stream = use_gpu(wanted)
    room = (size * count // (2 * MIB) + 1) * 2 * MIB
    address, fd = allocate(device, room)

    session, memory, connection = c_void_p(), c_uint32(), c_uint32()
    check(lib.peerlane_dial(socket, byref(gpu), 1, -1, byref(session)), "dialing")
    check(lib.peerlane_export(session, byref(Allocation(fd=fd, bytes=room)), 1, byref(gpu), 0, byref(memory)), "exporting")

    if sends:
        handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[4]))
        check(lib.peerlane_connect(session, byref(gpu), byref(handle), byref(connection)), "connecting")
        everything = b"".join(contents(size, seed, i) for i in range(count))
        call("cuMemcpyHtoDAsync_v2", address, everything, len(everything), stream)
        call("cuStreamSynchronize", stream)
    else:
        listener, handle = c_uint32(), Handle()
        check(lib.peerlane_listen(session, byref(gpu), byref(listener), byref(handle)), "listening")
        print(bytes(handle).hex(), flush=True)
        check(lib.peerlane_accept(session, listener, -1, byref(connection)), "accepting")

    post = lib.peerlane_send if sends else lib.peerlane_receive
    operations = []
    for i in range(count):
        operation = c_uint64()
        check(post(session, connection, memory, i * size, size, byref(Options(tag=i)), byref(operation)), "posting")
        operations.append(operation)
    for operation in operations:
        moved = c_uint64()
        check(lib.peerlane_wait(session, operation, -1, byref(moved)), "a message")
        if moved.value != size:
            sys.exit(f"{moved.value} bytes of {size}")

    if not sends:
        got = create_string_buffer(size * count + 1)
        call("cuMemcpyDtoHAsync_v2", got, address, size * count, stream)
        call("cuStreamSynchronize", stream)
        for i in range(count):
            if got.raw[i * size:(i + 1) * size] != contents(size, seed, i):
                sys.exit(f"message {i} arrived wrong")
    print(f"{'sent' if sends else 'received'} {count} messages of {size} bytes")
    check(lib.peerlane_disconnect(session, connection), "disconnecting")
    check(lib.peerlane_unexport(session, memory), "unexporting")
    lib.peerlane_close(session)


main()
