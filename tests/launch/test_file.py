"""Configuration files: all kinds load; a wrong one is one line with file, line, key and what was meant."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
import yaml

from tests.launch.configurations import SAMPLES
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.yaml_guard import YamlProblem, guarded_root
from trainer_kit.launch.configuration import ConfigurationFile, read_configuration
from trainer_kit.launch.options import SECTIONS, TOP


def read(
    directory: Path, text: str | bytes, name: str = "config.yaml"
) -> ConfigurationFile:
    path = directory / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_configuration(path)


def wrong(directory: Path, text: str | bytes, name: str = "config.yaml") -> str:
    with pytest.raises(ConfigurationError) as caught:
        read(directory, text, name)
    return str(caught.value).removeprefix(f"{directory}/")


@pytest.mark.parametrize("name", SAMPLES)
def test_every_kind_loads(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, SAMPLES[name], name)
    assert found.values.keys() == found.lines.keys()
    lines = SAMPLES[name].splitlines()
    for option, line in found.lines.items():
        known = TOP.get(option) or next(
            options[option] for options in SECTIONS.values() if option in options
        )
        names = (known.name, *known.aliases, "fp16", "dynamo_backend")
        assert any(each in lines[line - 1] for each in names), (
            f"{option} is not in line {line}"
        )


def test_values_mean_the_same_as_in_accelerate(tmp_path: Path) -> None:
    values = {name: read(tmp_path, text, name).values for name, text in SAMPLES.items()}
    assert values["unquoted.yaml"] == {
        "distributed_type": "NO", "mixed_precision": "no", "downcast_bf16": False, "num_processes": 1, "use_cpu": True,
    }  # fmt: skip
    assert values["fsdp_numbers.yaml"] == {
        "distributed_type": "FSDP",
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": 2000,
        "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "HYBRID_SHARD",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
    assert values["fsdp_short_names.yaml"]["fsdp_sharding_strategy"] == "NO_SHARD"
    assert values["multi_gpu.yaml"]["gpu_ids"] == "0,1"
    assert values["multi_node.yaml"]["main_process_port"] == 8888
    deepspeed = values["deepspeed.yaml"]
    assert (deepspeed["zero_stage"], deepspeed["gradient_accumulation_steps"]) == (
        3,
        "auto",
    )
    assert deepspeed["offload_param_device"] == "cpu"
    assert "offload_optimizer_nvme_path" not in deepspeed
    assert values["megatron.yaml"]["megatron_lm_gradient_clipping"] == 1.0
    assert values["fp8.yaml"]["fp8_override_linear_precision"] == [
        "false",
        "false",
        "false",
    ]
    assert values["dynamo.yaml"]["dynamo_mode"] == "reduce-overhead"
    assert values["tpu.yaml"]["tpu_vm"] == ["one", "two"]
    assert values["sagemaker.yaml"]["additional_args"] == {
        "disable_profiler": "true",
        "tags": ["one", "two"],
    }
    assert values["sagemaker.yaml"]["pytorch_version"] == "2.6.0"
    assert values["old.yaml"] == {
        "distributed_type": "NO", "mixed_precision": "fp16", "dynamo_backend": "NO", "num_processes": 1,
    }  # fmt: skip
    assert values["anchors.yaml"]["commands"] == ["A=1"]
    assert values["file.json"] == {
        "compute_environment": "LOCAL_MACHINE", "use_cpu": True, "num_processes": 2, "mixed_precision": "bf16",
    }  # fmt: skip
    assert read(tmp_path, "gpu_ids: [0, 2]\n").values["gpu_ids"] == "0,2"
    assert read(tmp_path, '{"mixed_precision": false}', "config.json").values == {
        "mixed_precision": "no"
    }
    assert read(tmp_path, "").values == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("debug: &a no\nuse_cpu: &a no\n", "config.yaml:2: &a is set twice"),
        (
            "debug: no\nnum_proceses: 2\n",
            "config.yaml:2: num_proceses: unknown key, did you mean 'num_processes'?",
        ),
        (
            "fsdp_config:\n  fsdp_sharding_stratgy: 1\n",
            "config.yaml:2: fsdp_config.fsdp_sharding_stratgy: unknown key, did you mean 'fsdp_sharding_strategy'?",
        ),
        (
            "zebra: 1\n",
            "config.yaml:1: zebra: unknown key, no key of a configuration is like it",
        ),
        (
            "NCCL_DEBUG: INFO\n",
            "config.yaml:1: NCCL_DEBUG: unknown key, a variable for the script belongs under environment:",
        ),
        (
            "num_processes: two\n",
            "config.yaml:1: num_processes: is an integer, not 'two'",
        ),
        (
            "max_restarts: -1\n",
            "config.yaml:1: max_restarts: is an integer ≥ 0, not '-1'",
        ),
        (
            "gradient_accumulation_steps: 0\n",
            "config.yaml:1: gradient_accumulation_steps: is an integer ≥ 1, not '0'",
        ),
        (
            "\nnum_processes:\n  - 2\n",
            "config.yaml:3: num_processes: is one value, not a list",
        ),
        (
            "mixed_precision: bf17\n",
            "config.yaml:1: mixed_precision: is one of no, fp16, bf16, fp8, not 'bf17'",
        ),
        (
            "main_process_port: 70000\n",
            "config.yaml:1: main_process_port: is a port, 0 to 65535, not '70000'",
        ),
        ("use_cpu: maybe\n", "config.yaml:1: use_cpu: is true or false, not 'maybe'"),
        (
            "fsdp_config:\n  fsdp_sharding_strategy: 9\n",
            "config.yaml:2: fsdp_config.fsdp_sharding_strategy: is one of "
            "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, not '9'",
        ),
        (
            "fsdp_config: FULL_SHARD\n",
            "config.yaml:1: fsdp_config: is a mapping of keys to values",
        ),
        ("- 1\n", "config.yaml:1: a configuration is a mapping of keys to values"),
        (
            "debug: true\ndebug: false\n",
            "config.yaml:2: debug: is set twice, first in line 1",
        ),
        (
            "fsdp_config:\n  fsdp_version: 1\n  version: 2\n",
            "config.yaml:3: fsdp_config.version: contradicts line 2, which sets the same option",
        ),
        (
            "debug: !!python/object/apply:os.system [ls]\n",
            "config.yaml:1: tag:yaml.org,2002:python/object/apply:os.system: tags are not read",
        ),
        ("debug: !secret x\n", "config.yaml:1: !secret: tags are not read"),
        ("debug: [1\n", "config.yaml:2: expected ',' or ']', but got '<stream end>'"),
        ("debug: *a\n", "config.yaml:1: *a refers to nothing before it"),
        ("commands: &a [*a]\n", "config.yaml:1: *a refers to nothing before it"),
        ("debug: no\n---\ndebug: no\n", "config.yaml:3: a second document begins here"),
        ("? [1]\n: 2\n", "config.yaml:1: a key is a word"),
        ("debug: \x1b[2Jx\n", "config.yaml:1: character '\\x1b' cannot be in YAML"),
        (b"debug: no\nx: \xff\n", "config.yaml:2: this is not UTF-8"),
        (
            "additional_args: " + "[" * 40 + "]" * 40,
            "config.yaml:1: nested deeper than 16",
        ),
        ("a" * 70_000, "config.yaml:1: a configuration has at most 64 KiB"),
        ('"\\UFFFFFFFF": 1\n', "config.yaml:1: "),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    told = wrong(tmp_path, text)
    assert told.startswith(said)
    assert "\n" not in told
    assert told.isprintable()


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["additional_args:", "  a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    began = time.monotonic()
    assert "more than 5000 values" in wrong(tmp_path, "\n".join(lines))
    assert time.monotonic() - began < 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"the configuration file .* does not exist"
    ):
        read_configuration(tmp_path / "none.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_configuration(tmp_path)


NASTY = [
    "!!python/name:os.system", "&a", "*a", "<<: *a", "[", "{", "]", "}", ": ", "- ", "? ", "|", ">", "%TAG", "---",
    "...", '"', "'", "\t", "\x00", "\ud800", "1e999", "9" * 5000, "0x" + "f" * 3000, "null", "~", "2001-01-01",
    "[" * 3000, "\u2028",
    "{a: " * 900, "- " * 900, "é" * 100, "#", "@", "`", "\\x", "a" * 2000 + ": 1",
]  # fmt: skip


def mutate(draw: random.Random, text: str) -> str:
    for _ in range(draw.randint(1, 4)):
        lines = text.splitlines(keepends=True) or [""]
        at = draw.randrange(len(lines))
        spot = draw.randrange(len(text) + 1)
        kind = draw.randrange(9)
        if kind == 0:
            text = (
                text[:spot]
                + chr(draw.choice([draw.randrange(128), draw.randrange(0x3000)]))
                + text[spot + 1 :]
            )
        elif kind == 1:
            text = text[:spot] + draw.choice(NASTY) + text[spot:]
        elif kind == 2:
            text = "".join(lines[:at] + lines[at + 1 :])
        elif kind == 3:
            text = "".join([*lines[:at], lines[at], *lines[at:]])
        elif kind == 4:
            text = "".join(
                [*lines[:at], " " * draw.randint(1, 3) + lines[at], *lines[at + 1 :]]
            )
        elif kind == 5:
            text = text[:spot]
        elif kind == 6:
            key, colon, _ = lines[at].partition(":")
            lines[at] = f"{key}{colon} {draw.choice(NASTY)}\n"
            text = "".join(lines)
        elif kind == 7:
            key, colon, value = lines[at].partition(":")
            where = draw.randrange(len(key) + 1)
            lines[at] = f"{key[:where]}{draw.choice('xyz_')}{key[where:]}{colon}{value}"
            text = "".join(lines)
        else:
            text += draw.choice(list(SAMPLES.values()))
    return text


def unknown_keys(text: str) -> set[str]:
    """What PyYAML's own loader finds in a file that was accepted, judged apart from our reading."""
    loaded = yaml.load(text, Loader=yaml.BaseLoader) or {}
    if not isinstance(loaded, dict):
        return set() if str(loaded).lower() in ("~", "null", "none") else {loaded}
    top = {
        name for option in TOP.values() for name in (option.name, *option.aliases)
    } | {
        *SECTIONS,
        "dynamo_backend",
    }
    unknown = set(loaded) - top
    for section, options in SECTIONS.items():
        names = {
            name
            for option in options.values()
            for name in (option.name, *option.aliases)
        }
        inner = loaded.get(section)
        unknown |= set(inner if isinstance(inner, dict) else ()) - names
    return unknown


@pytest.mark.long
def test_2000_mutated_files_end_in_values_or_in_one_line(tmp_path: Path) -> None:
    count, accepted = 2000, 0
    draw = random.Random(7)
    for number in range(count):
        name, text = draw.choice(list(SAMPLES.items()))
        text = mutate(draw, text)
        data = text.encode("utf-8", "surrogatepass")
        path = tmp_path / f"{number}{Path(name).suffix}"
        path.write_bytes(data)
        began = time.monotonic()
        try:
            read_configuration(path)
        except ConfigurationError as error:
            said = str(error)
        else:
            said = f"{path}:1: accepted"
            accepted += 1
            assert not unknown_keys(data.decode("utf-8-sig").replace("\t", " ")), text
        assert re.fullmatch(rf"{re.escape(str(path))}:\d+: [^\n]+", said), said
        assert time.monotonic() - began < 1, text
    assert 0.05 * count < accepted < 0.95 * count


def test_an_alias_refers_to_its_own_document() -> None:
    with pytest.raises(YamlProblem, match=r"\*a refers to nothing before it"):
        guarded_root("x: &a 1\n---\ny: *a\n")
