class Lean:
    """Within this IPython is imported without its terminal and its completion, which take longer than all the rest of it and
    serve nobody here.
    """

    EMBED, JEDI = "IPython.terminal.embed", "jedi"

    def __enter__(self):
        # What stands in for the terminal while IPython looks for it.
        absent = types.ModuleType(self.EMBED)
        absent.embed = None
        sys.modules[self.EMBED] = absent
        # An entry of None is a module that cannot be imported.
        sys.modules[self.JEDI] = None

    def __exit__(self, *_error):
        del sys.modules[self.EMBED], sys.modules[self.JEDI]
        IPython = sys.modules.get("IPython")
        if getattr(IPython, "embed", self) is not None:
            return
        del IPython.embed

        # It comes when a cell wants it.
        def later(name):
            if name == "embed":
                IPython.embed = importlib.import_module(self.EMBED).embed
                return IPython.embed
            raise AttributeError("module 'IPython' has no attribute %r" % name)

        IPython.__getattr__ = later


class Ipython:
    """Runs cells by an `InteractiveShell`."""

    def __init__(self):
        with Lean():
            from IPython.core.error import UsageError
            from IPython.core.interactiveshell import InteractiveShell
            from traitlets.config import Config

            config = Config()
            config.HistoryManager.enabled = False
            config.InteractiveShell.colors = "NoColor"
            config.InteractiveShell.separate_in = ""
            self.shell = shell = InteractiveShell.instance(config=config, user_module=MAIN)
        self.color = False
        shell.ask_exit = LEAVE
        # The other way runs commands on a terminal of their own, which changes their output.
        shell.system = shell.system_raw
        for name in ("exit", "quit"):
            MAIN.__dict__[name] = shell.user_ns_hidden[name] = LEAVE
        self.show_values()
        self.show_traceback = shell.showtraceback
        shell.showtraceback = self.showtraceback

        def edit(_line):
            raise UsageError("%edit does not work here: nobody has the editor before them. Write the file instead.")

        shell.register_magic_function(edit, magic_name="edit")
        shell.register_magic_function(edit, magic_name="ed")
        # Agg is what there is, and figures are shown already.
        shell.enable_matplotlib = lambda gui=None: (gui or "inline", "agg")

        import warnings

        # What it drops of `Out` after a thousand values, and how to leave it, are of no use to who reads this.
        warnings.filterwarnings("ignore", message="To exit: use")
        warnings.filterwarnings("ignore", message="Output cache limit")

    def show_values(self):
        formatter = self.shell.display_formatter
        formatter.active_types = ["text/plain", *DOCUMENTS, *IMAGES]
        formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", FIGURES.png)
        hook = self.shell.displayhook
        hook.write_output_prompt = lambda: None
        hook.write_format_data = lambda forms, *_: DISPLAY.bundle(forms)
        self.shell.display_pub.publish = lambda data, *_args, **_options: DISPLAY.bundle(data)

    def showtraceback(self, *args, **options):
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            ended(error.code)
        else:
            STREAMS.restore()
            self.show_traceback(*args, **options)

    def run(self, code, color):
        if color != self.color:
            # Only then: in between, a cell's own `%colors` holds.
            self.color = color
            self.shell.run_line_magic("colors", "Linux" if color else "NoColor")
        result = self.shell.run_cell(code, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        return error is None or isinstance(error, SystemExit)
