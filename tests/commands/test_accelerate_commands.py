"""The commands of Accelerate that prepare something: `tpu-config`, `to-fsdp2`, and `launch` for a job on SageMaker.

Where the package accelerate is installed, its own functions get the same files.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from torch import nn

from tests.launch.configurations import SAMPLES
from trainer_kit.commands.main import main
from trainer_kit.commands.to_fsdp2 import rewrite
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.launch.configuration import read_configuration, resolve
from trainer_kit.launch.sagemaker import estimator_arguments
from trainer_kit.options.records import FullyShardedDataParallelPlugin
from trainer_kit.strategies.launcher_options import FSDP_KEYS, fsdp_from_launcher

beside = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="compares with the package accelerate, which is not here",
)


def call(*words: Any, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(map(str, words)))
    assert result.exit_code == code, result.output
    return result.output


# -- to-fsdp2 ----------------------------------------------------------------------------------------------------------

FSDP1 = """\
# Two devices
distributed_type: FSDP
num_processes:    2   # here
fsdp_config:
    # what each layer does
    fsdp_backward_prefetch: BACKWARD_PRE  # as usual
    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
    fsdp_sharding_strategy: SHARD_GRAD_OP  # memory is enough
    fsdp_forward_prefetch: true

    fsdp_transformer_layer_cls_to_wrap: 'BertLayer'
    fsdp_use_orig_params: true
mixed_precision: 'bf16'
"""
FSDP2 = """\
# Two devices
distributed_type: FSDP
num_processes:    2   # here
fsdp_config:
    # what each layer does
    fsdp_version: 2
    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
    fsdp_reshard_after_forward: false  # memory is enough

    fsdp_transformer_layer_cls_to_wrap: 'BertLayer'
