"""`primerl deploy` and `primerl undeploy`: an adapter of the store, served and never cleaned up."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from primerl.cli.arguments import CommandParser
from primerl.cli.run.common import BAD_INPUT, add_json, show, size
from primerl.config.errors.fail import fail
from primerl.runs.registry import known
from primerl.runs.state import StateError, private_folder
from primerl.stores.choice import open_store, store_of_run
from primerl.stores.entries import Entry, StoreError, model_digest
from primerl.stores.store import Store
from primerl.train.checkpoint.files import whole_folder

TITLE = "Nothing was deployed"


def deploy(arguments: list[str]) -> int:
    parser = _parser(
        "deploy",
        "Marks an adapter of the store as deployed and serves it, merged into its base model, as `primerl inference` "
        "does, until Ctrl-C. It stays marked: `primerl undeploy` lets it be cleaned up again. Further options are "
        "those of `primerl inference`, such as --port 8000.",
    )
    parser.add_argument("--model", type=Path, help="its base model, where the run that trained it is not in the list")
    parser.add_argument("--mark-only", action="store_true", help="serve nothing")
    chosen, options = parser.parse_known_args(arguments)
    try:
        store, entry = _find(chosen)
        folder = None if chosen.mark_only else merged(store, entry, chosen.model)
        store.mark_deployed(entry, deployed=True)
    except (StoreError, StateError, ValueError) as error:
        return fail(str(error), title=TITLE)
    print(f"deployed {entry.id}", flush=True)
    if folder is None:
        return 0
    from primerl.cli.processes import inference

    name = entry.id.replace("/", "-")
    return inference(["--model.path", os.fspath(folder), "--model.name", name, *options])


def undeploy(arguments: list[str]) -> int:
    parser = _parser("undeploy", "Lets a deployed adapter be cleaned up again; processes that serve it keep running.")
    chosen = parser.parse_args(arguments)
    try:
        store, entry = _find(chosen)
        if entry.id not in store.deployed(entry.run):
            return fail(f"{entry.id} is not deployed", title="Nothing was changed")
        store.mark_deployed(entry, deployed=False)
    except (StoreError, StateError) as error:
        return fail(str(error), title="Nothing was changed")
    print(f"undeployed {entry.id}")
    return 0


def deployments(arguments: list[str]) -> int:
    """`list`, and `create` and `delete` as `prime deployments` calls them."""
    words = {"create": deploy, "delete": undeploy, "list": _listed}
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: primerl deployments list [--store URL] [--json]\n       primerl deployments create ADAPTER")
        print("       primerl deployments delete ADAPTER")
        return 0 if arguments else BAD_INPUT
    if arguments[0] not in words:
        return fail(
            f"`primerl deployments` has no word {arguments[0]!r}; there are list, create (`primerl deploy`) and delete "
            "(`primerl undeploy`)",
            title="Nothing was done",
        )
    return words[arguments[0]](arguments[1:])


def _listed(arguments: list[str]) -> int:
    parser = CommandParser(prog="primerl deployments list", description="The adapters in stores.", allow_abbrev=False)
    parser.add_argument("--store", metavar="URL", help="only of this store; default: of all stores of listed runs")
    add_json(parser)
    chosen = parser.parse_args(arguments)
    from primerl.cli.store import all_stored

    try:
        found = [
            (entry, entry.id in one.deployed, one.store.url)
            for one in all_stored(chosen.store)
            for entry in one.entries
            if entry.kind == "adapter"
        ]
    except (StoreError, StateError) as error:
        return fail(str(error), title="The store cannot be used")
    if chosen.json:
        names = ("adapter", "deployed", "bytes", "store")
        told = [dict(zip(names, (entry.id, is_, entry.bytes, url), strict=True)) for entry, is_, url in found]
        print(json.dumps(told, indent=2))
    elif found:
        rows = [[entry.id, "yes" if is_ else "", size(entry.bytes), url] for entry, is_, url in found]
        show(["adapter", "deployed", "size", "store"], rows, right=(2,))
    else:
        print("no adapter is stored; `[store] adapters.interval` and `[trainer.model.lora]` of a run store some")
    return 0


def _parser(word: str, description: str) -> CommandParser:
    parser = CommandParser(prog=f"primerl {word}", description=description, allow_abbrev=False)
    parser.add_argument("adapter", metavar="ADAPTER", help="RUN (its newest), RUN/step_N or RUN/adapter/step_N")
    parser.add_argument("--store", metavar="URL", help="where it is; the run's store, or the state folder's")
    return parser


def _find(chosen: argparse.Namespace) -> tuple[Store, Entry]:
    run, _, step = chosen.adapter.replace("/adapter", "").partition("/")
    store = None
    if chosen.store is None and (found := known(run)) is not None:
        run, store = found.id, store_of_run(found.config)
    store = store or open_store(chosen.store)
    return store, store.find("/".join(part for part in (run, "adapter", step) if part))


def merged(store: Store, entry: Entry, model: Path | None) -> Path:
    """A model folder with the adapter merged into its base model; made once. Raises StoreError, and ValueError where
    the base is another one."""
    target = private_folder("deployed") / entry.id.replace("/", "-") / entry.data.rpartition("_")[2]
    if target.is_dir():
        return target
    base = model or _base(entry)
    if model_digest(base) != entry.model:
        raise StoreError(f"{entry.id} is of another model than the one in {base}; give its own by --model")
    adapter = store.fetch(entry)
    from primerl.train.adapters.files import ADAPTER_FILE, check_base, folder_digest
    from primerl.train.settings import ConfigError

    try:
        check_base(adapter / ADAPTER_FILE, base, folder_digest(base), "")
    except ConfigError as error:
        raise StoreError(error.problems[0].reason) from None
    with whole_folder(target, replace=True) as folder:
        _merge(base, adapter, folder)
    return target


def _base(entry: Entry) -> Path:
    run = known(entry.run)
    if run is None:
        raise StoreError(f"which model {entry.id} belongs to is not known here; give it by --model")
    return Path(run.model)


def _merge(base: Path, adapter: Path, target: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from primerl.train.checkpoint.model_folder import TEXT_FILES

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    model.merge_and_unload().save_pretrained(target)
    for name in TEXT_FILES:  # byte for byte: saving them through transformers may change them
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)
