"""GPUs and CPU hosts by name, from vendors' data sheets. Read by `inputs`; prices are defaults that a plan overrides.

Invariant: FLOP/s are dense (without sparsity), bytes are decimal, link rates are one direction of one GPU.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from agentrl.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float
    """bf16 FLOP/s, dense."""
    memory_bytes: float
    memory_bytes_per_s: float
    peer_bytes_per_s: float
    """To the other GPUs of its node (NVLink or PCIe), one direction."""
    network_bytes_per_s: float
    """Its share of the node's network, one direction."""
    usd_per_hour: float
    """Illustrative cloud price; a plan's own price replaces it."""
    source: str


@dataclass(frozen=True)
class CpuHost:
    name: str
    cores: int
    usd_per_hour: float
    source: str


def _nvidia(name: str) -> str:
    return f"NVIDIA {name} data sheet"


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40GB", 312e12, 40e9, 1.555e12, 300e9, 25e9, 1.30, _nvidia("A100")),
        Gpu("A100", 312e12, 80e9, 2.039e12, 300e9, 25e9, 1.80, _nvidia("A100")),
        Gpu("A800", 312e12, 80e9, 2.039e12, 200e9, 25e9, 1.80, _nvidia("A800")),
        Gpu("H100", 989e12, 80e9, 3.35e12, 450e9, 50e9, 2.80, _nvidia("H100 SXM")),
        Gpu("H800", 989e12, 80e9, 3.35e12, 200e9, 50e9, 2.80, _nvidia("H800")),
        Gpu("H20", 148e12, 96e9, 4.0e12, 450e9, 50e9, 1.60, _nvidia("H20")),
        Gpu("H200", 989e12, 141e9, 4.8e12, 450e9, 50e9, 3.50, _nvidia("H200 SXM")),
        Gpu("B200", 2250e12, 180e9, 7.7e12, 900e9, 50e9, 5.50, _nvidia("HGX B200")),
        Gpu("B300", 2250e12, 288e9, 8.0e12, 900e9, 100e9, 7.00, _nvidia("DGX B300")),
        Gpu("GB200", 2500e12, 186e9, 8.0e12, 900e9, 50e9, 6.50, _nvidia("GB200 NVL72")),
        Gpu("L4", 121e12, 24e9, 300e9, 32e9, 12.5e9, 0.70, _nvidia("L4")),
        Gpu("L40S", 362e12, 48e9, 864e9, 32e9, 25e9, 1.20, _nvidia("L40S")),
        Gpu("RTX-4090", 165e12, 24e9, 1.008e12, 32e9, 12.5e9, 0.45, "NVIDIA Ada GPU architecture white paper"),
        Gpu("MI300X", 1307e12, 192e9, 5.3e12, 448e9, 50e9, 2.50, "AMD Instinct MI300X data sheet"),
    )
}

CPU_HOSTS: Mapping[str, CpuHost] = {
    host.name: host
    for host in (
        CpuHost("cpu-80", 80, 4.00, "a two-socket server of 80 cores at $0.05 a core hour"),
        CpuHost("c7i.24xlarge", 96, 4.284, "AWS on-demand list price, us-east-1"),
        CpuHost("c7i.48xlarge", 192, 8.568, "AWS on-demand list price, us-east-1"),
        CpuHost("m7i.48xlarge", 192, 9.677, "AWS on-demand list price, us-east-1"),
        CpuHost("c7a.48xlarge", 192, 9.853, "AWS on-demand list price, us-east-1"),
    )
}


def gpu_named(name: str, field: str = "cluster.gpu") -> Gpu:
    """A GPU of the table, whatever the case. ConfigError names the field and the nearest valid choice."""
    return _named(GPUS, name, field, "GPU")


def cpu_host_named(name: str, field: str = "cluster.cpu_host") -> CpuHost:
    return _named(CPU_HOSTS, name, field, "CPU host")


def _named(table: Mapping[str, T], name: str, field: str, what: str) -> T:
    folded = {key.lower(): value for key, value in table.items()}
    if name.lower() in folded:
        return folded[name.lower()]
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.0)
    nearest = next(key for key in table if key.lower() == near[0])
    raise ConfigError(f"{field}: unknown {what} {name!r}; nearest is {nearest!r}, known are {', '.join(table)}")
