"""Snapshots of a CUDA allocator, made up in the form that torch 2.11 to 2.13 write."""

from typing import Any

MIB = 1024**2
BASE = 0x7F00_0000_0000


def frames(*functions: str) -> list[dict[str, Any]]:
    """Return a stack in torch's order, innermost first. The arguments are outermost first."""
    return [
        {"name": name, "filename": f"/src/{name}.py", "line": number}
        for number, name in enumerate(functions, 1)
    ][::-1]


def block(address: int, size: int, state: str, **more: Any) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size if state == "active_allocated" else 0,
        "state": state,
        "frames": [],
        **more,
    }


def segment(*blocks: dict[str, Any], device: int = 0, **more: Any) -> dict[str, Any]:
    live = sum(one["size"] for one in blocks if one["state"] == "active_allocated")
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(one["size"] for one in blocks),
        "allocated_size": live,
        "active_size": live,
        "requested_size": live,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
        **more,
    }


def entry(action: str, time_us: int, **values: Any) -> dict[str, Any]:
    return {
        "action": action,
        "stream": 0,
        "time_us": time_us,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
        "frames": [],
        **values,
    }


class History:
    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def say(self, action: str, **values: Any) -> None:
        self.entries.append(entry(action, 1_000_000 + 5 * len(self.entries), **values))

    def alloc(self, address: int, size: int, note: str = "", **more: Any) -> None:
        self.say("alloc", addr=address, size=size, user_metadata=note, **more)

    def free(self, address: int, size: int, note: str = "") -> None:
        self.say("free_requested", addr=address, size=size, user_metadata=note)
        self.say("free_completed", addr=address, size=size, user_metadata=note)


def snapshot(*segments: dict[str, Any], history: Any = ()) -> dict[str, Any]:
    return {
        "segments": list(segments),
        "device_traces": [list(history)],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [],
    }


def training() -> dict[str, Any]:
    """Return the snapshot of a training step. Its history contains the free of an activation."""
    model, layer, head = frames("main", "model"), frames("main", "forward"), frames("main", "head")
    history = History()
    history.say("segment_alloc", addr=BASE, size=64 * MIB)
    history.alloc(BASE + 8 * MIB, 16 * MIB, frames=layer)
    history.alloc(BASE + 24 * MIB, 4 * MIB, frames=head)
    history.free(BASE + 8 * MIB, 16 * MIB)
    history.say("snapshot", addr=0, size=0)
    history.say("oom", size=2**31, device_free=12345)
    return snapshot(
        segment(
            block(BASE, 8 * MIB, "active_allocated", frames=model),
            block(BASE + 8 * MIB, 16 * MIB, "inactive"),
            block(BASE + 24 * MIB, 4 * MIB, "active_allocated", frames=head),
            block(BASE + 28 * MIB, 1 * MIB, "active_pending_free", frames=layer),
            block(BASE + 29 * MIB, 35 * MIB, "inactive"),
        ),
        history=history.entries,
    )
