"""Messages name one of a thing in the singular: "1 rank", not "1 ranks"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from trainer_kit.core.display import plural

_PACKAGE = Path(__file__).parents[1] / "trainer_kit"

_NOUNS = (
    "batches|callbacks|calls|checkpoints|devices|entries|epochs|files|groups|layers|loaders|loggers|machines|messages"
    "|micro-batches|modules|nodes|optimizers|parameters|processes|ranks|rows|runs|samples|stages|steps|tensors"
    "|threads|trials|values|weights|workers"
)
_AFTER_A_VALUE = re.compile(rf" (?:[a-z-]+ )?(?:{_NOUNS})\b")

_VERB = "the value is a name, and the noun a verb or an object"
_SEVERAL = "it is printed only for two or more"
_LISTED = "the value lists several numbers"
_ALLOWED = {
    ("accelerator/collectives.py", "lengths"): _LISTED,
    ("accelerator/deepspeed_state.py", "saved_sizes"): _LISTED,
    ("accelerator/fabric.py", "sizes[1]"): _LISTED,
    ("accelerator/loop_checks.py", "type(optimizer).__name__"): _VERB,
    ("accelerator/loop_checks.py", "window.count"): _SEVERAL,
    ("callbacks/finetuning.py", "type(self).__name__"): _VERB,
    ("callbacks/prediction_writer.py", "type(self).__name__"): _VERB,
    ("accelerator/fabric.py", "saved_sizes"): "a list",
    ("callbacks/progress_bar.py", "count"): "the batch of how many: 1/1 batches",
    ("callbacks/weight_averaging.py", "groups"): _LISTED,
    ("callbacks/weight_averaging.py", "str(device)"): _VERB,
    ("checkpoint/deepspeed.py", "universal"): _VERB,
    ("data/feed.py", "_named(then)"): _LISTED,
    (
        "data/source.py",
        "options.batch_size * options.size",
    ): "a size, not a count of batches",
    ("data/sizes.py", "' and '.join(map(str, rows[:4]))"): _LISTED,
    ("inference/pipeline.py", "list(sizes)"): _LISTED,
    ("verify/local_ranks.py", "_turns().rank"): "a rank of threads",
    ("commands/script.py", "script"): _VERB,
    ("commands/estimate_memory.py", "shapes.parameters"): _SEVERAL,
    ("verify/compare.py", "window"): _SEVERAL,
    ("state/optimizer_states.py", "sizes"): _LISTED,
    ("step/module_state.py", "_MOST_VALUES"): _SEVERAL,
    ("step/optimize.py", "self.strategy.name"): _VERB,
    ("step/optimizers.py", "name"): _VERB,
    ("strategies/transforms/pipeline_stages.py", "name"): _VERB,
    ("strategies/transforms/pipeline_stages.py", "type(module).__name__"): _VERB,
    ("training/compose.py", "settings.max_epochs"): _SEVERAL,
}


def counts_in(source):
    """Yield (line, value) of each value in an f-string that a noun in the plural follows."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if not isinstance(value, ast.FormattedValue):
                continue
            if isinstance(text, ast.Constant) and _AFTER_A_VALUE.match(text.value):
                yield value.lineno, ast.unparse(value.value)


def test_messages_count_with_plural():
    sites = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        for line, value in counts_in(path.read_text()):
            sites.setdefault((name, value), f"{name}:{line}: {{{value}}}")
    problems = [where for site, where in sites.items() if site not in _ALLOWED]
    assert not problems, "write {plural(count, 'noun')} in:\n" + "\n".join(problems)


def test_the_scan_sees_a_count():
    source = 'f"{count} ranks, {size:,} data ranks and {other} of them"'
    assert [value for _, value in counts_in(source)] == ["count", "size"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (-1, "-1 ranks")]
)
def test_plural(count, text):
    assert plural(count, "rank") == text


def test_plurals_that_do_not_end_in_s():
    assert plural(2, "process") == "2 processes"
    assert plural(2, "micro-batch") == "2 micro-batches"
    assert plural(1, "value is", "values are") == "1 value is"
    assert plural(2000, "value is", "values are", spec=",") == "2,000 values are"
