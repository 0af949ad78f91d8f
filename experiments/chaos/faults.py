"""Faults that happen to a run, by the system's own means."""

import contextlib
import pathlib
import random
import resource
import signal
import struct
import subprocess
import time

import psutil

from rlinf_jax.system import exit_watcher

PAUSE = 60.0  # Seconds for which a process is stopped.
CLOCK = 'clock'  # The seconds that clock.c adds, beside the run folder.


def tree(process: psutil.Process) -> list[psutil.Process]:
  """A process and its descendants, but for the one that tells of its end."""
  with contextlib.suppress(psutil.NoSuchProcess):
    children = process.children(recursive=True)
    return [process, *(one for one in children if not _watches(one))]
  return []


def _watches(process: psutil.Process) -> bool:
  with contextlib.suppress(psutil.Error):
    return exit_watcher.__file__ in process.cmdline()
  return False


def kill_driver(process, folder: pathlib.Path, rng: random.Random):
  process.kill()


def kill_child(process, folder: pathlib.Path, rng: random.Random):
  """Kills one process that the run started, or the run where it has none."""
  children = tree(process)[1:]
  (rng.choice(children) if children else process).kill()


def kill_children(process, folder: pathlib.Path, rng: random.Random):
  """Kills all processes that the run started."""
  for one in tree(process)[1:] or [process]:
    with contextlib.suppress(psutil.NoSuchProcess):
      one.kill()


def kill_everything(process, folder: pathlib.Path, rng: random.Random):
  for one in tree(process):
    with contextlib.suppress(psutil.NoSuchProcess):
      one.kill()


def interrupt(process, folder: pathlib.Path, rng: random.Random):
  process.send_signal(signal.SIGINT)


def terminate(process, folder: pathlib.Path, rng: random.Random):
  process.send_signal(signal.SIGTERM)


def pause(process, folder: pathlib.Path, rng: random.Random):
  """Stops one of the run's processes for some seconds."""
  one = rng.choice(tree(process) or [process])
  with contextlib.suppress(psutil.NoSuchProcess):
    one.suspend()
    time.sleep(PAUSE)
    one.resume()


def full_disk(process, folder: pathlib.Path, rng: random.Random):
  """Leaves the disk of the run folder a few bytes."""
  used = psutil.disk_usage(str(folder.parent)).used
  _mount('-o', f'remount,size={used + 4096}', str(folder.parent))


def read_only(process, folder: pathlib.Path, rng: random.Random):
  """Forbids to open files of the run folder for writing."""
  if folder.exists():
    _mount('--bind', str(folder), str(folder))
    _mount('-o', 'remount,bind,ro', str(folder))


def file_size(process, folder: pathlib.Path, rng: random.Random):
  """Limits the size of files to one page."""
  _limit(process, resource.RLIMIT_FSIZE, 4096)


def memory(process, folder: pathlib.Path, rng: random.Random):
  """Limits the address space to little more than what is used."""
  _limit(process, resource.RLIMIT_AS, process.memory_info().vms + (8 << 20))


def clock_forward(process, folder: pathlib.Path, rng: random.Random):
  """Sets the time of day one day forward, for processes with `clock`."""
  _set_clock(folder.parent, 24 * 60 * 60)


def clock(folder: pathlib.Path) -> dict[str, str]:
  """Environment of processes whose time of day a file sets, by clock.c."""
  library = folder / 'clock.so'
  source = pathlib.Path(__file__).with_name('clock.c')
  command = ['cc', '-shared', '-fPIC', '-o', str(library), str(source)]
  subprocess.run(command, check=True)
  (folder / CLOCK).touch()
  _set_clock(folder, 0)
  return {'LD_PRELOAD': str(library), 'CHAOS_CLOCK': str(folder / CLOCK)}


def _set_clock(folder: pathlib.Path, seconds: int):
  # In place: processes have the file mapped.
  with (folder / CLOCK).open('r+b') as file:
    file.write(struct.pack('=q', seconds))


def disk(folder: pathlib.Path):
  """Mounts a disk in memory at a folder."""
  folder.mkdir(parents=True, exist_ok=True)
  _mount('-t', 'tmpfs', '-o', 'size=1g', 'chaos', str(folder))


def mend(folder: pathlib.Path):
  """Undoes `full_disk` and `read_only`, for a run folder."""
  # It fails where nothing is mounted at the run folder.
  command = ['umount', '--lazy', '--quiet', str(folder)]
  subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
  _mount('-o', 'remount,size=1g', str(folder.parent))


def _mount(*words: str):
  subprocess.run(['mount', *words], check=True)


def _limit(process, kind: int, value: int):
  for one in tree(process):
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
      resource.prlimit(one.pid, kind, (value, value))


# Faults after which a run can say a last sentence.
SPEAKS = (
  *(kill_child, kill_children, interrupt, terminate),
  *(full_disk, read_only, file_size, memory),
)
ALL = (kill_driver, kill_everything, pause, *SPEAKS)
