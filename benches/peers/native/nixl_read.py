"""NIXL: one-sided reads of the server's memory. It polls. UCX_TLS chooses the transport.

Usage: nixl_read.py BYTES MILLISECONDS [ADDRESS]; without an address it serves, and prints `ready ADDRESS`.
"""

import contextlib
import logging
import os
import sys
import time

import numpy

with contextlib.redirect_stdout(sys.stderr):
    from nixl_cu12._api import nixl_agent, nixl_agent_config


def main():
    logging.disable(logging.CRITICAL)
    count, length = int(sys.argv[1]), float(sys.argv[2]) / 1e3
    is_server = len(sys.argv) == 3
    with contextlib.redirect_stdout(sys.stderr):
        agent = nixl_agent("server" if is_server else "client", nixl_agent_config(backends=["UCX"]))
    value = numpy.full(count, 7 if is_server else 1, dtype=numpy.uint8)
    descriptors = [(value.ctypes.data, count, 0)]
    agent.register_memory([(*descriptors[0], "value")], "DRAM")
    own = agent.get_xfer_descs(descriptors, "DRAM")
    if is_server:
        parts = (agent.get_agent_metadata(), agent.get_serialized_descs(own))
        print("ready", ",".join(part.hex() for part in parts), flush=True)
        sys.stdin.read()
        return
    metadata, remote = (bytes.fromhex(part) for part in sys.argv[3].split(","))
    server = agent.add_remote_agent(metadata)
    transfer = agent.initialize_xfer("READ", own, agent.deserialize_descs(remote), server)

    def pull():
        state = agent.transfer(transfer)
        while state == "PROC":
            state = agent.check_xfer_state(transfer)
        if state != "DONE":
            sys.exit(f"a read ended with {state}")

    operations, seconds = timed(pull, length)
    if not (value == 7).all():
        sys.exit("the bytes did not come")
    print(operations, f"{seconds:.9f}", flush=True)
    # Tearing NIXL down after the server has gone may crash.
    os._exit(0)


def timed(operation, length):
    """The same loop as src/plan.rs has."""
    rate = 0.0
    for _ in range(2):
        begin, done = time.perf_counter(), 0
        while done < 2 or time.perf_counter() - begin < length / 8:
            operation()
            done += 1
        rate = done / (time.perf_counter() - begin)
    operations = max(4, int(rate * length))
    begin = time.perf_counter()
    for _ in range(operations):
        operation()
    return operations, time.perf_counter() - begin


if __name__ == "__main__":
    main()
