"""Questions about pictures, from files to what a model reads."""

import functools
import json

import jax
import numpy as np
from PIL import Image
import pytest
import transformers
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as pil

import own_data
from rlinf_jax.data import files, picture_files, questions, supervised
from rlinf_jax.prepare import tiny_vision
from stages.language import huggingface, tokens
from stages.models import config as config_lib
from stages.models.vision import patches

SIZES = [(28, 28), (56, 84), (1, 90), (300, 17), (31, 64), (480, 640), (9, 9)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A model, one of text alone, and pictures of several sizes."""
  folder = tmp_path_factory.mktemp('seen')
  tiny_vision.model(folder / 'model')
  own_data.model(folder / 'text')
  rng = np.random.default_rng(0)
  for i, shape in enumerate(SIZES):
    picture(rng, shape).save(folder / f'{i}.png')
  return folder


def picture(rng, shape) -> Image.Image:
  """A picture with smooth and with sharp parts."""
  small = rng.integers(0, 256, (3, 4, 3), np.uint8)
  image = Image.fromarray(small).resize(shape[::-1], Image.Resampling.BILINEAR)
  image = np.array(image)
  image[: shape[0] // 2] ^= rng.integers(0, 256, (1, shape[1], 3), np.uint8)
  return Image.fromarray(image)


def write(path, *rows):
  path.write_text('\n'.join(map(json.dumps, rows)))
  return str(path)


def source(folder, *rows, model='model', **settings):
  path = write(folder / 'rows.jsonl', *({'answer': '1'} | row for row in rows))
  settings = {'batch_size': len(rows), 'prompt_length': 80} | settings
  return questions.questions(
    str(folder / model), train=path, held_out=path, **settings
  )


def batch(source):
  """The held-out problems, in the order of the file."""
  return source.held_out()[0].prompt


@functools.cache
def processor(folder, **limits):
  """The processor of `transformers` with Pillow, as it was published."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  return transformers.Qwen2_5_VLProcessor(
    pil.Qwen2VLImageProcessorPil(**limits),
    tokenizer,
    video_processor=None,
    chat_template=tokenizer.chat_template,
  )


ASKED = {'prompt': 'How tall is the red bar?'}
TWO = {
  'messages': [
    {
      'role': 'user',
      'content': [
        {'type': 'image'},
        {'type': 'text', 'text': 'red '},
        {'type': 'image', 'image': '5.png'},
        {'type': 'text', 'text': 'or blue?'},
      ],
    }
  ],
  'image': '1.png',
}


def test_prompts_are_those_of_transformers(folder, monkeypatch):
  monkeypatch.setattr(
    transformers.Qwen2_5_VLProcessor, 'check_argument_for_proper_class', check
  )
  asked = {'role': 'user', 'content': ASKED['prompt']}
  rows = [{'messages': [asked], 'image': f'{i}.png'} for i in range(len(SIZES))]
  got = batch(source(folder, *rows, TWO, max_pixels=50_000, prompt_length=200))
  reader = processor(str(folder / 'model'), min_pixels=3136, max_pixels=50_000)
  vision = huggingface.load_config(folder / 'model').vision
  for i, row in enumerate([*rows, TWO]):
    names = ['1.png', '5.png'] if row is TWO else [row['image']]
    content = [{'type': 'image'}, {'type': 'text', 'text': ASKED['prompt']}]
    if row is TWO:
      content = TWO['messages'][0]['content']
    text = reader.apply_chat_template(
      [{'role': 'user', 'content': content}], add_generation_prompt=True
    )
    images = [Image.open(folder / name) for name in names]
    want = reader(text=[text], images=images, return_tensors='np')
    own = got.mask[i] > 0
    np.testing.assert_array_equal(got.token[i][own], want['input_ids'][0])
    is_patch = got.pictures.place[i, :, 0] >= 0
    values = patches.normalized(got.pictures.patch[i][is_patch][None], vision)
    of_frames = want['pixel_values'].reshape(-1, 3, 2, 14, 14)
    np.testing.assert_allclose(values[0], of_frames[:, :, 0], atol=1e-6)


def check(self, name, argument):
  """Accepts a processor without one for films, which need torchvision."""
  del self, name, argument


