"""The hooks of Megatron-LM's trainer: the functions that the adapter wraps or splits, as data, and their check.

The check reads a checkout's source and imports nothing. It examines only what the adapter relies on: names of
parameters, and calls within a function. Therefore checkouts with local changes elsewhere pass.

Two further uses of the source: :func:`split` makes the last statements of a function one that can be called again, and
:func:`own_flags` finds the flags that the parser of a checkout accepts. A flag is a literal in a call of argparse, or
the field of a dataclass from which ``ArgumentGroupFactory`` (of Megatron-LM's ``argument_utils.py``) makes a flag."""

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from ft.adapters.megatron_lm.tree import CheckoutTree
from ft.base.errors import Problem

RUN_WITH = ((0, 16), (0, 19))
"""(major, minor) of the releases of megatron-core whose trainer the adapter was run with."""

FITS, MISSING, CHANGED = "fits", "missing", "changed"
_TRAINING, _CHECKPOINTING = "megatron/training/training.py", "megatron/training/checkpointing.py"


@dataclass(frozen=True)
class Hook:
    """One function of the trainer that the adapter depends on.

    Attributes:
        file: path of its module in the checkout.
        why: the reason why the adapter wraps or calls it.
        parameters: names of parameters that the adapter reads or passes.
        calls: functions that its body has to call.
        sets: statements that its body has to contain, as ``ast.unparse`` writes them.
        splits_at: a function that the body calls; a recovery repeats the body from the statement with this call.
    """

    file: str
    symbol: str
    why: str
    parameters: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    splits_at: str = ""


_STATE = ("model", "optimizer", "opt_param_scheduler")
HOOKS = (
    Hook(
        _TRAINING,
        "pretrain",
        "what follows the set-up is repeated after a recovery",
        parameters=("train_valid_test_dataset_provider", "forward_step_func"),
        calls=("initialize_megatron", "setup_model_and_optimizer", "build_train_valid_test_data_iterators"),
        splits_at="train",
    ),
    Hook(
        _TRAINING,
        "setup_model_and_optimizer",
        "model, optimizer and schedule are those that are protected; a worker that joins loads no checkpoint",
        parameters=("checkpointing_context",),
        calls=("load_checkpoint",),
    ),
    Hook(_TRAINING, "get_train_valid_test_num_samples", "a standby builds data sets that have no stored index"),
    Hook(_TRAINING, "build_train_valid_test_datasets", "datasets are built once, and kept for recoveries"),
    Hook(
        _TRAINING,
        "build_train_valid_test_data_iterators",
        "its iterators are moved to the samples of the restored step",
        calls=("build_train_valid_test_data_loaders", "RerunDataIterator"),
    ),
    Hook(_TRAINING, "build_train_valid_test_data_loaders", "iterators begin at the samples of the restored step"),
    Hook(
        _TRAINING,
        "train",
        "a step is committed at its end, and training continues at args.iteration",
        parameters=("train_data_iterator", "config"),
        calls=("train_step", "training_log", "checkpoint_and_decide_exit"),
        sets=(
            "iteration = args.iteration",
            "num_floating_point_operations_so_far = args.num_floating_point_operations_so_far",
            "config.finalize_model_grads_func = finalize_model_grads",
        ),
    ),
    Hook(
        _TRAINING,
        "train_step",
        "the optimizer's step is taken inside it, and replicas divide its forward and backward passes",
        parameters=("optimizer", "data_iterator", "forward_backward_func"),
        calls=("forward_backward_func", "step"),
    ),
    Hook(_TRAINING, "get_forward_backward_func", "a replica that returns runs a step before it joins the others"),
    Hook(_TRAINING, "build_pretraining_data_loader", "a replica reads its own part of the training samples"),
    Hook(_TRAINING, "preprocess_common_state_dict", "a replica writes the last checkpoint if another one cannot"),
    Hook(
        _TRAINING,
        "training_log",
        "its arguments have the step's loss, and sums that a recovery restores",
        parameters=(
            *("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale", "report_memory_flag"),
            *("skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad", "is_first_iteration"),
        ),
    ),
    Hook(
        _TRAINING,
        "checkpoint_and_decide_exit",
        "the last call of an iteration: when it returns, the step is committed",
        parameters=(*_STATE, "iteration", "num_floating_point_operations_so_far"),
        calls=("save_checkpoint_and_time",),
    ),
    Hook(_TRAINING, "evaluate_and_print_results", "a phase of its own for deadlines and planned faults"),
    Hook(_TRAINING, "evaluate", "its result is the validation loss", parameters=("model",)),
    Hook(_TRAINING, "save_checkpoint", "a phase of its own for deadlines and planned faults"),
    Hook(_TRAINING, "maybe_finalize_async_save", "a pending checkpoint is finished before its step is committed"),
    Hook(
        _CHECKPOINTING,
        "save_checkpoint",
        "a replica writes the last checkpoint if another one cannot",
        parameters=(*_STATE, "iteration", "checkpointing_context", "preprocess_common_state_dict_fn"),
    ),
    Hook(
        _CHECKPOINTING,
        "load_checkpoint",
        "replicas load a checkpoint if all of them have lost their state",
        parameters=("ddp_model", "optimizer", "opt_param_scheduler", "checkpointing_context"),
        calls=("check_checkpoint_args",),
    ),
    Hook(_CHECKPOINTING, "check_checkpoint_args", "it gets the arguments of a checkpoint", ("checkpoint_args",)),
    Hook(_CHECKPOINTING, "checkpoint_exists", "without a checkpoint, replicas begin anew"),
    Hook("megatron/training/initialize.py", "initialize_megatron", "it starts without a GPU", ("allow_no_cuda",)),
    Hook(
        "megatron/training/initialize.py",
        "_initialize_distributed",
        "the worker takes its logical rank, and makes process groups that can be rebuilt",
        calls=("is_initialized",),
    ),
    Hook("megatron/training/initialize.py", "_compile_dependencies", "kernels are compiled for a GPU only"),
    Hook("megatron/training/global_vars.py", "_set_tensorboard_writer", "called once the rank is known", ("args",)),
    Hook("megatron/training/global_vars.py", "_set_wandb_writer", "called once the rank is known", ("args",)),
    Hook("megatron/training/global_vars.py", "_set_one_logger", "called once the rank is known", ("args",)),
)
"""All hooks."""


