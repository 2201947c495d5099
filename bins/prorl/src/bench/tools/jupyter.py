"""Times a kernel of Jupyter over ZeroMQ, as jupyter_client drives it: each line of input is a name, each line of output what that took, in milliseconds."""

import json
import sys
import time

from jupyter_client import __version__
from jupyter_client.manager import start_new_kernel

CELLS = {"value": "1 + 1", "megabyte": "print('x' * 999_999)"}


class Kernel:
    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code):
        seen = []

        def hook(message):
            content = message["content"]
            seen.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        reply = self.client.execute_interactive(code, output_hook=hook, timeout=60)
        assert reply["content"]["status"] == "ok", reply
        return "".join(seen)

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def timed(work):
    begun = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - begun) * 1e3


def start():
    kernel = Kernel()
    kernel.run("1")
    return kernel


kernel = start()
print(json.dumps(__version__), flush=True)
for line in sys.stdin:
    name = line.strip()
    if name == "start":
        other, took = timed(start)
        other.end()
    else:
        output, took = timed(lambda: kernel.run(CELLS[name]))
        assert (output == "2") if name == "value" else (len(output) == 1_000_000), output[:100]
    print(took, flush=True)
kernel.end()
