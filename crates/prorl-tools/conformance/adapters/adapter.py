"""What all adapters share: one JSON object a line on the standard streams, as src/conformance/adapter.rs says."""

import base64
import json
import os
import sys


class Absent(Exception):
    """What the adapter is for is not installed, or has no such tool."""


def result(output="", code=None, state="done", **more):
    """Returns the answer to a call. Output in bytes need not be text."""
    if isinstance(output, bytes):
        more["output_b64"] = base64.b64encode(output).decode()
    else:
        # Half of a surrogate pair is no text.
        more["output"] = output.encode("utf-8", "replace").decode()
    return {"code": code, "state": state, **more}


def serve(name, **tools):
    """Answers the host until it says stop. A tool is a function that takes the folder to work in and returns an object with
    `call`, which takes a call's arguments and returns a `result`; with `version` and `lacks`, if there is anything to say; and
    with `close`, if there is anything to end.
    """
    # What the implementation prints is not for the host.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message):
        answers.write(json.dumps(message) + "\n")

    start = json.loads(sys.stdin.readline())["start"]
    os.chdir(start["cwd"])
    if start["tool"] not in tools:
        return answer({"skip": "%s has no %s" % (name, start["tool"])})
    try:
        tool = tools[start["tool"]](start["cwd"])
    except Absent as absent:
        return answer({"skip": str(absent)})
    ready = {"name": name, "lacks": list(getattr(tool, "lacks", []))}
    if getattr(tool, "version", None):
        ready["version"] = tool.version
    answer({"ready": ready})
    try:
        for line in sys.stdin:
            message = json.loads(line)
            if "call" not in message:
                break
            try:
                found = tool.call(message["call"])
            except Exception as error:
                found = result("%s: %s" % (type(error).__name__, error), state="refused")
            answer({"id": message["id"], **found})
    finally:
        if hasattr(tool, "close"):
            tool.close()
