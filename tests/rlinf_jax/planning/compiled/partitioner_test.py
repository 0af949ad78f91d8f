"""Warnings that a compiler writes to standard error are read and passed on."""

import os
import subprocess
import sys

from rlinf_jax.planning.compiled import partitioner


def test_warnings_of_the_partitioner_are_kept_and_others_passed_on(capfd):
  line = (
    '[SPMD] Involuntary full rematerialization. The compiler cannot go from '
    'sharding {a} to {b} for HLO operation %x = f32[8,4]{1,0} copy(%y), '
    'metadata={op_name="jit(f)/mul"}.\n'
  )
  with partitioner.captured_warnings() as found:
    os.write(2, (line + 'another line\n').encode())
  assert found == ['f32[8,4] jit(f)/mul']
  assert capfd.readouterr().err == 'another line\n'


def test_what_is_written_before_an_abort_is_shown():
  code = (
    'import os\n'
    'from rlinf_jax.planning.compiled import partitioner\n'
    'with partitioner.captured_warnings():\n'
    "  os.write(2, b'Check failed: n > 0\\n')\n"
    '  os.abort()\n'
  )
  done = subprocess.run([sys.executable, '-c', code], stderr=subprocess.PIPE)
  assert done.returncode < 0 and b'Check failed: n > 0' in done.stderr
