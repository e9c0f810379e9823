"""Runs commands of this repository as `python -m MODULE ARGS` would, in forks of one process that has loaded the libraries."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DRIVER = """
import contextlib, io, json, os, runpy, sys, traceback
import cispo_jax.trainer, cispo_jax.building, tensorflow_datasets, grain  # imported once, no backend is started
results = []
for module, *argv in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                sys.argv = [module, *argv]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as stop:
                code = stop.code or 0
            except BaseException:
                traceback.print_exc()
                code = 1
        with os.fdopen(write, "w") as pipe:
            json.dump([code, out.getvalue()[-20000:], err.getvalue()[-8000:]], pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        results.append(json.loads(pipe.read() or '[1, "", "died"]'))
    os.waitpid(child, 0)
json.dump(results, sys.stdout)
"""


def run(*commands: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each [module, argument, ...], one after the other, on one device."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
