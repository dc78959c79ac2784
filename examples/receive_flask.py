"""A Flask application that is told when jobs have ended, instead of asking again and again.

Needs flask beside the base package, and the secret that the fleet signs with:

    export CALLBACK_SECRET=whsec_…        # the one that the fleet has in TOKENMILL_CALLBACK_SECRETS
    flask --app examples/receive_flask.py run --port 8200
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, request

from workers.client import CallbackSignatureError, verify_callback

SECRET = os.environ["CALLBACK_SECRET"]

app = Flask(__name__)
app.logger.setLevel("INFO")
seen: set[str] = set()  # keep ids in your database instead: a unique column, for some days


@app.post("/tokenmill")
def tokenmill() -> tuple[str, int]:
    """Check who sends, answer at once, and take each event one time."""
    try:
        event = verify_callback(SECRET, request.headers, request.get_data())
    except CallbackSignatureError as error:
        return str(error), 401
    if event["id"] not in seen:
        handle(event)
        seen.add(event["id"])  # afterwards: what failed comes again. In SQL, do both in one transaction
    return "", 204


def handle(event: dict[str, Any]) -> None:
    """What your application does about it; hand longer work to a queue, the sender waits for ten seconds."""
    data = event["data"]
    app.logger.info("%s: %s %s", event["type"], data["id"], data.get("finish_reason"))
