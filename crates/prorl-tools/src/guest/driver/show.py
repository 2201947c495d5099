IMAGES = ("image/png", "image/jpeg", "image/svg+xml")
DOCUMENTS = ("text/markdown", "text/html")


class Display:
    """Sends what is more than text to the guest."""

    def bundle(self, forms):
        """Shows one thing that has several forms, by their types: its text is printed, and what is more is sent.

        Where it is Markdown, that is its text.
        """
        image = next((mime for mime in IMAGES if forms.get(mime)), None)
        wanted = [mime for mime in (*DOCUMENTS, image) if forms.get(mime)]
        if "text/markdown" not in wanted or CHANNEL.cell is None:
            if "text/plain" in forms:
                say(forms["text/plain"])
        for mime in wanted:
            self.part(mime, forms[mime])

    def part(self, mime, data):
        if isinstance(data, str):
            # Images in text are in base64, but for those that are text.
            is_coded = mime in IMAGES and mime != "image/svg+xml"
            data = base64.b64decode(data) if is_coded else data.encode("utf-8", "replace")
        if CHANNEL.cell is None:
            # A thread that goes on when its cell has ended, or a copy of the interpreter: no answer is there to take this.
            return
        if len(data) > MAX_PART_BYTES:
            print("[%s, %d bytes: too large to be shown]" % (mime, len(data)))
            return
        STREAMS.flush()
        CHANNEL.part(mime, data)


class Figures:
    """Shows matplotlib's figures as notebooks do: those that are open at `show()` and at the end of a cell, which closes them."""

    def __init__(self, display):
        self.display = display
        self.pyplot = None
        self.seen = []
        # Programs that cells start have no screen either.
        os.environ.setdefault("MPLBACKEND", "agg")
        # Matplotlib takes long to import, so this waits until a cell does it.
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, _target=None):
        """Finds pyplot for the import system, to take its `show` when it has been imported."""
        if name != "matplotlib.pyplot":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            # Matplotlib wants a function, and not a method.
            def show(*_args, **_options):
                self.show()

            def exec_module(module):
                execute(module)
                module.show = show
                self.pyplot = module

            spec.loader.exec_module = exec_module
        return spec

    def png(self, figure):
        # Beside its background.
        if len(figure.get_children()) < 2:
            return None
        self.seen.append(figure)
        file = io.BytesIO()
        figure.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()

    def show(self):
        """Shows all open figures and closes them."""
        if self.pyplot is None:
            return
        try:
            for number in self.pyplot.get_fignums():
                figure = self.pyplot.figure(number)
                if not any(figure is one for one in self.seen):
                    png = self.png(figure)
                    if png is not None:
                        self.display.bundle({"text/plain": repr(figure), "image/png": png})
        finally:
            self.pyplot.close("all")
            self.seen.clear()


DISPLAY = Display()
FIGURES = Figures(DISPLAY)
