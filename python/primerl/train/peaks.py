"""What devices can do: dense TFLOP/s in bf16 and in fp32 (without TF32), from their vendors' data sheets."""

from __future__ import annotations

import re

import torch

PEAKS: dict[str, tuple[float | None, float | None]] = {
    # Whole words of the device's name, one after another -> bf16, fp32; None where it is not known.
    "GB300": (2500.0, None),
    "GB200": (2500.0, 80.0),
    "B300": (2250.0, None),
    "B200": (2250.0, 75.0),
    "GH200": (989.0, 67.0),
    "H200 NVL": (835.0, 60.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H800 PCIe": (756.0, 51.0),
    "H800": (989.0, 67.0),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10G": (70.0, 31.2),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "RTX PRO 6000 Blackwell Max": (None, None),  # Max-Q: lower clocks
    "RTX PRO 6000 Blackwell": (500.0, 120.0),
    "RTX 6000 Ada": (364.2, 91.1),
    "RTX A6000": (154.8, 38.7),
    "RTX 5090 D": (None, None),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090 D": (None, None),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090 Ti": (80.0, 40.0),
    "RTX 3090": (71.0, 35.6),
    # In fp16: they have no bf16, which is computed there in fp32.
    "V100S": (130.0, 16.4),
    "V100 SXM2": (125.0, 15.7),
    "V100 SXM3": (None, None),
    "V100": (112.0, 14.0),
    "T4": (65.0, 8.1),
    "MI355X": (2516.6, 157.3),
    "MI325X": (1307.4, 163.4),
    "MI300X": (1307.4, 163.4),
    # Of one of the card's two dies, each of which is a device.
    "MI250X": (191.5, 23.9),
    "MI250": (181.0, 22.6),
    "MI210": (181.0, 22.6),
}
"""In an order in which the first match is the device."""

PARTS = {"MIG", "Laptop"}
"""Words of names of devices that are a part of the one in the table, or weaker."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of the device; None of a CPU and of one that is not in the table."""
    if device.type != "cuda":
        return None
    half, single = peak_of(torch.cuda.get_device_name(device))
    peak = single if dtype == torch.float32 else half
    return None if peak is None else 1e12 * peak


def peak_of(name: str) -> tuple[float | None, float | None]:
    """TFLOP/s of the device of this name in bf16 and in fp32."""
    words = re.findall(r"[A-Za-z0-9]+", name)
    if not PARTS.intersection(words):
        for known, peaks in PEAKS.items():
            wanted = known.split()
            if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
                return peaks
    return None, None
