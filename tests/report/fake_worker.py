"""Speaks a worker's language without torch: what it does is decided by the precision it is given.

Run as `python fake_worker.py [--SETTING ...] SPEC.json`.
"""

import json
import os
import signal
import sys
import time

FINGERPRINT = "f" * 64


def send(event, **content):
    print("@lightning-mp " + json.dumps({"event": event, **content}), flush=True)


def finish(weights=FINGERPRINT, non_finite_step=None, notes=()):
    half = {"weights": 20, "masters": 0, "gradients": 20, "optimizer_state": 40, "buffers": 0, "parameters": 10}
    send(
        "finished", memory=half, peak_rss_bytes=3 << 20, peak_cuda_bytes=None, weights_fingerprint=weights,
        data_order={"1": FINGERPRINT}, non_finite_step=non_finite_step, skipped_steps=None, loss_scale=None, details={},
        notes=list(notes),
    )  # fmt: skip


def main():
    with open(sys.argv[-1]) as file:
        spec = json.load(file)
    print("printed before the first event")
    print("to standard error", file=sys.stderr)
    name = spec["precision"]
    loss = {"bf16-true": 0.05, "16-mixed": float("nan")}.get(name, 0.0)
    send("started", total_steps=10, device="cpu: fake", versions={"torch": "0"}, precision_in_use=name, plugin="fake")
    if name == "16-master":
        send("step", step=1)
        os.kill(os.getpid(), signal.SIGKILL)
    send("records", records=[[step, 2.0 / step + loss, 100, 10.0 + step] for step in range(1, 11)])
    if name == "auto":  # what Ctrl-C does while a worker runs
        with open(os.path.join(spec["folder"], "pid"), "w") as file:
            file.write(str(os.getpid()))
        for _ in range(15):  # Python drops an interrupt that comes while it collects garbage; a person presses again
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(4)
    if name == "bf16-mixed":
        time.sleep(0.3)  # the parent copies the first line into the log by then
        print("last words", file=sys.stderr)
        sys.exit(7)
    if name == "16-mixed":
        return finish(non_finite_step=1)
    finish(weights="0" * 64 if name == "bf16-master" else FINGERPRINT, notes=["a note."])


main()
