class Leave:
    """What `exit` and `quit` are in a cell."""

    def __call__(self, code=None):
        raise SystemExit(code)

    def __repr__(self):
        return "exit() ends a cell; the interpreter goes on."


class Here:
    """Whether this is the interpreter, or a copy of it that a cell has made."""

    def __init__(self):
        self.pid = os.getpid()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forked)

    def forked(self):
        # The answer is the interpreter's.
        CHANNEL.cell = None
        try:
            os.close(CHANNEL_FD)
        except OSError:
            pass

    def is_copy(self):
        return os.getpid() != self.pid


def ended(code):
    """Says that a cell has asked for the interpreter's end."""
    if HERE.is_copy():
        if not (code is None or isinstance(code, int)):
            print(code, file=sys.stderr)
        STREAMS.flush()
        os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)
    STREAMS.restore()
    print("SystemExit%s (the interpreter goes on)" % ("" if code is None else ": %s" % code))


def refuse(what):
    def nobody(*_args, **_options):
        raise RuntimeError("%s does not work here: nobody can answer. Put the value into the code." % what)

    return nobody


def no_debugger(*_args, **_options):
    raise RuntimeError("A debugger does not work here: nobody can type into it. Print what you want to know.")


def serve(run):
    while True:
        request = CHANNEL.next()
        if "id" not in request:
            # An answer to a part that was none of ours.
            continue
        ok = False
        STREAMS.restore()
        CHANNEL.begin(request["id"])
        try:
            try:
                # Again for each cell, whatever the one before did to it.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                ok = run(request["code"], request["color"])
                FIGURES.show()
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            # It came just before or after the cell.
            print("KeyboardInterrupt", file=sys.stderr)
        except BaseException as error:
            ok = False
            STREAMS.restore()
            tell_error(error)
        STREAMS.flush()
        if HERE.is_copy():
            os._exit(0)
        CHANNEL.end("ok" if ok else "raised")


# Between two cells there is nothing to interrupt.
signal.signal(signal.SIGINT, signal.SIG_IGN)

# The cells' __main__ is not this program's, so that nothing of it is in their way and classes can be pickled.
OWN_MAIN = sys.modules["__main__"]
MAIN = sys.modules["__main__"] = types.ModuleType("__main__")
MAIN.__dict__["__builtins__"] = builtins
sys.argv = [""]

HERE = Here()
LEAVE = Leave()
try:
    FLAVOUR = Ipython()
except Exception:
    FLAVOUR = Plain()
builtins.input = refuse("input()")
getpass.getpass = refuse("getpass()")
sys.breakpointhook = no_debugger
# Cells import from that folder, as programs do.
sys.path[0:0] = OWN_FOLDER
CHANNEL.ready(type(FLAVOUR).__name__)
serve(FLAVOUR.run)
