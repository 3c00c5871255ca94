"""Download a run's artifacts (`memlog pull`) and show them (`memlog open`).

All input is untrusted: the names that a tracker lists, and the files' content.
"""
