"""Checkpoints on disk: whole tensors in plain safetensors files, whatever mesh wrote or reads them.

Nothing here knows of Keras, of a framework or of a mesh: bytes of named tensors, and where they stand in files.

- tensors: what a checkpoint holds, and which file has which tensor.
- assets: files of layers, as tensors of bytes.
- regions: the contiguous runs of bytes of a region of a tensor.
- writing: the part of a step that a process writes, and how all parts are joined.
- directory: steps of a directory, and how one comes to count; in folders and in object stores (remote).
- reading: any region of any tensor, with its checksums.
- background: writing in a process of its own, while training goes on.
- command: `unidist checkpoint`.
"""
