"""How long an engine stands still for new weights, and what becomes of the requests that it has then.

    python benches/update_pause.py [--backend torch vllm] [--steps 30]     # vllm: after `make vllm`; two minutes each

A run of the demo's model whose trainer does nothing but publish other weights after each batch (`primerl.Run`), so that
the engine is updated again and again with its requests in flight. The pause is the orchestrator's own measure: from
the call that pauses the engine to the answer of the one that resumes it. Then every sampled token is recomputed with
the weights of its version, the tokens of both sides of each boundary among them (`primerl verify`).

Goals, of the median update, the first ones left out: 60 ms on vLLM, 10 ms on the embedded engine. Exits 1 when one is
missed, when a request failed or was sent again, when no request crossed an update, or when a token is not exact. Where
vLLM is not installed for `.venv-vllm`, its part is left out, and that is said.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import primerl
import torch
from primerl.models.tiny import write_model
from primerl.train.model.packed_model import load_model
from primerl.verify import verify

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = REPOSITORY / "examples" / "reverse-text" / "rl-ci.toml"
VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
GOAL_MS = {"torch": 10.0, "vllm": 60.0}
WARM_UP = 3
# Beside an optimizer's step of the demo (its learning rate), this is large: a token of the wrong version is seen.
NOISE = 2e-3


def settings(backend: str, model: Path, output: Path, steps: int) -> list[str]:
    given = {
        "model.path": model,
        "output-dir": output,
        "max-steps": steps,
        "keep-broadcasts": "true",
        "orchestrator.eval.env": "[]",
        # Long answers: most cross an update.
        "orchestrator.sampling.max-tokens": 96,
        "inference.max-model-len": 256,
        "inference.backend": backend,
    }
    if backend == "vllm":
        given["inference.python"] = VLLM_PYTHON
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def update_often(backend: str, folder: Path, steps: int) -> tuple[list[float], int, Path]:
    """Milliseconds of each pause; requests that failed or were sent again; the run's folder."""
    write_model(folder / "model", seed=0)
    output = folder / backend
    with primerl.Run(RECIPE, *settings(backend, folder / "model", output, steps)) as run:
        model = load_model(folder / "model", "float32", "cpu")
        generator = torch.Generator().manual_seed(0)
        for _ in run.batches():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += NOISE * torch.randn(parameter.shape, generator=generator)
            run.publish(model)
        status = run.status()
    # Where a verification looks for the shape of the model.
    model.config.save_pretrained(output / "weights" / "step_0")
    lost = status["failovers"] + status["rollouts"]["failed"]
    log = (output / "logs" / "orchestrator.log").read_text(encoding="utf-8")
    pauses = re.findall(r"engine proved its weights.*\bpaused_ms=(\S+)", log)
    return [float(pause) for pause in pauses], lost, output


def measure(backend: str, steps: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="primerl-bench-") as folder:
        pauses, lost, output = update_often(backend, Path(folder), steps)
        report = verify(output)
    pauses = sorted(pauses[WARM_UP:])
    middle = median(pauses)
    print(
        f"{backend}: paused for {middle:.1f} ms in the median update ({pauses[0]:.1f} at least, {pauses[-1]:.1f} at "
        f"most, {len(pauses)} updates; goal {GOAL_MS[backend]:.0f}; load of the machine {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores); {lost} requests failed or were sent again"
    )
    print(f"{backend}: {report}")
    return middle <= GOAL_MS[backend] and lost == 0 and report.passed and report.crossed > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=sorted(GOAL_MS), default=sorted(GOAL_MS))
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    backends = list(arguments.backend)
    if "vllm" in backends and not VLLM_PYTHON.exists():
        print("vllm: left out, there is no .venv-vllm (`make vllm` makes it)", file=sys.stderr)
        backends.remove("vllm")
    held = [measure(backend, arguments.steps) for backend in backends]
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
