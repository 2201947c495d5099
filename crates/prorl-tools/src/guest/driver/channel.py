# Runs cells that come over a socket, one after the other, in a namespace of their own. This and the files after it are one
# program, given to the interpreter as its `-c`.
import sys

# The folder that a task works in comes first. A file there that is named as a module of ours must not become it.
OWN_FOLDER = [""] if sys.path[:1] == [""] else []
del sys.path[: len(OWN_FOLDER)]

import ast
import base64
import builtins
import fcntl
import getpass
import importlib.machinery
import io
import json
import linecache
import os
import signal
import threading
import traceback
import types

CHANNEL_FD = 60

# The longest part that has room in a frame to the host.
MAX_PART_BYTES = 3 * 1024 * 1024


class Channel:
    """The way to the guest: messages with their length before them, and a byte that says their kind."""

    JSON, PART = 0, 1

    def __init__(self):
        os.set_inheritable(CHANNEL_FD, False)
        self.received = bytearray()
        # The one that runs.
        self.cell = None
        self.lock = threading.Lock()

    def next(self):
        """Waits for a request."""
        while True:
            end = 4 + int.from_bytes(self.received[:4], "little")
            if len(self.received) >= max(end, 5):
                body = bytes(self.received[4:end])
                del self.received[:end]
                return json.loads(body.decode())
            try:
                piece = os.read(CHANNEL_FD, 1 << 18)
            except OSError:
                piece = b""
            if not piece:
                # The guest is gone, or a cell has closed this. Nobody hears what would be said now.
                os._exit(1)
            self.received += piece

    def ready(self, flavour):
        self._send(bytes([self.JSON]) + json.dumps({"ready": flavour}).encode())

    def begin(self, cell):
        self.cell = cell

    def end(self, end):
        """Tells how the cell ended. What shows something later comes too late."""
        with Uninterrupted(), self.lock:
            cell, self.cell = self.cell, None
            self._send(bytes([self.JSON]) + json.dumps({"id": cell, "end": end}).encode())

    def part(self, mime, data):
        """Sends something that is more than text, and waits until the guest has read what was printed before it."""
        with Uninterrupted(), self.lock:
            # While a cell runs, nothing else comes and nobody else reads.
            if self.cell is not None:
                head = json.dumps({"id": self.cell, "mime": mime}).encode()
                self._send(bytes([self.PART]) + len(head).to_bytes(4, "little") + head + data)
                self.next()

    def _send(self, body):
        message = memoryview(len(body).to_bytes(4, "little") + body)
        while message:
            try:
                message = message[os.write(CHANNEL_FD, message) :]
            except OSError:
                os._exit(1)


class Uninterrupted:
    """Puts an interrupt off: half a message would spoil all that come after it."""

    def __enter__(self):
        self.came = False
        # Interrupts are the main thread's alone.
        self.is_main = threading.current_thread() is threading.main_thread()
        if self.is_main:
            self.before = signal.signal(signal.SIGINT, self.note) or signal.default_int_handler

    def note(self, *_signal):
        self.came = True

    def __exit__(self, *_error):
        if self.is_main:
            signal.signal(signal.SIGINT, self.before)
            if self.came and callable(self.before):
                self.before(signal.SIGINT, None)


class Streams:
    """Standard output and error, whatever cells do to them."""

    FDS = {"stdout": 1, "stderr": 2}

    def __init__(self):
        # Both are one pipe.
        self.pipe = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, CHANNEL_FD + 1)
        self.own = {name: getattr(sys, name) for name in self.FDS}

    def restore(self):
        for name, fd in self.FDS.items():
            self._restore_fd(fd)
            # First, since a stream that took its place may close it when it goes.
            setattr(sys, name, self.own[name])
            if self._is_closed(self.own[name]):
                raw = io.FileIO(fd, "w", closefd=False)
                stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
                self.own[name] = stream
                setattr(sys, name, stream)
                setattr(sys, "__%s__" % name, stream)

    def _restore_fd(self, fd):
        try:
            if os.path.sameopenfile(fd, self.pipe):
                return
        except OSError:
            pass
        try:
            os.dup2(self.pipe, fd)
        except OSError:
            # A cell has closed that one too.
            pass

    @staticmethod
    def _is_closed(stream):
        try:
            return stream.closed
        except ValueError:
            # It has been detached.
            return True

    def flush(self):
        for stream in (sys.stdout, sys.stderr, *self.own.values()):
            try:
                stream.flush()
            except Exception:
                pass


def say(text):
    """Prints a value's text, also where the encoding has no form for it."""
    try:
        print(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding))


def tell_error(error, color=False):
    """Prints a traceback without what is ours at its beginning."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    names = [frame.tb_frame.f_code.co_filename for frame in frames]
    cell = next((index for index, name in enumerate(names) if name.startswith("<cell ")), None)
    after_us = next((index for index, name in enumerate(names) if name != "<string>"), len(names))
    first = (frames[after_us if cell is None else cell :] or [None])[0]
    options = {"colorize": True} if color and sys.version_info >= (3, 13) else {}
    sys.stderr.write("".join(traceback.format_exception(type(error), error, first, **options)))


def import_own(name):
    """Imports a module, and not a file of that name in the folder that a task works in."""
    folders = sys.path[:]
    sys.path[:] = [folder for folder in folders if folder]
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = folders


CHANNEL = Channel()
STREAMS = Streams()
