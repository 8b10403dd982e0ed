"""Whether a wheel works where it was installed; cibuildwheel runs this in an environment of each
platform's own.

One block of NVFP4 by hand: amax 12 becomes a global scale of 12 / 2688, the block scale 448, and
every code 7 (6.0) or 0.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import fp4convert

x = np.array([[12.0, 0.0] * 8], np.float32)
q = fp4convert.quantize_tensor(x, format="nvfp4", scale_rule="amax")
assert bytes(q.packed) == b"\x07" * 8, bytes(q.packed)
assert (bytes(q.block_scales), q.global_scale) == (
    b"\x7e",
    float(np.float32(12) / np.float32(2688)),
)
assert np.array_equal(fp4convert.dequantize_tensor(q), x)

with tempfile.TemporaryDirectory() as folder:
    source, made = Path(folder) / "source.safetensors", Path(folder) / "made"
    save_file({"layer.o_proj.weight": np.repeat(x, 32, 1)}, source)
    command = str(Path(sys.executable).with_name("fp4convert"))
    subprocess.run([command, "quantize", source, "--format", "mxfp4", "-o", made], check=True)
    subprocess.run([command, "verify", made, "--source", source, "--min-sqnr", "100"], check=True)
    (file,) = made.glob("*.safetensors")
    assert set(load_file(file)["layer.o_proj.weight_packed"].flat) == {0x77, 0x00}
