"""The small programs that the tests start: text, written into the test's folder."""

from __future__ import annotations

LEAVE_PIDS = """
import os, pathlib, subprocess, sys, time

def leave_pids(rank):
    # A child in our group and one that has left it: both must end with us.
    child = subprocess.Popen(["sleep", "600"])
    stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
    for name, pid in (("rank", os.getpid()), ("child", child.pid), ("stray", stray.pid)):
        path = pathlib.Path(f"{name}{rank}.pid")
        path.with_suffix(".part").write_text(str(pid))
        path.with_suffix(".part").rename(path)
"""

TORCH = """
import os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
print("sum", value.item(), "of", dist.get_world_size(), "arguments", sys.argv[1:])
print("name", __name__, os.path.basename(sys.argv[0]), os.environ["UNIDIST_BACKEND"], os.environ["KERAS_BACKEND"])
print("said on standard error", file=sys.stderr)
dist.destroy_process_group()
"""

HOROVOD = """
import os, sys
import torch
import horovod.torch as hvd

hvd.init()
value = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
assert hvd.local_rank() == hvd.rank() % 2 and hvd.local_size() == 2, (hvd.local_rank(), hvd.local_size())
print("sum", value.item(), "of", hvd.size(), "arguments", sys.argv[1:])
print("name", __name__, os.path.basename(sys.argv[0]), os.environ["UNIDIST_BACKEND"], os.environ["KERAS_BACKEND"])
print("said on standard error", file=sys.stderr)
"""

JAX = """
import os, sys
import jax
from unidist.backends.environment import detect

launch = detect()
jax.distributed.initialize(launch.address, launch.process_count, launch.process_index)
from jax.experimental import multihost_utils
values = multihost_utils.process_allgather(jax.numpy.ones(()) * (jax.process_index() + 1.0))
print("sum", float(values.sum()), "of", jax.process_count(), "arguments", sys.argv[1:])
print("devices", jax.local_device_count(), jax.device_count())
print("name", __name__, os.path.basename(sys.argv[0]), os.environ["UNIDIST_BACKEND"], os.environ["KERAS_BACKEND"])
print("said on standard error", file=sys.stderr)
"""

# Rank 1 fails while the others wait for it in a collective.
_FAILS = """
{join}
leave_pids(rank)
{meet}

def inner():
    if "exit" in sys.argv:
        sys.exit(41)
    if "kill" in sys.argv:
        os.kill(os.getpid(), 9)
    if "done" in sys.argv:
        os._exit(0)
    raise ValueError("the cause")

def ends_late(*error):
    sys.__excepthook__(*error)
    {leave}
    time.sleep(2)

if rank == 1:
    if "ends late" in sys.argv:
        sys.excepthook = ends_late
    try:
        inner()
    except ValueError as error:
        raise RuntimeError("on rank 1") from error
if "sleep" in sys.argv:
    time.sleep(600)
{reduce}
"""

TORCH_FAILS = LEAVE_PIDS + _FAILS.format(
    join="""import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()""",
    meet="dist.barrier()",
    leave="dist.destroy_process_group()",
    reduce="dist.all_reduce(torch.ones(1))",
)

HOROVOD_FAILS = LEAVE_PIDS + _FAILS.format(
    join="""import torch
import horovod.torch as hvd
hvd.init()
rank = hvd.rank()""",
    meet="hvd.barrier()",
    leave="hvd.shutdown()",
    reduce="hvd.allreduce(torch.ones(1))",
)

JAX_FAILS = LEAVE_PIDS + _FAILS.format(
    join="""import jax
from unidist.backends.environment import detect

launch = detect()
jax.distributed.initialize(launch.address, launch.process_count, launch.process_index)
from jax.experimental import multihost_utils

rank = launch.process_index""",
    meet='multihost_utils.sync_global_devices("all have come")',
    leave="pass",
    reduce="multihost_utils.process_allgather(jax.numpy.ones(()))",
)

# As the others, with no framework: whoever imports one takes seconds. All have come when their ids are there.
PLAIN_FAILS = LEAVE_PIDS + _FAILS.format(
    join="""rank = int(next(os.environ[n] for n in ("RANK", "JAX_PROCESS_ID", "HOROVOD_RANK") if n in os.environ))
count = int(next(os.environ[n] for n in ("WORLD_SIZE", "JAX_NUM_PROCESSES", "HOROVOD_SIZE") if n in os.environ))""",
    meet="""while len(list(pathlib.Path().glob("*.pid"))) < 3 * count:
    time.sleep(0.02)""",
    leave="pass",
    reduce="",
)

# What a module is given.
TELLS = """
import os, sys
print("name", __name__, os.path.basename(sys.argv[0]), os.environ["UNIDIST_BACKEND"], os.environ["KERAS_BACKEND"])
print("arguments", sys.argv[1:])
"""

# No framework: only the launcher is tested. It hangs, with children, and may refuse to be asked.
HANGS = (
    LEAVE_PIDS
    + """
import signal
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = next(os.environ[n] for n in ("RANK", "JAX_PROCESS_ID", "HOROVOD_RANK") if n in os.environ)
leave_pids(rank)
print("ready")
time.sleep(600)
"""
)

# Ends well and leaves a child behind.
LEAVES_A_CHILD = (
    LEAVE_PIDS
    + """
leave_pids(next(os.environ[n] for n in ("RANK", "JAX_PROCESS_ID", "HOROVOD_RANK") if n in os.environ))
"""
)

PRINTS = """
import os, sys, time
rank = next(os.environ[n] for n in ("RANK", "JAX_PROCESS_ID", "HOROVOD_RANK") if n in os.environ)
for k in range(200):
    sys.stdout.write(f"{rank} says ")
    sys.stdout.flush()
    sys.stdout.write(f"{k} grüße\\n")
os.write(1, b"not text: \\xff\\n")
sys.stdout.write("a last line without an end")
"""

# A training that saves, in which a step takes a twentieth of a second. "asks itself": rank 1, once.
SAVES = """
import os, pathlib, signal, sys, time
import unidist

unidist.use()
import keras
import numpy as np

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(120, 4)).astype("float32"), rng.normal(size=(120, 1)).astype("float32")
with unidist.DataParallel().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")

class Steps(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            pathlib.Path(f"{unidist.process_index()}.ready").touch()
            if "asks itself" in sys.argv and not int(os.environ["UNIDIST_RESTARTS"]) and unidist.process_index():
                os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)

history = model.fit(x, y, batch_size=2, epochs=1, verbose=0, callbacks=[Steps(), unidist.Checkpoint("steps", 1000)])
print("came to", history.history["loss"], flush=True)
"""
