"""Event files as TensorBoard's own reader reads them."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events_in(folder: str | Path) -> EventAccumulator:
    """Return all data in a run's folder. By default, TensorBoard's reader drops a part of many points."""
    everything = {"scalars": 0, "tensors": 0, "histograms": 0, "images": 0}
    reader = EventAccumulator(str(folder), size_guidance=everything)
    reader.Reload()
    return reader


def texts_in(folder: str | Path, tag: str) -> list[tuple[float, list[str]]]:
    """Return the times and strings of the texts whose tag begins with ``tag``."""
    reader = events_in(folder)
    return [
        (event.wall_time, [cell.decode() for cell in event.tensor_proto.string_val])
        for one in reader.Tags()["tensors"]
        if one.startswith(tag)
        for event in reader.Tensors(one)
    ]
