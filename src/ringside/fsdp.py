"""Shared-memory collectives for FSDP2 (`fully_shard`): the public path of `ringside.pytorch.fsdp`."""

from ringside.pytorch.fsdp import SharedAllGather, SharedReduceScatter

__all__ = ["SharedAllGather", "SharedReduceScatter"]
