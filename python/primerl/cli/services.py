"""Published commands of services that primerl does not have, each with what to use instead. One table; exit code 2."""

from __future__ import annotations

import json

# By the command, without `primerl`; a row of one word is about all words below it.
INSTEAD = {
    "--context": "primerl has no accounts; PRIMERL_STATE_DIR names another folder of runs and secrets",
    "availability": "primerl rents no machines; `primerl doctor` shows what this one has",
    "pods": "primerl rents no machines; `primerl doctor` shows what this one has, docs/slurm.md and "
    "docs/recipes/several-machines.md use others",
    "disks": "primerl rents no disks; `store.url` of a run copies what it saves to any storage (docs/runs.md)",
    "sandbox": "primerl has no sandboxes of its own; an environment starts containers by what it is written with",
    "images": "primerl has no image registry; env workers run what is installed here (docs/environments.md)",
    "registry": "primerl has no image registry; env workers run what is installed here (docs/environments.md)",
    "tunnel": "primerl opens no tunnels; env workers of other machines join by `primerl env-worker --join URL`",
    "teams": "primerl has no accounts; runs are those of this machine's user",
    "switch": "primerl has no accounts; runs are those of this machine's user",
    "login": "primerl has no accounts; keys of services are in environment variables, and `primerl secret set NAME` "
    "keeps those of env workers",
    "logout": "primerl has no accounts; `primerl secret delete NAME` removes a key that it keeps",
    "whoami": "primerl has no accounts; `primerl doctor` shows this machine",
    "wallet": "primerl bills nothing",
    "usage": "primerl bills nothing; `primerl run metrics ID` has a run's tokens and times",
    "feedback": "primerl sends nothing anywhere; write to those you have it from",
    "upgrade": "primerl is on no package index; `git pull` and `make build` upgrade a clone (docs/install.md)",
    "fork": "primerl has no environment hub; copy the package's folder into ./environments",
    "hf": "the Hugging Face client is a command of its own: `hf upload USER/MODEL OUTPUT_DIR/weights/step_N`",
    "env push": "primerl has no environment hub; give the package's folder or git address to those who use it",
    "env pull": "primerl has no environment hub; get the package's source by git, then `primerl env install NAME`",
    "env build": "primerl builds no images; an environment is a Python package, which `primerl env install` installs",
    "env info": "primerl has no environment hub; `primerl env list` shows the packages of this folder",
    "env status": "primerl has no environment hub; `primerl env list` shows the packages of this folder",
    "env inspect": "primerl has no environment hub; the source of a package of this folder is in ./environments",
    "env delete": "primerl has no environment hub; `primerl env uninstall NAME` removes a package from this Python",
    "env version": "primerl has no environment hub; versions are those of the packages' pyproject.toml",
    "env action": "primerl has no environment hub; run the package's own tests with `python -m pytest`",
    "env var": "variables of one environment are kept like its secrets: `primerl env secret set ENVIRONMENT NAME`",
    "env secret link": "secrets of all environments are `primerl secret set NAME`: every environment has them unlinked",
    "env secret unlink": "nothing is linked; `primerl env secret delete ENVIRONMENT NAME` removes an environment's own",
    "secret get": "values of secrets are shown nowhere; `primerl secret list` has their names",
    "env secret get": "values of secrets are shown nowhere; `primerl env secret list ENVIRONMENT` has their names",
    "eval get": "summary.json and results.jsonl of an evaluation are in its folder, which `primerl run list` shows",
    "eval samples": "results.jsonl of an evaluation has every rollout; `primerl run list` shows its folder",
    "eval push": "primerl uploads no evaluations; results.jsonl and summary.json are in the evaluation's folder",
    "eval tui": "`primerl page ID` shows an evaluation in the browser, `primerl top ID` one that runs in the terminal",
    "eval view": "`primerl page ID` shows an evaluation in the browser, `primerl top ID` one that runs in the terminal",
    "lab sync": "primerl keeps no copies of templates; `primerl lab setup` writes the files that are missing",
    "lab doctor": "`primerl doctor` checks the machine, `--dry-run` of a command its config and its environments",
    "lab hygiene": "`git status --ignored` shows what .gitignore of `primerl lab setup` keeps out",
    "lab register-github": "primerl writes no CI workflows; `python -m pytest environments` is what one would run",
    "lab view": "`primerl run list` lists runs and evaluations, `primerl page ID` shows one in the browser",
    "lab mcp": "primerl has no MCP server; commands that list print JSON with --json",
    "rl gpus": "runs use the GPUs of this machine, which `primerl doctor` shows",
    "rl request": "every model of a known type can be trained; `primerl models check MODEL` says which and why",
    "rl configs": "`primerl rl --help`, and `primerl config explain KEY`",
    "rl usage": "primerl bills nothing; `{program} metrics ID` has a run's tokens and times",
    "env-server": "environments run in env workers, which a run starts; `primerl env-worker --join URL --env NAME` "
    "runs some elsewhere",
    "evals": "`primerl eval @ FILE` reads such a file",
    "validate": "`python -m primerl.envs.check ID` loads an environment and lists its examples",
    "vf-build": "primerl builds no images; an environment is a Python package, which `primerl env install` installs",
    "vf-debug": "verifiers' own command works next to primerl: `vf-debug`",
    "vf-replay": "verifiers' own command works next to primerl: `vf-replay`",
    "vf-validate": "`python -m primerl.envs.check ID` loads an environment and lists its examples; `vf-validate` of "
    "verifiers works next to primerl",
    "vf-tui": "`primerl page ID` shows an evaluation in the browser",
    "vf-train": "`primerl rl @ FILE` trains",
    "vf-rl": "`primerl rl @ FILE` trains",
    "vf-vllm": "`primerl inference --model.path MODEL --backend vllm` serves a model",
}


