def _prorl_driver():
    """Runs cells that come over a socket, one after the other, in a namespace of their own."""
    import sys

    # The folder that a task works in comes first. A file there that is named as a module of ours must not become it.
    own_folder = [""] if sys.path[:1] == [""] else []
    del sys.path[: len(own_folder)]

    import ast
    import builtins
    import json
    import linecache
    import os
    import signal
    import socket
    import struct
    import traceback
    import types

    channel = socket.socket(fileno=os.dup(60))
    os.close(60)
    own_pid = os.getpid()
    state = {"n": 0}

    # The cells' __main__ is not this program's, so that nothing of it is in their way and classes can be pickled.
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv = [""]

    # Between two cells there is nothing to interrupt.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def no_input(prompt="", *_rest, **_more):
        raise RuntimeError("input() does not work here: nobody can answer. Put the value into the code.")

    builtins.input = no_input

    def leave(code=None):
        raise SystemExit(code)

    def flush():
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            try:
                stream.flush()
            except Exception:
                pass

    def say_exit(code):
        print("SystemExit: %s (the interpreter goes on)" % ("" if code is None else code))

    def receive(n):
        data = b""
        while len(data) < n:
            piece = channel.recv(n - len(data))
            if not piece:
                os._exit(0)
            data += piece
        return data

    def send(message):
        data = json.dumps(message).encode()
        channel.sendall(struct.pack("<I", len(data)) + data)

    def plain():
        builtins.exit = builtins.quit = leave
        own_files = {leave.__code__.co_filename, no_input.__code__.co_filename}

        def show():
            kind, value, frames = sys.exc_info()
            while frames is not None and frames.tb_frame.f_code.co_filename in own_files:
                frames = frames.tb_next
            sys.stderr.write("".join(traceback.format_exception(kind, value, frames)))

        def run(code):
            state["n"] += 1
            name = "<cell %d>" % state["n"]
            linecache.cache[name] = (len(code), None, code.splitlines(True), name)
            try:
                body = ast.parse(code, name)
                last = None
                if body.body and isinstance(body.body[-1], ast.Expr):
                    last = ast.Expression(body.body.pop().value)
                exec(compile(body, name, "exec"), main.__dict__)
                if last is not None:
                    value = eval(compile(last, name, "eval"), main.__dict__)
                    if value is not None:
                        main.__dict__["_"] = value
                        print(repr(value))
                return "ok"
            except SystemExit as stop:
                say_exit(stop.code)
                return "ok"
            except BaseException:
                show()
                return "raised"

        return run

    def ipython():
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.colors = "NoColor"
        config.InteractiveShell.separate_in = ""
        shell = InteractiveShell.instance(config=config, user_module=main)
        shell.ask_exit = leave
        # The other way runs commands on a terminal of their own, which changes their output.
        shell.system = shell.system_raw
        builtins.input = no_input
        main.__dict__["exit"] = main.__dict__["quit"] = leave

        hook = shell.displayhook
        hook.write_output_prompt = lambda: None
        hook.write_format_data = lambda data, *_: print(data.get("text/plain", ""))

        show = shell.showtraceback

        def showtraceback(*args, **kwargs):
            if isinstance(sys.exc_info()[1], SystemExit):
                say_exit(sys.exc_info()[1].code)
            else:
                show(*args, **kwargs)

        shell.showtraceback = showtraceback
        import warnings

        warnings.filterwarnings("ignore", message="To exit: use")

        def run(code):
            result = shell.run_cell(code, store_history=True)
            error = result.error_before_exec or result.error_in_exec
            return "ok" if error is None or isinstance(error, SystemExit) else "raised"

        return run

    try:
        run = ipython()
        flavour = "ipython"
    except Exception:
        run = plain()
        flavour = "python"
    # Cells import from that folder, as programs do.
    sys.path[0:0] = own_folder
    send({"ready": flavour})
    while True:
        request = json.loads(receive(struct.unpack("<I", receive(4))[0]).decode("utf-8", "surrogatepass"))
        end = "raised"
        try:
            try:
                # Again for each cell, whatever the one before did to it.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                end = run(request["code"])
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
        except KeyboardInterrupt:
            # It came just before or after the cell.
            print("KeyboardInterrupt", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        if os.getpid() != own_pid:
            # A cell forked, and this is the child at the cell's end.
            flush()
            os._exit(0)
        flush()
        send({"id": request["id"], "end": end})


_prorl_driver()
