#!/usr/bin/env python3
"""The bash session of SWE-ReX, in its local runtime. What passes its limit is interrupted, as its agents do."""

import asyncio
import importlib.metadata

from adapter import Absent, result, serve


class SweRex:
    # A command that waits for input is one that its caller knows by the prompt to expect.
    lacks = ["input", "silence"]

    def __init__(self, cwd):
        try:
            from swerex import exceptions
            from swerex.runtime import abstract
            from swerex.runtime.local import LocalRuntime
        except ImportError as error:
            raise Absent("swe-rex is not installed: %s" % error)
        self.version = importlib.metadata.version("swe-rex")
        self.abstract, self.exceptions = abstract, exceptions
        self.loop = asyncio.new_event_loop()
        self.runtime = LocalRuntime()
        self.begin()

    def wait(self, work):
        return self.loop.run_until_complete(work)

    def begin(self):
        self.wait(self.runtime.create_session(self.abstract.CreateBashSessionRequest(startup_timeout=10.0)))

    def call(self, call):
        if call.get("is_input"):
            return result("it has no such call", state="unsupported")
        action = self.abstract.BashAction(command=call["command"], timeout=call["timeout"], check="silent")
        try:
            seen = self.wait(self.runtime.run_in_session(action))
        except self.exceptions.CommandTimeoutError:
            return self.interrupt()
        except self.exceptions.BashIncorrectSyntaxError as error:
            # Its caller shows this to the model, with bash's own words, which are kept apart.
            words = getattr(error, "extra_info", None) or {}
            return result("%s\n%s" % (error, words.get("bash_stderr", "")), 2)
        if seen.exit_code is None:
            return result(seen.output or seen.failure_reason, None)
        return result(seen.output, seen.exit_code)

    def interrupt(self):
        try:
            seen = self.wait(self.runtime.run_in_session(self.abstract.BashInterruptAction()))
            return result(seen.output, state="limit")
        except Exception as error:
            try:
                self.wait(self.runtime.close_session(self.abstract.CloseBashSessionRequest()))
            finally:
                self.begin()
            return result(str(error), state="reset")

    def close(self):
        self.wait(self.runtime.close())


if __name__ == "__main__":
    serve("swe-rex", bash=SweRex)
