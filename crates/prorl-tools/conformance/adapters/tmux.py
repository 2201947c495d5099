#!/usr/bin/env python3
"""A shell in tmux: commands are typed by `send-keys`, and the screen is read until a word has appeared on it."""

import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time

from adapter import Absent, result, serve

# How often the screen is looked at.
POLL_SECS = 0.05
GRACE_SECS = 2.0
SETTLE_SECS = 0.1


class Tmux:
    def __init__(self, cwd):
        if shutil.which("tmux") is None:
            raise Absent("there is no tmux")
        # A server of its own, that nobody else's settings come into.
        self.folder = tempfile.TemporaryDirectory()
        self.cwd = cwd
        self.word = None
        self.version = self.tmux("-V").split()[-1]
        self.begin()

    def tmux(self, *words):
        command = ["tmux", "-S", self.folder.name + "/socket", "-f", "/dev/null", *words]
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout.decode()

    def begin(self):
        shell = "env PS1= PAGER=cat bash --norc --noprofile"
        self.tmux("new-session", "-d", "-s", "s", "-x", "200", "-y", "50", "-c", self.cwd, shell)
        self.tmux("set-option", "-g", "history-limit", "50000")
        self.call({"command": "PS1= PS2= PROMPT_COMMAND=; stty -echo; bind 'set enable-bracketed-paste off'", "timeout": 10.0})

    def type(self, text):
        # In pieces, since each is an argument.
        for begin in range(0, len(text), 10_000):
            self.tmux("send-keys", "-t", "s", "-l", "--", text[begin : begin + 10_000])

    def mark(self):
        # In two pieces, or an echo of this line would be taken for the answer.
        return "printf '\\nEND-%%s-%%s:%%d:\\n' %s %s $?" % (self.word[:8], self.word[8:])

    def screen(self):
        return self.tmux("capture-pane", "-p", "-J", "-t", "s", "-S", "-")

    def call(self, call):
        text = call["command"]
        if call.get("is_input"):
            if self.word is None:
                return result("no command runs", state="refused")
            if text in ("C-c", "C-d", "C-z"):
                self.tmux("send-keys", "-t", "s", text)
            elif text:
                self.type(text)
                self.tmux("send-keys", "-t", "s", "Enter")
        else:
            if self.word is not None:
                return result("a command runs", state="refused")
            self.tmux("send-keys", "-t", "s", "-R")
            self.tmux("clear-history", "-t", "s")
            self.word = secrets.token_hex(8)
            # In one line, or a command that reads from the terminal would read the second.
            self.type("eval %s; %s" % (shlex.quote(text), self.mark()))
            self.tmux("send-keys", "-t", "s", "Enter")
        return self.wait(call["timeout"], call.get("silence"))

    def wait(self, limit, silence):
        until = time.monotonic() + limit
        heard, before = time.monotonic(), None
        interrupted = False
        mark = re.compile(r"\n?END-%s-%s:(\d+):" % (self.word[:8], self.word[8:]))
        while True:
            try:
                screen = self.screen()
            except subprocess.CalledProcessError:
                # The shell has ended, and with it the server.
                self.word = None
                self.begin()
                return result(before or "", state="reset")
            found = mark.search(screen)
            if found:
                self.word = None
                return result(screen[: found.start()], int(found.group(1)), state="limit" if interrupted else "done")
            present = time.monotonic()
            if screen != before:
                heard, before = present, screen
            if present >= until:
                if interrupted:
                    self.tmux("kill-server")
                    self.word = None
                    self.begin()
                    return result(screen.rstrip("\n"), state="reset")
                self.tmux("send-keys", "-t", "s", "C-c")
                time.sleep(SETTLE_SECS)
                self.type(self.mark())
                self.tmux("send-keys", "-t", "s", "Enter")
                interrupted, until = True, present + GRACE_SECS
            elif silence and not interrupted and present >= heard + silence:
                return result(screen.rstrip("\n"), state="running")
            time.sleep(POLL_SECS)

    def close(self):
        try:
            self.tmux("kill-server")
        except subprocess.CalledProcessError:
            pass
        self.folder.cleanup()


if __name__ == "__main__":
    serve("tmux", bash=Tmux)
