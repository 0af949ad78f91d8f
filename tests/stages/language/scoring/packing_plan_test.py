"""Plans of packed rows, held against an oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stages.language.scoring import packing

GROUP = 4


def ragged(seed, groups=6, group_size=GROUP, P=5, T=7):
  """Tokens of prompts and completions; some completions have none."""
  rng = np.random.default_rng(seed)
  prompt_N = rng.integers(0, P, groups)
  length_B = rng.integers(0, T + 1, groups * group_size)
  length_B[rng.integers(len(length_B))] = T
  return prompt_N, length_B


def first_fit(prompt_N, length_B, capacity):
  """The plan by lists: packed rows of (group, prompt, completion, length)."""
  G = len(length_B) // len(prompt_N)
  members = [range(n * G, n * G + G) for n in range(len(prompt_N))]
  longest = [
    prompt + max(length_B[b] for b in rows)
    for prompt, rows in zip(prompt_N, members, strict=True)
  ]
  sizes, where = [], {}
  for n in sorted(range(len(prompt_N)), key=lambda n: -longest[n]):
    prompt_starts = {}
    for b in sorted(members[n], key=lambda b: -length_B[b]):
      if not length_B[b]:
        continue
      shared = [
        row for row in prompt_starts if sizes[row] + length_B[b] <= capacity
      ]
      if shared:
        row, brings = min(shared), False
      else:
        need = prompt_N[n] + length_B[b]
        room = [i for i, size in enumerate(sizes) if size + need <= capacity]
        if not room:
          sizes.append(0)
        row, brings = (room or [len(sizes) - 1])[0], True
        prompt_starts[row] = sizes[row]
        sizes[row] += prompt_N[n]
      where[b] = row, sizes[row], prompt_starts[row], brings
      sizes[row] += length_B[b]
  return sizes, where


def planned(prompt_N, length_B, capacity, most):
  M = packing.num_rows(len(length_B), most, capacity)
  assign = jax.jit(packing.assign, static_argnums=(2, 3))
  return jax.device_get(
    assign(jnp.asarray(prompt_N), jnp.asarray(length_B), capacity, M)
  )


@pytest.mark.parametrize('capacity', [11, 16, 40])
def test_plan_is_first_fit_decreasing(capacity):
  for seed in range(20):
    prompt_N, length_B = ragged(seed)
    sizes, where = first_fit(prompt_N, length_B, capacity)
    got = planned(prompt_N, length_B, capacity, most=11)
    np.testing.assert_array_equal(got.size[: len(sizes)], sizes)
    assert not got.size[len(sizes) :].any()
    for b, want in where.items():
      assert want == tuple(leaf[b] for leaf in got[:4])
    assert not got.brings_prompt[length_B == 0].any()


@pytest.mark.parametrize('capacity', [11, 21, 22, 50])
def test_no_packed_row_is_overfull_and_every_token_has_a_place(capacity):
  # The longest sequences need the most packed rows.
  for seed in range(10):
    prompt_N, length_B = ragged(seed, P=6, T=6)
    if seed == 0:
      prompt_N[:], length_B[:] = 5, 6
    got = planned(prompt_N, length_B, capacity, most=11)
    taken = np.zeros((len(got.size), capacity), int)
    for b, length in enumerate(length_B):
      row, start = got.row[b], got.start[b]
      taken[row, start : start + length] += 1
      if got.brings_prompt[b]:
        first = got.prompt_start[b]
        taken[row, first : first + prompt_N[b // GROUP]] += 1
      elif length:
        # Another completion of its group has brought the prompt there.
        same = np.arange(len(length_B)) // GROUP == b // GROUP
        brought = same & got.brings_prompt & (got.row == row)
        assert got.prompt_start[brought] == [got.prompt_start[b]]
        assert got.prompt_start[b] + prompt_N[b // GROUP] <= start
    np.testing.assert_array_equal(
      taken, np.arange(capacity) < got.size[:, None]
    )


def test_a_packed_row_without_room_for_the_longest_completion_is_refused():
  with pytest.raises(ValueError, match='have 10 together: set packed_tokens'):
    packing.num_rows(8, 10, 9)
