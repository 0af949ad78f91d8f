"""An agent framework that knows nothing of this endpoint drives it."""

import pytest

pydantic_ai = pytest.importorskip(
  'pydantic_ai', reason='pip install "pydantic-ai-slim[openai]"'
)
from pydantic_ai.models import openai as models  # noqa: E402
from pydantic_ai.providers import openai as providers  # noqa: E402

from rlinf_jax.serve import completions, endpoint, server  # noqa: E402
import served_models  # noqa: E402
from stages.language import tokens  # noqa: E402

CALL = '<tool_call>{"name": "add", "arguments": {"a": 6, "b": 7}}</tool_call>'


@pytest.mark.parametrize('streams', [False, True])
def test_an_agent_of_pydantic_ai_calls_its_tool_and_is_recorded(
  tmp_path, streams
):
  folder = served_models.model(tmp_path)
  tokenizer = tokens.load_tokenizer(folder)
  decoder = served_models.ScriptedDecoder(tokenizer, [CALL, 'it is 13'])
  app = endpoint.Endpoint(completions.Served('model', tokenizer, decoder))
  session = app.sessions.create()
  called = []

  def add(a: int, b: int) -> int:
    """Adds two numbers."""
    called.append((a, b))
    return a + b

  with server.Server(app) as running:
    provider = providers.OpenAIProvider(
      base_url=running.url, api_key=session.token
    )
    model = models.OpenAIChatModel('model', provider=provider)
    agent = pydantic_ai.Agent(model, tools=[add], instructions='Be short.')
    if streams:
      result = agent.run_stream_sync('How much is 6+7?').get_output()
    else:
      result = agent.run_sync('How much is 6+7?').output
  assert result == 'it is 13' and called == [(6, 7)]
  (x,) = session.trajectories()
  turns = [
    [*served_models.letters(tokenizer, text), tokenizer.eos_token_id]
    for text in (CALL, 'it is 13')
  ]
  own = [i for i, own in zip(x.ids, x.own, strict=True) if own]
  assert own == sum(turns, [])
  assert '13' in tokenizer.decode(x.ids[len(turns[0]) : -len(turns[1])])
  assert 'Be short.' in tokenizer.decode(x.prompt)
