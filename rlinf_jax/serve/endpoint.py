"""The endpoint: routes, tokens, limits and errors, as OpenAI's API has them."""

import asyncio
import hmac
import secrets
import sys

from starlette import applications, responses, routing
from starlette import requests as starlette_requests

from rlinf_jax.serve import completions, requests, sessions

MAX_BODY = 2**20  # Bytes of a request.
SESSION = 'x-session-id'  # Header that names a session.


class Endpoint:
  """Answers requests for one model.

  Attributes:
    app: the ASGI application.
    sessions: what was recorded.
  """

  def __init__(self, served: completions.Served, token: str | None = None):
    """Makes the application.

    Args:
      served: the model.
      token: admits to everything; that of a session to its own calls alone.
        None where sessions are made in this process alone.
    """
    self._served = served
    self._token = (token or secrets.token_urlsafe(32)).encode()
    self.sessions = sessions.Sessions()
    routes = [
      ('/v1/models', self._models, 'GET'),
      ('/v1/chat/completions', self._chat, 'POST'),
      ('/v1/sessions', self._create, 'POST'),
      ('/v1/sessions/{id}', self._read, 'GET'),
      ('/v1/sessions/{id}/reward', self._reward, 'POST'),
    ]
    self.app = applications.Starlette(
      routes=[
        routing.Route(path, function, methods=[method])
        for path, function, method in routes
      ],
      exception_handlers={
        requests.RequestError: _refuse,
        404: _not_found,
        405: _not_found,
        500: _failed,
      },
    )

  def _admit(self, request) -> sessions.Session | None:
    """The session whose token it has; None for the token of the server."""
    scheme, _, token = request.headers.get('authorization', '').partition(' ')
    if scheme.lower() == 'bearer':
      if hmac.compare_digest(token.encode(), self._token):
        return None
      if session := self.sessions.of_token(token):
        return session
    raise requests.RequestError(
      'The API key is missing or wrong: send the header "Authorization: '
      'Bearer TOKEN" with the token that the server printed.',
      401,
      code='invalid_api_key',
    )

  def _session(self, request, name: str | None) -> sessions.Session | None:
    """The session of a request; None where it names none."""
    own = self._admit(request)
    if name is None or (own and name == own.id):
      return own
    found = self.sessions.find(name)
    if found is None or own is not None:
      raise requests.RequestError(
        'There is no such session: create one by POST /v1/sessions.',
        404,
        code='session_not_found',
      )
    return found

  async def _models(self, request):
    self._admit(request)
    model = {
      'id': self._served.name,
      'object': 'model',
      'created': 0,
      'owned_by': 'rlinf_jax',
    }
    return responses.JSONResponse({'object': 'list', 'data': [model]})

  async def _chat(self, request):
    self._admit(request)  # Before the body is read.
    raw = requests.read_json(await _body(request))
    chat = requests.parse(raw, self._served.name)
    session = self._session(request, request.headers.get(SESSION))
    completion = completions.Completion(self._served, chat, session)
    headers = {}
    if session:
      continues = completion.begun.parent is not None
      headers['x-trajectory'] = 'continued' if continues else 'new'
    if chat.stream:
      return responses.StreamingResponse(
        completion.events(), media_type='text/event-stream', headers=headers
      )
    whole = asyncio.ensure_future(completion.whole())
    try:
      while not (await asyncio.wait([whole], timeout=0.2))[0]:
        if await request.is_disconnected():
          return responses.Response(status_code=499)
      return responses.JSONResponse(await whole, headers=headers)
    finally:
      completion.cancel()
      whole.cancel()

  async def _create(self, request):
    if self._admit(request) is not None:
      raise requests.RequestError(
        'The token of a session creates no other: use that of the server.', 403
      )
    await _body(request)
    session = self.sessions.create()
    return responses.JSONResponse({'id': session.id, 'token': session.token})

  async def _read(self, request):
    session = self._session(request, request.path_params['id'])
    return responses.JSONResponse(
      {
        'id': session.id,
        'reward': session.reward,
        'trajectories': [x._asdict() for x in session.trajectories()],
      }
    )

  async def _reward(self, request):
    session = self._session(request, request.path_params['id'])
    reward = requests.read_json(await _body(request)).get('reward')
    # A comparison takes whole numbers of any size, which `float` does not.
    fits = type(reward) in (int, float) and abs(reward) <= sys.float_info.max
    if not fits:
      raise requests.RequestError(
        'The reward must be a finite number: send {"reward": 1.0}.',
        param='reward',
      )
    session.reward = float(reward)
    return responses.JSONResponse({'id': session.id, 'reward': session.reward})


async def _body(request) -> bytes:
  """The body of a request, of which no more than the limit is read."""
  parts, size = [], 0
  try:
    async for part in request.stream():
      size += len(part)
      if size > MAX_BODY:
        raise requests.RequestError(
          f'The body has more than {MAX_BODY} bytes: send less.',
          413,
          code='body_too_large',
        )
      parts.append(part)
  except starlette_requests.ClientDisconnect:
    raise requests.RequestError('The client has gone.', 499) from None
  return b''.join(parts)


async def _refuse(_, error: requests.RequestError):
  headers = {'www-authenticate': 'Bearer'} if error.status == 401 else None
  return responses.JSONResponse(error.body, error.status, headers)


async def _not_found(request, error):
  refused = requests.RequestError(
    f'There is no {request.method} {request.url.path[:200]} here.',
    error.status_code,
  )
  return await _refuse(request, refused)


async def _failed(request, _):
  refused = requests.RequestError('The server failed; its log says why.', 500)
  return await _refuse(request, refused)
