"""The failures that are always the same, and the exception that brings any failure to the client."""

from __future__ import annotations

from hispec_ray.serving.wire import Failure

NOT_READY = Failure(503, "The server is not ready: the engine has stopped and is being replaced; try again", headers={"Retry-After": "10"})
NOBODY_ANSWERS = Failure(503, "The server is not ready: no coordinator answers; try again", headers={"Retry-After": "10"})
NO_KEY = Failure(
    401,
    "There is no valid API key; send one as `Authorization: Bearer KEY`",
    code="invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
TOO_COMPLEX = Failure(
    400, "The grammar of this answer became more complex than the server allows; simplify its schema", "grammar", "grammar_too_complex"
)
SERVER_FAILURE = Failure(500, "The server had an error while answering; the server's log has more")


class RequestFailed(Exception):
    """Ends the handling of a request with a Failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
