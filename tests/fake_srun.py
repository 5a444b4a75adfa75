"""`srun` for tests without Slurm: runs its command once a node of `--nodelist`, all of them on this machine, copies its
input to each and passes their output on by whole lines. With FAKE_SRUN_FAILS it complains as Slurm does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import IO


def main() -> int:
    if complaint := os.environ.get("FAKE_SRUN_FAILS"):
        print(f"srun: error: {complaint}", file=sys.stderr)
        return 1
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    command = sys.argv[1 + len(options) :]
    [nodes] = [option.partition("=")[2].split(",") for option in options if option.startswith("--nodelist=")]
    tasks = []
    for index, node in enumerate(nodes):
        own = {"SLURMD_NODENAME": node, "SLURM_PROCID": str(index), "SLURM_STEP_ID": "0"}
        task = subprocess.Popen(
            command, env={**os.environ, **own}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        tasks.append(task)
    threads = [threading.Thread(target=passes_on, args=(task.stdout,)) for task in tasks if task.stdout is not None]
    for thread in threads:
        thread.start()
    threading.Thread(target=hands_out, args=([task.stdin for task in tasks],), daemon=True).start()
    for thread in threads:
        thread.join()
    return max(abs(task.wait()) for task in tasks)


def passes_on(stream: IO[bytes]) -> None:
    for line in stream:
        os.write(1, line)


def hands_out(inputs: list[IO[bytes] | None]) -> None:
    while data := os.read(0, 1 << 16):
        for one in inputs:
            if one is not None:
                try:
                    one.write(data)
                    one.flush()
                except OSError:
                    continue
    for one in inputs:
        if one is not None:
            one.close()


if __name__ == "__main__":
    sys.exit(main())
