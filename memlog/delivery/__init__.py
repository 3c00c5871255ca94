"""From the journal to the trackers: the helper process and its couriers.

The trainer's side: `launcher` starts the helper and tells it what only the trainer knows, `binder`
notices the runs that the user opens. The helper's side: `helper`, which samples the process tree
(`sampler`) and holds a `loop` around each `courier`. ``memlog sync`` is another holder of couriers; how
far each got stands in `state`, by which `retention` knows what may go from a journal that is too large.
"""
