"""The plan as a table."""

from __future__ import annotations

from typing import Any

from experiments.plan.chips import GIB
from experiments.plan.planning import PROGRAMS


def table(plan: dict[str, Any]) -> str:
    """Lines for a terminal of 120 columns."""
    topology = plan["topology"]
    alias = f" ({topology['accelerator_type']})" if topology["accelerator_type"] else ""
    lines = [
        f"{topology['name']}{alias}: {topology['chips']} chips on {topology['hosts']} host(s), {topology['devices']} devices of "
        f"{topology['hbm_bytes'] / GIB:.1f} GiB",
        f"a device: {topology['peak_flops'] / 1e12:.0f} TFLOP/s, memory {topology['hbm_bandwidth'] / 1e9:.0f} GB/s, links "
        f"{topology['link_bandwidth'] / 1e9:.0f} GB/s ({topology['source']})",
        "mesh " + _mesh(plan["mesh"]) + "; sampling " + _mesh(plan["sampling_mesh"]),
    ]
    sizes = plan["sizes"]
    lines.append(
        f"update: {sizes['rows']} rows x {sizes['tokens_per_row']:,} tokens, {sizes['micro_rows']} rows at a time, attention by "
        f"{plan['attention']}; "
        f"decode: {sizes['decode_rows']} rows of {sizes['prompts']} prompts, "
        f"{plan['cache_bytes_of_row'] / 2**20:,.1f} MiB of cache a row on each device that holds it"
    )
    if plan["estimate"]:
        lines.append("ESTIMATE: arithmetic only, nothing was compiled; temporaries are a rule of thumb")
    lines += [
        "",
        f"{'GiB per device':<12}{'arguments':>12}{'outputs':>10}{'temp':>10}{'resident':>10}{'needed':>10}{'of':>8}  fits",
    ]
    shown = [name for name in PROGRAMS if name in plan]
    for name in shown:
        entry = plan[name]
        cells = [_gib(entry[f"{key}_bytes"]) for key in ("argument", "output", "temp", "resident", "needed", "hbm")]
        widths = (14, 10, 10, 10, 10, 8)
        row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(
            f"{name:<12}{row}  {'yes' if entry['fits'] else 'NO, ' + _gib(entry['missing_bytes']) + ' GiB too much'}"
        )
    lines += [
        "",
        f"{'at least, ms':<12}{'compute':>12}{'memory':>10}{'links':>10}   PFLOP per device, bytes sent by mesh axis",
    ]
    for name in shown:
        entry = plan[name]
        times = [entry["roofline"][f"{part}_seconds"] * 1e3 for part in ("compute", "memory", "interconnect")]
        sent = ", ".join(f"{axis} {_bytes(size)}" for axis, size in entry.get("collective_bytes", {}).items())
        per = " (each token)" if name == "decode" else ""
        lines.append(
            f"{name:<12}{times[0]:>12,.1f}{times[1]:>10,.1f}{times[2]:>10,.1f}   {entry['flops'] / 1e15:,.4g}; {sent or '-'}{per}"
        )
    if "decode" in plan:
        lines += ["", f"decode slots that fit: {plan['decode']['slots']:,}"]
    if not plan["fits"]:
        lines.append(f"does not fit: {plan['missing_bytes'] / GIB:.2f} GiB per device are missing")
        if plan.get("suggestion"):
            flags = " ".join(f"--{name}={value}" for name, value in plan["suggestion"].items())
            lines.append(f"fits by arithmetic: {flags}")
        else:
            lines.append(
                "no mesh of these devices fits by arithmetic: a larger topology, or shorter responses, is needed"
            )
    return "\n".join(lines)


def _mesh(shape: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in shape.items())


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:,.2f}"


def _bytes(value: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"
