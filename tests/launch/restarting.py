"""Programs for tests of restarts: text, written into the test's folder. Frameworks only where a training is tested."""

from __future__ import annotations

from tests.launch.programs import LEAVE_PIDS

# A process without a framework keeps a record as one of a training does. `preloaded` waits for the fork server: what
# the processes were asked to tell is gone when it has imported.
RECORDS = """
import os, pathlib, signal, sys, time
from unidist.flight.recorder import open_in_environment, recorder

rank = int(next(os.environ[n] for n in ("RANK", "JAX_PROCESS_ID") if n in os.environ))
restarts = int(os.environ["UNIDIST_RESTARTS"])

def preloaded(limit=150):
    told = pathlib.Path(os.environ["UNIDIST_FLIGHT"], f"rank-{rank}.told")
    deadline = time.monotonic() + limit
    for is_there in (True, False):
        while told.exists() is not is_there:
            assert time.monotonic() < deadline, "nothing was preloaded"
            time.sleep(0.005)

def is_forked():
    return b"what processes are forked from" in pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
"""

# What a program sees of its process. Fails in rank 1, and does not when it was started again.
FACTS = (
    RECORDS
    + """
assert ("numpy" in sys.modules) == bool(restarts)
import faulthandler, inspect, json, random, threading
import numpy as np
import unidist.array

print("to standard output")
print("to standard error", file=sys.stderr)
own = {"UNIDIST_FLIGHT", "UNIDIST_RESTARTS", "UNIDIST_RUN", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"}

def variables(found):
    return {name: value for name, value in found if name not in own}

def is_open(descriptor):
    return os.path.lexists(f"/proc/self/fd/{descriptor}")

def of_proc(name):
    return pathlib.Path("/proc/self", name).read_bytes().rstrip(bytes(1)).decode().split("\\0")

status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
facts = {
    "name": __name__,
    "arguments": [sys.argv, sys.orig_argv, of_proc("cmdline")],
    "path": sys.path,
    "main": [sys.modules["__main__"].__dict__ is globals(), __file__, __spec__ is None],
    "environment": variables(os.environ.items()),
    "shown": variables(one.partition("=")[::2] for one in of_proc("environ")),
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "nice": os.nice(0),
    "input": sys.stdin.read(),
    "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
    "open": sorted(os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(64) if is_open(n)),
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals()) if n < 32],
    "masks": [status[name] for name in ("SigBlk", "SigIgn")],
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "main thread": threading.current_thread() is threading.main_thread(),
    "frames": [frame.function for frame in inspect.stack()],
    "flags": [str(sys.flags), sys.warnoptions, sys._xoptions, faulthandler.is_enabled()],
    "folder": os.getcwd(),
    "mask": os.umask(0o22),
}
facts["drawn"] = [random.random(), float(np.random.random())]
pathlib.Path(f"facts-{rank}-{restarts}.json").write_text(json.dumps(facts))
open_in_environment(rank, 2)
recorder.stepped()
if restarts:
    assert is_forked()
    if rank == 1:
        sys.exit(3)
    time.sleep(60)
preloaded()
if rank == 1:
    raise ValueError("on purpose")
time.sleep(60)
"""
)

# Rank 1 is killed at a step of a training. At its end the same is trained anew in one go, and compared.
TRAINING = (
    RECORDS
    + """
import unidist
unidist.use(os.environ["UNIDIST_BACKEND"])
import keras
import numpy as np

strategy = unidist.DataParallel()
drawn = np.random.default_rng(0)
x, y = drawn.normal(size=(64, 8)).astype("float32"), drawn.normal(size=(64, 1)).astype("float32")

class Fault(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 6 and not restarts:
            preloaded()
        if rank == 1 and self.steps == 7 and not restarts:
            os.kill(os.getpid(), signal.SIGKILL)

def trained(*callbacks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
    return np.concatenate([np.ravel(value) for value in model.get_weights()])

fault = Fault()
weights = trained(fault, unidist.Checkpoint("checkpoints", every=3))
print("forked", is_forked(), "steps", fault.steps, "difference", float(np.abs(weights - trained()).max()))
"""
)

# The second attempt hangs, with children, and does not listen.
HANGS_LATER = (
    RECORDS
    + LEAVE_PIDS
    + """
open_in_environment(rank, 2)
recorder.stepped()
if not restarts:
    preloaded()
    if rank == 1:
        sys.exit(1)
    time.sleep(600)
assert is_forked()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("folder.txt").write_text(os.environ["UNIDIST_FLIGHT_TEMPORARY"])
if rank == 0:
    pathlib.Path("server.pid").write_text(str(os.getppid()))
leave_pids(rank)
time.sleep(600)
"""
)

# Fails in each attempt after its third step, or with an argument one step further each time.
FAILS_AGAIN = (
    RECORDS
    + """
import traceback

if "further" not in sys.argv and restarts == 1:
    # Before there is a training.
    sys.exit(41)
open_in_environment(rank, 1)
if "further" not in sys.argv and not restarts:
    recorder.committed(1)
recorder.set("resumed", 2 + ("further" in sys.argv) * restarts)
recorder.enter("step")
time.sleep(0.01)
recorder.stepped()
recorder.enter("program")
try:
    raise ValueError(f"in attempt {restarts}")
except ValueError:
    traceback.print_exc()
    sys.exit(40 + restarts)
"""
)
