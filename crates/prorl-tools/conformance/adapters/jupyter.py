#!/usr/bin/env python3
"""A Jupyter kernel, driven by jupyter_client over ZeroMQ."""

import queue
import time

from adapter import Absent, result, serve

GRACE_SECS = 2.0
START_SECS = 60.0
IMAGES_AND_DOCUMENTS = ("text/markdown", "text/html", "image/png", "image/jpeg", "image/svg+xml")


class Kernel:
    def __init__(self, cwd):
        try:
            import ipykernel
            from jupyter_client.manager import KernelManager
        except ImportError as error:
            raise Absent("jupyter_client or ipykernel is not installed: %s" % error)
        self.version = ipykernel.__version__
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=cwd)
        self.connect()

    def connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_SECS)

    def call(self, call):
        request = self.client.execute(call["code"], allow_stdin=False)
        until = time.monotonic() + call["timeout"]
        output, parts, code, interrupted = [], [], 0, False
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.0, min(1.0, until - time.monotonic())))
            except queue.Empty:
                if not self.manager.is_alive():
                    self.restart()
                    return result("".join(output), state="reset", parts=parts)
                if time.monotonic() < until:
                    continue
                if interrupted:
                    self.restart()
                    return result("".join(output), state="reset", parts=parts)
                self.manager.interrupt_kernel()
                interrupted, until = True, time.monotonic() + GRACE_SECS
                continue
            kind, content = message["msg_type"], message["content"]
            # A restart that jupyter_client makes by itself has no request.
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream":
                output.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                forms = content["data"]
                if "text/plain" in forms:
                    output.append(forms["text/plain"] + "\n")
                parts += [{"mime": mime} for mime in IMAGES_AND_DOCUMENTS if mime in forms]
            elif kind == "error":
                code = 1
                output.append("\n".join(content["traceback"]) + "\n")
            elif kind == "status" and content["execution_state"] == "idle":
                return result("".join(output), code, state="limit" if interrupted else "done", parts=parts)

    def restart(self):
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self.connect()

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    serve("jupyter", ipython=Kernel)
