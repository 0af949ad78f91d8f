"""Published workloads, and which mode was faster.

Nothing here is measured by us. RLinf is Yu et al., OSDI 2026, arXiv:2509.15965:
figures are numbered as there; bars and lines are read off the vector graphics
that its authors keep at github.com/RLinf/misc, recipes are those of
github.com/RLinf/RLinf, examples/reasoning and examples/embodiment. Sizes of
models are those of the config.json that each is published with.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Model:
  """A transformer.

  Attributes:
    parameters: all of them.
    active: of those, the ones that a token uses.
    L: layers.
    D: width.
    H: query heads.
    K: heads of keys and values.
    W: width of a head.
  """

  parameters: float
  active: float
  L: int
  D: int
  H: int
  K: int
  W: int = 128


QWEN_1_5B = Model(1.54e9, 1.54e9, 28, 1536, 12, 2)
QWEN_7B = Model(7.62e9, 7.62e9, 28, 3584, 28, 4)
QWEN_14B = Model(14.8e9, 14.8e9, 48, 5120, 40, 8)
QWEN3_30B_A3B = Model(30.5e9, 3.3e9, 48, 2048, 32, 4)
OPENVLA_7B = Model(
  7.54e9, 7.54e9, 32, 4096, 32, 32
)  # Llama 2 and two encoders.


@dataclasses.dataclass(frozen=True)
class Case:
  """An experiment of the paper on some numbers of devices.

  Attributes:
    name: for people.
    flow: 'grpo', 'grpo without inference', 'ppo' or 'robot'.
    model: that learns; of PPO twice, as actor and as critic.
    devices: that it was run on.
    rows: sequences of a batch on each, or environments.
    group_size: sequences that are compared with each other.
    tokens: of a sequence in the mean, prompt included.
    max_tokens: of a sequence.
    faster: the mode that was faster on each, of those that were tried.
    tried: those modes.
    speedup: speed of the fastest other mode over temporal, on each; None where
      the paper says which and not by how much.
    seconds: of an iteration in temporal mode on each; None where the
      paper has no such number, nor tokens or steps to divide by its throughput.
    source: where it says so.
    env: the environment of a robot.
  """

  name: str
  flow: str
  model: Model
  devices: tuple[int, ...]
  rows: tuple[int, ...]
  group_size: int
  tokens: float
  max_tokens: int
  faster: tuple[str, ...]
  tried: tuple[str, ...]
  speedup: tuple[float | None, ...]
  seconds: tuple[float | None, ...]
  source: str
  env: str = ''


TWO = 'temporal', 'spatial'
THREE = 'temporal', 'spatial', 'hybrid'

# Tokens of a sequence in the mean: tokens a second × seconds ÷ sequences.
GRPO_TOKENS = 118e3 * 1062 / (512 * 32)  # Figures 8, 9: 7B, 64 devices.
PPO_TOKENS = 12.5e3 * 27.6 / 256  # Figures 10, 11: 7B, 32 devices.
MOE_TOKENS = 14.2e3 * 1009 / 1536  # Figures 12, 13: 32 devices.

CASES = (
  Case(
    'GRPO, Qwen2.5-7B',
    'grpo',
    QWEN_7B,
    (64, 128, 256),
    # 512 prompts, section 5.1.1; 32 answers each, qwen2.5-7b-grpo-megatron.
    (512 * 32,) * 3,
    32,
    GRPO_TOKENS,
    28672,
    ('temporal',) * 3,
    TWO,
    (None,) * 3,
    (1062, 625, 380),  # Figure 9.
    'section 5.1.1: spatial is 44.3 to 68.6 % slower than veRL, which temporal '
    'outdoes (figure 8)',
  ),
  *(
    Case(
      f'PPO, Qwen2.5-{size}',
      'ppo',
      model,
      devices,
      # "256 to 1024 depending on GPU count": taken to double with the count.
      (256, 512, 1024),
      1,
      PPO_TOKENS,
      12288,
      ('spatial',) * 3,
      TWO,
      speedup,
      seconds,
      'section 5.1.1, figure 10',
    )
    for size, model, devices, speedup, seconds in (
      ('1.5B', QWEN_1_5B, (16, 32, 64), (1.398, 1.194, 1.186), (None,) * 3),
      # Figure 11. What of 7B is not in its text is read off figure 10.
      ('7B', QWEN_7B, (32, 64, 128), (1.38, 1.45, 1.19), (27.6, None, None)),
      ('14B', QWEN_14B, (64, 128, 256), (1.21, 1.18, 1.26), (None,) * 3),
    )
  ),
  Case(
    'GRPO, Qwen3-30B-A3B',
    'grpo without inference',
    QWEN3_30B_A3B,
    (32, 64, 128),
    (1536,) * 3,
    16,  # qwen3-30b-grpo-megatron.
    MOE_TOKENS,
    20480,
    ('spatial', 'spatial', 'temporal'),
    TWO,
    (1.312, 1.072, 0.93),
    (1009, 563, 391),  # Figure 13, and figure 12 for 64 and 128.
    'section 5.1.1, figure 12',
  ),
  Case(
    'PPO, OpenVLA, ManiSkill',
    'robot',
    OPENVLA_7B,
    (8, 16, 32),
    (256,) * 3,
    1,
    293,  # 256 patches, 30 of an instruction, 7 of an action.
    293,
    ('hybrid',) * 3,
    THREE,
    (1.66, 1.52, 1.69),
    (1101, 706, 702),  # 256 × 80 steps at 18.6, 29.0 and 29.2 a second.
    'section 5.1.3, figure 14a',
    'maniskill',
  ),
  Case(
    'GRPO, OpenVLA-OFT, LIBERO',
    'robot',
    OPENVLA_7B,
    (8, 16, 32),
    (512,) * 3,
    8,  # libero_10_grpo_openvlaoft.
    440,  # 256 patches, 128 of an instruction, 56 of eight actions at once.
    440,
    ('temporal',) * 3,
    ('temporal', 'hybrid'),
    (0.77, 0.74, 0.75),
    (860, 441, 240),  # 512 × 64 steps at 38.1, 74.3 and 136.3 a second.
    'section 5.1.3, figure 14b',
    'libero',
  ),
)

# Figure 2b, of 7B on 64 devices: share of responses that are not complete, and
# the seconds after which that is so.
UNFINISHED = (
  (1.0, 0.68), (0.99, 8.1), (0.95, 14.3), (0.9, 19.4), (0.8, 28.7),
  (0.7, 38.5), (0.6, 49.4), (0.5, 59.9), (0.4, 69.6), (0.3, 80.2),
  (0.25, 86.0), (0.2, 92.5), (0.15, 100.2), (0.1, 110.7), (0.05, 126.6),
  (0.03, 137.5), (0.02, 145.7), (0.01, 160.5), (0.005, 175.4),
  (0.001, 215.9), (0.0, 259.5),
)  # fmt: skip

# Figure 3: seconds of a step on one device. Figure 3a, OpenVLA by its batch:
# 0.40, 0.64, 0.90 and 1.15 at 10, 20, 30 and 40 rows. Figure 3b, ManiSkill by
# its environments: 0.80, 0.78, 0.90, 0.91 at as many. Lines through them.
OPENVLA_STEP = 0.1475, 0.0250
MANISKILL_STEP = 0.735, 0.0045
STEPS = {'maniskill': 80, 'libero': 64}  # A batch; section 5.1.3.

# Figure 15 is of 16 devices, by its totals and figure 14: the rollout of LIBERO
# takes 238 s when 512 environments on two nodes take 64 steps. Section 5.1: a
# node has 96 cores, so one for every twelfth of a device.
CORES = 12
LIBERO_ROLLOUT = 238.0
LIBERO_CORE_SECONDS = LIBERO_ROLLOUT * CORES * 16 / (512 * 64)


def lengths(tokens: float, max_tokens: int, rows: int = 4096) -> np.ndarray:
  """Lengths of sequences, spread as figure 2b, [rows].

  Responses are taken to grow at one pace, so that their seconds are spread as
  their tokens; they are scaled to the mean, and end at the maximum.
  """
  share, seconds = np.array(UNFINISHED).T
  middle = (np.arange(rows) + 0.5) / rows
  shape = np.interp(middle, 1 - share, seconds)
  low, high = 0.0, float(max_tokens)
  for _ in range(50):  # The mean of what is cut off grows with the scale.
    scale = (low + high) / 2
    small = np.minimum(shape * scale, max_tokens).mean() < tokens
    low, high = (scale, high) if small else (low, scale)
  return np.clip(np.round(shape * low), 1, max_tokens).astype(int)
