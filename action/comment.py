"""Write a comment on a pull request, or replace the one of the same title: a step of ``action.yml``.

Uses Python's standard library only. A job for a pull request from a fork may have a token that can't write.
The step then prints a warning and succeeds, and the job's summary has the table all the same.
"""

import hashlib
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_MOST = 65_000
"""GitHub's limit of a comment is 65,536 characters."""
_PAGES = 30
_PER_PAGE = 100


def call(method: str, path: str, body: dict[str, str] | None = None) -> Any:
    """Call GitHub's REST interface, and return its answer."""
    request = urllib.request.Request(  # noqa: S310 - the runner sets the address
        f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {os.environ['TOKEN']}",
            "Accept": "application/vnd.github+json",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - see above
        return json.load(answer)


def earlier(number: int, mark: str) -> int | None:
    """Return the id of the comment that has the mark; ``None`` if there is none."""
    for page in range(1, _PAGES + 1):
        query = f"issues/{number}/comments?per_page={_PER_PAGE}&page={page}"
        comments = call("GET", query)
        for comment in comments:
            if mark in comment["body"]:
                return int(comment["id"])
        if len(comments) < _PER_PAGE:
            break
    return None


def main() -> None:
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    number = event["pull_request"]["number"]
    digest = hashlib.sha256(os.environ["TITLE"].encode()).hexdigest()[:16]
    mark = f"<!-- memlog {digest} -->"
    text = Path(os.environ["COMMENT_FILE"]).read_text(encoding="utf-8")
    if len(text) > _MOST:
        text = f"{text[:_MOST].rpartition(chr(10))[0]}\n\nThe rest is in the job's summary.\n"
    body = {"body": f"{text}\n{mark}\n"}
    try:
        known = earlier(number, mark)
        if known is None:
            call("POST", f"issues/{number}/comments", body)
        else:
            call("PATCH", f"issues/comments/{known}", body)
    except (urllib.error.URLError, TimeoutError) as error:
        print(
            f"::warning title=memlog::could not comment on pull request {number} ({error}): the job needs "
            'the permission "pull-requests: write". The table is in the job\'s summary.'
        )


if __name__ == "__main__":
    main()
