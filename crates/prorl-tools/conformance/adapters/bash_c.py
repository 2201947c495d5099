#!/usr/bin/env python3
"""`bash -c`: a new shell for each command, read until nobody holds its output open any more."""

import os
import signal
import subprocess

from adapter import result, serve


class BashC:
    lacks = ["input", "silence"]

    def __init__(self, cwd):
        self.cwd = cwd

    def call(self, call):
        if call.get("is_input"):
            return result("there is nothing to type into", state="refused")
        process = subprocess.Popen(
            ["bash", "-c", call["command"]],
            cwd=self.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=call["timeout"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return result(output, state="limit")
        code = process.returncode
        return result(output, code if code >= 0 else 128 - code)


if __name__ == "__main__":
    serve("bash -c", bash=BashC)