@dataclass(frozen=True)
class HookFinding:
    """What the check of one hook has found.

    Attributes:
        status: FITS, MISSING or CHANGED.
        differs: the difference from what the adapter needs, as a clause; "" if the hook fits.
    """

    hook: Hook
    status: str = FITS
    differs: str = ""


def check_tree(root: Path) -> list[HookFinding]:
    """Return one finding for each hook of the checkout in the folder ``root``, in order."""
    modules: dict[str, dict[str, ast.AST] | None] = {}
    for hook in HOOKS:
        if hook.file not in modules:
            modules[hook.file] = _symbols(root / hook.file)
    return [_check(hook, modules[hook.file]) for hook in HOOKS]


def problems(tree: CheckoutTree, findings: Sequence[HookFinding] | None = None) -> Iterator[Problem]:
    """Yield (problem, fix) for each function that the adapter relies on and that the checkout lacks or has changed.

    Args:
        findings: what :func:`check_tree` has returned for the checkout; None: this function calls it.
    """
    fix = f"use a checkout of {_releases()}, or leave the --ft flags out"
    for finding in check_tree(tree.root) if findings is None else findings:
        if finding.status != FITS:
            hook = finding.hook
            yield f"{tree.root / hook.file}: {hook.symbol} {finding.differs}, and {hook.why}", fix


def notice(tree: CheckoutTree) -> str | None:
    """Return a sentence about a checkout of a release that the adapter was never run with; None for the others."""
    if tree.release[:2] in RUN_WITH:
        return None
    return (
        f"Megatron-LM {tree.version} is not of a release that was protected before ({_releases()}); all "
        "functions that have to be wrapped are there, so that it is tried: compare its first losses with a run without "
        "--ft flags"
    )


def _releases() -> str:
    return " or ".join(f"core_v{major}.{minor}" for major, minor in RUN_WITH)


