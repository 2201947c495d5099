class Plain:
    """Runs cells where there is no IPython."""

    FORMS = {
        "text/markdown": "_repr_markdown_",
        "text/html": "_repr_html_",
        "image/png": "_repr_png_",
        "image/jpeg": "_repr_jpeg_",
        "image/svg+xml": "_repr_svg_",
    }
    # What is awaited outside of functions.
    AWAIT = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
    CO_COROUTINE = 0x80

    def __init__(self):
        self.n_cells = 0
        self.loop = None
        builtins.exit = builtins.quit = LEAVE
        builtins.display = self.display

    def run(self, code, color):
        self.n_cells += 1
        name = "<cell %d>" % self.n_cells
        # The lines end as those of files do: the marks under a fault have their place by that.
        linecache.cache[name] = (len(code), None, (code + "\n").splitlines(True), name)
        try:
            tree = compile(code, name, "exec", ast.PyCF_ONLY_AST | self.AWAIT)
            last = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
            self.evaluate(compile(tree, name, "exec", self.AWAIT))
            if last is not None:
                value = self.evaluate(compile(last, name, "eval", self.AWAIT))
                if value is not None:
                    MAIN.__dict__["_"] = value
                    self.display(value)
            return True
        except SystemExit as stop:
            ended(stop.code)
            return True
        except BaseException as error:
            STREAMS.restore()
            tell_error(error, color)
            return False

    def evaluate(self, code):
        if not code.co_flags & self.CO_COROUTINE:
            return eval(code, MAIN.__dict__)
        asyncio = import_own("asyncio")
        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(eval(code, MAIN.__dict__))
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            # Interrupted, it would go on with the next cell that awaits something.
            if not task.done():
                task.cancel()
                self.loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise

    def display(self, *values):
        """Shows values as IPython's function of this name does."""
        for value in values:
            forms = {"text/plain": repr(value)}
            for mime, name in self.FORMS.items():
                # A class is not shown as what it makes is.
                if not isinstance(value, type) and callable(getattr(value, name, None)):
                    try:
                        forms[mime] = getattr(value, name)()
                    except Exception:
                        # The text is there.
                        pass
            figures = sys.modules.get("matplotlib.figure")
            if figures is not None and isinstance(value, figures.Figure):
                forms["image/png"] = FIGURES.png(value)
            DISPLAY.bundle(forms)
