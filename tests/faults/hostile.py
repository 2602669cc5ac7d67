"""Run as a program: it makes hostile checkpoints from a valid one, and reads each of them while an audit hook watches.

``hostile.py DIRECTORY SEED FIRST COUNT WAYS`` prints a line of JSON for each case: what it is, how each way of reading
it ended, and what was done meanwhile that no reading may do. Each case is read in WAYS ways, which are drawn.
"""

from __future__ import annotations

import codecs
import gc
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from click.testing import CliRunner

import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.checkpoint.store import newest_verified
from trainer_kit.checkpoint.weights import read_module
from trainer_kit.commands.main import main as command_line
from trainer_kit.core.errors import CheckpointError
from trainer_kit.testing import TinyModule

PATIENCE = 20  # seconds a case, in all ways together
ROOM = 2 << 30  # bytes of address space beyond what a valid checkpoint takes
BATCHES = [torch.ones(2, 32)] * 2
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
NEVER = {
    "exec",
    "compile",
    "import",
    "marshal.loads",
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.putenv",
    "subprocess.Popen",
    "ctypes.dlopen",
    "code.__new__",
    "function.__new__",
    "socket.__new__",
    "socket.connect",
    "urllib.Request",
}
CHANGES = {
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
}


KINDS = [
    "manifest",
    "names",
    "document",
    "document",
    "records",
    "text",
    "manifest text",
    "header",
    "header",
    "pickle",
]
KINDS += ["link", "index", "lock", "hidden", "file", "file", "file", "sparse", "shelf"]


