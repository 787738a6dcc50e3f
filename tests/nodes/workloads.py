"""What people have in their notebooks: a cell run before the save, a cell run after the restore.

The second cell must behave as if nothing had happened: it prints `expected`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A TCP service outside of every kernel, on the node where the first cells run.
ECHO_PORT = 7007


@dataclass(frozen=True)
class Workload:
    """One notebook. ``name`` is the test's id, ``kernel`` the kernelspec's name."""

    name: str
    before: str
    after: str
    expected: str
    kernel: str = "python3"


WORKLOADS = [
    Workload("plain", "x = 41", "print(x + 1)", "42"),
    Workload(
        "r",
        "x <- 41; saveRDS(x, kept <- tempfile())",
        "cat(readRDS(kept) + x - 40)",
        "42",
        kernel="ir",
    ),
    Workload(
        "torch_training",
        """
import torch

def training():
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        loss = model(torch.randn(64, 512)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()

run = training()
losses = [next(run) for _ in range(5)]
""",
        """
losses += [next(run) for _ in range(5)]
uninterrupted = training()
print(losses == [next(uninterrupted) for _ in range(10)])
""",
        "True",
    ),
    Workload(
        "dataloader",
        """
from torch.utils.data import DataLoader
loader = DataLoader(list(range(100)), batch_size=10, num_workers=2, persistent_workers=True)
batches = iter(loader)
first = next(batches)
""",
        "print(next(batches).tolist()[0], len(list(batches)))",
        "10 8",
    ),
    Workload(
        "threads",
        """
import threading, time
n = 0
def work():
    global n
    while True:
        n += 1
        time.sleep(.01)
threading.Thread(target=work, daemon=True).start()
time.sleep(.2)
""",
        """
a, deadline = n, time.monotonic() + 20
while n == a and time.monotonic() < deadline:
    time.sleep(.01)
print(n > a)
""",
        "True",
    ),
    Workload(
        "asyncio_task",
        """
import asyncio
k = 0
async def tick():
    global k
    while True:
        k += 1
        await asyncio.sleep(.01)
task = asyncio.ensure_future(tick())
await asyncio.sleep(.1)
""",
        """
a = k
for _ in range(2000):
    if k > a:
        break
    await asyncio.sleep(.01)
print(k > a, task.done())
""",
        "True False",
    ),
    Workload(
        "timer",
        "import threading, time\nfired = threading.Event()\nt0 = time.monotonic()\n"
        "threading.Timer(8, fired.set).start()",
        "print(fired.wait(30), 8 <= time.monotonic() - t0 < 300)",
        "True True",
    ),
    Workload(
        "child",
        "import subprocess\n"
        "p = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)",
        "p.stdin.write(b'hi\\n'); p.stdin.flush(); print(p.stdout.readline())",
        "b'hi\\n'",
    ),
    Workload(
        "shell_pipeline",
        "import subprocess\n"
        "p = subprocess.Popen('while read x; do echo $((x + base)); done | sed -u s/^/=/',\n"
        "    shell=True, text=True, bufsize=1, env={'base': '40'},\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print('1', file=p.stdin, flush=True); p.stdout.readline()",
        "print('2', file=p.stdin, flush=True); print(p.stdout.readline())\n"
        "p.stdin.close(); print(p.wait(10))",
        "=42\n\n0",
    ),
    Workload(
        "daemonised_child",
        """
import os, subprocess
r, w = os.pipe()
command = f"(setsid sh -c 'read x < /proc/self/fd/{r}; echo got $x > daemon.txt' &)"
subprocess.run(command, shell=True, pass_fds=[r])
""",
        """
import time
os.write(w, b'mail\\n')
for _ in range(1000):
    if os.path.exists('daemon.txt') and (got := open('daemon.txt').read()):
        break
    time.sleep(.02)
print(got)
""",
        "got mail",
    ),
    Workload(
        "pool",
        "import multiprocessing as mp\n"
        "pool = mp.get_context('fork').Pool(2); first = pool.map(abs, [-1, -2])",
        "print(pool.map(abs, [-3, -4]))",
        "[3, 4]",
    ),
    Workload(
        "spawned_executor",
        "import multiprocessing as mp\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "pool = ProcessPoolExecutor(1, mp_context=mp.get_context('spawn'))\n"
        "first = pool.submit(pow, 2, 3).result(60)",
        "print(pool.submit(pow, 2, 5).result(60))",
        "32",
    ),
    Workload(
        "loky",
        "from joblib import Parallel, delayed\n"
        "first = Parallel(n_jobs=2)(delayed(abs)(i) for i in [-1, -2])",
        "print(Parallel(n_jobs=2)(delayed(abs)(i) for i in [-3, -4]))",
        "[3, 4]",
    ),
    Workload(
        "dask",
        "from dask.distributed import Client, LocalCluster\n"
        "cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)\n"
        "c = Client(cluster); first = c.submit(sum, [1, 2]).result(timeout=60)",
        "print(c.submit(sum, [3, 4]).result(timeout=20))",
        "7",
    ),
    Workload(
        "open_tmp_file",
        "f = open('/tmp/notes.txt', 'w+'); f.write('abc'); f.flush()",
        "f.write('d'); f.seek(0); print(f.read())",
        "abcd",
    ),
    Workload(
        "log_file",
        "import logging\nlog = logging.getLogger('work')\n"
        "log.addHandler(logging.FileHandler('/var/tmp/work.log')); log.warning('first')",
        "log.warning('second'); print(open('/var/tmp/work.log').read())",
        "first\nsecond",
    ),
    Workload(
        "working_folder_in_tmp",
        "import os, tempfile\nd = tempfile.mkdtemp(); os.chdir(d); f = open('here.txt', 'w')",
        "f.write('x'); f.close(); print(os.getcwd() == d, os.listdir('.'))",
        "True ['here.txt']",
    ),
    Workload(
        "library_in_tmp",
        """
import ctypes, ctypes.util, glob, shutil, zlib
source = glob.glob('/lib/*/libz.so.1')[0]
shutil.copy(source, '/tmp/libmine.so')
lib = ctypes.CDLL('/tmp/libmine.so')
""",
        "print(lib.crc32(0, b'data', 4) & 0xffffffff == zlib.crc32(b'data'))",
        "True",
    ),
    Workload(
        "memmap",
        "import numpy as np\n"
        "mm = np.memmap('/tmp/mm.bin', dtype='f4', mode='w+', shape=(1000,)); mm[:] = 1",
        "mm[0] = 5; mm.flush(); print(mm.sum(), np.fromfile('/tmp/mm.bin', dtype='f4').sum())",
        "1004.0 1004.0",
    ),
    Workload(
        "unlinked_file",
        "import tempfile\nf = tempfile.TemporaryFile(); f.write(b'z' * 5_000_000); f.flush()",
        "f.seek(0); print(len(f.read()))",
        "5000000",
    ),
    Workload(
        "locked_file",
        "import fcntl\nf = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
        "import subprocess\nprint(subprocess.run(['flock', '-n', 'lock', 'true']).returncode)",
        "1",
    ),
    Workload(
        "shared_memory",
        "from multiprocessing import shared_memory\n"
        "s = shared_memory.SharedMemory(create=True, size=1000); s.buf[0] = 7",
        "again = shared_memory.SharedMemory(s.name); print(s.buf[0], again.buf[0]); s.unlink()",
        "7 7",
    ),
    Workload(
        "memfd_eventfd",
        "import ctypes, mmap, os\nm = os.memfd_create('m'); os.write(m, b'memory')\n"
        "libc = ctypes.CDLL(None); e = libc.eventfd(5, 0)",
        "os.lseek(m, 0, 0); print(os.read(m, 6), int.from_bytes(os.read(e, 8), 'little'))",
        "b'memory' 5",
    ),
    Workload(
        "sockets_inside",
        """
import selectors, socket
a, b = socket.socketpair()
listener = socket.create_server(('127.0.0.1', 0))
c = socket.create_connection(listener.getsockname()); d, _ = listener.accept()
selector = selectors.DefaultSelector(); selector.register(d, selectors.EVENT_READ)
""",
        "a.sendall(b'pair'); c.sendall(b'tcp'); ready = selector.select(10)\n"
        "print(b.recv(4), d.recv(3), len(ready))",
        "b'pair' b'tcp' 1",
    ),
    Workload(
        "outside_tcp",
        f"import socket\nc = socket.create_connection(('127.0.0.1', {ECHO_PORT}))\n"
        "c.sendall(b'x'); assert c.recv(1) == b'x'",
        "try:\n    c.sendall(b'x'); c.recv(1); print('open')\nexcept OSError:\n    print('closed')",
        "closed",
    ),
    Workload(
        "pandas",
        "import pandas as pd\n"
        "df = pd.DataFrame({'k': list('abab'), 'v': range(4)}); groups = df.groupby('k')",
        "print(groups.v.sum().to_dict())",
        "{'a': 2, 'b': 4}",
    ),
    Workload(
        "sqlite",
        "import sqlite3\ndb = sqlite3.connect('/tmp/work.db')\n"
        "db.execute('create table t (x)'); db.execute('insert into t values (41)')",
        "db.execute('update t set x = x + 1'); db.commit(); print(*db.execute('select x from t'))",
        "(42,)",
    ),
    Workload(
        "matplotlib",
        "%matplotlib inline\nimport matplotlib.pyplot as plt\n"
        "fig, ax = plt.subplots(); line, = ax.plot([1, 2, 3]); plt.close(fig)",
        "ax.plot([3, 2, 1]); fig.canvas.draw(); print(len(ax.lines)); fig",
        "2\n<Figure size 640x480 with 1 Axes>",
    ),
    Workload(
        "ipywidgets",
        "import ipywidgets as w\nseen = []\ns = w.IntSlider(value=3)\n"
        "s.observe(lambda change: seen.append(change.new), 'value')",
        "s.value = 7; print(seen, s.comm is not None, s.model_id in w.Widget.widgets\n"
        "    if hasattr(w.Widget, 'widgets') else True)",
        "[7] True True",
    ),
    Workload(
        "generator_and_random",
        "import random\nimport numpy as np\n"
        # Not the module's own generator: IPython takes from it for each page that connects.
        "own = random.Random(1); rng = np.random.default_rng(1)\n"
        "g = (i * i for i in range(100)); head = [next(g), next(g)]\n"
        "expected = (random.Random(1).random(), np.random.default_rng(1).random())",
        "print(next(g), (own.random(), rng.random()) == expected)",
        "4 True",
    ),
    Workload(
        "signal_handler",
        "import os, signal\ngot = []\n"
        "handler = signal.signal(signal.SIGUSR1, lambda *a: got.append(a[0]))",
        "os.kill(os.getpid(), signal.SIGUSR1); print([int(s) for s in got] == [signal.SIGUSR1])",
        "True",
    ),
]
