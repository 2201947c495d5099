#!/usr/bin/env python3
"""A shell on a terminal that is told to print a word after each command; the output is what came before the word."""

import os
import pty
import re
import secrets
import select
import shlex
import signal
import termios
import time

from adapter import result, serve

# How long an interrupt has to end a command.
GRACE_SECS = 2.0
SETTLE_SECS = 0.1


class Shell:
    def __init__(self, cwd):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.environ.update(PS1="", PS2="", TERM="dumb", PAGER="cat")
            os.execvp("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"])
        modes = termios.tcgetattr(self.terminal)
        modes[1] &= ~termios.OPOST
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(self.terminal, termios.TCSANOW, modes)
        self.unread = b""
        self.word = None
        # Interactive shells ask for it again.
        self.call({"command": "PS1= PS2= PROMPT_COMMAND=", "timeout": 10.0})

    def call(self, call):
        text = call["command"]
        if call.get("is_input"):
            if self.word is None:
                return result("no command runs", state="refused")
            keys = {"C-c": b"\x03", "C-d": b"\x04", "C-z": b"\x1a", "": b""}
            self.write(keys.get(text, text.encode() + b"\n"))
        else:
            if self.word is not None:
                return result("a command runs", state="refused")
            self.word = "END-" + secrets.token_hex(8)
            # In one line, or a command that reads from the terminal would read the second.
            self.write(("eval %s; %s\n" % (shlex.quote(text), self.mark())).encode())
        return self.wait(call["timeout"], call.get("silence"))

    def mark(self):
        # In two pieces, or an echo of this line would be taken for the answer.
        return "printf '\\n%%s%%s:%%d\\n' %s %s $?" % (self.word[:8], self.word[8:])

    def write(self, data):
        until = time.monotonic() + 10
        while data and time.monotonic() < until:
            readable, writable, _ = select.select([self.terminal], [self.terminal], [], 1)
            if readable:
                self.read()
            if writable:
                data = data[os.write(self.terminal, data[:1024]) :]

    def read(self):
        try:
            data = os.read(self.terminal, 1 << 16)
        except OSError:
            data = b""
        self.unread += data
        return len(data) > 0

    def wait(self, limit, silence):
        until = time.monotonic() + limit
        heard = time.monotonic()
        interrupted = False
        mark = re.compile(rb"\r?\n" + self.word.encode() + rb":(\d+)\r?\n")
        while True:
            # Not all of it again for each piece.
            found = mark.search(self.unread, max(0, len(self.unread) - (1 << 17)))
            if found:
                output, self.unread, self.word = self.unread[: found.start()], self.unread[found.end() :], None
                return result(output, int(found.group(1)), state="limit" if interrupted else "done")
            present = time.monotonic()
            if present >= until:
                if interrupted:
                    output = self.unread
                    self.restart()
                    return result(output, state="reset")
                # With it goes what was typed ahead, and the rest of the line that runs.
                self.write(b"\x03")
                time.sleep(SETTLE_SECS)
                self.write((self.mark() + "\n").encode())
                interrupted, until = True, present + GRACE_SECS
            elif silence and not interrupted and present >= heard + silence:
                output, self.unread = self.unread, b""
                return result(output, state="running")
            ready, _, _ = select.select([self.terminal], [], [], 0.1)
            if ready:
                heard = time.monotonic()
                if not self.read():
                    output = self.unread
                    self.restart()
                    return result(output, state="reset")

    def restart(self):
        self.close()
        self.__init__(os.getcwd())

    def close(self):
        os.close(self.terminal)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except OSError:
            pass


if __name__ == "__main__":
    serve("pty and sentinel", bash=Shell)
