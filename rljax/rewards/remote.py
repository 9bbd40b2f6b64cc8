"""A reward from a model behind HTTP: POSTs one JSON object for each sample, and takes the number that comes back.

Sent: {"prompt", "response", "label", "metadata"}. Taken: a number, or an object whose numbers become the parts, one of
them `reward` (or `score`). The address is the knob `reward.url`, handed to the workers in RLJAX_REWARD_URL. Refused
connections, timeouts and answers of 429 and 5xx are tried again, 4 times in all with pauses of 0.2, 0.4 and 0.8 s,
within the sample's `reward.timeout_s`; what then fails raises, and the sample gets the fallback.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from rljax.sample import Sample

URL = "RLJAX_REWARD_URL"
PAUSES_S, TIMEOUT_S = (0.2, 0.4, 0.8), 60.0
AGAIN = (429, 500, 502, 503, 504)
LARGEST = 1 << 20  # bytes of an answer


def reward(sample: Sample) -> dict[str, float] | float | None:
    """The remote score; OSError where there is none after all tries, ValueError for an answer that is not JSON."""
    body = json.dumps({"prompt": sample.prompt, "response": sample.text, "label": sample.label,
                       "metadata": sample.metadata}).encode()
    request = urllib.request.Request(os.environ[URL], body, {"Content-Type": "application/json"})
    for pause in (*PAUSES_S, None):
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return _score(json.loads(response.read(LARGEST)))
        except urllib.error.HTTPError as error:
            if pause is None or error.code not in AGAIN:
                raise
        except OSError:
            if pause is None:
                raise
        time.sleep(pause)
    return None


def _score(answer: Any) -> Any:
    """An answer as a reward function's result; `score` stands for `reward`."""
    if isinstance(answer, dict) and "reward" not in answer and "score" in answer:
        answer = {"reward": answer["score"], **{name: value for name, value in answer.items() if name != "score"}}
    if isinstance(answer, dict):
        return {name: value for name, value in answer.items() if value is None or isinstance(value, (int, float))}
    return answer
