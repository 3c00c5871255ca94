"""Event files as TensorBoard's own reader reads them."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events_in(folder: str | Path) -> EventAccumulator:
    """All that a run's folder has: without sizes, TensorBoard would read a sample."""
    everything = {"scalars": 0, "tensors": 0, "histograms": 0, "images": 0}
    reader = EventAccumulator(str(folder), size_guidance=everything)
    reader.Reload()
    return reader


def texts_in(folder: str | Path, tag: str) -> list[tuple[float, list[str]]]:
    """Times and strings of the texts whose tag begins so."""
    reader = events_in(folder)
    return [
        (event.wall_time, [cell.decode() for cell in event.tensor_proto.string_val])
        for one in reader.Tags()["tensors"]
        if one.startswith(tag)
        for event in reader.Tensors(one)
    ]