# By the flag, of commands that start a run.
FLAGS = {
    "-e": "a value on the command line is seen by everybody on this machine; write NAME=value lines into a file and "
    "give --env-file FILE, or keep it by `primerl secret set NAME`",
    "--gpu-type": "runs use the GPUs of this machine; docs/placement.md says which process gets which",
    "--image-tag": "primerl runs as it is installed here, in no image; omit it",
    "-o": "`-d` prints the run's id, and `primerl run get ID` all that is known of it",
    "--pr": "primerl runs as it is installed here; omit it",
    "--ref": "primerl runs as it is installed here; omit it",
    "--resume-from": "`primerl run resume ID` resumes a run; `checkpoint_id` starts a new one from what it has stored",
    "--sft": "`primerl sft @ FILE` fine-tunes",
    "--volume": "a run writes into its output_dir; `store.url` copies what it saves away (docs/runs.md)",
}
FLAGS |= {"--env-var": FLAGS["-e"], "--output": FLAGS["-o"], "--volume-size": FLAGS["--volume"]}
NOT_NEEDED = ("-y", "--yes", "--fft", "--full-finetune")
"""Published flags of a start that change nothing here: nothing is asked, and what is trained is in the file."""


def instead(*words: str) -> str | None:
    """What to use in place of a command that is not there; None for any other command."""
    return INSTEAD.get(" ".join(words))


def refused(*words: str) -> str | None:
    """The sentence that refuses it, or None."""
    found = instead(*words)
    return None if found is None else f"there is no `primerl {' '.join(words)}`: {found}"


def started_with(arguments: list[str]) -> list[str]:
    """The arguments of a start, with published flags as keys, and without those that change nothing.

    Raises:
        ConfigError: One of them asks for what only a service has, or has no value.
    """
    from primerl.config.errors.fail import ConfigError

    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in FLAGS:
            raise ConfigError(f"{flag} is no flag of primerl: {FLAGS[flag]}")
    found: list[str] = []
    files: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--env-file":
            # It may be repeated, and a repeated key would replace what came before.
            file = value if equals else next(words, "")
            if not file:
                raise ConfigError("--env-file requires a value: a file of NAME=value lines")
            files.append(file)
        elif word not in NOT_NEEDED:
            found.append(word)
    return [*found, *(["--env-files", json.dumps(files)] if files else [])]
