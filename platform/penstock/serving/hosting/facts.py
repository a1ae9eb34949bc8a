"""What a host is: told once when a worker starts, shown beside its figures."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from penstock.config import config


def host_facts() -> dict[str, Any]:
    """Processor, memory, devices and versions. Imports torch: for the worker process alone."""
    import torch

    devices = [
        {
            "name": torch.cuda.get_device_name(index),
            "memory_bytes": torch.cuda.get_device_properties(index).total_memory,
        }
        for index in range(torch.cuda.device_count())
    ]
    return {
        "processor": processor_name(),
        "cores": usable_cores(),
        "threads": config().threads or usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "devices": devices,
        "system": f"{platform.system()} {platform.release()}",
        "python": sys.version.split()[0],
        "torch": version("torch"),
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