class Watch:
    """What is done while it is on, that reading a checkpoint does not do."""

    def __init__(self, scratch: Path, outside: Path) -> None:
        self.on, self.seen = False, set()
        self.scratch, self.outside = str(scratch), str(outside)
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in NEVER:
            self.seen.add(f"{event} {str(arguments)[:200]}")
        elif event == "open" or event in CHANGES:
            path = (
                os.path.abspath(os.fsdecode(arguments[0]))
                if isinstance(arguments[0], str | bytes)
                else ""
            )
            writes = event != "open" or bool(
                (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            in_tree = event in ("os.remove", "os.rmdir") and arguments[-1] not in (
                None,
                -1,
            )  # of shutil.rmtree
            if path.startswith(self.outside) or (
                writes and not in_tree and not path.startswith(self.scratch)
            ):
                self.seen.add(f"{event} {str(arguments)[:200]}")


class Keeps(tk.Callback):
    """A state of every type that the codec knows."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "tuple": (1, "a"),
            "set": {1, 2},
            "frozenset": frozenset({"x"}),
            "bytes": b"abc",
            "bytearray": bytearray(b"abc"),
            "complex": 1 + 2j,
            "float": float("inf"),
            "int": 2**80,
            "pairs": {1: "one", (2, 3): "two"},
            "ordered": OrderedDict(a=1),
            "counter": Counter("abca"),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "size": torch.Size([2, 3]),
            "timedelta": timedelta(1, 2, 3),
            "path": Path("somewhere"),
            "numpy": np.float32(1.5),
            "array": np.arange(6.0).reshape(2, 3),
            "dates": np.array(["2020-01-01"], "M8[D]"),
            "complex tensor": torch.ones(2, dtype=torch.complex64),
            "tensor": torch.arange(4),
            "module": torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()),
            "class": torch.nn.ReLU,
            "partial": partial(torch.optim.SGD, lr=0.1),
            "deque": deque([1], maxlen=2),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state


# -- what an attacker writes -------------------------------------------------------------------------------------------


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


TAGS = [
    "int",
    "float",
    "bytes",
    "bytearray",
    "complex",
    "dtype",
    "device",
    "size",
    "timedelta",
    "path",
    "numpy",
]
TAGS += [
    "tuple",
    "set",
    "frozenset",
    "dict",
    "OrderedDict",
    "Counter",
    "enum",
    "tensor",
    "array",
    "None",
    "object",
]
TAGS += ["name", "dataclass", "namedtuple", "module", "partial"]
DTYPES = [
    "O",
    "object",
    "V8",
    "i4,i4",
    "(2,3)i4",
    "<U0",
    "|S0",
    "<U999999999",
    "M8[99999999999s]",
    "f4",
    "<f3",
    "x" * 99,
]
NAMES = [
    "../outside/secret",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "\0",
    "a\0b",
    "\ud800",
    "\x1b[2J",
    "x" * 300,
]
PATHS = [
    "os.system",
    "subprocess.Popen",
    "eval",
    "torch.load",
    "torch.hub.load",
    "torch.relu",
    "int",
    "antigravity.fly",
]
PATHS += [
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.container.Sequential",
    "torch.optim.sgd.SGD",
]
PATHS += [
    "fractions.Fraction",
    "range",
    "collections.deque",
    "collections.defaultdict",
    "torch._C.Generator",
]
PATHS += [
    "trainer_kit.checkpoint.commit.remove_checkpoint",
    "torch.fx.graph_module.GraphModule",
    "__main__.Evil",
]
NAMES += [
    "manifest.json",
    "state.json",
    "model.safetensors",
    ".lock",
    "-",
    "con",
    "é",
    "a\nb",
    "_dynamo",
    "os",
    "load",
]


def nested(levels: int) -> Any:
    value: Any = 0
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def nasty(draw: random.Random, depth: int = 0) -> Any:
    """A value that somebody may not expect."""
    plain: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**64,
        10**400,
        1e308,
        math.inf,
        -0.0,
        [],
        {},
        "x" * 70_000,
    ]
    kind = draw.randrange(10)
    if kind < 3 or depth > 3:
        return draw.choice(plain)
    if kind == 3:
        return draw.choice(NAMES + DTYPES)
    if kind == 4:
        return nested(draw.choice([3, 3, 3, 10, 10, 150, 320, 480, 900]))
    if kind == 5:
        return [nasty(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {
            draw.choice([*NAMES, "$", "v"]): nasty(draw, depth + 1)
            for _ in range(draw.randrange(4))
        }
    return record(draw, depth)


def record(draw: random.Random, depth: int = 0) -> Any:
    tag = draw.choice([*TAGS, nasty(draw, depth + 1)])
    value = draw.choice(
        [
            nasty(draw, depth + 1),
            [nasty(draw, depth + 1)] * draw.randrange(4),
            "0x" + "f" * draw.choice([1, 20, 10_000]),
            "1e999999",
            "nan",
            "net.0.weight",
            "layer.weight",
            "cuda:99999999999999999999",
            [[nasty(draw, depth + 1), 1]],
            [10**18, 10**18],
            draw.choice(PATHS),
            [draw.choice(PATHS), nasty(draw, depth + 1)],
            [draw.choice(PATHS), record(draw, depth + 1) if depth < 3 else {}],
            [{"$": "name", "v": draw.choice(PATHS)}, [nasty(draw, depth + 1)], {}],
        ]
    )
    made = {"$": tag, "v": value}
    if draw.random() < 0.4:
        made["dtype"] = draw.choice(
            [
                *DTYPES,
                nasty(draw, depth + 1),
                "complex64",
                "quint8",
                "float8_e8m0fnu",
                "bits8",
            ]
        )
    if draw.random() < 0.4:
        made["shape"] = draw.choice(
            [
                nasty(draw, depth + 1),
                [2**62, 0],
                [2**40],
                [-1],
                [10**30],
                ["a"],
                [1.5],
                [],
            ]
        )
    if draw.random() < 0.1:
        made["metadata"] = nasty(draw, depth + 1)
    if draw.random() < 0.1:
        del made["v"]
    return made


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with each of its keys."""
    found, todo = [], [tree]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list):
            keys = list(value) if isinstance(value, dict) else range(len(value))
            found += [(value, key) for key in keys]
            todo += [value[key] for key in keys]
    return found


def change(draw: random.Random, tree: Any) -> None:
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        holder, key = draw.choice(places(tree))
        how = draw.randrange(6)
        if how == 0 and isinstance(holder, dict):
            holder[draw.choice(NAMES)] = nasty(draw)
        elif how == 1 and isinstance(holder, dict):
            del holder[key]
        elif how == 2:
            other, at = draw.choice(places(tree))
            holder[key] = json.loads(json.dumps(other[at]))
        elif how == 3:
            holder[key] = record(draw)
        else:
            holder[key] = nasty(draw)


def raw_json(draw: random.Random, good: bytes) -> bytes:
    """A text that is no decent JSON, or too much of it."""
    return draw.choice(
        [
            lambda: b"[" * 100_000,
            lambda: b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
            lambda: b"[" * 500 + b"]" * 500,
            lambda: good.replace(b"{", b'{"huge": 1e999999, ', 1),
            lambda: good.replace(b"{", b'{"huge": ' + b"9" * 10**6 + b", ", 1),
            lambda: good.replace(b"{", b'{"constant": NaN, ', 1),
            lambda: good.replace(b"{", b'{"constant": -Infinity, ', 1),
            lambda: good.replace(b"{", b'{"model": 1, "files": 1, ', 1),
            lambda: good.decode().encode("utf-16"),
            lambda: b"\xef\xbb\xbf" + good,
            lambda: good[:-3] + b"\xff\xfe}",
            lambda: good[: draw.randrange(len(good))],
            lambda: b"[" + b"[]," * 10**6 + b"[]]",
            lambda: b'"' + b"x" * 10**7 + b'"',
            lambda: b"null",
            lambda: b"",
        ]
    )()


def shard(draw: random.Random, good: bytes) -> bytes:
    """A safetensors file with a header that lies."""
    size = struct.unpack("<Q", good[:8])[0]
    header, data = json.loads(good[8 : 8 + size]), good[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    kind = draw.randrange(12)
    if kind == 0:
        return (
            struct.pack(
                "<Q", draw.choice([2**40, 2**60, 2**64 - 1, 0, 1, len(good), size + 1])
            )
            + good[8:]
        )
    if kind == 1:
        entry = header[draw.choice(names)]
        entry["data_offsets"] = draw.choice(
            [
                [0, 2**60],
                [2**60, 2**60],
                [8, 0],
                [-1, 4],
                [0.5, 1],
                "x",
                [],
                [0, 10**30],
            ]
        )
    elif kind == 2:
        huge = [
            [2**62, 0],
            [0, 2**63],
            [2**32, 2**32],
            [2**40],
            [-1],
            [1.5],
            "x",
            [10**30],
            [0] * 1000,
            [1] * 1000,
        ]
        header[draw.choice(names)]["shape"] = draw.choice(huge)
    elif kind == 3:
        header[draw.choice(names)]["dtype"] = draw.choice(
            ["F4", "F64", "BOOL", "X", "F8_E8M0", "C64", "I4", 7, None]
        )
    elif kind == 4:
        header["empty"] = {
            "dtype": "F32",
            "shape": draw.choice([[2**62, 0], [0, 2**64 - 1]]),
            "data_offsets": [0, 0],
        }
    elif kind == 5 and len(names) > 1:
        one, other = draw.sample(names, 2)
        header[one] = header[other]
    elif kind == 6:
        header["__metadata__"] = nasty(draw)
    elif kind == 7:
        text = draw.choice(
            [
                b"[" * 100_000,
                b'{"a":' * 50_000,
                b"{" + b'"a":1,' * 1000 + b'"a":1}',
                b"\xff" * 64,
                b"NaN",
            ]
        )
        return struct.pack("<Q", len(text)) + text + data
    elif kind == 8:
        change(draw, header)
    elif kind == 9:
        data = data + bytes(draw.choice([1, 8, 10**6]))
    elif kind == 10:
        data = data[: draw.randrange(len(data) + 1)]
    else:
        header[draw.choice(NAMES)] = header.pop(draw.choice(names))
    text = dump(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def torch_file(draw: random.Random, directory: Path) -> bytes:
    """What `torch.save` could have written, with a will of its own."""
    weights = {name: value.clone() for name, value in TinyModule().state_dict().items()}
    evil, stream = Evil(str(directory / "canary")), io.BytesIO()
    kind = draw.randrange(10)
    content: Any = draw.choice(
        [
            {**weights, "more": evil},
            {"state_dict": weights, "callbacks": evil},
            {
                "state_dict": weights,
                "hyper_parameters": draw.choice([evil, 3, [1], "x", {1: 2}]),
            },
            {"state_dict": evil},
            evil,
            [weights],
            {"state_dict": {1: torch.ones(2)}},
            {"state_dict": {"w": "text"}},
            {
                name: value[:1].expand(2**40, *value.shape[1:])
                for name, value in weights.items()
            },
            {
                "w": torch.sparse_coo_tensor(
                    torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (2**40,)
                )
            },
            {"w": torch.empty(2**40, device="meta")},
            weights,
        ]
    )
    if kind == 0:
        return pickle.dumps(content, draw.choice([0, 2, 4]))
    if kind == 1:
        return pickle.dumps(evil, draw.choice([2, 4])) * 2
    torch.save(content, stream, _use_new_zipfile_serialization=kind != 2)
    good = stream.getvalue()
    if kind == 3:
        return good[: draw.randrange(10, len(good))]
    if kind == 4:
        bad = bytearray(good)
        for _ in range(draw.choice([1, 3, 30])):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        return bytes(bad)
    if kind in (5, 6) and zipfile.is_zipfile(io.BytesIO(good)):
        made = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(good)) as old,
            zipfile.ZipFile(made, "w") as new,
        ):
            for entry in old.infolist():
                data = (
                    bytes(50 << 20)
                    if kind == 5 and "/data/0" in entry.filename
                    else old.read(entry)
                )
                name = (
                    entry.filename
                    if kind == 5
                    else f"../../{draw.choice(NAMES[:5])}/{entry.filename}"
                )
                new.writestr(
                    name,
                    data,
                    zipfile.ZIP_DEFLATED if kind == 5 else zipfile.ZIP_STORED,
                )
        return made.getvalue()
    return good


def dump(value: Any, **options: Any) -> str:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        return json.dumps(value, **options)
    finally:
        sys.setrecursionlimit(before)


def seal(path: Path, edit: Callable[[Any], None] | None = None) -> None:
    """A manifest that is right about every file, signed as anybody can."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["sha256"]
    for name in list(manifest["files"]):
        if (path / name).is_file():
            data = (path / name).read_bytes()
            manifest["files"][name] = {
                "size": len(data),
                "xxh3_64": xxhash.xxh3_64(data).hexdigest(),
            }
    if edit is not None:
        edit(manifest)
    canonical = dump(manifest, sort_keys=True, separators=(",", ":")).encode()
    signed = (
        {**manifest, "sha256": sha256(canonical).hexdigest()}
        if isinstance(manifest, dict)
        else manifest
    )
    (path / "manifest.json").write_text(
        dump(signed, indent=1).replace("Infinity", "1e999999") + "\n"
    )


def make(draw: random.Random, path: Path, root: Path) -> str:
    """Turn the valid checkpoint at ``path`` into a hostile one; says how."""
    document, shards = path / "state.json", sorted(path.glob("*.safetensors"))
    kind = draw.choice(KINDS)
    if kind == "manifest":
        seal(path, lambda manifest: change(draw, manifest))
    elif kind == "names":
        seal(path, lambda manifest: misname(draw, manifest))
    elif kind in ("document", "records"):
        tree = json.loads(document.read_bytes())
        for _ in range(1 if kind == "document" else 10):
            change(draw, tree)
        document.write_text(dump(tree).replace("Infinity", "1e999999"))
        seal(path)
    elif kind == "text":
        document.write_bytes(raw_json(draw, document.read_bytes()))
        seal(path)
    elif kind == "manifest text":
        (path / "manifest.json").write_bytes(
            raw_json(draw, (path / "manifest.json").read_bytes())
        )
    elif kind == "header":
        file = draw.choice(shards)
        file.write_bytes(shard(draw, file.read_bytes()))
        seal(path)
    elif kind == "pickle":
        draw.choice([document, *shards]).write_bytes(torch_file(draw, root))
        seal(path)
    elif kind == "link":
        file = draw.choice([path / "manifest.json", document, *shards])
        file.unlink()
        instead(draw, file, root)
    elif kind == "index":
        names = {
            draw.choice(["last", "best", *NAMES]): draw.choice([*NAMES, nasty(draw)])
            for _ in range(3)
        }
        names["last"] = draw.choice(
            [*NAMES, "../outside/step-2", "step-2", "link", nasty(draw)]
        )
        index = {
            "format": "trainer_kit.index",
            "version": 1,
            "names": draw.choice([names, names, nasty(draw)]),
        }
        (path.parent / "index.json").write_bytes(
            draw.choice([dump(index).encode(), raw_json(draw, b"{}")])
        )
        (path.parent / "link").symlink_to(root / "outside" / "step-2")
    elif kind == "lock":
        lock = {
            "host": nasty(draw),
            "pid": draw.choice([-1, 0, 2**70, 1e300, "x", None]),
            "start": "",
            "since": "",
        }
        (path.parent / ".lock").write_bytes(
            draw.choice([dump(lock).encode(), raw_json(draw, b"{}")])
        )
    elif kind == "hidden":
        (
            path.parent
            / f".{draw.choice(['..', 'step-2', 'index.json', 'x'])}.1-{'0' * 18}.{draw.choice(['tmp', 'old'])}"
        ).mkdir()
        (path.parent / f".index.json.99999-{'0' * 18}.tmp").symlink_to(
            root / "outside" / "secret"
        )
    elif kind == "sparse":
        os.truncate(
            draw.choice([path / "manifest.json", document, path.parent / "index.json"]),
            1 << 40,
        )
    elif kind == "shelf":
        tree = json.loads(document.read_bytes())
        shelf = next(
            state
            for key, state in tree["callbacks"].items()
            if "ModelCheckpoint" in key
        )
        elsewhere, named = (
            str(root / "outside" / "step-2"),
            ["kept", "yielding", "newest", "best"],
        )
        for holder, key in places(shelf):
            if key in draw.sample(named, draw.randrange(1, 5)):
                holder[key] = {"kept": {elsewhere: 0.0}, "yielding": [elsewhere]}.get(
                    key, elsewhere
                )
        document.write_text(dump(tree).replace("Infinity", "1e999999"))
        seal(path)
    else:
        (path.parent / "file").write_bytes(
            draw.choice(
                [torch_file, torch_file, lambda d, _: shard(d, shards[0].read_bytes())]
            )(draw, root)
        )
    return kind


def misname(draw: random.Random, manifest: Any) -> None:
    name = draw.choice(NAMES)
    where = draw.choice(["files", "parts", "both"])
    if where != "parts":
        old = draw.choice(list(manifest["files"]))
        manifest["files"][name] = (
            manifest["files"][old]
            if draw.random() < 0.5
            else manifest["files"].pop(old)
        )
    if where != "files":
        manifest["parts"][draw.choice([*manifest["parts"], name])] = name


def instead(draw: random.Random, file: Path, root: Path) -> None:
    kind = draw.choice(["secret", "pipe", "directory", "itself", "device", "nowhere"])
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        targets = {
            "secret": root / "outside" / "secret",
            "itself": file,
            "device": Path("/dev/zero"),
        }
        file.symlink_to(targets.get(kind, root / "nowhere"))


# -- who reads it ------------------------------------------------------------------------------------------------------


def fit(kept: Path, ckpt_path: Any, **options: Any) -> None:
    """Everything up to the first step, of which there is none left."""
    keeper = ModelCheckpoint(kept, every_n_train_steps=1, save_top_k=-1)
    root = os.path.dirname(str(keeper.dirpath))  # a run leaves its record there
    trainer = tk.Trainer(
        max_steps=2, default_root_dir=root, callbacks=[keeper, Keeps()], **QUIET
    )
    trainer.fit(TinyModule(), BATCHES, ckpt_path=ckpt_path, **options)


def evaluate(path: Path) -> None:
    tk.Trainer(**QUIET).test(TinyModule(), BATCHES, ckpt_path=path, verbose=False)


def command(*arguments: Any) -> None:
    """What went wrong on the command line, unless it was said as it should be."""
    result = CliRunner().invoke(command_line, ["checkpoint", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


def readers(kept: Path, scratch: Path) -> dict[str, Callable[[], Any]]:
    hostile, sound = kept / "step-2", kept / "step-1"
    file = kept / "file"
    ways: dict[str, Callable[[], Any]] = {
        "verify": lambda: tk.verify_checkpoint(hostile),
        "read": lambda: tk.checkpoint.read_checkpoint(hostile),
        "read unverified": lambda: tk.checkpoint.read_checkpoint(hostile, verify=False),
        "list": lambda: tk.checkpoints(kept),
        "weights": lambda: tk.checkpoint.read_weights(hostile),
        "module": lambda: read_module(hostile),
        "export": lambda: tk.checkpoint.export(hostile, scratch / "out.safetensors"),
        "diff": lambda: (
            tk.checkpoint.diff(sound, hostile),
            [str(d) for d in tk.checkpoint.diff(hostile, sound)],
        ),
        "newest": lambda: newest_verified(kept),
        "ls": lambda: command("ls", kept),
        "verify all": lambda: command("verify", kept),
        "resume": lambda: fit(kept, hostile),
        "test": lambda: evaluate(hostile),
        "resume last": lambda: fit(kept, "last"),
        "repair": lambda: tk.checkpoint.repair(kept),
    }
    if file.exists():
        return {
            "weights": lambda: tk.checkpoint.read_weights(file),
            "module": lambda: read_module(file),
            "load": lambda: TinyModule.load_from_checkpoint(file),
            "export": lambda: tk.checkpoint.export(file, scratch / "out.safetensors"),
            "export to torch": lambda: tk.checkpoint.export(file, scratch / "out.pt"),
            "read": lambda: tk.checkpoint.read_checkpoint(file),
            "resume": lambda: fit(kept, file),
            "start": lambda: fit(kept, file, load_weights_only=True),
            "test": lambda: evaluate(file),
        }
    return ways


def ending(read: Callable[[], Any]) -> str:
    """``ok``, ``refused``, or what must not be."""
    said = io.TextIOWrapper(io.BytesIO(), "utf-8")
    try:
        with redirect_stdout(said):
            read()
            said.flush()
    except CheckpointError as error:
        text = str(error)
        text.encode()
        return (
            "refused"
            if error.file and error.reason and len(text) < 5000
            else f"not said: {text[:300]}"
        )
    except RuntimeError as error:
        if "Error(s) in loading state_dict" in str(
            error
        ):  # torch's own, for the weights of another model
            return "refused"
        return f"RuntimeError: {error}"[:300]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    return "ok"


def peak_memory() -> int:
    """In bytes. ``ru_maxrss`` starts with that of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(
        int(line.split()[1])
        for line in status.splitlines()
        if line.startswith("VmHWM:")
    )


def main() -> None:
    root, seed = Path(sys.argv[1]), sys.argv[2]
    first, count, ways = map(int, sys.argv[3:])
    warnings.simplefilter("ignore")
    scratch, outside = root / "scratch", root / "outside"
    for directory in (scratch, outside):
        directory.mkdir()
    keeper = ModelCheckpoint(
        scratch / "kept",
        every_n_train_steps=1,
        save_top_k=-1,
        filename="step-{step}",
        auto_insert_metric_name=False,
    )
    options = {"max_steps": 2, "default_root_dir": scratch, **QUIET}
    tk.Trainer(callbacks=[keeper, Keeps()], **options).fit(TinyModule(), BATCHES)
    shutil.copytree(scratch / "kept", root / "valid")
    shutil.copytree(scratch / "kept" / "step-2", outside / "step-2")
    (outside / "secret").write_text("{}")
    watch = Watch(scratch, outside)
    torch.save(TinyModule().state_dict(), scratch / "kept" / "plain.pt")
    for name in ("step-2", "plain.pt"):  # whatever is imported when it is first needed
        for read in readers(scratch / "kept", scratch).values():
            ending(read)
        (scratch / "out.safetensors").unlink(missing_ok=True)
        (scratch / "out.pt").unlink(missing_ok=True)
        if name == "step-2":
            (scratch / "kept" / "plain.pt").rename(scratch / "kept" / "file")
    for encoding in ("cp437", "unicode_escape", "utf_8_sig", "utf_16"):
        codecs.lookup(encoding)
    assert not watch.seen
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    before = peak_memory()
    gc.freeze()  # collections are frequent here, and need not look at torch
    for number in range(first, first + count):
        draw, kept = random.Random(f"{seed} {number}"), scratch / "kept"
        shutil.rmtree(kept)
        shutil.copytree(root / "valid", kept)
        kind = make(draw, kept / "step-2", root)
        endings = {}
        by = readers(kept, scratch)
        drawn = draw.sample(list(by), min(ways, len(by)))
        for way in [way for way in by if way in drawn]:
            signal.alarm(PATIENCE)
            watch.on = True
            endings[way] = ending(by[way])
            watch.on = False
            signal.alarm(0)
            for left in scratch.glob("out*"):
                left.unlink()
        grown = peak_memory() - before
        done = {
            "case": number,
            "kind": kind,
            "endings": endings,
            "done": sorted(watch.seen),
            "grown": grown,
        }
        print(json.dumps(done), flush=True)
        watch.seen.clear()


if __name__ == "__main__":
    main()
