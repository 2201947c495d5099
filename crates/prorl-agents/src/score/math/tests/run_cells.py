"""Runs the cells of each task as a notebook would.

Reads {id: [code, ...]} from standard input and writes {id: {"printed": last line printed, "across": whether the last
cell needs a name of an earlier one}}.
"""

import ast
import contextlib
import io
import json
import signal
import sys


def run(code, names):
    """Runs one cell and returns what it shows; a last expression is shown as well."""
    tree = ast.parse(code)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(tree, "cell", "exec"), names)
        value = None if last is None else eval(compile(last, "cell", "eval"), names)
        if value is not None:
            print(repr(value))
    return shown.getvalue()


def notebook(cells):
    names = {}
    printed = ""
    for code in cells:
        try:
            printed = run(code, names)
        except NameError:
            printed = ""  # one script shows how an agent repairs this
    try:
        run(cells[-1], {})
        across = False
    except NameError:
        across = True
    lines = printed.strip().splitlines()
    return {"printed": lines[-1] if lines else "", "across": across}


signal.alarm(120)
json.dump({name: notebook(cells) for name, cells in json.load(sys.stdin).items()}, sys.stdout)
