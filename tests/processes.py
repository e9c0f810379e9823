"""Starts a command as several processes of one run, each with CPU devices of its own, and waits for them."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Processes:
    """`count` processes of `python ARGV --coordinator=... --num_processes=... --process_id=...`, their output in `folder`."""

    def __init__(self, argv, folder, *, count=2, devices=2, environment=None):
        port, self.folder = free_port(), Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        base = {
            **os.environ,
            **(environment or {}),
            "JAX_NUM_CPU_DEVICES": str(devices),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        }
        self.started = []
        for index in range(count):
            flags = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={index}"]
            with self._file(index, "out").open("w") as out, self._file(index, "err").open("w") as err:
                command = [sys.executable, *map(str, argv), *(flags if count > 1 else [])]
                self.started.append(subprocess.Popen(command, cwd=ROOT, env=base, stdout=out, stderr=err))

    def _file(self, index, kind):
        return self.folder / f"process_{index}.{kind}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            process.kill()
            process.wait()

    def wait(self, timeout=600) -> list[int]:
        """The exit codes."""
        deadline = time.monotonic() + timeout
        return [process.wait(max(1, deadline - time.monotonic())) for process in self.started]

    def wait_until(self, ready, timeout=600):
        """Until `ready()`, while all are running."""
        deadline = time.monotonic() + timeout
        while not ready():
            assert all(process.poll() is None for process in self.started), self.errors()
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.05)

    def out(self, index) -> str:
        """What it printed, without the lines of gloo, which are not ours."""
        lines = self._file(index, "out").read_text().splitlines()
        return "\n".join(line for line in lines if "[Gloo]" not in line)

    def err(self, index) -> str:
        return self._file(index, "err").read_text()

    def errors(self) -> str:
        return "\n".join(
            f"--- process {i}\n{self.out(i)[-2000:]}\n{self.err(i)[-4000:]}" for i in range(len(self.started))
        )


def run(argv, folder, **options) -> Processes:
    """Runs it to its end, which must be a good one."""
    with Processes(argv, folder, **options) as processes:
        codes = processes.wait()
        assert codes == [0] * len(codes), (codes, processes.errors())
        return processes
