"""The state of a process that belongs to its user, as text that can be compared before and after."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import locale
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TORCHS_HOOKS = {
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    "torch.nn.modules.module": (
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
        "_global_buffer_registration_hooks",
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
    ),
}


def users_state() -> dict[str, str]:
    """Return the state of this process that memlog must not change, by name."""
    state = {**_interpreter(), **_logging_and_warnings(), **_signals(), **_random()}
    for of_library in (_torch, _mlflow, _wandb):
        state |= of_library()
    return state


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = sorted(before.keys() | after.keys())
    return {
        name: (before.get(name, "-"), after.get(name, "-"))
        for name in names
        if before.get(name) != after.get(name)
    }


def _interpreter() -> dict[str, str]:
    state = {
        "sys.excepthook": repr(sys.excepthook),
        "sys.unraisablehook": repr(sys.unraisablehook),
        "sys.displayhook": repr(sys.displayhook),
        "threading.excepthook": repr(threading.excepthook),
        "sys.meta_path": repr(sys.meta_path),
        "sys.path_hooks": repr(sys.path_hooks),
        "sys.path": repr(sys.path),
        "sys.argv": repr(sys.argv),
        "sys.stdout and stderr": f"{sys.stdout!r} {sys.stderr!r}",
        "trace and profile": f"{sys.gettrace()} {sys.getprofile()}",
        "limits": f"{sys.getrecursionlimit()} {sys.getswitchinterval()}",
        "faulthandler": repr(faulthandler.is_enabled()),
        "gc": f"{gc.isenabled()} {gc.get_threshold()} {gc.callbacks} {gc.get_debug()}",
        "folder": str(Path.cwd()),
        "niceness": str(os.nice(0)),
        "umask": str(_umask()),
        "locale": repr(locale.setlocale(locale.LC_ALL)),
        "time zone": repr(time.tzname),
        "threads": str(sorted(thread.name for thread in threading.enumerate())),
    }
    return state | {f"environment {name}": value for name, value in os.environ.items()}


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _logging_and_warnings() -> dict[str, str]:
    root = logging.root
    return {
        "root logger": f"{root.level} {root.handlers} {root.filters} {root.disabled}",
        "logging": f"{root.manager.disable} {logging.raiseExceptions} {logging.lastResort} "
        f"{logging.getLoggerClass()} {logging.getLogRecordFactory()}",
        "warning filters": repr(warnings.filters),
        "warnings": repr((warnings.showwarning, warnings.formatwarning)),
    }


def _signals() -> dict[str, str]:
    state = {
        f"handler of {number}": repr(signal.getsignal(number)) for number in signal.valid_signals()
    }
    return {
        **state,
        "blocked signals": repr(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer": repr(signal.getitimer(signal.ITIMER_REAL)),
        "wakeup": repr(_wakeup_fd()),
    }


def _wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


def _random() -> dict[str, str]:
    state = {"random": _digest(random.getstate())}
    if numpy := sys.modules.get("numpy"):
        state["numpy.random"] = _digest(numpy.random.get_state(legacy=False))
        state["numpy.printoptions"] = repr(numpy.get_printoptions())
        state["numpy.errors"] = repr(numpy.geterr())
    return state


def _torch() -> dict[str, str]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    # torch 2.6 has no function that returns this.
    saved_tensors = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", bool)
    state = {
        "torch.random": _digest(torch.get_rng_state().tolist()),
        "torch.dtype": repr(torch.get_default_dtype()),
        "torch.device": repr(torch.get_default_device()),
        "torch.threads": f"{torch.get_num_threads()} {torch.get_num_interop_threads()}",
        "torch.grad": f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
        "torch.deterministic": repr(torch.are_deterministic_algorithms_enabled()),
        "torch.anomalies": repr(torch.is_anomaly_enabled()),
        "torch.saved tensors": repr(saved_tensors(True)),
        "torch.dispatch": str(torch._C._len_torch_dispatch_stack()),
        "torch.functions": str(torch._C._len_torch_function_stack()),
    }
    for module, names in TORCHS_HOOKS.items():
        for name in names:
            state[f"{module}.{name}"] = repr(dict(getattr(sys.modules[module], name)))
    if torch.cuda.is_available():
        state["cuda.random"] = _digest(torch.cuda.get_rng_state().tolist())
        state["cuda.history"] = repr(torch._C._cuda_isHistoryEnabled())
        state["cuda.device"] = repr(torch.cuda.current_device())
    return state


def _mlflow() -> dict[str, str]:
    mlflow: Any = sys.modules.get("mlflow")
    if mlflow is None:
        return {}
    run = mlflow.active_run()
    return {
        "mlflow.run": repr(run and run.info.run_id),
        "mlflow.uri": f"{mlflow.get_tracking_uri()} {mlflow.get_registry_uri()}",
    }


def _wandb() -> dict[str, str]:
    wandb: Any = sys.modules.get("wandb")
    if wandb is None:
        return {}
    return {"wandb.run": repr(wandb.run and wandb.run.id)}


def _digest(value: object) -> str:
    return hashlib.blake2s(repr(value).encode()).hexdigest()
