"""What becomes of files that a run keeps: they are brought back (`pull`) and shown (`open`).

Whatever comes in here is untrusted, the names that a tracker tells as well as what is in the files.
"""
