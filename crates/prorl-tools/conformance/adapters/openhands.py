#!/usr/bin/env python3
"""The terminal and the file editor of OpenHands. Its argument is the terminal's back end: `tmux` or `subprocess`."""

import importlib.metadata
import os
import sys

# Python puts this file's folder first, where the package of its name is not.
FOLDER = os.path.dirname(os.path.abspath(__file__))
from adapter import Absent, result, serve

sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != FOLDER]

BACK_END = sys.argv[1] if len(sys.argv) > 1 else "subprocess"


def needed():
    try:
        return importlib.metadata.version("openhands-tools")
    except importlib.metadata.PackageNotFoundError:
        raise Absent("openhands-tools is not installed")


class Terminal:
    def __init__(self, cwd):
        self.version = needed()
        try:
            from openhands.tools.terminal.definition import TerminalAction
            from openhands.tools.terminal.terminal import create_terminal_session
        except ImportError as error:
            raise Absent("openhands-tools cannot be imported: %s" % error)

        self.action = TerminalAction
        self.create = lambda: create_terminal_session(cwd, terminal_type=BACK_END)
        self.begin()

    def begin(self):
        self.session = self.create()
        self.session.initialize()

    def call(self, call):
        if call.get("silence"):
            self.session.no_change_timeout_seconds = call["silence"]
            limit = {}
        else:
            # With a limit of its own it does not return for silence.
            limit = {"timeout": call["timeout"]}
        seen = self.session.execute(self.action(command=call["command"], is_input=bool(call.get("is_input")), **limit))
        output = "".join(part.text for part in seen.content)
        cwd = getattr(seen.metadata, "working_dir", None)
        code = seen.metadata.exit_code
        more = {"cwd": cwd} if cwd else {}
        if seen.is_error:
            return result(output, state="refused", **more)
        status = str(getattr(self.session.prev_status, "value", ""))
        if status == "no_change_timeout":
            return result(output, state="running", **more)
        if status == "hard_timeout":
            return self.interrupt(output)
        # It says -1 for a code that it does not know.
        return result(output, code if code >= 0 else None, **more)

    def interrupt(self, output):
        """Ends what has passed its limit, as it tells the model to."""
        seen = self.session.execute(self.action(command="C-c", is_input=True, timeout=2.0))
        output += "".join(part.text for part in seen.content)
        if seen.metadata.exit_code >= 0:
            return result(output, state="limit")
        self.session.close()
        self.begin()
        return result(output, state="reset")

    def close(self):
        self.session.close()


class Editor:
    def __init__(self, cwd):
        self.version = needed()
        try:
            from openhands.tools.file_editor.editor import FileEditor
            from openhands.tools.file_editor.exceptions import ToolError
        except ImportError as error:
            raise Absent("openhands-tools cannot be imported: %s" % error)

        self.editor = FileEditor(workspace_root=cwd)
        self.error = ToolError

    def call(self, call):
        try:
            seen = self.editor(**call)
        except self.error as error:
            return result(error.message, state="refused")
        text = "".join(getattr(part, "text", "") for part in seen.content)
        return result(text, state="refused" if seen.is_error else "done")


if __name__ == "__main__":
    serve("openhands " + BACK_END, bash=Terminal, editor=Editor)
