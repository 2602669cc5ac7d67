"""`verify` finds nothing in healthy configurations, and names the step and the module of every planted fault."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import BatchEncoding

import trainer_kit as tk
from tests.verify import verified
from tests.verify.conftest import LOCAL, PROCESSES
from trainer_kit.strategies import DDPStrategy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ranks")]
_SECOND = partial(pytest.param, marks=pytest.mark.long)


def verify(module, *arguments, **options):
    return verified.verify(module, *arguments, **options, **LOCAL)


def status(found):
    return {check.name: check.status for check in found.checks}


@PROCESSES
def test_a_healthy_configuration_passes_every_check():
    found = verify(
        verified.Classifier(dropout=0.2),
        val=verified.loader(8),
        accumulate_grad_batches=2,
        steps=3,
    )
    assert found.ok, str(found)
    assert found.exit_code == 0
    skipped = [name for name, one in status(found).items() if one != "ok"]
    assert skipped == ["accumulation", "other world"], str(found)  # dropout
    assert len(str(found).splitlines()) <= 15
    assert "one device, float32: bit-identical to the plain loop" in str(found)
    assert len(found.curve) == 3
    assert all(point.difference <= point.allowed for point in found.curve)


@pytest.mark.long
def test_sharded_weights_in_low_precision_pass():
    found = verify(
        verified.Classifier(),
        strategy="fsdp",
        precision="bf16-mixed",
        gradient_clip_val=0.5,
        steps=3,
    )
    assert found.ok, str(found)


def test_an_eps_changed_in_one_layer():
    first = verify(verified.Classifier(), strategy=verified.OtherEps()).first
    assert (first.kind, first.step, first.where) == ("forward", 0, "net.1")
    assert "0.01) in the run, aten::native_layer_norm" in first.text


@PROCESSES
def test_gradients_that_are_not_exchanged():
    first = verify(verified.Classifier(), strategy=verified.NoExchange()).first
    assert (first.kind, first.step, first.where) == ("gradients", 0, "net.0.weight")
    assert "not synchronized" in first.hint


def test_a_wrong_accumulation_factor():
    first = verify(
        verified.Classifier(),
        strategy=verified.WrongDivisor(),
        accumulate_grad_batches=3,
    ).first
    assert (first.kind, first.step) == ("gradients", 0)
    assert "0.3333 times the reference" in first.hint
    assert "3 micro-batches of accumulation" in first.hint


@pytest.mark.long
def test_a_loss_that_is_averaged_over_the_ranks_twice():
    first = verify(verified.AveragedTwice()).first
    assert (first.kind, first.step) == ("loss", 0)
    assert "0.5 times the reference: averaged over the 2 ranks twice" in first.hint


@pytest.mark.long
def test_a_loss_that_differs_by_no_factor_gets_no_hint_of_one():
    class Shifted(verified.Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return (
                loss + 1 + torch.distributed.get_rank()
                if torch.distributed.is_initialized()
                else loss
            )

    first = verify(Shifted(), steps=2).first
    assert (first.kind, first.step, first.hint) == ("loss", 0, "")


@PROCESSES
def test_random_numbers_that_no_checkpoint_holds():
    found = verify(verified.OwnMasks())
    resumed = next(each for each in found.findings if each.kind == "resume")
    assert (resumed.step, resumed.where) == (2, "net.3")


@PROCESSES
def test_a_buffer_that_no_rank_sends():
    first = verify(
        verified.RunningMean(), strategy=DDPStrategy(broadcast_buffers=False)
    ).first
    assert (first.kind, first.step, first.where) == ("buffers", 0, "net.2.1.mean")


def test_a_sampler_that_repeats():
    loader = verified.loader(sampler=verified.Repeating(), shuffle=None)
    first = verify(verified.Classifier(), loader, use_distributed_sampler=False).first
    assert (first.kind, first.step, first.where) == ("samples", 0, "sample 0")
    assert "read 2 times in this step, by ranks 0, 1" in first.text


def test_an_augmentation_with_state():
    loader = torch.utils.data.DataLoader(verified.Counting(), batch_size=4)
    first = verify(verified.Classifier(), loader).first
    assert (first.kind, first.step) == ("data", 0)
    assert first.where.startswith("sample ")


@pytest.mark.long
def test_an_augmentation_with_state_in_a_batch_of_transformers():
    """Its tensors were not compared: it is a mapping with a ``to`` of its own."""

    class Reader(verified.Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return BatchEncoding({"x": x, "y": y})

    loader = torch.utils.data.DataLoader(
        verified.Counting(), batch_size=4, collate_fn=collate
    )
    assert verify(Reader(), loader, steps=2).first.kind == "data"


def test_tied_weights_that_a_strategy_unties():
    first = verify(verified.Tied(), strategy=verified.Untied()).first
    assert (first.kind, first.step, first.where) == (
        "tied",
        0,
        "embed.weight and head.weight",
    )


@pytest.mark.long
def test_tied_weights_that_stay_tied():
    found = verify(verified.Tied(), strategy="fsdp", steps=2)
    assert found.ok, str(found)


def test_validation_that_changes_training():
    found = verify(verified.CountsValidation(), val=verified.loader(8))
    assert [(each.kind, each.step) for each in found.findings] == [("validation", 1)]


@pytest.mark.long
def test_validation_that_the_module_brings_runs_only_in_its_check():
    found = verify(
        verified.BringsValidation(), verified.loader(16), steps=4
    )  # an epoch has two steps
    assert [(each.kind, each.step) for each in found.findings] == [("validation", 1)]


@pytest.mark.long
def test_two_runs_that_differ():
    kinds = [each.kind for each in verify(verified.Unseeded()).findings]
    assert "repeat" in kinds


@pytest.mark.parametrize("strategy", ["ddp", _SECOND("fsdp")])
def test_batch_norms_of_a_residual_network_are_a_note(strategy):
    found = verify(verified.SmallResNet(), strategy=strategy, max_epochs=30, steps=2)
    assert found.ok, str(found)
    assert found.exit_code == 0
    checks = {check.name: check for check in found.checks}
    assert checks["batch norms"].status == "note"
    assert checks["batch norms"].text.startswith(
        "net.2, net.4.norm, net.5.norm: each rank normalizes its own samples"
    )
    assert ("its own running statistics" in checks["batch norms"].text) == (
        strategy == "fsdp"
    )
    assert checks["training"].status == checks["other world"].status == "ok"
    assert "batch norms split as on the ranks" in checks["other world"].text


def test_gradients_that_are_not_exchanged_beside_batch_norms():
    first = verify(
        verified.SmallResNet(), strategy=verified.NoExchange(), max_epochs=30, steps=2
    ).first
    assert (first.kind, first.step, first.where) == ("gradients", 0, "net.1.weight")
    assert "not synchronized" in first.hint


def test_an_output_that_depends_on_the_other_samples():
    found = verify(verified.Apart(), steps=2)
    assert [(each.kind, each.step, each.where) for each in found.findings] == [
        ("layout", 0, "net.2")
    ]
    assert (
        found.first.text
        == "the output for a sample depends on the other samples of its batch"
    )


@pytest.mark.long
def test_a_loss_over_pairs_of_samples():
    found = verify(verified.Pairs(), steps=2)
    assert [(each.kind, each.where) for each in found.findings] == [("layout", "")]
    assert "is not the mean of the losses of the ranks" in found.first.text
    assert found.first.hint.startswith(
        "a loss over pairs of samples needs those of all ranks"
    )


@pytest.mark.long
def test_a_mean_over_tokens_needs_their_number():
    found = verify(verified.IgnoredTokens(), verified.masked(), steps=2)
    assert [(each.kind, each.where) for each in found.findings] == [("layout", "")]
    assert (
        found.first.hint
        == "a mean over tokens needs loss_weight, which returns their number"
    )
    assert verify(verified.WeighedTokens(), verified.masked(), steps=2).ok


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_a_teacher_that_follows_after_each_step(devices):
    """Its hook ran before the optimizer step, once for each rank, and its second rank had another batch_idx."""
    found = verify(
        verified.Teacher(),
        devices=devices,
        strategy="auto",
        accumulate_grad_batches=2,
        steps=2,
    )
    assert found.ok, str(found)
    assert status(found)["our loop"] == status(found)["training"] == "ok"


@pytest.mark.long
def test_optimizers_schedulers_and_the_length_of_an_epoch_are_those_of_the_plain_loop():
    """`self.optimizers()` was an empty list in the plain loop: the module could not be verified."""
    found = verify(verified.AsksTrainer(), steps=2)
    assert found.ok, str(found)


@pytest.mark.long
def test_what_a_list_of_batches_cannot_show_is_named():
    batches = [tuple(batch) for batch in verified.loader(32, shuffle=False)]
    found = verify(verified.Classifier(), batches, steps=2)
    assert found.ok, str(found)
    assert (status(found)["samples"], status(found)["data"]) == ("not checked", "ok")


def test_a_module_that_does_not_run_in_float64():
    with pytest.raises(tk.ConfigurationError, match="does not run in float64"):
        verify(verified.Casting(), steps=2)


@pytest.mark.parametrize(
    ("devices", "strategy"), [_SECOND(1, "auto"), (2, "ddp"), _SECOND(2, "fsdp")]
)
def test_two_networks_with_manual_optimization(devices, strategy):
    """Manual optimization could not be checked."""
    found = verify(verified.GAN(), devices=devices, strategy=strategy, steps=3)
    assert found.ok, str(found)
    assert status(found)["our loop"] == status(found)["training"] == "ok"
    assert "bit-identical to the plain loop" in str(found)


def test_gradients_that_are_not_exchanged_in_manual_optimization():
    with pytest.raises(
        tk.ConfigurationError, match="steps an optimizer without manual_backward"
    ):
        verify(verified.LocalGAN(), steps=2)


@pytest.mark.parametrize("devices", [_SECOND(1), 2])
def test_a_module_with_its_own_steps_of_optimizers(devices):
    """These overrides could not be checked, and `trainer.world_size` was 1 in the plain loop of two ranks."""
    found = verify(verified.Overrides(), devices=devices, strategy="auto", steps=3)
    assert found.ok, str(found)
    assert status(found)["our loop"] == status(found)["training"] == "ok"
    if devices == 2:
        world = next(check for check in found.checks if check.name == "other world")
        assert (world.status, "depends on the number of ranks" in world.text) == (
            "note",
            True,
        )


@pytest.mark.parametrize(("interval", "size"), [("step", 64), _SECOND("epoch", 16)])
def test_a_scheduler_that_monitors_the_loss(interval, size):
    class Watching(verified.Plateau):
        pass

    Watching.interval = interval
    found = verify(Watching(), verified.loader(size), steps=4)
    assert found.ok, str(found)
    assert status(found)["training"] == "ok"


@pytest.mark.long
def test_a_scheduler_that_monitors_validation_does_not_advance():
    found = verify(
        verified.PlateauOfValidation(), verified.loader(16), verified.loader(8), steps=4
    )
    assert found.ok, str(found)
    note = next(check for check in found.checks if check.name == "schedulers")
    assert (
        note.text
        == "ReduceLROnPlateau monitors 'val_loss': without validation it does not advance"
    )


@pytest.mark.parametrize("strategy", ["ddp", _SECOND("fsdp")])
def test_buffers_that_change_with_each_forward(strategy):
    """The plain loop changed them once for each rank: a false alarm for spectral norms."""
    found = verify(
        verified.Spectral(), strategy=strategy, accumulate_grad_batches=2, steps=2
    )
    assert found.ok, str(found)


@PROCESSES
def test_modules_that_exchange_values_themselves_are_refused():
    """It was refused with the words for float64."""

    class Reduces(verified.Classifier):
        def training_step(self, batch, batch_idx):
            dist.all_reduce(torch.ones(()))
            return super().training_step(batch, batch_idx)

    with pytest.raises(tk.ConfigurationError, match="without a process group"):
        verify(Reduces(), steps=2)


@PROCESSES
def test_what_cannot_be_verified_is_refused():
    module = verified.Classifier()
    module.configure_optimizers = lambda: torch.optim.LBFGS(
        module.parameters(), lr=0.01, max_iter=2
    )
    with pytest.raises(
        tk.ConfigurationError, match="LBFGS computes the loss several times in a step"
    ):
        verify(module, devices=1, strategy="auto")
    with pytest.raises(tk.ConfigurationError, match="at least one step"):
        verify(verified.Classifier(), steps=0)


@pytest.mark.slow
@PROCESSES
def test_ranks_forked_after_a_plan_save_their_own_parts():
    pytest.importorskip("trainer_kit.planning")
    trainer = tk.Trainer(
        strategy="fsdp", accelerator="cpu", devices=2, logger=False, seed=1
    )
    trainer.plan(verified.Classifier(), verified.loader(), world=2, strategies=["fsdp"])
    found = trainer.verify(
        verified.Classifier(), verified.loader(), steps=2
    )  # it saves and resumes
    assert found.ok, str(found)