mixed_precision: 'bf16'
"""


def write(folder: Path, text: str, name: str = "fsdp.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def strategy_of(path: Path) -> dict[str, Any]:
    values = read_configuration(path).values
    return fsdp_from_launcher(
        {key: str(values[key]) for key in FSDP_KEYS if key in values}
    )


def test_lines_and_comments_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, FSDP1)
    before = strategy_of(path)
    said = call(
        "to-fsdp2", "--config_file", path, "--output_file", tmp_path / "new.yaml"
    )
    assert path.read_text() == FSDP1
    assert (tmp_path / "new.yaml").read_text() == FSDP2
    assert [line.split(": ")[:2] for line in said.splitlines()[:-1]] == [
        [f"{path}:6", "fsdp_backward_prefetch"],
        [f"{path}:9", "fsdp_forward_prefetch"],
        [f"{path}:12", "fsdp_use_orig_params"],
    ]
    after = strategy_of(tmp_path / "new.yaml")
    assert before.pop("sharding_strategy") == "SHARD_GRAD_OP"
    assert after.pop("reshard_after_forward") is False
    assert before == after == {"auto_wrap_policy": ["BertLayer"]}


def test_a_file_is_replaced_only_when_that_is_asked_for(tmp_path: Path) -> None:
    path, other = (
        write(tmp_path, FSDP1.replace("\n", "\r\n")),
        write(tmp_path, "x: 1", "other.yaml"),
    )
    for words in ((), ("--output_file", other)):
        assert "only with --overwrite" in call(
            "to-fsdp2", "--config_file", path, *words, code=2
        )
    call("to-fsdp2", "--config_file", path, "--output_file", other, "--overwrite")
    call("to-fsdp2", "--config_file", path, "--overwrite")
    assert (
        path.read_bytes() == other.read_bytes() == FSDP2.replace("\n", "\r\n").encode()
    )
    assert "FSDP2 already" in call("to-fsdp2", "--config_file", path, "--overwrite")
    assert path.read_bytes() == other.read_bytes()
    assert "the configuration file" in call(
        "to-fsdp2", "--config_file", tmp_path / "none", code=2
    )
    write(tmp_path, "fsdp_config: {fsdp_versoin: 1}")
    assert "did you mean 'fsdp_version'" in call(
        "to-fsdp2", "--config_file", path, "--overwrite", code=2
    )


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["fsdp_sharding_strategy: 1", "fsdp_version: 1"],
            ["fsdp_reshard_after_forward: true", "fsdp_version: 2"],
        ),
        (
            ["fsdp_reshard_after_forward: SHARD_GRAD_OP"],
            ["fsdp_version: 2", "fsdp_reshard_after_forward: false"],
        ),
        (
            ["fsdp_sharding_strategy: 'FULL_SHARD'"],
            ["fsdp_version: 2", "fsdp_reshard_after_forward: true"],
        ),
        (
            ["fsdp_offload_params: true"],
            ["fsdp_version: 2", "fsdp_offload_params: true"],
        ),
        (["fsdp_sync_module_states: true"], ["fsdp_version: 2"]),
        (
            ["sharding_strategy: FULL_SHARD"],
            ["version: 2", "reshard_after_forward: true"],
        ),
        (
            ["fsdp_version:", "fsdp_offload_params: true"],
            ["fsdp_version: 2", "fsdp_offload_params: true"],
        ),
    ],
)
def test_keys_and_values(lines: list[str], expected: list[str]) -> None:
    def text(of: list[str]) -> str:
        return "fsdp_config:\n" + "".join(f"  {line}\n" for line in of)

    assert rewrite(text(lines))[0] == text(expected)
    assert (
        rewrite(text(lines).removesuffix("\n"))[0].splitlines()
        == text(expected).splitlines()
    )


def test_a_file_without_fsdp_stays() -> None:
    for text in ("num_processes: 2\n", "", "fsdp_config: {}\n"):
        converted, (note,) = rewrite(text)
        assert (converted, "nothing to convert" in note) == (text, True)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("fsdp_sharding_strategy: NO_SHARD", "MULTI_GPU"),
        ("fsdp_sharding_strategy: 3", "MULTI_GPU"),
        (
            "fsdp_sharding_strategy: HYBRID_SHARD",
            "parallelism_config_dp_replicate_size",
        ),
        (
            "fsdp_reshard_after_forward: HYBRID_SHARD_ZERO2",
            "parallelism_config_dp_replicate_size",
        ),
        ("fsdp_state_dict_type: LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    ],
)
def test_what_has_no_counterpart_is_refused(text: str, fix: str) -> None:
    with pytest.raises(ConfigurationError, match="no counterpart") as caught:
        rewrite(f"fsdp_config:\n  {text}\n", "a.yaml")
    assert "a.yaml:" in str(caught.value.found)
    assert fix in str(caught.value.fix)


def test_what_is_not_rewritten_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="two keys have one meaning"):
        rewrite(
            "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard_after_forward: true\n"
        )
    with pytest.raises(ConfigurationError, match="in braces"):
        rewrite("fsdp_config: {fsdp_offload_params: true}")
    path = write(tmp_path, FSDP1)
    refused = call(
        "to-fsdp2",
        "--config_file",
        path,
        "--output_file",
        tmp_path / "none" / "new.yaml",
        code=2,
    )
    assert "the file cannot be written" in refused
    with pytest.raises(ConfigurationError, match="behind aliases"):
        rewrite("num_processes: &n 2\nfsdp_config:\n  fsdp_version: *n\n")


@beside
def test_keys_are_those_of_accelerate() -> None:
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

    for text in (FSDP1, *(text for name, text in SAMPLES.items() if "fsdp" in name)):
        try:
            ours = yaml.safe_load(rewrite(text)[0])
        except ConfigurationError:
            continue  # what Accelerate converts to another kind of sharding
        assert ours == convert_config_to_fsdp2(yaml.safe_load(text))


# -- tpu-config --------------------------------------------------------------------------------------------------------

POD = "tpu_name: pod\ntpu_zone: us-central1-a\n"
LINE = "gcloud compute tpus tpu-vm ssh pod --zone us-central1-a --command 'cd /usr/share; {}' --worker all\n"


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))


def test_the_command_for_the_machines_of_a_pod(tmp_path: Path) -> None:
    file = write(
        tmp_path, "#!/bin/sh\n\necho one\n  # in between\necho two\n", "setup.sh"
    )
    listed = write(tmp_path, POD + "commands:\n- pip list\n- ls\n", "listed.yaml")
    filed = write(tmp_path, POD + f"command_file: {file}\n", "filed.yaml")
    bare = ("--tpu_name", "pod", "--tpu_zone", "us-central1-a", "--debug")
    of_file = "echo one; echo two"
    assert call("tpu-config", *bare, "--command", "ls") == LINE.format("ls")
    assert call("tpu-config", "--config_file", listed, "--debug") == LINE.format(
        "pip list; ls"
    )
    assert call("tpu-config", "--config_file", filed, "--debug") == LINE.format(of_file)
    assert call(
        "tpu-config",
        "--config_file",
        filed,
        "--command",
        "a",
        "--command",
        "b c",
        "--debug",
    ) == LINE.format("a; b c")
    assert call(
        "tpu-config", "--config_file", listed, "--command_file", file, "--debug"
    ) == LINE.format(of_file)
    for version, name in (
        ("latest", "accelerate -U"),
        ("1.15.0", "accelerate==1.15.0"),
        ("dev", "git+https"),
    ):
        words = ("--install_accelerate", "--accelerate_version", version)
        said = call("tpu-config", *bare, "--command", "ls", *words)
        assert f"cd /usr/share; pip install {name}" in said
    alpha = call("tpu-config", *bare, "--command", "it's", "--use_alpha")
    assert shlex.split(alpha)[:2] == ["gcloud", "alpha"]
    assert "cd /usr/share; it's" in shlex.split(alpha)


def test_gcloud_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write(tmp_path, f"#!/bin/sh\ntouch {tmp_path}/ran\n", "gcloud")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    said = call(
        "tpu-config",
        "--tpu_name",
        "pod",
        "--tpu_zone",
        "us-central1-a",
        "--command",
        "ls",
        code=1,
    )
    assert said.startswith(LINE.format("ls"))
    assert "does not run gcloud" in said
    assert not (tmp_path / "ran").exists()


def test_an_incomplete_command_is_refused(tmp_path: Path) -> None:
    whole = {"--tpu_name": "pod", "--tpu_zone": "zone", "--command": "ls"}
    for left_out in whole:
        words = [
            word
            for flag, value in whole.items()
            if flag != left_out
            for word in (flag, value)
        ]
        assert f"add {left_out}" in call("tpu-config", *words, code=2)
    words = [word for pair in whole.items() for word in pair]
    assert "cannot be read" in call(
        "tpu-config", *words, "--command_file", tmp_path / "none", code=2
    )
    refused = call(
        "tpu-config",
        *words,
        "--install_accelerate",
        "--accelerate_version",
        "x y",
        code=2,
    )
    assert "this is not a version" in refused
    assert "has no effect without" in call(
        "tpu-config", *words, "--accelerate_version", "1.15.0", code=2
    )


@beside
@pytest.mark.parametrize(
    "more", [[], ["--command", "ls"], ["--install_accelerate", "--use_alpha"]]
)
def test_the_words_are_those_of_accelerate(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands.tpu import tpu_command_launcher, tpu_command_parser

    path = write(
        tmp_path,
        "compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\nmixed_precision: 'no'\n"
        f"debug: false\nuse_cpu: false\n{POD}commands:\n- pip list\n",
        "pod.yaml",
    )
    words = ["--config_file", str(path), "--debug", *more]
    tpu_command_launcher(tpu_command_parser().parse_args(words))
    assert (
        capsys.readouterr().out
        == f"Running {' '.join(shlex.split(call('tpu-config', *words)))}\n"
    )


# -- SageMaker ---------------------------------------------------------------------------------------------------------


def job(folder: Path, text: str) -> Any:
    return resolve({}, write(folder, text, "job.yaml"), {})


def test_a_job_is_printed_and_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SAMPLES["sagemaker.yaml"], "job.yaml")
    script = write(tmp_path, "raise SystemExit('ran')", "train.py")
    for command in ("launch", "explain"):
        said = call(
            command,
            "--config_file",
            path,
            script,
            "--lr",
            "5e-5",
            "--do-train",
            "True",
            code=2,
        )
        assert 'estimator role: "role"\n' in said
        assert 'estimator entry_point: "train.py"\n' in said
        assert 'estimator hyperparameters: {"lr": 5e-05, "do_train": true}\n' in said
        assert "region: us-east-1\nprofile: default\n" in said
        assert (
            "does not start a SageMaker job, which would rent machines with your AWS account\n  found: "
            in said
        )
        assert "job.yaml:1" in said
    for words in (
        ["--api_key", "hunter3"],
        ["--api-key=hunter3", "--store", "s3://me:hunter3@host/data"],
    ):
        masked = call("launch", "--config_file", path, script, *words, code=2)
        assert '"api_key": "***"' in masked
        assert "hunter3" not in masked
    secret = call(
        "launch",
        "--config_file",
        path,
        "--aws_secret_access_key",
        "hunter2",
        script,
        code=2,
    )
    assert "AWS keys are not read" in secret
    assert "hunter2" not in secret


def test_files_of_inputs_and_metrics(tmp_path: Path) -> None:
    write(tmp_path, "name\tplace\ntrain\ts3://bucket/train \n", "inputs.tsv")
    write(tmp_path, "name\tregex\nloss\tloss=(.*)\n", "metrics.tsv")
    text = SAMPLES["sagemaker.yaml"].replace(
        "inputs_file: null", f"inputs_file: {tmp_path}/inputs.tsv"
    )
    text = text.replace("metrics_file: null", f"metrics_file: {tmp_path}/metrics.tsv")
    found, inputs = estimator_arguments(
        job(tmp_path, text), "a/train.py", ["--n=3", "--least", "-1e-3"]
    )
    assert inputs == {"train": "s3://bucket/train"}
    assert found["metric_definitions"] == [{"Name": "loss", "Regex": "loss=(.*)"}]
    assert (found["source_dir"], found["hyperparameters"]) == (
        "a",
        {"n": 3, "least": -1e-3},
    )
    assert (found["disable_profiler"], found["tags"]) == (True, ["one", "two"])
    with pytest.raises(ConfigurationError, match="not a table of names"):
        estimator_arguments(
            job(tmp_path, text.replace("inputs.tsv", "none.tsv")), "train.py", []
        )


@pytest.mark.parametrize(
    "words", [["--do_train"], ["--do_train", "--lr", "1"], ["word"], ["-n", "1"]]
)
def test_arguments_that_sagemaker_cannot_pass(words: list[str], tmp_path: Path) -> None:
    options = job(tmp_path, SAMPLES["sagemaker.yaml"])
    with pytest.raises(ConfigurationError, match="--name value"):
        estimator_arguments(options, "train.py", words)
    with pytest.raises(ConfigurationError, match="a Python file"):
        estimator_arguments(options, "train.sh", [])
    with pytest.raises(ConfigurationError, match="needs iam_role_name"):
        estimator_arguments(
            job(tmp_path, SAMPLES["sagemaker.yaml"].replace("iam_role_name: role", "")),
            "a.py",
            [],
        )


@beside
@pytest.mark.parametrize("kind", ["DATA_PARALLEL", "MODEL_PARALLEL"])
def test_the_job_is_that_of_accelerate(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils.launch import prepare_sagemager_args_inputs

    for name in ("AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.setenv(
            name, ""
        )  # restored afterwards: Accelerate's function sets them
    text = SAMPLES["sagemaker.yaml"].replace("DATA_PARALLEL", kind)
    text += "mixed_precision: bf16\ndebug: false\nuse_cpu: false\n"
    path = write(tmp_path, text, "job.yaml")
    words = [
        "--model",
        "bert",
        "--do_train",
        "False",
        "--epochs",
        "3",
        "--lr",
        "5e-5",
        "--steps",
        "50.5",
    ]
    theirs, inputs = prepare_sagemager_args_inputs(
        load_config_from_file(str(path)),
        argparse.Namespace(
            training_script="here/train.py", training_script_args=words, mixed_precision="bf16", dynamo_backend="no",
            dynamo_mode="default", dynamo_use_fullgraph=False, dynamo_use_dynamic=False,
            dynamo_use_regional_compilation=False,
        ),
    )  # fmt: skip
    ours = estimator_arguments(resolve({}, path, {}), "here/train.py", words)
    assert ours == (theirs, inputs)


# -- estimate-memory ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_options_of_accelerate_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    # Accelerate's own test expects 433249280 and 90669056 bytes for bert-base-cased.
    words = (
        "estimate-memory",
        "BertModel",
        "--library_name",
        "transformers",
        "--args",
        "{vocab_size: 28996}",
    )
    said = call(*words, "--dtypes", "float32", "int8").splitlines()
    assert [line.split()[0] for line in said[1:4]] == ["DTYPE", "float32", "int8"]
    assert said[2].split()[1:3] == ["433", "MB"]
    assert said[2].split()[-2:] == ["90.7", "MB"]
    assert len(call(*words, "--dtypes", "int8", "--dtypes", "int4").splitlines()) == 5
    assert "did you mean 'float32'" in call(*words, "--dtypes", "float23", code=2)
    wrong = call(
        "estimate-memory", "BertModle", "--library_name", "transformers", code=2
    )
    assert "did you mean 'BertModel'" in wrong
    assert "models are not downloaded" in call(
        "estimate-memory", "org/name", "--library_name", "timm", code=2
    )
    (tmp_path / "config.json").write_text(
        '{"model_type": "bert", "auto_map": {"AutoConfig": "own.Config"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    assert "Traceback" not in call(
        "estimate-memory", tmp_path, "--library_name", "transformers"
    )
    for mapped in (
        '"auto_map": {"AutoConfig": "org/code--own.Config"}',
        '"text_config": {"auto_map": {"AutoTokenizer": [null, "org/code--own.Tokens"]}}',
    ):
        (tmp_path / "config.json").write_text(f'{{"model_type": "bert", {mapped}}}')
        words = (
            "estimate-memory",
            tmp_path,
            "--library_name",
            "transformers",
            "--trust_remote_code",
        )
        refused = call(*words, code=2)
        assert "takes its Python files from another repository" in refused
        assert "auto_map: org/code--own." in refused
    (tmp_path / "config.json").write_text("{")
    assert "this config.json cannot be used" in call(*words, code=2)
    stand_in = types.ModuleType("timm")
    stand_in.create_model = lambda name, pretrained, width=4: nn.Linear(width, width)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    assert "timm-net: 72 parameters" in call(
        "estimate-memory", "timm-net", "--library_name", "timm", "--args", "width: 8"
    )


def test_the_plugin_reads_what_was_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        (FSDP1, {"sharding_strategy": "SHARD_GRAD_OP"}),
        (FSDP2, {"reshard_after_forward": False}),
    ):
        section = yaml.safe_load(text)["fsdp_config"]
        monkeypatch.setenv("TRAINER_KIT_DISTRIBUTED_TYPE", "FSDP")
        for name in FSDP_KEYS:
            monkeypatch.delenv(f"TRAINER_KIT_{name.upper()}", raising=False)
        for name, value in section.items():
            monkeypatch.setenv(f"TRAINER_KIT_{name.upper()}", str(value))
        found = FullyShardedDataParallelPlugin().arguments()
        assert found == {"auto_wrap_policy": ["BertLayer"], **expected}