def split_index(function: ast.FunctionDef, name: str) -> int | None:
    """Return the index of the only statement of a function's body that calls ``name``; None unless there is exactly
    one.
    """
    found = [index for index, node in enumerate(function.body) if name in _called(node)]
    return found[0] if len(found) == 1 else None


def function_of(path: Path, symbol: str) -> ast.FunctionDef:
    """Return the syntax tree of a function that the check has found."""
    return (_symbols(path) or {})[symbol]


def _check(hook: Hook, symbols: dict[str, ast.AST] | None) -> HookFinding:
    if symbols is None:
        return HookFinding(hook, MISSING, "cannot be read")
    node = symbols.get(hook.symbol)
    if node is None:
        return HookFinding(hook, MISSING, "is missing")
    if not isinstance(node, ast.FunctionDef):  # imported from another module, whose source is not examined here
        return (
            HookFinding(hook)
            if not (hook.parameters or hook.calls)
            else HookFinding(hook, CHANGED, "is not defined here")
        )
    taken = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    lacks = [f"has no parameter {name}" for name in hook.parameters if name not in taken]
    called = _called(node)
    lacks += [f"does not call {name}" for name in hook.calls if name not in called]
    statements = {ast.unparse(each) for each in ast.walk(node) if isinstance(each, ast.Assign)}
    lacks += [f"does not set {text!r}" for text in hook.sets if text not in statements]
    if hook.splits_at and split_index(node, hook.splits_at) is None:
        lacks.append(f"does not call {hook.splits_at} in one statement of its body")
    return HookFinding(hook, CHANGED, " and ".join(lacks)) if lacks else HookFinding(hook)


def _symbols(path: Path) -> dict[str, ast.AST] | None:
    """Return {name: node that binds it} for the functions and imports of a module, None if it cannot be parsed."""
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    found: dict[str, ast.AST] = {}
    for statement in body:
        for node in ast.walk(statement) if not isinstance(statement, ast.FunctionDef | ast.ClassDef) else (statement,):
            if isinstance(node, ast.ImportFrom | ast.Import):
                found |= {alias.asname or alias.name: node for alias in node.names}
            elif isinstance(node, ast.FunctionDef):
                found[node.name] = node
    return found


def _called(node: ast.AST) -> set[str]:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {ast.unparse(function).rpartition(".")[2] for function in calls}


_REST, _RUN, _BEGIN = "_ft_rest", "_ft_run_rest", "_ft_begin"


def split(
    function: FunctionType,
    marker: str,
    begin: Callable[[dict[str, Any]], None],
    run: Callable[[Callable[[], None]], None],
) -> None:
    """Change ``function`` in place: pass its body, from the statement that calls ``marker`` to the end, to ``run``.

    The code keeps its file name and line numbers, so tracebacks refer to the checkout's file.

    Args:
        function: a function without closure, whose return value is not used.
        marker: name of a function that exactly one statement of the body calls.
        begin: called first, with the arguments by name.
        run: called with a function that executes the rest of the body, any number of times.
    """
    file = function.__code__.co_filename
    node = function_of(Path(file), function.__name__)
    index = split_index(node, marker)
    head, tail = node.body[:index], node.body[index:]
    names = _assigned(head) | {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    declared = {name for each in ast.walk(node) if isinstance(each, ast.Global) for name in each.names}
    tail = [each for each in tail if not isinstance(each, ast.Global)]
    nonlocals, global_names = sorted(_assigned(tail) & names - declared), sorted(_assigned(tail) & declared)
    rest = ast.parse(f"def {_REST}(): pass").body[0]
    # The rest becomes an inner function, so names that it assigns need a declaration to stay names of the whole.
    scope = [ast.Nonlocal(names=nonlocals)] if nonlocals else []
    scope += [ast.Global(names=global_names)] if global_names else []
    rest.body = [*scope, *tail]
    first, call = ast.parse(f"{_BEGIN}(dict(locals()))\n{_RUN}({_REST})").body
    for new in (rest, call, *scope):
        ast.copy_location(new, tail[0])
    ast.copy_location(first, head[0])
    node.body, node.decorator_list, node.returns = [first, *head, rest, call], [], None
    module = ast.fix_missing_locations(ast.Module(body=[node], type_ignores=[]))
    made: dict = {}
    exec(compile(module, file, "exec"), function.__globals__, made)
    function.__globals__[_BEGIN], function.__globals__[_RUN] = begin, run
    function.__code__ = made[function.__name__].__code__


def _assigned(statements: list[ast.stmt]) -> set[str]:
    """Return the names that statements bind, except those of inner functions and comprehensions."""
    found: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_Name(self, node):
            if isinstance(node.ctx, ast.Store | ast.Del):
                found.add(node.id)

        def visit_FunctionDef(self, node):
            found.add(node.name)

        def visit_Import(self, node):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)

        visit_ImportFrom = visit_Import

        def skip(self, node):
            pass

        visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = skip

    for statement in statements:
        Visitor().visit(statement)
    return found