def test_twenty_pictures_are_resized_to_the_bytes_of_transformers():
  rng = np.random.default_rng(1)
  resize = pil.Qwen2VLImageProcessorPil(do_rescale=False, do_normalize=False)
  for _ in range(20):
    shape = tuple(rng.integers(20, 500, 2).tolist())
    image = picture(rng, shape)
    want = resize(image, return_tensors='np')
    rows, columns = 14 * want['image_grid_thw'][0, 1:]
    got = picture_files.resize(np.asarray(image), (rows, columns))
    vision = config_lib.VisionConfig(
      D=8, L=1, H=2, F=8, token=0, full_layers=()
    )
    cut = patches.cut(got, vision)
    of_frames = want['pixel_values'].reshape(-1, 3, 2, 14, 14)[:, :, 0]
    np.testing.assert_array_equal(cut, of_frames.reshape(cut.shape))


def test_a_picture_may_be_named_in_several_ways(folder):
  named = ASKED | {'image': '1.png'}
  text = {'type': 'text', 'text': ASKED['prompt']}
  parts = [{'type': 'image', 'image': '1.png'}, text]
  same = [
    named,
    {'prompt': '<image>' + ASKED['prompt'], 'images': ['1.png']},
    {'messages': [{'role': 'user', 'content': parts}]},
    {
      'messages': [{'role': 'user', 'content': ASKED['prompt']}],
      'images': ['1.png'],
    },
  ]
  want = batch(source(folder, named))
  for row in same:
    got = batch(source(folder, row))
    jax.tree.map(np.testing.assert_array_equal, got, want)
  (read,) = files.read(write(folder / 'one.jsonl', same[1] | {'answer': 1}))
  assert read.question == ASKED['prompt']


def test_parquet_holds_the_bytes_of_pictures(folder):
  pyarrow = pytest.importorskip('pyarrow', reason='Parquet needs pyarrow.')
  from pyarrow import parquet

  content = (folder / '1.png').read_bytes()
  row = ASKED | {'answer': '1', 'images': [{'bytes': content, 'path': None}]}
  path = folder / 'one.parquet'
  parquet.write_table(pyarrow.Table.from_pylist([row]), path)
  got = questions.questions(
    str(folder / 'model'),
    train=str(path),
    held_out=str(path),
    batch_size=1,
    prompt_length=80,
  )
  want = batch(source(folder, ASKED | {'image': '1.png'}))
  jax.tree.map(np.testing.assert_array_equal, batch(got), want)


def test_rows_without_pictures_are_padding(folder):
  rows = ASKED | {'image': '1.png'}, ASKED | {'image': None}
  prompt = batch(source(folder, *rows))
  is_patch = prompt.pictures.place[..., 0] >= 0
  assert is_patch.sum(1).tolist() == [24, 0]
  assert prompt.mask[0].sum() == prompt.mask[1].sum() + 6 + 2
  text_only = source(folder, ASKED, ASKED)
  assert not isinstance(batch(text_only), patches.PicturePrompt)


def test_the_limit_of_tokens_counts_squares(folder, capsys):
  rows = ASKED | {'image': '1.png'}, ASKED | {'image': '5.png'}
  kept = source(folder, *rows, drop_long=True, batch_size=1)
  assert len(batch(kept).mask) == 1
  assert '1 of more than 80 tokens left out' in capsys.readouterr().out
  smaller = source(folder, *rows, max_pixels=28 * 28 * 20)
  assert len(batch(smaller).mask) == 2
  with pytest.raises(ValueError, match=r'line 2 has \d+ tokens and the limit'):
    source(folder, *rows)


def test_examples_and_preferences_have_pictures(folder):
  row = ASKED | {'image': '1.png', 'answer': '3'}
  settings = {'batch_size': 1, 'prompt_length': 80, 'response_length': 4}
  path = write(folder / 'sft.jsonl', row)
  got = supervised.examples(
    str(folder / 'model'), train=path, held_out=path, **settings
  )
  want = batch(source(folder, row))
  (example,) = got.held_out()
  jax.tree.map(np.testing.assert_array_equal, example.prompt, want)
  path = write(folder / 'dpo.jsonl', row | {'chosen': '3', 'rejected': '4'})
  pairs = supervised.preferences(
    str(folder / 'model'), train=path, held_out=path, **settings
  )
  _, pair = pairs.next(pairs.init(0), {})
  for i in range(2):
    one = jax.tree.map(lambda x, i=i: x[i : i + 1], pair.prompt)
    jax.tree.map(np.testing.assert_array_equal, one, want)


def write_pair(tmp_path, colors):
  """Examples with two pictures in files, of these shades of gray."""
  for name, color in zip(('one', 'two'), colors, strict=True):
    Image.new('RGB', (28, 28), (color,) * 3).save(tmp_path / f'{name}.png')
  asked = {'prompt': '<image>red <image>', 'images': ['one.png', 'two.png']}
  return write(tmp_path / 'rows.jsonl', asked | {'answer': '1'})


@pytest.mark.parametrize('make', [questions.questions, supervised.examples])
def test_a_run_does_not_go_on_with_other_pictures(make, folder, tmp_path):
  text = write(folder / 'text.jsonl', ASKED | {'answer': '1'})
  own = {'response_length': 4} if make == supervised.examples else {}

  def made(colors, held_out=text):
    path = write_pair(tmp_path, colors)
    return make(
      str(folder / 'model'),
      train=path,
      held_out=held_out or path,
      batch_size=1,
      prompt_length=80,
      **own,
    )

  begun = made((0, 9)).init(0)
  made((0, 9)).check(begun)
  said = r'rows.jsonl or a picture that it names changed since the run was'
  for colors in ((0, 8), (9, 0)):
    with pytest.raises(ValueError, match=said):
      made(colors).check(begun)
  with pytest.raises(ValueError, match=r'text.jsonl changed since the run'):
    begun = made((0, 9)).init(0)
    write(folder / 'text.jsonl', ASKED | {'answer': '2'})
    made((0, 9)).check(begun)
  begun = made((0, 9), None).init(0)
  with pytest.raises(ValueError, match=said):
    made((0, 8), None).check(begun)


def damaged(folder):
  (folder / 'text.png').write_text('not a picture')
  whole = (folder / '5.png').read_bytes()
  (folder / 'half.png').write_bytes(whole[: len(whole) // 2])


REFUSED = {
  'a missing file': ({'image': 'no.png'}, 'no such file in .* copy it there'),
  'a text': ({'image': 'text.png'}, 'text.png of .* cannot be read'),
  'half a file': ({'image': 'half.png'}, 'half.png of .* cannot be read'),
  'an address': ({'image': 'https://a/b.png'}, 'download it'),
  'a number': ({'image': 3}, "has '3' in place of a picture"),
  'too few places': (
    {'prompt': '<image> red', 'images': ['0.png', '1.png']},
    '2 pictures in a column of their own and 1 places',
  ),
  'too many places': (
    {'prompt': '<image> red <image>', 'image': '0.png'},
    '1 pictures in a column of their own and 2 places',
  ),
  'a place in the text': (
    {'prompt': 'red <|image_pad|>', 'image': '0.png'},
    r"contains '<\|image_pad\|>', a control token of",
  ),
  'a thin picture': ({'image': 'thin.png'}, 'no edge may be over 200 times'),
  'another part': (
    {'messages': [{'role': 'user', 'content': [{'type': 'video'}]}]},
    'a list of parts',
  ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_is_wrong_with_pictures_is_said_with_its_line(folder, name):
  damaged(folder)
  Image.new('RGB', (1, 300)).save(folder / 'thin.png')
  row, said = REFUSED[name]
  row = row if 'messages' in row else ASKED | row
  with pytest.raises(ValueError, match=said) as error:
    source(folder, row)
  assert 'rows.jsonl line 1' in str(error.value)


def test_large_pictures_and_models_of_text_are_refused(folder, monkeypatch):
  row = ASKED | {'image': '5.png'}
  with pytest.raises(
    ValueError, match='text/.* reads text alone: give a model'
  ):
    source(folder, row, model='text/warm_start/model')
  with pytest.raises(ValueError, match='bind CHAT = True'):
    source(folder, row, chat=False)
  with pytest.raises(ValueError, match='max_pixels .* of at least 784'):
    source(folder, row, max_pixels=100)
  monkeypatch.setattr(picture_files, 'MOST_PIXELS', 1000)
  with pytest.raises(ValueError, match='has a picture of 307200 pixels'):
    source(folder, row)
  tokens.load_tokenizer.cache_clear()


def test_pictures_are_turned_as_their_files_say(folder):
  image = Image.fromarray(
    np.arange(56 * 28 * 3).reshape(56, 28, 3).astype('u1')
  )
  exif = Image.Exif()
  exif[0x0112] = 6  # Turned by a quarter.
  image.save(folder / 'turned.png', exif=exif)
  got = picture_files.decode(folder / 'turned.png', 'row 1')
  np.testing.assert_array_equal(got, np.rot90(np.asarray(image), -1))