_FLAG = re.compile(r"""['"](--[a-zA-Z][\w-]*)['"]""")
_PAIR = re.compile(r"""add_argument\(\s*['"]--([a-zA-Z][\w-]*)['"][^()]*BooleanOptionalAction""")
_FACTORY = "ArgumentGroupFactory"


@functools.cache
def own_flags(root: Path, script: Path) -> frozenset[str]:
    """Return the flags of a script of the checkout in the folder ``root``; the sources are read once in a process."""
    trainer = {file: _text(file) for file in sorted((root / "megatron" / "training").rglob("*.py"))}
    texts = (_text(script), *trainer.values())
    found = {"--help", *(flag for text in texts for flag in _FLAG.findall(text))}
    found |= {f"--no-{name}" for text in texts for name in _PAIR.findall(text)}
    made = [use for text in trainer.values() if f"{_FACTORY}(" in text for use in _uses(ast.parse(text))]
    if made:
        classes = _classes((*trainer.values(), *map(_text, sorted((root / "megatron" / "core").rglob("*.py")))))
        for name, excluded in made:
            found |= {flag for field, own in _fields(name, classes).items() if field not in excluded for flag in own}
    return frozenset(found)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _uses(module: ast.Module) -> Iterable[tuple[str, set[str]]]:
    """Yield (name of the dataclass, names of the fields left out) for each call of the factory in a module."""
    lists = {
        target.id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _FACTORY and node.args:
            given = next((word.value for word in node.keywords if word.arg == "exclude"), None)
            excluded = lists.get(given.id, given) if isinstance(given, ast.Name) else given
            yield ast.unparse(node.args[0]), _strings(excluded)


def _classes(texts: Iterable[str]) -> dict[str, ast.ClassDef]:
    """Return the dataclasses of some modules, by name."""
    modules = (ast.parse(text) for text in texts if "@dataclass" in text)
    return {
        node.name: node for module in modules for node in module.body if isinstance(node, ast.ClassDef) and node.body
    }


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, set[str]]:
    """Return the flags of each field of a dataclass and of the dataclasses from which it inherits."""
    if name not in classes:
        return {}
    found = {field: own for base in classes[name].bases for field, own in _fields(ast.unparse(base), classes).items()}
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _flags_of(node.target.id, node)
    return found


def _flags_of(field: str, node: ast.AnnAssign) -> set[str]:
    """Return the flags that the factory makes from a field."""
    given = {text for text in _strings(node.value) if text.startswith("--")}
    if given:  # metadata={"argparse_meta": {"arg_names": [...]}}
        return given
    default, name = node.value, field.replace("_", "-")
    if isinstance(default, ast.Call):
        words = {word.arg: word.value for word in default.keywords}
        if "init" in words and ast.unparse(words["init"]) == "False":
            return set()
        default = words.get("default")
    is_on = ast.unparse(node.annotation) == "bool" and default is not None and ast.unparse(default) != "False"
    return {f"--no-{name}", f"--disable-{name}"} if is_on else {f"--{name}"}


def _strings(node: ast.AST | None) -> set[str]:
    """Return all string literals below a node."""
    below = ast.walk(node) if node is not None else ()
    return {each.value for each in below if isinstance(each, ast.Constant) and isinstance(each.value, str)}
